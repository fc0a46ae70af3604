//! The suite over MPI: real ranks, started by the MPIs that `DRUMLINE_TEST_MPI` names. One binary for all ABIs.

#![allow(clippy::unwrap_used, clippy::panic)]

mod deaths;
mod launched;
mod misuse;

use std::{env, process::Stdio, time::Duration};

use drumline::{Config, GroupOptions, ProcessGroup, init_process_group};
use drumline_conformance::{
    Extent, Program, World as _, run, same_bits,
    under_mpi::{Installed, OfProcess, VARIABLE},
};

/// Set in a rank.
const RANK: &str = "DRUMLINE_TEST_MPI_RANK";

const RANKS: usize = 4;

/// A rank that is in no small group waits until the others have been through the suite in those.
const TIMEOUT: Duration = Duration::from_secs(600);

#[test]
fn every_mpi_passes_the_suite_with_the_bits_of_shared_memory() {
    let libraries = Installed::all();
    if libraries.is_empty() {
        eprintln!("skipped: {VARIABLE} names no MPI");
    }
    for library in libraries {
        let mut command = library.mpiexec(RANKS, &[], &env::current_exe().unwrap());
        command.args(["--exact", "rank", "--nocapture"]).env(RANK, "1").stdin(Stdio::null());
        let output = command.output().unwrap();
        let text =
            [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
        let passed = text[0].matches("this rank has passed").count();
        let is_well = output.status.success() && passed == RANKS;
        assert!(is_well, "{library:?}: {}\n{}", output.status, text.join("\n"));
    }
}

/// One rank, if the test above has started it.
#[test]
fn rank() {
    if env::var_os(RANK).is_none() {
        return;
    }
    let config = Config::from_env().unwrap().timeout(TIMEOUT);
    let world = init_process_group("mpi://", &config).unwrap();
    assert_eq!(world.world_size(), RANKS);
    match all(&world, &config) {
        Ok(()) => println!("this rank has passed"),
        Err(problem) => panic!("{problem}"),
    }
    world.destroy().unwrap();
}

/// As for the tests of Python.
fn is_slow_wanted() -> bool {
    env::var_os("DRUMLINE_SLOW_TESTS").is_some_and(|it| it != "0")
}

fn all(world: &ProcessGroup, config: &Config) -> Result<(), String> {
    let on = |name: &str, backend: &str| {
        let config = config.clone().backend(backend);
        OfProcess::new(name, world.clone(), GroupOptions::default().config(config))
    };
    let mpi = on("mpi", "mpi");
    // Ranks under MPI never sleep while they wait. `make mpi` takes the time for the rest.
    let (world_sizes, programs): (&[usize], _) =
        if is_slow_wanted() { (&[2, 3, 4], 30) } else { (&[3], 10) };
    run(&mpi, world_sizes, Extent::Small)?;
    run(&mpi, &[3], Extent::Large)?;
    let drawn = (0..).map(Program::draw).filter(|program| program.world_size() <= RANKS);
    drawn.take(programs).try_for_each(|program| program.run(&mpi, false))?;
    for ranks in [2, 3, 4] {
        let digests = [&mpi, &on("drumline", "drumline")].map(|world| {
            let found = std::sync::Mutex::new(Vec::new());
            let all = |group: &ProcessGroup| {
                *found.lock().unwrap() = same_bits::digests_on(group)?;
                Ok(())
            };
            world.run(ranks, &all).map(|()| found.into_inner().unwrap())
        });
        let [over_mpi, over_shared_memory] = digests;
        if over_mpi? != over_shared_memory? {
            return Err(format!("{ranks} ranks: MPI gives other bits than shared memory"));
        }
    }
    Ok(())
}
