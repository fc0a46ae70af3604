//! Jobs over several hosts: network namespaces of one machine, each with an address of its own,
//! joined by a bridge.
//!
//! They take root and iproute2. Without these the tests say so and do nothing; with `DRUMLINE_TEST_HOSTS` set
//! they fail.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use drumline::{
    Config, DType, Error, ProcessGroup, ReduceOp, Rounding, bf16,
    ddp::{DdpOptions, GradientReducer, ParameterSpec},
    init_process_group,
};

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
    if task == "fork, and work until something breaks" && group.rank() == 1 {
        let child = drumline_shm::fork_idle(120).unwrap();
        println!("child: {}", child.as_raw_nonzero());
        // Its connections are still its own.
        group.all_reduce(&mut [1.0_f32; 100_000], ReduceOp::Sum).unwrap();
        println!("goes on");
    }
    match &*task {
        "leave" => group.destroy().unwrap(),
        "work until something breaks" | "fork, and work until something breaks" => loop {
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
        "add in order" => {
            for len in [1, 1_000, 700_000] {
                let value = |rank: usize, index: usize| ((rank * 31 + index) as f32).sin() * 1e3;
                let mut data: Vec<f32> = (0..len).map(|index| value(group.rank(), index)).collect();
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                for (index, sum) in data.iter().enumerate() {
                    let column: Vec<f32> =
                        (0..group.world_size()).map(|rank| value(rank, index)).collect();
                    assert_eq!(sum.to_bits(), tree(&column).to_bits(), "element {index} of {len}");
                }
            }
            println!("same bits; shares memory: {}", group.shares_memory());
            group.destroy().unwrap();
        }
        "train" => {
            train(&group);
            group.destroy().unwrap();
        }
        "send what must be sent" => {
            send_what_must_be_sent(&group);
            send_in_few_messages(&group);
            group.destroy().unwrap();
        }
        "train, sharded and not" => {
            train_sharded_and_not(&group);
            group.destroy().unwrap();
        }
        other => panic!("{other}"),
    }
}

/// The canonical tree, as it is defined.
fn tree(values: &[f32]) -> f32 {
    match values {
        [value] => *value,
        _ => {
            let half = 1 << (values.len() - 1).ilog2();
            tree(&values[..half]) + tree(&values[half..])
        }
    }
}

/// The elements of a block.
const BLOCK: usize = 256 << 10;

/// Calls on a block for every rank, or on as much data, perhaps with a root on the other host. Says of each how many
/// bytes have left this host meanwhile.
fn send_what_must_be_sent(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let value = |rank: usize, index: usize| ((rank * 31 + index) as f32).sin() * 1e3;
    let measured = |name: &str, call: &mut dyn FnMut()| {
        // Between two barriers nobody sends anything else.
        let before = sent_from_here();
        group.barrier().unwrap();
        call();
        group.barrier().unwrap();
        println!("{name}: {}", sent_from_here() - before);
    };
    let own: Vec<f32> = (0..BLOCK).map(|index| value(rank, index)).collect();
    let mut all = vec![0.0; ranks * BLOCK];
    measured("all_gather", &mut || group.all_gather(&own, &mut all).unwrap());
    let of_all = (0..ranks).flat_map(|rank| (0..BLOCK).map(move |index| value(rank, index)));
    assert!(all.iter().copied().eq(of_all));

    let input: Vec<f32> = (0..ranks * BLOCK).map(|index| value(rank, index)).collect();
    let mut sum = vec![0.0; BLOCK];
    measured("reduce_scatter", &mut || {
        group.reduce_scatter(&input, &mut sum, ReduceOp::Sum).unwrap();
    });
    for (index, sum) in sum.iter().enumerate() {
        let column: Vec<f32> = (0..ranks).map(|it| value(it, rank * BLOCK + index)).collect();
        assert_eq!(sum.to_bits(), tree(&column).to_bits(), "element {index}");
    }

    let mut data = input.clone();
    measured("broadcast", &mut || group.broadcast(&mut data, ranks - 1).unwrap());
    assert!(data.iter().enumerate().all(|(index, it)| *it == value(ranks - 1, index)));

    let mut data = input.clone();
    measured("reduce", &mut || group.reduce(&mut data, ReduceOp::Sum, ranks - 1).unwrap());
    for (index, sum) in data.iter().enumerate() {
        let column: Vec<f32> = (0..ranks).map(|rank| value(rank, index)).collect();
        let expected = if rank == ranks - 1 { tree(&column) } else { column[rank] };
        assert_eq!(sum.to_bits(), expected.to_bits(), "element {index}");
    }

    let narrow = |rank: usize, index: usize| bf16::from_f32(value(rank, index));
    let mut data: Vec<bf16> = (0..ranks * BLOCK).map(|index| narrow(rank, index)).collect();
    measured("all_reduce of bf16", &mut || group.all_reduce(&mut data, ReduceOp::Sum).unwrap());
    for (index, sum) in data.iter().enumerate() {
        let column: Vec<f32> = (0..ranks).map(|rank| narrow(rank, index).to_f32()).collect();
        let hosts = column.chunks(ranks / 2).map(|host| bf16::from_f32(tree(host)).to_f32());
        let expected = match group.config().rounding {
            Rounding::Once => tree(&column),
            Rounding::Host => tree(&hosts.collect::<Vec<f32>>()),
        };
        assert_eq!(*sum, bf16::from_f32(expected), "element {index}");
    }
}

/// How often short data is sent.
const CALLS: u64 = 100;

/// The bytes before the data of a message.
const HEADER: u64 = 64;

/// Calls on two elements of each rank, or for each rank. Says of each kind how many bytes have left this host meanwhile,
/// without the headers of packets.
fn send_in_few_messages(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let root = ranks - 1;
    let measured = |name: &str, call: &mut dyn FnMut()| {
        call(); // ranks connect when they first need to
        group.barrier().unwrap();
        let before = sent_in_packets();
        group.barrier().unwrap();
        for _ in 0..CALLS {
            call();
        }
        group.barrier().unwrap();
        println!("{name} of short data: {}", sent_in_packets() - before);
    };
    // Two elements from `from` for `to`.
    let block = |from: usize, to: usize| [(100 * from + to) as u32, 7];
    let for_all = |from: usize| (0..ranks).flat_map(move |to| block(from, to)).collect::<Vec<_>>();
    let of_all = |to: usize| (0..ranks).flat_map(move |from| block(from, to)).collect::<Vec<_>>();

    let mut gathered = vec![0; if rank == root { 2 * ranks } else { 0 }];
    measured("gather", &mut || group.gather(&block(rank, root), &mut gathered, root).unwrap());
    assert!(rank != root || gathered == of_all(root), "{gathered:?}");

    let mut own = [0; 2];
    let input = if rank == root { for_all(root) } else { vec![] };
    measured("scatter", &mut || group.scatter(&input, &mut own, root).unwrap());
    assert_eq!(own, block(root, rank));

    let (input, mut swapped) = (for_all(rank), vec![0; 2 * ranks]);
    measured("all_to_all", &mut || group.all_to_all(&input, &mut swapped).unwrap());
    assert_eq!(swapped, of_all(rank));

    let mut sum = [0; 2];
    measured("scan", &mut || {
        sum = [rank as u32, 1];
        group.scan(&mut sum, ReduceOp::Sum).unwrap();
    });
    assert_eq!(sum, [(0..=rank as u32).sum(), rank as u32 + 1]);

    measured("exclusive_scan", &mut || {
        sum = [rank as u32, 1];
        group.exclusive_scan(&mut sum, ReduceOp::Sum).unwrap();
    });
    let below = if rank == 0 { [0, 1] } else { [(0..rank as u32).sum(), rank as u32] };
    assert_eq!(sum, below);
}

/// Steps of a model whose parameters differ in size. Says how many bytes have left this host in steps that give all ranks
/// all averages, and in steps that give owners theirs and bring their values to all ranks.
fn train_sharded_and_not(group: &ProcessGroup) {
    let elements = [200_000, 3_000, 180_000, 700, 64, 150_000, 90_000, 250];
    let specs: Vec<ParameterSpec> = elements
        .iter()
        .enumerate()
        .map(|(at, &elements)| ParameterSpec::new(format!("p{at}"), [elements], DType::F32))
        .collect();
    for (name, is_sharded) in [("plain", false), ("sharded", true)] {
        let options = DdpOptions::default().bucket_bytes(1 << 20).sharded(is_sharded);
        let reducer = GradientReducer::new(specs.clone(), &options, group).unwrap();
        let step = || {
            for (parameter, &elements) in elements.iter().enumerate().rev() {
                reducer.submit(parameter, vec![1.0_f32; elements].as_slice().into());
            }
            drop(reducer.finish().unwrap());
            if is_sharded {
                let read = |_, place: drumline::ddp::ValuesMut<'_>| {
                    let drumline::ddp::ValuesMut::F32(place) = place else { return false };
                    place.fill(1.0);
                    true
                };
                reducer.gather(read, |_, _| {}).unwrap();
            }
        };
        step(); // ranks connect, and the buckets are planned anew
        step();
        group.barrier().unwrap();
        let before = sent_in_packets();
        group.barrier().unwrap();
        (0..STEPS).for_each(|_| step());
        group.barrier().unwrap();
        println!("{name} steps: {}", sent_in_packets() - before);
    }
}

/// The bytes that have left this host over `eth0`.
fn sent_from_here() -> u64 {
    counters()[0]
}

/// The same without the headers of packets: 14 bytes of Ethernet, 20 of IP, 32 of TCP.
fn sent_in_packets() -> u64 {
    let [bytes, packets] = counters();
    bytes - 66 * packets
}

/// The bytes and the packets that have left this host over `eth0`.
fn counters() -> [u64; 2] {
    let table = fs::read_to_string("/proc/self/net/dev").unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    let columns: Vec<&str> = line.split_whitespace().collect();
    [8, 9].map(|column| columns[column].parse().unwrap())
}

const LAYERS: usize = 16;
const LAYER_ELEMENTS: usize = 256 * 1024;
const LAYER_MS: u64 = 25;
const STEPS: usize = 5;

/// Backward passes whose layers take a while, and whose gradients go over a slow link. Of each, says how many
/// buckets came back before the last gradient.
fn train(group: &ProcessGroup) {
    let parameters = (0..LAYERS)
        .map(|layer| ParameterSpec::new(format!("layer{layer}"), [LAYER_ELEMENTS], DType::F32));
    let options = DdpOptions::default().bucket_bytes(2 << 20);
    let reducer = GradientReducer::new(parameters.collect(), &options, group).unwrap();
    let gradient = vec![1.0_f32; LAYER_ELEMENTS];
    for _ in 0..=STEPS {
        group.barrier().unwrap();
        reducer.begin_backward();
        for layer in (0..LAYERS).rev() {
            std::thread::sleep(Duration::from_millis(LAYER_MS));
            reducer.submit(layer, gradient.as_slice().into());
        }
        drop(reducer.finish().unwrap());
        let timeline = reducer.timeline();
        let hidden =
            timeline.buckets.iter().filter(|it| it.done_us <= timeline.backward_us).count();
        println!("{timeline}");
        println!("hidden: {hidden} {}", timeline.buckets.len());
    }
}

/// Some hosts in one network.
struct Hosts {
    name: String,
    count: usize,
    family: Family,
}

/// Which addresses hosts have, and no others.
#[derive(Clone, Copy)]
enum Family {
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
    fn new(count: usize) -> Option<Hosts> {
        Hosts::with(Family::V4, count)
    }

    fn with(family: Family, count: usize) -> Option<Hosts> {
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

    fn pull_the_cable_of(&self, host: usize) {
        ip(&format!("-n {} link set to{host} down", self.switch())).unwrap();
    }

    /// Gives every host another interface, `eth1`, in a network of its own.
    fn add_cables(&self) {
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
    fn sent(&self, host: usize, interface: &str) -> u64 {
        let file = format!("/sys/class/net/{interface}/statistics/tx_bytes");
        let output = Command::new("ip")
            .args(["netns", "exec", &self.netns(host), "cat", &file])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
    }

    /// Lets `megabits` per second out of every host.
    fn slow_down(&self, megabits: usize) -> Result<(), String> {
        for host in 0..self.count {
            let shape = format!("tbf rate {megabits}mbit burst 64kb latency 400ms");
            let line = format!("-n {} qdisc add dev eth0 root {shape}", self.netns(host));
            run("tc", &line)?;
        }
        Ok(())
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
        self.start_on(rank % self.count, rank, world_size, task, variable)
    }

    fn start_on<'a>(
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
            .args(["--exact", "rank", "--nocapture"])
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

/// The rest of the test needs what this machine lacks. Where `DRUMLINE_TEST_HOSTS` is set, as in CI, that is a
/// failure.
fn skip(reason: &str) {
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

    /// The addresses at which somebody listens on the rank's host, as the kernel writes them.
    fn listens_at(&self, table: &str) -> Vec<String> {
        // `ip netns exec` has become the rank.
        let table = fs::read_to_string(format!("/proc/{}/net/{table}", self.child.id())).unwrap();
        let listening = table.lines().filter(|line| line.split_whitespace().nth(3) == Some("0A"));
        listening.filter_map(|line| Some(line.split_whitespace().nth(1)?.to_owned())).collect()
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

/// Ranks that fill their hosts one after another: they add on the host first, then between hosts.
#[test]
fn hosts_that_share_memory_add_in_the_same_order() {
    let Some(network) = Hosts::new(2) else { return };
    for ranks_per_host in [1, 2, 3] {
        let world_size = 2 * ranks_per_host;
        let ranks: Vec<Rank> = (0..world_size)
            .map(|rank| {
                let secret = Some(("DRUMLINE_SECRET", SECRET));
                network.start_on(rank / ranks_per_host, rank, world_size, "add in order", secret)
            })
            .collect();
        for mut rank in ranks {
            let told = rank.line("same bits; ");
            assert_eq!(told, format!("shares memory: {}", ranks_per_host > 1));
            assert!(rank.child.wait().unwrap().success());
        }
    }
}

/// Counted by the interface of each host.
#[test]
fn a_sharded_step_sends_no_more_than_a_plain_one() {
    for hosts in [2, 4] {
        let Some(network) = Hosts::new(hosts) else { return };
        let ranks = network.start_all(hosts, "train, sharded and not");
        let sent = ranks.into_iter().map(|mut rank| {
            ["plain", "sharded"]
                .map(|name| -> u64 { rank.line(&format!("{name} steps: ")).parse().unwrap() })
        });
        let sent: Vec<[u64; 2]> = sent.collect();
        let [plain, sharded] = [0, 1].map(|kind| sent.iter().map(|it| it[kind]).sum::<u64>());
        println!("{hosts} hosts: {plain} bytes, sharded {sharded}");
        // The data are as many. The numbers of messages differ a little, and so do TCP's own bytes from run to run.
        assert!(sharded <= plain + plain / 100, "{sharded} bytes, of {plain}");
        let must = 2 * (hosts as u64 - 1) * 4 * 624_014 * STEPS as u64;
        assert!(sharded >= must, "{sharded} bytes, at least {must}");
    }
}

/// Counted by the interface of each host: what must cross the line crosses it once, however many ranks a host has.
#[test]
fn hosts_send_what_they_must_once() {
    let Some(network) = Hosts::new(2) else { return };
    for (ranks_per_host, rounding) in [(1, "once"), (2, "once"), (2, "host"), (4, "once")] {
        let ranks: Vec<Rank> = (0..2 * ranks_per_host)
            .map(|rank| {
                let variables = [("DRUMLINE_SECRET", SECRET), ("DRUMLINE_ROUNDING", rounding)];
                let task = "send what must be sent";
                network.start_on(rank / ranks_per_host, rank, 2 * ranks_per_host, task, variables)
            })
            .collect();
        let of_host = (ranks_per_host * BLOCK * size_of::<f32>()) as u64;
        for (number, mut rank) in ranks.into_iter().enumerate() {
            // The root is the last rank. In a reduce the first host sends, in a broadcast the second.
            let (first, second) = match number < ranks_per_host {
                true => (2 * of_host, 0),
                false => (0, 2 * of_host),
            };
            // Of as much f32 it would be twice `of_host`. A rank that is alone brings no sum, which would be wide.
            let has_sums = ranks_per_host > 1 && rounding == "once";
            let of_bf16 = if has_sums { of_host * 3 / 2 } else { of_host };
            // Without shared memory, sums reach the root by way of rank 0.
            let to_root = if ranks_per_host == 1 { 2 * of_host } else { first };
            let calls = [
                ("all_gather", of_host),
                ("reduce_scatter", of_host),
                ("broadcast", second),
                ("reduce", to_root),
                ("all_reduce of bf16", of_bf16),
            ];
            for (name, bound) in calls {
                let sent: u64 = rank.line(&format!("{name}: ")).parse().unwrap();
                // Headers of packets, and acknowledgements of what comes in.
                let most = bound + of_host / 5;
                assert!((bound..most).contains(&sent), "{name}: {sent} bytes, of {bound}");
            }
            let of_a_rank = 8 * ranks_per_host as u64;
            let first = number < ranks_per_host;
            let calls = [
                ("gather", u64::from(first), of_a_rank),
                ("scatter", u64::from(!first), of_a_rank),
                ("all_to_all", 1, of_a_rank * ranks_per_host as u64),
                ("scan", u64::from(first), 8),
                ("exclusive_scan", u64::from(first), 8),
            ];
            for (name, messages, bytes) in calls {
                let sent: u64 = rank.line(&format!("{name} of short data: ")).parse().unwrap();
                let bound = messages * CALLS * (HEADER + bytes);
                // Barriers, and what ranks tell each other now and then.
                let most = bound + 20 * HEADER;
                assert!((bound..most).contains(&sent), "{name}: {sent} bytes, of {bound}");
            }
            assert!(rank.child.wait().unwrap().success());
        }
    }
}

/// As torch's manual says of `GLOO_SOCKET_IFNAME`.
#[test]
fn data_goes_round_all_interfaces_that_are_named() {
    let Some(network) = Hosts::new(2) else { return };
    network.add_cables();
    let ranks: Vec<Rank> = (0..2)
        .map(|rank| {
            let names = ("DRUMLINE_SOCKET_IFNAME", "=eth0,=eth1");
            network.start_on(rank, rank, 2, "add in order", [("DRUMLINE_SECRET", SECRET), names])
        })
        .collect();
    for mut rank in ranks {
        rank.line("same bits; ");
        assert!(rank.child.wait().unwrap().success());
    }
    for host in 0..2 {
        let sent = ["eth0", "eth1"].map(|interface| network.sent(host, interface));
        // Some 1.4 MB or more in all. What is not data takes eth0.
        assert!(sent[1] > 400_000 && sent[0] > sent[1] / 2, "host {host} has sent {sent:?} bytes");
    }
}

/// With a link slowed on purpose, most buckets come back while backward goes on.
#[test]
fn communication_hides_behind_backward() {
    let Some(network) = Hosts::new(2) else { return };
    if let Err(reason) = network.slow_down(400) {
        return skip(&format!("cannot slow a link down: {reason}"));
    }
    let mut ranks = network.start_all(2, "train");
    // The first step begins with the link's burst, and ends with the plan of the others.
    let told: Vec<String> = (0..=STEPS).map(|_| ranks[0].line("hidden: ")).skip(1).collect();
    let most = told.iter().filter(|told| {
        let (hidden, all) = told.split_once(' ').unwrap();
        2 * hidden.parse::<usize>().unwrap() >= all.parse().unwrap()
    });
    assert!(most.count() > 0, "{told:?}");
}

#[test]
fn every_host_listens_on_its_one_address_only() {
    let Some(network) = Hosts::new(2) else { return };
    let mut ranks = network.start_all(3, "work until something breaks");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "6"));
    for (host, rank) in ranks.iter().enumerate().take(2) {
        let addresses = rank.listens_at("tcp");
        let own = format!("{:02X}0012C6:", host + 1);
        // The store, and each rank.
        assert_eq!(addresses.len(), [3, 1][host], "{addresses:?}");
        assert!(addresses.iter().all(|address| address.starts_with(&own)), "{addresses:?}, {own}");
        assert_eq!(rank.listens_at("tcp6"), [""; 0]);
    }
}

#[test]
fn hosts_without_ipv4_work_together() {
    let Some(network) = Hosts::with(Family::V6, 2) else { return };
    let mut ranks = network.start_all(3, "work until something breaks");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "6"));
    for (host, rank) in ranks.iter().enumerate().take(2) {
        let addresses = rank.listens_at("tcp6");
        let own = format!("000000FD0000000000000000{:02X}000000:", host + 1);
        assert_eq!(addresses.len(), [3, 1][host], "{addresses:?}");
        assert!(addresses.iter().all(|address| address.starts_with(&own)), "{addresses:?}, {own}");
        assert_eq!(rank.listens_at("tcp"), [""; 0]);
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

/// A child of a torch `DataLoader` is such a fork.
#[test]
fn a_rank_that_is_killed_is_named_although_a_fork_of_it_lives() {
    let Some(network) = Hosts::new(2) else { return };
    let mut ranks = network.start_all(2, "fork, and work until something breaks");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "3"));
    let child = ranks[1].line("child: ").parse().unwrap();
    let child = rustix::process::Pid::from_raw(child).unwrap();
    ranks[1].line("goes on");
    ranks[1].signal(rustix::process::Signal::KILL);
    let killed = Instant::now();
    let told = ranks[0].line("culprit: ");
    let noticed_after = killed.elapsed();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    println!("{:.3} s after it was killed: {told}", noticed_after.as_secs_f64());
    assert!(told.starts_with("Some(1): "), "{told}");
    assert!(told.contains("the process of rank 1 has ended"), "{told}");
    // Without the end of its connections, it takes the time limit: 30 s.
    assert!(noticed_after < Duration::from_secs(10), "{noticed_after:?}");
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
