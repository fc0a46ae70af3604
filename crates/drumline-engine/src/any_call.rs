//! A call together with its buffers, whatever the type of its elements.

use drumline_schedule::step::Rank;

use crate::{
    Cause, Result,
    call::Call,
    executor::{Memory, Plan, Pool},
    host::Host,
    operator::Reduce,
};

/// A call together with its buffers. A lane carries it out.
pub trait AnyCall {
    /// The call without its buffers.
    fn call(&self) -> &Call;
    /// The call that logs and errors name, if this one only stands for another.
    fn told_as(&self) -> Option<String> {
        None
    }
    /// The offset in this rank's arena, in bytes, of the [buffer that neighbours reach]. `None` where that
    /// buffer lies outside the arena.
    ///
    /// [buffer that neighbours reach]: drumline_schedule::Collective::registered_buffer
    fn registered(&self, host: &Host) -> Option<u64>;
    /// Takes the registered buffer away from neighbours: after a failure, late ones may still write to it, or
    /// read what the caller is about to write.
    fn detach(&mut self, host: &Host);
    /// Prepares the buffers and the working memory that the plan needs.
    fn prepare(&mut self, plan: &Plan, pool: &mut Pool);
    /// The prepared buffers.
    fn memory(&mut self) -> &mut dyn Memory;
    /// Returns the working memory to the pool. Afterwards the result is in the caller's buffers.
    fn release(&mut self, pool: &mut Pool);
    /// Hands the data and the input, as bytes, to `carry_out`, which makes the whole call. A foreign backend
    /// uses this method in place of `prepare`, `memory` and `release`.
    fn on_bytes(&mut self, rank: Rank, carry_out: &mut OnBytes<'_>) -> Result<(), Cause>;
}

/// Makes a call, given the bytes of its data, the bytes of its input, and its operator.
pub type OnBytes<'a> = dyn FnMut(&mut [u8], &[u8], &dyn Reduce) -> Result<(), Cause> + 'a;

/// An asynchronous call: it owns its buffers, and tells its caller when it has ended.
pub trait Job: Send {
    /// The call and its buffers.
    fn operation(&mut self) -> &mut dyn AnyCall;
    /// Hands the result, and the buffers with it, to the caller.
    fn complete(self: Box<Self>, result: Result<()>);
}
