//! A communicator that is being made.

use std::ffi::c_int;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;

use crate::abi::Level;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::mpi::Mpi;
use crate::table::{Bits, Calls};

/// A communicator that is being made, on a thread of its own: `MPI_Comm_create_group` waits until all ranks have called
/// it.
///
/// If MPI lets only one thread in at a time (`MPI_THREAD_SERIALIZED`), no other thread can use it until then.
#[derive(Debug)]
#[must_use = "the communicator comes from its poll"]
pub struct Making {
    state: State,
}

#[derive(Debug)]
enum State {
    Waiting(Receiver<Result<Communicator>>),
    Over(Result<Communicator>),
}

const FUNCTION: &str = "MPI_Comm_create_group";

impl Making {
    pub(crate) fn begin(mpi: &'static Mpi, ranks: &[usize], tag: u16) -> Result<Making> {
        let lets_threads_in = mpi.enter()?.level()? == Level::Multiple;
        let (tell, told) = channel();
        let ranks: Vec<c_int> = ranks.iter().map(|&rank| rank as c_int).collect(); // they are below the world's size
        let make = move || {
            let made = if lets_threads_in {
                make(mpi.beside(), &ranks, tag)
            } else {
                make(&*mpi.enter()?, &ranks, tag)
            };
            let (bits, rank, size) = made?;
            Ok(Communicator::new(mpi, bits, rank, size))
        };
        mpi.opened();
        let run = move || {
            let made = make();
            mpi.closed();
            let _ = tell.send(made); // nobody may wait any more
        };
        let thread = thread::Builder::new().name("drumline-mpi".to_owned()).spawn(run);
        thread.map_err(|error| {
            mpi.closed();
            Error::Thread { text: error.to_string() }
        })?;
        Ok(Making { state: State::Waiting(told) })
    }

    /// The communicator, when it is made.
    ///
    /// # Errors
    ///
    /// What MPI says.
    pub fn poll(&mut self) -> Result<Option<Communicator>> {
        if let State::Waiting(told) = &self.state {
            match told.try_recv() {
                Ok(made) => self.state = State::Over(made),
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => {
                    self.state = State::Over(Err(Error::Lost { function: FUNCTION }));
                }
            }
        }
        match &self.state {
            State::Waiting(_) => Ok(None),
            State::Over(made) => made.clone().map(Some),
        }
    }
}

fn make(calls: &dyn Calls, ranks: &[c_int], tag: u16) -> Result<(Bits, usize, usize)> {
    let made = calls.create_group(ranks, tag.into())?;
    calls.return_errors(made)?;
    let absurd =
        |value: c_int| Error::Absurd { function: FUNCTION, value: value.into(), wanted: "a rank" };
    let number = |value: c_int| usize::try_from(value).map_err(|_| absurd(value));
    Ok((made, number(calls.rank(made)?)?, number(calls.size(made)?)?))
}
