//! Checkpoints on a disk: what comes back, what is refused, and what is left behind.

#![allow(clippy::unwrap_used)]

use std::{fs, path::Path};

use drumline::{
    Error, ProcessGroup,
    checkpoint::{Checkpoint, Tensor},
};
use proptest::prelude::*;
use safetensors::SafeTensors;

fn sample() -> Checkpoint {
    let mut checkpoint = Checkpoint::default();
    for tensor in [
        Tensor::from_values("fc.weight", [2, 3], &[1.5_f32, -2.0, 0.0, f32::MIN, 5.0, 6.0]),
        Tensor::from_values("fc.bias", [1], &[0.25_f64]),
        Tensor::from_values("labels \"quoted\" ü", [3], &[1_u8, 2, 3]),
        Tensor::from_values("steps", [], &[i64::MIN]),
        Tensor::from_values::<f32>("nothing", [0, 7], &[]),
    ] {
        checkpoint.insert(tensor.unwrap());
    }
    checkpoint.metadata.insert("epoch".into(), "3".into());
    checkpoint.metadata.insert("history".into(), "0.5\n0.25\t\"\\".into());
    checkpoint
}

fn problem(result: drumline::Result<impl std::fmt::Debug>, path: &Path) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
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
    assert_eq!(metadata["drumline.digest"], format!("{:016x}", sample().digest()));
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
    assert!(problem(Checkpoint::read(directory.path()), directory.path()).contains("not a file"));

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

/// A flipped bit anywhere is an error (or lies in a part that means nothing, such as a space).
#[test]
fn damage_is_noticed_everywhere() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("c.safetensors");
    sample().write(&path).unwrap();
    let good = fs::read(&path).unwrap();
    for index in 0..good.len() {
        let mut bad = good.clone();
        bad[index] ^= 1 << (index % 8);
        fs::write(&path, &bad).unwrap();
        if let Ok(read) = Checkpoint::read(&path) {
            assert_eq!(read, sample(), "byte {index} changed the content");
        }
    }
}

proptest! {
    /// Sizes and offsets from a hostile header: an error, never a panic, never a huge allocation.
    #[test]
    fn survives_any_header(
        shape in prop::collection::vec(any::<u64>(), 0..3),
        offsets in prop::array::uniform2(prop_oneof![0_u64..100, any::<u64>()]),
        dtype in prop::sample::select(vec!["U8", "F32", "F64", "I64", "F16", ""]),
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
    std::thread::scope(|threads| {
        let groups = ProcessGroup::local_world(3).unwrap();
        let work = &work;
        let running: Vec<_> =
            groups.into_iter().map(|group| threads.spawn(move || work(&group))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
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
    let write = |make: fn() -> drumline::Result<Checkpoint>| {
        on_three_ranks(|group| {
            let path = Path::new("/proc/c.safetensors");
            Checkpoint::write_on_root(group, path, make).unwrap_err().to_string()
        })
    };
    let errors = write(|| Ok(sample()));
    assert!(errors.iter().all(|error| error.contains("cannot be written")), "{errors:?}");

    let errors = write(|| {
        let problem = "no model ".repeat(10_000);
        Err(Error::InvalidArgument { operation: "make", problem })
    });
    assert!(errors.iter().all(|error| error.contains("no model")), "{errors:?}");
    assert!(errors[1].len() < 5_000, "it was not cut");
}
