//! `kill -9` at random moments of a real process.

use std::{
    env,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use burn::{
    module::ParamGroup,
    optim::{
        AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig,
        LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
        momentum::MomentumConfig,
    },
};
use drumline::{ProcessGroup, checkpoint::CheckpointDirectory};
use drumline_testing::itself;

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
    let (_, optimizer) =
        optimizers().into_iter().find(|(name, _)| env::var(OPTIMIZER).unwrap() == *name).unwrap();
    train(&ProcessGroup::alone(), Path::new(&out), optimizer, STEPS).unwrap();
}

fn optimizers() -> [(&'static str, ModuleOptimizer); 10] {
    let matrices = ParamGroup::from_predicate("weight");
    let muon = AdamWConfig::new().init().with_group(matrices, MuonConfig::new().build(), None);
    let momentum = Some(MomentumConfig::new());
    [
        ("AdaGrad", AdaGradConfig::new().init()),
        ("Adafactor", AdafactorConfig::new().init()),
        ("Adam", AdamConfig::new().init()),
        ("AdamW", AdamWConfig::new().init()),
        ("Adan", AdanConfig::new().init()),
        ("LAMB", LambConfig::new().init()),
        ("Lion", LionConfig::new().init()),
        ("Muon", muon),
        ("RMSProp", RmsPropConfig::new().init()),
        ("SGD", SgdConfig::new().with_momentum(momentum).init()),
    ]
}

fn start(out: &Path, optimizer: &str) -> Child {
    itself("killed::program_to_kill")
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

/// Kills the program at random moments until it comes to its end. Returns how often.
fn ends_with_the_same_bits(optimizer: &str, random: &mut u64) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let (whole, parts) = (directory.path().join("whole"), directory.path().join("parts"));
    assert!(wait(&mut start(&whole, optimizer), &whole, u64::MAX));
    let mut kills = 0;
    loop {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let last = CheckpointDirectory::new(&parts).steps().unwrap().last().copied();
        let mut child = start(&parts, optimizer);
        if wait(&mut child, &parts, last.unwrap_or(0) + 1 + (*random >> 33) % 12) {
            break;
        }
        thread::sleep(Duration::from_micros((*random >> 40) % 5_000)); // anywhere within a step
        child.kill().unwrap(); // SIGKILL
        child.wait().unwrap();
        kills += 1;
    }
    assert!(file(&parts, STEPS) == file(&whole, STEPS), "{optimizer}: other bits");
    kills
}

#[test]
fn a_program_that_is_killed_again_and_again_ends_with_the_same_bits() {
    let (mut random, mut kills) = (0, 0);
    for optimizer in ["AdamW", "SGD"] {
        kills += ends_with_the_same_bits(optimizer, &mut random);
    }
    assert!(kills > 0, "each program ended before it was killed");
}

#[test]
#[ignore = "takes minutes: make soak runs it"]
fn so_does_every_optimizer() {
    let (mut random, mut kills) = (1, 0);
    for _ in 0..5 {
        for (optimizer, _) in optimizers() {
            kills += ends_with_the_same_bits(optimizer, &mut random);
        }
    }
    println!("{kills} kills");
    assert!(kills >= 100, "only {kills} kills");
}
