//! What is written, and what readers make of files of every kind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use drumline::{
    Config, DType, ErrorKind, ProcessGroup, ReduceOp,
    ddp::{DdpOptions, GradientReducer, ParameterSpec},
    trace::{Trace, merge, summarize},
};
use drumline_testing::world_with;
use serde_json::Value;
use tempfile::TempDir;
use tracing_subscriber::{Layer, layer::SubscriberExt, registry::LookupSpan};

fn traced(dir: &Path) -> Config {
    Config::default().trace(Trace::to(dir))
}

fn events(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The values of `field` of the events of a category, in order.
fn of<'a>(events: &'a [Value], category: &str, field: &str) -> Vec<&'a Value> {
    events
        .iter()
        .filter(|it| it["cat"] == category && it["ph"] != "e")
        .map(|it| &it[field])
        .collect()
}

#[test]
fn every_kind_of_operation_is_recorded() {
    let dir = TempDir::new().unwrap();
    world_with(2, &traced(dir.path()), |group| {
        let mut data = [1.0_f32; 100];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        let works =
            [7, 8].map(|len| group.all_reduce_async(vec![1_i64; len], ReduceOp::Max).unwrap());
        works.into_iter().for_each(|work| drop(work.wait().unwrap()));
        match group.rank() {
            0 => group.send(&data, 1, 7).unwrap(),
            _ => group.recv(&mut data, 0, 7).unwrap(),
        }
        let parameters = vec![ParameterSpec::new("w", [3], DType::F32)];
        let reducer = GradientReducer::new(parameters, &DdpOptions::default(), &group).unwrap();
        reducer.submit(0, [1.0_f32; 3].as_slice().into());
        reducer.finish().unwrap();
        drop(reducer);
        group.destroy().unwrap();
    });
    for rank in [0, 1] {
        let events = events(&dir.path().join(format!("rank-{rank}.json")));
        assert!(events.iter().all(|it| it["pid"] == rank), "{events:?}");
        let collectives = of(&events, "collective", "args");
        let bytes: Vec<_> = collectives.iter().take(3).map(|it| &it["bytes"]).collect();
        assert_eq!(bytes, [400, 56, 64]);
        for (sequence, arguments) in collectives.iter().enumerate() {
            assert_eq!(
                (&arguments["sequence"], &arguments["group"]),
                (&sequence.into(), &"local".into())
            );
            assert!(!arguments["algorithm"].as_str().unwrap().is_empty());
        }
        let message = &of(&events, "message", "args")[0];
        let expected = (Value::from(1 - rank), Value::from(7), Value::from(400));
        assert_eq!(
            (&message["peer"], &message["tag"], &message["bytes"]),
            (&expected.0, &expected.1, &expected.2)
        );
        let names = [Value::from("send"), Value::from("recv")];
        assert_eq!(of(&events, "message", "name"), [&names[rank]]);
        let bucket = of(&events, "bucket", "args")[0];
        assert_eq!((&bucket["bucket"], &bucket["bytes"]), (&0.into(), &12.into()));
        let phases = of(&events, "start-up", "name");
        assert_eq!(phases, ["join", "connect", "share memory", "destroy"]);
        let is_card =
            |it: &&Value| it["key"].as_str().is_some_and(|key| key.ends_with("/card/all"));
        assert!(of(&events, "store", "args").iter().any(is_card));
        // Nothing of a collective track overlaps.
        let spans = events.iter().filter(|it| it["cat"] == "collective");
        let times: Vec<_> =
            spans.map(|it| (it["ts"].as_f64().unwrap(), it["dur"].as_f64().unwrap())).collect();
        assert!(times.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0 + 0.0015), "{times:?}");
    }
}

/// A group that is made anew goes on in the same file, and its calls are not taken for those of
/// the first one.
#[test]
fn groups_of_one_rank_share_a_file() {
    let dir = TempDir::new().unwrap();
    for _ in 0..2 {
        world_with(2, &traced(dir.path()), |group| {
            group.barrier().unwrap();
            group.destroy().unwrap();
        });
    }
    let summary = summarize(dir.path()).unwrap();
    assert_eq!(summary.operation("barrier").map(|it| it.calls), Some(4));
    assert_eq!(summary.collectives, 2);
}

#[test]
fn a_failure_is_a_mark() {
    let dir = TempDir::new().unwrap();
    world_with(2, &traced(dir.path()), |group| {
        let mut data = vec![1.0_f32; 3 + group.rank()];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
    });
    let out = dir.path().join("all.json");
    merge(dir.path(), &out).unwrap();
    let events = events(&out);
    let marks: Vec<_> = events.iter().filter(|it| it["name"] == "failed").collect();
    assert!(marks.len() >= 2, "{marks:?}");
    assert!(marks[0]["args"]["text"].as_str().unwrap().contains("all_reduce(sum) of"), "{marks:?}");
    assert_eq!(of(&events, "collective", "name").len(), 2, "the call that failed is there, too");
}

#[test]
fn a_file_has_a_limit_and_says_so() {
    const BYTES_MAX: u64 = 20_000;
    let dir = TempDir::new().unwrap();
    let mut trace = Trace::to(dir.path());
    trace.bytes_max = BYTES_MAX;
    let config = Config::default().trace(trace);
    world_with(1, &config, |group| {
        (0..1_000).for_each(|_| group.barrier().unwrap());
        group.destroy().unwrap();
    });
    let path = dir.path().join("rank-0.json");
    let bytes = fs::metadata(&path).unwrap().len();
    assert!((BYTES_MAX / 2..=BYTES_MAX).contains(&bytes), "{bytes}");
    let events = events(&path);
    let last = events.last().unwrap();
    assert_eq!(last["name"], "full");
    assert!(last["args"]["text"].as_str().unwrap().contains("limit of 20000 bytes"));
    assert!(summarize(dir.path()).unwrap().operation("barrier").unwrap().calls < 1_000);
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = drumline::rendezvous::local_world_with(1, &traced(&file)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Setting, "{error}");
    let text = error.to_string();
    assert!(text.contains("DRUMLINE_TRACE") && text.contains("file/rank-0.json"), "{text}");
}

// -- Readers -----------------------------------------------------------------------------------

const HEADER: &str = r#"{"ph":"M","pid":RANK,"tid":0,"name":"drumline_trace","args":{"version":1,"rank":RANK,"host":"h","process":1,"clock":"CLOCK","wall_ns":"WALL"}},
{"ph":"M","pid":RANK,"tid":1,"name":"drumline_group","args":{"group":"world","digest":"DIGEST","rank":RANK,"world_size":3}}"#;

/// A file by hand, of calls that took from one microsecond to another.
struct ByHand<'a> {
    rank: usize,
    clock: &'a str,
    digest: &'a str,
    wall_ns: i64,
    /// (reference, offset, uncertainty) in nanoseconds.
    measured: Option<(&'a str, i64, u64)>,
    calls: &'a [(f64, f64)],
}

impl Default for ByHand<'_> {
    fn default() -> Self {
        ByHand { rank: 0, clock: "a", digest: "1", wall_ns: 0, measured: None, calls: &[] }
    }
}

impl ByHand<'_> {
    fn text(&self) -> String {
        let mut text = HEADER
            .replace("RANK", &self.rank.to_string())
            .replace("CLOCK", self.clock)
            .replace("DIGEST", self.digest)
            .replace("WALL", &self.wall_ns.to_string());
        if let Some((reference, offset, uncertainty)) = self.measured {
            text += &format!(
                ",\n{{\"ph\":\"M\",\"name\":\"drumline_clock\",\"args\":{{\"reference\":\"{reference}\",\
                 \"offset_ns\":\"{offset}\",\"uncertainty_ns\":\"{uncertainty}\"}}}}"
            );
        }
        for (sequence, (start, end)) in self.calls.iter().enumerate() {
            text += &format!(
                ",\n{{\"ph\":\"X\",\"pid\":{},\"tid\":1,\"ts\":{start:.3},\"dur\":{:.3},\
                 \"cat\":\"collective\",\"name\":\"all_reduce\",\
                 \"args\":{{\"sequence\":{sequence},\"bytes\":8}}}}",
                self.rank,
                end - start
            );
        }
        format!("[\n{text}\n]\n")
    }

    fn write(&self, dir: &Path) {
        fs::write(dir.join(format!("rank-{}.json", self.rank)), self.text()).unwrap();
    }
}

/// Rank 2 is on another host, whose clock is 5 ms behind.
fn three_ranks(dir: &Path, uncertainty_ns: u64) {
    let measured = Some(("a", 5_000_000, uncertainty_ns));
    ByHand { calls: &[(100.0, 131.0), (200.0, 240.0), (300.0, 310.0)], ..ByHand::default() }
        .write(dir);
    ByHand {
        rank: 1,
        calls: &[(110.0, 132.0), (210.0, 240.0), (304.0, 309.0)],
        ..ByHand::default()
    }
    .write(dir);
    let calls = &[(-4_870.0, -4_869.0), (-4_770.0, -4_760.0), (-4_698.0, -4_692.0)];
    ByHand { rank: 2, clock: "b", measured, calls, ..ByHand::default() }.write(dir);
}

#[test]
fn the_rank_that_others_wait_for_is_found() {
    let dir = TempDir::new().unwrap();
    three_ranks(dir.path(), 1_000);
    let summary = summarize(dir.path()).unwrap();
    let us = Duration::from_micros;
    let all_reduce = summary.operation("all_reduce").unwrap();
    assert_eq!((all_reduce.calls, all_reduce.bytes, all_reduce.max), (9, 72, us(40)));
    // The last comes at 130, 230 and 304.
    assert_eq!(all_reduce.waiting, Some(us(30 + 20) + us(30 + 20) + us(4 + 2)));
    let ranks: Vec<_> = summary.ranks.iter().map(|it| (it.last, it.awaited, it.waiting)).collect();
    assert_eq!(ranks, [(0, us(0), us(64)), (1, us(6), us(40)), (2, us(100), us(2))]);
    assert_eq!((summary.collectives, summary.undecided), (3, 0));
    let text = summary.to_string();
    let row = text.lines().last().unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(row.join(" "), "2 2 67 % 100 us 2.00 us", "{text}");
    assert!(text.starts_with("operation "), "{text}");
}

#[test]
fn clocks_that_are_hardly_known_blame_nobody() {
    let dir = TempDir::new().unwrap();
    three_ranks(dir.path(), 1_000_000);
    let summary = summarize(dir.path()).unwrap();
    assert_eq!((summary.undecided, summary.ranks[2].last), (3, 0));
}

#[test]
fn clocks_that_were_not_compared_are_aligned_by_the_wall() {
    let dir = TempDir::new().unwrap();
    ByHand { wall_ns: 7_000, calls: &[(100.0, 101.0)], ..ByHand::default() }.write(dir.path());
    ByHand { rank: 1, clock: "b", wall_ns: 9_000, calls: &[(98.0, 99.0)], ..ByHand::default() }
        .write(dir.path());
    let out = dir.path().join("all.json");
    let merged = merge(dir.path(), &out).unwrap();
    assert!(merged.notes[0].contains("rank 1 was not compared"), "{merged:?}");
    assert_eq!(of(&events(&out), "collective", "ts"), [100.0, 100.0]);
}

#[test]
fn arrows_lead_from_the_first_rank_to_the_last() {
    let dir = TempDir::new().unwrap();
    three_ranks(dir.path(), 1_000);
    let out = dir.path().join("all.json");
    let merged = merge(dir.path(), &out).unwrap();
    assert_eq!((merged.ranks, merged.notes.len()), (vec![0, 1, 2], 0));
    let events = events(&out);
    let arrows: Vec<_> = events
        .iter()
        .filter(|it| it["cat"] == "same call")
        .map(|it| {
            (it["ph"].as_str().unwrap(), it["pid"].as_u64().unwrap(), it["ts"].as_f64().unwrap())
        })
        .collect();
    assert_eq!(arrows[..3], [("s", 0, 100.0), ("t", 1, 110.0), ("f", 2, 130.0)]);
    assert_eq!(arrows[6..], [("s", 0, 300.0), ("t", 2, 302.0), ("f", 1, 304.0)]);
}

#[test]
fn a_file_may_end_anywhere() {
    let calls = &[(100.0, 131.0), (200.0, 240.0)];
    let text = ByHand { calls, ..ByHand::default() }.text();
    let other = ByHand { rank: 1, calls, ..ByHand::default() };
    for length in 0..=text.len() {
        let dir = TempDir::new().unwrap();
        other.write(dir.path());
        fs::write(dir.path().join("rank-0.json"), &text[..length]).unwrap();
        let out = dir.path().join("all.json");
        let merged = merge(dir.path(), &out).unwrap_or_else(|error| panic!("at {length}: {error}"));
        assert!(merged.events >= 4, "at {length}");
        assert_eq!(events(&out).len() as u64, merged.events);
    }
}

#[test]
fn broken_files_are_refused_by_name_and_line() {
    let good = ByHand { calls: &[(1.0, 2.0), (3.0, 4.0)], ..ByHand::default() }.text();
    let bad = |from: &str, to: &str| good.replacen(from, to, 1);
    for (text, expected) in [
        (bad(r#""ts":1.000"#, r#""ts":1.0.0"#), "rank-0.json, line 4: this is no event"),
        (bad(r#""ts":1.000"#, r#""ts":"one""#), "rank-0.json, line 4: ts is no number"),
        (bad("[", "{"), "rank-0.json, line 1: it should begin with ["),
        (bad("drumline_trace", "something"), "line 2: this is no trace of a rank of drumline"),
        (bad(r#""version":1"#, r#""version":2"#), "line 2: version 2 of the format cannot be read"),
        (bad(r#""clock":"a""#, r#""clock":7"#), "line 2: clock is missing or wrong"),
        (bad(r#""digest":"1""#, r#""digest":1"#), "line 3: this description of a group"),
        (bad("\n]\n", "\n]\n{}\n"), "line 7: something follows the end"),
        (bad("\n{\"ph\":\"X\"", "\n\0\0\0\0\n{"), "line 4: this is no event"),
        (
            bad(r#""all_reduce""#, &format!("\"{}\"", "x".repeat(70_000))),
            "line 4: this is no event",
        ),
    ] {
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join("rank-0.json"), text).unwrap();
        let out = dir.path().join("all.json");
        let error = merge(dir.path(), &out).unwrap_err();
        assert!(error.kind() == ErrorKind::Trace);
        assert!(error.to_string().contains(expected), "{error} is not {expected}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left behind");
    }
}

#[test]
fn what_is_no_run_is_refused() {
    let dir = TempDir::new().unwrap();
    let error = summarize(dir.path()).unwrap_err().to_string();
    assert!(error.contains("DRUMLINE_TRACE"), "{error}");
    ByHand::default().write(dir.path());
    ByHand { rank: 1, digest: "2", ..ByHand::default() }.write(dir.path());
    let error = summarize(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("rank-1.json: it is of another run than") && error.contains("rank-0.json"),
        "{error}"
    );
    let error = summarize(&dir.path().join("nowhere")).unwrap_err().to_string();
    assert!(error.contains("nowhere"), "{error}");
}

// -- Spans -------------------------------------------------------------------------------------

/// Notes the fields of every span, and whether it has ended.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Notes {
    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        _id: &tracing::span::Id,
        _context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        struct Fields(String);
        impl tracing::field::Visit for Fields {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!("{field}={value:?} ");
            }
        }
        let mut fields = Fields(format!("{} ", attributes.metadata().target()));
        attributes.record(&mut fields);
        self.0.lock().unwrap().push(fields.0);
    }

    fn on_close(
        &self,
        _id: tracing::span::Id,
        _context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        self.0.lock().unwrap().push("closed".to_owned());
    }
}

#[test]
fn operations_are_spans_for_whoever_listens() {
    let notes = Notes::default();
    let subscriber = tracing_subscriber::registry().with(notes.clone());
    let group = ProcessGroup::alone();
    tracing::subscriber::with_default(subscriber, || {
        // What another test begins while nobody listens would never be heard.
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
        group.all_reduce(&mut [1.0_f32; 3], ReduceOp::Sum).unwrap();
    });
    let notes = notes.0.lock().unwrap();
    assert_eq!(notes.len(), 2, "{notes:?}");
    let expected = "drumline::operation name=\"all_reduce\" group=\"alone\" rank=0 sequence=0 bytes=12 algorithm=";
    assert!(notes[0].starts_with(expected), "{notes:?}");
    assert_eq!(notes[1], "closed");
}
