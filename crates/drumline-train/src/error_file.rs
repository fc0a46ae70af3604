//! The file in which a process says why it failed. The launcher names it in a variable, and reads it once the
//! process has ended.
//!
//! The format is that of torch, whose `@record` writes such files and whose launcher reads them:
//!
//! ```json
//! {"message": {"message": "ValueError: no data",
//!              "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1764055200"}}}
//! ```
//!
//! A reader believes nothing: a process that runs out of memory or disk may leave half a file, and a program may
//! put anything there.

use std::{
    fs::{File, Metadata},
    io::{self, Read},
    path::Path,
    time::{Duration, SystemTime},
};

use drumline_shm::files;
use serde_json::{Map, Value, json};

/// The variable that has the path of the file.
pub const VARIABLE: &str = "TORCHELASTIC_ERROR_FILE";

/// The most bytes of a file that are read. A traceback has some thousands.
const BYTES_MAX: u64 = 1024 * 1024;

/// What Rust writes before the `Debug` of an error that `main` returns.
pub(crate) const RUST_ERROR: &str = "Error: ";

/// How much is kept of a file that is not understood.
const DAMAGED_MAX: usize = 2 * 1024;

/// What a process has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorFile {
    /// Why it failed.
    Failure(Failure),
    /// Something else.
    Damaged {
        /// What is wrong with the file.
        why: String,
        /// The first bytes.
        beginning: Vec<u8>,
    },
}

/// Why a process failed, in its own words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The error: `ValueError: no data`.
    pub message: String,
    /// Where it happened, in many lines. For Python that is a traceback, whose last line has the message, too.
    pub callstack: Option<String>,
    /// When it happened.
    pub at: Option<SystemTime>,
    /// All that the file says.
    json: Map<String, Value>,
}

impl Failure {
    /// A failure of this moment.
    pub fn now(message: impl Into<String>, callstack: impl Into<String>) -> Failure {
        let (message, callstack) = (message.into(), callstack.into());
        let at = SystemTime::now();
        // torch reads whole seconds.
        let seconds = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let json = json!({"message": {
            "message": message,
            "extraInfo": {"py_callstack": callstack, "timestamp": seconds.to_string()},
        }});
        let json = json.as_object().cloned().unwrap_or_default();
        Failure { message, callstack: Some(callstack), at: Some(at), json }
    }

    /// All that the file says.
    pub fn json(&self) -> &Map<String, Value> {
        &self.json
    }

    /// What it says, once: a traceback ends with the message, and the `Debug` of an error says in other words what its
    /// `Display` does.
    pub fn text(&self) -> String {
        match &self.callstack {
            Some(stack) if stack.contains(&self.message) => stack.clone(),
            Some(stack) if !stack.starts_with(RUST_ERROR) => format!("{}\n{stack}", self.message),
            _ => self.message.clone(),
        }
    }

    /// Writes the file, as it was read.
    ///
    /// # Errors
    ///
    /// The system does not write it.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        write(path, &self.json)
    }

    /// All that the file says, as JSON.
    pub fn to_json(&self) -> String {
        Value::Object(self.json.clone()).to_string()
    }

    /// Writes the file of a process that failed because another one did, as torch's launcher does: with the exit
    /// code of that one, which it could not know itself.
    ///
    /// # Errors
    ///
    /// The system does not write it.
    pub fn pass_on(&self, path: &Path, exit_code: i32) -> io::Result<()> {
        let mut json = self.json.clone();
        if let Some(Value::Object(message)) = json.get_mut("message") {
            message.insert("errorCode".into(), exit_code.into());
        }
        write(path, &json)
    }
}

fn write(path: &Path, json: &Map<String, Value>) -> io::Result<()> {
    files::write(path, &serde_json::to_vec(json)?)
}

impl ErrorFile {
    /// Reads the file at `path`. `None` if there is none.
    pub fn read(path: &Path) -> Option<ErrorFile> {
        match files::open_to_read(path) {
            Ok((file, _)) => Some(ErrorFile::read_from(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Some(ErrorFile::damaged(error.to_string(), &[]))
            }
            Err(error) => Some(ErrorFile::damaged(format!("it cannot be read: {error}"), &[])),
        }
    }

    /// Reads an open file, from where it is.
    pub fn read_from(file: File) -> ErrorFile {
        let Some(about) = file.metadata().ok().filter(Metadata::is_file) else {
            return ErrorFile::damaged("it is no regular file", &[]);
        };
        let mut bytes = Vec::new();
        if let Err(error) = file.take(BYTES_MAX + 1).read_to_end(&mut bytes) {
            return ErrorFile::damaged(format!("it cannot be read: {error}"), &bytes);
        }
        if bytes.len() as u64 > BYTES_MAX {
            return ErrorFile::damaged("it has more than 1 MiB", &bytes);
        }
        let mut read = ErrorFile::parse(&bytes);
        if let (ErrorFile::Failure(failure), Ok(written)) = (&mut read, about.modified()) {
            failure.at = Some(within_second(failure.at, written));
        }
        read
    }

    /// What the bytes of a file say.
    pub fn parse(bytes: &[u8]) -> ErrorFile {
        if bytes.is_empty() {
            return ErrorFile::damaged("it is empty", bytes);
        }
        let json = match serde_json::from_slice(bytes) {
            Ok(Value::Object(json)) => json,
            Ok(_) => return ErrorFile::damaged("it is no object of JSON", bytes),
            Err(error) => return ErrorFile::damaged(format!("it is not JSON: {error}"), bytes),
        };
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let (message, details) = match json.get("message") {
            // Programs that do not use torch's handler may write the message alone.
            Some(Value::String(message)) => (Some(message.clone()), Some(&json)),
            Some(Value::Object(inner)) => (
                inner.get("message").and_then(text),
                inner.get("extraInfo").and_then(Value::as_object),
            ),
            _ => (None, None),
        };
        let Some(message) = message else {
            return ErrorFile::damaged("it has no message", bytes);
        };
        let detail = |name: &str| details?.get(name);
        let callstack = detail("py_callstack").and_then(text);
        let seconds = detail("timestamp").and_then(|at| match at {
            Value::String(digits) => digits.parse().ok(),
            other => other.as_u64(),
        });
        let at = seconds
            .and_then(|seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
        ErrorFile::Failure(Failure { message, callstack, at, json })
    }

    fn damaged(why: impl Into<String>, bytes: &[u8]) -> ErrorFile {
        let beginning = bytes[..bytes.len().min(DAMAGED_MAX)].to_vec();
        ErrorFile::Damaged { why: why.into(), beginning }
    }
}

/// The time of a failure. The file says the second; the time at which it was written is finer, but that of a copy is
/// later, and another host may have another clock.
fn within_second(told: Option<SystemTime>, written: SystemTime) -> SystemTime {
    let end = |second: SystemTime| second.checked_add(Duration::from_nanos(999_999_999));
    match told.and_then(|second| Some((second, end(second)?))) {
        Some((second, end)) => written.clamp(second, end),
        None => written,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn failure(json: &str) -> Failure {
        match ErrorFile::parse(json.as_bytes()) {
            ErrorFile::Failure(failure) => failure,
            damaged => panic!("{damaged:?}"),
        }
    }

    fn why(bytes: &[u8]) -> String {
        match ErrorFile::parse(bytes) {
            ErrorFile::Damaged { why, .. } => why,
            failure => panic!("{failure:?}"),
        }
    }

    #[test]
    fn what_is_written_is_read_again_and_has_the_form_of_torch() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("error.json");
        assert_eq!(ErrorFile::read(&path), None);
        let written = Failure::now("ValueError: \"a\"\n", "Traceback\n  é");
        written.write(&path).unwrap();
        let Some(ErrorFile::Failure(read)) = ErrorFile::read(&path) else { panic!() };
        assert_eq!((&read.message, &read.callstack), (&written.message, &written.callstack));
        let json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let seconds = json["message"]["extraInfo"]["timestamp"].as_str().unwrap();
        let second = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.parse().unwrap());
        assert_eq!(read.at, Some(within_second(Some(second), modified(&path))));
        read.pass_on(&path, -9).unwrap();
        let passed: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(passed["message"]["errorCode"], -9);
        assert_eq!(passed["message"]["message"], "ValueError: \"a\"\n");
    }

    fn modified(path: &Path) -> SystemTime {
        fs::metadata(path).unwrap().modified().unwrap()
    }

    #[test]
    fn the_time_is_that_of_the_file_within_the_second_that_it_names() {
        let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
        assert_eq!(within_second(Some(at(7_000)), at(7_300)), at(7_300));
        assert_eq!(within_second(Some(at(7_000)), at(6_999)), at(7_000));
        let end = at(8_000) - Duration::from_nanos(1);
        assert_eq!(within_second(Some(at(7_000)), at(9_000)), end);
        assert_eq!(within_second(None, at(9_001)), at(9_001));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("error.json");
        fs::write(&path, r#"{"message": "boom"}"#).unwrap();
        let Some(ErrorFile::Failure(read)) = ErrorFile::read(&path) else { panic!() };
        assert_eq!(read.at, Some(modified(&path)));
    }

    #[test]
    fn the_text_says_everything_once() {
        for (message, stack, text) in [
            ("boom", "Traceback:\n  x\nValueError: boom\n", "Traceback:\n  x\nValueError: boom\n"),
            ("boom", "at main", "boom\nat main"),
            ("no data", "Error: \"no data\"", "Error: \"no data\""),
            ("no \"data\"", r#"Error: "no \"data\"""#, "no \"data\""),
            ("rank 1 has ended", "Error: Collective(PeerExited { peer: 1 })", "rank 1 has ended"),
        ] {
            assert_eq!(Failure::now(message, stack).text(), text);
        }
        assert_eq!(failure(r#"{"message": "boom"}"#).text(), "boom");
    }

    #[test]
    fn a_message_may_stand_alone() {
        let alone = failure(r#"{"message": "boom", "timestamp": 7}"#);
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(7);
        assert_eq!((alone.message.as_str(), alone.callstack, alone.at), ("boom", None, Some(at)));
        let bare = failure(r#"{"message": {"message": "boom"}}"#);
        assert_eq!((bare.message.as_str(), bare.callstack, bare.at), ("boom", None, None));
        assert_eq!(failure(r#"{"message": "x", "timestamp": 18446744073709551615}"#).at, None);
    }

    #[test]
    fn what_is_wrong_with_a_damaged_file_is_told() {
        assert_eq!(why(b""), "it is empty");
        assert!(why(br#"{"message": {"mess"#).starts_with("it is not JSON: EOF"));
        assert!(why(b"\xff\xfe").starts_with("it is not JSON: "));
        assert_eq!(why(b"[1]"), "it is no object of JSON");
        assert_eq!(why(br#"{"message": {"message": 1}}"#), "it has no message");
        assert_eq!(why(b"{}"), "it has no message");
        assert!(why(&[b'['; 100_000]).contains("recursion limit"));
    }

    #[test]
    fn huge_files_pipes_and_devices_do_not_stop_the_reader() {
        let directory = tempfile::tempdir().unwrap();
        let huge = directory.path().join("huge");
        File::create(&huge).unwrap().set_len(1 << 40).unwrap();
        let Some(ErrorFile::Damaged { why, beginning }) = ErrorFile::read(&huge) else { panic!() };
        assert_eq!((why.as_str(), beginning.len()), ("it has more than 1 MiB", DAMAGED_MAX));
        let fifo = directory.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        for path in [fifo.as_path(), Path::new("/dev/zero"), directory.path()] {
            let Some(ErrorFile::Damaged { why, .. }) = ErrorFile::read(path) else { panic!() };
            assert_eq!(why, "it is no regular file", "{}", path.display());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = ErrorFile::parse(&bytes);
        }
    }
}
