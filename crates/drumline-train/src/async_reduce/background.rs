//! The work in the background while gradients come in: rounds and reductions. Each begins when the one before
//! ends.
//!
//! There is no thread for it. The thread that drives the group (the progress thread, or a caller that waits)
//! ends a call and then begins the next one. The lock is never held during a call of the group.

use std::{
    fmt::Debug,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use drumline_group::{Cause, ProcessGroup, ReduceOp, driving};

use super::{
    MissingTensors,
    bitmap::Bitmap,
    layout::Layout,
    rounds::{Rounds, Verdict},
};
use crate::{Error, Result, failure};

#[derive(Debug)]
pub struct Background<H> {
    pub group: ProcessGroup,
    pub layout: Layout,
    pub op: ReduceOp,
    state: Mutex<State<H>>,
    changed: Condvar,
}

/// What is held of buckets that are complete on this rank, and how it is reduced.
pub trait Held: Debug + Send + Sized + 'static {
    /// What is held of one run of buckets.
    type Run: Send + 'static;

    /// Takes out what is held of a run, which is complete.
    fn take(&mut self, layout: &Layout, run: &Range<usize>) -> Self::Run;

    /// Begins the reduction of a run. It ends with [`Background::on_reduced`].
    fn reduce(background: &Arc<Background<Self>>, run: Range<usize>, held: Self::Run);
}

#[derive(Debug)]
struct State<H> {
    /// The number of the step, from 1.
    step: u64,
    rounds: Rounds,
    /// The tensors that this rank had brought when it closed the step.
    brought: Bitmap,
    held: H,
    /// The number of calls that are under way.
    under_way: usize,
    /// The tensors that are missing, if the step fails only because of them.
    missing: Option<Vec<MissingTensors>>,
    /// The first failure of the group.
    failed: Option<Error>,
    /// Counts the changes to which a waiting thread may have to respond.
    changes: u64,
    counts: Counts,
}

/// What an [`AsyncReduce`](super::AsyncReduce) has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Steps that have succeeded.
    pub steps: u64,
    /// Rounds in which ranks told each other which buckets are complete.
    pub rounds: u64,
    /// All-reduces. Adjacent buckets that can be reduced at the same time share one.
    pub all_reduces: u64,
}

impl<H> State<H> {
    /// Whether the step has ended and all memory is back.
    fn is_settled(&self) -> bool {
        let has_ended = self.failed.is_some() || self.missing.is_some();
        self.under_way == 0 && (has_ended || self.rounds.is_over())
    }
}

impl<H: Held> Background<H> {
    pub fn new(group: ProcessGroup, layout: Layout, op: ReduceOp, held: H) -> Self {
        let state = State {
            step: 1,
            rounds: Rounds::new(layout.buckets.len()),
            brought: Bitmap::new(layout.tensors.len()),
            held,
            under_way: 0,
            missing: None,
            failed: None,
            changes: 0,
            counts: Counts::default(),
        };
        Background { group, layout, op, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The failure that ended this engine.
    pub fn failure(&self) -> Result<()> {
        self.lock().failed.clone().map_or(Ok(()), Err)
    }

    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// Takes over a bucket that is complete on this rank: `hold` brings it. `closing`: the rank brings no more tensors
    /// in this step, and has brought these.
    pub fn take_over(
        self: &Arc<Self>,
        complete: Option<usize>,
        closing: Option<&Bitmap>,
        hold: impl FnOnce(&mut H, &Layout),
    ) {
        let mut state = self.lock();
        hold(&mut state.held, &self.layout);
        if let Some(bucket) = complete {
            state.rounds.complete(bucket);
        }
        if let Some(brought) = closing {
            state.brought.clone_from(brought);
            state.rounds.close();
        }
        drop(state);
        self.join_round();
    }

    /// Waits for the end of the step. `take_back` gets what is held then.
    ///
    /// # Errors
    ///
    /// [`NotBrought`](crate::ErrorKind::NotBrought) when a tensor is missing on any rank; then the next step begins
    /// nevertheless. Otherwise the failure of the group.
    pub fn finish_step(&self, take_back: impl FnOnce(&mut H)) -> Result<()> {
        self.wait();
        let mut state = self.lock();
        take_back(&mut state.held);
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let step = state.step;
        state.step += 1;
        state.rounds.next_step();
        match state.missing.take() {
            Some(missing) => Err(failure::not_brought(step, missing, None)),
            None => {
                state.counts.steps += 1;
                Ok(())
            }
        }
    }

    /// Ends the engine with this failure, if it has none yet.
    pub fn end_with(&self, error: &Error) {
        self.lock().failed.get_or_insert(error.clone());
        self.tell();
    }

    fn wait(&self) {
        loop {
            let seen = self.lock().changes;
            let look_again_at = driving::look_again_at();
            // If no other thread drives the group, this thread does.
            if !driving::help(&self.group, look_again_at, &|| self.lock().is_settled()) {
                let is_same = |state: &mut State<H>| !state.is_settled() && state.changes == seen;
                let limit = driving::ASK_EVERY;
                drop(self.changed.wait_timeout_while(self.lock(), limit, is_same));
            }
            if self.lock().is_settled() {
                return;
            }
            if driving::is_wanted() {
                self.group.abort();
            }
        }
    }

    /// Begins a round, if this rank has news for one and nothing else is under way.
    fn join_round(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.failed.is_some() {
            return;
        }
        let Some(word) = state.rounds.join() else { return };
        state.under_way += 1;
        state.counts.rounds += 1;
        drop(state);
        let this = self.clone();
        driving::all_gather_then(&self.group, word, move |heard| this.on_round(heard));
    }

    fn on_round(self: &Arc<Self>, heard: Result<Vec<u64>>) {
        let mut state = self.lock();
        state.under_way -= 1;
        let verdict = match heard {
            Ok(heard) => state.rounds.on_round(heard),
            Err(error) => return self.fail(state, error),
        };
        match verdict {
            Verdict::Reduce(runs) => self.reduce(state, runs),
            Verdict::GoOn => {
                drop(state);
                self.join_round();
            }
            Verdict::Missing => {
                state.under_way += 1;
                let brought = state.brought.words().to_vec();
                drop(state);
                let this = self.clone();
                driving::all_gather_then(&self.group, brought, move |all| this.on_missing(all));
            }
        }
        self.tell();
    }

    /// Reduces runs of buckets that are complete on all ranks. Each run is one call, unless its type changes.
    fn reduce(self: &Arc<Self>, mut state: MutexGuard<'_, State<H>>, runs: Vec<Range<usize>>) {
        let runs: Vec<_> = runs.into_iter().flat_map(|run| self.layout.of_one_type(run)).collect();
        let take = |run: Range<usize>| {
            let held = state.held.take(&self.layout, &run);
            (run, held)
        };
        let leaving: Vec<_> = runs.into_iter().map(take).collect();
        state.under_way += leaving.len();
        state.counts.all_reduces += leaving.len() as u64;
        drop(state);
        for (run, held) in leaving {
            H::reduce(self, run, held);
        }
    }

    /// The reduction of a run has ended, or another actor carries it out. `hold` keeps what is left of it.
    pub fn on_reduced(self: &Arc<Self>, result: Result<()>, hold: impl FnOnce(&mut H)) {
        let mut state = self.lock();
        state.under_way -= 1;
        hold(&mut state.held);
        if let Err(error) = result {
            state.failed.get_or_insert(error);
        }
        let is_last = state.under_way == 0;
        if is_last && state.failed.is_none() {
            state.rounds.on_reduced();
        }
        drop(state);
        if is_last {
            self.join_round();
        }
        self.tell();
    }

    /// All ranks have said which tensors they have brought, and that they bring no more.
    fn on_missing(&self, all: Result<Vec<u64>>) {
        let mut state = self.lock();
        state.under_way -= 1;
        let all = match all {
            Ok(all) => all,
            Err(error) => return self.fail(state, error),
        };
        let tensors = &self.layout.tensors;
        let words = state.brought.words().len();
        let ranks = all.chunks_exact(words).map(Bitmap::from_words).enumerate();
        let missing = ranks.filter_map(|(rank, brought)| {
            let missing = brought.missing(0..tensors.len()).into_iter();
            let names: Vec<String> = missing.map(|it| tensors[it].spec.name.clone()).collect();
            (!names.is_empty()).then(|| MissingTensors::new(rank, names, true))
        });
        state.missing = Some(missing.collect());
        drop(state);
        self.tell();
    }

    /// A round has failed. The error says what the ranks at fault had not brought.
    fn fail(&self, mut state: MutexGuard<'_, State<H>>, error: Error) {
        let of_rank = |rank| {
            let names = self.layout.names_in(&state.rounds.lacking(rank));
            (!names.is_empty()).then(|| MissingTensors::new(rank, names, false))
        };
        let at_fault = error.cause().map(Cause::ranks).unwrap_or_default().into_iter();
        let missing: Vec<_> = at_fault.filter_map(of_rank).collect();
        let error = match missing.is_empty() {
            true => error,
            false => failure::not_brought(state.step, missing, Some(&error)),
        };
        state.failed.get_or_insert(error);
        drop(state);
        self.tell();
    }

    /// Wakes the thread that waits.
    fn tell(&self) {
        self.lock().changes += 1;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<H>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
