//! The file store's bytes, without torch: what torch wrote, what a killed process left, and what is
//! no store at all.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use drumline_error::ErrorKind;
use drumline_store::store::{FileStore, Store};
use drumline_testing::itself;
use tempfile::TempDir;

/// No test here takes that long unless something hangs.
const HANG: Duration = Duration::from_secs(60);

const TORCH: &[u8] = include_bytes!("../fixtures/filestore/torch.bin");

fn fresh() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    (directory, path)
}

fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap().to_le_bytes();
    [&length(key)[..], key, &length(value), value].concat()
}

/// Reads records as torch does, and fails where torch would wait for ever.
fn records(mut bytes: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut take = || {
        let (length, rest) = bytes.split_first_chunk().expect("a length is cut off");
        let length = u32::from_le_bytes(*length) as usize;
        let (taken, rest) = rest.split_at_checked(length).expect("a text is cut off");
        bytes = rest;
        (taken.to_vec(), rest.is_empty())
    };
    let mut records = Vec::new();
    loop {
        let key = take().0;
        let (value, is_last) = take();
        records.push((key, value));
        if is_last {
            return records;
        }
    }
}

#[test]
fn what_torch_wrote_is_read() {
    let (_directory, path) = fresh();
    fs::write(&path, TORCH).unwrap();
    let store = FileStore::open(&path, 2).unwrap();
    let keys = ["", "b/last_member", "b/num_members", "c", "k", "n", "y"];
    assert_eq!(store.list_keys().unwrap(), keys);
    let ascii: Vec<u8> = (0..128).collect();
    let values = [&ascii[..], b"1", b"1", b"2", b"vw", b"-2", b""];
    assert_eq!(store.multi_get(&keys).unwrap(), values);
    store.barrier("b", 1, Duration::ZERO).unwrap();
    // torch's handle was closed, and ours is the second of two.
    drop(store);
    assert!(!path.exists());
}

#[test]
fn the_same_calls_write_the_same_bytes_as_torch() {
    let (_directory, path) = fresh();
    let store = FileStore::open(&path, 2).unwrap();
    store.set("k", b"v").unwrap();
    store.set("", &(0..128).collect::<Vec<u8>>()).unwrap();
    store.add("n", 5).unwrap();
    store.add("n", -7).unwrap();
    store.compare_set("c", b"", b"1").unwrap();
    store.compare_set("c", b"1", b"2").unwrap();
    store.compare_set("c", b"1", b"3").unwrap();
    store.compare_set("d", b"x", b"y").unwrap();
    store.append("k", b"w").unwrap();
    store.multi_set(&[("x", b"1"), ("y", b"")]).unwrap();
    store.barrier("b", 1, HANG).unwrap();
    store.delete_key("x").unwrap();
    drop(store);
    assert_eq!(records(&fs::read(&path).unwrap()), records(TORCH));
    assert_eq!(fs::read(&path).unwrap(), TORCH);
}

/// torch writes a record in four pieces, and can be killed between any two bytes of them.
#[test]
fn a_record_that_torch_left_incomplete_is_dropped() {
    let before = [record(b"refcount/", b"1"), record(b"/old", b"1")].concat();
    let torn = record(b"/torn", &[b'x'; 100]);
    let behind = [record(b"/late", b"2"), record(b"-/old", b"")].concat();
    let mut swallowed = 0;
    for cut in 1..torn.len() {
        for behind in [&b""[..], &behind] {
            let (_directory, path) = fresh();
            fs::write(&path, &before).unwrap();
            let early = FileStore::open(&path, 0).unwrap();
            let torn = &torn[..cut];
            let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
            file.write_all(&[torn, behind].concat()).unwrap();
            // Where the lengths swallow what is behind them, they leave no trace of themselves.
            let is_swallowed = !is_incomplete(&[torn, behind].concat());
            swallowed += usize::from(is_swallowed);
            let late = FileStore::open(&path, 0).unwrap();
            for store in [&early, &late] {
                assert!(!store.check(&["torn"]).unwrap() || is_swallowed, "cut at {cut}");
            }
            if !is_swallowed {
                let is_whole = behind.is_empty();
                assert_eq!(early.check(&["old"]).unwrap(), is_whole, "cut at {cut}");
                assert_eq!(late.check(&["late"]).unwrap(), !is_whole, "cut at {cut}");
            }
            late.set("new", b"3").unwrap();
            assert_eq!(early.get("new").unwrap(), b"3");
            records(&fs::read(&path).unwrap());
        }
    }
    assert!(swallowed < 40, "{swallowed} cuts show nothing");
}

/// Whether the first record of `bytes` goes on behind their end.
fn is_incomplete(bytes: &[u8]) -> bool {
    let behind = |bytes: &[u8]| {
        let length = u32::from_le_bytes(bytes.get(..4)?.try_into().unwrap());
        bytes.get(4 + length as usize..).map(<[u8]>::to_vec)
    };
    behind(bytes).and_then(|rest| behind(&rest)).is_none()
}

#[test]
fn a_reader_alone_repairs_the_file_for_torch() {
    let (_directory, path) = fresh();
    let store = FileStore::open(&path, 0).unwrap();
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(&record(b"/torn", b"value")[..12]).unwrap();
    assert!(!store.check(&["torn"]).unwrap());
    assert_eq!(records(&fs::read(&path).unwrap()).len(), 1);
}

/// How long the values of the one that is killed are: the kernel writes them page by page.
const KILLED_VALUE_BYTES: usize = 3 << 20;

/// Not a test by itself: the process that the next one kills.
#[test]
#[ignore = "runs until it is killed"]
fn a_writer_to_be_killed() {
    let path = std::env::var_os("DRUMLINE_TEST_FILE").unwrap();
    let store = FileStore::with_limit(Path::new(&path), 0, usize::MAX).unwrap();
    for round in 0.. {
        let byte = b'a' + round % 26;
        store.set("big", &vec![byte; KILLED_VALUE_BYTES - usize::from(round)]).unwrap();
    }
}

#[test]
fn a_writer_that_is_killed_leaves_a_whole_file() {
    for round in 0..24 {
        let (_directory, path) = fresh();
        let survivor = FileStore::open(&path, 0).unwrap();
        let mut writer = itself("file::a_writer_to_be_killed")
            .env("DRUMLINE_TEST_FILE", &path)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        survivor.set_timeout(HANG);
        let start = Instant::now();
        while fs::metadata(&path).unwrap().len() < 2 * KILLED_VALUE_BYTES as u64 {
            assert!(start.elapsed() < HANG);
            thread::yield_now();
        }
        // At another point of its work each time.
        thread::sleep(Duration::from_micros(137 * round));
        writer.kill().unwrap();
        writer.wait().unwrap();

        records(&fs::read(&path).unwrap());
        let value = survivor.get("big").unwrap();
        assert!(value.len() > KILLED_VALUE_BYTES - 256);
        assert!(value.iter().all(|byte| *byte == value[0]), "a mixture of two values");
        survivor.set("after", b"1").unwrap();
        let late = FileStore::open(&path, 0).unwrap();
        assert_eq!(late.get("after").unwrap(), b"1");
        assert!(late.get("big").unwrap() == value);
    }
}

#[test]
fn many_handles_do_not_disturb_each_other() {
    let (_directory, path) = fresh();
    const HANDLES: usize = 8;
    thread::scope(|scope| {
        for _ in 0..HANDLES {
            scope.spawn(|| {
                let store = FileStore::open(&path, HANDLES).unwrap();
                for _ in 0..50 {
                    store.add("sum", 1).unwrap();
                    store.append("log", b"x").unwrap();
                }
                store.barrier("end", HANDLES, HANG).unwrap();
                assert_eq!(store.get("sum").unwrap(), b"400");
                assert_eq!(store.get("log").unwrap().len(), 400);
            });
        }
    });
    assert!(!path.exists());
}

#[test]
fn the_last_of_the_world_deletes_the_file() {
    let (_directory, path) = fresh();
    let one = FileStore::open(&path, 2).unwrap();
    let clone = one.try_clone().unwrap();
    drop(one);
    // The clone keeps its handle open.
    clone.set("k", b"v").unwrap();
    drop(clone);
    assert!(path.exists(), "one of two has come");
    let two = FileStore::open(&path, 2).unwrap();
    assert_eq!(two.get("k").unwrap(), b"v");
    drop(two);
    assert!(!path.exists());

    drop(FileStore::open(&path, 0).unwrap());
    assert!(path.exists(), "a world of nobody knows of");
}

/// Whoever opens the file while the last handle is being closed gets a new one, or keeps this one.
#[test]
fn nobody_is_left_with_a_file_that_is_just_deleted() {
    let (_directory, path) = fresh();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..500 {
                    let store = FileStore::open(&path, 1).unwrap();
                    store.set("k", b"v").unwrap_or_else(|error| panic!("round {round}: {error}"));
                    assert_eq!(store.get("k").unwrap(), b"v");
                }
            });
        }
    });
    assert!(!path.exists());
}

#[test]
fn what_is_no_store_is_left_alone() {
    let (directory, path) = fresh();
    for content in [&b"rank,loss\n0,1.5\n"[..], b"x", &[0xff; 1000]] {
        fs::write(&path, content).unwrap();
        let error = FileStore::open(&path, 1).unwrap_err().to_string();
        assert!(error.contains("no store's") && error.contains("store"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
    let nowhere = directory.path().join("no/such/directory");
    let error = FileStore::open(&nowhere, 1).unwrap_err().to_string();
    assert!(error.contains("no/such/directory") && error.contains("must exist"), "{error}");
    assert!(FileStore::open(directory.path(), 1).is_err());
}

#[test]
fn a_file_that_goes_away_is_an_error_for_everyone() {
    let (_directory, path) = fresh();
    let store = FileStore::open(&path, 2).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.get("never"));
        fs::remove_file(&path).unwrap();
        let error = waiter.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Store, "{error}");
        assert!(error.to_string().contains("has been deleted"), "{error}");
    });
    assert!(store.set("k", b"").is_err());
    // Not even an empty file of that name comes back.
    drop(store);
    assert!(!path.exists());

    let store = FileStore::open(&path, 2).unwrap();
    store.set("k", b"value").unwrap();
    fs::write(&path, b"").unwrap();
    let error = store.set("k", b"").unwrap_err().to_string();
    assert!(error.contains("shorter"), "{error}");
}
