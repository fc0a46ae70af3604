//! The workers of one world on this host, from their start to their end: the shell around the
//! [`supervisor`](crate::supervisor).

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use drumline::{error_file::ErrorFile, steps::LAUNCHER_VARIABLE};
use rustix::process::{Pid, Signal};

use crate::{
    Ending, Result,
    environment::{self, ERROR_FILE, TERMINAL_COLUMNS},
    events::{Events, Source},
    files::WorldFiles,
    keeper::{Keeper, News, refused},
    last_words::LastWords,
    launch::Launch,
    lease::BootTime,
    monitor::workers::WorkerNews,
    output::{Console, report, say},
    prefix::host_name,
    processes::Process,
    recipients::Table,
    report::{Fate, Report},
    stores::Stores,
    supervisor::{Event, Exit, Order, Supervisor, Verdict, Words},
    sweep, waits,
    watch::{Watch, finding::Finding},
    worker::Worker,
    world::World,
};

/// Workers that are being started, that run, or that are being ended.
#[derive(Debug)]
pub(crate) struct Attempt {
    started: Instant,
    /// The same, by the clock of this host.
    pub(crate) started_at: SystemTime,
    pub(crate) world: World,
    /// Decides. Events go through [`handle`](Attempt::handle).
    pub(crate) supervisor: Supervisor,
    workers: Vec<Worker>,
    /// What those write to that the keeper was asked for and that do not run yet.
    asked_for: VecDeque<[OwnedFd; 2]>,
    /// When all workers had ended.
    ended: Option<Duration>,
    /// The processes that they left behind, once none is left.
    left: Option<Vec<String>>,
    /// Where each killed rank waited, as lines.
    waits: Vec<Vec<String>>,
    watch: Watch,
    /// The worker that hung.
    hung: Option<Finding>,
    news: WorkerNews,
    pub(crate) console: Console,
    files: WorldFiles,
    pub(crate) stores: Stores,
    /// Outlives the files: it removes them if this process is killed.
    pub(crate) keeper: Keeper,
}

/// Workers that have ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) attempt: Attempt,
    pub(crate) lived: Duration,
    /// Whether a worker has said that it began a step.
    pub(crate) stepped: bool,
    /// How each worker ended.
    pub(crate) fates: Vec<Fate>,
    /// The processes that the workers left behind.
    pub(crate) left: Vec<String>,
}

impl Attempt {
    /// Begins to start the workers of `world`; [`turn`](Self::turn) does the rest. `events` tells when the keeper and the
    /// watch have news. With a lease, the workers are killed when it has run out.
    pub(crate) fn start(
        launch: &Launch<'_>,
        world: World,
        stores: Stores,
        lease: Option<BootTime>,
        events: &Events,
    ) -> Result<Attempt> {
        let job = launch.job;
        let files = launch.files.of_world(world.attempt);
        let keeper = Keeper::start(job, files.private(), lease)?;
        let watch = Watch::prepare(&job.hangs, world.local_size, &stores.own, &launch.monitor)?;
        events.add(&keeper, Source::Channel)?;
        events.add(&watch, Source::Watch)?;
        let mut attempt = Attempt {
            started: Instant::now(),
            started_at: SystemTime::now(),
            supervisor: Supervisor::new(world.local_size, job.policy),
            workers: Vec::with_capacity(world.local_size),
            asked_for: VecDeque::new(),
            ended: None,
            left: None,
            waits: vec![Vec::new(); world.local_size],
            watch,
            hung: None,
            news: WorkerNews::of(&world, &launch.monitor),
            keeper,
            console: Console::open(job, &world, &files)?,
            files,
            stores,
            world,
        };
        attempt.go_on(launch)?;
        Ok(attempt)
    }

    /// Hears the news of those that are `ready`, and does what is due. Call it after each wait, after the signals that came
    /// before: they tell why a worker has ended.
    ///
    /// # Errors
    ///
    /// A worker cannot be started, or the keeper has ended or does not answer.
    pub(crate) fn turn(&mut self, launch: &Launch<'_>, ready: &[Source]) -> Result<()> {
        if ready.contains(&Source::Channel) {
            self.hear(launch)?;
        }
        if ready.contains(&Source::Watch) {
            self.hear_watch();
        }
        self.handle(Event::Tick);
        self.go_on(launch)
    }

    /// Asks for further workers, if all are to run, and for the end, if all have ended.
    fn go_on(&mut self, launch: &Launch<'_>) -> Result<()> {
        if self.left.is_some() {
            return Ok(());
        }
        if self.is_ending() {
            // Those that were not asked for never start.
            self.supervisor.limit(self.workers.len() + self.asked_for.len());
        }
        while self.is_starting() && self.keeper.is_free() {
            self.ask_for_next(launch)?;
        }
        self.end_those_left_behind();
        let is_over = self.supervisor.verdict().is_some() && self.asked_for.is_empty();
        if is_over && self.ended.is_none() {
            self.ended = Some(self.started.elapsed());
            self.keeper.finish()?;
        }
        match self.keeper.look() {
            // How the workers ended is known.
            Err(error) if self.ended.is_some() => {
                say(&error.to_string());
                self.left = Some(Vec::new());
                Ok(())
            }
            looked => looked,
        }
    }

    /// Whether some workers do not run yet.
    fn is_starting(&self) -> bool {
        self.workers.len() + self.asked_for.len() < self.supervisor.exits().len()
    }

    /// Whether all workers run, or ran.
    pub(crate) fn has_started(&self) -> bool {
        self.workers.len() == self.world.local_size
    }

    fn ask_for_next(&mut self, launch: &Launch<'_>) -> Result<()> {
        let Launch { job, program, inherited, .. } = launch;
        let rendezvous = &self.stores.rendezvous;
        let columns = self.console.columns().map(|n| (TERMINAL_COLUMNS, n.to_string()));
        let local_rank = self.workers.len() + self.asked_for.len();
        self.files.prepare(local_rank);
        let variables = environment::worker(job, &self.world, rendezvous, local_rank, inherited);
        let variables = variables.into_iter().chain(columns);
        let variables = variables.map(|(name, value)| (name, OsString::from(value)));
        let error_file = self.files.error_file(local_rank).map(|it| (ERROR_FILE, it.into()));
        let variables = variables.chain(error_file);
        let streams = self.keeper.ask_for(job, local_rank, program, variables)?;
        self.asked_for.push_back(streams);
        Ok(())
    }

    /// Handles the next message of the keeper.
    fn hear(&mut self, launch: &Launch<'_>) -> Result<()> {
        match self.keeper.news(launch.job, self.workers.len())? {
            None => {}
            Some(News::Started(worker)) => self.has_come(worker)?,
            Some(News::Exited(rank, ending)) => self.handle(Event::Exited(&[(rank, ending)])),
            Some(News::Left(left)) => self.left = Some(left),
            Some(News::Refused(error)) => {
                self.asked_for.clear();
                self.supervisor.limit(self.workers.len());
                if !self.is_ending() {
                    return Err(refused(&launch.program, error));
                }
            }
        }
        Ok(())
    }

    /// The next worker runs.
    fn has_come(&mut self, worker: Worker) -> Result<()> {
        let Some(streams) = self.asked_for.pop_front() else { return Ok(()) };
        self.news.started(worker.pid());
        self.console.attach(streams, &self.files, worker.is_at_terminal())?;
        if self.supervisor.is_told() {
            // It comes too late to hear the signal that the others got.
            worker.kill();
        }
        self.workers.push(worker);
        if self.has_started() {
            self.watch.begin(&self.workers, self.world.first_rank)?;
        }
        Ok(())
    }

    /// How the world ended, once all workers have, and no process that they have started is left.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        self.left.as_ref().and(self.supervisor.verdict())
    }

    /// Whether workers are being ended.
    pub(crate) fn is_ending(&self) -> bool {
        self.supervisor.deadline().is_some()
    }

    /// The time until [`turn`](Self::turn) is due.
    pub(crate) fn timeout(&self) -> Duration {
        let tick = self.supervisor.deadline().filter(|_| self.ended.is_none());
        let tick = tick.map(|at| at.saturating_sub(self.started.elapsed()));
        tick.into_iter().chain([self.keeper.timeout()]).min().unwrap_or_default()
    }

    /// Handles what has happened: sends signals, and notes where ranks wait that are killed.
    pub(crate) fn handle(&mut self, event: Event<'_>) {
        self.handle_signal(event, false);
    }

    /// The same. If the event is a signal that somebody has typed, the worker at the terminal has it already.
    pub(crate) fn handle_signal(&mut self, event: Event<'_>, is_typed: bool) {
        if self.supervisor.asks_for_words(self.started.elapsed(), &event) {
            self.hear_words();
        }
        if self.supervisor.asks_who_goes_down(self.started.elapsed(), &event) {
            self.see_who_goes_down();
        }
        let exits = if let Event::Exited(exits) = event { exits } else { &[] };
        if !exits.is_empty() && !self.is_ending() {
            self.hear_who_regroups(exits);
        }
        let is_news = matches!(event, Event::PassOn(_));
        let is_known = matches!(event, Event::Hung { .. } | Event::CutOff);
        for (worker, _) in exits {
            self.console.has_ended(*worker);
            self.workers.get_mut(*worker).into_iter().for_each(Worker::signal_rest);
        }
        let orders = self.supervisor.handle(self.started.elapsed(), event);
        self.news.hear(&event, |worker| self.supervisor.is_lost(worker));
        for (worker, _) in exits.iter().filter(|(it, _)| self.supervisor.is_lost(*it)) {
            let left = self.supervisor.exits().filter(Option::is_none).count();
            let text = self.about(*worker, &LastWords::default(), |it| it.lost(0, left));
            report(text.unwrap_or_default().as_bytes());
            // What it has started would stay until the job ends.
            self.workers.get(*worker).into_iter().for_each(Worker::kill);
        }
        let pid = |order: &Order| Some((order.worker, self.workers.get(order.worker)?.pid()));
        let killed = orders.iter().filter(|order| order.signal == Signal::KILL && !is_known);
        let killed = killed.filter_map(pid);
        for (rank, lines) in waits::within(waits::PATIENCE, killed.collect()) {
            self.waits[rank] = lines;
        }
        let table = Table::default();
        for order in orders {
            if let Some(worker) = self.workers.get_mut(order.worker) {
                if !is_typed || order.signal == Signal::KILL || !worker.is_at_terminal() {
                    worker.signal(order.signal, &table);
                }
                // A stopped process handles a signal only once it continues.
                if !is_news {
                    worker.go_on();
                }
            }
        }
    }

    /// The time since the workers started, until all had ended.
    fn lived(&self) -> Duration {
        self.ended.unwrap_or_else(|| self.started.elapsed())
    }

    /// Hears what the workers have told of their failures. One that ended well has told nothing.
    pub(crate) fn hear_words(&mut self) {
        let (now, first_rank) = (self.lived(), self.world.first_rank);
        let exits = self.supervisor.exits();
        let count = exits.len();
        let has_succeeded = |exit: &Option<Exit>| exit.is_some_and(|it| it.ending.is_success());
        let may_tell = exits.enumerate().filter(|(_, exit)| !has_succeeded(exit));
        let tell = may_tell.map(|(worker, exit)| {
            let noticed = exit.map_or(now, |exit| exit.at);
            let words = self.last_words(worker).tell(self.started_at, noticed);
            (worker, words.of_ranks(first_rank, count))
        });
        let words: Vec<(usize, Words)> = tell.collect();
        self.supervisor.handle(now, Event::Said(&words));
    }

    /// Hears which of the workers that have ended have told that the others go on.
    fn hear_who_regroups(&mut self, exits: &[(usize, Ending)]) {
        let failed = exits.iter().filter(|(_, ending)| !ending.is_success());
        let told = failed.filter_map(|(worker, _)| {
            let ranks = self.stores.regroups(*worker)?;
            // Those of other hosts count, too, and only the ranks know all.
            Some((*worker, if self.world.hosts > 1 { 1 } else { ranks }))
        });
        let told: Vec<(usize, usize)> = told.collect();
        self.supervisor.handle(self.started.elapsed(), Event::Regroups(&told));
    }

    /// Kills the workers of this host that the others have left behind: one that is stopped would keep what it holds. The
    /// others wait until it has ended.
    fn end_those_left_behind(&mut self) {
        for rank in self.stores.left_behind() {
            let worker = rank.checked_sub(self.world.first_rank);
            let exit = worker.and_then(|worker| self.supervisor.exits().nth(worker));
            match (worker, exit) {
                (Some(worker), Some(None)) => self.handle(Event::LeftBehind(worker)),
                _ => self.stores.tell_end(rank),
            }
        }
    }

    /// Sees which workers the kernel takes down.
    fn see_who_goes_down(&mut self) {
        let workers = self.workers.iter().zip(self.supervisor.exits()).enumerate();
        let open = workers.filter(|(_, (_, exit))| exit.is_none());
        let goes_down = |pid| Process::read(pid).is_some_and(|it| it.is_going_down());
        let down = open.filter(|(_, (worker, _))| goes_down(worker.pid()));
        let down: Vec<usize> = down.map(|(index, _)| index).collect();
        self.supervisor.handle(self.started.elapsed(), Event::GoingDown(&down));
    }

    /// The process of a worker that has failed, how it ended, and what the report says about it.
    pub(crate) fn about_failed(&self, worker: usize) -> Option<(Pid, Ending, Vec<u8>)> {
        let (pid, ending) = (self.workers.get(worker)?.pid(), self.supervisor.failure()?);
        let text = self.about(worker, &self.last_words(worker), |it| it.failure(0))?;
        Some((pid, ending, text))
    }

    /// How this worker ended, as far as it has.
    fn fate(&self, worker: usize) -> Option<Fate> {
        Some(Fate {
            pid: self.workers.get(worker)?.pid(),
            exit: self.supervisor.exits().nth(worker)?,
            waits: self.waits[worker].clone(),
            hung: self.hung.clone().filter(|it| it.worker == worker),
        })
    }

    /// What a report tells that is about this worker alone.
    fn about<T>(
        &self,
        worker: usize,
        words: &LastWords,
        tell: impl FnOnce(Report<'_>) -> T,
    ) -> Option<T> {
        Some(tell(Report {
            verdict: Verdict::Failed { worker },
            started_at: self.started_at,
            host: &host_name(),
            first_rank: self.world.first_rank + worker,
            ranks: &[self.fate(worker)?],
            words,
            is_victim: false,
            left: &[],
            incomplete: &[],
            logs: None,
        }))
    }

    /// What this worker has told of its failure.
    fn last_words(&self, worker: usize) -> LastWords {
        LastWords::of(worker, &self.console, &self.files)
    }

    /// Handles what the watch has found.
    fn hear_watch(&mut self) {
        for finding in self.watch.found() {
            let (worker, signal) = (finding.worker, finding.signal);
            let was_running = !self.is_ending();
            self.handle(Event::Hung { worker, signal });
            if was_running && self.is_ending() {
                self.news.hung(&finding);
                self.hung = Some(finding);
            }
        }
    }

    /// Kills all workers: the launcher cannot go on.
    pub(crate) fn abandon(&self) {
        sweep::end_trees(&self.workers);
        // No keeper may be left. No other world of any host has a store of this name.
        let store = &self.stores.rendezvous.launcher;
        sweep::end_started_with(&format!("{LAUNCHER_VARIABLE}={store}"));
    }

    /// What is to be told of this world. Call it once there is a verdict. `events` no longer tells of it.
    pub(crate) fn end(mut self, events: &Events) -> Result<Ended> {
        events.remove(&self.keeper)?;
        events.remove(&self.watch)?;
        self.keeper.lease.lift()?;
        Ok(Ended {
            lived: self.lived(),
            stepped: self.stores.has_stepped(self.workers.len()),
            fates: (0..self.workers.len()).filter_map(|worker| self.fate(worker)).collect(),
            left: self.left.take().unwrap_or_default(),
            attempt: self,
        })
    }

    /// The stores alone, which ranks of other hosts may still use.
    pub(crate) fn into_stores(self) -> Stores {
        self.stores
    }
}

impl Ended {
    /// All that the workers have written is read now.
    pub(crate) fn has_read_all(&mut self) {
        self.attempt.hear_words();
        self.attempt.news.over(self.verdict(), self.lived);
    }

    /// How it went. Which worker failed first is known when [all is read](Self::has_read_all).
    pub(crate) fn verdict(&self) -> Verdict {
        self.attempt.supervisor.verdict().unwrap_or(Verdict::Success)
    }

    /// What the worker that failed first has told of its failure.
    pub(crate) fn last_words(&self) -> LastWords {
        let Verdict::Failed { worker } = self.verdict() else { return LastWords::default() };
        self.attempt.last_words(worker)
    }

    /// What a worker has written to its error file.
    pub(crate) fn error(&self, worker: usize) -> Option<ErrorFile> {
        self.attempt.files.error_file(worker).and_then(|path| ErrorFile::read(&path))
    }

    /// The error file of a worker, if it is there and stays there.
    pub(crate) fn kept_error_file(&self, worker: usize) -> Option<PathBuf> {
        let is_kept = self.attempt.files.private().is_none();
        self.attempt.files.error_file(worker).filter(|path| is_kept && path.exists())
    }

    /// Tells the launcher of this launcher why the world failed, in the file `to`: in the words of the worker that
    /// failed first, if that one has written a file.
    pub(crate) fn pass_on(&self, words: &LastWords, to: &Path) {
        if !matches!(self.verdict(), Verdict::Failed { .. }) {
            return;
        }
        let Some(ErrorFile::Failure(failure)) = &words.error else {
            // What is there is about another failure. It may be a device.
            if to.symlink_metadata().is_ok_and(|it| it.is_file()) {
                let _ = fs::remove_file(to);
            }
            return;
        };
        let exit_code = self.attempt.supervisor.failure().map_or(1, Ending::code);
        if let Err(error) = failure.pass_on(to, exit_code) {
            tracing::warn!("cannot write the error file {}: {error}", to.display());
        }
    }
}
