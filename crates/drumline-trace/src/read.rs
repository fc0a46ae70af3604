//! Reads the files of a run, event by event.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    fs,
    path::{Path, PathBuf},
};

use drumline_schedule::step::Rank;
use serde_json::{Map, Value};

use crate::{
    Result,
    clock::Offset,
    format,
    lines::{Lines, trouble},
};

/// The files of a run, with times on one clock.
#[derive(Debug)]
pub(crate) struct Run {
    /// The files, by rank.
    pub(crate) files: Vec<RankFile>,
    /// Problems that do not prevent reading.
    pub(crate) notes: Vec<String>,
}

/// The file of a rank, and its description of itself.
#[derive(Debug)]
pub(crate) struct RankFile {
    path: PathBuf,
    pub(crate) rank: Rank,
    clock: String,
    wall_ns: i64,
    /// The clock with which the file's own was compared, and the offset.
    measured: Option<(String, Offset)>,
    /// The offset of its times from those of the run.
    pub(crate) offset: Offset,
    /// The groups, by track.
    pub(crate) groups: BTreeMap<u64, Group>,
}

/// A group that had the rank as a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// The digest of the group: the same on all ranks, and different for every other group.
    pub(crate) digest: String,
    pub(crate) world_size: usize,
}

/// One event. Its times are those of the run.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) rank: Rank,
    pub(crate) fields: Map<String, Value>,
    /// `None` for an event without a time.
    pub(crate) start_ns: Option<i64>,
    pub(crate) duration_ns: i64,
}

impl Event {
    pub(crate) fn text(&self, field: &str) -> &str {
        self.fields.get(field).and_then(Value::as_str).unwrap_or_default()
    }

    pub(crate) fn number(&self, field: &str) -> Option<u64> {
        self.fields.get(field).and_then(Value::as_u64)
    }

    pub(crate) fn argument(&self, name: &str) -> Option<&Value> {
        self.fields.get("args")?.get(name)
    }

    pub(crate) fn end_ns(&self) -> i64 {
        self.start_ns.unwrap_or(i64::MIN).saturating_add(self.duration_ns)
    }
}

impl Run {
    /// Reads the descriptions of the files in `dir`.
    ///
    /// # Errors
    ///
    /// [`Trace`](drumline_error::ErrorKind::Trace) when there is no file, when one is broken, or when they belong
    /// to two runs.
    pub(crate) fn open(dir: &Path) -> Result<Run> {
        let entries = fs::read_dir(dir).map_err(|error| {
            trouble(dir, 0, format!("{error}; give the directory that DRUMLINE_TRACE named"))
        })?;
        let mut notes = Vec::new();
        let mut files: Vec<RankFile> = Vec::new();
        for entry in entries {
            let path = entry.map_err(|error| trouble(dir, 0, error))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !(name.starts_with("rank-") && name.ends_with(".json")) {
                continue;
            }
            match RankFile::open(&path)? {
                Some(file) => files.push(file),
                None => notes.push(format!("{} ends before it begins", path.display())),
            }
        }
        if files.is_empty() {
            let problem = "no file rank-N.json is there: start the job with DRUMLINE_TRACE set to \
                           this directory";
            return Err(trouble(dir, 0, problem));
        }
        files.sort_by_key(|file| file.rank);
        check_unity(&files)?;
        align(&mut files, &mut notes);
        Ok(Run { files, notes })
    }

    /// All events, in the order in which they ended.
    pub(crate) fn events(&self) -> Result<impl Iterator<Item = Result<Event>>> {
        let mut readers = Vec::new();
        let mut next = BinaryHeap::new();
        let mut failed = None;
        for (index, file) in self.files.iter().enumerate() {
            let mut reader = file.events()?;
            match reader.next().transpose() {
                Ok(event) => {
                    readers.push((reader, event));
                    next.push(Reverse((i64::MIN, index)));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(std::iter::from_fn(move || {
            if let Some(error) = failed.take() {
                return Some(Err(error));
            }
            loop {
                let Reverse((_, index)) = next.pop()?;
                let (reader, waiting) = &mut readers[index];
                let Some(event) = waiting.take() else { continue };
                match reader.next().transpose() {
                    Ok(following) => {
                        if let Some(following) = &following {
                            next.push(Reverse((following.end_ns(), index)));
                        }
                        *waiting = following;
                    }
                    Err(error) => failed = Some(error),
                }
                return Some(Ok(event));
            }
        }))
    }
}

/// Checks that the ranks have met: they agree on their first group.
fn check_unity(files: &[RankFile]) -> Result<()> {
    let mut first: Option<(&RankFile, &Group)> = None;
    for file in files {
        let Some(group) = file.groups.values().next() else { continue };
        let (other, expected) = *first.get_or_insert((file, group));
        if group.digest != expected.digest {
            let problem = format!(
                "it is of another run than {}: remove the files of one of them",
                other.path.display()
            );
            return Err(trouble(&file.path, 0, problem));
        }
    }
    Ok(())
}

/// Brings all times to rank 0's clock.
fn align(files: &mut [RankFile], notes: &mut Vec<String>) {
    let compared = files.iter().find_map(|file| file.measured.as_ref());
    let reference = compared.map_or_else(|| files[0].clock.clone(), |(clock, _)| clock.clone());
    let anchor = files.iter().find(|file| file.clock == reference).map(|file| file.wall_ns);
    for file in files {
        file.offset = match &file.measured {
            _ if file.clock == reference => Offset::NONE,
            Some((clock, offset)) if *clock == reference => *offset,
            _ => {
                notes.push(format!(
                    "the clock of rank {} was not compared with that of rank 0: aligned by the \
                     clocks on the wall",
                    file.rank
                ));
                let offset_ns = file.wall_ns.saturating_sub(anchor.unwrap_or(file.wall_ns));
                // The wall clocks are probably close, but nothing has compared them.
                Offset { offset_ns, uncertainty_ns: u64::MAX }
            }
        };
    }
}

impl RankFile {
    /// Reads the description of a file. `None` if the file ends before that is complete.
    fn open(path: &Path) -> Result<Option<RankFile>> {
        let mut lines = Lines::open(path)?;
        let Some(first) = lines.next().transpose()? else { return Ok(None) };
        let what = first.1.get("args").cloned().unwrap_or_default();
        if first.1.get("name").and_then(Value::as_str) != Some(format::FILE) {
            return Err(trouble(path, first.0, "this is no trace of a rank of drumline"));
        }
        if what["version"] != format::VERSION {
            let problem = format!("version {} of the format cannot be read here", what["version"]);
            return Err(trouble(path, first.0, problem));
        }
        let missing = |field: &str| trouble(path, first.0, format!("{field} is missing or wrong"));
        let mut file = RankFile {
            path: path.to_owned(),
            rank: what["rank"].as_u64().ok_or_else(|| missing("rank"))? as Rank,
            clock: what["clock"].as_str().ok_or_else(|| missing("clock"))?.to_owned(),
            wall_ns: decimal(&what["wall_ns"]).ok_or_else(|| missing("wall_ns"))?,
            measured: None,
            offset: Offset::NONE,
            groups: BTreeMap::new(),
        };
        for line in lines {
            let (number, fields) = line?;
            file.learn(&fields).ok_or_else(|| {
                trouble(path, number, "this description of a group or clock is incomplete")
            })?;
        }
        Ok(Some(file))
    }

    /// Takes in an event that describes the file. `None` if the event is not valid.
    fn learn(&mut self, fields: &Map<String, Value>) -> Option<()> {
        let what = fields.get("args");
        match fields.get("name").and_then(Value::as_str)? {
            format::GROUP => {
                let what = what?;
                let group = Group {
                    digest: what["digest"].as_str()?.to_owned(),
                    world_size: what["world_size"].as_u64()? as usize,
                };
                self.groups.insert(fields.get("tid")?.as_u64()?, group);
            }
            format::CLOCK => {
                let what = what?;
                let offset = Offset {
                    offset_ns: decimal(&what["offset_ns"])?,
                    uncertainty_ns: decimal(&what["uncertainty_ns"])?.unsigned_abs(),
                };
                self.measured = Some((what["reference"].as_str()?.to_owned(), offset));
            }
            _ => {}
        }
        Some(())
    }

    fn events(&self) -> Result<impl Iterator<Item = Result<Event>> + use<>> {
        let (path, rank, offset_ns) = (self.path.clone(), self.rank, self.offset.offset_ns);
        Ok(Lines::open(&self.path)?.map(move |line| {
            let (number, fields) = line?;
            let ns = |field: &str| match fields.get(field) {
                None => Ok(None),
                Some(value) => match value.as_f64() {
                    Some(us) => Ok(Some((us * 1_000.0).round() as i64)),
                    None => Err(trouble(&path, number, format!("{field} is no number"))),
                },
            };
            let start_ns = ns("ts")?.map(|at| at.saturating_add(offset_ns));
            let duration_ns = ns("dur")?.unwrap_or(0);
            Ok(Event { rank, fields, start_ns, duration_ns })
        }))
    }
}

fn decimal(value: &Value) -> Option<i64> {
    value.as_str()?.parse().ok()
}
