//! Runs schedules.
//!
//! The [`Machine`] decides, the [`Memory`] holds the caller's buffers, a [`Transport`] moves
//! bytes between ranks and a [`Host`] is the memory that neighbours share; [`drive`] lets them
//! take turns and never blocks. Whoever has a clock and something to wait on (a blocking call,
//! the progress thread, a simulator) calls it again and again.

mod flags;
mod history;
mod layout;
mod machine;
mod memory;
mod message;
#[cfg(test)]
mod tests;

use std::time::Instant;

use drumline_kernels::with_ieee_rounding;

pub(crate) use flags::Flags;
pub(crate) use history::History;
pub(crate) use layout::{Layout, Place};
pub(crate) use machine::{Action, Machine};
pub(crate) use memory::{Buffers, Memory, Pool};
pub use message::Operation;
pub(crate) use message::{Description, Header, array};

use crate::{error::Cause, host::Host, transport::Transport};

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
    machine: &mut Machine,
    transport: &mut dyn Transport,
    mut host: Option<&mut Host>,
    memory: &mut dyn Memory,
    now: Instant,
) -> Result<Progress, Cause> {
    with_ieee_rounding(|| {
        loop {
            match (machine.poll(), &mut host) {
                (Action::Send { to, header, src }, _) => transport.send(to, header, src),
                (Action::Receive { from, dst }, _) => transport.receive(from, dst),
                (Action::Compute(step, window), host) => {
                    memory.compute(step, window, host.as_deref())?;
                }
                (Action::Announce { piece, header }, Some(host)) => host.announce(piece, &header),
                (Action::Post, Some(host)) => host.post(),
                (Action::Watch(peer), Some(host)) => {
                    if !look(machine, host, peer)? {
                        break;
                    }
                }
                (Action::Done, _) => return Ok(Progress::Done),
                (Action::Wait, _) => break,
                (Action::Announce { .. } | Action::Post | Action::Watch(_), None) => {
                    unreachable!("shared memory is used only where there is some")
                }
            }
        }
        if transport.progress(machine, memory, now)? {
            return Ok(Progress::Moved);
        }
        if now >= machine.deadline() {
            // If this process was stopped, what came meanwhile has not been heard.
            transport.wait(now, now);
            if transport.progress(machine, memory, now)? {
                return Ok(Progress::Moved);
            }
        }
        if let Some(host) = host {
            // Neighbours that are not awaited may have called something else, and what they
            // posted before they left counts.
            for peer in machine.neighbours().collect::<Vec<_>>() {
                look(machine, host, peer)?;
            }
        }
        machine.on_stuck(now)?;
        Ok(Progress::Stuck)
    })
}

/// Looks how far a neighbour has come, and at what it announced. Whether the machine can go on.
fn look(machine: &mut Machine, host: &mut Host, peer: usize) -> Result<bool, Cause> {
    let posted = host.posted(peer);
    while let Some(piece) = machine.news(peer, posted) {
        let header = host.announcement(peer, piece)?;
        machine.on_announced(peer, piece, header)?;
        host.set_data_of(peer, header.payload);
    }
    Ok(machine.on_posted(peer, posted))
}
