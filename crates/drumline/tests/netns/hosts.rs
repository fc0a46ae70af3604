//! Hosts with ranks on them.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use drumline_testing::network::{self, Network};
pub(super) use drumline_testing::network::{Family, skip};

use crate::ranks::{TASK, URL};

const PORT: u16 = 29500;

pub(super) const SECRET: &str = "the secret of the tests over namespaces";

/// Some hosts in one network.
pub(super) struct Hosts {
    network: Network,
    pub(super) count: usize,
    program: PathBuf,
    /// Where ranks meet: a URL without a query.
    pub(super) meeting: String,
    /// What a shell does before a rank begins. `$0` is the number of the host. What it mounts is for this rank.
    pub(super) prepare: String,
}

impl Hosts {
    /// `None`, with the reason printed, where this machine does not let us.
    pub(super) fn new(count: usize) -> Option<Hosts> {
        Hosts::with(Family::V4, count)
    }

    pub(super) fn with(family: Family, count: usize) -> Option<Hosts> {
        let program = env::current_exe().unwrap();
        let network = Network::new(count, family, &[program.parent().unwrap()])?;
        let meeting = format!("tcp://{}", network.endpoint(0, PORT));
        Some(Hosts { network, count, program, meeting, prepare: ":".to_owned() })
    }

    pub(super) fn pull_the_cable_of(&self, host: usize) {
        self.network.pull_the_cable_of(host);
    }

    /// A command whose further arguments are what to run on a host.
    pub(super) fn on(&self, host: usize) -> Command {
        self.network.on(host, Path::new("/"))
    }

    /// Leaves the hosts the network between them, and no way out.
    pub(super) fn close(&self) {
        for host in 0..self.count {
            self.network.set(Some(host), "ip route flush default").unwrap();
            self.network.set(Some(host), "ip -6 route flush default").unwrap();
        }
    }

    /// Resets all connections between two hosts. Returns how many there were; `None`, with the reason printed, where the
    /// kernel does not let us.
    pub(super) fn reset_connections(&self, host: usize, other: usize) -> Option<usize> {
        let line = ["ss", "--kill", "--tcp", "--no-header", "dst", &self.network.address(other)];
        let output = self.on(host).args(line).output().unwrap();
        let count = String::from_utf8(output.stdout).unwrap().lines().count();
        if count == 0 {
            skip(&format!("ss resets no connection: {}", String::from_utf8_lossy(&output.stderr)));
            return None;
        }
        Some(count)
    }

    /// From now on a host answers that nothing listens to whoever calls it from the other one.
    pub(super) fn refuse_connections(&self, host: usize, other: usize) -> Result<(), String> {
        let other = self.network.address(other);
        let is_new = "tcp flags & (syn|ack) == syn";
        let lines = [
            "nft add table inet wall",
            "nft add chain inet wall in { type filter hook input priority 0 ; }",
            &format!("nft add rule inet wall in ip saddr {other} {is_new} reject with tcp reset"),
        ];
        lines.iter().try_for_each(|line| self.network.set(Some(host), line))
    }

    pub(super) fn add_cables(&self) {
        self.network.add_cables();
    }

    /// The bytes that a host has sent over an interface.
    pub(super) fn sent(&self, host: usize, interface: &str) -> u64 {
        let output = self.on(host).args(["cat", "/proc/net/dev"]).output().unwrap();
        let table = String::from_utf8(output.stdout).unwrap();
        let front = format!("{interface}:");
        let line = table.lines().find_map(|line| line.trim().strip_prefix(&front)).unwrap();
        line.split_whitespace().nth(8).unwrap().parse().unwrap()
    }

    /// Lets `megabits` per second out of every host.
    pub(super) fn slow_down(&self, megabits: usize) -> Result<(), String> {
        let shape = format!("tbf rate {megabits}mbit burst 64kb latency 400ms");
        let line = format!("tc qdisc add dev eth0 root {shape}");
        (0..self.count).try_for_each(|host| self.network.set(Some(host), &line))
    }

    /// Starts rank `rank` of `world_size` on the host of its number, modulo the hosts.
    pub(super) fn start(
        &self,
        rank: usize,
        world_size: usize,
        task: &str,
        secret: Option<&str>,
    ) -> Rank {
        let secret = secret.map(|secret| ("DRUMLINE_SECRET", secret));
        self.start_with(rank, world_size, task, secret)
    }

    pub(super) fn start_with(
        &self,
        rank: usize,
        world_size: usize,
        task: &str,
        variable: Option<(&str, &str)>,
    ) -> Rank {
        self.start_on(rank % self.count, rank, world_size, task, variable)
    }

    pub(super) fn start_on<'a>(
        &self,
        host: usize,
        rank: usize,
        world_size: usize,
        task: &str,
        variables: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Rank {
        let url = format!("{}?rank={rank}&world_size={world_size}", self.meeting);
        let prepared = format!("set -e; {}; exec \"$@\"", self.prepare);
        let mut command = self.on(host);
        command
            .args(["unshare", "--mount", "sh", "-c", &prepared, &host.to_string()])
            .arg(&self.program)
            .args(["--exact", "ranks::rank", "--nocapture"])
            .env(TASK, task)
            .env(URL, url)
            .env("DRUMLINE_TIMEOUT_S", "30")
            .env_remove("DRUMLINE_SECRET_FILE")
            .env_remove("DRUMLINE_SECRET")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if rank % 2 == 1 {
            // Half of the ranks are told what the others find out.
            command.env("DRUMLINE_SOCKET_IFNAME", "eth0");
        }
        command.envs(variables);
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Rank { child, stdout }
    }

    pub(super) fn start_all(&self, world_size: usize, task: &str) -> Vec<Rank> {
        (0..world_size).map(|rank| self.start(rank, world_size, task, Some(SECRET))).collect()
    }
}

pub(super) struct Rank {
    pub(super) child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Rank {
    /// The rest of the next line that begins with `front`.
    pub(super) fn line(&mut self, front: &str) -> String {
        let mut all = String::new();
        loop {
            let mut line = String::new();
            if self.stdout.read_line(&mut line).unwrap() == 0 {
                panic!("no line begins with {front:?}: {all}");
            }
            if let Some(rest) = line.strip_prefix(front) {
                return rest.trim().to_owned();
            }
            all += &line;
        }
    }

    /// The addresses at which somebody listens on the rank's host, as the kernel writes them.
    pub(super) fn listens_at(&self, table: &str) -> Vec<String> {
        // `nsenter` has gone to the host, too.
        let table = fs::read_to_string(format!("/proc/{}/net/{table}", self.child.id())).unwrap();
        let listening = table.lines().filter(|line| line.split_whitespace().nth(3) == Some("0A"));
        listening.filter_map(|line| Some(line.split_whitespace().nth(1)?.to_owned())).collect()
    }

    pub(super) fn signal(&self, signal: rustix::process::Signal) {
        network::signal(&self.child, signal);
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.signal(rustix::process::Signal::KILL);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
