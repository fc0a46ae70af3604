//! Reads a trace file line by line.

use std::{
    fmt,
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use drumline_error::{ErrorKind, Section};
use drumline_shm::files::open_to_read;
use serde_json::{Map, Value};

use crate::{Error, Result};

/// The longest line. No trace file has longer ones.
const LINE_BYTES_MAX: u64 = 64 * 1024;

/// The events of a file, with their line numbers. An event that is cut short, because its rank was killed,
/// ends the file.
pub(crate) struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    number: u64,
    text: Vec<u8>,
    has_ended: bool,
}

impl Lines {
    pub(crate) fn open(path: &Path) -> Result<Lines> {
        let (file, _) = open_to_read(path).map_err(|error| trouble(path, 0, error))?;
        let (reader, text) = (BufReader::new(file), Vec::new());
        Ok(Lines { path: path.to_owned(), reader, number: 0, text, has_ended: false })
    }

    /// Reads a line. Returns whether it is complete. `None` at the end of the file.
    fn read(&mut self) -> io::Result<Option<bool>> {
        self.text.clear();
        self.number += 1;
        let mut limited = self.reader.by_ref().take(LINE_BYTES_MAX);
        limited.read_until(b'\n', &mut self.text)?;
        if self.text.is_empty() {
            return Ok(None);
        }
        let is_whole = self.text.pop_if(|byte| *byte == b'\n').is_some();
        Ok(Some(is_whole || self.text.len() as u64 == LINE_BYTES_MAX))
    }

    fn event(&mut self) -> Result<Option<Map<String, Value>>, String> {
        loop {
            let read = self.read().map_err(|error| error.to_string())?;
            let Some(is_whole) = read else { return Ok(None) };
            let text = self.text.strip_suffix(b",").unwrap_or(&self.text);
            match text {
                b"[" if self.number == 1 => continue,
                _ if self.number == 1 && is_whole => {
                    return Err("it should begin with [".to_owned());
                }
                b"]" => {
                    return match self.read().map_err(|error| error.to_string())? {
                        None => Ok(None),
                        Some(_) => Err("something follows the end".to_owned()),
                    };
                }
                _ => {}
            }
            return match serde_json::from_slice(text) {
                Ok(event) => Ok(Some(event)),
                Err(_) if !is_whole => Ok(None),
                Err(error) => Err(format!("this is no event: {error}")),
            };
        }
    }
}

impl Iterator for Lines {
    type Item = Result<(u64, Map<String, Value>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        match self.event() {
            Ok(Some(event)) => Some(Ok((self.number, event))),
            Ok(None) => {
                self.has_ended = true;
                None
            }
            Err(problem) => {
                self.has_ended = true;
                Some(Err(trouble(&self.path, self.number, problem)))
            }
        }
    }
}

/// An error about line `line` of `path`, or about the whole file if `line` is 0.
pub(crate) fn trouble(path: &Path, line: u64, problem: impl fmt::Display) -> Error {
    let place = match line {
        0 => String::new(),
        line => format!(", line {line}"),
    };
    let text = format!("trace {}{place}: {problem}", path.display());
    Error::new(ErrorKind::Trace, Section::Traces, text)
}
