//! The thread on which [`Work::on_complete`](crate::Work::on_complete) calls: one per process, so
//! that a callback holds up no operation, whatever it does.

use std::sync::mpsc::{Sender, channel};

use drumline_engine::panics::shielded;
use drumline_shm::PerProcess;

use crate::{Error, Result};

pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// Where to send what is to be called. A forked process has a thread of its own.
///
/// # Errors
///
/// When the thread cannot be started.
pub(crate) fn get() -> Result<Sender<Callback>> {
    static CALLBACKS: PerProcess<Result<Sender<Callback>>> = PerProcess::new();
    CALLBACKS.get(start).clone()
}

fn start() -> Result<Sender<Callback>> {
    let (sender, callbacks) = channel::<Callback>();
    std::thread::Builder::new()
        .name("drumline-callbacks".to_owned())
        .spawn(move || callbacks.into_iter().for_each(shielded))
        .map_err(|source| Error::io("cannot start the thread of callbacks", source))?;
    Ok(sender)
}
