//! A job from its start to its end: one world after another, until one ends well or none may follow.

use std::time::{Duration, Instant, SystemTime};

use drumline::trace::Trace;
use rustix::process::Signal;

use crate::{
    Error, Result,
    attempt::{Attempt, Ended},
    ending::{signal_exit_code, signal_name},
    events::{Events, Source},
    job::{Job, OnSignal},
    launch::Launch,
    monitor::happening::Happening,
    report,
    restarts::{EndedWorld, Next, RestartBudget},
    signals::Signals,
    supervisor::{Event, Verdict},
    world::World,
};

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
    launch.monitor.tell(Happening::JobBegins {
        program: launch.program.to_string_lossy().into_owned(),
        nproc_per_node: job.nproc_per_node.get(),
        max_restarts: job.restarts.max,
        health: launch.monitor.health_address(),
    });
    let code = run_worlds(&launch);
    let exit_code = code.as_ref().map_or_else(Error::exit_code, |code| *code);
    launch.monitor.tell(Happening::JobEnds { exit_code });
    code
}

fn run_worlds(launch: &Launch<'_>) -> Result<u8> {
    let job = launch.job;
    let mut listener = Listener::new(job)?;
    listener.events.show_life_to(&launch.monitor);
    let mut budget = RestartBudget::new(job.restarts);
    let mut restart = 0;
    loop {
        let world = World::alone(job, restart);
        let mut attempt = Attempt::start(launch, &world, &listener.events)?;
        listener.supervise(&mut attempt).inspect_err(|_| attempt.abandon())?;
        let mut ended = attempt.end()?;
        let is_printed = listener.finish_output(&mut ended)?;
        if is_printed {
            report(launch, &ended);
        }
        let ending = match (ended.verdict, ended.first_failure()) {
            (Verdict::Success, _) => return Ok(0),
            (Verdict::Stopped(signal), _) => return Ok(signal_exit_code(signal.as_raw())),
            (Verdict::Failed { .. }, None) => return Ok(1),
            (Verdict::Failed { .. }, Some(ending)) => ending,
        };
        let world = EndedWorld { ending, lived: ended.lived, stepped: ended.stepped };
        let next = match ended.would_hang_again() {
            true => budget.end(),
            false => budget.after(world),
        };
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
fn report(launch: &Launch<'_>, ended: &Ended) {
    let tail = match ended.verdict {
        Verdict::Failed { worker } => ended.console.tail(worker),
        Verdict::Success | Verdict::Stopped(_) => Vec::new(),
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

/// Waits for everything that the launcher waits for.
struct Listener<'a> {
    job: &'a Job,
    events: Events,
    signals: Signals,
}

impl Listener<'_> {
    fn new(job: &Job) -> Result<Listener<'_>> {
        let signals = Signals::listen_to(job.signals.iter().map(|(signal, _)| *signal))?;
        let events = Events::new()?;
        events.add(signals.ready(), Source::Signals)?;
        Ok(Listener { job, events, signals })
    }

    /// Waits until all workers have ended.
    fn supervise(&mut self, attempt: &mut Attempt) -> Result<()> {
        while attempt.verdict().is_none() {
            let ready = self.events.wait(attempt.timeout())?;

            // Signals come first: if a worker ended because all processes got a signal, the worker has not
            // failed.
            for signal in self.signals.arrived() {
                if signal == Signal::TSTP {
                    // The ranks stop, too, because a stopped launcher does not read their pipes.
                    attempt.handle(Event::PassOn(Signal::STOP));
                    stop_myself();
                } else if !ends_job(self.job, signal) {
                    attempt.handle(Event::PassOn(signal));
                } else if attempt.is_ending() {
                    attempt.handle(Event::End(signal));
                } else {
                    attempt.handle(Event::End(signal));
                    attempt.note(&format!(
                        "{} passed on to the ranks; those still running in {:?} will be killed \
                         (Ctrl-C: at once)",
                        signal_name(signal.as_raw()),
                        self.job.policy.shutdown_timeout,
                    ));
                }
            }
            if ready.contains(&Source::Channel) {
                attempt.hear_exit()?;
            }
            if ready.contains(&Source::Watch) {
                attempt.hear_watch();
            }
            attempt.handle(Event::Tick);
        }
        Ok(())
    }

    /// Waits until all output is printed, and returns `true`. If the reader of the output has stopped, this may
    /// take for ever. A signal that ends a job then ends the wait, and the result is `false`.
    fn finish_output(&mut self, ended: &mut Ended) -> Result<bool> {
        ended.console.finish();
        self.events.add(ended.console.finished(), Source::Output)?;
        loop {
            if self.events.wait(None)?.contains(&Source::Output) {
                self.events.remove(ended.console.finished())?;
                return Ok(true);
            }
            if self.ending_signal().is_some() {
                return Ok(false);
            }
        }
    }

    /// Waits for this time. A signal that ends a job ends the wait, and is returned.
    fn pause(&mut self, time: Duration) -> Result<Option<Signal>> {
        let until = Instant::now() + time;
        loop {
            if let Some(signal) = self.ending_signal() {
                return Ok(Some(signal));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.events.wait(Some(left))?;
        }
    }

    /// The first signal that ends a job, of those that have arrived.
    fn ending_signal(&mut self) -> Option<Signal> {
        let mut ending = None;
        for signal in self.signals.arrived() {
            if ends_job(self.job, signal) {
                ending.get_or_insert(signal);
            } else if signal == Signal::TSTP {
                stop_myself();
            }
        }
        ending
    }
}

/// Whether this signal to the launcher ends the job.
fn ends_job(job: &Job, signal: Signal) -> bool {
    job.signals.contains(&(signal, OnSignal::EndsJob))
}

/// Does what Ctrl-Z does to a program without a handler for it.
fn stop_myself() {
    let _ = signal_hook::low_level::emulate_default_handler(Signal::TSTP.as_raw());
}
