//! How a rank waits for MPI: it asks again and again, and looks at the guard in between.

use std::{
    thread,
    time::{Duration, Instant},
};

use drumline_engine::Cause;
use drumline_mpi::{Communicator, Making, Mpi, Request};

use crate::backend::Guard;

/// Waits for requests of MPI, as long as the other ranks live.
#[derive(Debug)]
pub(super) struct Waiting {
    mpi: &'static Mpi,
    guard: Guard,
}

/// How often a wait asks before it gives other ranks the core. MPI moves nothing while nobody asks, so it must not
/// sleep soon.
const SPINS: u32 = 200;

/// How often a wait asks between two looks at the guard and the clock.
const LOOK_EVERY: u32 = 16;

/// A wait of this length is for a late rank, not for data. From then on it sleeps between two questions.
const BUSY_MAX: Duration = Duration::from_millis(5);
const SLEEP: Duration = Duration::from_micros(50);

/// MPI may notice a dead rank before the guard does. So long the guard has to give its name.
const NAMED_WITHIN: Duration = Duration::from_millis(500);

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
        let mut began = None;
        for tries in 1_u32.. {
            match ask() {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => {}
                Err(error) => return Err(self.named(error)),
            }
            if tries.is_multiple_of(LOOK_EVERY) {
                self.guard.check()?;
                let now = Instant::now();
                if now >= deadline {
                    return Err(self.late());
                }
                if now.saturating_duration_since(*began.get_or_insert(now)) > BUSY_MAX {
                    thread::sleep(SLEEP);
                }
            }
            match tries {
                ..SPINS => std::hint::spin_loop(),
                _ => thread::yield_now(),
            }
        }
        Err(self.late())
    }

    /// Why MPI has failed, if the guard knows more than MPI does.
    pub(super) fn named(&self, error: drumline_mpi::Error) -> Cause {
        let until = Instant::now() + NAMED_WITHIN;
        while Instant::now() < until {
            if let Err(cause) = self.guard.check() {
                return cause;
            }
            thread::sleep(SLEEP);
        }
        Cause::Backend { problem: error.to_string() }
    }

    fn late(&self) -> Cause {
        match self.guard.late() {
            late if late.is_empty() => Cause::Backend {
                problem: "all ranks have made this call, and MPI has not ended it in time".to_owned(),
            },
            waiting_for => Cause::Timeout { waiting_for },
        }
    }
}
