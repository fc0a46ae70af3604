//! Interrupted and resumed is the same as never interrupted, to the last bit.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_fashion-mnist");

/// The program in `directory` with the built-in digits, on `ranks` ranks.
pub(crate) fn command(directory: &Path, ranks: usize, arguments: &str) -> Command {
    let mut command = if ranks == 1 {
        Command::new(PROGRAM)
    } else {
        let launcher = Path::new(PROGRAM).with_file_name("drumline");
        assert!(launcher.exists(), "build it first: cargo build -p drumline-cli");
        let mut command = Command::new(launcher);
        command.args(["run", "--nproc-per-node", &ranks.to_string(), PROGRAM]);
        command
    };
    command.current_dir(directory).env_clear().args(arguments.split_whitespace());
    command
}

pub(crate) struct Printed {
    stdout: String,
    stderr: String,
}

pub(crate) fn succeeds(mut command: Command) -> Printed {
    let output = command.output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|b| String::from_utf8(b).unwrap());
    assert!(output.status.success(), "{command:?}: {stdout}{stderr}");
    Printed { stdout, stderr }
}

/// The files of checkpoints in a directory by step.
fn checkpoints(directory: &Path) -> BTreeMap<u64, PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return BTreeMap::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    let step = |path: &Path| {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()
    };
    paths.filter_map(|path| Some((step(&path)?, path))).collect()
}

/// The results of training: the step and the bytes of the last checkpoint, and the picture.
fn end(out: &Path) -> (u64, Vec<u8>, Vec<u8>) {
    let (step, path) = checkpoints(out).into_iter().next_back().expect("no checkpoint");
    (step, fs::read(path).unwrap(), fs::read(out.join("training.svg")).unwrap())
}

/// The printed results of the last epoch without times: loss and accuracy, digest of the parameters.
fn last_epoch(stdout: &str) -> (String, String) {
    let line = stdout.lines().rfind(|line| line.contains("  loss ")).expect("no epoch").to_owned();
    let line = line.strip_prefix("[0] ").map(str::to_owned).unwrap_or(line);
    let (before, after) = line.split_once(" %  ").unwrap();
    (before.to_owned(), after.rsplit_once("parameters ").unwrap().1.to_owned())
}

#[test]
fn every_checkpoint_leads_to_the_same_end() {
    for (ranks, every, batch_size) in [(1, 5, 8), (2, 7, 4)] {
        let directory = tempfile::tempdir().unwrap();
        let run = |arguments: &str| {
            let common =
                format!("--hidden 16 --limit 62 --epochs 2 --batch-size {batch_size} --keep 99");
            succeeds(command(directory.path(), ranks, &format!("{common} {arguments}")))
        };
        let out = |name: &str| directory.path().join(name);
        let plain = run("--out plain");
        let often = run(&format!("--out often --checkpoint-every {every}"));
        assert!(end(&out("often")) == end(&out("plain")), "saving changes what is trained");

        let saved = checkpoints(&out("often"));
        assert_eq!(saved.len(), 16 / every + 2 - usize::from(16 % every == 0), "{saved:?}");
        for (step, path) in saved.iter().rev().skip(1) {
            let name = format!("from-{step}");
            let resumed = run(&format!("--out {name} --resume {}", path.display()));
            assert!(end(&out(&name)) == end(&out("plain")), "from step {step} of {ranks} ranks");
            assert_eq!(last_epoch(&resumed.stdout), last_epoch(&plain.stdout));
        }
        assert_eq!(last_epoch(&often.stdout), last_epoch(&plain.stdout));
    }
}

/// The processes with the working directory `directory`; with `rank`, only those of that rank.
pub(crate) fn processes(directory: &Path, rank: Option<usize>) -> Vec<Pid> {
    let directory = directory.canonicalize().unwrap();
    let wanted = rank.map(|rank| format!("RANK={rank}"));
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let pid = Pid::from_raw(name.parse().ok()?)?;
        let its = fs::read_link(format!("/proc/{name}/cwd")).ok()?;
        let environment = fs::read(format!("/proc/{name}/environ")).unwrap_or_default();
        let is_rank = |wanted: &String| {
            environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
        };
        (its == directory && wanted.as_ref().is_none_or(is_rank)).then_some(pid)
    });
    processes.collect()
}

pub(crate) fn kill(processes: Vec<Pid>) {
    for pid in processes {
        let _ = kill_process(pid, Signal::KILL); // It may be faster than we are.
    }
}

/// Numbers that look random and are the same every time (SplitMix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// Far more than anything here takes: it only tells a hang from slowness.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// Kills a running job with SIGKILL, all of it or one rank, when it has saved another step or so.
/// Returns whether it was still running.
fn kill_somewhere(job: &mut std::process::Child, directory: &Path, random: &mut Random) -> bool {
    let newest = || checkpoints(&directory.join("out")).into_keys().next_back().unwrap_or(0);
    let until = newest() + 1 + random.below(4);
    let started = Instant::now();
    while newest() < until {
        if job.try_wait().unwrap().is_some() {
            return false;
        }
        assert!(started.elapsed() < HANG, "the job hangs");
        thread::sleep(Duration::from_millis(1));
    }
    // Anywhere within a step: in forward, backward, a collective, or while a file is written.
    thread::sleep(Duration::from_micros(random.below(40_000)));
    match random.below(3) {
        2 => {
            // The machine goes down: launcher and ranks, in any order.
            while let victims = processes(directory, None)
                && !victims.is_empty()
            {
                kill(victims);
                let _ = job.try_wait(); // Else the launcher stays a zombie.
            }
        }
        rank => kill(processes(directory, Some(rank as usize))),
    }
    let started = Instant::now();
    loop {
        if let Some(status) = job.try_wait().unwrap() {
            return !status.success();
        }
        assert!(started.elapsed() < HANG, "the job does not end");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_job_that_is_killed_again_and_again_ends_with_the_same_bits() {
    let rounds = if cfg!(feature = "soak") { 100 } else { 1 };
    const KILLS_PER_ROUND: usize = 4;
    let arguments =
        "--hidden 16 --limit 120 --batch-size 16 --epochs 3 --checkpoint-every 1 --out out";

    let whole = tempfile::tempdir().unwrap();
    let printed = succeeds(command(whole.path(), 2, arguments));
    let (expected, last) = (end(&whole.path().join("out")), last_epoch(&printed.stdout));
    assert_eq!(expected.0, 12);
    let mut kills = 0;
    for round in 0..rounds {
        let mut random = Random(round);
        let directory = tempfile::tempdir().unwrap();
        let resume = || match checkpoints(&directory.path().join("out")).is_empty() {
            true => arguments.to_owned(),
            false => format!("{arguments} --resume"),
        };
        for _ in 0..KILLS_PER_ROUND {
            let mut job = command(directory.path(), 2, &resume())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            kills += usize::from(kill_somewhere(&mut job, directory.path(), &mut random));
            assert_eq!(processes(directory.path(), None), [], "round {round}: some are left");
        }
        let printed = succeeds(command(directory.path(), 2, &resume()));
        assert!(end(&directory.path().join("out")) == expected, "round {round}: other bits");
        if printed.stdout.contains("  loss ") {
            assert_eq!(last_epoch(&printed.stdout), last, "round {round}");
        }
        let names = fs::read_dir(directory.path().join("out")).unwrap();
        for name in names.map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
            assert!(!name.ends_with(".partial"), "round {round}: {name} is left");
        }
    }
    println!("{kills} kills in {rounds} rounds");
    assert!(kills as u64 >= rounds, "only {kills} of the jobs were killed");
}

/// The images that the ranks trained on in the first epoch, by step.
fn images(stderr: &str) -> BTreeMap<usize, Vec<usize>> {
    let mut images = BTreeMap::<usize, Vec<usize>>::new();
    for line in stderr.lines() {
        let Some((_, fields)) = line.split_once("trains on images epoch=0 step=") else { continue };
        let (step, batch) = fields.split_once(" batch=[").unwrap();
        let batch =
            batch.strip_suffix(']').unwrap().split(", ").map(|i| i.parse::<usize>().unwrap());
        images.entry(step.parse().unwrap()).or_default().extend(batch);
    }
    images
}

#[test]
fn another_number_of_ranks_trains_on_the_images_that_are_left() {
    const IMAGES: usize = 151;
    let directory = tempfile::tempdir().unwrap();
    let run = |ranks: usize, arguments: &str| {
        let batch_size = 24 / ranks;
        let common =
            format!("--hidden 16 --limit {IMAGES} --epochs 1 --batch-size {batch_size} --keep 99");
        let mut command = command(directory.path(), ranks, &format!("{common} {arguments}"));
        command.env("RUST_LOG", "fashion_mnist=trace");
        succeeds(command)
    };
    let first = images(&run(2, "--out out --checkpoint-every 1").stderr);
    assert_eq!(first.len(), 7);
    for (ranks, step) in [(4, 3), (3, 1), (1, 5)] {
        let name = format!("with-{ranks}");
        let saved = directory.path().join(format!("out/step-{step:08}.safetensors"));
        let resumed = run(ranks, &format!("--out {name} --resume {}", saved.display()));
        assert_eq!(end(&directory.path().join(name)).0, 7, "another number of steps");

        let then = images(&resumed.stderr);
        assert!(then.keys().copied().eq(step..7), "{:?}", then.keys());
        let mut uses = vec![0; IMAGES];
        let seen = first.iter().filter(|(at, _)| **at < step).chain(&then);
        seen.flat_map(|(_, images)| images).for_each(|&image| uses[image] += 1);
        let repeated = uses.iter().filter(|uses| **uses == 2).count();
        assert!(uses.iter().all(|uses| (1..=2).contains(uses)), "{uses:?}");
        // 24 * step are done; the rest is rounded up to whole shares.
        assert_eq!(repeated, (IMAGES - 24 * step).next_multiple_of(ranks) - (IMAGES - 24 * step));
    }
}
