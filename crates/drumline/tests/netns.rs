//! Jobs over several hosts: network namespaces of one machine, each with an address of its own,
//! joined by a bridge.
//!
//! They take root and `ip` of iproute2. Where these are missing the tests say so and do nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use drumline::{Config, Error, ReduceOp, init_process_group};

const PORT: u16 = 29500;

/// What a rank is told to do, in this variable.
const TASK: &str = "DRUMLINE_TEST_TASK";
const URL: &str = "DRUMLINE_TEST_URL";

const SECRET: &str = "the secret of the tests over namespaces";

/// The ranks of the tests below: this test's process, started again in a namespace.
#[test]
fn rank() {
    let Ok(task) = std::env::var(TASK) else { return };
    let config = Config::from_env().unwrap();
    let group = match init_process_group(&std::env::var(URL).unwrap(), &config) {
        Ok(group) => group,
        Err(error) => return println!("\nrefused: {error}"),
    };
    let mut sum = [group.rank() as f64 + 1.0];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    println!("\nsum: {}", sum[0]);
    match &*task {
        "leave" => group.destroy().unwrap(),
        "work until something breaks" => loop {
            let error = match group.all_reduce(&mut [1.0_f32; 100_000], ReduceOp::Sum) {
                Ok(()) => continue,
                Err(error) => error,
            };
            let Error::Collective(failure) = &error else { panic!("{error}") };
            return println!("culprit: {:?}: {error}", failure.culprit());
        },
        "be stopped" => {
            // The others call at once, this rank when it is let go on.
            if group.rank() == 0 {
                std::io::stdin().read_exact(&mut [0]).unwrap();
            }
            group.barrier().unwrap();
            println!("still there");
            group.destroy().unwrap();
        }
        other => panic!("{other}"),
    }
}

/// Some hosts in one network.
struct Hosts {
    name: String,
    count: usize,
}

impl Hosts {
    /// `None`, with the reason printed, where this machine does not let us.
    fn new(count: usize) -> Option<Hosts> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let hosts = Hosts { name: format!("dl{}-{number}", std::process::id()), count };
        match hosts.build() {
            Ok(()) => Some(hosts),
            Err(reason) => {
                println!("SKIPPED: no network namespaces here: {reason}");
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
            ip(&format!("-n {netns} addr add {}/24 dev eth0", address(host)))?;
            ip(&format!("-n {netns} link set eth0 up"))?;
            ip(&format!("-n {netns} link set lo up"))?;
        }
        Ok(())
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn netns(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    fn pull_the_cable_of(&self, host: usize) {
        ip(&format!("-n {} link set to{host} down", self.switch())).unwrap();
    }

    /// Starts rank `rank` of `world_size` on the host of its number, modulo the hosts.
    fn start(&self, rank: usize, world_size: usize, task: &str, secret: Option<&str>) -> Rank {
        let secret = secret.map(|secret| ("DRUMLINE_SECRET", secret));
        self.start_with(rank, world_size, task, secret)
    }

    fn start_with(
        &self,
        rank: usize,
        world_size: usize,
        task: &str,
        variable: Option<(&str, &str)>,
    ) -> Rank {
        let url = format!("tcp://{}:{PORT}?rank={rank}&world_size={world_size}", address(0));
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.netns(rank % self.count)])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "rank", "--nocapture"])
            .env(TASK, task)
            .env(URL, url)
            .env("DRUMLINE_TIMEOUT_S", "30")
            .env_remove("DRUMLINE_SECRET_FILE")
            .env_remove("DRUMLINE_SECRET")
            .envs(variable)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if rank % 2 == 1 {
            // Half of the ranks are told what the others find out.
            command.env("DRUMLINE_INTERFACE", "eth0");
        }
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Rank { child, stdout }
    }

    fn start_all(&self, world_size: usize, task: &str) -> Vec<Rank> {
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

fn address(host: usize) -> String {
    // 198.18.0.0/15 is for tests of networks.
    format!("198.18.0.{}", host + 1)
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    let told = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {told}")) }
}

struct Rank {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Rank {
    /// The rest of the next line that begins with `front`.
    fn line(&mut self, front: &str) -> String {
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

    fn signal(&self, signal: rustix::process::Signal) {
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

#[test]
fn two_and_three_hosts_work_together() {
    for (hosts, world_size) in [(2, 2), (3, 3), (2, 5)] {
        let Some(network) = Hosts::new(hosts) else { return };
        for mut rank in network.start_all(world_size, "leave") {
            let sum = world_size * (world_size + 1) / 2;
            assert_eq!(rank.line("sum: "), sum.to_string());
            assert!(rank.child.wait().unwrap().success());
        }
    }
}

#[test]
fn every_host_listens_on_its_one_address_only() {
    let Some(network) = Hosts::new(2) else { return };
    let mut ranks = network.start_all(3, "work until something breaks");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "6"));
    for (host, rank) in ranks.iter().enumerate().take(2) {
        // `ip netns exec` has become the rank.
        let table = fs::read_to_string(format!("/proc/{}/net/tcp", rank.child.id())).unwrap();
        let listening = table.lines().filter(|line| line.split_whitespace().nth(3) == Some("0A"));
        let addresses: Vec<&str> = listening.filter_map(|l| l.split_whitespace().nth(1)).collect();
        let own = format!("{:02X}0012C6:", host + 1);
        // Only the store, once all ranks are connected; no more on IPv6.
        assert_eq!(addresses.len(), usize::from(host == 0), "{addresses:?}");
        assert!(addresses.iter().all(|address| address.starts_with(&own)), "{addresses:?}, {own}");
    }
}

#[test]
fn a_rank_with_another_secret_or_none_is_told() {
    let Some(network) = Hosts::new(2) else { return };
    let mut host = network.start(0, 2, "leave", Some(SECRET));
    let mut other = network.start(1, 2, "leave", Some("the secret of another job"));
    let told = other.line("refused: ");
    assert!(told.contains("does not know this job's secret"), "{told}");
    let mut none = network.start(1, 2, "leave", None);
    let told = none.line("refused: DRUMLINE_SECRET: not set");
    assert!(told.contains("DRUMLINE_TRUST_STORE=1"), "{told}");
    // The job is unharmed: the right one may still come.
    let mut right = network.start(1, 2, "leave", Some(SECRET));
    for rank in [&mut host, &mut right] {
        assert_eq!(rank.line("sum: "), "3");
    }
}

#[test]
fn without_a_secret_ranks_meet_only_where_the_network_is_trusted() {
    let Some(network) = Hosts::new(2) else { return };
    let told = network.start(0, 2, "leave", None).line("refused: ");
    assert!(told.contains("DRUMLINE_TRUST_STORE=1"), "{told}");
    let trust = Some(("DRUMLINE_TRUST_STORE", "1"));
    let ranks = [0, 1].map(|rank| network.start_with(rank, 2, "leave", trust));
    for mut rank in ranks {
        assert_eq!(rank.line("sum: "), "3");
    }
}

#[test]
fn a_cable_that_is_pulled_is_named_by_all_who_remain() {
    let Some(network) = Hosts::new(3) else { return };
    let mut ranks = network.start_all(3, "work until something breaks");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "6"));
    network.pull_the_cable_of(2);
    let pulled = Instant::now();
    for (number, rank) in ranks.iter_mut().enumerate().take(2) {
        let told = rank.line("culprit: ");
        println!("rank {number}, {:.2} s after the cable was pulled: {told}", seconds(pulled));
        assert!(told.starts_with("Some(2): "), "{told}");
        assert!(told.contains("the host of rank 2 does not answer"), "{told}");
    }
    // And the one on its own sees a host that is silent, too.
    let told = ranks[2].line("culprit: ");
    assert!(told.contains("does not answer"), "{told}");
}

#[test]
fn a_process_that_is_stopped_is_not_silent() {
    let Some(network) = Hosts::new(2) else { return };
    let mut ranks = network.start_all(2, "be stopped");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "3"));
    ranks[0].signal(rustix::process::Signal::STOP);
    // Longer than a host may be silent.
    std::thread::sleep(Duration::from_millis(4_500));
    ranks[0].signal(rustix::process::Signal::CONT);
    ranks[0].child.stdin.take().unwrap().write_all(b"x").unwrap();
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("still there"), ""));
}

fn seconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64()
}
