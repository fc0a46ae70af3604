//! `fail-nth N VARIANT REPORT PROGRAM ARGUMENTS…`: lets the N-th counted system call of the program fail. The
//! file REPORT says how many calls were counted and which one failed. With `CALL=statx` in the environment,
//! only calls of that name count.

#[cfg(not(target_arch = "x86_64"))]
fn main() -> Result<(), &'static str> {
    Err("the registers of this processor are not known: calls can be failed on x86-64 only")
}

#[cfg(target_arch = "x86_64")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    x86_64::main()
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::{env, error::Error, ffi::OsString, fs, process, process::Command};

    use drumline_faults::{become_traced, trace};

    pub(crate) fn main() -> Result<(), Box<dyn Error>> {
        let arguments: Vec<OsString> = env::args_os().skip(1).collect();
        if arguments.first().is_some_and(|first| first == "--traced") {
            return Err(become_traced(&arguments[1..]).into());
        }
        let [nth, variant, report, command @ ..] = &arguments[..] else {
            return Err("usage: fail-nth N VARIANT REPORT PROGRAM ARGUMENTS…".into());
        };
        let number = |text: &OsString| text.to_string_lossy().parse::<usize>();
        let (nth, variant) = (number(nth)?, number(variant)?);
        let program = Command::new(env::current_exe()?).arg("--traced").args(command).spawn()?;
        // The tracer waits for the program and all its threads; `Child::wait` would not wait for the threads.
        let outcome = trace(i32::try_from(program.id())?, nth, variant, env::var("CALL").ok())?;
        let failed = outcome.failed.unwrap_or_default();
        fs::write(report, format!("{} {} {failed}", outcome.start_up, outcome.calls))?;
        process::exit(outcome.status)
    }
}
