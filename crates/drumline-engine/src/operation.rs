//! A call together with its buffers.

use std::time::Duration;

use drumline_kernels::{Source, Target, with_ieee_rounding};
use drumline_schedule::{
    Collective, Schedule,
    step::{Buffer, Rank},
};

use crate::{
    Cause, Result,
    bytes::Bytes,
    call::Call,
    executor::{Buffers, Description, Held, Memory, Plan, Pool},
    host::Host,
    operator::{AnyOperator, Reducer},
};

/// A call together with its buffers, as bytes. A [lane](crate::lane) carries it out.
#[derive(Debug)]
pub struct Operation<'a> {
    /// The call without its buffers.
    call: Call,
    memory: Memory<'a>,
    /// What logs and errors name, if this call only stands for another.
    stands_for: Option<StandsFor>,
    /// Whether the plan leaves a result in the data.
    writes: bool,
    /// This rank's data before they were multiplied, if the call must leave them as they are.
    unscaled: Option<Vec<u8>>,
}

/// For what a call stands that the program did not make.
#[derive(Clone, Copy, Debug)]
pub enum StandsFor {
    /// A call of a foreign backend.
    Call(Description),
    /// The end of a group.
    Destroy,
}

impl<'a> Operation<'a> {
    /// A call on buffers that are lent, with its operator if it reduces. The buffers are as long as the call says, and
    /// aligned for its elements.
    #[inline]
    pub fn lent(
        call: Call,
        operator: Option<AnyOperator>,
        data: &'a mut [u8],
        input: &'a [u8],
    ) -> Operation<'a> {
        Operation::on(call, operator, Buffers::Lent { data, input })
    }

    /// A call on buffers that it holds until it [ends](Operation::end).
    pub fn held(
        call: Call,
        operator: Option<AnyOperator>,
        buffers: Box<dyn Held>,
    ) -> Operation<'static> {
        Operation::on(call, operator, Buffers::Held(buffers))
    }

    #[inline(always)]
    fn on(mut call: Call, operator: Option<AnyOperator>, buffers: Buffers<'a>) -> Operation<'a> {
        call.operator = operator.as_ref().map(AnyOperator::kind);
        let memory = Memory::new(operator, buffers);
        let (stands_for, unscaled) = (None, None);
        Operation { call, memory, stands_for, writes: false, unscaled }
    }

    /// The call without its buffers.
    #[inline]
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// Has the call, which has not begun, stand for another one with this time limit.
    pub fn stand_for(&mut self, other: StandsFor, timeout: Duration) {
        self.stands_for = Some(other);
        self.call.timeout = Some(timeout);
    }

    /// The call that logs and errors name, if this one only stands for another.
    pub fn told_as(&self) -> Option<String> {
        Some(match self.stands_for? {
            StandsFor::Call(description) => format!("{description:?}"),
            StandsFor::Destroy => "destroy".to_owned(),
        })
    }

    /// Whether this call only stands for another.
    pub(crate) fn stands_for_another(&self) -> bool {
        self.stands_for.is_some()
    }

    /// The caller's buffers, at any stage of the call.
    pub fn buffers(&self) -> &Buffers<'a> {
        &self.memory.buffers
    }

    /// The same, to write to them before the call has begun or after it has ended.
    pub fn buffers_mut(&mut self) -> &mut Buffers<'a> {
        &mut self.memory.buffers
    }

    /// Hands the result, and the buffers that the call holds, to their owner.
    pub fn end(self, result: Result<()>) {
        if let Buffers::Held(held) = self.memory.buffers {
            held.end(result);
        }
    }

    /// The offset in this rank's arena, in bytes, of the [buffer that neighbours reach]. `None` where that
    /// buffer lies outside the arena.
    ///
    /// [buffer that neighbours reach]: drumline_schedule::Collective::registered_buffer
    #[inline]
    pub(crate) fn registered(&self, host: &Host) -> Option<u64> {
        host.arena().offset_of(self.open_buffer()?).map(|offset| offset as u64)
    }

    /// Takes the registered buffer away from neighbours: after a failure, late ones may still write to it, or
    /// read what the caller is about to write.
    pub(crate) fn detach(&self, host: &Host) {
        if let Some(open) = self.open_buffer()
            && host.arena().offset_of(open).is_some()
            && let Err(error) = host.arena().detach(open)
        {
            tracing::error!(%error, "ranks that are late may still use a registered buffer");
        }
    }

    /// The buffer that neighbours may reach if it is registered.
    #[inline]
    fn open_buffer(&self) -> Option<&[u8]> {
        match self.call.collective.registered_buffer() {
            // Neighbours must see the multiples, which lie elsewhere.
            Buffer::Input if self.memory.factor().is_some() => None,
            Buffer::Input => Some(self.memory.buffers.input()),
            _ => Some(self.memory.buffers.data()),
        }
    }

    /// Prepares the buffers and the working memory that the plan needs.
    #[inline]
    pub(crate) fn prepare(&mut self, plan: &Plan, pool: &mut Pool) {
        if self.memory.factor().is_some() {
            let Schedule { collective, rank, root, .. } = *plan.schedule;
            self.contribute(collective, rank, root);
        }
        self.writes = plan.writes;
        if plan.wide {
            self.memory.widen(&self.call);
        }
        self.memory.lay_out(plan, pool);
    }

    /// The prepared buffers.
    #[inline]
    pub(crate) fn memory(&mut self) -> &mut Memory<'a> {
        &mut self.memory
    }

    /// Returns the working memory to the pool. Afterwards the result is in the caller's buffers.
    #[inline]
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        self.memory.release(pool);
        self.memory.narrow(&self.call, self.writes);
        self.restore_unscaled();
    }

    /// Hands the data, the input and the operator to `carry_out`, which makes the whole call: a foreign backend takes
    /// it in place of a lane.
    pub fn carried_by(
        &mut self,
        rank: Rank,
        carry_out: impl FnOnce(&Call, &mut [u8], &[u8], Reducer<'_>) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        if self.memory.factor().is_some() {
            self.contribute(self.call.collective, rank, self.call.root.unwrap_or(0));
        }
        let (operator, data, input) = self.memory.parts();
        let reducer = Reducer::new(operator, self.call.dtype);
        let result = carry_out(&self.call, data, input, reducer);
        self.restore_unscaled();
        result
    }

    /// Multiplies what this rank contributes: the input if there is one, otherwise the data, in place. Keeps a copy of
    /// the data if this rank gets no result.
    #[inline(never)]
    fn contribute(&mut self, collective: Collective, rank: Rank, root: Rank) {
        let keeps_data = collective == Collective::Reduce && rank != root;
        let Some(factor) = self.memory.factor().copied() else { return };
        if keeps_data {
            self.unscaled = Some(self.memory.buffers.data().to_vec());
        }
        let dtype = self.call.dtype;
        let scale =
            |data: &mut [u8]| (dtype.kernels().scale)(Target::from(data), &factor[..dtype.size()]);
        with_ieee_rounding(|| {
            if self.memory.buffers.input().is_empty() {
                return scale(self.memory.buffers.both().0);
            }
            let mut scaled = Bytes::from(self.memory.buffers.input());
            scale(&mut scaled);
            self.memory.input = Some(scaled);
        });
    }

    #[inline]
    fn restore_unscaled(&mut self) {
        if let Some(unscaled) = self.unscaled.take() {
            self.memory.buffers.both().0.copy_from_slice(&unscaled);
        }
        self.memory.input = None;
    }
}

impl Memory<'_> {
    /// Copies the buffers to the wider type in which sums are kept, for algorithms in which partial sums travel. The
    /// call works on the copies, so nothing is rounded before the end.
    #[inline(never)]
    fn widen(&mut self, call: &Call) {
        let widened = |elements: &[u8]| {
            let mut wide =
                Bytes::zeroed(elements.len() / call.dtype.size() * call.dtype.accumulator().size());
            (call.dtype.kernels().widen)(Target::from(&mut wide[..]), Source::from(elements));
            wide
        };
        let (data, input) = (widened(self.buffers.data()), widened(self.input()));
        (self.data, self.input) = (Some(data), Some(input));
    }

    /// Rounds what the copies hold to the caller's data, if they hold a result.
    #[inline]
    fn narrow(&mut self, call: &Call, writes: bool) {
        if let Some(wide) = self.data.take()
            && writes
        {
            let data = Target::from(self.buffers.both().0);
            (call.dtype.kernels().narrow)(data, Source::from(&wide[..]));
        }
    }
}
