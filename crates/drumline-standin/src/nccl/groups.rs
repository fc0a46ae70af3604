//! Calls between ncclGroupStart and ncclGroupEnd, and how calls are launched.

use std::cell::RefCell;
use std::ffi::c_int;

use super::communicator::{self, Shared, lock};
use super::exchange::{Exchange, Part};
use super::kinds::{Fault, IN_PROGRESS, SUCCESS};
use crate::work::Action;
use crate::world::{World, until, world};

/// What a thread has called since it began a group.
#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<Call>,
    /// Communicators that come to be.
    making: Vec<Making>,
    fault: Option<Fault>,
}

pub(crate) struct Call {
    pub(crate) communicator: Shared,
    /// The stream's handle, which the driver knows.
    pub(crate) stream: usize,
    pub(crate) part: Part,
}

/// A communicator that comes to be, and where the program has its handle.
pub(crate) struct Making {
    pub(crate) handle: usize,
    pub(crate) made: Shared,
    pub(crate) give: crate::out::Out<usize>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Launches all, if this ends the outermost group.
pub(crate) fn end() -> Result<c_int, Fault> {
    let group = GROUP.with_borrow_mut(|group| {
        group.depth = group
            .depth
            .checked_sub(1)
            .ok_or_else(|| Fault::usage("ncclGroupEnd without ncclGroupStart"))?;
        Ok::<_, Fault>(if group.depth == 0 { std::mem::take(group) } else { Group::default() })
    })?;
    if let Some(fault) = group.fault {
        group.making.iter().for_each(drop_made);
        return Err(fault);
    }
    let mut state = SUCCESS;
    if wait_for(&group.making)? == IN_PROGRESS {
        state = IN_PROGRESS;
    }
    if launch(&mut world(), group.calls)? == IN_PROGRESS {
        state = IN_PROGRESS;
    }
    Ok(state)
}

/// The group fails if one of its calls does.
pub(crate) fn note(fault: &Fault) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.fault.get_or_insert_with(|| fault.clone());
        }
    });
}

pub(crate) fn call(world: &mut World, call: Call) -> Result<c_int, Fault> {
    let alone = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(call);
        }
        group.calls.push(call);
        None
    });
    alone.map_or(Ok(SUCCESS), |call| launch(world, vec![call]))
}

/// A communicator is there at once if it is not blocking, at the end of the group if there is one, and otherwise when
/// all ranks have come.
pub(crate) fn make(making: Making) -> Result<c_int, Fault> {
    communicator::insert(making.handle, making.made.clone());
    making.give.set(making.handle)?;
    let alone = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(making);
        }
        group.making.push(making);
        None
    });
    alone.map_or(Ok(SUCCESS), |making| wait_for(&[making]))
}

fn wait_for(making: &[Making]) -> Result<c_int, Fault> {
    let blocking: Vec<&Making> = making.iter().filter(|it| lock(&it.made).blocking).collect();
    let mut fault = None;
    let waited = until(|world| {
        let mut all = true;
        for it in &blocking {
            let state = lock(&it.made).poll(world);
            match state {
                IN_PROGRESS => all = false,
                SUCCESS => {}
                code => {
                    fault = Some(lock(&it.made).fault().unwrap_or_else(|| Fault::of_state(code)));
                }
            }
        }
        Ok(all || fault.is_some())
    });
    if waited.is_err() {
        fault = Some(Fault::system("the other ranks of a communicator do not come"));
    }
    match fault {
        Some(fault) => {
            blocking.into_iter().for_each(drop_made);
            Err(fault)
        }
        None if blocking.len() < making.len() => Ok(IN_PROGRESS),
        None => Ok(SUCCESS),
    }
}

fn drop_made(making: &Making) {
    lock(&making.made).abort();
    communicator::remove(making.handle);
    // The program gave this place when it made the communicator, and still owns it.
    let _ = making.give.set(0);
}

/// Queues calls: those on one communicator and one stream as one operation, in the order of the first of each.
fn launch(world: &mut World, calls: Vec<Call>) -> Result<c_int, Fault> {
    let mut together: Vec<(Shared, usize, Vec<Part>)> = Vec::new();
    for Call { communicator, stream, mut part } in calls {
        part.count(&mut lock(&communicator));
        let same = |it: &&mut (Shared, usize, Vec<Part>)| {
            std::sync::Arc::ptr_eq(&it.0, &communicator) && it.1 == stream
        };
        match together.iter_mut().find(same) {
            Some((.., parts)) => parts.push(part),
            None => together.push((communicator, stream, vec![part])),
        }
    }
    let mut state = SUCCESS;
    for (communicator, stream, parts) in together {
        let exchange = Exchange::new(communicator.clone(), parts);
        // Operations of a communicator run in the order of their calls, whatever their streams.
        let before = lock(&communicator).last;
        let op = world.queue(stream, &[before], Action::Foreign(Box::new(exchange)))?;
        let mut communicator = lock(&communicator);
        communicator.last = op;
        if communicator.hesitate(world.work.random()) {
            state = IN_PROGRESS;
        }
    }
    Ok(state)
}
