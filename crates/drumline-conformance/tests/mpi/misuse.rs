//! What goes wrong is an error that names the culprit on every rank: no panic, no abort, and nothing hangs.

use std::{
    env,
    fs::write,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Cause, Config, Error, ErrorKind, ProcessGroup, ReduceOp, algorithms::SumOrder,
    init_process_group,
};
use drumline_conformance::under_mpi::Installed;

use super::launched::{Ended, finish, last_word};

/// Set in a rank: what goes wrong, and where ranks write what they have seen.
const CASE: &str = "DRUMLINE_TEST_MPI_CASE";
const NOTES: &str = "DRUMLINE_TEST_MPI_NOTES";

const RANKS: usize = 3;

/// The rank that does it.
const CULPRIT: usize = 1;

/// What a rank says that has seen what it should.
const WELL: &str = "well";

fn run(
    library: &Installed,
    other: &Installed,
    case: &str,
    options: &[&str],
) -> (Ended, Vec<String>) {
    let notes = tempfile::tempdir().unwrap();
    let mut command = library.mpiexec(RANKS, options, Path::new("sh"));
    command
        .args(["-c", "trap '' USR1; exec \"$0\" \"$@\""]) // Hydra sends it to the others
        .arg(env::current_exe().unwrap())
        .args(["--exact", "misuse::rank", "--nocapture"])
        .env("DRUMLINE_MPI_LIBRARY", &other.library)
        .envs([(CASE, Path::new(case)), (NOTES, notes.path())]);
    let ended = finish(command);
    let waits = library.is_open_mpi() && !options.is_empty();
    (ended, (0..RANKS).map(|rank| last_word(&notes.path().join(rank.to_string()), waits)).collect())
}

#[test]
fn every_rank_is_told_who_does_what() {
    for library in Installed::all() {
        for case in ["one process", "backends", "calls", "late", "abort", "panic"] {
            let (ended, notes) = run(&library, &library, case, library.spares_the_others());
            check(&library, case, &ended, &notes);
        }
    }
}

#[test]
fn programs_may_end_without_destroy() {
    for library in Installed::all() {
        for case in ["all return", "all return from a group of their own", "all drop"] {
            let (ended, notes) = run(&library, &library, case, &[]);
            let is_well = ended.status.success() && notes.iter().all(|note| note == WELL);
            assert!(is_well, "{library}, {case}: {notes:?}\n{ended}");
        }
    }
}

#[test]
fn a_rank_that_exits_early_is_named() {
    for library in Installed::all() {
        for case in ["exits", "exits from a group of their own", "returns"] {
            let (ended, notes) = run(&library, &library, case, library.spares_the_others());
            check(&library, case, &ended, &notes);
        }
    }
}

/// Ranks that have failed end without a word to MPI, and Hydra kills the others then. So it may kill some that have not
/// written what they have seen.
fn check(library: &Installed, case: &str, ended: &Ended, notes: &[String]) {
    for (rank, note) in notes.iter().enumerate() {
        let at = format!("{library}, {case}, rank {rank}");
        match note.as_str() {
            WELL => {}
            "" if !library.is_open_mpi() => {
                eprintln!("{at}: skipped, its launcher has killed it");
            }
            _ => panic!("{at}: {note}\n{ended}"),
        }
    }
}

#[test]
fn a_library_of_another_launcher_is_refused_by_name() {
    let all = Installed::all();
    for library in &all {
        for other in all.iter().filter(|other| other.is_open_mpi() != library.is_open_mpi()) {
            let (ended, _) = run(library, other, "misfit", &[]);
            let at = format!("{library} starts {other}\n{ended}");
            let told = ended.text.lines().filter(|line| {
                line.contains("MPICH") || line.contains("Hydra") || line.contains("Intel")
            });
            let is_told = told.filter(|line| line.contains("Open MPI")).count() >= 1;
            // Intel MPI's library of fabrics stands before the one that the other MPI needs.
            let not_loaded = ended.text.contains("no MPI was found");
            assert!(!ended.status.success() && (is_told || not_loaded), "{at}");
            assert!(!ended.text.contains("panicked"), "{at}");
        }
    }
}

#[test]
fn what_is_no_mpi_is_refused_by_name() {
    for (library, wanted) in
        [("/none", "/none"), ("libm.so.6", "libm.so.6 is not a library of MPI")]
    {
        let mut config = Config::default();
        config.mpi_library = Some(library.into());
        let error =
            drumline::rendezvous::local_world_with(2, &config.clone().backend("mpi")).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
        let error = init_process_group("mpi://", &config).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

#[test]
fn sums_of_the_backend_need_a_backend() {
    let mut config = Config::default();
    config.sum_order = SumOrder::Backend;
    let error = drumline::rendezvous::local_world_with(2, &config).unwrap_err().to_string();
    assert!(error.contains("backend"), "{error}");
}

#[test]
fn drumline_run_does_not_start_mpi() {
    let own = env::current_exe().unwrap();
    let drumline = own.ancestors().nth(2).unwrap().join("drumline");
    if !drumline.exists() {
        return eprintln!("skipped: {} is not there", drumline.display());
    }
    for library in Installed::all() {
        let notes = tempfile::tempdir().unwrap();
        let mut command = Command::new(&drumline);
        command.args(["run", "--nproc-per-node", "2", "--"]).arg(&own);
        command.args(["--exact", "misuse::rank", "--nocapture"]);
        library.settle(&mut command);
        command.envs([(CASE, Path::new("drumline run")), (NOTES, notes.path())]);
        let ended = finish(command);
        let is_told = ended.text.contains("`drumline run` and torchrun do not start MPI");
        assert!(is_told && !ended.text.contains("panicked"), "{library}: {ended}");
    }
}

/// One rank, if a test above has started it.
#[test]
fn rank() {
    let (Ok(case), Some(notes)) = (env::var(CASE), env::var_os(NOTES)) else { return };
    let notes = PathBuf::from(notes);
    let is_built_in = case.ends_with("of their own") || case == "backends";
    let config = Config::from_env().unwrap().timeout(Duration::from_secs(60));
    let config = config.backend(if is_built_in { "drumline" } else { "mpi" });
    let url = if case == "drumline run" { "env://" } else { "mpi://" };
    let group = match init_process_group(url, &config) {
        Ok(group) => group,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    };
    let own = notes.join(group.rank().to_string());
    let note = match see(&case, group, &config, &notes) {
        Ok(()) => WELL.to_owned(),
        Err(problem) => problem,
    };
    write(own, note).unwrap();
}

fn see(case: &str, group: ProcessGroup, config: &Config, notes: &Path) -> Result<(), String> {
    let rank = group.rank();
    let text = |error: Error| error.to_string();
    group.barrier().map_err(text)?;
    let sum = || group.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum);
    // Statics live until the process ends.
    let keep = |group: &ProcessGroup| std::mem::forget(group.clone());
    let is_culprit = rank == CULPRIT;
    match case {
        "all return" | "all return from a group of their own" => {
            keep(&group);
            return Ok(());
        }
        "all drop" => return Ok(()),
        "exits" | "exits from a group of their own" if is_culprit => {
            keep(&group);
            write(notes.join(rank.to_string()), WELL).unwrap();
            std::process::exit(3);
        }
        "returns" if is_culprit => return Ok(()),
        "abort" if is_culprit => {
            group.abort();
            return Ok(());
        }
        "panic" if is_culprit => {
            let group = group;
            let panic = move || {
                let _group = group;
                panic!("this rank panics");
            };
            assert!(thread::spawn(panic).join().is_err());
            return Ok(());
        }
        "late" if is_culprit => {
            let others = (0..RANKS).filter(|rank| *rank != CULPRIT);
            let others: Vec<_> = others.map(|rank| notes.join(rank.to_string())).collect();
            let until = Instant::now() + Duration::from_secs(60);
            while !others.iter().all(|note| note.exists()) && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            return Ok(());
        }
        _ => {}
    }
    let failed = match case {
        "one process" => {
            let error = drumline::rendezvous::local_world_with(2, &config.clone()).err();
            let told = error.map(|error| error.to_string()).unwrap_or_default();
            let is_told = told.contains("ranks 0 and 1 are one process");
            return if is_told { group.destroy().map_err(text) } else { Err(told) };
        }
        "backends" => {
            let other = if is_culprit { "mpi" } else { "drumline" };
            let config = config.clone().backend(other).timeout(Duration::from_secs(10));
            let options = drumline::GroupOptions::default().config(config);
            let error = group.new_group(&[0, 1, 2], &options).err();
            let told = error.map(|error| error.to_string()).unwrap_or_default();
            let names = told.contains("mpi") && told.contains("drumline");
            return if names { group.destroy().map_err(text) } else { Err(told) };
        }
        "calls" if is_culprit => group.broadcast(&mut [1.0_f32; 100], 0),
        "late" => {
            group.within(Duration::from_millis(300)).all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum)
        }
        _ => (0..).map(|_| sum()).find(Result::is_err).unwrap_or(Ok(())),
    };
    let Err(error) = failed else { return Err("no error".to_owned()) };
    let told = error.to_string();
    let cause = match error.kind() {
        ErrorKind::Collective => error.cause(),
        _ => None,
    };
    let Some(cause) = cause else { return Err(told) };
    let is_well = match (case, cause) {
        ("calls", Cause::Mismatch { .. }) => {
            told.contains("all_reduce") && told.contains("broadcast")
        }
        ("late", Cause::Timeout { waiting_for }) => waiting_for == &[CULPRIT],
        ("late", Cause::Reported { culprit, .. }) => *culprit == Some(CULPRIT),
        ("abort", Cause::Reported { by, .. }) => *by == CULPRIT,
        ("panic", Cause::PeerExited { peer }) => *peer == CULPRIT,
        ("exits from a group of their own", Cause::Reported { culprit, .. }) => {
            *culprit == Some(CULPRIT)
        }
        (_, Cause::PeerLeft { peer } | Cause::PeerExited { peer }) => *peer == CULPRIT,
        _ => false,
    };
    if is_well { Ok(()) } else { Err(told) }
}
