//! A program says why it fails, in the file that its launcher has named.

use std::{
    backtrace::Backtrace,
    env,
    fmt::{Debug, Display},
    panic::{self, PanicHookInfo},
    path::PathBuf,
    sync::{
        Once,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use crate::error_file::{self, Failure, RUST_ERROR};

/// Runs a program. If it panics or returns an error, the report of the launcher has the text, with the backtrace of a
/// panic.
///
/// `drumline run` and torchrun name a file for each rank in `TORCHELASTIC_ERROR_FILE`, in which the rank says why it
/// failed. This function writes it as `@record` of torch does in Python. Without that variable it only runs
/// `program`. Of several failures of a process the first one counts: the others mostly follow from it.
///
/// ```
/// # use drumline_train as drumline;
/// fn main() -> Result<(), std::num::ParseIntError> {
///     drumline::record(|| {
///         let steps: u32 = "1000".parse()?;
///         println!("{steps} steps");
///         Ok(())
///     })
/// }
/// ```
///
/// # Errors
///
/// Those of `program`.
pub fn record<T, E: Display + Debug>(program: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    record_panics();
    program().inspect_err(record_error)
}

/// Every panic from now on, of any thread, is told as by [`record`]. What else happens in a panic stays as it was.
pub fn record_panics() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            write(|| failure_of(panic, &Backtrace::force_capture().to_string()));
            before(panic);
        }));
    });
}

/// Writes an error of the program, as Rust prints it where `main` returns it.
pub(crate) fn record_error(error: &(impl Display + Debug)) {
    write(|| Failure::now(error.to_string(), format!("{RUST_ERROR}{error:?}")));
}

fn write(failure: impl FnOnce() -> Failure) {
    static HAS_FAILED: AtomicBool = AtomicBool::new(false);
    let Some(path) = env::var_os(error_file::VARIABLE).filter(|path| !path.is_empty()) else {
        return;
    };
    if !HAS_FAILED.swap(true, Ordering::SeqCst)
        && let Err(error) = failure().write(&PathBuf::from(&path))
    {
        tracing::warn!("cannot write the error file {}: {error}", path.display());
    }
}

fn failure_of(panic: &PanicHookInfo<'_>, backtrace: &str) -> Failure {
    let thread = thread::current();
    let name = thread.name().unwrap_or("<unnamed>");
    let payload = panic.payload_as_str().unwrap_or("a panic without a text");
    let stack = format!("thread '{name}' {panic}\nstack backtrace:\n{}", of_the_program(backtrace));
    Failure::now(payload, stack)
}

/// The frames between those that carry out a panic and those that start a thread.
fn of_the_program(backtrace: &str) -> String {
    let mut frames: Vec<Vec<&str>> = Vec::new();
    for line in backtrace.lines() {
        let number = line.trim_start().split_once(": ").map(|(number, _)| number);
        let begins = number.is_some_and(|it| it.parse::<usize>().is_ok());
        match frames.last_mut() {
            Some(frame) if !begins => frame.push(line),
            _ => frames.push(vec![line]),
        }
    }
    let is_of = |names: &[&str], frame: &[&str]| names.iter().any(|name| frame[0].contains(name));
    let panics = [
        "rust_begin_unwind",
        "core::panicking::",
        "std::panicking::",
        "core::result::unwrap_failed",
        "core::option::",
    ];
    let begin = frames.iter().rposition(|frame| is_of(&panics[..2], frame));
    let begin = begin.map_or(0, |last| last + 1);
    let program = &frames[begin..];
    let skipped = program.iter().take_while(|frame| is_of(&panics, frame)).count();
    let program = &program[skipped..];
    let end = program.iter().position(|frame| is_of(&["__rust_begin_short_backtrace"], frame));
    let program = &program[..end.unwrap_or(program.len())];
    program.concat().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backtrace_has_the_frames_of_the_program() {
        let backtrace = "   0: std::backtrace::Backtrace::force_capture
   1: drumline_train::record::hook
             at ./src/record.rs:50:5
   2: std::panicking::rust_panic_with_hook
   3: __rustc::rust_begin_unwind
   4: core::panicking::panic_fmt
   5: core::result::unwrap_failed
   6: train::load
             at ./src/main.rs:12:9
   7: train::main
   8: std::sys::backtrace::__rust_begin_short_backtrace
   9: main";
        let kept = "   6: train::load\n             at ./src/main.rs:12:9\n   7: train::main";
        assert_eq!(of_the_program(backtrace), kept);
        assert_eq!(of_the_program("unsupported"), "unsupported");
        assert_eq!(of_the_program(""), "");
    }
}
