//! A call of MPI that has begun, and the memory that is MPI's until it is over.

use std::mem::{ManuallyDrop, take};

use crate::error::{Error, Result};
use crate::mpi::Mpi;
use crate::table::{Bits, Memory, Operation};

/// A call that has begun.
///
/// The buffers are MPI's until the call is over. MPI cannot take back a collective. So if a request is dropped before
/// that, its buffers are never freed, and MPI is not finalised at exit.
#[derive(Debug)]
#[must_use = "MPI moves nothing unless it is asked"]
pub struct Request {
    mpi: &'static Mpi,
    state: State,
    /// Dropped only when the call is over.
    memory: ManuallyDrop<Memory>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    UnderWay(Bits),
    Over,
    /// MPI may still use the memory.
    Lost,
}

impl Request {
    /// Begins a call. Counts and places were checked against the buffers.
    ///
    /// # Safety
    ///
    /// What `operation` and the layout say lies within the buffers of `memory`.
    pub(crate) unsafe fn begin(
        mpi: &'static Mpi,
        communicator: Bits,
        operation: Operation,
        memory: Memory,
    ) -> Result<Request> {
        let calls = mpi.enter()?;
        let mut memory = ManuallyDrop::new(memory);
        mpi.opened();
        // SAFETY: the memory is in a `ManuallyDrop`, and this type frees it or gives it back only when the call is over.
        // It moves with the request, but what its vectors own stays where it is. If MPI refuses the call, the memory is
        // not freed either: MPI does not say what it did before. The caller promises the rest.
        let begun = unsafe { calls.begin(communicator, operation, &mut memory) };
        Ok(Request { mpi, state: State::UnderWay(begun?), memory })
    }

    /// Whether the call is over. MPI moves data only while it is asked this, for any of its requests.
    ///
    /// # Errors
    ///
    /// What MPI says. The buffers are lost then.
    pub fn poll(&mut self) -> Result<bool> {
        let State::UnderWay(request) = &mut self.state else {
            return match self.state {
                State::Lost => Err(Error::Lost { function: "MPI_Test" }),
                _ => Ok(true),
            };
        };
        match self.mpi.enter()?.is_over(request) {
            Ok(false) => Ok(false),
            Ok(true) => {
                self.state = State::Over;
                self.mpi.closed();
                Ok(true)
            }
            Err(error) => {
                self.state = State::Lost;
                Err(error)
            }
        }
    }

    /// Gives the buffers back: what was sent, and what has come. Calls that work in place give their data as the second.
    /// Before [`Request::poll`] has said that the call is over, they are MPI's, and this gives two empty ones.
    pub fn finish(mut self) -> (Vec<u8>, Vec<u8>) {
        match self.state {
            State::Over => (take(&mut self.memory.send), take(&mut self.memory.receive)),
            State::UnderWay(_) | State::Lost => (Vec::new(), Vec::new()),
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.state == State::Over {
            // SAFETY: the call is over, so MPI does not use the memory any more. It is dropped here alone, and nothing
            // uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}
