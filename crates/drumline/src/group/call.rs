//! One collective call, from its arguments to its result or failure.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use drumline_schedule::{
    Algorithm, Collective, Schedule, Topology, algorithm::DIRECT_MAX_RANKS, step::Rank,
};

use super::{Inner, ProcessGroup, State};
use crate::{
    Cause, CollectiveError, Config, Element, Error, ReduceOp, Result,
    executor::{Buffers, Description, Machine, Operation, Progress, drive},
    transport::Transport,
};

/// The arguments of a collective, other than its buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) operation: Operation,
    pub(super) algorithm: &'static Algorithm,
    pub(super) reduce_op: Option<ReduceOp>,
    pub(super) root: Option<Rank>,
    /// Elements, as the caller counts them.
    pub(super) count: usize,
}

/// Up to this many bytes `all_reduce` takes the algorithm with the fewest rounds, beyond it the
/// one with the fewest bytes. A constant and not a measurement, so that all ranks agree.
const FEW_BYTES: usize = 16 * 1024;

/// The algorithm for an `all_reduce` of so many bytes.
pub(super) fn for_all_reduce(
    bytes: usize,
    world_size: usize,
    config: &Config,
) -> Result<&'static Algorithm> {
    match &config.all_reduce {
        Some(name) => find(Collective::AllReduce, name),
        None if bytes <= FEW_BYTES => find(Collective::AllReduce, "doubling"),
        None if world_size <= DIRECT_MAX_RANKS => find(Collective::AllReduce, "direct"),
        None => find(Collective::AllReduce, "halving"),
    }
}

/// The algorithm `name` of `collective`.
pub(super) fn find(collective: Collective, name: &str) -> Result<&'static Algorithm> {
    Algorithm::find(collective, name).map_err(|unknown| Error::InvalidSetting {
        setting: format!("the algorithm of {collective}"),
        problem: unknown.to_string(),
    })
}

impl ProcessGroup {
    /// Runs `call` on the caller's thread. `data` is worked on in place; `input` is this rank's
    /// contribution where it is not in `data`.
    pub(super) fn run<T: Element>(&self, call: Call, data: &mut [T], input: &[T]) -> Result<()> {
        let started = Instant::now();
        let inner = &*self.inner;
        let mut state = inner.lock();
        let schedule = state.schedule(inner, call)?;
        // From here to where it is put back nothing returns early: a call that panics shall
        // leave a group without connections, but one that is refused shall not.
        let mut transport = state.take_transport(call.operation.name())?;
        let mut description = Description::new(
            inner.digest,
            state.sequence,
            call.operation,
            T::DTYPE,
            call.count,
            call.algorithm.name,
        );
        if let Some(op) = call.reduce_op {
            description = description.with_reduce_op(op);
        }
        if let Some(root) = call.root {
            description = description.with_root(root);
        }

        // The operator is not looked at where nothing is reduced.
        let op = call.reduce_op.unwrap_or(ReduceOp::Sum);
        let mut buffers = Buffers::new(&schedule, op, data, input, &mut state.pool);
        let mut machine = Machine::new(
            description,
            &state.history,
            schedule,
            size_of::<T>(),
            buffers.extents(),
            started + inner.config.timeout,
        );
        let result = block_on(&mut machine, &mut *transport, &mut buffers);

        buffers.recycle(&mut state.pool);
        let elapsed = started.elapsed();
        inner.busy_ns.fetch_add(elapsed.as_nanos() as u64, Ordering::Relaxed);
        let result = result.map_err(|cause| {
            inner.fail(&mut state, &mut *transport, description.to_string(), elapsed, cause)
        });
        state.history.push(description);
        state.sequence += 1;
        state.transport = Some(transport);
        result
    }
}

/// Drives `machine` until it is done, sleeping while nothing can be done.
fn block_on<T: Element>(
    machine: &mut Machine<'_>,
    transport: &mut dyn Transport,
    buffers: &mut Buffers<'_, T>,
) -> Result<(), Cause> {
    transport.begin(machine)?;
    loop {
        match drive(machine, transport, buffers, Instant::now())? {
            Progress::Done => return Ok(()),
            Progress::Moved => {}
            Progress::Stuck => transport.wait(machine.deadline()),
        }
    }
}

impl State {
    /// The transport, for the time of a call named `attempted`.
    fn take_transport(&mut self, attempted: &'static str) -> Result<Box<dyn Transport>> {
        if let Some(by) = &self.failure {
            return Err(Error::Poisoned { attempted, by: by.clone() });
        }
        self.transport.take().ok_or_else(|| Error::InvalidArgument {
            operation: attempted,
            problem: "the group has been destroyed, or an earlier call panicked".to_owned(),
        })
    }

    /// The schedule of `call` for this rank; made once.
    fn schedule(&mut self, inner: &Inner, call: Call) -> Result<Arc<Schedule>> {
        let root = call.root.unwrap_or(0);
        let key = (call.algorithm.collective, call.algorithm.name, root);
        if let Some(schedule) = self.schedules.get(&key) {
            return Ok(schedule.clone());
        }
        let schedule = call
            .algorithm
            .schedule(&Topology::flat(inner.world_size), inner.rank, root)
            .map_err(|error| Error::InvalidArgument {
                operation: call.operation.name(),
                problem: error.to_string(),
            })?;
        let schedule = Arc::new(schedule);
        self.schedules.insert(key, schedule.clone());
        Ok(schedule)
    }
}

impl Inner {
    /// Poisons the group and tells the peers why `operation` failed.
    fn fail(
        &self,
        state: &mut State,
        transport: &mut dyn Transport,
        operation: String,
        elapsed: Duration,
        cause: Cause,
    ) -> Error {
        let failure = Arc::new(CollectiveError {
            group: self.name.clone(),
            rank: self.rank,
            sequence: state.sequence,
            operation,
            elapsed,
            cause,
        });
        tracing::debug!("{failure}");
        transport.abort(&failure);
        state.failure = Some(failure.clone());
        Error::Collective(failure)
    }

    /// Closes the group on all ranks together, and then the store.
    pub(super) fn destroy(&self) -> Result<()> {
        let started = Instant::now();
        let mut state = self.lock();
        let mut transport = state.take_transport("destroy")?;
        transport.close(started + self.config.timeout, &state.history).map_err(|cause| {
            let operation = "destroy".to_owned();
            self.fail(&mut state, &mut *transport, operation, started.elapsed(), cause)
        })?;
        if let Some(rendezvous) = state.rendezvous.take() {
            rendezvous.leave(self.config.timeout.saturating_sub(started.elapsed()));
        }
        Ok(())
    }
}
