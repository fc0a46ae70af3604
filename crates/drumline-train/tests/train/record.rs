//! What a program tells its launcher when it fails, as real processes.

use std::{env, fs, path::Path, process::Output, thread};

use drumline::record;
use drumline_testing::itself;
use serde_json::Value;

/// Runs this test as a program that does `what`.
fn run(what: &str, error_file: Option<&Path>) -> Output {
    let mut program = itself("record::program");
    program.env("RECORD_TEST", what);
    match error_file {
        Some(path) => program.env("TORCHELASTIC_ERROR_FILE", path),
        None => program.env_remove("TORCHELASTIC_ERROR_FILE"),
    };
    program.output().unwrap()
}

/// A frame of its own, however the compiler divides its work.
#[inline(never)]
fn fail() {
    panic!("out of patience");
}

/// A program that fails as it is told. As a test, it does nothing.
#[test]
fn program() {
    let Ok(what) = env::var("RECORD_TEST") else { return };
    let parsed = record(|| match &*what {
        "panic" => {
            fail();
            Ok(0)
        }
        "panic of a thread" => {
            let joined = thread::Builder::new().name("loader".into()).spawn(fail).unwrap().join();
            joined.unwrap();
            Ok(0)
        }
        "error" => "x".parse::<u32>(),
        _ => Ok(7),
    });
    println!("result {:?}", parsed.unwrap());
}

fn told(what: &str) -> (Value, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("error.json");
    let output = run(what, Some(&path));
    assert_eq!(output.status.code(), Some(101), "{output:?}");
    let json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    (json["message"].clone(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_panic_is_told_with_the_frames_of_the_program_and_printed_as_always() {
    let (message, stderr) = told("panic");
    assert_eq!(message["message"], "out of patience");
    let stack = message["extraInfo"]["py_callstack"].as_str().unwrap();
    let mut lines = stack.lines();
    let first = lines.next().unwrap();
    assert!(first.starts_with("thread '") && first.contains("' panicked at "), "{stack}");
    assert_eq!((lines.next(), lines.next()), (Some("out of patience"), Some("stack backtrace:")));
    assert!(lines.next().unwrap().contains("record::fail"), "{stack}");
    assert!(message["extraInfo"]["timestamp"].as_str().unwrap().parse::<u64>().is_ok());
    assert!(stderr.contains("panicked at ") && stderr.contains("out of patience"), "{stderr}");
}

#[test]
fn of_several_failures_the_first_one_counts() {
    let (message, stderr) = told("panic of a thread");
    let stack = message["extraInfo"]["py_callstack"].as_str().unwrap();
    assert!(stack.starts_with("thread 'loader' panicked at "), "{stack}");
    assert!(stderr.matches("panicked at ").count() == 2, "{stderr}");
}

#[test]
fn an_error_is_told_and_returned() {
    let (message, _) = told("error");
    assert_eq!(message["message"], "invalid digit found in string");
    let stack = message["extraInfo"]["py_callstack"].as_str().unwrap();
    assert_eq!(stack, "Error: ParseIntError { kind: InvalidDigit }");
}

#[test]
fn a_program_that_ends_well_or_without_a_launcher_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("error.json");
    let output = run("nothing", Some(&path));
    assert!(
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("result 7")
    );
    assert!(!path.exists());
    assert_eq!(run("panic", None).status.code(), Some(101));
}
