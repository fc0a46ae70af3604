//! MPI, found at run time.
//!
//! Calls whatever MPI a machine has. To build a program, no MPI is needed; to run it, neither, until it asks for one. One
//! binary serves three [binary interfaces](Abi): that of the MPI standard, MPICH's, and Open MPI's.
//!
//! ```
//! use drumline_mpi::Mpi;
//!
//! match Mpi::load(None) {
//!     Ok(mpi) => println!("found {}", mpi.about()),
//!     Err(error) => println!("{error}"), // lists what was tried, and says what to install
//! }
//! ```
//!
//! Under `mpiexec`, ranks then meet:
//!
//! ```no_run
//! use drumline_mpi::{Communicator, Error, Mpi, Patience, Request};
//!
//! let world = Mpi::load(None)?.init()?;
//! let all: Vec<usize> = (0..world.size()).collect();
//! let mut making = world.communicator(&all, 1)?;
//! let mut patience = Patience::new();
//! let communicator = loop {
//!     match making.poll()? {
//!         Some(made) => break made,
//!         None => patience.pause(),
//!     }
//! };
//!
//! // Every rank gives a byte, and gets those of all.
//! let mut bytes = vec![0; world.size()];
//! bytes[world.rank()] = 1 + world.rank() as u8;
//! let blocks: Vec<_> = (0..world.size()).map(|rank| rank..rank + 1).collect();
//! let mut request = communicator.all_gather(bytes, &blocks)?;
//! patience.reset();
//! while !request.poll()? {
//!     patience.pause();
//! }
//! let (_, bytes) = request.finish();
//! println!("{bytes:?}");
//! # Ok::<(), drumline_mpi::Error>(())
//! ```
//!
//! # What it does for its callers
//!
//! - **Memory.** Buffers go in by value. They are MPI's until a call is over, and come back then. MPI cannot take back a
//!   collective, so a request that is dropped before its end leaks its buffers: no late write reaches memory that has
//!   another use. All lengths are checked.
//! - **Threads.** All threads may call. Calls of MPI are made under one lock, and none of them waits, except for
//!   [`Mpi::init`]. Communicators are made on threads of their own.
//! - **The end.** MPI is finalised when the process exits ([`Mpi::init`] says when not). Communicators are kept until
//!   then: to free one, all its ranks would have to come.
//! - **Bad starts.** A library under another library's launcher would abort the process, or see one rank alone. This is
//!   told [before MPI is called](Error::Misfit). So are a fork, a finalised MPI, and one that refuses threads.
//!
//! MPI says nothing when a rank dies: calls then stay under way for ever. Who waits must look after that.
//!
//! # Files
//!
//! `search` finds a library, `abi` has its constants, `table` its functions. `mpi` holds the lock,
//! `world` initialises and finalises, `making` and `communicator` and `request` are what callers hold.

mod abi;
mod communicator;
mod error;
mod launcher;
mod making;
mod mpi;
mod number;
mod patience;
mod request;
mod search;
mod table;
mod world;

pub use abi::{Abi, Level};
pub use communicator::{Communicator, Matched, TAG_MAX};
pub use error::{Error, Result};
pub use launcher::{Launcher, launcher};
pub use making::Making;
pub use mpi::{About, Mpi};
pub use number::{Number, Op};
pub use patience::Patience;
pub use request::Request;
pub use search::look_in;
pub use world::World;
