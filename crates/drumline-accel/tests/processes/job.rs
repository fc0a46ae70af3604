//! The processes of a job. Each is this test program again, with `ACCEL_RANK` in its environment.

use std::env;
use std::ffi::OsStr;
use std::iter::repeat_n;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use drumline_group::auth::Secret;
use drumline_group::store::Store;
use drumline_group::store::tcp::{TcpStore, TcpStoreServer};
use drumline_group::{Config, ProcessGroup, Rank, rendezvous::Endpoint};

const SECRET: &str = "a secret of this test only";

/// What a process of a job is told.
pub(crate) struct Role {
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    /// What this job tries.
    pub(crate) stage: String,
    store: Arc<dyn Store>,
    config: Config,
}

impl Role {
    /// `None`: this is not the process of a rank.
    pub(crate) fn of_environment() -> Option<Role> {
        let variable = |name: &str| env::var(name).ok();
        let rank = variable("ACCEL_RANK")?.parse().unwrap();
        let secret = Secret::new(SECRET).unwrap();
        let endpoint = Endpoint::Unix(variable("ACCEL_STORE").unwrap());
        let patience = Duration::from_secs(60);
        let store = TcpStore::connect_secured(&endpoint, &secret, patience).unwrap();
        let over = variable("ACCEL_OVER").unwrap();
        let config = Config::default()
            // Who hangs fails.
            .timeout(patience)
            .shared_memory(over == "shared")
            .unix_sockets(over != "tcp")
            .registered_bytes_max(64 << 20)
            .secret(secret);
        Some(Role {
            rank,
            world_size: variable("ACCEL_WORLD").unwrap().parse().unwrap(),
            stage: variable("ACCEL_STAGE").unwrap(),
            store: Arc::new(store),
            config,
        })
    }

    /// A group of some ranks of the job, in this order.
    pub(crate) fn connect(&self, name: &str, ranks: &[Rank]) -> ProcessGroup {
        let own = ranks.iter().position(|rank| *rank == self.rank).unwrap();
        let store = self.store.clone();
        drumline_group::rendezvous::connect(name, store, own, ranks.len(), &self.config).unwrap()
    }
}

/// How the process of a rank has ended.
pub(crate) struct Ended {
    /// None: it was killed by a signal.
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) output: String,
}

/// How the ranks of a job are placed, and over what those of a host talk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    /// By host: its number of ranks.
    pub(crate) hosts: &'static [usize],
    /// `shared`, `unix` or `tcp`.
    pub(crate) over: &'static str,
}

impl Placed {
    /// Whether this machine can stand for that many hosts.
    pub(crate) fn is_possible(self) -> bool {
        let mut on_other_host = on_host(1, "true".as_ref());
        let can = self.hosts.len() == 1
            || on_other_host.output().is_ok_and(|output| output.status.success());
        assert!(
            can || env::var_os("DRUMLINE_TEST_HOSTS").is_none(),
            "{self:?} takes `unshare`, and the right to make users"
        );
        if !can {
            println!("SKIPPED: {self:?} takes `unshare`, and the right to make users");
        }
        can
    }
}

/// A program on a host of this number. Ranks of two users are as far from each other as ranks of two hosts: they
/// share no memory, and talk over TCP. In a namespace of its own a process is another user. Addresses do not matter to
/// devices, so this takes no network.
fn on_host(host: usize, program: &OsStr) -> Command {
    if host == 0 {
        return Command::new(program);
    }
    let mut command = Command::new("unshare");
    command.args(["--user", &format!("--map-user={}", 10_000 + host)]).arg(program);
    command
}

/// Runs `entry`, a test of this program, as the process of each rank, until all have ended.
pub(crate) fn run(entry: &str, placed: Placed, stage: &str) -> Vec<Ended> {
    let Placed { hosts, over } = placed;
    let world_size: usize = hosts.iter().sum();
    let host_of: Vec<usize> =
        hosts.iter().enumerate().flat_map(|(host, ranks)| repeat_n(host, *ranks)).collect();
    let name = format!("accel-{}-{over}-{}", std::process::id(), stage.replace(' ', "-"));
    let server =
        TcpStoreServer::bind_secured(&Endpoint::Unix(name.clone()), &Secret::new(SECRET).unwrap())
            .unwrap();
    let start = |rank: Rank| {
        let child = on_host(host_of[rank], env::current_exe().unwrap().as_ref())
            .args(["--exact", entry, "--nocapture", "--test-threads=1"])
            .env("ACCEL_RANK", rank.to_string())
            .env("ACCEL_WORLD", world_size.to_string())
            .env("ACCEL_STORE", &name)
            .env("ACCEL_OVER", over)
            .env("ACCEL_STAGE", stage)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        Process(Some(child.unwrap()))
    };
    let processes: Vec<Process> = (0..world_size).map(start).collect();
    let ended = processes.into_iter().map(Process::end).collect();
    drop(server);
    ended
}

/// It does not outlive the test.
struct Process(Option<Child>);

impl Process {
    fn end(mut self) -> Ended {
        let ended = self.0.take().unwrap().wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ended {
            code: ended.status.code(),
            signal: ended.status.signal(),
            output: text(&ended.stdout) + &text(&ended.stderr),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
