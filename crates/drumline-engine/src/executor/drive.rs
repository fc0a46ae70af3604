//! The turns of one call: between its machine, its memory, the transport and the host.

use drumline_kernels::with_ieee_rounding;
use drumline_shm::Announcement;

use super::{
    flags::Seat,
    machine::{Action, Machine},
    memory::Memory,
    now::Now,
};
use crate::{error::Cause, host::Host, transport::Transport};

/// How far `drive` brought a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The call is complete.
    Done,
    /// Something moved. More may be possible at once.
    Moved,
    /// Nothing can be done before a peer or the clock moves.
    Stuck,
}

/// Whether a rank that lacks a neighbour's post spins for a short while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    /// It spins.
    Yes,
    /// It returns at once: a simulator runs all ranks in one thread.
    No,
}

/// Does everything that can be done at time `now` without blocking. With [`Spin::Yes`] it spins for posts that
/// neighbours are about to make. The cause is boxed so that the result of every turn fits into registers.
pub(crate) fn drive(
    machine: &mut Machine,
    transport: &mut dyn Transport,
    mut host: Option<&mut Host>,
    memory: &mut Memory<'_>,
    now: &Now,
    spin: Spin,
) -> Result<Progress, Box<Cause>> {
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

/// Looks for news from peers and at the deadline, once nothing else can be done.
#[inline(never)]
fn when_stuck(
    machine: &mut Machine,
    transport: &mut dyn Transport,
    host: Option<&mut Host>,
    memory: &mut Memory<'_>,
    now: &Now,
) -> Result<Progress, Box<Cause>> {
    if machine.is_new() {
        transport.begin(machine)?;
    }
    let now = now.get();
    if transport.progress(machine, memory, now)? {
        return Ok(Progress::Moved);
    }
    if now >= machine.deadline(now) {
        // This process may have been stopped. Hear what has arrived meanwhile before giving up.
        transport.wait(now, now);
        if transport.progress(machine, memory, now)? {
            return Ok(Progress::Moved);
        }
    }
    if let Some(host) = host {
        // Look at all neighbours. A neighbour that is not awaited may have made a different call. A neighbour
        // that has left may have posted before it left, and those posts count.
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

/// Looks for the awaited posts of one neighbour after another. Returns whether all are there.
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

/// Reads a neighbour's count of posts and compares its announcement. Returns the highest count seen so far:
/// the line that was just read may be older than a line read before.
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
