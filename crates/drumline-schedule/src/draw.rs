//! Draws an algorithm: a lane for every rank, time downwards, an arrow for every message.
//!
//! An arrow stands in the round in which its receiver takes the message: as many rounds down as
//! there are messages in the longest chain up to then. Flushes are not drawn.
//!
//! ```
//! use drumline_schedule::{Algorithm, Collective, Topology, draw};
//!
//! let bruck = Algorithm::find(Collective::AllGather, "bruck")?;
//! let svg = draw::svg(&bruck.schedules(&Topology::flat(5), 0)?)?;
//! assert!(svg.starts_with("<svg"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::HashSet;

use crate::algorithm::Collective;
use crate::check::{CheckError, check_form};
use crate::schedule::Schedule;
use crate::step::{Buffer, Loc, Rank, Span};
use crate::tree::Node;
use crate::walk::{At, Combine, Visitor, walk};

/// The schedules of all ranks, in order, as an SVG document. It follows the reader's light or
/// dark colour scheme.
///
/// # Errors
///
/// When the schedules break a [`Rule`](crate::check::Rule), or do not run to their end.
pub fn svg(schedules: &[Schedule]) -> Result<String, CheckError> {
    let first = check_form(schedules)?;
    let mut story = Story { rounds: vec![0; schedules.len()], events: vec![] };
    walk(schedules, 1, &mut story)?;
    // Nothing depends on a later round, so this keeps causes above their effects.
    story.events.sort_by_key(|event| event.round);
    let rows = rows(&story.events, schedules.len());
    Ok(render(first, schedules, &story.events, &rows))
}

/// What happens, in an order in which it can happen.
struct Story {
    /// For each rank, messages in the longest chain that led to where it is.
    rounds: Vec<usize>,
    events: Vec<Event>,
}

struct Event {
    round: usize,
    kind: Kind,
}

enum Kind {
    Message { from: Rank, to: Rank, src: Loc, dst: Loc, combine: Option<Combine> },
    Combine { rank: Rank, dst: Loc, finish: bool },
    Copy { rank: Rank, dst: Loc },
}

struct Message {
    from: Rank,
    src: Loc,
    round: usize,
}

impl Story {
    fn push(&mut self, rank: Rank, kind: Kind) -> Result<(), CheckError> {
        self.events.push(Event { round: self.rounds[rank], kind });
        Ok(())
    }
}

impl Visitor for Story {
    type Message = Message;

    fn enter(&mut self, _rank: Rank, _operation: usize) -> Result<(), CheckError> {
        Ok(())
    }

    fn send(&mut self, at: At, _to: Rank, src: Loc) -> Result<Message, CheckError> {
        Ok(Message { from: at.rank, src, round: self.rounds[at.rank] + 1 })
    }

    fn receive(
        &mut self,
        at: At,
        dst: Loc,
        combine: Option<Combine>,
        Message { from, src, round }: Message,
    ) -> Result<(), CheckError> {
        self.rounds[at.rank] = self.rounds[at.rank].max(round);
        self.push(at.rank, Kind::Message { from, to: at.rank, src, dst, combine })
    }

    fn reduce(&mut self, at: At, dst: Loc, _src: Loc, how: Combine) -> Result<(), CheckError> {
        self.push(at.rank, Kind::Combine { rank: at.rank, dst, finish: how.finish })
    }

    fn reduce_tree(
        &mut self,
        at: At,
        dst: Loc,
        _srcs: &[(Node, Loc)],
        finish: bool,
    ) -> Result<(), CheckError> {
        self.push(at.rank, Kind::Combine { rank: at.rank, dst, finish })
    }

    fn copy(&mut self, at: At, dst: Loc, _src: Loc) -> Result<(), CheckError> {
        self.push(at.rank, Kind::Copy { rank: at.rank, dst })
    }

    fn flush(&mut self, _at: At, _to: Rank, _upto: usize) -> Result<(), CheckError> {
        Ok(())
    }

    fn leave(&mut self, _rank: Rank, _operation: usize) -> Result<(), CheckError> {
        Ok(())
    }
}

/// The row of each event. Events share a row when they touch different lanes; a mark on a lane
/// stands below everything that came to that lane before it, and above what follows.
fn rows(events: &[Event], world_size: usize) -> Vec<usize> {
    let mut taken: HashSet<(usize, Rank)> = HashSet::new();
    // For each lane, the first row below its last mark, and below its last event.
    let mut below_mark = vec![0; world_size];
    let mut below_all = vec![0; world_size];
    let mut round = 0;
    let mut rows = vec![];
    for event in events {
        if event.round != round {
            round = event.round;
            let end = below_all.iter().max().copied().unwrap_or(0);
            below_mark.fill(end);
            below_all.fill(end);
        }
        let (from, to, is_mark) = match event.kind {
            Kind::Message { from, to, combine, .. } => (from, to, combine.is_some()),
            Kind::Combine { rank, .. } | Kind::Copy { rank, .. } => (rank, rank, true),
        };
        let lanes = from.min(to)..=from.max(to);
        let mut row = below_mark[from].max(if is_mark { below_all[to] } else { below_mark[to] });
        while lanes.clone().any(|lane| taken.contains(&(row, lane))) {
            row += 1;
        }
        taken.extend(lanes.map(|lane| (row, lane)));
        for lane in [from, to] {
            below_all[lane] = below_all[lane].max(row + 1);
        }
        if is_mark {
            below_mark[to] = row + 1;
        }
        rows.push(row);
    }
    rows
}

// All lengths in pixels.
const LANE: usize = 130;
const ROW: usize = 29;
const LEFT: usize = 140;
const HEAD: usize = 118;
const PADDING: usize = 6;
const ROUND_GAP: usize = 12;
const LEGEND: usize = 56;

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

fn render(first: &Schedule, schedules: &[Schedule], events: &[Event], rows: &[usize]) -> String {
    let lane = |rank: Rank| LEFT + rank * LANE;
    let rounds: Vec<Round> = rounds(events, rows);
    // Bands are set apart, so the height of a row depends on the round that it is in.
    let top = |band: usize, row: usize| HEAD + (ROUND_GAP + 2 * PADDING) * band + ROW * row;
    let body = top(rounds.len(), rounds.last().map_or(0, |round| round.end)) + ROUND_GAP;
    // Narrow drawings still hold the title and the legend.
    let width = (lane(schedules.len()) - LANE / 2 + 20).max(620);
    let height = body + LEGEND;

    let mut svg = vec![
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">"#
        ),
        STYLE.to_owned(),
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
    for (event, &row) in events.iter().zip(rows) {
        let band = rounds.iter().position(|round| row < round.end).unwrap_or(0);
        let y = top(band, row) + ROUND_GAP + PADDING + ROW / 2;
        match event.kind {
            Kind::Message { from, to, src, dst, combine } => {
                arrow(lane(from), lane(to), y, label(src), dst, combine, &mut svg);
            }
            Kind::Combine { rank, dst, finish } => {
                combine_mark(lane(rank), y, finish, &mut svg);
                beside(lane(rank), y, label(dst), &mut svg);
            }
            Kind::Copy { rank, dst } => {
                copy_mark(lane(rank), y, &mut svg);
                beside(lane(rank), y, label(dst), &mut svg);
            }
        }
    }
    legend(body + 24, events, &mut svg);
    svg.push("</svg>\n".to_owned());
    svg.join("\n")
}

struct Round {
    number: usize,
    /// Its rows.
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
    let root = match collective {
        Collective::Reduce | Collective::Broadcast => format!(", root {root}"),
        Collective::AllReduce
        | Collective::AllGather
        | Collective::ReduceScatter
        | Collective::Barrier => String::new(),
    };
    format!("{collective} {algorithm}: {world_size} ranks{root}")
}

fn price(schedules: &[Schedule], events: &[Event]) -> String {
    // A length that all usual blocks divide.
    let len = schedules.len() * 5_040;
    let sent: Vec<(usize, usize)> = schedules.iter().map(|schedule| schedule.sent(len)).collect();
    let rounds = events.last().map_or(0, |event| event.round);
    let messages = sent.iter().map(|&(messages, _)| messages).max().unwrap_or(0);
    let elements = sent.iter().map(|&(_, elements)| elements).max().unwrap_or(0);
    let share = format!("{:.2}", elements as f64 / len as f64);
    let share = share.trim_end_matches('0').trim_end_matches('.');
    format!("rounds: {rounds} · messages per rank: {messages} · sent per rank: {share} × the data")
}

/// The whole of the data goes without saying.
fn label(loc: Loc) -> String {
    match loc {
        Loc { buffer: Buffer::Data, span: Span::WHOLE } => String::new(),
        Loc { buffer: Buffer::Data, span: Span { count: 0, .. } } => String::new(),
        Loc { buffer: Buffer::Data, span } => span.to_string(),
        loc => loc.to_string(),
    }
}

fn arrow(
    from: usize,
    to: usize,
    y: usize,
    label: String,
    dst: Loc,
    combine: Option<Combine>,
    svg: &mut Vec<String>,
) {
    let (from, to, y) = (from as f64, to as f64, y as f64);
    let forward = if to > from { 1.0 } else { -1.0 };
    let tip = to - forward * if combine.is_some() { 9.0 } else { 2.0 };
    let base = tip - forward * 10.0;
    let head = if let Buffer::Scratch(_) = dst.buffer { "hollow" } else { "tip" };
    svg.push(format!(r#"<path class="wire" d="M{from} {y}H{base}"/>"#));
    svg.push(format!(r#"<circle class="dot" cx="{from}" cy="{y}" r="3.5"/>"#));
    svg.push(format!(r#"<path class="{head}" d="M{tip} {y}L{base} {}V{}Z"/>"#, y - 5.0, y + 5.0));
    if let Some(Combine { finish, .. }) = combine {
        combine_mark(to as usize, y as usize, finish, svg);
    }
    if !label.is_empty() {
        // In the gap beside the sender, where no lane crosses the text.
        let x = from + forward * LANE as f64 / 2.0;
        svg.push(format!(r#"<text class="span" x="{x}" y="{}">{label}</text>"#, y - 5.0));
    }
}

fn combine_mark(x: usize, y: usize, finish: bool, svg: &mut Vec<String>) {
    let (circle, plus) = if finish { ("finish", "finish-plus") } else { ("mark", "plus") };
    svg.push(format!(r#"<circle class="{circle}" cx="{x}" cy="{y}" r="8"/>"#));
    svg.push(format!(
        r#"<path class="{plus}" d="M{} {y}H{}M{x} {}V{}"/>"#,
        x - 4,
        x + 4,
        y - 4,
        y + 4
    ));
}

fn copy_mark(x: usize, y: usize, svg: &mut Vec<String>) {
    svg.push(format!(
        r#"<rect class="mark" x="{}" y="{}" width="12" height="12" rx="2"/>"#,
        x - 6,
        y - 6
    ));
}

fn beside(x: usize, y: usize, label: String, svg: &mut Vec<String>) {
    if !label.is_empty() {
        let (x, y) = (x + 36, y + 4);
        svg.push(format!(r#"<text class="span" x="{x}" y="{y}">{label}</text>"#));
    }
}

/// Explains the signs that the drawing uses.
fn legend(y: usize, events: &[Event], svg: &mut Vec<String>) {
    let data = Loc::data(Span::WHOLE);
    let scratch = Loc::scratch(0, Span::WHOLE);
    let uses = |sign: &dyn Fn(&Kind) -> bool| events.iter().any(|event| sign(&event.kind));
    let mut x = 24;
    let mut entry = |used: bool, text: &str, draw: &dyn Fn(usize, &mut Vec<String>)| {
        if used {
            draw(x, svg);
            svg.push(format!(r#"<text x="{}" y="{}">{text}</text>"#, x + 40, y + 4));
            x += 64 + 7 * text.len();
        }
    };
    let stored = |kind: &Kind, in_scratch: bool| match kind {
        Kind::Message { dst, combine: None, .. } => {
            matches!(dst.buffer, Buffer::Scratch(_)) == in_scratch
        }
        _ => false,
    };
    let combined = |kind: &Kind, finished: bool| match kind {
        Kind::Message { combine: Some(Combine { finish, .. }), .. }
        | Kind::Combine { finish, .. } => *finish == finished,
        _ => false,
    };
    let of_messages = match events.iter().any(|event| carries_elements(&event.kind)) {
        true => "to data",
        false => "empty message",
    };
    entry(uses(&|kind| stored(kind, false)), of_messages, &|x, svg| {
        arrow(x, x + 30, y, String::new(), data, None, svg);
    });
    entry(uses(&|kind| stored(kind, true)), "to scratch", &|x, svg| {
        arrow(x, x + 30, y, String::new(), scratch, None, svg);
    });
    entry(uses(&|kind| combined(kind, false)), "combine", &|x, svg| {
        combine_mark(x + 18, y, false, svg);
    });
    entry(uses(&|kind| combined(kind, true)), "complete the sum", &|x, svg| {
        combine_mark(x + 18, y, true, svg);
    });
    entry(uses(&|kind| matches!(kind, Kind::Copy { .. })), "copy", &|x, svg| {
        copy_mark(x + 18, y, svg);
    });
}

fn carries_elements(kind: &Kind) -> bool {
    matches!(kind, Kind::Message { src, .. } if src.span.count > 0)
}
