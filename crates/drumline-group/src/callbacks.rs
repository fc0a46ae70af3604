//! The thread on which [`Work::on_complete`](crate::Work::on_complete) calls callbacks, and the one that calls wakers of
//! calls that the progress thread has ended. Each process has one of each. So slow foreign code holds up no collective.

use std::sync::mpsc::{Sender, channel};

use drumline_engine::panics::shielded;
use drumline_shm::{PerProcess, named};

use crate::{Error, Result};

pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// The way to the thread of callbacks. A forked process starts a thread of its own.
///
/// # Errors
///
/// The thread cannot be started.
pub(crate) fn get() -> Result<Sender<Callback>> {
    static CALLBACKS: PerProcess<Result<Sender<Callback>>> = PerProcess::new();
    CALLBACKS.get(|| start("drumline-callbacks")).clone()
}

/// The way to the thread of wakers. A slow callback must not hold them up.
///
/// # Errors
///
/// As for [`get`].
pub(crate) fn of_wakers() -> Result<Sender<Callback>> {
    static WAKERS: PerProcess<Result<Sender<Callback>>> = PerProcess::new();
    WAKERS.get(|| start("drumline-wakers")).clone()
}

fn start(name: &str) -> Result<Sender<Callback>> {
    let (sender, callbacks) = channel::<Callback>();
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || callbacks.into_iter().for_each(shielded))
        .map_err(named("clone3"))
        .map_err(|source| Error::io("cannot start the thread of callbacks", source))?;
    Ok(sender)
}
