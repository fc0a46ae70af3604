//! How a rank waits for MPI: it asks again and again, and looks at the guard in between.

use std::time::Instant;

use drumline_engine::Cause;
use drumline_mpi::{Communicator, Making, Mpi, Patience, Request};

use crate::backend::Guard;

/// Waits for requests of MPI, as long as the other ranks live.
#[derive(Debug)]
pub(super) struct Waiting {
    mpi: &'static Mpi,
    guard: Guard,
}

/// How often a wait asks between two looks at the guard and the clock.
const LOOK_EVERY: u32 = 16;

impl Waiting {
    pub(super) fn new(mpi: &'static Mpi, guard: Guard) -> Waiting {
        Waiting { mpi, guard }
    }

    pub(super) fn mpi(&self) -> &'static Mpi {
        self.mpi
    }

    /// Waits until a request is over, and returns its buffers: what was sent, and what has come.
    pub(super) fn until_over(
        &self,
        mut request: Request,
        deadline: Instant,
    ) -> Result<(Vec<u8>, Vec<u8>), Cause> {
        self.until(deadline, || request.poll().map(|over| over.then_some(())))?;
        Ok(request.finish())
    }

    pub(super) fn until_made(
        &self,
        mut making: Making,
        deadline: Instant,
    ) -> Result<Communicator, Cause> {
        self.until(deadline, || making.poll())
    }

    /// Asks until there is an answer.
    ///
    /// # Errors
    ///
    /// What the guard says of the other ranks, and [`Cause::Timeout`] or [`Cause::Backend`] at the deadline.
    pub(super) fn until<T>(
        &self,
        deadline: Instant,
        mut ask: impl FnMut() -> Result<Option<T>, drumline_mpi::Error>,
    ) -> Result<T, Cause> {
        let mut patience = Patience::new();
        for tries in 1_u32.. {
            match ask() {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => {}
                Err(error) => return Err(failed(error)),
            }
            if tries.is_multiple_of(LOOK_EVERY) {
                self.guard.check()?;
                if Instant::now() >= deadline {
                    break;
                }
            }
            patience.pause();
        }
        Err(self.late())
    }

    fn late(&self) -> Cause {
        match self.guard.late() {
            late if late.is_empty() => Cause::Backend {
                problem: "all ranks have made this call, and MPI has not ended it in time"
                    .to_owned(),
            },
            waiting_for => Cause::Timeout { waiting_for },
        }
    }
}

/// What MPI says when it fails. If the guard knows more, the library says that instead.
pub(super) fn failed(error: drumline_mpi::Error) -> Cause {
    Cause::Backend { problem: error.to_string() }
}
