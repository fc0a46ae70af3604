//! Lanes, arrows and marks, as SVG.

use drumline_schedule::step::{Buffer, Loc, Rank, Span};
use drumline_schedule::{Counts, MemoryUse, Schedule, Topology};

use super::events::{Event, Kind};
use super::legend::legend;
use super::marks::{
    LANE, arrow, beside, bus, combine_mark, copy_mark, diamond, reach, width_beside,
};
use super::story::tell;
use crate::check::{CheckError, check_form};

// All lengths in pixels.
const ROW: usize = 29;
const LEFT: usize = 140;
const HEAD: usize = 118;
const PADDING: usize = 6;
const ROUND_GAP: usize = 12;
const LEGEND: usize = 24;

const STYLE: &str = "\
<style>
  text { font: 12px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #57606a }
  .card { fill: #ffffff; stroke: #d0d7de }
  .title { font-size: 17px; font-weight: 600; fill: #1f2328 }
  .round { fill: #f3f5f8 }
  .head { fill: #e4e9f0 }
  .rank { fill: #1f2328; text-anchor: middle }
  .lane { stroke: #c3cad3; stroke-width: 1.5 }
  .wire { stroke: #2f6fde; stroke-width: 1.8; fill: none }
  .dot, .tip { fill: #2f6fde }
  .hollow { fill: #ffffff; stroke: #2f6fde; stroke-width: 1.5 }
  .span { font-size: 11px; text-anchor: middle }
  .mark { fill: #ffffff; stroke: #c2590a; stroke-width: 1.8 }
  .plus { stroke: #c2590a; stroke-width: 1.8 }
  .finish { fill: #c2590a; stroke: #c2590a; stroke-width: 1.8 }
  .finish-plus { stroke: #ffffff; stroke-width: 1.8 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9aa4b0 }
    .card { fill: #0f141b; stroke: #30363d }
    .title, .rank { fill: #e6edf3 }
    .round { fill: #171e27 }
    .head { fill: #263040 }
    .lane { stroke: #3d4753 }
    .wire { stroke: #6ea8ff }
    .dot, .tip { fill: #6ea8ff }
    .hollow { fill: #0f141b; stroke: #6ea8ff }
    .mark { fill: #0f141b; stroke: #f0964a }
    .plus { stroke: #f0964a }
    .finish { fill: #f0964a; stroke: #f0964a }
    .finish-plus { stroke: #0f141b }
  }
</style>";

/// Added where ranks share memory.
const SHARED_STYLE: &str = "\
<style>
  .reach { stroke: #1a7f64; stroke-width: 1.8; stroke-dasharray: 5 3; fill: none }
  .read, .written, .post { fill: #1a7f64 }
  .ring { stroke: #1a7f64; stroke-width: 1.8; fill: none }
  .wait { fill: #ffffff; stroke: #1a7f64; stroke-width: 1.8 }
  .host { stroke: #57606a; stroke-width: 3 }
  @media (prefers-color-scheme: dark) {
    .reach, .ring { stroke: #4cc2a0 }
    .read, .written, .post { fill: #4cc2a0 }
    .wait { fill: #0f141b; stroke: #4cc2a0 }
    .host { stroke: #9aa4b0 }
  }
</style>";

/// The schedules of all ranks, in order, as an SVG document. It follows the reader's light or
/// dark colour scheme.
///
/// # Errors
///
/// When the schedules break a [`Rule`](crate::check::Rule), or do not run to their end.
pub fn svg(topology: &Topology, schedules: &[Schedule]) -> Result<String, CheckError> {
    let first = check_form(topology, schedules)?;
    let (events, rows) = tell(topology, schedules)?;
    Ok(render(topology, first, schedules, &events, &rows))
}

fn render(
    topology: &Topology,
    first: &Schedule,
    schedules: &[Schedule],
    events: &[Event],
    rows: &[usize],
) -> String {
    let lane = |rank: Rank| LEFT + rank * LANE;
    let rounds: Vec<Round> = rounds(events, rows);
    // There are gaps between rounds, so the height of a row depends on its round.
    let top = |band: usize, row: usize| HEAD + (ROUND_GAP + 2 * PADDING) * band + ROW * row;
    let body = top(rounds.len(), rounds.last().map_or(0, |round| round.end)) + ROUND_GAP;
    // Narrow drawings still hold the title and the legend, and the last lane the longest of its texts.
    let ends = events.iter().filter_map(|event| {
        let (rank, text) = text_beside(topology, &event.kind)?;
        Some(lane(rank) + width_beside(&text) + 12)
    });
    let width = ends.chain([lane(schedules.len()) - LANE / 2 + 20, 620]).max().unwrap_or(0);
    let mut explained = vec![];
    let height = legend(body + LEGEND, width, events, &mut explained) + 32;

    let mut svg = vec![
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">"#
        ),
        match first.memory {
            MemoryUse::Private => STYLE.to_owned(),
            MemoryUse::Staged | MemoryUse::Registered => format!("{STYLE}\n{SHARED_STYLE}"),
        },
        format!(
            r#"<rect class="card" x="0.5" y="0.5" width="{}" height="{}" rx="10"/>"#,
            width - 1,
            height - 1
        ),
        format!(r#"<text class="title" x="24" y="36">{}</text>"#, title(first)),
        format!(r#"<text x="24" y="58">{}</text>"#, price(schedules, events)),
    ];
    for (band, round) in rounds.iter().enumerate() {
        let top = top(band, round.start) + ROUND_GAP;
        let name = match round.number {
            0 => "start".to_owned(),
            number => format!("round {number}"),
        };
        svg.push(format!(
            r#"<rect class="round" x="12" y="{top}" width="{}" height="{}" rx="6"/>"#,
            width - 24,
            ROW * (round.end - round.start) + 2 * PADDING
        ));
        svg.push(format!(r#"<text x="24" y="{}">{name}</text>"#, top + PADDING + ROW / 2 + 4));
    }
    for rank in 0..schedules.len() {
        let x = lane(rank);
        svg.push(format!(r#"<path class="lane" d="M{x} {HEAD}V{body}"/>"#));
        svg.push(format!(
            r#"<rect class="head" x="{}" y="{}" width="76" height="26" rx="13"/>"#,
            x - 38,
            HEAD - 30
        ));
        svg.push(format!(r#"<text class="rank" x="{x}" y="{}">rank {rank}</text>"#, HEAD - 13));
    }
    hosts(topology, &lane, &mut svg);
    for (event, &row) in events.iter().zip(rows) {
        let band = rounds.iter().position(|round| row < round.end).unwrap_or(0);
        let y = top(band, row) + ROUND_GAP + PADDING + ROW / 2;
        let mut above = 0;
        match &event.kind {
            &Kind::Message { from, to, src, dst, combine } => {
                arrow(lane(from), lane(to), y, label(src), dst, combine, &mut svg);
            }
            Kind::Combine { rank, finish, reads, writes, .. } => {
                let lanes = |ranks: &[Rank]| -> Vec<usize> {
                    ranks.iter().map(|&rank| lane(rank)).collect()
                };
                bus(lane(*rank), y, &lanes(reads), &lanes(writes), &mut svg);
                combine_mark(lane(*rank), y, *finish, &mut svg);
                // Above the line, if there is one.
                above = if reads.is_empty() && writes.is_empty() { 0 } else { 9 };
            }
            Kind::Copy { rank, .. } => copy_mark(lane(*rank), y, &mut svg),
            Kind::Reach { rank, dst, src } => {
                let from = lane(src.peer.unwrap_or(*rank));
                let to = lane(dst.peer.unwrap_or(*rank));
                reach(from, to, y, label(*dst), &mut svg);
            }
            Kind::Post { rank } => diamond("post", lane(*rank), y, &mut svg),
            Kind::Wait { rank, .. } => diamond("wait", lane(*rank), y, &mut svg),
        }
        if let Some((rank, text)) = text_beside(topology, &event.kind) {
            beside(lane(rank), y - above, text, &mut svg);
        }
    }
    svg.append(&mut explained);
    svg.push("</svg>\n".to_owned());
    svg.join("\n")
}

/// What stands beside the mark of an event, and on which lane.
fn text_beside(topology: &Topology, kind: &Kind) -> Option<(Rank, String)> {
    match kind {
        Kind::Combine { rank, dst, .. } | Kind::Copy { rank, dst } => Some((*rank, label(*dst))),
        Kind::Post { rank } => Some((*rank, "post".to_owned())),
        Kind::Wait { rank, peers } => {
            let others = topology.neighbours(*rank).len() - 1;
            let whom = match peers.len() == others && others > 1 {
                true => "all".to_owned(),
                false => peers.iter().map(Rank::to_string).collect::<Vec<_>>().join(" "),
            };
            Some((*rank, format!("for {whom}")))
        }
        Kind::Message { .. } | Kind::Reach { .. } => None,
    }
}

struct Round {
    number: usize,
    /// The rows `start..end` of the round.
    start: usize,
    end: usize,
}

fn rounds(events: &[Event], rows: &[usize]) -> Vec<Round> {
    let mut rounds: Vec<Round> = vec![];
    for (event, &row) in events.iter().zip(rows) {
        match rounds.last_mut() {
            Some(round) if round.number == event.round => round.end = round.end.max(row + 1),
            last => {
                let start = last.map_or(0, |round| round.end);
                rounds.push(Round { number: event.round, start, end: row + 1 });
            }
        }
    }
    rounds
}

fn title(schedule: &Schedule) -> String {
    let Schedule { collective, algorithm, world_size, root, .. } = schedule;
    let root = if collective.has_root() { format!(", root {root}") } else { String::new() };
    format!("{collective} {algorithm}: {world_size} ranks{root}")
}

fn price(schedules: &[Schedule], events: &[Event]) -> String {
    // A length that the usual numbers of blocks divide.
    let counts = Counts::Even(schedules.len() * 5_040);
    let data = Loc::data(Span::WHOLE);
    let len = schedules.iter().map(|schedule| schedule.resolve(data, &counts).len()).max();
    let len = len.unwrap_or(0).max(1);
    let sent: Vec<(usize, usize)> =
        schedules.iter().map(|schedule| schedule.sent(&counts)).collect();
    let rounds = events.last().map_or(0, |event| event.round);
    let messages = sent.iter().map(|&(messages, _)| messages).max().unwrap_or(0);
    let elements = sent.iter().map(|&(_, elements)| elements).max().unwrap_or(0);
    let shared = schedules.iter().map(|schedule| schedule.shared(&counts)).max().unwrap_or(0);
    let times = |elements: usize| {
        let share = format!("{:.2}", elements as f64 / len as f64);
        share.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    let mut price = vec![format!("rounds: {rounds}")];
    if messages > 0 || schedules.iter().all(|schedule| schedule.posts() == 0) {
        price.push(format!("messages per rank: {messages}"));
        price.push(format!("sent per rank: {} × the data", times(elements)));
    }
    if shared > 0 {
        price.push(format!("at peers: {} ×", times(shared)));
    }
    price.join(" · ")
}

/// A place, as text; empty for the whole data.
fn label(loc: Loc) -> String {
    match (Loc { peer: None, ..loc }) {
        Loc { peer: None, buffer: Buffer::Data, span: Span::WHOLE } => String::new(),
        Loc { peer: None, buffer: Buffer::Data, span: Span { count: 0, .. } } => String::new(),
        Loc { peer: None, buffer: Buffer::Data, span } => span.to_string(),
        loc => loc.to_string(),
    }
}

/// A bar above the ranks of each host, unless all ranks share one host or none do.
fn hosts(topology: &Topology, lane: &dyn Fn(Rank) -> usize, svg: &mut Vec<String>) {
    let hosts = topology.ranks_by_host();
    if hosts.len() == 1 || hosts.len() == topology.world_size {
        return;
    }
    let ranks: Vec<Rank> = (0..topology.world_size).collect();
    for run in ranks.chunk_by(|&a, &b| topology.host_of(a) == topology.host_of(b)) {
        let (first, last) = (lane(run[0]), lane(run[run.len() - 1]));
        let (y, host) = (HEAD - 36, topology.host_of(run[0]));
        svg.push(format!(r#"<path class="host" d="M{} {y}H{}"/>"#, first - 38, last + 38));
        let x = (first + last) / 2;
        svg.push(format!(r#"<text class="span" x="{x}" y="{}">host {host}</text>"#, y - 5));
    }
}
