//! A rank tells its launcher which step it begins, and hears whether all ranks stop before it.
//!
//! A launcher may want to end all ranks at the same step, because a host joins the job. It cannot choose the
//! step alone: some rank may be past it when the news arrives. So it first *holds* the ranks, and then chooses:
//!
//! ```text
//!  launcher                          a rank
//!  ask ──────────────────────────►   from now on `step` waits
//!  ◄──────────────────────── begun   the last step that it has begun
//!  stop: the largest of all + 1 ──►  `step` returns; from this step on it says Stop
//! ```
//!
//! No rank waits in the meantime for a rank that is held: all work of the steps before was begun, and a step that
//! was begun goes on. A thread of the process answers the launcher, so a call of [`step`] takes one lock and no
//! system call.
//!
//! A rank that goes on when others die says so in the same way, once: see [`regroups`].
//!
//! A launcher that looks for ranks that hang also wants to know the steps of a rank that is not held. Before it
//! starts the ranks, it says how often. That thread then tells it the last step, if there was a new one.

use std::{
    env,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use drumline_group::{
    Config, Error, ErrorKind, PerProcess, Result,
    auth::Secret,
    launched,
    rendezvous::Endpoint,
    store::{Store, tcp::TcpStore},
};

/// What a rank does after [`step`].
#[must_use = "all ranks stop before the same step"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Makes the step.
    Continue,
    /// Saves what it needs and exits with code 0. All ranks of the job get this before the same step. The
    /// launcher then starts the program again, on other hosts.
    Stop,
}

/// Tells the launcher that this rank begins step `number`, and returns whether to make it.
///
/// Call it once before every step, on every rank, with the same numbers. With it, a host joins a running job
/// between two steps: all ranks stop before the same one. Without it, the launcher sends SIGTERM to the ranks.
/// The launcher also counts a job that has made a step as alive: see the restarts of `drumline run`.
///
/// Under another launcher, and in a forked process, it always returns [`Step::Continue`].
///
/// ```
/// # use drumline_train as drumline;
/// use drumline::{Step, step};
///
/// for number in 0..3 {
///     if step(number) == Step::Stop {
///         break; // save a checkpoint, and exit with 0
///     }
///     // forward, backward, and a step of the optimizer
/// }
/// ```
pub fn step(number: u64) -> Step {
    static OF_THIS_PROCESS: PerProcess<Option<&'static Telling>> = PerProcess::new();
    let join = || match OF_THIS_PROCESS.inherited().next() {
        Some(_) => None, // in a fork: its parent answers
        None => Launcher::from_env().and_then(|launcher| launcher.listen(number)),
    };
    match OF_THIS_PROCESS.get(join) {
        Some(telling) => telling.begin(number),
        None => Step::Continue,
    }
}

/// Tells the launcher that this rank may die, and that the ranks of its group then go on without it while `min_ranks`
/// of them are left. The launcher ends the job when a rank dies that has not told this.
///
/// Returns when the launcher has it. Call it once the group is there: ranks that start up wait for all of them. Under
/// another launcher, and in a fork of a process that has called it, it does nothing.
pub fn regroups(min_ranks: usize) {
    static OF_THIS_PROCESS: PerProcess<()> = PerProcess::new();
    if OF_THIS_PROCESS.inherited().next().is_some() {
        return;
    }
    OF_THIS_PROCESS.get(|| ());
    let Some(launcher) = Launcher::from_env() else { return };
    let told = launcher.connect();
    let told = told.and_then(|it| it.tell(keys::REGROUPS, &min_ranks.to_string()));
    if let Err(error) = told {
        tracing::warn!(
            "cannot tell the launcher that the ranks go on when this one dies, so it will end them: {error}"
        );
    }
}

/// Tells the launcher that the ranks of the group go on without these, by their numbers in the job, although they may run:
/// one that is stopped keeps what it holds, and gets its error only when it wakes. The launcher kills those of its host.
/// Returns when they have ended.
pub fn left_behind(ranks: &[usize]) {
    let Some(launcher) = Launcher::from_env() else { return };
    let tell = |it: Telling| {
        let list: String = ranks.iter().map(|rank| format!(" {rank}")).collect();
        it.store.append(keys::LEFT_BEHIND, list.as_bytes())?;
        let ends: Vec<String> = ranks.iter().map(|rank| format!("{}{rank}", keys::ENDED)).collect();
        it.store.wait(&ends.iter().map(String::as_str).collect::<Vec<_>>(), ENDS_WITHIN)
    };
    if let Err(error) = launcher.connect().and_then(tell) {
        tracing::warn!("goes on although ranks that are left behind may run: {error}");
    }
}

/// The variable with the address of the launcher's own store on this host.
pub const LAUNCHER_VARIABLE: &str = "DRUMLINE_LAUNCHER";

/// The variable with which a launcher says that it wants to know steps and who regroups. Its value is this rank's number
/// among the ranks of its host.
pub const STEPS_VARIABLE: &str = "DRUMLINE_STEPS";

/// The keys of the launcher's store. They have the number of the rank behind them, but for `ASK` and `STOP`.
pub mod keys {
    /// The first step that a rank has begun.
    pub const FIRST: &str = "drumline/steps/first/";
    /// How often a rank tells its last step, in milliseconds. The launcher sets it before it starts the ranks; without
    /// it they tell none.
    pub const EVERY: &str = "drumline/steps/every";
    /// The last step that a rank has begun, as the rank tells it every so often.
    pub const LAST: &str = "drumline/steps/last/";
    /// The launcher holds the ranks.
    pub const ASK: &str = "drumline/steps/ask";
    /// The last step that a rank has begun, as the answer: a number, or nothing.
    pub const BEGUN: &str = "drumline/steps/begun/";
    /// The step before which all ranks stop.
    pub const STOP: &str = "drumline/steps/stop";
    /// A rank has heard that it stops.
    pub const STOPPED: &str = "drumline/steps/stopped/";
    /// With how many ranks the job goes on when this rank dies.
    pub const REGROUPS: &str = "drumline/steps/regroups/";
    /// The ranks, by their numbers in the job, without which others go on although they may run. It has no number behind it.
    pub const LEFT_BEHIND: &str = "drumline/steps/left";
    /// A rank that was left behind runs no more on this host. Behind this key is its number in the job.
    pub const ENDED: &str = "drumline/steps/ended/";
}

/// How far this rank is.
#[derive(Debug, Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    begun: Option<u64>,
    is_held: bool,
    stop_at: Option<u64>,
}

impl Progress {
    fn begin(&self, number: u64) -> Step {
        let state = self.lock();
        let mut state =
            self.changed.wait_while(state, |it| it.is_held).unwrap_or_else(PoisonError::into_inner);
        if state.stop_at.is_some_and(|at| number >= at) {
            return Step::Stop;
        }
        state.begun = state.begun.max(Some(number));
        Step::Continue
    }

    /// Holds all later calls, and returns the last step that has begun.
    fn hold(&self) -> Option<u64> {
        let mut state = self.lock();
        state.is_held = true;
        state.begun
    }

    /// Lets the calls go on; those from step `stop_at` on get [`Step::Stop`].
    fn release(&self, stop_at: Option<u64>) {
        let mut state = self.lock();
        state.is_held = false;
        state.stop_at = stop_at;
        self.changed.notify_all();
    }

    fn begun(&self) -> Option<u64> {
        self.lock().begun
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where a launcher hears of steps, and the number under which this rank answers.
struct Launcher {
    store: Endpoint,
    rank: String,
}

impl Launcher {
    /// `None` if no launcher asks for steps.
    fn from_env() -> Option<Launcher> {
        if launched::is_of_inner_job(|name| env::var(name).ok()) {
            return None;
        }
        let rank = env::var(STEPS_VARIABLE).ok()?;
        let store = env::var(LAUNCHER_VARIABLE).ok()?.parse().ok()?;
        Some(Launcher { store, rank })
    }

    /// Tells the launcher the first step, and starts the thread that answers it. `None` if that cannot be.
    fn listen(self, first: u64) -> Option<&'static Telling> {
        let listening = self.connect().and_then(|telling| {
            telling.tell(keys::FIRST, &first.to_string())?;
            // One for the process, whose end it outlives.
            let telling: &'static Telling = Box::leak(Box::new(telling));
            let answer = move || {
                if let Err(error) = telling.answer(first) {
                    tracing::warn!("cannot tell the launcher about steps: {error}");
                    telling.progress.release(None);
                }
            };
            let thread = thread::Builder::new().name("steps".into()).stack_size(256 * 1024);
            thread.spawn(answer).map_err(|error| Error::io("start a thread", error))?;
            Ok(telling)
        });
        let failed = listening.inspect_err(|error| {
            tracing::warn!("cannot tell the launcher about steps: {error}");
        });
        failed.ok()
    }

    fn connect(self) -> Result<Telling> {
        let config = Config::from_env()?;
        let secret = Secret::from_env()?.ok_or_else(|| {
            Error::setting(
                "DRUMLINE_SECRET_FILE",
                "not set, but the launcher's store asks for the job's secret",
            )
        })?;
        let store = TcpStore::connect_at(&self.store, &secret, config.security, CONNECT_WITHIN)?;
        Ok(Telling { store, rank: self.rank, progress: Progress::default() })
    }
}

/// What this rank tells its launcher.
struct Telling {
    store: TcpStore,
    rank: String,
    progress: Progress,
}

impl Telling {
    fn begin(&self, number: u64) -> Step {
        let next = self.progress.begin(number);
        if next == Step::Stop
            && let Err(error) = self.tell(keys::STOPPED, "")
        {
            tracing::warn!("cannot tell the launcher that this rank stops: {error}");
        }
        next
    }

    fn tell(&self, key: &str, value: &str) -> Result<()> {
        self.store.set(&format!("{key}{}", self.rank), value.as_bytes())
    }

    fn answer(&self, first: u64) -> Result<()> {
        self.tell_until_asked(first)?;
        let begun = self.progress.hold().map_or_else(String::new, |step| step.to_string());
        self.tell(keys::BEGUN, &begun)?;
        self.store.wait(&[keys::STOP], FOR_EVER)?;
        self.progress.release(number(&self.store.get(keys::STOP)?));
        Ok(())
    }

    /// Waits until the launcher holds the ranks, and tells it the last step meanwhile if it wants to know.
    fn tell_until_asked(&self, first: u64) -> Result<()> {
        let every = match self.store.check(&[keys::EVERY])? {
            true => {
                Some(Duration::from_millis(number(&self.store.get(keys::EVERY)?).unwrap_or(1000)))
            }
            false => None,
        };
        let mut told = None;
        loop {
            // The thread may be here before the first step has begun.
            let begun = self.progress.begun().unwrap_or(first);
            if every.is_some() && told != Some(begun) {
                self.tell(keys::LAST, &begun.to_string())?;
                told = Some(begun);
            }
            match self.store.wait(&[keys::ASK], every.unwrap_or(FOR_EVER)) {
                Err(error) if error.kind() == ErrorKind::StoreTimeout => {}
                other => return other,
            }
        }
    }
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// The launcher looks for ranks that are left behind every two seconds.
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// The launcher serves its store before it starts the first rank.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// The store ends with the launcher, and so does this process.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn all_ranks_stop_before_the_same_step() {
        let ranks = [Progress::default(), Progress::default()];
        for (rank, last) in ranks.iter().zip([7, 8]) {
            for number in 5..=last {
                assert_eq!(rank.begin(number), Step::Continue);
            }
        }
        let begun = ranks.each_ref().map(Progress::hold);
        assert_eq!(begun, [Some(7), Some(8)]);
        thread::scope(|scope| {
            let (sender, steps) = mpsc::channel();
            for (rank, next) in ranks.iter().zip([8, 9]) {
                let sender = sender.clone();
                scope.spawn(move || {
                    let first_to_stop = (next..).find(|&n| rank.begin(n) == Step::Stop).unwrap();
                    sender.send(first_to_stop).unwrap();
                });
            }
            assert!(steps.recv_timeout(Duration::from_millis(50)).is_err(), "a held rank goes on");
            ranks.iter().for_each(|rank| rank.release(Some(9)));
            assert_eq!([steps.recv().unwrap(), steps.recv().unwrap()], [9, 9]);
        });
    }

    #[test]
    fn a_rank_that_has_begun_no_step_stops_before_its_first() {
        let rank = Progress::default();
        assert_eq!(rank.hold(), None);
        rank.release(Some(0));
        assert_eq!(rank.begin(3), Step::Stop);
    }

    #[test]
    fn without_a_decision_a_held_rank_goes_on() {
        let rank = Progress::default();
        let _ = rank.hold();
        rank.release(None);
        assert_eq!(rank.begin(0), Step::Continue);
    }

    #[test]
    fn without_a_launcher_every_step_is_made_and_nobody_hears_who_regroups() {
        regroups(1);
        left_behind(&[0]);
        assert_eq!(step(0), Step::Continue);
    }
}
