//! The program as a user starts it: alone, as a job of several processes, and resumed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use drumline::checkpoint::Checkpoint;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_gpt-burn");
/// A model that is quick to train.
const SMALL: &str = "--places 16 --layers 2 --width 16 --batch-size 4 --every 5 --sample 20";

/// A directory with a text: the beginning of this repository's guides.
fn directory_with(characters: usize) -> TempDir {
    let guides = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides");
    let mut paths: Vec<_> = fs::read_dir(guides).unwrap().map(|it| it.unwrap().path()).collect();
    paths.sort();
    let text: String = paths.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let text: String = text.chars().take(characters).collect();
    assert_eq!(text.chars().count(), characters);
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("text"), text).unwrap();
    directory
}

/// 23 steps of two ranks are an epoch of [`SMALL`].
fn directory() -> TempDir {
    directory_with(3000)
}

fn run(directory: &TempDir, ranks: usize, arguments: &str) -> Output {
    let mut command = Command::new(PROGRAM);
    if ranks > 1 {
        let launcher = Path::new(PROGRAM).with_file_name("drumline");
        assert!(launcher.exists(), "build it first: cargo build -p drumline-cli");
        command = Command::new(launcher);
        command.args(["run", "--nproc-per-node", &ranks.to_string(), PROGRAM]);
    }
    command.current_dir(directory).env_clear().arg("text");
    command.args(arguments.split_whitespace()).output().unwrap()
}

fn succeeds(directory: &TempDir, ranks: usize, arguments: &str) -> String {
    let output = run(directory, ranks, arguments);
    let [stdout, stderr] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    assert!(output.status.success(), "{arguments}: {stdout}{stderr}");
    stdout
}

fn fails(directory: &TempDir, ranks: usize, arguments: &str) -> String {
    let output = run(directory, ranks, arguments);
    assert!(!output.status.success(), "{arguments}");
    String::from_utf8(output.stderr).unwrap()
}

/// The digests of the parameters at the end, one for each rank.
fn digests(stdout: &str) -> Vec<&str> {
    let after = stdout.split("parameters ").skip(1);
    after.filter(|it| it.contains(" after ")).filter_map(|it| it.split(' ').next()).collect()
}

fn checkpoint(directory: &TempDir, out: &str, step: u64) -> Checkpoint {
    Checkpoint::read(&file(directory, out, step)).unwrap()
}

fn file(directory: &TempDir, out: &str, step: u64) -> std::path::PathBuf {
    directory.path().join(format!("{out}/step-{step:08}.safetensors"))
}

/// The losses in a checkpoint.
fn losses(checkpoint: &Checkpoint, which: &str) -> Vec<f64> {
    let values = checkpoint.tensor(&format!("losses.{which}")).unwrap().values::<f64>().unwrap();
    values.chunks_exact(2).map(|pair| pair[1]).collect()
}

#[test]
fn ranks_learn_together_and_stay_alike() {
    for ranks in [1, 2] {
        let directory = directory();
        let printed = succeeds(&directory, ranks, &format!("{SMALL} --steps 40 --out out"));
        let found = digests(&printed);
        assert_eq!(found.len(), ranks, "{printed}");
        assert!(found.iter().all(|digest| *digest == found[0]), "{printed}");
        assert_eq!(printed.contains("% of it exposed"), ranks > 1, "{printed}");

        let validation = losses(&checkpoint(&directory, "out", 40), "validation");
        assert_eq!(validation.len(), 8);
        assert!(validation[7] < validation[0] - 0.2, "{validation:?}");
        let picture = fs::read_to_string(directory.path().join("out/loss.svg")).unwrap();
        assert!(picture.contains(&format!("validation: {:.3} at last", validation[7])));
    }
}

#[test]
fn stopped_and_resumed_gives_the_same_bits() {
    for ranks in [1, 2] {
        let directory = directory();
        let run = |arguments: &str| succeeds(&directory, ranks, &format!("{SMALL} {arguments}"));
        let whole = run("--out whole --steps 40");
        // In the middle of the second epoch of two ranks.
        run("--out parts --steps 25 --steps-planned 40");
        let resumed = run("--out parts --steps 40 --resume");
        assert_eq!(digests(&resumed), digests(&whole));
        let bytes = |out| fs::read(file(&directory, out, 40)).unwrap();
        assert!(bytes("parts") == bytes("whole"), "{ranks} ranks: the bits differ");
        let picture = |out| fs::read(directory.path().join(out).join("loss.svg")).unwrap();
        assert!(picture("parts") == picture("whole"), "{ranks} ranks: the pictures differ");
        assert_ne!(digests(&run("--out other --steps 40 --seed 1")), digests(&whole));
    }
}

/// With `DRUMLINE_SLOW_TESTS` 200 steps of a larger model.
#[test]
fn two_ranks_train_like_one_with_twice_the_batch() {
    // Less than an epoch: its last step has a window more in two ranks if their number is odd.
    let (steps, size, characters) = match std::env::var_os("DRUMLINE_SLOW_TESTS") {
        Some(_) => (200, "--places 32 --layers 3 --width 96", 54_000),
        None => (20, "--places 16 --layers 2 --width 32", 3000),
    };
    let directory = directory_with(characters);
    let losses = |ranks: usize, batch_size: usize, seed: u64| {
        let out = format!("of-{ranks}-{seed}");
        let options = format!("--batch-size {batch_size} --seed {seed} --steps {steps}");
        succeeds(&directory, ranks, &format!("{size} {options} --every 200 --out {out}"));
        losses(&checkpoint(&directory, &out, steps), "training")
    };
    let distance =
        |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let (one, two) = (losses(1, 8, 0), losses(2, 4, 0));
    assert_eq!((one.len(), two.len()), (steps as usize, steps as usize));
    let largest = distance(&one, &two);
    println!("losses of {steps} steps differ by at most {largest:.1e}");
    assert!(largest < 1e-3, "{one:?}\n{two:?}");
    assert!(distance(&one, &losses(1, 8, 1)) > 1e-3, "the comparison shows nothing");
}

/// `python/tests/test_gpt_burn.py` loads these files in torch.
#[test]
fn the_export_has_the_layouts_of_torch() {
    let directory = directory();
    let arguments = "--steps 2 --out out --export model --logits logits";
    succeeds(&directory, 2, &format!("{SMALL} {arguments}"));
    let read = |name: &str| Checkpoint::read(&directory.path().join(name)).unwrap();
    let (saved, exported) = (checkpoint(&directory, "out", 2), read("model"));
    assert_eq!(exported.tensors().len(), saved.section("model.").count());
    assert_eq!(exported.tensors().len(), 2 + 2 * 12 + 4);
    let values = |from: &Checkpoint, name: &str| {
        let tensor = from.tensor(name).unwrap_or_else(|| panic!("no {name}"));
        (tensor.shape().to_vec(), tensor.values::<f32>().unwrap())
    };
    for (ours, torchs) in [
        ("character.weight", "character.weight"),
        ("blocks.1.before_layer.gamma", "blocks.1.before_layer.weight"),
        ("scores.0.beta", "scores.0.bias"),
        ("blocks.1.layer.2.bias", "blocks.1.layer.2.bias"),
    ] {
        assert_eq!(values(&exported, torchs), values(&saved, &format!("model.{ours}")), "{ours}");
    }
    let (shape, weight) = values(&saved, "model.blocks.0.queries_keys_values.weight");
    let (torch_shape, torch_weight) = values(&exported, "blocks.0.queries_keys_values.weight");
    assert_eq!((&shape[..], &torch_shape[..]), (&[16, 48][..], &[48, 16][..]));
    for (place, value) in weight.iter().enumerate() {
        assert_eq!(torch_weight[place % 48 * 16 + place / 48], *value);
    }
    let alphabet = exported.metadata["alphabet"].chars().count();
    assert_eq!(values(&read("logits"), "scores").0, [1, 16, alphabet]);
}

#[test]
fn what_cannot_work_is_named() {
    let directory = directory();
    let error = fails(&directory, 1, "--width 30");
    assert!(error.contains("--width") && error.contains("a multiple of 4"), "{error}");
    let error = fails(&directory, 1, "--places 500");
    assert!(
        error.contains("the text has 3000 characters") && error.contains("--places"),
        "{error}"
    );
    let error = fails(&directory, 1, &format!("{SMALL} --steps 20 --lr 1e30"));
    assert!(error.contains("the loss became") && error.contains("--lr"), "{error}");
    succeeds(&directory, 2, &format!("{SMALL} --steps 2 --out out"));
    let error = fails(&directory, 2, &format!("{SMALL} --steps 4 --out out --resume --lr 0.1"));
    for rank in 0..2 {
        let named = format!("rank {rank}: checkpoint out/step-00000002.safetensors");
        assert!(error.contains(&named) && error.contains("learning rate 0.003"), "{error}");
    }
    fs::remove_file(directory.path().join("text")).unwrap();
    assert!(fails(&directory, 1, "").contains("cannot read the text text"));
}
