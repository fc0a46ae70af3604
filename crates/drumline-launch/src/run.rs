//! A job from its start to its end: the shell around the [`supervisor`](crate::supervisor).

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    time::{Duration, Instant, SystemTime},
};

use drumline::{
    Config, Endpoint,
    store::tcp::{Door, TcpStoreServer},
    trace::Trace,
};
use rustix::process::Signal;

use crate::{
    Result,
    ending::{signal_exit_code, signal_name},
    environment::{self, Inherited, Rendezvous},
    events::{Events, Source},
    job::Job,
    keeper::Keeper,
    limits,
    output::Console,
    program,
    report::{self, Fate},
    secret::JobSecret,
    signals::Signals,
    supervisor::{Event, Order, Policy, Supervisor, Verdict, ends_a_job},
    sweep, waits,
    worker::Worker,
};

/// Runs `job`, prints what its workers print, reports what went wrong, and returns the exit code:
/// 0 if all workers exited with 0, the code of the worker that failed first, or 128 + the number of
/// the signal that stopped the launcher.
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
    let ranks = job.nproc_per_node.get();
    let program = program::resolve(&job.program, std::env::var_os("PATH"))?;
    limits::raise();
    // The keeper, and through it every worker, inherits the file with the secret.
    let secret = JobSecret::for_workers()?;
    let mut keeper = Keeper::start(job)?;
    // The stores start before the first worker and end after the last. So the launcher has their actual ports
    // and need not guess.
    let run_id = new_run_id();
    let store = Endpoint::Unix(format!("drumline-run-{run_id}"));
    let config = Config::from_env()?;
    let level = job.security.unwrap_or(config.security);
    let bytes_max = config.store_bytes_max;
    let serve = |door| TcpStoreServer::open(&[door], bytes_max);
    let _store =
        serve(Door::Secured { endpoint: store.clone(), secret: secret.secret().clone(), level })?;
    let torch_store = job
        .torch_store
        .map(|port| {
            let host = "127.0.0.1".to_owned();
            serve(match job.torch_store_takes_anyone {
                true => Door::Exposed { host, port },
                false => Door::Loopback { host, port },
            })
        })
        .transpose()?;
    let rendezvous = Rendezvous {
        store,
        secret_file: secret.path(),
        master_port: torch_store.as_ref().and_then(|store| Some(store.address()?.port())),
        run_id,
    };
    let inherited = Inherited::here();
    if inherited.limits_omp(job) {
        tracing::info!("OMP_NUM_THREADS is not set: {ranks} ranks get 1 thread each");
    }

    let mut signals = Signals::listen()?;
    let events = Events::new()?;
    events.add(signals.ready(), Source::Signals)?;
    events.add(&keeper, Source::Channel)?;
    let mut console = Console::open(ranks, job.labels_stdout)?;
    let columns = console.columns().map(|n| (environment::TERMINAL_COLUMNS, n.to_string()));

    let (started, started_at) = (Instant::now(), SystemTime::now());
    let mut workers = Vec::with_capacity(ranks);
    let mut start_and_supervise = || {
        for rank in 0..ranks {
            let variables = environment::worker(job, &rendezvous, rank, &inherited);
            let variables = variables.into_iter().chain(columns.clone());
            let (worker, streams) = keeper.spawn(job, &program, variables)?;
            workers.push(worker);
            console.attach(streams)?;
        }
        supervise(job.policy, started, &workers, &mut keeper, &events, &mut signals, &mut console)
    };
    let (supervisor, waits) = start_and_supervise().inspect_err(|_| sweep::end_trees(&workers))?;
    let left = keeper.finish()?;

    let verdict = supervisor.verdict().unwrap_or(Verdict::Success);
    if finish_output(&events, &mut signals, &mut console)? {
        let fates = workers.iter().zip(supervisor.exits()).zip(waits);
        let fates = fates.map(|((worker, exit), waits)| Fate { pid: worker.pid(), exit, waits });
        let fates: Vec<_> = fates.collect();
        let tail = match verdict {
            Verdict::Failed { worker } => console.tail(worker),
            Verdict::Success | Verdict::Stopped(_) => Vec::new(),
        };
        console.report(&report::render(verdict, &fates, &tail, &left));
        if let Some(Trace { dir, .. }) = config.trace.filter(|it| has_written(it, started_at)) {
            console.report(
                format!("drumline: traces are in {0}: drumline trace page {0}\n", dir.display())
                    .as_bytes(),
            );
        }
    }
    Ok(match verdict {
        Verdict::Success => 0,
        Verdict::Stopped(signal) => signal_exit_code(signal.as_raw()),
        Verdict::Failed { worker } => {
            let exit = supervisor.exits().nth(worker).flatten();
            exit.map_or(1, |exit| exit.ending.exit_code())
        }
    })
}

/// Feeds the state machine until it has a verdict. Also returns, as lines, where each killed rank waited.
fn supervise(
    policy: Policy,
    started: Instant,
    workers: &[Worker],
    keeper: &mut Keeper,
    events: &Events,
    signals: &mut Signals,
    console: &mut Console,
) -> Result<(Supervisor, Vec<Vec<String>>)> {
    let mut waits = vec![Vec::new(); workers.len()];
    let mut supervisor = Supervisor::new(workers.len(), policy);
    supervisor.handle(started.elapsed(), Event::Exited(&keeper.early_exits()));
    while supervisor.verdict().is_none() {
        let timeout = supervisor.deadline().map(|at| at.saturating_sub(started.elapsed()));
        let ready = events.wait(timeout)?;
        let now = started.elapsed();

        // Signals come first: if a worker ended because all processes got a signal, the worker has not
        // failed.
        for signal in signals.arrived() {
            let was_ending = supervisor.deadline().is_some();
            if signal == Signal::TSTP {
                // The ranks stop, too, because a stopped launcher does not read their pipes.
                carry_out(
                    &supervisor.handle(now, Event::Signal(Signal::STOP)),
                    workers,
                    &mut waits,
                );
                stop_myself();
                continue;
            }
            carry_out(&supervisor.handle(now, Event::Signal(signal)), workers, &mut waits);
            if !was_ending && supervisor.deadline().is_some() {
                console.note(&format!(
                    "{} passed on to the ranks; those still running in {:?} will be killed \
                     (Ctrl-C: at once)",
                    signal_name(signal.as_raw()),
                    policy.shutdown_timeout
                ));
            }
        }

        let exited = ready.contains(&Source::Channel).then(|| keeper.next_exit()).transpose()?;
        carry_out(&supervisor.handle(now, Event::Exited(exited.as_slice())), workers, &mut waits);
        carry_out(&supervisor.handle(now, Event::Tick), workers, &mut waits);
    }
    Ok((supervisor, waits))
}

/// Sends signals. Before ranks are killed, notes in `waits` where they wait.
fn carry_out(orders: &[Order], workers: &[Worker], waits: &mut [Vec<String>]) {
    let killed = orders.iter().filter(|order| order.signal == Signal::KILL);
    let killed = killed.filter_map(|order| Some((order.worker, workers.get(order.worker)?.pid())));
    for (rank, lines) in waits::of(killed.collect()) {
        waits[rank] = lines;
    }
    for order in orders {
        if let Some(worker) = workers.get(order.worker) {
            worker.signal(order.signal);
            // A stopped process handles a signal only once it continues.
            if ends_a_job(order.signal) {
                worker.signal(Signal::CONT);
            }
        }
    }
}

/// Whether rank 0 has written a trace since then: its program may not use this library at all.
fn has_written(trace: &Trace, since: SystemTime) -> bool {
    let file = trace.dir.join("rank-0.json");
    // File systems may round times down, to a second at most.
    let since = since - Duration::from_secs(1);
    file.metadata().and_then(|file| file.modified()).is_ok_and(|modified| modified >= since)
}

/// Waits until all output is printed, and returns `true`. If the reader of the output has stopped, this may
/// take for ever. A signal that ends a job then ends the wait, and the result is `false`.
fn finish_output(events: &Events, signals: &mut Signals, console: &mut Console) -> Result<bool> {
    console.finish();
    events.add(console.finished(), Source::Output)?;
    loop {
        let ready = events.wait(None)?;
        if ready.contains(&Source::Output) {
            return Ok(true);
        }
        for signal in signals.arrived() {
            if ends_a_job(signal) {
                return Ok(false);
            }
            if signal == Signal::TSTP {
                stop_myself();
            }
        }
    }
}

/// Does what Ctrl-Z does to a program without a handler for it.
fn stop_myself() {
    let _ = signal_hook::low_level::emulate_default_handler(Signal::TSTP.as_raw());
}

/// 64 random bits. They come from the operating system, through the hasher's keys.
fn new_run_id() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}
