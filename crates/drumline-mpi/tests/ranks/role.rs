//! What a rank does: one function for each role.

mod calls;
mod ends;
mod groups;

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use drumline_mpi::{Communicator, Mpi, Patience, Request, Result, World};

/// Set in a rank: what it does.
pub(crate) const ROLE: &str = "DRUMLINE_TEST_MPI_ROLE";
/// The library that it loads.
pub(crate) const LIBRARY: &str = "DRUMLINE_TEST_MPI_LIBRARY";
/// What it says when all was right.
pub(crate) const WELL: &str = "this rank is well";

const GIVE_UP: Duration = Duration::from_secs(60);

/// One rank, if another test has started it.
#[test]
fn rank() {
    let Ok(role) = env::var(ROLE) else { return };
    let role = match role.as_str() {
        "calls" => calls::all,
        "groups" => groups::overlapping,
        "dropped" => ends::dropped,
        "fork" => ends::fork,
        "finalised" => ends::finalised,
        "others" => ends::initialised_by_others,
        "serialized" => ends::initialised_for_one_thread_at_a_time,
        "loaded" => ends::loaded_by_others,
        "funneled" => ends::initialised_for_one_thread,
        "hooks" => ends::hooks,
        "search" => ends::search,
        "misfit" => ends::misfit,
        other => panic!("no role {other}"),
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(role)) {
        mpi().forgo_finalize(); // the others may wait for this rank
        resume_unwind(panic);
    }
    println!("{WELL}");
}

fn mpi() -> &'static Mpi {
    let library = env::var_os(LIBRARY).map(PathBuf::from);
    Mpi::load(library.as_deref()).unwrap()
}

fn world() -> World {
    mpi().init().unwrap()
}

fn everybody() -> Communicator {
    let world = world();
    let all: Vec<usize> = (0..world.size()).collect();
    made(world, &all, 1)
}

fn made(world: World, ranks: &[usize], tag: u16) -> Communicator {
    let mut making = world.communicator(ranks, tag).unwrap();
    until(|| making.poll())
}

fn over(request: Result<Request>) -> (Vec<u8>, Vec<u8>) {
    let mut request = request.unwrap();
    until(|| request.poll().map(|over| over.then_some(())));
    request.finish()
}

fn until<T>(mut ask: impl FnMut() -> Result<Option<T>>) -> T {
    let (mut patience, since) = (Patience::new(), Instant::now());
    loop {
        if let Some(answer) = ask().unwrap() {
            return answer;
        }
        assert!(since.elapsed() < GIVE_UP, "it does not end");
        patience.pause();
    }
}
