//! What a rank that has failed said before.

use std::{
    fmt::Write,
    time::{Duration, SystemTime},
};

use drumline::{blame::Words, error_file::ErrorFile};

use crate::{files::WorldFiles, output::Console, quote::quoted};

/// What the rank that failed first has told of its failure.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastWords {
    /// The last lines of its stderr.
    pub(crate) tail: Vec<Vec<u8>>,
    /// Its error file, if it has written one.
    pub(crate) error: Option<ErrorFile>,
}

impl LastWords {
    /// What the worker with this local rank has written.
    pub(crate) fn of(worker: usize, console: &Console, files: &WorldFiles) -> LastWords {
        let error_file = files.error_file(worker);
        LastWords {
            tail: console.tail(worker),
            error: error_file.and_then(|path| ErrorFile::read(&path)),
        }
    }

    /// What they tell of the failure. Times count from `since`; a file without one is of the time `noticed`.
    pub(crate) fn tell(&self, since: SystemTime, noticed: Duration) -> Words {
        match &self.error {
            Some(ErrorFile::Failure(failure)) => Words::of_failure(failure, since, noticed),
            Some(ErrorFile::Damaged { .. }) | None => {
                Words::of_output(&String::from_utf8_lossy(&self.tail.join(&b'\n')))
            }
        }
    }

    /// The traceback, or else the last lines of stderr, which mostly have it, too.
    pub(crate) fn render(&self) -> Vec<u8> {
        let mut text = String::new();
        match &self.error {
            Some(ErrorFile::Failure(failure)) => {
                text.push_str("drumline: it wrote to its error file:\n");
                quote(&mut text, &failure.text());
                return text.into_bytes();
            }
            Some(ErrorFile::Damaged { why, beginning }) => {
                let _ = write!(text, "drumline: its error file is damaged: {why}");
                text.push_str(if beginning.is_empty() { "\n" } else { "; it begins with:\n" });
                quote(&mut text, &String::from_utf8_lossy(beginning));
            }
            None => {}
        }
        text.push_str(match self.tail.is_empty() {
            true => "drumline: it wrote nothing to its stderr\n",
            false => "drumline: last lines of its stderr:\n",
        });
        let mut bytes = text.into_bytes();
        for line in &self.tail {
            bytes.extend_from_slice(b"    ");
            bytes.extend_from_slice(line);
            bytes.push(b'\n');
        }
        bytes
    }
}

fn quote(text: &mut String, said: &str) {
    for line in quoted(said) {
        let _ = writeln!(text, "    {line}");
    }
}

#[cfg(test)]
mod tests {
    use drumline::error_file::Failure;

    use super::*;

    fn said(error: ErrorFile) -> Vec<String> {
        let words = LastWords { tail: vec![b"tail".to_vec()], error: Some(error) };
        String::from_utf8(words.render()).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_error_file_says_more_than_stderr() {
        let of = |message: &str, stack: &str| ErrorFile::Failure(Failure::now(message, stack));
        let told = "drumline: it wrote to its error file:";
        assert_eq!(
            said(of("ValueError: x", "Traceback:\n  y\nValueError: x\n")),
            [told, "    Traceback:", "      y", "    ValueError: x"]
        );
        assert_eq!(said(of("x\x1b[2J", "at y")), [told, "    x\\u{1b}[2J", "    at y"]);
    }

    #[test]
    fn a_damaged_error_file_is_quoted_beside_stderr() {
        let damaged = |beginning: &[u8]| {
            said(ErrorFile::Damaged { why: "it is empty".into(), beginning: beginning.to_vec() })
        };
        let why = "drumline: its error file is damaged: it is empty";
        let tail = ["drumline: last lines of its stderr:", "    tail"];
        assert_eq!(damaged(b""), [&[why][..], &tail].concat());
        let begins = format!("{why}; it begins with:");
        let quoted = "    {\u{fffd}\\u{0}";
        assert_eq!(damaged(b"{\xff\0"), [&[&begins, quoted][..], &tail].concat());
    }

    #[test]
    fn silence_is_told() {
        let nothing = LastWords::default().render();
        assert_eq!(nothing, b"drumline: it wrote nothing to its stderr\n");
    }
}
