//! Merges the files of all ranks into one.

use std::{
    fmt::Write as _,
    io::{BufWriter, Write},
    path::Path,
};

use drumline_schedule::step::Rank;
use drumline_shm::files::NewFile;
use serde_json::Value;

use crate::{
    Result,
    format::Micros,
    join::{Arrival, Join},
    lines::trouble,
    read::{Event, Run},
};

/// The result of [`merge()`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Merged {
    /// The ranks that have files.
    pub ranks: Vec<Rank>,
    /// The number of events in the files.
    pub events: u64,
    /// Problems that do not prevent the merge.
    pub notes: Vec<String>,
}

/// Writes the events of all ranks in `dir` to `out`, with times on rank 0's clock.
///
/// # Errors
///
/// [`Trace`](drumline_error::ErrorKind::Trace) names the file and the line that cannot be read, or says that there
/// is no file.
pub fn merge(dir: &Path, out: &Path) -> Result<Merged> {
    let run = Run::open(dir)?;
    let events = write(&run, out)?;
    let ranks = run.files.iter().map(|file| file.rank).collect();
    Ok(Merged { ranks, events, notes: run.notes })
}

fn write(run: &Run, path: &Path) -> Result<u64> {
    let failed = |error| trouble(path, 0, error);
    let mut file = BufWriter::new(NewFile::create(path).map_err(failed)?);
    let (mut join, mut events, mut arrows) = (Join::default(), 0_u64, 0_u64);
    let mut text = "[".to_owned();
    for event in run.events()? {
        let mut event = event?;
        if events > 0 {
            text.push(',');
        }
        text.push('\n');
        events += 1;
        if let Some(arrivals) = join.add(run, &event)
            && arrivals.len() > 1
        {
            put_event(&mut text, &mut event);
            arrows += 1;
            put_arrows(&mut text, arrows, &arrivals);
        } else {
            put_event(&mut text, &mut event);
        }
        file.write_all(text.as_bytes()).map_err(failed)?;
        text.clear();
    }
    file.write_all(b"\n]\n").map_err(failed)?;
    file.into_inner().map_err(|error| failed(error.into_error()))?.finish().map_err(failed)?;
    Ok(events)
}

fn put_event(text: &mut String, event: &mut Event) {
    if let Some(start_ns) = event.start_ns {
        let us = Micros(start_ns).to_string();
        if let Ok(number) = us.parse::<f64>() {
            event.fields.insert("ts".to_owned(), Value::from(number));
        }
    }
    let _ = write!(text, "{}", Value::Object(std::mem::take(&mut event.fields)));
}

/// Writes an arrow from each rank to the rank that began next.
fn put_arrows(text: &mut String, id: u64, arrivals: &[Arrival]) {
    let last = arrivals.len() - 1;
    for (index, Arrival { rank, track, start_ns, .. }) in arrivals.iter().enumerate() {
        let phase = match index {
            0 => r#""s""#,
            _ if index == last => r#""f","bp":"e""#,
            _ => r#""t""#,
        };
        let at = Micros(*start_ns);
        let _ = write!(
            text,
            ",\n{{\"ph\":{phase},\"id\":{id},\"pid\":{rank},\"tid\":{track},\"ts\":{at},\
             \"cat\":\"same call\",\"name\":\"same call\"}}"
        );
    }
}
