//! The program as a job: real processes under `drumline run`, and what goes wrong with them.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use drumline_testing::installed::{Installed, VARIABLE};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fashion-mnist");

/// Three steps of two ranks: enough to compare bits.
const FEW_IMAGES: &str = "--hidden 16 --limit 48 --batch-size 8";

/// The launcher, which lies beside the program: testing the whole workspace builds both.
fn launcher() -> PathBuf {
    let launcher = Path::new(PROGRAM).with_file_name("drumline");
    assert!(launcher.exists(), "build it first: cargo build -p drumline-cli");
    launcher
}

/// `drumline run` of the program on `ranks`, in `directory`, with the built-in digits.
fn job(directory: &TempDir, ranks: usize, arguments: &str) -> Command {
    let mut command = Command::new(launcher());
    command
        .current_dir(directory)
        .env_clear()
        .args(["run", "--nproc-per-node", &ranks.to_string(), PROGRAM])
        .args(arguments.split_whitespace());
    command
}

/// The same, but a shell works out the arguments on each rank, and the ranks do not listen when
/// the launcher ends them: each says what it has to say, however slow the machine is.
fn patient_job(directory: &TempDir, ranks: usize, arguments: &str) -> Command {
    let mut command = Command::new(launcher());
    command
        .current_dir(directory)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .args(["run", "--kill-after", "60s", "--nproc-per-node", &ranks.to_string()])
        .args(["sh", "-c", &format!("trap '' TERM; exec '{PROGRAM}' {arguments}")]);
    command
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

fn succeeds(directory: &TempDir, ranks: usize, arguments: &str) -> String {
    let output = job(directory, ranks, arguments).output().unwrap();
    assert!(output.status.success(), "{arguments}: {}", stderr(&output));
    stdout(&output).to_owned()
}

/// The error that each rank printed, in order of rank. The job must have failed with code 1.
fn fails_on_every_rank(mut command: Command, ranks: usize) -> Vec<String> {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}{}", stdout(&output), stderr(&output));
    let errors = (0..ranks).map(|rank| {
        let start = format!("[{rank}] Error: rank {rank}: ");
        let found = stderr(&output).lines().find_map(|line| line.strip_prefix(&start));
        found.unwrap_or_else(|| panic!("rank {rank} is silent: {}", stderr(&output))).to_owned()
    });
    errors.collect()
}

/// The digest of all parameters after the last epoch; the program compares it between ranks.
fn last_digest(stdout: &str) -> String {
    let (_, after) = stdout.rsplit_once("parameters ").expect("no digest");
    after.split_whitespace().next().unwrap().to_owned()
}

fn files_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn two_ranks_learn_together() {
    let directory = tempfile::tempdir().unwrap();
    let output = succeeds(&directory, 2, "--limit 750 --batch-size 32 --out out");
    assert!(output.contains("2 ranks x 32 images per step"), "{output}");
    let accuracy = output.rsplit_once("test accuracy ").unwrap().1.split(' ').next().unwrap();
    assert!(accuracy.parse::<f64>().unwrap() > 80.0, "{output}");
    assert!(output.lines().all(|line| line.starts_with("[0] ")), "only rank 0 reports: {output}");
    let out = directory.path().join("out");
    assert_eq!(
        files_in(&out),
        ["step-00000024.safetensors", "step-00000036.safetensors", "training.svg"]
    );
    assert!(output.contains(" % exposed"), "{output}");
}

#[test]
fn algorithms_and_bucket_sizes_change_no_bit() {
    let directory = tempfile::tempdir().unwrap();
    let digest = |ranks: usize, options: &str| {
        let arguments = format!("{FEW_IMAGES} --epochs 1 --out out {options}");
        last_digest(&succeeds(&directory, ranks, &arguments))
    };
    let direct = "--algorithm direct --bucket-mib 1";
    let doubling = "--algorithm doubling --bucket-mib 5";
    let binomial = "--algorithm binomial --bucket-mib 25";
    for (ranks, all_options) in [(2, &[direct, doubling, binomial][..]), (3, &[direct, binomial])] {
        let reference = digest(ranks, "");
        for options in all_options {
            assert_eq!(digest(ranks, options), reference, "{ranks} ranks, {options}");
        }
        assert_ne!(digest(ranks, "--seed 1"), reference, "the digest shows nothing");
    }
}

#[test]
fn with_shards_any_number_of_ranks_gives_the_same_bits_and_goes_on_from_any_other() {
    let directory = tempfile::tempdir().unwrap();
    // Three steps, the last one with 1 image of each shard.
    let run = |ranks: usize, arguments: &str| {
        let arguments =
            format!("--hidden 16 --shards 8 --limit 40 --batch-size 2 --out out{arguments}");
        last_digest(&succeeds(&directory, ranks, &arguments))
    };
    // In the middle of the second epoch.
    const MIDDLE: &str = "step-00000004.safetensors";
    let alone = run(1, "1 --epochs 2 --checkpoint-every 2 --keep 9");
    let saved = |ranks| fs::read(directory.path().join(format!("out{ranks}/{MIDDLE}"))).unwrap();
    for ranks in [2, 3, 4, 8] {
        let digest = run(ranks, &format!("{ranks} --epochs 2 --checkpoint-every 2 --keep 9"));
        assert_eq!(digest, alone, "{ranks} ranks");
        assert!(saved(ranks) == saved(1), "{ranks} ranks save another checkpoint");
    }
    assert_eq!(run(3, &format!("3 --epochs 2 --resume out1/{MIDDLE}")), alone);
    assert_ne!(run(1, "1 --epochs 2 --seed 1"), alone, "the digest shows nothing");
}

/// Started by MPI's launcher, over MPI; and over drumline by `drumline env`.
#[test]
fn mpi_changes_no_bit() {
    let libraries = Installed::all();
    if libraries.is_empty() {
        eprintln!("skipped: {VARIABLE} names no MPI");
    }
    let directory = tempfile::tempdir().unwrap();
    let arguments = format!("{FEW_IMAGES} --epochs 1 --out out");
    let reference = last_digest(&succeeds(&directory, 2, &arguments));
    for library in libraries {
        let over_mpi = library.mpiexec(2, &[], PROGRAM.as_ref());
        let by_env = library.mpiexec(2, &[], &launcher());
        for (mut command, before, after) in
            [(over_mpi, &[][..], &["--init", "mpi://"][..]), (by_env, &["env", "--", PROGRAM], &[])]
        {
            command.args(before).args(arguments.split_whitespace()).args(after);
            let output = command.current_dir(&directory).stdin(Stdio::null()).output().unwrap();
            assert!(output.status.success(), "{library}: {}", stderr(&output));
            assert_eq!(last_digest(stdout(&output)), reference, "{library}, {after:?}");
        }
    }
}

#[test]
fn a_job_that_is_resumed_ends_with_the_same_bits() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint =
        |out: &str| fs::read(directory.path().join(out).join("step-00000006.safetensors")).unwrap();
    succeeds(&directory, 2, &format!("{FEW_IMAGES} --epochs 2 --out whole"));
    succeeds(&directory, 2, &format!("{FEW_IMAGES} --epochs 1 --out parts"));
    succeeds(&directory, 2, &format!("{FEW_IMAGES} --epochs 2 --out parts --resume"));
    assert!(checkpoint("parts") == checkpoint("whole"), "the bits differ");
}

#[test]
fn ranks_meet_without_a_launcher() {
    let directory = tempfile::tempdir().unwrap();
    // The test cannot pass on a bound port, and a port that was free may be taken again. But all of 127/8
    // is this machine, and no other program uses this address.
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = format!("127.{high}.{low}.254");
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let url = format!("tcp://{host}:29500?rank={rank}&world_size=2");
            Command::new(PROGRAM)
                .current_dir(&directory)
                .env_clear()
                .args([
                    "--hidden", "16", "--limit", "64", "--epochs", "1", "--out", "out", "--init",
                    &url,
                ])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for rank in ranks {
        let output = rank.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

/// The process id of a rank of the job that writes to `directory`.
fn rank_in(directory: &Path, rank: usize) -> Option<u32> {
    let wanted = format!("RANK={rank}");
    processes_in(directory).into_iter().find(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    })
}

/// Every process whose working directory is `directory`.
fn processes_in(directory: &Path) -> Vec<u32> {
    let directory = directory.canonicalize().unwrap();
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let pid: u32 = name.parse().ok()?;
        let its = fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
        (its == directory).then_some(pid)
    });
    processes.collect()
}

#[test]
fn a_rank_that_is_killed_is_named_and_nothing_is_left() {
    for victim in [0, 1, 2] {
        let directory = tempfile::tempdir().unwrap();
        let mut job = patient_job(
            &directory,
            3,
            "--hidden 16 --limit 60 --batch-size 10 --epochs 100000 --out out",
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
        let mut lines = BufReader::new(job.stdout.take().unwrap()).lines();
        let trained = lines.by_ref().find(|line| line.as_ref().unwrap().contains("epoch 2/"));
        assert!(trained.is_some(), "the job ended before it was killed");

        let pid = rank_in(directory.path(), victim).unwrap();
        kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
        let reader = thread::spawn(move || lines.count());
        let output = job.wait_with_output().unwrap();
        reader.join().unwrap();

        assert_eq!(output.status.code(), Some(128 + 9));
        let report = stderr(&output);
        let first = report.lines().find(|line| line.starts_with("drumline: ")).unwrap();
        assert!(first.contains(&format!("rank {victim} (pid {pid}) was killed")), "{report}");
        assert!(first.contains("SIGKILL"), "{report}");
        let named = format!("the process of rank {victim} has ended");
        for survivor in (0..3).filter(|rank| *rank != victim) {
            let start = format!("[{survivor}] Error: ");
            let told = report.lines().find(|line| line.starts_with(&start)).unwrap_or_default();
            assert!(told.contains(&named), "rank {survivor} does not name rank {victim}: {report}");
        }

        let left = processes_in(directory.path());
        assert!(left.is_empty(), "processes are left: {left:?}");
        let saved = files_in(&directory.path().join("out"));
        assert!(saved.iter().any(|name| name.ends_with(".safetensors")), "{saved:?}");
        assert_eq!(files_in(directory.path()), ["out"]);
    }
}

#[test]
fn a_broken_checkpoint_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    succeeds(&directory, 2, "--hidden 16 --limit 128 --epochs 1 --out out");
    let path = directory.path().join("out/step-00000001.safetensors");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let before = files_in(&directory.path().join("out"));

    let resume =
        patient_job(&directory, 2, "--hidden 16 --limit 128 --epochs 2 --out out --resume");
    for error in fails_on_every_rank(resume, 2) {
        assert!(error.contains("holds no whole checkpoint"), "{error}");
        assert!(error.contains("step-00000001.safetensors: it is cut short"), "{error}");
    }
    assert_eq!(files_in(&directory.path().join("out")), before);
    assert_eq!(fs::read(&path).unwrap().len(), whole.len() / 2, "the file was touched");

    fs::remove_file(&path).unwrap();
    let resume = patient_job(&directory, 2, "--hidden 16 --limit 128 --out out --resume");
    for error in fails_on_every_rank(resume, 2) {
        assert!(error.contains("out: holds no checkpoint; check the path"), "{error}");
    }
}

#[test]
fn a_directory_that_cannot_be_written_is_an_error_before_training() {
    let directory = tempfile::tempdir().unwrap();
    for error in fails_on_every_rank(patient_job(&directory, 2, "--out /proc/self"), 2) {
        assert!(error.contains("/proc/self: "), "{error}");
        assert!(error.contains("no file can be written in this directory"), "{error}");
    }
}

#[test]
fn a_data_set_that_is_cut_short_is_an_error_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    fs::create_dir(&data).unwrap();
    // The beginning of a well-formed file: the header promises 60,000 images.
    let gzip = |name: &str, header: &[u32], body: usize| {
        use flate2::{Compression, write::GzEncoder};
        use std::io::Write;
        let mut file =
            GzEncoder::new(fs::File::create(data.join(name)).unwrap(), Compression::fast());
        header.iter().for_each(|word| file.write_all(&word.to_be_bytes()).unwrap());
        file.write_all(&vec![7; body]).unwrap();
        file.finish().unwrap();
    };
    gzip("train-images-idx3-ubyte.gz", &[0x803, 60_000, 28, 28], 1000);
    gzip("train-labels-idx1-ubyte.gz", &[0x801, 60_000], 60_000);
    gzip("t10k-images-idx3-ubyte.gz", &[0x803, 10_000, 28, 28], 7_840_000);
    gzip("t10k-labels-idx1-ubyte.gz", &[0x801, 10_000], 10_000);

    for error in fails_on_every_rank(patient_job(&directory, 2, "--data data --out out"), 2) {
        assert!(error.contains("train-images-idx3-ubyte.gz"), "{error}");
        assert!(error.contains("expected 47040000 bytes of elements, found 1000"), "{error}");
    }
    assert_eq!(files_in(directory.path()), ["data"]);
}

#[test]
fn ranks_that_differ_are_told_how() {
    let directory = tempfile::tempdir().unwrap();
    let differ = |arguments: &str| {
        let arguments = format!("--limit 320 --epochs 1 --out out {arguments}");
        fails_on_every_rank(patient_job(&directory, 2, &arguments), 2)
    };
    for error in differ("--hidden $((128 + RANK))") {
        assert!(error.contains("rank 1") && error.contains("hidden.weight"), "{error}");
        assert!(error.contains("129") && error.contains("128"), "{error}");
    }
    for error in differ("--bucket-mib $((RANK + 2))") {
        assert!(error.contains("rank 1") && error.contains("bucket"), "{error}");
    }
    for error in differ("--algorithm $(test $RANK = 0 && echo direct || echo doubling)") {
        assert!(error.contains("[direct]") && error.contains("[doubling]"), "{error}");
    }
    for error in differ("--batch-size $((32 * (RANK + 1)))") {
        assert!(error.contains("on rank 1: batch size is 64, but rank 0 has 32"), "{error}");
    }
}

#[test]
fn settings_that_cannot_work_are_named_on_every_rank() {
    let directory = tempfile::tempdir().unwrap();
    let errors = |arguments: &str| fails_on_every_rank(patient_job(&directory, 2, arguments), 2);
    for error in errors("--init shared-memory://there") {
        assert!(error.contains("shared-memory") && error.contains("env://"), "{error}");
    }
    for error in errors("--algorithm ring") {
        assert!(error.contains("ring") && error.contains("doubling"), "{error}");
    }
    // The launcher reads the environment, too, and starts no rank.
    let mut misconfigured = patient_job(&directory, 2, "");
    let output = misconfigured.env("DRUMLINE_TIMEOUT_S", "soon").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("DRUMLINE_TIMEOUT_S"), "{}", stderr(&output));
    assert!(files_in(directory.path()).is_empty());
}

/// The error of one process that believes to be a rank.
fn fails_alone(variables: &[(&str, &str)]) -> String {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(PROGRAM)
        .current_dir(&directory)
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(files_in(directory.path()).is_empty());
    stderr(&output).to_owned()
}

#[test]
fn an_environment_that_cannot_work_is_named() {
    let error = fails_alone(&[("RANK", "0"), ("WORLD_SIZE", "2")]);
    assert!(error.contains("MASTER_ADDR") && error.contains("MASTER_PORT"), "{error}");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let place = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port.as_str())];
    let rank =
        |rank, world_size| [&[("RANK", rank), ("WORLD_SIZE", world_size)][..], &place].concat();
    let error = fails_alone(&rank("2", "2"));
    assert!(error.contains("rank 2") && error.contains("0 to 1"), "{error}");
    let error = fails_alone(&rank("0", "two"));
    assert!(error.contains("WORLD_SIZE") && error.contains("two"), "{error}");
    let error = fails_alone(&rank("0", "2"));
    assert!(error.contains(&port) && error.contains("in use"), "{error}");
}
