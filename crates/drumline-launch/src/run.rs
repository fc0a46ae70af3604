//! A job from its start to its end: one world after another, until one ends well or none may follow.

use std::time::{Duration, SystemTime};

use crate::{
    Result, agent,
    attempt::{Attempt, Ended},
    ending::{signal_exit_code, signal_name},
    job::Job,
    launch::Launch,
    listener::Listener,
    report,
    restarts::{EndedWorld, Next, RestartBudget},
    supervisor::Verdict,
    world::World,
};
use drumline::trace::Trace;

/// Runs `job`, prints what its workers print, reports what went wrong, and returns the exit code:
/// 0 if all workers exited with 0, the code of the worker that failed first, or 128 + the number of
/// the signal that stopped the launcher. After a failure all workers start again, if [`Job::restarts`] says
/// so; the exit code is that of the last failure.
///
/// When this returns, no worker is left, and no process that a worker has started. The command in
/// [`Job::relaunch`] must handle [`KEEP_SUBCOMMAND`](crate::KEEP_SUBCOMMAND) by calling
/// [`keep`](crate::keep()).
///
/// # Errors
///
/// The program cannot be run, the port is taken, or a system call failed. No worker is left in this case,
/// either.
pub fn run(job: &Job) -> Result<u8> {
    let launch = Launch::of(job)?;
    let mut listener = Listener::new(job)?;
    if let Some(meeting) = &job.meeting {
        return agent::run(&launch, meeting, &mut listener);
    }
    let mut budget = RestartBudget::new(job.restarts);
    let mut restart = 0;
    loop {
        let world = World::alone(job, restart);
        let mut attempt =
            Attempt::start(&launch, &world, launch.stores_alone()?, None, &listener.events)?;
        listener.supervise(&mut attempt).inspect_err(|_| attempt.abandon())?;
        let mut ended = attempt.end()?;
        let is_printed = listener.finish_output(&mut ended)?;
        if is_printed {
            report(&launch, &ended);
        }
        let ending = match (ended.verdict, ended.first_failure()) {
            // Nobody abandons the only host.
            (Verdict::Success | Verdict::Abandoned, _) => return Ok(0),
            (Verdict::Stopped(signal), _) => return Ok(signal_exit_code(signal.as_raw())),
            (Verdict::Failed { .. }, None) => return Ok(1),
            (Verdict::Failed { .. }, Some(ending)) => ending,
        };
        let world = EndedWorld { ending, lived: ended.lived, stepped: ended.stepped };
        let next = budget.after(world);
        let pause = match next {
            Next::Restart(pause) if is_printed => pause,
            _ => {
                if is_printed && let Some(line) = report::no_restart(next) {
                    ended.console.report(line.as_bytes());
                }
                return Ok(ending.exit_code());
            }
        };
        restart += 1;
        let line = report::restart(budget.used(), job.restarts.max, pause);
        ended.console.report(line.as_bytes());
        if let Some(signal) = listener.pause(pause)? {
            let stopped = format!("drumline: stopped by {}\n", signal_name(signal.as_raw()));
            ended.console.report(stopped.as_bytes());
            return Ok(signal_exit_code(signal.as_raw()));
        }
    }
}

/// Prints what went wrong in a world, and where its traces are.
pub(crate) fn report(launch: &Launch<'_>, ended: &Ended) {
    let tail = match ended.verdict {
        Verdict::Failed { worker } => ended.console.tail(worker),
        Verdict::Success | Verdict::Stopped(_) | Verdict::Abandoned => Vec::new(),
    };
    ended.console.report(&report::render(ended.verdict, &ended.fates, &tail, &ended.left));
    let trace = launch.config.trace.as_ref();
    if let Some(Trace { dir, .. }) = trace.filter(|it| has_written(it, ended.started_at)) {
        let line = format!("drumline: traces are in {0}: drumline trace page {0}\n", dir.display());
        ended.console.report(line.as_bytes());
    }
}

/// Whether rank 0 has written a trace since then: its program may not use this library at all.
fn has_written(trace: &Trace, since: SystemTime) -> bool {
    let file = trace.dir.join("rank-0.json");
    // File systems may round times down, to a second at most.
    let since = since - Duration::from_secs(1);
    file.metadata().and_then(|file| file.modified()).is_ok_and(|modified| modified >= since)
}
