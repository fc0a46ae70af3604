//! One page for a browser: all ranks of a merged trace, and nothing from elsewhere.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufRead, BufReader},
    path::Path,
};

use drumline::files::open_to_read;
use serde_json::{Value, json};

/// What a browser still draws at once. Longer runs are cut, and say so.
const CALLS_MAX: usize = 500_000;

/// Rows for calls of one kind that are under way at once.
const LEVELS_MAX: usize = 16;

/// The page for the merged file `path`, and how many calls and marks it holds. What cannot be shown is added to
/// `notes`.
pub(crate) fn page(path: &Path, notes: &mut Vec<String>) -> io::Result<(String, u64)> {
    let mut calls = Calls::default();
    if !calls.read(BufReader::new(open_to_read(path)?.0))? {
        let cut =
            format!("the page ends after {CALLS_MAX} calls; drumline trace merge has no limit");
        notes.push(cut);
    }
    let (data, count) = calls.data(notes);
    // Names are those of other ranks: none of them may end the element that holds them.
    let data = data.to_string().replace('<', r"\u003c");
    Ok((include_str!("page.html").replacen("<!--trace-->", &data, 1), count))
}

/// What bars of one kind have in common: rank, track, and what else may be under way on the track.
type Lane = (u64, u64, String);

#[derive(Debug, Default)]
struct Calls {
    names: Texts,
    details: Texts,
    groups: Texts,
    lanes: BTreeMap<Lane, Vec<Call>>,
    /// The name of each track.
    titles: BTreeMap<(u64, u64), String>,
    /// The group of each track, as its place in `groups`.
    group_of: BTreeMap<(u64, u64), usize>,
    ranks: BTreeMap<u64, String>,
    marks: Vec<(u64, i64, String, String)>,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    name: usize,
    start_ns: i64,
    duration_ns: i64,
    bytes: Option<u64>,
    /// How long it waited until the last rank had begun, and which one that was.
    waited: Option<(i64, u64)>,
    sequence: Option<u64>,
    details: usize,
}

/// Texts that come again and again.
#[derive(Debug, Default)]
struct Texts {
    numbers: HashMap<String, usize>,
    texts: Vec<String>,
}

impl Texts {
    fn number(&mut self, text: &str) -> usize {
        *self.numbers.entry(text.to_owned()).or_insert_with(|| {
            self.texts.push(text.to_owned());
            self.texts.len() - 1
        })
    }
}

impl Calls {
    /// Takes in the events of a merged file. Whether all of them fit.
    fn read(&mut self, file: impl BufRead) -> io::Result<bool> {
        let mut count = 0;
        let mut begun = HashMap::<(u64, String), Value>::new();
        // Where the calls are that arrows may lead to, and the arrows of one collective.
        let mut places = HashMap::<(u64, u64, i64), usize>::new();
        let mut arrows = vec![];
        for line in file.lines() {
            let line = line?;
            let Ok(event) = serde_json::from_str::<Value>(line.trim_end_matches(',')) else {
                continue; // A bracket around the events.
            };
            let (Some(rank), Some(track)) = (event["pid"].as_u64(), event["tid"].as_u64()) else {
                continue;
            };
            self.ranks.entry(rank).or_insert_with(|| format!("rank {rank}"));
            let name = text(&event["name"]);
            let phase = text(&event["ph"]);
            if phase == "M" {
                self.describe(&event, rank, track);
                continue;
            }
            let Some(start_ns) = ns(&event["ts"]) else { continue };
            if count == CALLS_MAX && matches!(phase, "X" | "e" | "i") {
                return Ok(false);
            }
            match phase {
                "i" => {
                    let text = text(&event["args"]["text"]).to_owned();
                    self.marks.push((rank, start_ns, name.to_owned(), text));
                    count += 1;
                }
                "X" => {
                    let duration_ns = ns(&event["dur"]).unwrap_or_default();
                    let lane = (rank, track, String::new());
                    let place = self.add(&event, lane, start_ns, duration_ns);
                    places.insert((rank, track, start_ns), place);
                    count += 1;
                }
                "b" => _ = begun.insert((rank, text(&event["id2"]["local"]).to_owned()), event),
                "e" => {
                    let key = (rank, text(&event["id2"]["local"]).to_owned());
                    let Some(begin) = begun.remove(&key) else { continue };
                    let Some(begin_ns) = ns(&begin["ts"]) else { continue };
                    let lane = (rank, track, format!(": {}s", text(&begin["cat"])));
                    self.add(&begin, lane, begin_ns, start_ns.saturating_sub(begin_ns));
                    count += 1;
                }
                // From the rank that began first to the one that began last.
                "s" | "t" => arrows.push((rank, track, start_ns)),
                "f" => {
                    arrows.push((rank, track, start_ns));
                    for key in arrows.drain(..) {
                        let lane = self.lanes.get_mut(&(key.0, key.1, String::new()));
                        let place = places.remove(&key);
                        if let Some(call) = lane.zip(place).map(|(lane, place)| &mut lane[place]) {
                            let until = start_ns.min(call.end_ns());
                            call.waited = Some((until.saturating_sub(key.2).max(0), rank));
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(true)
    }

    fn describe(&mut self, event: &Value, rank: u64, track: u64) {
        let what = &event["args"];
        let name = text(&what["name"]).to_owned();
        match text(&event["name"]) {
            "process_name" => _ = self.ranks.insert(rank, name),
            "thread_name" => _ = self.titles.insert((rank, track), name),
            "drumline_group" => {
                let group = self.groups.number(text(&what["digest"]));
                self.group_of.insert((rank, track), group);
            }
            _ => {}
        }
    }

    /// Its place in its lane.
    fn add(&mut self, event: &Value, lane: Lane, start_ns: i64, duration_ns: i64) -> usize {
        let what = &event["args"];
        let details = ["algorithm", "peer", "tag", "bucket", "key"].iter().filter_map(|name| {
            let value = what.get(name)?;
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            Some(format!("{name} {value}"))
        });
        let details = details.collect::<Vec<_>>().join(", ");
        let call = Call {
            name: self.names.number(text(&event["name"])),
            start_ns,
            duration_ns: duration_ns.max(0),
            bytes: what["bytes"].as_u64(),
            waited: None,
            sequence: what["sequence"].as_u64().filter(|_| event["cat"] == "collective"),
            details: self.details.number(&details),
        };
        let lane = self.lanes.entry(lane).or_default();
        lane.push(call);
        lane.len() - 1
    }

    /// What the page holds, as `page.html` reads it, and how many calls and marks that is.
    fn data(self, notes: &mut Vec<String>) -> (Value, u64) {
        let starts = self.lanes.values().flatten().map(|call| call.start_ns);
        let zero = starts.chain(self.marks.iter().map(|it| it.1)).min().unwrap_or_default();
        let (mut rows, mut count, mut left_out) = (vec![], self.marks.len(), 0);
        for rank in self.ranks.keys() {
            let lanes = self.lanes.range((*rank, 0, String::new())..);
            let before = rows.len();
            for ((_, track, kind), calls) in lanes.take_while(|((of, ..), _)| of == rank) {
                let key = (*rank, *track);
                let name = format!("{}{kind}", self.titles.get(&key).map_or("", String::as_str));
                let group = or_none(self.group_of.get(&key).copied());
                let (levels, without) = levels(calls);
                left_out += without;
                for level in levels {
                    count += level.len();
                    let numbers: Value = level.iter().flat_map(|call| call.numbers(zero)).collect();
                    rows.push(
                        json!({ "rank": rank, "name": name, "group": group, "calls": numbers }),
                    );
                }
            }
            if rows.len() == before {
                rows.push(json!({ "rank": rank, "name": "no calls", "group": -1, "calls": [] }));
            }
        }
        if left_out > 0 {
            notes.push(format!(
                "{left_out} calls are not on the page: more than {LEVELS_MAX} of a kind were under way at once"
            ));
        }
        let mark = |(rank, at, name, text): &(u64, i64, String, String)| {
            json!([rank, at.saturating_sub(zero), name, text])
        };
        let data = json!({
            "ranks": self.ranks.iter().collect::<Vec<_>>(),
            "names": self.names.texts,
            "details": self.details.texts,
            "rows": rows,
            "marks": self.marks.iter().map(mark).collect::<Vec<_>>(),
            "notes": notes,
        });
        (data, count as u64)
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Microseconds of the file.
fn ns(us: &Value) -> Option<i64> {
    us.as_f64().map(|us| (us * 1_000.0).round() as i64)
}

/// Divides calls into rows in which they follow each other. How many are left over.
fn levels(calls: &[Call]) -> (Vec<Vec<&Call>>, usize) {
    let mut sorted: Vec<&Call> = calls.iter().collect();
    sorted.sort_by_key(|call| (call.start_ns, call.duration_ns));
    let (mut levels, mut left_out) = (Vec::<Vec<&Call>>::new(), 0);
    for call in sorted {
        let is_free =
            |level: &Vec<&Call>| level.last().is_none_or(|last| last.end_ns() <= call.start_ns);
        match levels.iter().position(is_free) {
            Some(level) => levels[level].push(call),
            None if levels.len() < LEVELS_MAX => levels.push(vec![call]),
            None => left_out += 1,
        }
    }
    (levels, left_out)
}

impl Call {
    fn end_ns(&self) -> i64 {
        self.start_ns.saturating_add(self.duration_ns)
    }

    /// The columns of `page.html`.
    fn numbers(&self, zero: i64) -> [i64; 8] {
        [
            self.name as i64,
            self.start_ns.saturating_sub(zero),
            self.duration_ns,
            or_none(self.bytes),
            or_none(self.waited.map(|it| it.0)),
            or_none(self.waited.map(|it| it.1)),
            or_none(self.sequence),
            self.details as i64,
        ]
    }
}

/// -1 says that there is none.
fn or_none<T: TryInto<i64>>(number: Option<T>) -> i64 {
    number.and_then(|it| it.try_into().ok()).unwrap_or(-1)
}
