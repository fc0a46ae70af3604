//! etcd itself, for one test.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::HANG;

/// A server, alone or one of several.
#[derive(Debug)]
pub struct Server {
    /// Where it listens, on 127.0.0.1.
    pub port: u16,
    arguments: Vec<String>,
    /// What it writes.
    pub directory: TempDir,
    running: Option<Running>,
}

/// A shell that ends etcd when this process ends, however it ends.
#[derive(Debug)]
struct Running {
    shell: Child,
    etcd: Pid,
}

/// Told nothing, it removes the folder, too: nobody else is left to do it.
const UNTIL_THE_TEST_ENDS: &str = r#"
exec 3<&0
etcd "$@" &
echo $!
read -r told <&3
kill -9 $!
wait
[ "$told" = keep ] || rm -rf "$FOLDER"
"#;

/// Whether etcd is there. Where `DRUMLINE_TEST_ETCD` is set, as in CI, it must be.
pub fn is_installed() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        let version = Command::new("etcd").arg("--version").stdout(Stdio::null()).status();
        let there = version.is_ok_and(|status| status.success());
        assert!(there || std::env::var_os("DRUMLINE_TEST_ETCD").is_none(), "etcd is not installed");
        if !there {
            println!("skipped: there is no etcd; apt-get install etcd-server");
        }
        there
    })
}

/// A port that nobody has now.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Server {
    /// One server, with further arguments.
    pub fn start(more: &[&str]) -> Server {
        Server::start_as("http", |_| more.iter().map(|&it| it.to_owned()).collect())
    }

    /// One server at an URL with this scheme. `more` gives further arguments, of a directory.
    pub fn start_as(scheme: &str, more: impl Fn(&Path) -> Vec<String>) -> Server {
        // Another process may take a port before etcd does.
        for _ in 0..8 {
            let [port, peer] = [free_port(), free_port()];
            let peers = format!("s0=http://127.0.0.1:{peer}");
            let mut server = Server::new("s0", scheme, port, peer, &peers);
            let more = more(server.directory.path());
            server.arguments.extend(more);
            server.run();
            if server.is_up(scheme == "http") {
                return server;
            }
        }
        panic!("etcd does not start");
    }

    /// Several servers that are one cluster.
    pub fn start_three() -> Vec<Server> {
        for _ in 0..8 {
            let ports: [(u16, u16); 3] = [(); 3].map(|()| (free_port(), free_port()));
            let peer = |(number, (_, peer)): (usize, &(u16, u16))| {
                format!("s{number}=http://127.0.0.1:{peer}")
            };
            let peers = ports.iter().enumerate().map(peer).collect::<Vec<_>>().join(",");
            let started = |(number, &(port, peer)): (usize, &(u16, u16))| {
                let mut server = Server::new(&format!("s{number}"), "http", port, peer, &peers);
                server.run();
                server
            };
            let mut servers: Vec<_> = ports.iter().enumerate().map(started).collect();
            if servers.iter_mut().all(|server| server.is_up(true)) {
                return servers;
            }
        }
        panic!("etcd does not start");
    }

    fn new(name: &str, scheme: &str, port: u16, peer: u16, peers: &str) -> Server {
        // In memory, because etcd waits for its disk at every change, and other tests use the disk, too.
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let data = directory.path().join("data");
        let client = format!("{scheme}://127.0.0.1:{port}");
        let peer = format!("http://127.0.0.1:{peer}");
        let arguments = [
            ["--name", name],
            ["--data-dir", data.to_str().unwrap()],
            ["--listen-client-urls", &client],
            ["--advertise-client-urls", &client],
            ["--listen-peer-urls", &peer],
            ["--initial-advertise-peer-urls", &peer],
            ["--initial-cluster", peers],
        ];
        let arguments = arguments.as_flattened().iter().map(|&it| it.to_owned()).collect();
        Server { port, arguments, directory, running: None }
    }

    /// Starts it, with the keys that it had.
    pub fn run(&mut self) {
        let log = std::fs::File::create(self.directory.path().join("log")).unwrap();
        let mut shell = Command::new("sh")
            .args(["-c", UNTIL_THE_TEST_ENDS, "sh"])
            .args(&self.arguments)
            .env("FOLDER", self.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut pid = String::new();
        let mut out = shell.stdout.take().unwrap();
        let mut byte = [0];
        while out.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            pid.push(byte[0] as char);
        }
        let etcd = Pid::from_raw(pid.parse().unwrap()).unwrap();
        self.running = Some(Running { shell, etcd });
    }

    /// From its next start on it speaks TLS, with `more` arguments.
    pub fn secure(&mut self, more: Vec<String>) {
        let (plain, secured) = (self.url(), self.url().replace("http", "https"));
        for argument in self.arguments.iter_mut().filter(|argument| **argument == plain) {
            argument.clone_from(&secured);
        }
        self.arguments.extend(more);
    }

    /// Waits until it answers. `false`: it has ended.
    fn is_up(&mut self, asks: bool) -> bool {
        let deadline = Instant::now() + HANG;
        loop {
            let answers = match asks {
                true => self
                    .request("GET /health", "")
                    .is_some_and(|it| it.contains(r#""health":"true""#)),
                false => TcpStream::connect(("127.0.0.1", self.port)).is_ok(),
            };
            if answers {
                return true;
            }
            if !self.log_says_that_it_runs() {
                return false;
            }
            assert!(Instant::now() < deadline, "{}", self.log());
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn log_says_that_it_runs(&self) -> bool {
        !self.log().contains("address already in use")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Sends `signal` to etcd.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.running.as_ref().unwrap().etcd, signal).unwrap();
    }

    /// Kills it, and waits until it is gone.
    pub fn kill(&mut self) {
        let mut running = self.running.take().unwrap();
        kill_process(running.etcd, Signal::KILL).unwrap();
        writeln!(running.shell.stdin.take().unwrap(), "keep").unwrap();
        running.shell.wait().unwrap();
    }

    /// Posts to the gateway, and returns the whole answer.
    pub fn post(&self, path: &str, body: &str) -> String {
        self.request(&format!("POST {path}"), body).unwrap()
    }

    fn request(&self, what: &str, body: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(HANG)).unwrap();
        let length = body.len();
        let head = format!(
            "{what} HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(format!("{head}{body}").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    /// Makes it ask for users: `root`, and `drum` with the password `right`, who may use keys under `/drumline/`.
    pub fn ask_for_users(&self) {
        let grant = r#"{"name":"r","perm":{"permType":"READWRITE","key":"L2RydW1saW5lLw==","range_end":"L2RydW1saW5lMA=="}}"#;
        for (path, body) in [
            ("user/add", r#"{"name":"root","password":"root"}"#),
            ("user/add", r#"{"name":"drum","password":"right"}"#),
            ("role/add", r#"{"name":"root"}"#),
            ("role/add", r#"{"name":"r"}"#),
            ("role/grant", grant),
            ("user/grant", r#"{"user":"drum","role":"r"}"#),
            ("user/grant", r#"{"user":"root","role":"root"}"#),
            ("enable", "{}"),
        ] {
            let answer = self.post(&format!("/v3/auth/{path}"), body);
            assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        }
    }

    /// A file in the server's directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.running.is_some() {
            self.kill();
        }
    }
}
