//! One of three ranks is killed. The others hear which, keep their memory to themselves from then on, and end.
//!
//! Launchers kill the other ranks too unless they are told not to, and MPICH's does in part all the same. What it has
//! killed is left out.

use std::{
    env,
    fs::{read_to_string, write},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant, SystemTime},
};

use drumline::{Cause, Config, ErrorKind, ProcessGroup, ReduceOp, init_process_group};
use drumline_conformance::under_mpi::{Installed, VARIABLE};

use super::launched::{finish, last_word};

/// Set in a rank: when the death happens, and where ranks write what they have seen.
const MOMENT: &str = "DRUMLINE_TEST_MPI_DEATH";
const NOTES: &str = "DRUMLINE_TEST_MPI_NOTES";

const RANKS: usize = 3;
const VICTIM: usize = 1;

/// The victim kills itself so long after the first of many calls.
const AMID: Duration = Duration::from_millis(60);

/// How long memory is watched that calls have given back.
const WATCHED: Duration = Duration::from_millis(200);

const LEN: usize = 16 << 20; // 64 MiB of f32

const MOMENTS: [&str; 5] = ["before a call", "between calls", "all_reduce", "broadcast", "message"];

#[test]
fn the_dead_are_named_and_the_others_end() {
    let libraries = Installed::all();
    if libraries.is_empty() {
        eprintln!("skipped: {VARIABLE} names no MPI");
    }
    for library in libraries {
        for moment in MOMENTS {
            kill_one(&library, moment);
        }
    }
}

fn kill_one(library: &Installed, moment: &str) {
    let notes = tempfile::tempdir().unwrap();
    // Hydra sends SIGUSR1 to the others.
    let mut command = library.mpiexec(RANKS, library.spares_the_others(), Path::new("sh"));
    command
        .args(["-c", "trap '' USR1; exec \"$0\" \"$@\""])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "deaths::rank", "--nocapture"])
        .envs([(MOMENT, Path::new(moment)), (NOTES, notes.path())]);
    let ended = finish(command);
    for rank in (0..RANKS).filter(|rank| *rank != VICTIM) {
        let at = format!("{library}, {moment}, rank {rank}");
        let note = last_word(&notes.path().join(rank.to_string()), library.is_open_mpi());
        match note.as_str() {
            note if note.starts_with("told after ") => eprintln!("{at}: {note}"),
            "" if library.is_open_mpi() => panic!("{at} has told nothing\n{ended}"),
            "" => eprintln!("{at}: skipped, its launcher has killed it"),
            note => panic!("{at}: {note}\n{ended}"),
        }
    }
}

/// One rank, if the test above has started it.
#[test]
fn rank() {
    let (Ok(moment), Some(notes)) = (env::var(MOMENT), env::var_os(NOTES)) else { return };
    let notes = PathBuf::from(notes);
    let config = Config::from_env().unwrap().backend("mpi").timeout(Duration::from_secs(60));
    let group = init_process_group("mpi://", &config).unwrap();
    group.barrier().unwrap();
    let note = match live(&group, &moment, &notes) {
        Ok(told) => format!("told after {:.1} ms", told.as_secs_f64() * 1e3),
        Err(problem) => problem,
    };
    write(notes.join(group.rank().to_string()), note).unwrap();
}

/// Makes calls until the victim has died. Returns how long it took to hear that.
fn live(group: &ProcessGroup, moment: &str, notes: &Path) -> Result<Duration, String> {
    let killed = notes.join("killed");
    let dies_amid = !moment.contains("call");
    if group.rank() == VICTIM {
        let here = killed.clone();
        let die = move || {
            write(&here, since_epoch().as_nanos().to_string()).unwrap();
            let pid = std::process::id().to_string();
            Command::new("kill").args(["-9", &pid]).status().unwrap();
            thread::sleep(Duration::MAX);
        };
        if !dies_amid {
            die();
        }
        thread::spawn(move || {
            thread::sleep(AMID);
            die();
        });
    } else if moment == "between calls" {
        let until = Instant::now() + Duration::from_secs(60);
        while !killed.exists() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
    let mut data = vec![1.0_f32; if dies_amid { LEN } else { 1 }];
    let error = loop {
        let result = match (moment, group.rank()) {
            ("broadcast", _) => group.broadcast(&mut data, VICTIM),
            ("message", VICTIM) => group.send(&data, 0, 7).and_then(|()| group.send(&data, 2, 7)),
            ("message", _) => group.recv(&mut data, VICTIM, 7),
            _ => group.all_reduce(&mut data, ReduceOp::Max),
        };
        if let Err(error) = result {
            break error;
        }
    };
    let heard = since_epoch();
    let cause = Some(&Cause::PeerExited { peer: VICTIM });
    if (error.kind(), error.cause()) != (ErrorKind::Collective, cause) {
        return Err(format!("another cause: {error}"));
    }
    let digest = || data.iter().map(|it| u64::from(it.to_bits())).sum::<u64>();
    let before = digest();
    thread::sleep(WATCHED);
    if std::hint::black_box(digest()) != before {
        return Err("memory that was given back has changed".to_owned());
    }
    match group.barrier() {
        Err(error) if (error.kind(), error.cause()) == (ErrorKind::Poisoned, cause) => {}
        other => return Err(format!("the group is not poisoned: {other:?}")),
    }
    let killed: u64 = read_to_string(killed).unwrap().parse().unwrap();
    Ok(heard.saturating_sub(Duration::from_nanos(killed)))
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap()
}
