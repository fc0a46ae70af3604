//! A job from its start to its end: one world after another, until one ends well or none may follow.

use drumline::ErrorOrigin;

use crate::{
    Error, Result, agent,
    attempt::Attempt,
    ending::{signal_exit_code, signal_name},
    job::Job,
    launch::Launch,
    listener::Listener,
    monitor::happening::Happening,
    outcome,
    output::say,
    report,
    restarts::{EndedWorld, Next, RestartBudget},
    supervisor::Verdict,
    tell::tell,
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
    outcome::check(job)?;
    run_and_tell(job).inspect_err(|error| outcome::write_error(job, error))
}

fn run_and_tell(job: &Job) -> Result<u8> {
    let mut listener; // dropped after the files of the job
    let launch = Launch::of(job)?;
    launch.monitor.tell(Happening::JobBegins {
        program: launch.program.to_string_lossy().into_owned(),
        nproc_per_node: job.nproc_per_node.get(),
        max_restarts: job.restarts.max,
        health: launch.monitor.health_address(),
    });
    listener = Listener::new(job)?;
    listener.events.show_life_to(&launch.monitor);
    let code = run_worlds(&launch, &mut listener);
    listener.no_rank_runs();
    let exit_code = code.as_ref().map_or_else(Error::exit_code, |code| *code);
    launch.monitor.tell(Happening::JobEnds { exit_code });
    listener.see_out();
    code
}

fn run_worlds(launch: &Launch<'_>, listener: &mut Listener<'_>) -> Result<u8> {
    let job = launch.job;
    if let Some(meeting) = &job.meeting {
        return agent::run(launch, meeting, listener);
    }
    let mut budget = RestartBudget::new(job.restarts);
    let mut restart = 0;
    loop {
        let world = World::alone(job, restart);
        listener.ranks_run();
        let started = launch
            .stores_alone()
            .and_then(|stores| Attempt::start(launch, world, stores, None, &listener.events));
        let ran = started.and_then(|mut attempt| match listener.supervise(launch, &mut attempt) {
            Ok(()) => Ok(attempt),
            Err(error) => {
                attempt.abandon();
                Err(error)
            }
        });
        let attempt = match ran {
            Ok(attempt) => attempt,
            Err(error) if error.origin() == ErrorOrigin::User => return Err(error),
            Err(error) => match budget.after(EndedWorld::never_ran(error.exit_code())) {
                Next::End(_) => return Err(error),
                Next::Restart(pause) => {
                    listener.no_rank_runs();
                    restart += 1;
                    let what = report::restart(budget.used(), job.restarts.max, pause);
                    tracing::warn!("the ranks cannot start or go on: {error}; {what}");
                    if let Some(signal) = listener.pause(pause)? {
                        return Ok(signal_exit_code(signal.as_raw()));
                    }
                    continue;
                }
            },
        };
        let mut ended = attempt.end(&listener.events)?;
        listener.no_rank_runs();
        let goes_on = listener.finish_output(&mut ended)?;
        tell(launch, &ended);
        outcome::write(job, restart, &ended);
        let ending = match (ended.verdict(), ended.attempt.supervisor.failure()) {
            // Nobody abandons the only host.
            (Verdict::Success | Verdict::Abandoned, _) => return Ok(0),
            (Verdict::Stopped(signal), _) => return Ok(signal_exit_code(signal.as_raw())),
            (Verdict::Failed { .. }, None) => return Ok(1),
            (Verdict::Failed { .. }, Some(ending)) => ending,
        };
        let world = EndedWorld { ending, lived: ended.lived, stepped: ended.stepped };
        let next = budget.after(world);
        let pause = match next {
            Next::Restart(pause) if goes_on => pause,
            _ => {
                if let Some(line) = report::no_restart(next) {
                    say(&line);
                }
                return Ok(ending.exit_code());
            }
        };
        restart += 1;
        say(&report::restart(budget.used(), job.restarts.max, pause));
        if let Some(signal) = listener.pause(pause)? {
            say(&format!("stopped by {}", signal_name(signal.as_raw())));
            return Ok(signal_exit_code(signal.as_raw()));
        }
    }
}
