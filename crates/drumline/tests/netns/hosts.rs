//! Hosts that are network namespaces, and the ranks that run there.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::ranks::{TASK, URL};

const PORT: u16 = 29500;

pub(super) const SECRET: &str = "the secret of the tests over namespaces";

/// Some hosts in one network.
pub(super) struct Hosts {
    name: String,
    pub(super) count: usize,
    family: Family,
}

/// Which addresses hosts have, and no others.
#[derive(Clone, Copy)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    fn address(self, host: usize) -> String {
        match self {
            // 198.18.0.0/15 is for tests of networks.
            Family::V4 => format!("198.18.0.{}", host + 1),
            Family::V6 => format!("fd00::{:x}", host + 1),
        }
    }

    fn give_address(self, netns: &str, host: usize) -> Result<(), String> {
        let address = self.address(host);
        match self {
            Family::V4 => ip(&format!("-n {netns} addr add {address}/24 dev eth0")),
            Family::V6 => ip(&format!("-n {netns} addr add {address}/64 dev eth0 nodad"))
                .and_then(|()| ip(&format!("-n {netns} -4 addr flush dev lo"))),
        }
    }
}

impl Hosts {
    /// `None`, with the reason printed, where this machine does not let us.
    pub(super) fn new(count: usize) -> Option<Hosts> {
        Hosts::with(Family::V4, count)
    }

    pub(super) fn with(family: Family, count: usize) -> Option<Hosts> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let hosts = Hosts { name: format!("dl{}-{number}", std::process::id()), count, family };
        match hosts.build() {
            Ok(()) => Some(hosts),
            Err(reason) => {
                skip(&format!("no network namespaces here: {reason}"));
                None
            }
        }
    }

    fn build(&self) -> Result<(), String> {
        let switch = self.switch();
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add bridge type bridge"))?;
        ip(&format!("-n {switch} link set bridge up"))?;
        for host in 0..self.count {
            let netns = self.netns(host);
            ip(&format!("netns add {netns}"))?;
            let cable = format!("link add eth0 netns {netns} type veth peer name to{host}");
            ip(&format!("{cable} netns {switch}"))?;
            ip(&format!("-n {switch} link set to{host} master bridge up"))?;
            ip(&format!("-n {netns} link set eth0 up"))?;
            ip(&format!("-n {netns} link set lo up"))?;
            self.family.give_address(&netns, host)?;
        }
        Ok(())
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn netns(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    pub(super) fn pull_the_cable_of(&self, host: usize) {
        ip(&format!("-n {} link set to{host} down", self.switch())).unwrap();
    }

    /// Gives every host another interface, `eth1`, in a network of its own.
    pub(super) fn add_cables(&self) {
        for host in 0..self.count {
            let (netns, switch) = (self.netns(host), self.switch());
            let cable = format!("link add eth1 netns {netns} type veth peer name also{host}");
            ip(&format!("{cable} netns {switch}")).unwrap();
            ip(&format!("-n {switch} link set also{host} master bridge up")).unwrap();
            ip(&format!("-n {netns} link set eth1 up")).unwrap();
            // Of the same block for tests.
            ip(&format!("-n {netns} addr add 198.19.0.{}/24 dev eth1", host + 1)).unwrap();
        }
    }

    /// The bytes that a host has sent over an interface.
    pub(super) fn sent(&self, host: usize, interface: &str) -> u64 {
        let file = format!("/sys/class/net/{interface}/statistics/tx_bytes");
        let output = Command::new("ip")
            .args(["netns", "exec", &self.netns(host), "cat", &file])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
    }

    /// Lets `megabits` per second out of every host.
    pub(super) fn slow_down(&self, megabits: usize) -> Result<(), String> {
        for host in 0..self.count {
            let shape = format!("tbf rate {megabits}mbit burst 64kb latency 400ms");
            let line = format!("-n {} qdisc add dev eth0 root {shape}", self.netns(host));
            run("tc", &line)?;
        }
        Ok(())
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
        let master = match self.family {
            Family::V4 => self.family.address(0),
            Family::V6 => format!("[{}]", self.family.address(0)),
        };
        let url = format!("tcp://{master}:{PORT}?rank={rank}&world_size={world_size}");
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.netns(host)])
            .arg(std::env::current_exe().unwrap())
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

impl Drop for Hosts {
    fn drop(&mut self) {
        // What was never made cannot be removed.
        let _ = ip(&format!("netns del {}", self.switch()));
        for host in 0..self.count {
            let _ = ip(&format!("netns del {}", self.netns(host)));
        }
    }
}

/// The rest of the test needs what this machine lacks. Where `DRUMLINE_TEST_HOSTS` is set, as in CI, that is a
/// failure.
pub(super) fn skip(reason: &str) {
    assert!(std::env::var_os("DRUMLINE_TEST_HOSTS").is_none(), "{reason}");
    println!("SKIPPED: {reason}");
}

fn ip(arguments: &str) -> Result<(), String> {
    run("ip", arguments)
}

fn run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(program).args(arguments.split(' ')).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let told = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{program} {arguments}: {told}")) }
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
        // `ip netns exec` has become the rank.
        let table = fs::read_to_string(format!("/proc/{}/net/{table}", self.child.id())).unwrap();
        let listening = table.lines().filter(|line| line.split_whitespace().nth(3) == Some("0A"));
        listening.filter_map(|line| Some(line.split_whitespace().nth(1)?.to_owned())).collect()
    }

    pub(super) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
