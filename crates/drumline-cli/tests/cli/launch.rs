//! A `drumline run` with real processes. Whatever a test does, no process and no file may be left.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs,
    io::Read,
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use drumline_testing::network::{self, Network};
pub(crate) use drumline_testing::{HANG, eventually};

/// A `drumline run` in a directory of its own. A variable marks all its processes.
pub(crate) struct Launch {
    pub(crate) args: Vec<OsString>,
    pub(crate) variables: Vec<(&'static str, OsString)>,
    pub(crate) directory: TempDir,
    pub(crate) marker: String,
    /// What leads to the host of the job on which it runs.
    pub(crate) enters: Option<Command>,
}

/// A `drumline run` that has been started.
pub(crate) struct Started {
    pub(crate) child: Child,
    /// Whether the child is `nsenter`, and the launcher its child.
    is_on_host: bool,
    pub(crate) started: Instant,
    pub(crate) chunks: Receiver<Vec<u8>>,
    /// What has come out of its stdout.
    pub(crate) printed: Vec<u8>,
    pub(crate) stderr: JoinHandle<Vec<u8>>,
    pub(crate) directory: TempDir,
    pub(crate) marker: String,
}

pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
    pub(crate) stderr_bytes: Vec<u8>,
    pub(crate) took: Duration,
}

impl Launch {
    pub(crate) fn new(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Launch {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Launch {
            args: args.into_iter().map(|arg| arg.as_ref().to_owned()).collect(),
            variables: Vec::new(),
            directory: TempDir::new().unwrap(),
            marker: format!("DRUMLINE_TEST_MARKER={}.{count}.", std::process::id()),
            enters: None,
        }
    }

    /// The same on a host, in a directory that this host sees.
    pub(crate) fn on(self, network: &Network, host: usize, directory: TempDir) -> Launch {
        Launch { enters: Some(network.on(host, directory.path())), directory, ..self }
    }

    /// Starts `ranks` shells that run `script`.
    pub(crate) fn script(ranks: usize, script: &str) -> Started {
        Launch::new(["--nproc-per-node", &ranks.to_string(), "--", "sh", "-c", script]).start()
    }

    pub(crate) fn variable(mut self, name: &'static str, value: &str) -> Launch {
        self.variables.push((name, value.into()));
        self
    }

    pub(crate) fn start(self) -> Started {
        // Tests may themselves run with signals ignored, as background jobs of a shell do, and
        // the launcher leaves an ignored signal ignored.
        let mut command = Command::new("env");
        command.args(["--default-signal", env!("CARGO_BIN_EXE_drumline"), "run"]);
        self.start_as(command)
    }

    pub(crate) fn start_as(self, command: Command) -> Started {
        let (name, value) = self.marker.split_once('=').unwrap();
        let is_on_host = self.enters.is_some();
        let mut command = match self.enters {
            Some(mut enters) => {
                enters.arg(command.get_program()).args(command.get_args());
                enters
            }
            None => command,
        };
        let mut child = command
            .args(&self.args)
            .env_remove("OMP_NUM_THREADS")
            .env_remove("GLIBC_TUNABLES")
            .env_remove("DRUMLINE_DISABLE_RSEQ")
            .env_remove("RUST_LOG")
            .env_remove("NOTIFY_SOCKET")
            .env_remove("TORCHELASTIC_HEALTH_CHECK_PORT")
            .env_remove("TORCHELASTIC_ENABLE_FILE_TIMER")
            .env_remove("TORCHELASTIC_TIMER_FILE")
            .env_remove("DRUMLINE_SECURITY")
            .env_remove("DRUMLINE_SECRET")
            .env_remove("DRUMLINE_SECRET_FILE")
            .env("TMPDIR", self.directory.path())
            .env(name, value)
            .envs(self.variables)
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (sender, chunks) = mpsc::channel();
        thread::spawn(move || {
            let mut chunk = vec![0; 64 * 1024];
            while let Ok(count @ 1..) = stdout.read(&mut chunk) {
                let _ = sender.send(chunk[..count].to_vec());
            }
        });
        Started {
            child,
            is_on_host,
            started: Instant::now(),
            chunks,
            printed: Vec::new(),
            stderr: thread::spawn(move || {
                let mut text = Vec::new();
                stderr.read_to_end(&mut text).unwrap();
                text
            }),
            directory: self.directory,
            marker: self.marker,
        }
    }
}

impl Started {
    /// Waits until stdout has contained `text` `count` times.
    pub(crate) fn wait_for(&mut self, text: &str, count: usize) {
        while self.printed.windows(text.len()).filter(|w| *w == text.as_bytes()).count() < count {
            let chunk = self.chunks.recv_timeout(HANG).expect("the text does not come");
            self.printed.extend(chunk);
        }
    }

    /// Whether stdout has contained `text` so far.
    pub(crate) fn has_printed(&mut self, text: &str) -> bool {
        self.printed.extend(self.chunks.try_iter().flatten());
        self.printed.windows(text.len()).any(|w| w == text.as_bytes())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        match self.is_on_host {
            true => network::signal(&self.child, signal),
            false => drop(kill_process(Pid::from_child(&self.child), signal)),
        }
    }

    /// The launcher; `None` while `nsenter` has not started it.
    pub(crate) fn pid(&self) -> Option<Pid> {
        match self.is_on_host {
            true => network::children(&self.child).into_iter().next(),
            false => Some(Pid::from_child(&self.child)),
        }
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the launcher, and returns its exit code as a shell would tell it.
    pub(crate) fn wait(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        while self.is_running() {
            if self.started.elapsed() > HANG {
                // Its keeper ends the workers.
                self.child.kill().unwrap();
                panic!("the launcher hangs");
            }
            thread::sleep(Duration::from_millis(1));
        }
        let status = self.child.wait().unwrap();
        status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
    }

    /// Waits for the launcher, checks that nothing is left, and returns what it printed.
    pub(crate) fn end(mut self) -> Ended {
        let code = self.wait();
        let took = self.started.elapsed();
        eventually("no process is left", || !is_anyone_marked(&self.marker));
        while let Ok(chunk) = self.chunks.recv_timeout(HANG) {
            self.printed.extend(chunk);
        }
        let stderr_bytes = self.stderr.join().unwrap();
        assert_eq!(fs::read_dir(self.directory.path()).unwrap().count(), 0, "files are left");
        let stderr = String::from_utf8_lossy(&stderr_bytes).into_owned();
        // Lines of ranks do not begin like this.
        assert!(!stderr.lines().any(|line| line.starts_with("thread '")), "{stderr}");
        Ended { code, stdout: self.printed, stderr, stderr_bytes, took }
    }
}

impl Ended {
    pub(crate) fn sorted_stdout(&self) -> Vec<&str> {
        let mut lines: Vec<_> = std::str::from_utf8(&self.stdout).unwrap().lines().collect();
        lines.sort_unstable();
        lines
    }

    pub(crate) fn lines_by_rank(&self) -> BTreeMap<usize, Vec<&str>> {
        let mut ranks = BTreeMap::<_, Vec<_>>::new();
        for line in self.sorted_stdout() {
            let (rank, text) = line.strip_prefix('[').unwrap().split_once("] ").unwrap();
            ranks.entry(rank.parse().unwrap()).or_default().push(text);
        }
        ranks
    }

    /// The launcher's own lines, which come after the ranks'.
    pub(crate) fn report(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| !line.starts_with('[')).collect()
    }
}

/// Whether a living process has `marker` in its environment. Zombies have none.
pub(crate) fn is_anyone_marked(marker: &str) -> bool {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let mut environments =
        processes.filter_map(|entry| fs::read(entry.path().join("environ")).ok());
    environments.any(|text| text.split(|&byte| byte == 0).any(|v| v == marker.as_bytes()))
}

/// For scripts of ranks: sets `launcher` to its process, which is above the keepers. Its arguments hold this text as well, which
/// the pattern does not match.
pub(crate) const FIND_LAUNCHER: &str = r"launcher=$PPID; while grep -qa 'keep-rank[s]' /proc/$launcher/cmdline; do launcher=$(sed -n 's/^PPid:\t//p' /proc/$launcher/status); done;";
