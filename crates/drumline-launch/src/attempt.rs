//! The workers of one world on this host, from their start to their end: the shell around the
//! [`supervisor`](crate::supervisor).

use std::{
    collections::VecDeque,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use drumline::{
    error_file::ErrorFile,
    steps::{LAUNCHER_VARIABLE, keys},
};
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
    worker::{Streams, Worker},
    world::World,
};

/// Workers that are being started, that run, or that are being ended.
#[derive(Debug)]
pub(crate) struct Attempt {
    started: Instant,
    started_at: SystemTime,
    world: World,
    supervisor: Supervisor,
    workers: Vec<Worker>,
    /// What those write to that the keeper was asked for and that do not run yet.
    asked_for: VecDeque<Streams>,
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
    keeper: Keeper,
    console: Console,
    files: WorldFiles,
    stores: Stores,
}

/// Workers that have ended.
#[derive(Debug)]
pub(crate) struct Ended {
    supervisor: Supervisor,
    news: WorkerNews,
    /// When the workers started.
    pub(crate) started_at: SystemTime,
    pub(crate) first_rank: usize,
    pub(crate) lived: Duration,
    /// Whether a worker has said that it began a step.
    pub(crate) stepped: bool,
    /// How each worker ended.
    pub(crate) fates: Vec<Fate>,
    /// The processes that the workers left behind.
    pub(crate) left: Vec<String>,
    pub(crate) console: Console,
    pub(crate) stores: Stores,
    files: WorldFiles,
    /// Outlives the files: it removes them if this process is killed.
    _keeper: Keeper,
}

impl Attempt {
    /// Begins to start the workers of `world`; [`go_on`](Self::go_on) does the rest. `events` tells when the
    /// [channel](Source::Channel) has news. With a lease, the workers are killed when it has run out.
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

    /// Does what is due: asks for further workers, if all are to run, and for the end, if all have ended. Call it after
    /// each wait, once all [news](Self::hear) are heard.
    ///
    /// # Errors
    ///
    /// The keeper does not answer.
    pub(crate) fn go_on(&mut self, launch: &Launch<'_>) -> Result<()> {
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
        let variables = variables.into_iter().chain(columns).chain(self.watch.variables());
        let variables = variables.map(|(name, value)| (name, OsString::from(value)));
        let error_file = self.files.error_file(local_rank).map(|it| (ERROR_FILE, it.into()));
        let variables = variables.chain(error_file);
        let streams = self.keeper.ask_for(job, local_rank, program, variables)?;
        self.asked_for.push_back(streams);
        Ok(())
    }

    /// Handles the next message of the keeper. Call it when the channel is readable, after the signals that came before:
    /// they tell why a worker has ended.
    ///
    /// # Errors
    ///
    /// A worker cannot be started, or the keeper has ended.
    pub(crate) fn hear(&mut self, launch: &Launch<'_>) -> Result<()> {
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

    /// The time until [`Event::Tick`] is due, or [`go_on`](Self::go_on).
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
        if let Event::Exited(exits) = &event
            && !self.is_ending()
        {
            self.hear_who_regroups(exits);
        }
        let is_news = matches!(event, Event::PassOn(_));
        let is_known = matches!(event, Event::Hung { .. } | Event::CutOff);
        if let Event::Exited(exits) = &event {
            for (worker, _) in *exits {
                self.console.has_ended(*worker);
                self.workers.get_mut(*worker).into_iter().for_each(Worker::signal_rest);
            }
        }
        let orders = self.supervisor.handle(self.started.elapsed(), event);
        self.news.hear(&event, |worker| self.supervisor.is_lost(worker));
        if let Event::Exited(exits) = &event {
            for (worker, _) in exits.iter().filter(|(it, _)| self.supervisor.is_lost(*it)) {
                let left = self.supervisor.exits().filter(Option::is_none).count();
                let text = self.about(*worker, &LastWords::default(), |it| it.lost(0, left));
                report(text.unwrap_or_default().as_bytes());
                // What it has started would stay until the job ends.
                self.workers.get(*worker).into_iter().for_each(Worker::kill);
            }
        }
        let pid = |order: &Order| Some((order.worker, self.workers.get(order.worker)?.pid()));
        let killed = orders.iter().filter(|order| order.signal == Signal::KILL && !is_known);
        let killed = killed.filter_map(pid);
        for (rank, lines) in waits::of(killed.collect()) {
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

    /// Hears what the workers have told of their failures.
    pub(crate) fn hear_words(&mut self) {
        let (now, first_rank) = (self.started.elapsed(), self.world.first_rank);
        let of = |worker| LastWords::of(worker, &self.console, &self.files);
        let words = told(&self.supervisor, of, self.started_at, first_rank, now);
        self.supervisor.handle(self.started.elapsed(), Event::Said(&words));
    }

    /// Hears which of the workers that have ended have told that the others go on.
    fn hear_who_regroups(&mut self, exits: &[(usize, Ending)]) {
        let failed = exits.iter().filter(|(_, ending)| !ending.is_success());
        let told = failed.filter_map(|(worker, _)| {
            let text = self.stores.told(keys::REGROUPS, *worker)?;
            let ranks = str::from_utf8(&text).ok()?.parse().ok()?;
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

    /// Whether this worker has failed, and the others go on without it.
    pub(crate) fn has_lost(&self, worker: usize) -> bool {
        self.supervisor.is_lost(worker)
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

    /// The process of the keeper.
    pub(crate) fn keeper(&self) -> Pid {
        self.keeper.pid()
    }

    /// From now on the workers are killed at this time, and no longer at the one before.
    pub(crate) fn extend_lease(&mut self, until: BootTime) -> Result<()> {
        self.keeper.lease_until(until)
    }

    /// The worker that has failed first, once no likelier origin can come up.
    pub(crate) fn failed(&self) -> Option<usize> {
        self.supervisor.failed()
    }

    /// Whether that worker only tells the end of another rank, which is none of this host.
    pub(crate) fn has_only_heard(&self) -> bool {
        self.supervisor.has_only_heard()
    }

    /// Whether all is read that this worker has written to its stderr.
    pub(crate) fn has_read_all(&self, worker: usize) -> bool {
        self.console.has_read_all(worker)
    }

    /// The process of a worker that has failed, how it ended, and what the report says about it.
    pub(crate) fn about_failed(&self, worker: usize) -> Option<(Pid, Ending, Vec<u8>)> {
        let (pid, ending) = (self.workers.get(worker)?.pid(), self.supervisor.failure()?);
        let text = self.about(worker, &self.last_words(worker), |it| it.failure(0))?;
        Some((pid, ending, text))
    }

    /// What a report tells that is about this worker alone.
    fn about<T>(
        &self,
        worker: usize,
        words: &LastWords,
        tell: impl FnOnce(Report<'_>) -> T,
    ) -> Option<T> {
        let fate = Fate {
            pid: self.workers.get(worker)?.pid(),
            exit: self.supervisor.exits().nth(worker)?,
            waits: Vec::new(),
            hung: self.hung.clone().filter(|it| it.worker == worker),
        };
        Some(tell(Report {
            verdict: Verdict::Failed { worker },
            started_at: self.started_at,
            host: &host_name(),
            first_rank: self.world.first_rank + worker,
            ranks: &[fate],
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

    pub(crate) fn stores(&self) -> &Stores {
        &self.stores
    }

    /// Handles what the watch has found. Call it when the watch is readable.
    pub(crate) fn hear_watch(&mut self) {
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

    /// What is to be told of this world. Call it once there is a verdict. `events` no longer tells of the keeper.
    pub(crate) fn end(mut self, events: &Events) -> Result<Ended> {
        let lived = self.ended.unwrap_or_else(|| self.started.elapsed());
        let left = self.left.unwrap_or_default();
        events.remove(&self.keeper)?;
        self.keeper.lift_lease()?;
        let stepped = self.stores.has_stepped(self.workers.len());
        let exits = self.workers.iter().zip(self.supervisor.exits()).zip(self.waits);
        let hung = |local_rank| self.hung.clone().filter(|it| it.worker == local_rank);
        let fates = exits.enumerate().map(|(local_rank, ((worker, exit), waits))| Fate {
            pid: worker.pid(),
            exit,
            waits,
            hung: hung(local_rank),
        });
        let fates = fates.collect();
        Ok(Ended {
            supervisor: self.supervisor,
            news: self.news,
            started_at: self.started_at,
            first_rank: self.world.first_rank,
            lived,
            stepped,
            fates,
            left,
            console: self.console,
            stores: self.stores,
            files: self.files,
            _keeper: self.keeper,
        })
    }
}

impl Ended {
    /// All that the workers have written is read now.
    pub(crate) fn has_read_all(&mut self) {
        let of = |worker| LastWords::of(worker, &self.console, &self.files);
        let words = told(&self.supervisor, of, self.started_at, self.first_rank, self.lived);
        self.supervisor.handle(self.lived, Event::Said(&words));
        self.news.over(self.verdict(), self.lived);
    }

    /// How it went. Which worker failed first is known when [all is read](Self::has_read_all).
    pub(crate) fn verdict(&self) -> Verdict {
        self.supervisor.verdict().unwrap_or(Verdict::Success)
    }

    /// Whether the worker that failed first only tells the end of another rank, which is none of this host.
    pub(crate) fn has_only_heard(&self) -> bool {
        self.supervisor.has_only_heard()
    }

    /// What the worker that failed first has told of its failure.
    pub(crate) fn last_words(&self) -> LastWords {
        let Verdict::Failed { worker } = self.verdict() else { return LastWords::default() };
        LastWords::of(worker, &self.console, &self.files)
    }

    /// What a worker has written to its error file.
    pub(crate) fn error(&self, worker: usize) -> Option<ErrorFile> {
        self.files.error_file(worker).and_then(|path| ErrorFile::read(&path))
    }

    /// The error file of a worker, if it is there and stays there.
    pub(crate) fn kept_error_file(&self, worker: usize) -> Option<PathBuf> {
        let is_kept = self.files.private().is_none();
        self.files.error_file(worker).filter(|path| is_kept && path.exists())
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
        let exit_code = match self.first_failure() {
            Some(Ending::Signal { number, .. }) => -number,
            Some(Ending::Code(code)) => code,
            None => 1,
        };
        if let Err(error) = failure.pass_on(to, exit_code) {
            tracing::warn!("cannot write the error file {}: {error}", to.display());
        }
    }

    /// How the worker ended that failed first.
    pub(crate) fn first_failure(&self) -> Option<Ending> {
        self.supervisor.failure()
    }
}

/// What each worker has told, by the supervisor's time and numbers. One that ended well has told nothing.
fn told(
    supervisor: &Supervisor,
    words_of: impl Fn(usize) -> LastWords,
    started_at: SystemTime,
    first_rank: usize,
    now: Duration,
) -> Vec<(usize, Words)> {
    let exits = supervisor.exits();
    let count = exits.len();
    let may_tell = |exit: Option<Exit>| !exit.is_some_and(|exit| exit.ending.is_success());
    let tell = |(worker, exit): (usize, Option<Exit>)| {
        let noticed = exit.map_or(now, |exit| exit.at);
        (worker, words_of(worker).tell(started_at, noticed).of_ranks(first_rank, count))
    };
    exits.enumerate().filter(|(_, exit)| may_tell(*exit)).map(tell).collect()
}
