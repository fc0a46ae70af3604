//! Real ranks, under the launchers of the MPIs that `DRUMLINE_TEST_MPI` names: prefixes with `bin` and `lib`, and colons
//! between them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod job;
mod role;

use drumline_testing::installed::{Installed, VARIABLE};
use job::Ended;

/// Runs ranks that load this library.
fn run(library: &Installed, ranks: usize, role: &str) -> Ended {
    job::run(library, ranks, role, Some(&library.library))
}

/// Runs a test on each library of each MPI. All have their own launcher.
fn on_every_library(test: impl Fn(&Installed)) {
    let libraries = Installed::all();
    if libraries.is_empty() {
        eprintln!("skipped: {VARIABLE} names no MPI");
    }
    libraries.iter().for_each(test);
}

#[test]
fn every_call_gives_the_right_bytes() {
    on_every_library(|library| {
        for ranks in 1..=4 {
            run(library, ranks, "calls").ends_well(ranks);
        }
    });
}

#[test]
fn groups_that_overlap_are_made_at_the_same_time() {
    on_every_library(|library| {
        for ranks in [3, 4] {
            run(library, ranks, "groups").ends_well(ranks);
        }
    });
}

#[test]
fn a_request_that_is_dropped_keeps_its_buffers_and_the_process_ends() {
    // Open MPI's launcher calls a job without MPI_Finalize failed.
    on_every_library(|library| drop(run(library, 2, "dropped").says_well(2)));
}

#[test]
fn forks_and_a_finalised_mpi_are_refused() {
    on_every_library(|library| {
        run(library, 2, "fork").ends_well(2);
        run(library, 2, "finalised").ends_well(2);
    });
}

#[test]
fn an_mpi_that_others_initialised_is_used_and_left_to_them() {
    on_every_library(|library| {
        run(library, 2, "others").ends_well(2);
        run(library, 2, "serialized").ends_well(2);
        run(library, 1, "loaded").ends_well(1);
        run(library, 2, "funneled").ends_well(2);
    });
}

#[test]
fn hooks_run_before_the_end() {
    on_every_library(|library| {
        let Ended { text, .. } = run(library, 2, "hooks").ends_well(2);
        assert_eq!(text.matches("a hook still uses MPI").count(), 2, "{text}");
    });
}

#[test]
fn the_library_of_the_launcher_is_found_without_a_path() {
    on_every_library(|library| drop(job::run(library, 2, "search", None).ends_well(2)));
}

#[test]
fn a_launcher_that_does_not_fit_is_told_before_mpi_is_called() {
    let libraries = Installed::all();
    for launcher in &libraries {
        let others = libraries.iter().filter(|other| other.is_open_mpi() != launcher.is_open_mpi());
        for library in others {
            job::run(launcher, 2, "misfit", Some(&library.library)).ends_well(2);
        }
    }
}
