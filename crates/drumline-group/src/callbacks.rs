//! The thread on which [`Work::on_complete`](crate::Work::on_complete) calls: one per process, so
//! that a callback holds up no operation, whatever it does.

use std::sync::{
    OnceLock,
    mpsc::{Sender, channel},
};

use drumline_engine::panics::shielded;

use crate::{Error, Result};

pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// Where to send what is to be called.
///
/// # Errors
///
/// When the thread cannot be started.
pub(crate) fn get() -> Result<Sender<Callback>> {
    static CALLBACKS: OnceLock<Result<Sender<Callback>>> = OnceLock::new();
    CALLBACKS.get_or_init(start).clone()
}

fn start() -> Result<Sender<Callback>> {
    let (sender, callbacks) = channel::<Callback>();
    std::thread::Builder::new()
        .name("drumline-callbacks".to_owned())
        .spawn(move || callbacks.into_iter().for_each(shielded))
        .map_err(|source| Error::io("cannot start the thread of callbacks", source))?;
    Ok(sender)
}
