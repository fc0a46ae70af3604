//! Side by side with a real torch process.
//!
//! The interpreter is that of `DRUMLINE_TEST_PYTHON`, or the one that `make torch-venv` installs;
//! without either these tests say that they were skipped. `tests/store_protocol.rs` and
//! `tests/store_file.rs` hold what torch has said and written, and need no torch.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use drumline_store::store::{BYTES_MAX, FileStore, Store, tcp::TcpStore};

use super::{HANG, SOON, semantics::semantics};

/// A child that does not outlive its test.
struct Torch(Child);

impl Torch {
    /// Starts `stores.py` with `arguments`; `None` if there is no torch here.
    fn start(arguments: &[&str]) -> Option<Torch> {
        let python = interpreter()?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/torch/stores.py");
        let mut command = Command::new(python);
        command.arg(script).args(arguments).env("OMP_NUM_THREADS", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Some(Torch(command.spawn().unwrap()))
    }

    fn finish(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success(), "see torch's output above");
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn interpreter() -> Option<PathBuf> {
    if let Some(python) = std::env::var_os("DRUMLINE_TEST_PYTHON") {
        return Some(python.into());
    }
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/torch-venv");
    // Written last, so one that is half installed does not count.
    if !venv.join("installed").exists() {
        println!("skipped: there is no torch; `make torch-venv` installs it");
        return None;
    }
    Some(venv.join("bin/python"))
}

#[test]
fn torch_is_a_client_of_our_server() {
    let store = TcpStore::host("127.0.0.1", 0).unwrap();
    let port = store.address().unwrap().port().to_string();
    let Some(torch) = Torch::start(&["client", &port]) else { return };
    together(&store);
    store.wait_for_workers(2, HANG).unwrap();
    torch.finish();
    assert!(store.wait_for_departure(HANG));
    // What its session has left behind.
    assert_eq!(store.get("t/n").unwrap(), b"-2");
    assert_eq!(store.queue_len("t/q").unwrap(), 0);
}

#[test]
fn torch_is_the_server_of_our_client() {
    let Some(mut torch) = Torch::start(&["server"]) else { return };
    let mut port = String::new();
    BufReader::new(torch.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
    let store = TcpStore::connect("127.0.0.1", port.trim().parse().unwrap(), HANG).unwrap();
    semantics(&store);
    let before = store.num_keys().unwrap();
    assert_eq!(store.list_keys().unwrap().len(), before);
    store.wait_for_workers(1, HANG).unwrap();
    torch.0.stdin.as_mut().unwrap().write_all(b"join\n").unwrap();
    // The count of workers is no key of a user's.
    assert_eq!(store.num_keys().unwrap(), before);
    assert_eq!(store.list_keys().unwrap().len(), before);
    torch.finish();
    let error = store.get("key").unwrap_err().to_string();
    assert!(error.contains("has probably exited"), "{error}");
}

#[test]
fn torch_shares_a_file_with_us() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    for we_are_last in [true, false] {
        let store = FileStore::with_limit(&path, 2, BYTES_MAX).unwrap();
        let Some(torch) = Torch::start(&["file", path.to_str().unwrap()]) else { return };
        together(&store);
        if we_are_last {
            // What nobody but us understands does not disturb torch.
            store.queue_push("q", b"item").unwrap();
            torch.finish();
            assert_eq!(store.get("t/n").unwrap(), b"-2");
            assert_eq!(store.multi_get(&["t/x", "t/k"]).unwrap(), [&b"1"[..], b"vwx"]);
            assert_eq!(store.queue_pop("q").unwrap(), b"item");
            assert!(path.exists());
            drop(store);
        } else {
            drop(store);
            torch.finish();
        }
        assert!(!path.exists(), "whoever is last deletes the file");
    }
}

/// Our part of what `together` in stores.py does at the same time.
fn together(store: &dyn Store) {
    store.set_timeout(HANG);
    store.set("both/number", b"0").unwrap();
    // torch appends nothing where the key already holds exactly what it appends.
    store.set("both/log", b"begin").unwrap();
    store.set("from/drumline", &[b'd'; 100_001]).unwrap();
    assert!(store.get("from/torch").unwrap() == [b't'; 100_001]);
    store.barrier("both/start", 2, HANG).unwrap();
    for i in 0..100_usize {
        store.add("both/sum", 1).unwrap();
        store.append("both/log", b"d").unwrap();
        loop {
            let present = store.get("both/number").unwrap();
            let number: u32 = str::from_utf8(&present).unwrap().parse().unwrap();
            let next = (number + 1).to_string();
            if store.compare_set("both/number", &present, next.as_bytes()).unwrap()
                == next.as_bytes()
            {
                break;
            }
        }
        // Of many lengths, past the ends of pages.
        store.set(&format!("both/mine{i}"), &vec![b'd'; 74 * i]).unwrap();
        assert!(store.delete_key(&format!("both/mine{i}")).unwrap());
    }
    store.barrier("both/end", 2, HANG).unwrap();
    assert_eq!(store.get("both/sum").unwrap(), b"200");
    let mut log = store.get("both/log").unwrap().split_off(b"begin".len());
    log.sort_unstable();
    assert_eq!(log, [[b'd'; 100], [b't'; 100]].concat());
    assert!(!store.list_keys().unwrap().iter().any(|key| key.starts_with("both/mine")));
}

/// Run by hand, to record its bytes: see fixtures/tcpstore/README.md.
#[test]
#[ignore = "needs a server elsewhere, at the port TCPSTORE_PORT"]
fn a_short_session_to_record() {
    let port = std::env::var("TCPSTORE_PORT").unwrap().parse().unwrap();
    let store = TcpStore::connect("127.0.0.1", port, HANG).unwrap();
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k").unwrap(), b"v");
    assert_eq!(store.add("n", -3).unwrap(), -3);
    assert_eq!(store.compare_set("c", b"", b"1").unwrap(), b"1");
    assert_eq!(store.compare_set("c", b"x", b"2").unwrap(), b"1");
    assert!(store.check(&["k", "c"]).unwrap());
    store.wait(&["k", "absent"], SOON).unwrap_err();
    store.append("k", b"w").unwrap();
    store.multi_set(&[("a", b"1"), ("b", b"")]).unwrap();
    assert_eq!(store.multi_get(&["a", "b", "k"]).unwrap(), [&b"1"[..], b"", b"vw"]);
    store.queue_push("q", b"item").unwrap();
    assert_eq!(store.queue_len("q").unwrap(), 1);
    assert_eq!(store.queue_pop("q").unwrap(), b"item");
    assert_eq!(store.queue_try_pop("q").unwrap(), None);
    store.barrier("one", 1, HANG).unwrap();
    store.barrier("two", 2, SOON).unwrap_err();
    assert!(store.delete_key("k").unwrap());
    assert_eq!(store.num_keys().unwrap(), 6);
    let second = TcpStore::connect("127.0.0.1", port, HANG).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(store.get("later").unwrap(), b"now"));
        // Only for the record: so that the waiting comes first.
        thread::sleep(Duration::from_millis(100));
        second.set("later", b"now").unwrap();
    });
    store.wait_for_workers(1, HANG).unwrap();
}
