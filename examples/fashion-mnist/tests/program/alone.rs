//! The program as a user starts it, as a single process.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use drumline::checkpoint::{Checkpoint, Tensor};
use tempfile::TempDir;

/// Runs the program in `directory` with no data set but the built-in digits.
fn run(directory: &TempDir, arguments: &str) -> Output {
    command(directory, arguments).output().unwrap()
}

fn command(directory: &TempDir, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fashion-mnist"));
    command.current_dir(directory).env_clear().args(arguments.split_whitespace());
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn succeeds(directory: &TempDir, arguments: &str) -> String {
    let output = run(directory, arguments);
    assert!(output.status.success(), "{arguments}: {}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

fn fails(directory: &TempDir, arguments: &str) -> String {
    let output = run(directory, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments}: {}", text(&output.stdout));
    // On a slow machine progress comes before it.
    let is_error = |line: &&str| !line.starts_with("epoch ");
    let errors: Vec<&str> = text(&output.stderr).lines().filter(is_error).collect();
    assert!(errors.len() == 1 && errors[0].starts_with("Error: "), "{errors:?}");
    errors[0].to_owned()
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn learns_to_read_digits() {
    let directory = tempfile::tempdir().unwrap();
    let output = succeeds(&directory, "--out out");
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines.len(), 6, "{output}");
    assert!(lines[0].starts_with("handwritten digits: 1,500 images to train, 297 to test"));
    assert!(lines[1].contains("1 rank x 64 images per step"), "{output}");
    for (line, epoch) in lines[2..5].iter().zip(1..) {
        assert!(line.starts_with(&format!("epoch {epoch}/3  loss ")), "{output}");
    }
    let accuracy = lines[4].split("test accuracy ").nth(1).unwrap().split(' ').next().unwrap();
    assert!(accuracy.parse::<f64>().unwrap() > 80.0, "{output}");
    assert_eq!(lines[5], "checkpoint out/step-00000072.safetensors, picture out/training.svg");
    assert_eq!(
        names_in(&directory.path().join("out")),
        ["step-00000048.safetensors", "step-00000072.safetensors", "training.svg"]
    );
    let picture = fs::read_to_string(directory.path().join("out/training.svg")).unwrap();
    assert!(picture.contains(&format!("{accuracy} %")), "{picture}");

    let checkpoint = directory.path().join("out/step-00000072.safetensors");
    let checkpoint = Checkpoint::read(&checkpoint).unwrap();
    let tensors = |prefix| checkpoint.tensors().filter(move |t| t.name().starts_with(prefix));
    // Two convolutions, two normalisations (scale, shift, mean, variance), two linear layers.
    assert_eq!(tensors("model.").count(), 2 + 2 * 4 + 2 * 2);
    for weight in ["conv1.weight", "norm1.gamma", "output.bias"] {
        let velocity = format!("optimizer.{weight}.momentum.velocity");
        assert_eq!(
            checkpoint.tensor(&velocity).unwrap().shape(),
            checkpoint.tensor(&format!("model.{weight}")).unwrap().shape()
        );
    }
}

#[test]
fn resuming_gives_the_same_bits_as_not_stopping() {
    let directory = tempfile::tempdir().unwrap();
    let file = |out: &str| {
        fs::read(directory.path().join(out).join("step-00000012.safetensors")).unwrap_or_default()
    };
    succeeds(&directory, "--hidden 16 --limit 62 --batch-size 16 --epochs 3 --out whole");

    succeeds(&directory, "--hidden 16 --limit 62 --batch-size 16 --epochs 1 --out parts");
    let output = succeeds(
        &directory,
        "--hidden 16 --limit 62 --batch-size 16 --epochs 2 --out parts --resume",
    );
    let expected = "resuming from parts/step-00000004.safetensors: after 4 steps, 1 whole epoch\n\
                    epoch 2/2  loss ";
    assert!(output.contains(expected), "{output}");
    succeeds(&directory, "--hidden 16 --limit 62 --batch-size 16 --epochs 3 --out parts --resume");
    assert_eq!(file("parts"), file("whole"));

    // Nothing is left to do; the picture is still drawn.
    fs::remove_file(directory.path().join("parts/training.svg")).unwrap();
    succeeds(&directory, "--hidden 16 --limit 62 --batch-size 16 --epochs 3 --out parts --resume");
    assert_eq!(file("parts"), file("whole"));
    // Nor is anything copied when the checkpoint is elsewhere.
    let output = succeeds(
        &directory,
        "--hidden 16 --limit 62 --batch-size 16 --epochs 3 --out copy --resume whole",
    );
    assert!(
        output
            .ends_with("\ncheckpoint whole/step-00000012.safetensors, picture copy/training.svg\n")
    );
    let picture = |out: &str| fs::read(directory.path().join(out).join("training.svg")).unwrap();
    assert_eq!(picture("parts"), picture("whole"));

    succeeds(&directory, "--hidden 16 --limit 62 --batch-size 16 --epochs 3 --out other --seed 1");
    assert_ne!(file("other"), file("whole"), "the seed decides nothing");
}

#[test]
fn a_checkpoint_that_does_not_fit_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out/step-00000002.safetensors");
    let resume = |arguments: &str| {
        let before = fs::read(&path).ok();
        let error = fails(&directory, &format!("--limit 100 --out out --resume {arguments}"));
        assert!(error.contains("out"), "{error}");
        assert_eq!(fs::read(&path).ok(), before, "the checkpoint was touched");
        error
    };
    assert!(resume("").contains("out: holds no checkpoint; check the path"));
    assert!(names_in(&directory.path().join("out")).is_empty());

    succeeds(&directory, "--limit 100 --epochs 1 --out out");
    assert!(resume("--seed 7").contains("it was made with seed 0, but this run has 7"));
    assert!(
        resume("--batch-size 32 --lr 0.025").contains("images per step 64, but this run has 32")
    );
    assert!(resume("--lr 0.5").contains("learning rate 0.025, but this run has 0.5"));
    assert!(resume("--limit 99").contains("100 images"));
    let other = resume("--hidden 64");
    assert!(other.contains("out/step-00000002.safetensors: the checkpoint is of another model"));
    assert!(other.contains("`hidden.weight` is f32[1568, 128], the model has f32[1568, 64]"));

    let good = Checkpoint::read(&path).unwrap();
    let refuses = |change: &dyn Fn(&mut Checkpoint), expected: &str| {
        let mut changed = good.clone();
        change(&mut changed);
        changed.write(&path).unwrap();
        let error = resume("");
        assert!(error.contains(expected), "{error}");
    };
    let one = |name: &str| Tensor::from_values(name, [1], &[1_f32]).unwrap();
    refuses(&|c| drop(c.metadata.remove("seed")), "does not say its seed");
    refuses(&|c| drop(c.insert(one("model.conv1.weight"))), "conv1.weight");
    refuses(&|c| drop(c.insert(one("model.conv9.weight"))), "conv9.weight");
    refuses(&|c| drop(c.insert(one("optimizer.conv9.weight.x"))), "conv9.weight.x belongs to no");
    refuses(&|c| drop(c.insert(one("optimizer.conv1.weight.x"))), "no use for optimizer.conv1");
    refuses(&|c| drop(c.insert(one("history.losses"))), "history.losses");
    refuses(&|c| drop(c.insert(one("history.unfinished"))), "does not say its steps per epoch");
    refuses(&|c| drop(c.metadata.insert("sampler".into(), "?".into())), "the state of a sampler");
    refuses(
        &|c| {
            let state = &c.metadata["sampler"].replace("epoch=1", "epoch=2");
            c.metadata.insert("sampler".into(), state.clone());
        },
        "its history is of 1 epochs",
    );

    let mut bytes = fs::read(&path).unwrap();
    bytes.truncate(bytes.len() - 1);
    fs::write(&path, bytes).unwrap();
    assert!(resume("out/step-00000002.safetensors").contains("cut short"));
    assert!(resume("out/step-00000009.safetensors").contains("holds no checkpoint"));
}

#[test]
fn says_what_is_wrong_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("empty")).unwrap();
    fs::write(directory.path().join("file"), "").unwrap();
    assert!(fails(&directory, "--data empty").contains("empty holds no data set"));
    assert!(fails(&directory, "--data nowhere").contains("nowhere holds no data set"));
    assert!(fails(&directory, "--limit 10 --out file/out").contains("file/out: the directory"));
    let error = fails(&directory, "--limit 10 --out /proc/self");
    assert!(error.contains("/proc/self: no file can be written in this directory"), "{error}");
    let error = fails(&directory, "--limit 500 --lr 1e30 --out out");
    assert!(error.contains("the loss became") && error.contains("--lr"), "{error}");
    assert!(names_in(&directory.path().join("out")).is_empty());

    for arguments in ["--epochs 0", "--batch-size 0", "--lr 0", "--lr nan", "--limit 0", "--what"] {
        let output = run(&directory, arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments}");
        assert!(text(&output.stderr).contains(arguments.split(' ').next().unwrap()));
    }
    assert_eq!(names_in(directory.path()), ["empty", "file", "out"]);
}

#[test]
fn the_data_of_the_cache_is_used_without_being_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let cache = directory.path().join("drumline/fashion-mnist");
    fs::create_dir_all(&cache).unwrap();
    fs::write(cache.join("train-images-idx3-ubyte.gz"), "garbage").unwrap();
    let mut command = command(&directory, "");
    let output = command.env("XDG_CACHE_HOME", directory.path()).output().unwrap();
    let error = text(&output.stderr);
    assert!(error.contains("drumline/fashion-mnist/train-images"), "{error}");
}

/// Under `drumline run` stderr is a pipe, and this variable says what is behind it.
#[test]
fn draws_its_progress_through_the_launcher() {
    let directory = tempfile::tempdir().unwrap();
    let mut command =
        command(&directory, "--hidden 16 --limit 320 --epochs 1 --batch-size 2 --out out");
    let output = command.env("DRUMLINE_TERMINAL_COLUMNS", "60").output().unwrap();
    assert!(output.status.success());
    let progress = text(&output.stderr);
    assert!(!progress.contains('\n'), "{progress}");
    let updates: Vec<&str> = progress.strip_suffix('\r').unwrap().split('\r').collect();
    assert!(updates[0].starts_with("epoch 1 ") && updates[0].contains('%'), "{progress}");
    assert!(updates.iter().all(|update| update.chars().count() <= 60), "{progress}");
    assert_eq!(updates.last(), Some(&""), "the bar is not cleared at the end");
    assert!(!text(&output.stdout).contains('\r'));
}
