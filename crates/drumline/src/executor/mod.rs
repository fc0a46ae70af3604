//! Runs schedules.
//!
//! The [`Machine`] decides, the [`Memory`] holds the caller's buffers, a [`Transport`] moves
//! bytes; [`drive`] lets them take turns and never blocks. Whoever has a clock and something to
//! wait on (a blocking call, a progress thread, a simulator) calls it again and again.

mod machine;
mod memory;
mod message;
#[cfg(test)]
mod tests;

use std::time::Instant;

use drumline_kernels::with_ieee_rounding;

pub(crate) use machine::{Action, History, Machine};
pub(crate) use memory::{Buffers, Memory, Pool};
pub(crate) use message::{Description, Header, Operation, array};

use crate::{error::Cause, transport::Transport};

/// How far [`drive`] got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The collective is complete.
    Done,
    /// Something moved; there may be more.
    Moved,
    /// Nothing can be done before a peer or the clock moves.
    Stuck,
}

/// Does everything that can be done at time `now` without waiting.
pub(crate) fn drive(
    machine: &mut Machine<'_>,
    transport: &mut dyn Transport,
    memory: &mut dyn Memory,
    now: Instant,
) -> Result<Progress, Cause> {
    with_ieee_rounding(|| {
        loop {
            match machine.poll() {
                Action::Send { to, header, src } => transport.send(to, header, src),
                Action::Receive { from, dst } => transport.receive(from, dst),
                Action::Compute(step) => memory.compute(step),
                Action::Done => return Ok(Progress::Done),
                Action::Wait => break,
            }
        }
        if transport.progress(machine, memory)? {
            return Ok(Progress::Moved);
        }
        machine.on_time(now)?;
        Ok(Progress::Stuck)
    })
}
