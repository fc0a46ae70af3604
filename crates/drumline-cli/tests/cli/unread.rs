//! A launcher whose output nobody reads: a terminal that is stopped, a pager that waits, a pipe that is full.

use std::{
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use drumline::store::{Store, tcp::TcpStore};
use rustix::{fs::OFlags, process::Signal};
use tempfile::TempDir;

use crate::{
    hosts::Town,
    launch::{Launch, Started, eventually},
};

/// A pipe that is full, and a place for what ranks leave.
struct Unread {
    place: PathBuf,
    pipe: File,
}

impl Unread {
    fn at(place: &Path) -> Unread {
        let path = place.join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let flags = OFlags::NONBLOCK.bits() as i32;
        let mut pipe =
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).unwrap();
        let full = loop {
            if let Err(error) = pipe.write(&[b'.'; 512]) {
                break error.kind();
            }
        };
        assert_eq!(full, ErrorKind::WouldBlock);
        Unread { place: place.to_owned(), pipe }
    }

    /// Starts `launch` with this pipe as stdout and stderr.
    fn start(&self, launch: Launch) -> Started {
        let mut command = Command::new("sh");
        let script = format!("exec \"$@\" >{0} 2>&1", self.file("pipe"));
        let drumline = env!("CARGO_BIN_EXE_drumline");
        command.args(["-c", &script, "sh", "env", "--default-signal", drumline, "run"]);
        launch.start_as(command)
    }

    /// `ranks` shells that run `script`, with `$PLACE` set.
    fn run(&self, options: &[&str], ranks: &str, script: &str) -> Started {
        let shell = ["--nproc-per-node", ranks, "--", "sh", "-c", script];
        let launch = Launch::new(options.iter().chain(&shell));
        self.start(launch.variable("PLACE", self.place.to_str().unwrap()))
    }

    fn file(&self, name: &str) -> String {
        self.place.join(name).to_str().unwrap().to_owned()
    }

    /// Waits until a rank has left this file, and returns what it says.
    fn wait_for(&self, name: &str) -> String {
        let read = || fs::read_to_string(self.file(name)).unwrap_or_default();
        eventually(name, || read().ends_with('\n'));
        read().trim().to_owned()
    }

    /// Reads until the launcher has ended and all is read. Returns what it has written.
    fn read(&mut self, launcher: &mut Started) -> String {
        let (mut bytes, mut chunk) = (Vec::new(), vec![0; 64 * 1024]);
        loop {
            let is_running = launcher.is_running();
            match self.pipe.read(&mut chunk) {
                Ok(count) => bytes.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock && is_running => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        let text = String::from_utf8(bytes).unwrap();
        text.trim_start_matches('.').to_owned()
    }
}

/// Connects a few times, and says what belongs to no protocol of a job.
fn knock(address: SocketAddr) {
    for _ in 0..5 {
        let mut stranger = TcpStream::connect(address).unwrap();
        let _ = stranger.write_all(b"GET / HTTP/1.1\r\n\r\n");
        let _ = stranger.read(&mut [0]);
    }
}

#[test]
fn a_job_ends_by_itself_with_its_code_and_starts_again_before() {
    let place = TempDir::new().unwrap();
    let unread = Unread::at(place.path());
    let restarts = ["--max-restarts", "2", "--restart-delay", "0"];
    let script = "echo world >> $PLACE/worlds; [ $RANK = 1 ] && exit 3; exec sleep 1000";
    let ended = unread.run(&restarts, "2", script).end();
    assert_eq!(ended.code, 3);
    assert_eq!(fs::read_to_string(unread.file("worlds")).unwrap().lines().count(), 6);
}

#[test]
fn a_stranger_at_the_door_stops_no_store_and_one_signal_ends_the_job() {
    let place = TempDir::new().unwrap();
    let unread = Unread::at(place.path());
    let script = "[ $RANK = 0 ] && { echo $MASTER_PORT > $PLACE/port; exec yes; }; exec sleep 1000";
    let launcher = unread.run(&[], "2", script);
    let port = unread.wait_for("port").parse().unwrap();
    knock(([127, 0, 0, 1], port).into());
    // The store lives in the launcher.
    let store = TcpStore::connect("127.0.0.1", port, Duration::from_secs(60)).unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key").unwrap(), b"value");
    drop(store);
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.end().code, 128 + 15);
}

#[test]
fn who_reads_slowly_gets_everything_whatever_the_job_has_become_meanwhile() {
    let place = TempDir::new().unwrap();
    let mut unread = Unread::at(place.path());
    let report = unread.file("report");
    let restarts = ["--max-restarts", "1", "--restart-delay", "0", "--report", &report];
    // The first world ends with its last lines in a pipe, the second one waits for the reader.
    let script = "seq 1 5000; echo words >&2; [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3
        echo done > $PLACE/second; seq 1 100000; exit 4";
    let mut launcher = unread.run(&restarts, "1", script);
    unread.wait_for("second");
    let text = unread.read(&mut launcher);
    assert_eq!(launcher.end().code, 4);
    let ranks = text.lines().filter_map(|line| line.strip_prefix("[0] "));
    let numbers: Vec<u32> = ranks.filter_map(|number| number.parse().ok()).collect();
    assert!(numbers.iter().copied().eq((1..=5000).chain(1..=5000).chain(1..=100_000)));
    assert_eq!(text.matches("[0] words\n").count(), 2, "{}", &text[text.len() - 2000..]);
    for line in ["exited with code 3", "restart 1 of 1", "exited with code 4"] {
        assert_eq!(text.matches(line).count(), 1, "{line}");
    }
}

/// After one signal the code is that of the failure. Two end the launcher at once, whatever it does.
#[test]
fn a_signal_ends_the_wait_for_who_reads_what_ranks_wrote() {
    for (signals, codes) in
        [(&[Signal::TERM][..], [3, 3]), (&[Signal::TERM, Signal::INT], [130, 143])]
    {
        let place = TempDir::new().unwrap();
        let unread = Unread::at(place.path());
        let report = unread.file("report");
        let launcher = unread.run(&["--report", &report], "1", "echo words; exit 3");
        eventually("the job is over", || Path::new(&report).exists());
        let files = || fs::read_dir(launcher.directory.path()).unwrap().count();
        eventually("its files are removed", || files() == 0);
        signals.iter().for_each(|&signal| launcher.signal(signal));
        let code = launcher.end().code;
        assert!(codes.contains(&code), "{code} after {signals:?}");
    }
}

#[test]
fn hosts_stay_together_although_nobody_reads_the_first_one_and_a_stranger_knocks() {
    let Some(town) = Town::of(2) else { return };
    let unread = Unread::at(town.shared.path());
    let meeting = town.at_first_host("2");
    // Far longer than a host may be silent.
    let script = "echo up > $PLACE/up$GROUP_RANK; [ $WORLD_SIZE = 2 ] || exit 9; sleep 7";
    let place = town.shared.path().to_str().unwrap();
    let shell = |host| meeting.shell(host, &[], script).variable("PLACE", place);
    let first = unread.start(shell(0));
    let second = shell(1).start();
    for host in ["up0", "up1"] {
        unread.wait_for(host);
    }
    let endpoint = town.network.endpoint(0, 29400).parse().unwrap();
    town.network.within(Some(1), || knock(endpoint));
    for host in [first, second].map(Started::end) {
        assert_eq!(host.code, 0, "{}", host.stderr);
    }
}
