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
mod task;
#[cfg(test)]
mod tests;

use drumline_kernels::with_ieee_rounding;

pub use flags::{Flags, Seat, Seats};
pub use history::History;
pub use layout::{Layout, Stretch};
pub use machine::{Action, Awaited, Machine, Notice};
pub use memory::{Buffers, Memory, Pool};
pub use message::{Description, Header, array};
pub use now::Now;
pub use plan::{Plan, Shape};

use drumline_shm::Announcement;

use crate::{error::Cause, host::Host, transport::Transport};

/// How far [`drive`] got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The collective is complete.
    Done,
    /// Something moved; there may be more.
    Moved,
    /// Nothing can be done before a peer or the clock moves.
    Stuck,
}

/// Whether a rank that lacks a neighbour's post looks for it again and again, for a short while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    Yes,
    No,
}

/// Does everything that can be done at time `now` without waiting, other than for what neighbours
/// in shared memory are about to post.
pub fn drive(
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
            match machine.poll() {
                Action::Send { to, part, src } => {
                    transport.send(to, machine.header(part, src), src);
                }
                Action::Receive { from, dst } => transport.receive(from, dst),
                Action::Compute(local, window) => {
                    memory.compute(machine.computation(local, window), host.as_deref())?;
                }
                Action::Announce => shared(&mut host).announce(&machine.notice()),
                Action::Post => shared(&mut host).post(),
                Action::Watch => {
                    if !meet(machine, shared(&mut host), spin)? {
                        break;
                    }
                }
                Action::Done => {
                    if let Some(host) = host {
                        host.prepare_next();
                    }
                    return Ok(Progress::Done);
                }
                Action::Wait => break,
            }
        }
        when_stuck(machine, transport, host, memory, now)
    })
}

/// Looks at everything else that may have happened, once nothing can be done.
#[inline(never)]
fn when_stuck(
    machine: &mut Machine,
    transport: &mut dyn Transport,
    host: Option<&mut Host>,
    memory: &mut dyn Memory,
    now: &Now,
) -> Result<Progress, Cause> {
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
        for seat in machine.neighbours() {
            look(machine, host, seat)?;
        }
    }
    machine.on_stuck(now)?;
    Ok(Progress::Stuck)
}

fn shared<'a>(host: &'a mut Option<&mut Host>) -> &'a mut Host {
    match host {
        Some(host) => host,
        None => unreachable!("shared memory is used only where there is some"),
    }
}

/// Looks at one neighbour after another for the posts that are awaited. Whether all are there.
fn meet(machine: &mut Machine, host: &mut Host, spin: Spin) -> Result<bool, Cause> {
    while let Some((seat, level)) = machine.missing(|seat, awaited| host.find(seat, awaited)) {
        if spin == Spin::Yes {
            host.spin(machine, seat, level);
        }
        if look(machine, host, seat)? < level {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Looks how far a neighbour has come, and at what it announced. Returns its count of posts, as far as
/// is known: a line that is not up to date may be the last that was looked at.
fn look(machine: &mut Machine, host: &mut Host, seat: Seat) -> Result<u64, Cause> {
    let (piece, to_compare) = machine.looks_at(seat);
    let posted = host.posted(seat, piece);
    let known = machine.on_posted(seat, posted);
    if to_compare.is_some_and(|base| posted > base) {
        let Announcement { digest, place } = host.announcement(seat, piece);
        if !machine.agrees(seat, piece, digest) {
            machine.on_announced(seat, piece, host.description(seat, piece)?)?;
        }
        host.set_place_of(seat, place);
    }
    Ok(known)
}
