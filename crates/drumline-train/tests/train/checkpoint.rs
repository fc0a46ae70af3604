//! Checkpoints on a disk: what comes back, what is refused, and what is left behind.

use std::{
    fs,
    num::NonZeroUsize,
    os::unix::fs::FileExt,
    path::Path,
    sync::{LazyLock, mpsc},
    thread,
    time::Duration,
};

use drumline_group::{DType, Error, ErrorKind, ProcessGroup, bf16, f16};
use drumline_train::{
    checkpoint::{Checkpoint, CheckpointDirectory, Found, Tensor},
    ddp::ParameterSpec,
    local,
};
use proptest::prelude::*;
use rustix::fs::{CWD, Mode, mkfifoat};
use safetensors::SafeTensors;

fn sample() -> Checkpoint {
    let mut checkpoint = Checkpoint::default();
    for tensor in [
        Tensor::from_values("fc.weight", [2, 3], &[1.5_f32, -2.0, 0.0, f32::MIN, 5.0, 6.0]),
        Tensor::from_values("fc.bias", [1], &[0.25_f64]),
        Tensor::from_values("labels \"quoted\" ü", [3], &[1_u8, 2, 3]),
        Tensor::from_values("steps", [], &[i64::MIN]),
        Tensor::from_values::<f32>("nothing", [0, 7], &[]),
        Tensor::from_values("halves", [3], &[1.5, -0.0, 65504.0].map(f16::from_f32)),
        Tensor::from_values("brains", [1], &[bf16::from_f32(3.0e38)]),
        Tensor::from_values("counts", [2], &[0, u32::MAX]),
        Tensor::from_values("small", [1], &[i8::MIN]),
        Tensor::from_values("shorts", [1], &[i16::MIN]),
        Tensor::from_values("ports", [1], &[u16::MAX]),
        Tensor::from_values("codes", [1], &[i32::MIN]),
        Tensor::from_values("seeds", [1], &[u64::MAX]),
    ] {
        checkpoint.insert(tensor.unwrap());
    }
    checkpoint.metadata.insert("epoch".into(), "3".into());
    checkpoint.metadata.insert("history".into(), "0.5\n0.25\t\"\\".into());
    checkpoint
}

/// Written once, because every write waits for the disk.
static SAMPLE_FILE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.safetensors");
    sample().write(&path).unwrap();
    fs::read(&path).unwrap()
});

fn problem(result: drumline_group::Result<impl std::fmt::Debug>, path: &Path) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint, "{error}");
    let text = error.to_string();
    assert!(text.contains(path.to_str().unwrap()), "{text} does not name the file");
    text
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn what_was_written_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.safetensors");
    sample().write(&path).unwrap();
    assert_eq!(Checkpoint::read(&path).unwrap(), sample());

    let mut next = sample();
    next.metadata.insert("epoch".into(), "4".into());
    next.write(&path).unwrap();
    assert_eq!(Checkpoint::read(&path).unwrap(), next);
    assert_eq!(names_in(directory.path()), ["c.safetensors"]);
}

#[test]
fn equal_checkpoints_make_equal_files() {
    let directory = tempfile::tempdir().unwrap();
    let files = ["a", "b"].map(|name| directory.path().join(name));
    files.iter().for_each(|path| sample().write(path).unwrap());
    assert_eq!(fs::read(&files[0]).unwrap(), fs::read(&files[1]).unwrap());
}

/// The crate `safetensors` is the reference implementation of the format.
#[test]
fn the_reference_implementation_reads_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.safetensors");
    sample().write(&path).unwrap();

    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), sample().tensors().len());
    for tensor in sample().tensors() {
        let read = file.tensor(tensor.name()).unwrap();
        assert_eq!(format!("{:?}", read.dtype()).to_lowercase(), tensor.dtype().name());
        assert_eq!(read.shape(), tensor.shape());
        assert_eq!(read.data(), tensor.bytes());
        let address = read.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(address % tensor.dtype().size(), 0, "{} is not aligned", tensor.name());
    }
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().as_ref().unwrap();
    assert_eq!(metadata["history"], sample().metadata["history"]);
    assert_eq!(metadata["drumline.digest"], format!("{:032x}", sample().digest()));
}

#[test]
fn the_digest_sees_every_part() {
    let changes: [fn(&mut Checkpoint); 6] =
        [
            |c| drop(c.metadata.insert("epoch".into(), "4".into())),
            |c| drop(c.metadata.insert("new".into(), "".into())),
            |c| drop(c.insert(Tensor::from_values("steps", [], &[0_i64]).unwrap())),
            |c| drop(c.insert(Tensor::from_values("steps", [1], &[i64::MIN]).unwrap())),
            |c| {
                drop(c.insert(
                    Tensor::from_values("fc.bias", [1], &[0.25_f64.to_bits() as i64]).unwrap(),
                ))
            },
            |c| drop(c.insert(Tensor::from_values::<u8>("another", [0], &[]).unwrap())),
        ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut changed = sample();
        change(&mut changed);
        assert_ne!(changed.digest(), sample().digest(), "change {index}");
    }
}

#[test]
fn says_why_a_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.safetensors");
    let read = || problem(Checkpoint::read(&path), &path);

    assert!(read().contains("no such file; check the path"));
    assert!(
        problem(Checkpoint::read(directory.path()), directory.path()).contains("no regular file")
    );

    sample().write(&path).unwrap();
    let good = fs::read(&path).unwrap();
    for length in 0..good.len() {
        fs::write(&path, &good[..length]).unwrap();
        let text = read();
        assert!(text.contains("cut short"), "{length}: {text}");
        assert!(text.contains("delete it or resume from an earlier one"), "{text}");
    }

    fs::write(&path, [&good[..], b"x"].concat()).unwrap();
    assert!(read().contains("cut short or damaged"));

    fs::write(&path, "Epoch 3, everything went well. ".repeat(20)).unwrap();
    assert!(read().contains("not a safetensors file"));

    fs::write(
        &path,
        safetensors::serialize::<&str, safetensors::tensor::TensorView, _>([], None).unwrap(),
    )
    .unwrap();
    assert!(read().contains("Drumline did not write it"));
}

/// Every bit of the file, and every length.
#[test]
fn damage_is_noticed_everywhere() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.safetensors");
    let good = &*SAMPLE_FILE;
    fs::write(&path, good).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for bit in 0..good.len() * 8 {
        let (at, bad) = (bit / 8, good[bit / 8] ^ 1 << (bit % 8));
        file.write_all_at(&[bad], at as u64).unwrap();
        assert!(Checkpoint::read(&path).is_err(), "bit {bit}");
        file.write_all_at(&[good[at]], at as u64).unwrap();
    }
    assert_eq!(Checkpoint::read(&path).unwrap(), sample());
}

proptest! {
    /// Sizes and offsets from a hostile header: an error, never a panic, never a huge allocation.
    #[test]
    fn survives_any_header(
        shape in prop::collection::vec(any::<u64>(), 0..3),
        offsets in prop::array::uniform2(prop_oneof![0_u64..100, any::<u64>()]),
        dtype in prop::sample::select(vec!["U8", "F32", "F64", "I64", "BF16", "F8_E4M3", ""]),
        rest in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let header = format!(
            r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":{offsets:?}}}}}"#
        );
        let length = (header.len() as u64).to_le_bytes();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.safetensors");
        fs::write(&path, [&length[..], header.as_bytes(), &rest].concat()).unwrap();
        problem(Checkpoint::read(&path), &path);
    }

    /// Whatever part of a file is overwritten, repeated or lost.
    #[test]
    fn damage_of_any_kind_is_noticed(
        at in any::<prop::sample::Index>(),
        lost in 0_usize..60,
        instead in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.safetensors");
        let good = &*SAMPLE_FILE;
        let at = at.index(good.len());
        let mut bad = good.clone();
        bad.splice(at..(at + lost).min(good.len()), instead);
        prop_assume!(bad != *good);
        fs::write(&path, bad).unwrap();
        problem(Checkpoint::read(&path), &path);
    }

    #[test]
    fn survives_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("c.safetensors");
        fs::write(&path, bytes).unwrap();
        problem(Checkpoint::read(&path), &path);
    }
}

#[test]
fn leaves_nothing_behind_when_it_cannot_write() {
    let directory = tempfile::tempdir().unwrap();
    let write = |path: &Path| problem(sample().write(path), path);

    let missing = directory.path().join("missing/c.safetensors");
    assert!(write(&missing).contains("No such file"));

    // The name is taken by a directory: all of the new file is written, then cannot be put there.
    let taken = directory.path().join("taken");
    fs::create_dir_all(taken.join("inner")).unwrap();
    assert!(write(&taken).contains("cannot be written"));
    assert_eq!(names_in(directory.path()), ["taken"]);

    assert!(write(Path::new("/proc/c.safetensors")).contains("cannot be written"));
    assert!(write(&directory.path().join("..")).contains("names no file"));

    let mut reserved = sample();
    reserved.metadata.insert("drumline.digest".into(), "0".into());
    let path = directory.path().join("c.safetensors");
    assert!(problem(reserved.write(&path), &path).contains("reserved"));
    let mut reserved = sample();
    reserved.insert(Tensor::from_values("__metadata__", [1], &[0_u8]).unwrap());
    assert!(problem(reserved.write(&path), &path).contains("__metadata__"));
    assert_eq!(names_in(directory.path()), ["taken"]);
}

#[test]
fn tensors_are_checked() {
    assert!(Tensor::from_values("a", [2, 2], &[1_u8; 3]).is_err());
    assert!(Tensor::from_values("a", [usize::MAX, 2], &[1_u8; 3]).is_err());
    let tensor = Tensor::from_values("a", [3], &[1_u8; 3]).unwrap();
    let error = tensor.values::<f32>().unwrap_err().to_string();
    assert!(error.contains("a holds u8, not f32"), "{error}");
}

/// Runs `work` on three ranks, which are threads.
fn on_three_ranks<T: Send>(work: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    local(3, |group| Ok(work(&group))).unwrap()
}

#[test]
fn all_ranks_get_what_rank_0_reads() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.safetensors");
    let here = |group: &ProcessGroup| match group.rank() {
        0 => path.clone(),
        _ => "/nowhere/else".into(), // The other hosts need not have the file.
    };

    let errors = on_three_ranks(|group| {
        Checkpoint::read_on_root(group, &here(group)).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("no such file")), "{errors:?}");

    let made = on_three_ranks(|group| {
        let mut was_asked = false;
        Checkpoint::write_on_root(group, &here(group), || {
            was_asked = true;
            Ok::<_, Error>(sample())
        })
        .unwrap();
        was_asked
    });
    assert_eq!(made, [true, false, false]);

    let read = on_three_ranks(|group| Checkpoint::read_on_root(group, &here(group)).unwrap());
    assert!(read.iter().all(|checkpoint| *checkpoint == sample()));

    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let errors = on_three_ranks(|group| {
        let error = Checkpoint::read_on_root(group, &here(group)).unwrap_err().to_string();
        group.barrier().unwrap(); // The group is fine; only the file is not.
        error
    });
    assert!(errors.iter().all(|error| error.contains("damaged")), "{errors:?}");
}

#[test]
fn all_ranks_learn_that_rank_0_could_not_write() {
    let write = |make: fn() -> drumline_group::Result<Checkpoint>| {
        on_three_ranks(|group| {
            let path = Path::new("/proc/c.safetensors");
            Checkpoint::write_on_root(group, path, make).unwrap_err().to_string()
        })
    };
    let errors = write(|| Ok(sample()));
    assert!(errors.iter().all(|error| error.contains("cannot be written")), "{errors:?}");

    let errors = write(|| {
        let problem = "no model ".repeat(10_000);
        Err(Error::argument("make", problem))
    });
    assert!(errors.iter().all(|error| error.contains("no model")), "{errors:?}");
    assert!(errors[1].len() < 5_000, "it was not cut");
}

/// A checkpoint that differs from that of any other step.
fn of_step(step: u64) -> Checkpoint {
    let mut checkpoint = sample();
    checkpoint.metadata.insert("step".into(), step.to_string());
    checkpoint
}

fn directory_with(path: &Path, steps: &[u64]) -> CheckpointDirectory {
    let directory = CheckpointDirectory::new(path).keep(NonZeroUsize::new(9).unwrap());
    directory.prepare().unwrap();
    for &step in steps {
        assert_eq!(directory.save(step, &of_step(step)).unwrap(), directory.path_of(step));
    }
    directory
}

#[test]
fn the_last_ones_are_kept() {
    let temporary = tempfile::tempdir().unwrap();
    let out = temporary.path().join("a/b");
    let directory = CheckpointDirectory::new(&out);
    assert_eq!((directory.newest().unwrap(), directory.steps().unwrap()), (None, vec![]));
    assert!(!out.exists());
    directory.prepare().unwrap();
    assert_eq!(directory.newest().unwrap(), None);
    fs::write(out.join("step-1.safetensors"), "not ours").unwrap();

    for step in [5, 70, 900, 123_456_789_012] {
        directory.save(step, &of_step(step)).unwrap();
    }
    assert_eq!(directory.steps().unwrap(), [70, 900, 123_456_789_012]);
    let found = directory.newest().unwrap().unwrap();
    assert_eq!(found.checkpoint, of_step(123_456_789_012));
    assert!(found.path.ends_with("step-123456789012.safetensors"));

    // Going on from an earlier one leaves nothing of the future that did not come to pass.
    directory.save(901, &of_step(901)).unwrap();
    assert_eq!(directory.steps().unwrap(), [70, 900, 901]);
    let one = directory.keep(NonZeroUsize::MIN);
    one.save(902, &of_step(902)).unwrap();
    assert_eq!(one.steps().unwrap(), [902]);
    drop(one); // and the lock with it
    assert_eq!(names_in(&out).len(), 2, "{:?}", names_in(&out));
}

#[test]
fn the_newest_whole_one_is_taken_and_the_others_are_named() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = directory_with(temporary.path(), &[1, 2, 3, 4]);
    let whole = fs::read(directory.path_of(4)).unwrap();
    fs::write(directory.path_of(4), &whole[..whole.len() - 1]).unwrap();
    let mut flipped = fs::read(directory.path_of(3)).unwrap();
    *flipped.last_mut().unwrap() ^= 8;
    fs::write(directory.path_of(3), flipped).unwrap();

    let Found { step, checkpoint, skipped, .. } = directory.newest().unwrap().unwrap();
    assert_eq!((step, checkpoint), (2, of_step(2)));
    assert_eq!(skipped.len(), 2);
    assert_eq!(skipped[0].path, directory.path_of(4));
    assert!(skipped[0].problem.contains("cut short"), "{skipped:?}");
    assert_eq!(skipped[1].path, directory.path_of(3));
    assert!(skipped[1].problem.contains("damaged"), "{skipped:?}");

    // Nobody begins anew because all are damaged.
    for step in [1, 2] {
        fs::write(directory.path_of(step), "").unwrap();
    }
    let text = problem(directory.newest(), temporary.path());
    for step in 1..=4 {
        assert!(text.contains(&format!("step-0000000{step}.safetensors: it is ")), "{text}");
    }
    assert!(text.contains("begin anew in another directory"), "{text}");
}

/// Made with this crate's writer, and then said to be of a later format.
#[test]
fn a_file_of_a_newer_version_is_not_skipped() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = directory_with(temporary.path(), &[1, 2]);
    let mut bytes = fs::read(directory.path_of(2)).unwrap();
    let key = br#""drumline.format":"1""#;
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() - 2;
    bytes[at] = b'2';
    fs::write(directory.path_of(2), bytes).unwrap();
    let text = problem(directory.newest(), &directory.path_of(2));
    assert!(text.contains("it has format 2, this program reads up to 1"), "{text}");
}

#[test]
fn a_directory_that_cannot_be_written_is_noticed_first() {
    let temporary = tempfile::tempdir().unwrap();
    fs::write(temporary.path().join("file"), "").unwrap();
    for path in [temporary.path().join("file"), temporary.path().join("file/out")] {
        let text = problem(CheckpointDirectory::new(&path).prepare(), &path);
        assert!(text.contains("the directory cannot be made"), "{text}");
        assert!(text.contains("choose a path that is not taken by a file"), "{text}");
    }
    let text = problem(CheckpointDirectory::new("/proc/self").prepare(), Path::new("/proc/self"));
    assert!(text.contains("no file can be written in this directory"), "{text}");
    assert_eq!(names_in(temporary.path()), ["file"]);
}

#[test]
fn another_model_is_named_tensor_by_tensor() {
    let checkpoint = sample();
    let same: Vec<ParameterSpec> = ["weight", "bias"]
        .map(|name| checkpoint.tensor(&format!("fc.{name}")).unwrap())
        .map(|t| ParameterSpec::new(t.name().strip_prefix("fc.").unwrap(), t.shape(), t.dtype()))
        .into();
    checkpoint.check("fc.", same).unwrap();
    let other = [
        ParameterSpec::new("weight", [3, 2], DType::F32),
        ParameterSpec::new("scale", [3], DType::F32),
    ];
    let misfit = checkpoint.check("fc.", other).unwrap_err();
    assert_eq!(
        misfit.to_string(),
        "the checkpoint is of another model: `weight` is f32[2, 3], the model has f32[3, 2]; \
         `scale` f32[3] is missing; the model has no `bias` f64[1] (drumline explain checkpoints)"
    );
    let many = (0..20).map(|i| ParameterSpec::new(format!("p{i}"), [1], DType::F32));
    let text = Checkpoint::default().check("", many).unwrap_err().to_string();
    assert!(
        text.contains("`p7`") && text.ends_with("; and 12 more (drumline explain checkpoints)"),
        "{text}"
    );
}

#[test]
fn all_ranks_share_a_directory_that_only_rank_0_sees() {
    let temporary = tempfile::tempdir().unwrap();
    let out = temporary.path().join("out");
    let here = |group: &ProcessGroup| {
        CheckpointDirectory::new(if group.rank() == 0 { &out } else { Path::new("/nowhere/else") })
    };
    on_three_ranks(|group| {
        let directory = here(group);
        directory.prepare_on_root(group).unwrap();
        assert_eq!(directory.newest_on_root(group).unwrap(), None);
        for step in [3, 4] {
            let make = || Ok::<_, Error>(of_step(step));
            directory.save_on_root(group, step, make).unwrap();
        }
    });
    fs::write(out.join("step-00000004.safetensors"), "").unwrap();
    for (rank, found) in on_three_ranks(|group| here(group).newest_on_root(group).unwrap().unwrap())
        .into_iter()
        .enumerate()
    {
        assert_eq!((found.step, found.checkpoint), (3, of_step(3)));
        assert_eq!(found.skipped.len(), usize::from(rank == 0));
    }

    let unwritable = CheckpointDirectory::new("/proc/self");
    let errors = on_three_ranks(|group| {
        let prepared = unwritable.prepare_on_root(group).unwrap_err().to_string();
        let saved = unwritable.save_on_root(group, 1, || Ok::<_, Error>(sample())).unwrap_err();
        [prepared, saved.to_string()]
    });
    for [prepared, saved] in errors {
        assert!(prepared.starts_with("checkpoint /proc/self: "), "{prepared}");
        assert!(prepared.contains("no file can be written"), "{prepared}");
        assert!(saved.starts_with("checkpoint /proc/self/step-00000001.safetensors: "), "{saved}");
        assert_eq!(saved.matches("step-00000001").count(), 1, "{saved}");
    }
}

/// A pipe that nobody reads or writes, among the checkpoints of a directory.
fn make_pipe(path: &Path) {
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
}

/// Runs `work` on a thread, and fails if it hangs: opening a pipe may wait for ever.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, ended) = mpsc::channel();
    thread::spawn(move || drop(sender.send(work())));
    ended.recv_timeout(Duration::from_secs(30)).expect("it hangs, or has panicked")
}

#[test]
fn pipes_and_links_among_checkpoints_hold_up_nothing() {
    let temporary = tempfile::tempdir_in("/tmp").unwrap(); // a socket's path is at most 107 bytes long
    let at = |name: &str| temporary.path().join(name);
    let directory = CheckpointDirectory::new(temporary.path());
    make_pipe(&at(".step-00000003.left.partial"));
    fs::write(at("of-somebody"), "mine").unwrap();
    std::os::unix::fs::symlink(at("of-somebody"), at(".step-00000003.link.partial")).unwrap();

    let saving = directory.clone();
    in_time(move || saving.prepare().and_then(|()| saving.save(3, &sample()))).unwrap();
    assert_eq!(fs::read_to_string(at("of-somebody")).unwrap(), "mine");
    // They are not a save's, so they stay.
    assert!(
        at(".step-00000003.left.partial").exists() && at(".step-00000003.link.partial").exists()
    );

    make_pipe(&directory.path_of(4));
    std::os::unix::net::UnixListener::bind(directory.path_of(5)).unwrap();
    let reading = directory.clone();
    let found = in_time(move || reading.newest()).unwrap().unwrap();
    assert_eq!((found.step, &found.checkpoint), (3, &sample()));
    for (skipped, step) in found.skipped.iter().zip([5, 4]) {
        assert_eq!(skipped.path, directory.path_of(step));
        assert!(skipped.problem.contains("it is no regular file"), "{}", skipped.problem);
    }
    assert_eq!(found.skipped.len(), 2);

    let path = directory.path_of(4);
    let read = path.clone();
    let problem = problem(in_time(move || Checkpoint::read(&read)), &path);
    assert!(problem.contains("it is no regular file"), "{problem}");
}

/// Holes take no place on the disk, so a small file may claim more than any memory has.
#[test]
fn a_file_of_holes_is_skipped() {
    const BYTES: u64 = 8 << 40;
    let temporary = tempfile::tempdir().unwrap();
    let directory = CheckpointDirectory::new(temporary.path());
    directory.save(1, &sample()).unwrap();
    let metadata = r#""__metadata__":{"drumline.digest":"0","drumline.format":"1"}"#;
    let tensor = format!(r#""x":{{"dtype":"U8","shape":[{BYTES}],"data_offsets":[0,{BYTES}]}}"#);
    let header = format!("{{{metadata},{tensor}}}");
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    fs::write(directory.path_of(2), &bytes).unwrap();
    let file = fs::OpenOptions::new().write(true).open(directory.path_of(2)).unwrap();
    file.set_len(bytes.len() as u64 + BYTES).unwrap();

    let found = directory.newest().unwrap().unwrap();
    assert_eq!((found.step, found.skipped.len()), (1, 1));
    assert_eq!(found.skipped[0].path, directory.path_of(2));
    let problem = &found.skipped[0].problem;
    assert!(problem.contains("8796093022"), "{problem}");
    assert!(problem.contains("free in memory"), "{problem}");
}
