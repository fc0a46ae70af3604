//! Waits for everything that the launcher waits for.

use std::time::{Duration, Instant};

use rustix::process::{Signal, child_subreaper, getpid};

use crate::{
    Result,
    attempt::{Attempt, Ended},
    ending::signal_name,
    events::{Events, Source},
    job::{Job, OnSignal},
    launch::Launch,
    output::{Patience, say, see_out},
    signals::{Arrived, LastResort, Signals},
    supervisor::Event,
    sweep,
};

/// How often somebody is asked who does not tell.
pub(crate) const TURN: Duration = Duration::from_millis(100);

/// The events and signals of this process.
#[derive(Debug)]
pub(crate) struct Listener<'a> {
    job: &'a Job,
    pub(crate) events: Events,
    signals: Signals,
    /// The first signal that ends the job.
    told: Option<Signal>,
    /// Set while no rank runs.
    last_resort: Option<LastResort>,
    /// Whether processes that have lost their parents become children of this one.
    adopts: bool,
}

impl Listener<'_> {
    pub(crate) fn new(job: &Job) -> Result<Listener<'_>> {
        let signals = Signals::listen_to(job.signals.iter().map(|(signal, _)| *signal))?;
        let events = Events::new()?;
        events.add(signals.ready(), Source::Signals)?;
        // Those of a container become children of its first process, and others that of a process that has asked for it.
        let adopts = getpid().is_init() || child_subreaper().is_ok_and(|it| it.is_some());
        Ok(Listener { job, events, signals, told: None, last_resort: None, adopts })
    }

    /// Starts the workers, and waits until all have ended.
    pub(crate) fn supervise(&mut self, launch: &Launch<'_>, attempt: &mut Attempt) -> Result<()> {
        while attempt.verdict().is_none() {
            let ready = self.events.wait(Some(attempt.timeout()))?;

            // Signals come first: if a worker ended because all processes got a signal, the worker has not
            // failed.
            self.hear_signals(Some(&mut *attempt));
            attempt.turn(launch, &ready)?;
        }
        Ok(())
    }

    /// Hears the signals that have arrived, and passes them on to workers that run. Returns the first one that ends the job.
    pub(crate) fn hear_signals(&mut self, mut attempt: Option<&mut Attempt>) -> Option<Signal> {
        let mut ending = None;
        for Arrived { signal, is_typed } in self.signals.arrived() {
            if signal == Signal::CHILD {
                if self.adopts {
                    // Else no keeper runs, or it has nothing to tell any more.
                    let keeper = attempt.as_ref().map(|it| it.keeper.pid());
                    sweep::collect_adopted(|pid| Some(pid) == keeper);
                }
            } else if signal == Signal::TSTP {
                // The ranks stop, too, because a stopped launcher does not read their pipes.
                if let Some(attempt) = &mut attempt {
                    attempt.handle(Event::PassOn(Signal::STOP));
                }
                stop_myself();
            } else if ends_job(self.job, signal) {
                self.told.get_or_insert(signal);
                ending.get_or_insert(signal);
                let Some(attempt) = &mut attempt else { continue };
                let is_news = !attempt.is_ending();
                attempt.handle_signal(Event::End(signal), is_typed);
                if is_news {
                    say(&format!(
                        "{} passed on to the ranks; those still running in {:?} will be killed \
                         (Ctrl-C: at once)",
                        signal_name(signal.as_raw()),
                        self.job.policy.shutdown_timeout,
                    ));
                }
            } else if let Some(attempt) = &mut attempt {
                attempt.handle_signal(Event::PassOn(signal), is_typed);
            }
        }
        ending
    }

    /// Waits until all output is read, and returns `true`. A disk that does not take it may make this last for ever. If
    /// a signal has ended the job, or does so now, the wait is short, and the result `false`.
    pub(crate) fn finish_output(&mut self, ended: &mut Ended) -> Result<bool> {
        ended.attempt.console.finish();
        self.events.add(ended.attempt.console.finished(), Source::Output)?;
        let mut patience = Patience::begin();
        let is_read = loop {
            if self.events.wait(self.told.map(|_| TURN))?.contains(&Source::Output) {
                break true;
            }
            self.hear_signals(None);
            if self.is_told() && patience.is_over() {
                break false;
            }
        };
        self.events.remove(ended.attempt.console.finished())?;
        ended.has_read_all();
        Ok(is_read)
    }

    /// Waits until all is printed. Who reads slowly gets the output of ranks whole, unless a signal ends the job.
    pub(crate) fn see_out(&mut self) {
        see_out(|| {
            self.hear_signals(None);
            self.is_told()
        });
    }

    /// Ranks are about to run. A signal is for them.
    pub(crate) fn ranks_run(&mut self) {
        self.last_resort = None;
    }

    /// No rank runs from now on. The second signal that ends a job ends this process, whatever it waits for.
    pub(crate) fn no_rank_runs(&mut self) {
        let ending = self.job.signals.iter().map(|(signal, _)| *signal);
        let ending = ending.filter(|&signal| ends_job(self.job, signal));
        self.last_resort.get_or_insert_with(|| LastResort::of(ending));
    }

    /// Whether a signal that ends the job has come.
    pub(crate) fn is_told(&self) -> bool {
        self.told.is_some()
    }

    /// Waits for this time, or until a signal ends the job, which is returned. It may have come as a failure ended the world.
    pub(crate) fn pause(&mut self, time: Duration) -> Result<Option<Signal>> {
        let until = Instant::now() + time;
        loop {
            if let told @ Some(_) = self.hear_signals(None).or(self.told) {
                return Ok(told);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.events.wait(Some(left))?;
        }
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
