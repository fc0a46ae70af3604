//! Each operation on the disk fails in turn, in each way, and the power is cut between any two operations.

mod disks;

use std::{
    fs,
    io::ErrorKind,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use rustix::process::{Signal, WaitOptions, kill_process, waitpid};

use self::disks::{Fault, Faulty, MemoryDisk};
use super::{
    Checkpoint, CheckpointDirectory, Tensor,
    disk::{Disk, SystemDisk},
};

/// Larger than a buffer, so that it is written in more than one go.
fn checkpoint(step: u64) -> Checkpoint {
    let mut checkpoint = Checkpoint::default();
    let values: Vec<i64> = (0..9_000).map(|i| i * step as i64).collect();
    checkpoint.insert(Tensor::from_values("values", [9_000], &values).unwrap());
    checkpoint
}

fn directory(path: &Path) -> CheckpointDirectory {
    CheckpointDirectory::new(path).keep(NonZeroUsize::new(2).unwrap())
}

/// The step of the newest checkpoint, whose content must be that of the step.
fn newest(directory: &CheckpointDirectory, disk: &impl Disk) -> u64 {
    let found = directory.newest_on(disk).unwrap().expect("no checkpoint is left");
    assert!(found.checkpoint == checkpoint(found.step), "another content than was saved");
    assert_eq!(found.skipped, [], "a file that is not whole has a whole one's name");
    found.step
}

/// Steps that were saved before, the step that is saved when the fault happens.
const SCENARIOS: [(&[u64], u64); 4] = [
    (&[], 1),
    (&[1, 2, 3], 4),
    (&[1, 2, 3], 3), // Again.
    (&[1, 2, 3], 1), // Training went on from an earlier step.
];

const FAULTS: [Fault; 6] = [
    Fault::Error(ErrorKind::PermissionDenied),
    Fault::Error(ErrorKind::Interrupted),
    Fault::DoneButError(ErrorKind::Other),
    Fault::FullFromNowOn,
    Fault::ShortWrite,
    Fault::Crash,
];

/// Saves on `disk` while the n-th operation fails, for every n, and lets `check` look at the disk.
fn fail_everywhere<D: Disk>(
    fault: Fault,
    (before, step): (&[u64], u64),
    mut new_disk: impl FnMut() -> (D, PathBuf),
    mut check: impl FnMut(&D, &CheckpointDirectory, bool),
) -> usize {
    for nth in 0.. {
        let (disk, path) = new_disk();
        let directory = directory(&path);
        directory.prepare_on(&disk).unwrap();
        before.iter().for_each(|&step| drop(directory.save_on(&disk, step, &checkpoint(step))));
        let disk = Faulty::new(disk, nth, fault);
        let saved = directory.save_on(&disk, step, &checkpoint(step)).is_ok();
        let reached = disk.was_reached();
        check(disk.inner(), &directory, saved);
        if !reached {
            assert!(saved, "it fails without a fault");
            return nth;
        }
    }
    unreachable!()
}

/// After a failed save the directory has the checkpoint from before or the new one, and the next save works.
fn check_after_failure(
    disk: &impl Disk,
    directory: &CheckpointDirectory,
    (before, step): (&[u64], u64),
    saved: bool,
) {
    let previous = before.iter().max();
    if saved || previous.is_some() || directory.newest_on(disk).unwrap().is_some() {
        let newest = newest(directory, disk);
        assert!(newest == step || !saved && Some(&newest) == previous, "{newest} is the newest");
    }
    directory.save_on(disk, 5, &checkpoint(5)).unwrap();
    assert_eq!(newest(directory, disk), 5);
    let names = disk.names(directory.path()).unwrap();
    let is_partial = |name: &&std::ffi::OsString| name.as_encoded_bytes().ends_with(b".partial");
    assert_eq!(names.iter().find(is_partial), None, "a leftover is there");
    assert!(directory.steps_on(disk).unwrap().len() <= 2, "too many are kept");
}

#[test]
fn any_operation_may_fail_in_any_way() {
    let mut failed = 0;
    for scenario in SCENARIOS {
        for fault in FAULTS {
            let operations = fail_everywhere(
                fault,
                scenario,
                || (MemoryDisk::default(), "checkpoints".into()),
                |disk, directory, saved| {
                    failed += usize::from(!saved);
                    disk.close_all();
                    check_after_failure(disk, directory, scenario, saved);
                },
            );
            assert!(operations >= 8, "only {operations} operations");
        }
    }
    assert!(failed > 50, "hardly anything failed: {failed}");
}

/// The same on the real file system, less often because it is slow.
#[test]
fn any_operation_may_fail_on_a_real_disk() {
    for fault in [Fault::Crash, Fault::DoneButError(ErrorKind::Other)] {
        let mut temporary = tempfile::tempdir().unwrap();
        let scenario = SCENARIOS[1];
        fail_everywhere(
            fault,
            scenario,
            || {
                temporary = tempfile::tempdir().unwrap();
                (SystemDisk, temporary.path().to_owned())
            },
            |disk, directory, saved| check_after_failure(disk, directory, scenario, saved),
        );
    }
}

/// Data that was not synced may or may not survive; names and contents do so independently.
#[test]
fn the_power_may_be_cut_at_any_moment() {
    let mut cuts = 0;
    for scenario in SCENARIOS {
        fail_everywhere(
            Fault::Crash,
            scenario,
            || (MemoryDisk::default(), "checkpoints".into()),
            |disk, directory, saved| {
                for survivor in disk.power_cuts() {
                    check_after_failure(&survivor, directory, scenario, saved);
                    cuts += 1;
                }
            },
        );
    }
    assert!(cuts > 200, "only {cuts} power cuts");
}

#[test]
fn a_full_disk_is_named_and_leaves_nothing() {
    let disk = MemoryDisk::default();
    let directory = directory(Path::new("checkpoints"));
    directory.prepare_on(&disk).unwrap();
    let full = Faulty::new(disk, 2, Fault::FullFromNowOn);
    let error = directory.save_on(&full, 1, &checkpoint(1)).unwrap_err().to_string();
    assert!(error.contains("step-00000001.safetensors: cannot be written"), "{error}");
    assert!(error.contains("free some space there, or keep fewer checkpoints"), "{error}");
    assert_eq!(full.inner().names(directory.path()).unwrap().len(), 0);
}

/// Two processes that save in one directory: a file that the other one is writing is no leftover.
#[test]
fn only_what_nobody_writes_is_a_leftover() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = directory(temporary.path());
    let partial = |name: &str| temporary.path().join(format!(".step-00000007.{name}.partial"));
    fs::write(partial("dead"), "left").unwrap();
    fs::write(temporary.path().join(".step-notes"), "mine").unwrap();
    let living = SystemDisk.create(&partial("living")).unwrap();

    directory.save(8, &checkpoint(8)).unwrap();
    assert!(!partial("dead").exists());
    assert!(partial("living").exists());
    assert!(temporary.path().join(".step-notes").exists());

    drop(living); // As at the end of the process.
    directory.prepare().unwrap();
    assert!(!partial("living").exists());
    drop(directory);
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 2);
}

/// Another process than this one, for the lock: it opens the file by itself.
fn lock_of_another(directory: &Path) -> fs::File {
    let path = directory.join(".lock");
    let file = fs::File::options().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.unwrap();
    file.try_lock().unwrap();
    file
}

#[test]
fn two_jobs_do_not_save_in_one_directory() {
    let temporary = tempfile::tempdir().unwrap();
    let ours = directory(temporary.path());
    ours.save(1, &checkpoint(1)).unwrap();
    let text = fs::read_to_string(temporary.path().join(".lock")).unwrap();
    assert!(text.starts_with(&format!("process {} on ", std::process::id())), "{text}");
    // All of this process is one job: also a clone, and an object that was made anew.
    directory(temporary.path()).save(2, &checkpoint(2)).unwrap();
    ours.clone().save(3, &checkpoint(3)).unwrap();
    drop(ours);
    assert!(!temporary.path().join(".lock").exists());

    let other = lock_of_another(temporary.path());
    fs::write(temporary.path().join(".lock"), "process 4711 on node7\n").unwrap();
    let ours = directory(temporary.path());
    for refused in [ours.prepare(), ours.save(4, &checkpoint(4)).map(drop)] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("another job saves here (process 4711 on node7)"), "{error}");
    }
    assert_eq!(newest(&ours, &SystemDisk), 3, "reading needs no lock");
    drop(other); // As at the end of the process: the file stays.
    ours.prepare().unwrap();

    // Somebody has deleted the directory, and another job has made it anew.
    fs::remove_dir_all(temporary.path()).unwrap();
    fs::create_dir(temporary.path()).unwrap();
    let _other = lock_of_another(temporary.path());
    let error = ours.save(5, &checkpoint(5)).unwrap_err().to_string();
    assert!(error.contains("another job saves here (another process)"), "{error}");
}

/// A worker that loads data is forked, and lives on when the rank is killed.
#[test]
fn a_forked_process_does_not_keep_the_lock() {
    let temporary = tempfile::tempdir().unwrap();
    let ours = directory(temporary.path());
    ours.prepare().unwrap();
    let file = fs::File::open(temporary.path().join(".lock")).unwrap();
    assert!(file.try_lock().is_err());
    let child = drumline_shm::fork_idle(60).unwrap();
    drop(ours);
    file.lock().unwrap(); // The child closes its copy when it first runs.
    let ended = waitpid(Some(child), WaitOptions::NOHANG).unwrap();
    assert!(ended.is_none(), "the child's end has released the lock");
    kill_process(child, Signal::KILL).unwrap();
    waitpid(Some(child), WaitOptions::empty()).unwrap();
}
