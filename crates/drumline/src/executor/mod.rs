//! Runs schedules.
//!
//! The [`Machine`] decides, the [`Memory`] holds the caller's buffers, a [`Transport`] moves
//! bytes between ranks and a [`Host`] is the memory that neighbours share; [`drive`] lets them
//! take turns and never blocks. Whoever has a clock and something to wait on (a blocking call,
//! the progress thread, a simulator) calls it again and again.

mod flags;
mod history;
mod layout;
mod local;
mod machine;
mod memory;
mod message;
mod now;
mod plan;
mod scratch;
#[cfg(test)]
mod tests;

use drumline_kernels::with_ieee_rounding;

pub(crate) use flags::Flags;
pub(crate) use history::History;
pub(crate) use layout::{Layout, Stretch};
pub(crate) use machine::{Action, Machine, Notice};
pub(crate) use memory::{Buffers, Memory, Pool};
pub use message::Operation;
pub(crate) use message::{Description, Header, array};
pub(crate) use now::Now;
pub(crate) use plan::{Plan, Shape};

use drumline_shm::Announcement;

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

/// Whether a rank that lacks a neighbour's post looks for it again and again, for a short while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spin {
    Yes,
    No,
}

/// Does everything that can be done at time `now` without waiting, other than for what neighbours
/// in shared memory are about to post.
pub(crate) fn drive(
    machine: &mut Machine,
    transport: &mut dyn Transport,
    mut host: Option<&mut Host>,
    memory: &mut dyn Memory,
    now: &Now,
    spin: Spin,
) -> Result<Progress, Cause> {
    with_ieee_rounding(|| {
        if machine.uses_messages() && machine.is_new() {
            transport.begin(machine)?;
        }
        loop {
            match (machine.poll(), &mut host) {
                (Action::Send { to, header, src }, _) => transport.send(to, header, src),
                (Action::Receive { from, dst }, _) => transport.receive(from, dst),
                (Action::Compute(step), host) => memory.compute(step, host.as_deref())?,
                (Action::Announce(notice), Some(host)) => host.announce(&notice),
                (Action::Post, Some(host)) => host.post(),
                (Action::Watch(peer), Some(host)) => {
                    let is_there = look(machine, host, peer)?
                        || (spin == Spin::Yes && host.spin(machine) && look(machine, host, peer)?);
                    if !is_there {
                        break;
                    }
                }
                (Action::Done, host) => {
                    if let Some(host) = host {
                        host.prepare_next();
                    }
                    return Ok(Progress::Done);
                }
                (Action::Wait, _) => break,
                (Action::Announce(_) | Action::Post | Action::Watch(_), None) => {
                    unreachable!("shared memory is used only where there is some")
                }
            }
        }
        if machine.is_new() {
            transport.begin(machine)?;
        }
        let now = now.get();
        if transport.progress(machine, memory, now)? {
            return Ok(Progress::Moved);
        }
        if now >= machine.deadline(now) {
            // If this process was stopped, what came meanwhile has not been heard.
            transport.wait(now, now);
            if transport.progress(machine, memory, now)? {
                return Ok(Progress::Moved);
            }
        }
        if let Some(host) = host {
            // Neighbours that are not awaited may have called something else, and what they
            // posted before they left counts.
            let mut index = 0;
            while let Some(peer) = machine.neighbour(index) {
                look(machine, host, peer)?;
                index += 1;
            }
        }
        machine.on_stuck(now)?;
        Ok(Progress::Stuck)
    })
}

/// Looks how far a neighbour has come, and at what it announced. Whether the machine can go on.
fn look(machine: &mut Machine, host: &mut Host, peer: usize) -> Result<bool, Cause> {
    loop {
        let (piece, to_compare) = machine.looks_at(peer);
        let posted = host.posted(peer, piece);
        if to_compare.is_none_or(|base| posted <= base) {
            return Ok(machine.on_posted(peer, posted));
        }
        let Announcement { digest, place } = host.announcement(peer, piece);
        if !machine.agrees(peer, piece, digest) {
            machine.on_announced(peer, piece, host.description(peer, piece)?)?;
        }
        host.set_data_of(peer, place);
        machine.on_posted(peer, posted);
    }
}
