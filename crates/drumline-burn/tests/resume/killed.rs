//! `kill -9` at random moments of a real process.

use std::{
    env,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use burn::optim::{AdamWConfig, SgdConfig, momentum::MomentumConfig};
use drumline::{ProcessGroup, checkpoint::CheckpointDirectory};

use crate::program::{file, train};

const OUT: &str = "TEST_RESUME_OUT";
const OPTIMIZER: &str = "TEST_RESUME_OPTIMIZER";
const STEPS: u64 = 40;
/// Far more than anything here takes: it only tells a hang from slowness.
const HANG: Duration = Duration::from_secs(120);

/// What the processes run that the test below kills. Does nothing when the tests run.
#[test]
fn program_to_kill() {
    let Some(out) = env::var_os(OUT) else { return };
    let (group, out) = (ProcessGroup::alone(), Path::new(&out));
    match env::var(OPTIMIZER).unwrap().as_str() {
        "adam_w" => train(&group, out, AdamWConfig::new(), STEPS).unwrap(),
        "sgd" => {
            let config = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
            train(&group, out, config, STEPS).unwrap();
        }
        other => panic!("{other}"),
    }
}

fn start(out: &Path, optimizer: &str) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "killed::program_to_kill", "--test-threads", "1"])
        .envs([(OUT, out.as_os_str()), (OPTIMIZER, optimizer.as_ref())])
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits until the process ends, or has saved step `until`. Returns whether it ended.
fn wait(child: &mut Child, out: &Path, until: u64) -> bool {
    let directory = CheckpointDirectory::new(out);
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            return true;
        }
        if directory.steps().unwrap().last().is_some_and(|last| *last >= until) {
            return false;
        }
        assert!(started.elapsed() < HANG, "the program hangs");
        thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn a_program_that_is_killed_again_and_again_ends_with_the_same_bits() {
    let mut random = 0_u64;
    for optimizer in ["adam_w", "sgd"] {
        let directory = tempfile::tempdir().unwrap();
        let (whole, parts) = (directory.path().join("whole"), directory.path().join("parts"));
        assert!(wait(&mut start(&whole, optimizer), &whole, u64::MAX));
        let mut kills = 0;
        loop {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let last = CheckpointDirectory::new(&parts).steps().unwrap().last().copied();
            let mut child = start(&parts, optimizer);
            if wait(&mut child, &parts, last.unwrap_or(0) + 1 + (random >> 33) % 12) {
                break;
            }
            thread::sleep(Duration::from_micros((random >> 40) % 5_000)); // anywhere within a step
            child.kill().unwrap(); // SIGKILL
            child.wait().unwrap();
            kills += 1;
        }
        assert!(kills >= 2, "only {kills} kills");
        assert!(file(&parts, STEPS) == file(&whole, STEPS), "{optimizer}: other bits");
    }
}
