//! Hosts on this machine, each with a network, processes, memory and a `/tmp` of its own: `hosts.sh` makes them.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::fd::AsFd as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

use rustix::{
    process::{Pid, Signal, kill_process},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};

/// Which addresses hosts have, and no others.
#[derive(Clone, Copy, Debug)]
pub enum Family {
    /// Of IPv4.
    V4,
    /// Of IPv6.
    V6,
}

/// Some hosts in one network.
#[derive(Debug)]
pub struct Network {
    maker: Child,
    family: Family,
    /// First that of the bridge, then those of the hosts.
    pids: Vec<String>,
}

impl Network {
    /// `count` hosts that see `directories` also below `/tmp`. `None`, with the reason printed, where this machine does
    /// not let us.
    pub fn new(count: usize, family: Family, directories: &[&Path]) -> Option<Network> {
        let number = match family {
            Family::V4 => "4",
            Family::V6 => "6",
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/hosts.sh");
        let mut maker = Command::new("sh")
            .arg(script)
            .args([&count.to_string(), number])
            .args(directories)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = String::new();
        BufReader::new(maker.stdout.take().unwrap()).read_line(&mut told).unwrap();
        let pids: Vec<String> = told.split_whitespace().map(str::to_owned).collect();
        let network = Network { maker, family, pids };
        if network.pids.len() == count + 1 {
            return Some(network);
        }
        skip("no hosts here: hosts.sh has said why");
        None
    }

    /// The address of a host, counted from 0.
    pub fn address(&self, host: usize) -> String {
        match self.family {
            Family::V4 => format!("198.18.0.{}", host + 1),
            Family::V6 => format!("fd00::{:x}", host + 1),
        }
    }

    /// A place on a host, as it stands in URLs and options.
    pub fn endpoint(&self, host: usize, port: u16) -> String {
        match self.family {
            Family::V4 => format!("{}:{port}", self.address(host)),
            Family::V6 => format!("[{}]:{port}", self.address(host)),
        }
    }

    /// A command whose further arguments are what to run on a host, in a directory that this host sees.
    pub fn on(&self, host: usize, directory: &Path) -> Command {
        let mut command = enter(&self.pids[1 + host]);
        command.args(["--mount", "--uts", "--ipc", "--pid"]);
        command.arg(format!("--wdns={}", directory.display())).arg("--");
        command
    }

    /// Runs a line of `ip` or `tc` in the network of a host, or of the bridge.
    pub fn set(&self, host: Option<usize>, line: &str) -> Result<(), String> {
        let pid = &self.pids[host.map_or(0, |host| host + 1)];
        let output = enter(pid).arg("--").args(line.split(' ')).output();
        let output = output.map_err(|error| format!("{line}: {error}"))?;
        let told = String::from_utf8_lossy(&output.stderr);
        if output.status.success() { Ok(()) } else { Err(format!("{line}: {told}")) }
    }

    /// Runs `code` in the network of a host: what it opens there stays there.
    pub fn within<R: Send>(&self, host: Option<usize>, code: impl FnOnce() -> R + Send) -> R {
        let file = format!("/proc/{}/ns/net", self.pids[host.map_or(0, |host| host + 1)]);
        let namespace = fs::File::open(file).unwrap();
        thread::scope(|threads| {
            let there = threads.spawn(|| {
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), kind).unwrap();
                code()
            });
            there.join().unwrap()
        })
    }

    /// Gives every host another interface, `eth1`, in a network of its own: 198.19.0.1, 198.19.0.2, ...
    pub fn add_cables(&self) {
        for host in 0..self.pids.len() - 1 {
            let on_host = |line: &str| self.set(Some(host), line).unwrap();
            on_host(&format!(
                "ip link add eth1 type veth peer name also{host} netns {}",
                self.pids[0]
            ));
            on_host("ip link set eth1 up");
            on_host(&format!("ip addr add 198.19.0.{}/24 dev eth1", host + 1));
            self.set(None, &format!("ip link set also{host} master bridge up")).unwrap();
        }
    }

    /// Takes the link of a host down.
    pub fn pull_the_cable_of(&self, host: usize) {
        self.set(None, &format!("ip link set port{host} down")).unwrap();
    }

    /// Takes it up again.
    pub fn put_the_cable_of(&self, host: usize) {
        self.set(None, &format!("ip link set port{host} up")).unwrap();
    }

    /// Ends all processes of a host at once, as a power cut does.
    pub fn end_host(&self, host: usize) {
        let pid = Pid::from_raw(self.pids[1 + host].parse().unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(self.maker.stdin.take());
        let _ = self.maker.wait();
    }
}

/// Enters the network of the process `pid`.
fn enter(pid: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--target", pid, "--net"]);
    command
}

/// Sends a signal to what runs on a host: the child of `nsenter`. Nothing happens if it has ended.
pub fn signal(nsenter: &Child, signal: Signal) {
    for child in children(nsenter) {
        let _ = kill_process(child, signal);
    }
    // It stops together with its child, but does not go on with it.
    if signal == Signal::CONT {
        kill_process(Pid::from_child(nsenter), signal).unwrap();
    }
}

/// What `nsenter` has started.
pub fn children(nsenter: &Child) -> Vec<Pid> {
    let pid = nsenter.id();
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|child| Pid::from_raw(child.parse().ok()?)).collect()
}

/// The rest of the test needs what this machine lacks. Where `DRUMLINE_TEST_HOSTS` is set, as in CI, that is a
/// failure.
pub fn skip(reason: &str) {
    assert!(std::env::var_os("DRUMLINE_TEST_HOSTS").is_none(), "{reason}");
    println!("SKIPPED: {reason}");
}
