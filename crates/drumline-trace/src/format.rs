//! Events as text: the JSON array of Chrome's trace event format, one event on a line.
//!
//! A duration that overlaps no other one of its track is a complete event (`X`). Messages and buckets may
//! overlap, so each of them is a pair of events (`b`, `e`) with a number of its own.

use std::fmt::{self, Display, Write};

use drumline_engine::{
    membership::Membership,
    recorder::{Category, What},
};
use drumline_schedule::step::Rank;

use crate::clock::{Clock, Offset};

/// The version of the format. Readers refuse other versions.
pub(crate) const VERSION: u64 = 1;

/// The names of the events that describe the file.
pub(crate) const FILE: &str = "drumline_trace";
pub(crate) const GROUP: &str = "drumline_group";
pub(crate) const CLOCK: &str = "drumline_clock";

/// The longest text that is kept.
const TEXT_BYTES_MAX: usize = 2_000;

/// Writes the beginning of a file: its rank, its process, and its clock.
pub(crate) fn file(out: &mut String, rank: Rank, host: &str, process: u32, clock: &Clock) {
    let (id, wall_ns) = (Text(&clock.id), clock.wall_ns);
    let label = format!("rank {rank} ({host}, pid {process})");
    put(
        out,
        format_args!(
            r#"{{"ph":"M","pid":{rank},"tid":0,"name":"{FILE}","args":{{"version":{VERSION},"rank":{rank},"host":{},"process":{process},"clock":{id},"wall_ns":"{wall_ns}"}}}},"#,
            Text(host)
        ),
    );
    let name = Text(&label);
    put(
        out,
        format_args!(
            r#"
{{"ph":"M","pid":{rank},"tid":0,"name":"process_name","args":{{"name":{name}}}}},
{{"ph":"M","pid":{rank},"tid":0,"name":"process_sort_index","args":{{"sort_index":{rank}}}}},
{{"ph":"M","pid":{rank},"tid":0,"name":"thread_name","args":{{"name":"start-up"}}}}"#
        ),
    );
}

pub(crate) fn group(rank: Rank, track: u32, member: &Membership) -> String {
    let Membership { name, rank: group_rank, world_size, digest, .. } = member;
    let name = Text(name);
    let mut out = String::new();
    put(
        &mut out,
        format_args!(
            r#"{{"ph":"M","pid":{rank},"tid":{track},"name":"{GROUP}","args":{{"group":{name},"digest":"{digest:016x}","rank":{group_rank},"world_size":{world_size}}}}},
{{"ph":"M","pid":{rank},"tid":{track},"name":"thread_name","args":{{"name":{name}}}}}"#
        ),
    );
    out
}

pub(crate) fn clock(rank: Rank, reference: &str, offset: Offset) -> String {
    let Offset { offset_ns, uncertainty_ns } = offset;
    let reference = Text(reference);
    format!(
        r#"{{"ph":"M","pid":{rank},"tid":0,"name":"{CLOCK}","args":{{"reference":{reference},"offset_ns":"{offset_ns}","uncertainty_ns":"{uncertainty_ns}"}}}}"#
    )
}

/// Writes a call from `start_ns` to `end_ns`. `id` is a number of its own.
#[allow(clippy::too_many_arguments, reason = "each is a field of the event")]
pub(crate) fn operation(
    out: &mut String,
    rank: Rank,
    track: u32,
    id: u64,
    group: &str,
    what: &What,
    start_ns: i64,
    end_ns: i64,
) {
    let (category, name) = (what.category.name(), what.name);
    let start = Micros(start_ns);
    match what.category {
        Category::Message | Category::Bucket => {
            let end = Micros(end_ns);
            put(
                out,
                format_args!(
                    r#"{{"ph":"b","pid":{rank},"tid":{track},"id2":{{"local":"{id}"}},"ts":{start},"cat":"{category}","name":"{name}","args":"#
                ),
            );
            arguments(out, group, what);
            put(
                out,
                format_args!(
                    r#"}},
{{"ph":"e","pid":{rank},"tid":{track},"id2":{{"local":"{id}"}},"ts":{end},"cat":"{category}","name":"{name}"}}"#
                ),
            );
        }
        Category::Collective | Category::StartUp | Category::Store => {
            let duration = Micros(end_ns - start_ns);
            put(
                out,
                format_args!(
                    r#"{{"ph":"X","pid":{rank},"tid":{track},"ts":{start},"dur":{duration},"cat":"{category}","name":"{name}","args":"#
                ),
            );
            arguments(out, group, what);
            out.push('}');
        }
    }
}

fn arguments(out: &mut String, group: &str, what: &What) {
    put(out, format_args!(r#"{{"group":{}"#, Text(group)));
    let numbers = [
        ("sequence", what.sequence),
        ("bytes", what.bytes),
        ("peer", what.peer.map(|it| it as u64)),
        ("tag", what.tag),
        ("bucket", what.bucket.map(|it| it as u64)),
    ];
    for (name, number) in numbers {
        if let Some(number) = number {
            put(out, format_args!(r#","{name}":{number}"#));
        }
    }
    for (name, text) in [("algorithm", what.algorithm), ("key", what.key.as_deref())] {
        if let Some(text) = text {
            put(out, format_args!(r#","{name}":{}"#, Text(text)));
        }
    }
    out.push('}');
}

/// Writes an event that happened to a track or to the rank.
pub(crate) fn mark(out: &mut String, rank: Rank, track: u32, name: &str, text: &str, at_ns: i64) {
    let (at, text) = (Micros(at_ns), Text(text));
    put(
        out,
        format_args!(
            r#"{{"ph":"i","s":"p","pid":{rank},"tid":{track},"ts":{at},"cat":"mark","name":"{name}","args":{{"text":{text}}}}}"#
        ),
    );
}

fn put(out: &mut String, text: fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = out.write_fmt(text);
}

/// Nanoseconds as microseconds with three decimals.
pub(crate) struct Micros(pub(crate) i64);

impl Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (us, ns) = (self.0.unsigned_abs() / 1_000, self.0.unsigned_abs() % 1_000);
        let sign = if self.0 < 0 { "-" } else { "" };
        write!(f, "{sign}{us}.{ns:03}")
    }
}

/// A JSON string.
struct Text<'a>(&'a str);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = self.0.floor_char_boundary(TEXT_BYTES_MAX);
        f.write_char('"')?;
        for c in self.0[..kept].chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                '\n' => f.write_str("\\n")?,
                c if c < ' ' => write!(f, "\\u{:04x}", c as u32)?,
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    proptest! {
        #[test]
        fn any_text_survives(text in any::<String>().prop_filter("short", |it| it.len() <= TEXT_BYTES_MAX)) {
            let read: Value = serde_json::from_str(&Text(&text).to_string()).unwrap();
            prop_assert_eq!(read, Value::String(text));
        }

        #[test]
        // The range is 26 days. On hosts that have been up for longer, a time may be off by one.
        fn times_keep_their_nanoseconds(ns in -(1_i64 << 51)..1_i64 << 51) {
            let us: f64 = Micros(ns).to_string().parse().unwrap();
            prop_assert_eq!((us * 1_000.0).round() as i64, ns);
        }
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let text = "ü".repeat(TEXT_BYTES_MAX);
        let read: Value = serde_json::from_str(&Text(&text).to_string()).unwrap();
        assert_eq!(read.as_str().unwrap().chars().count(), TEXT_BYTES_MAX / 2);
    }
}
