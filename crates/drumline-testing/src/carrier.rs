//! For the examples of `drumline::backend`: worlds whose collectives are a function, which sees
//! the calls of every rank. Nothing travels between ranks.

use std::{sync::Arc, time::Instant};

use drumline_group::{
    Cause, CollectiveError, Config, ProcessGroup,
    backend::{Backend, Request, register_backend},
};

/// What carries out a call.
type Collective = fn(&mut Request<'_>) -> Result<(), Cause>;

#[derive(Debug)]
struct Carrier(Collective);

impl Backend for Carrier {
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
        (self.0)(request)
    }

    fn abort(&self, _: &CollectiveError) {}

    fn shutdown(&self, _: Instant) -> Result<(), Cause> {
        Ok(())
    }
}

/// The groups of a world whose collectives are `collective`.
///
/// # Errors
///
/// The groups cannot be made.
pub fn carried_by(
    collective: Collective,
    world_size: usize,
) -> drumline_group::Result<Vec<ProcessGroup>> {
    register_backend("example", move |_| Ok(Arc::new(Carrier(collective))))?;
    let config = Config::default().backend("example");
    drumline_group::rendezvous::local_world_with(world_size, &config)
}
