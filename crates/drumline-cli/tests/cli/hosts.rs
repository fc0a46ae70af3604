//! Jobs on several hosts, each with a network of its own: they meet at the first one, in a file, or in etcd.

use std::{
    env, fs,
    io::{self, Write as _},
    net::{TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Config, ReduceOp, Step, connect_members, init_process_group, rendezvous::rendezvous, step,
};
use drumline_testing::{
    etcd,
    network::{Family, Network, skip},
};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::launch::{Ended, HANG, Launch, Started, eventually};

const SECRET: &str = "what only the hosts of this test know";

/// Hosts, and a directory that all of them see.
pub(crate) struct Town {
    pub(crate) network: Network,
    pub(crate) shared: TempDir,
}

/// How the hosts of a test meet.
pub(crate) struct Meeting<'t> {
    town: &'t Town,
    options: Vec<String>,
}

impl Town {
    /// `None`, with the reason printed, where this machine has no hosts for tests.
    pub(crate) fn of(hosts: usize) -> Option<Town> {
        Town::with(Family::V4, hosts)
    }

    fn with(family: Family, hosts: usize) -> Option<Town> {
        let shared = TempDir::new().unwrap();
        let tests = env::current_exe().unwrap();
        let programs = [tests.as_path(), Path::new(env!("CARGO_BIN_EXE_drumline"))];
        let [tests, programs] = programs.map(|file| file.parent().unwrap());
        let network = Network::new(hosts, family, &[shared.path(), tests, programs])?;
        Some(Town { network, shared })
    }

    /// At host 0.
    pub(crate) fn at_first_host(&self, nnodes: &str) -> Meeting<'_> {
        self.meeting(nnodes, "c10d", &self.network.endpoint(0, 29400))
    }

    pub(crate) fn meeting(&self, nnodes: &str, backend: &str, endpoint: &str) -> Meeting<'_> {
        self.with_options(&[
            ["--nnodes", nnodes],
            ["--rdzv-backend", backend],
            ["--rdzv-endpoint", endpoint],
        ])
    }

    fn with_options(&self, options: &[[&str; 2]]) -> Meeting<'_> {
        let quick = ["--rdzv-conf", "last_call_timeout=0,join_timeout=15"];
        let options = options.as_flattened().iter().chain(&quick);
        Meeting { town: self, options: options.map(|&option| option.to_owned()).collect() }
    }

    /// The path of a file that all hosts see.
    fn file(&self) -> String {
        self.shared.path().join("job").to_str().unwrap().to_owned()
    }

    /// Where the hosts reach a server of this machine that listens on loopback only.
    fn carry_to(&self, port: u16) -> String {
        let here = "198.18.0.254";
        self.network.set(None, &format!("ip addr replace {here}/24 dev bridge")).unwrap();
        let listener = self.network.within(None, || TcpListener::bind((here, 0)).unwrap());
        let address = listener.local_addr().unwrap().to_string();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                for (mut from, mut to) in [(&client, &server), (&server, &client)]
                    .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap()))
                {
                    thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(std::net::Shutdown::Write);
                    });
                }
            }
        });
        address
    }
}

impl Meeting<'_> {
    /// A launcher on a host, with these further options, and the program.
    pub(crate) fn host(&self, host: usize, options: &[&str]) -> Launch {
        let options = options.iter().map(|&option| option.to_owned());
        let directory = TempDir::new_in(self.town.shared.path()).unwrap();
        Launch::new(self.options.iter().cloned().chain(options))
            .on(&self.town.network, host, directory)
            .variable("DRUMLINE_SECRET", SECRET)
    }

    pub(crate) fn shell(&self, host: usize, options: &[&str], script: &str) -> Launch {
        self.host(host, &[options, &["--", "sh", "-c", script]].concat())
    }
}

fn stdout(ended: &Ended) -> Vec<&str> {
    ended.sorted_stdout()
}

#[test]
fn two_hosts_of_different_sizes_run_one_world() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE \
                  $TORCHELASTIC_RUN_ID $MASTER_ADDR";
    let first = meeting.shell(0, &["--nproc-per-node", "1", "--rdzv-id", "j"], script).start();
    let second = meeting.shell(1, &["--nproc-per-node", "2", "--rdzv-id", "j"], script).start();
    let (first, second) = (first.end(), second.end());
    assert_eq!((first.code, second.code), (0, 0), "{}{}", first.stderr, second.stderr);
    // Which of them comes to the store first has the first ranks.
    let one_two = [
        vec!["[0] 0 0 3 1 0 2 j 127.0.0.1"],
        vec!["[1] 1 0 3 2 1 2 j 127.0.0.1", "[2] 2 1 3 2 1 2 j 127.0.0.1"],
    ];
    let two_one = [
        vec!["[2] 2 0 3 1 1 2 j 127.0.0.1"],
        vec!["[0] 0 0 3 2 0 2 j 127.0.0.1", "[1] 1 1 3 2 0 2 j 127.0.0.1"],
    ];
    let all = [stdout(&first), stdout(&second)];
    assert!(all == one_two || all == two_one, "{all:?}");
}

/// The program of a rank that sums. Outside of a job, as a test, it does nothing.
#[test]
fn rank_that_sums() {
    let Some(stays) = env::var_os("HOSTS_TEST_SUM") else { return };
    let config = Config::from_env().unwrap();
    let group = init_process_group("env://", &config).unwrap();
    let mut sum = [group.rank() as f32 + 1.0];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    println!("sum {}", sum[0]);
    // As torch does: the store is a door on loopback, and says nothing of the other hosts.
    let place = rendezvous("env://", &config).unwrap();
    let ranks: Vec<usize> = (0..place.world_size).collect();
    let (store, door) = (place.store.clone(), Some(([127, 0, 0, 1], 29500).into()));
    let late = connect_members("late", store, place.rank, &ranks, door, &config).unwrap();
    late.all_reduce(&mut sum, ReduceOp::Max).unwrap();
    println!("late sum {}", sum[0]);
    if stays == "stays" {
        thread::sleep(HANG);
    }
    late.destroy().unwrap();
    group.destroy().unwrap();
}

fn this_test(name: &str) -> Vec<String> {
    let this = env::current_exe().unwrap().to_str().unwrap().to_owned();
    vec!["--".into(), this, "--exact".into(), name.into(), "--nocapture".into()]
}

#[test]
fn ranks_of_all_hosts_sum_with_every_way_to_meet() {
    let Some(town) = Town::of(3) else { return };
    let etcd = etcd::is_installed().then(|| etcd::Server::start(&[]));
    let in_etcd = etcd.as_ref().map(|it| town.meeting("3", "etcd", &town.carry_to(it.port)));
    // Host 0 takes this name for loopback.
    let at_name = town.meeting("3", "c10d", "host0:29400");
    let ways = [at_name, town.meeting("3", "file", &town.file())];
    for meeting in ways.into_iter().chain(in_etcd) {
        sum_over(&meeting, 3);
    }
    let numbers = ["0", "1", "2"].map(|number| {
        town.with_options(&[
            ["--nnodes", "3"],
            ["--node-rank", number],
            ["--master-addr", "host0"],
            ["--master-port", "29500"],
        ])
    });
    let hosts =
        [0, 1, 2].map(|host| start_sum(&numbers[host], host, &["--torch-store", "network"]));
    end_sum(hosts);
}

#[test]
fn ranks_of_hosts_without_ipv4_sum() {
    let Some(town) = Town::with(Family::V6, 2) else { return };
    sum_over(&town.at_first_host("2"), 2);
    // In a closed network.
    for host in 0..2 {
        town.network.set(Some(host), "ip -6 route flush default").unwrap();
    }
    sum_over(&town.meeting("2", "file", &town.file()), 2);
}

/// Lets nobody connect at `eth0` to other ports than these.
fn wall_up(town: &Town, ports: &str) -> Result<(), String> {
    let is_first = "tcp flags & (syn|ack) == syn";
    let rule =
        format!("nft add rule inet wall in iifname eth0 {is_first} tcp dport != {ports} drop");
    let chain = "nft add chain inet wall in { type filter hook input priority 0 ; }";
    (0..2).try_for_each(|host| {
        let lines = ["nft add table inet wall", chain, &rule];
        lines.into_iter().try_for_each(|line| town.network.set(Some(host), line))
    })
}

/// The ports of the guide, and no others.
#[test]
fn a_job_behind_a_firewall_takes_the_ports_that_the_guide_names() {
    let Some(town) = Town::of(2) else { return };
    if let Err(reason) = wall_up(&town, "{ 29400, 40000-40007 }") {
        return skip(&format!("no firewall here: {reason}"));
    }
    let meeting = town.at_first_host("2");
    let within =
        |launch: Launch, ports: &str| launch.variable("DRUMLINE_PORT_RANGE", ports).start();
    // Two stores of the first host, and for each of two ranks its sign and two groups.
    end_sum([0, 1].map(|host| within(summing(&meeting, host, &[]), "40000-40007")));

    // A stream of bench between hosts, as it is without drumline.
    let bench = ["--", env!("CARGO_BIN_EXE_drumline"), "bench", "--sizes", "8", "--rounds", "1"];
    let hosts = [0, 1].map(|host| within(meeting.host(host, &bench), "40000-40007"));
    for host in hosts.map(Started::end) {
        assert_eq!(host.code, 0, "{}", host.stderr);
    }

    for host in [0, 1].map(|host| within(summing(&meeting, host, &[]), "40000-40000")) {
        let host = host.end();
        assert_ne!(host.code, 0);
        let told = "DRUMLINE_PORT_RANGE: all ports from 40000 to 40000 of 198.18.0.";
        assert!(host.stderr.contains(told), "{}", host.stderr);
    }
}

#[test]
fn hosts_of_two_networks_take_the_one_of_local_addr() {
    let Some(town) = Town::of(2) else { return };
    town.network.add_cables();
    if let Err(reason) = wall_up(&town, "{ 29400 }") {
        return skip(&format!("no firewall here: {reason}"));
    }
    let meeting = town.at_first_host("2");
    let start = |host, own| start_sum(&meeting, host, &["--local-addr", own]);
    end_sum([start(0, "198.19.0.1"), start(1, "198.19.0.2")]);
}

/// The system's resolver takes minutes here. Nobody waits for it longer than for the job: neither where the hosts or the
/// ranks meet, nor for an own address.
#[test]
fn a_resolver_that_never_answers_takes_no_more_time_than_the_job() {
    let Some(town) = Town::of(1) else { return };
    let _deaf = town.network.within(Some(0), || UdpSocket::bind(("127.0.0.1", 53)).unwrap());
    let settings = town.shared.path().join("resolv.conf");
    fs::write(&settings, "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n").unwrap();
    let mut mount = town.network.on(0, town.shared.path());
    let mount = mount.args(["mount", "--bind"]).arg(&settings).arg("/etc/resolv.conf");
    assert!(mount.status().unwrap().success());
    let names: Vec<String> = (0..7).map(|number| format!("deaf{number}.example")).collect();
    let waits = |more: &str| format!("join_timeout=2{more}");
    let launch = |backend: &str, endpoint: &str, conf: &str, more: &[&str]| {
        let endpoint = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint];
        let options = [&["--nnodes", "2", "--rdzv-conf", conf][..], &endpoint, more, &["true"]];
        let directory = TempDir::new_in(town.shared.path()).unwrap();
        Launch::new(options.concat())
            .on(&town.network, 0, directory)
            .variable("DRUMLINE_SECRET", SECRET)
    };
    let at = |number: usize, port: u16| format!("{}:{port}", names[number]);
    let local = ["--local-addr", &*names[4]];
    let launchers = [
        launch("c10d", &at(0, 29400), &waits(""), &[]),
        launch("c10d", &at(1, 29400), &waits(",is_host=1"), &[]),
        launch("c10d", &at(2, 29400), &waits(",is_host=0"), &[]),
        launch("etcd", &at(3, 2379), &waits(""), &[]),
        launch("file", &town.file(), &waits(""), &local),
    ];
    let mut all: Vec<Started> = launchers.into_iter().map(Launch::start).collect();
    for (rank, master) in [(0, &names[5]), (1, &names[6])] {
        let directory = TempDir::new_in(town.shared.path()).unwrap();
        let rank = Launch::new(["bench", "--sizes", "8", "--rounds", "1"])
            .on(&town.network, 0, directory)
            .variable("DRUMLINE_SECRET", SECRET)
            .variable("DRUMLINE_TIMEOUT_S", "2")
            .variable("RANK", &rank.to_string())
            .variable("WORLD_SIZE", "2")
            .variable("MASTER_ADDR", master)
            .variable("MASTER_PORT", "29500");
        all.push(rank.start_as(Command::new(env!("CARGO_BIN_EXE_drumline"))));
    }
    for (ended, name) in all.into_iter().map(Started::end).zip(&names) {
        assert_ne!(ended.code, 0);
        assert!(ended.stderr.contains(&**name), "{}", ended.stderr);
    }
}

/// Not at the door on loopback to torch's store.
#[test]
fn check_says_in_a_rank_where_the_other_hosts_reach_it() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let check = ["--", env!("CARGO_BIN_EXE_drumline"), "check"];
    for host in [0, 1].map(|host| meeting.host(host, &check).start()).map(Started::end) {
        let text = String::from_utf8_lossy(&host.stdout);
        let told = text.lines().find_map(|line| Some(line.split_once("reached at")?.1));
        assert!(told.is_some_and(|it| it.contains("198.18.0.")), "{text}{}", host.stderr);
    }
}

#[test]
fn after_the_end_of_a_host_the_ranks_of_the_others_meet_anew() {
    let Some(town) = Town::of(3) else { return };
    let meeting = town.meeting("2:3", "file", &town.file());
    let conf = ["--rdzv-conf", "last_call_timeout=15,join_timeout=15", "--nproc-per-node", "1"];
    let start = |host| summing(&meeting, host, &conf).variable("HOSTS_TEST_SUM", "stays").start();
    let mut hosts = [0, 1, 2].map(start);
    hosts.iter_mut().for_each(|host| host.wait_for("late sum 6", 1));
    town.network.end_host(0);
    let [mut lost, mut others @ ..] = hosts;
    others.iter_mut().for_each(|host| host.wait_for("late sum 3", 1));
    others.iter().for_each(|host| host.signal(Signal::TERM));
    // It leaves its files.
    assert_eq!(lost.wait(), 137);
    for host in others.map(Started::end) {
        assert_eq!(host.code, 143, "{}", host.stderr);
    }
}

fn sum_over(meeting: &Meeting<'_>, hosts: usize) {
    end_sum((0..hosts).map(|host| start_sum(meeting, host, &[])).collect::<Vec<_>>());
}

fn start_sum(meeting: &Meeting<'_>, host: usize, options: &[&str]) -> Started {
    summing(meeting, host, options).start()
}

/// Two ranks that sum.
pub(crate) fn summing(meeting: &Meeting<'_>, host: usize, options: &[&str]) -> Launch {
    let program = this_test("hosts::rank_that_sums");
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    let options = [&["--nproc-per-node", "2"], options, &program].concat();
    meeting.host(host, &options).variable("HOSTS_TEST_SUM", "leaves")
}

fn end_sum(hosts: impl IntoIterator<Item = Started>) {
    let hosts: Vec<Started> = hosts.into_iter().collect();
    let ranks = 2 * hosts.len();
    for host in hosts.into_iter().map(Started::end) {
        assert_eq!(host.code, 0, "{}", host.stderr);
        let text = String::from_utf8_lossy(&host.stdout);
        assert_eq!(text.matches(&format!("sum {}", ranks * (ranks + 1) / 2)).count(), 4, "{text}");
    }
}

#[test]
fn the_numbers_of_hosts_decide_the_order_of_ranks() {
    let Some(town) = Town::of(3) else { return };
    let first = town.network.address(2);
    let host = |host: usize, number: &str| {
        let meeting = town.with_options(&[
            ["--nnodes", "3"],
            ["--node-rank", number],
            ["--master-addr", &first],
            ["--master-port", "29500"],
        ]);
        meeting.shell(host, &[], "echo $GROUP_RANK $RANK").start()
    };
    let hosts = [host(0, "2"), host(1, "1"), host(2, "0")].map(Started::end);
    for (number, host) in ["2", "1", "0"].into_iter().zip(hosts) {
        assert_eq!(host.code, 0, "{}", host.stderr);
        assert_eq!(stdout(&host), [format!("[{number}] {number} {number}")]);
    }
}

#[test]
fn a_spare_takes_the_place_of_a_lost_host() {
    let Some(town) = Town::of(3) else { return };
    let meeting = town.at_first_host("2");
    let script = "echo rank $RANK of $WORLD_SIZE; exec sleep 100";
    let mut first = meeting.shell(0, &[], script).start();
    let mut second = meeting.shell(1, &[], script).start();
    first.wait_for("of 2", 1);
    second.wait_for("of 2", 1);
    let run =
        concat!("exec env --default-signal ", env!("CARGO_BIN_EXE_drumline"), " run \"$@\" 2>&1");
    let mut command = Command::new("sh");
    command.args(["-c", run, "sh"]);
    let mut spare = meeting.shell(2, &[], script).start_as(command);
    spare.wait_for("this one is a spare", 1);
    second.signal(Signal::KILL);
    spare.wait_for("of 2", 1);
    assert_eq!(second.end().code, 137);
    spare.signal(Signal::TERM);
    assert_eq!(spare.end().code, 143);
    // Too few are left.
    let first = first.end();
    assert_eq!(first.code, 143, "{}", first.stderr);
}

#[test]
fn a_failure_on_one_host_ends_the_job_on_all_with_its_code_and_text() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let script = "[ $RANK = 1 ] && { echo out of patience >&2; exit 7; }; exec sleep 100";
    let hosts = [0, 1].map(|host| meeting.shell(host, &[], script).start()).map(Started::end);
    for host in &hosts {
        assert_eq!(host.code, 7, "{}", host.stderr);
        assert!(host.stderr.contains("rank 1 (pid "), "{}", host.stderr);
        assert!(host.stderr.contains("exited with code 7"), "{}", host.stderr);
        assert!(host.stderr.contains("out of patience"), "{}", host.stderr);
    }
}

/// Rank 0 has lost rank 1 of the other host and ends at once. Rank 1 has told why it fails, and takes its time.
#[test]
fn a_rank_that_has_only_lost_one_of_another_host_is_not_blamed() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let lost = "group \"world\", rank 0: barrier, call #3, failed after 2.0ms: the process of rank 1 has ended; \
                look at what rank 1 printed last (drumline explain peer_exited)";
    let mark = town.file();
    let script = format!(
        "if [ $RANK = 0 ]; then until [ -e {mark} ]; do sleep 0.01; done; echo '{lost}' >&2; exit 1; fi
         echo '{{\"message\": \"no data\"}}' > $TORCHELASTIC_ERROR_FILE; touch {mark}; exec sleep 100"
    );
    let launches = [0, 1].map(|host| meeting.shell(host, &[], &script).start());
    for ended in launches.map(Started::end) {
        assert_eq!(ended.code, 1, "{}", ended.stderr);
        let report = ended.report().join("\n");
        assert!(report.contains("drumline: rank 1 on host "), "{report}");
        assert!(report.contains("    no data"), "{report}");
        let only_lost = "rank 0 only lost a rank of another host, which failed first";
        assert_eq!(report.contains("rank 0 (pid "), report.contains(only_lost), "{report}");
    }
}

#[test]
fn after_a_failure_all_hosts_start_again() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let script = "echo $RANK.$TORCHELASTIC_RESTART_COUNT
                  [ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ] && exit 7
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 100";
    let options = ["--max-restarts", "1", "--restart-delay", "0"];
    let hosts = [0, 1].map(|host| meeting.shell(host, &options, script).start()).map(Started::end);
    let mut told: Vec<&str> = Vec::new();
    for host in &hosts {
        assert_eq!(host.code, 0, "{}", host.stderr);
        told.extend(stdout(host));
    }
    told.sort_unstable();
    assert_eq!(told, ["[0] 0.0", "[0] 0.1", "[1] 1.0", "[1] 1.1"]);
}

/// The hosts meet in a file, which both reach. In the second world the network between them is away, for longer than a
/// host tries to reach the first one.
#[test]
fn a_network_that_is_away_for_a_while_costs_restarts_and_not_the_job() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.meeting("2", "file", &town.file());
    let at = |name: &str| town.shared.path().join(name);
    let script = format!(
        "echo world $TORCHELASTIC_RESTART_COUNT; cd {}
         if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then until [ -e away ]; do sleep 0.1; done; exit 3; fi
         until [ -e back ]; do sleep 0.1; done",
        town.shared.path().display()
    );
    let options = ["--max-restarts", "10", "--restart-delay", "0"];
    let mut hosts = [0, 1].map(|host| meeting.shell(host, &options, &script).start());
    hosts.iter_mut().for_each(|host| host.wait_for("world 0", 1));
    town.network.pull_the_cable_of(1);
    fs::write(at("away"), "").unwrap();
    eventually("a third world begins", || hosts.iter_mut().any(|host| host.has_printed("world 2")));
    town.network.put_the_cable_of(1);
    fs::write(at("back"), "").unwrap();
    for host in hosts.map(Started::end) {
        assert_eq!(host.code, 0, "{}", host.stderr);
    }
}

#[test]
fn a_lost_host_is_named_and_the_others_go_on() {
    let Some(town) = Town::of(2) else { return };
    for lost in [0, 1] {
        let meeting = town.meeting("1:2", "file", &town.file());
        let id = format!("lost-{lost}");
        // A world of one host may begin before the second one comes.
        let script = "echo size $WORLD_SIZE; [ -e stop ] || exec sleep 100";
        let conf = ["--rdzv-id", &id, "--rdzv-conf", "last_call_timeout=15,join_timeout=15"];
        let mut hosts = [0, 1].map(|host| meeting.shell(host, &conf, script).start());
        hosts.iter_mut().for_each(|host| host.wait_for("size 2", 1));
        hosts[lost].signal(Signal::KILL);
        let [mut first, second] = hosts;
        let mut other = second;
        if lost == 1 {
            std::mem::swap(&mut first, &mut other);
        }
        other.wait_for("size 1", 1);
        other.signal(Signal::TERM);
        let other = other.end();
        assert_eq!(other.code, 143, "{}", other.stderr);
        assert!(other.stderr.contains("is lost"), "{}", other.stderr);
        assert_eq!(first.end().code, 137);
    }
}

#[test]
fn a_job_survives_the_loss_of_its_first_host_and_a_pause_of_etcd() {
    if !etcd::is_installed() {
        return;
    }
    let Some(town) = Town::of(2) else { return };
    let server = etcd::Server::start(&[]);
    let meeting = town.meeting("1:2", "etcd", &town.carry_to(server.port));
    let conf = ["--rdzv-conf", "last_call_timeout=15,join_timeout=15"];
    let script = "echo size $WORLD_SIZE; exec sleep 100";
    let start = |host| meeting.shell(host, &conf, script).start();
    let (mut first, mut second) = (start(0), start(1));
    for host in [&mut first, &mut second] {
        host.wait_for("size 2", 1);
    }
    first.signal(Signal::KILL);
    second.wait_for("size 1", 1);
    assert_eq!(first.end().code, 137);

    // Longer than the lease: the workers end, and start again when etcd answers.
    server.signal(Signal::STOP);
    eventually("the workers end", || sleepers(&second) == 0);
    server.signal(Signal::CONT);
    second.wait_for("size 1", 2);
    second.signal(Signal::TERM);
    let second = second.end();
    assert_eq!(second.code, 143, "{}", second.stderr);
    assert!(second.stderr.contains("is lost"), "{}", second.stderr);
}

#[test]
fn one_name_serves_one_job_after_another() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.meeting("2", "file", &town.file());
    for _ in 0..3 {
        let hosts = [0, 1].map(|host| meeting.shell(host, &[], "echo up").start());
        let hosts = hosts.map(Started::end);
        for host in hosts {
            assert_eq!(host.code, 0, "{}", host.stderr);
            assert!(String::from_utf8_lossy(&host.stdout).contains("up"), "{}", host.stderr);
        }
    }
}

#[test]
fn without_the_first_host_there_is_no_store_and_the_job_ends_saying_so() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let script = "echo up; exec sleep 100";
    let mut first = meeting.shell(0, &[], script).start();
    let mut second = meeting.shell(1, &[], script).start();
    first.wait_for("up", 1);
    second.wait_for("up", 1);
    first.signal(Signal::KILL);
    let second = second.end();
    assert_eq!(second.code, 1, "{}", second.stderr);
    assert!(second.stderr.contains("the first host of the job is lost"), "{}", second.stderr);
    assert_eq!(first.end().code, 137);
}

/// The program of a rank that makes steps until all stop.
#[test]
fn rank_that_steps() {
    if env::var_os("HOSTS_TEST_STEP").is_none() {
        return;
    }
    let (size, rank) = (env::var("WORLD_SIZE").unwrap(), env::var("RANK").unwrap());
    println!("size {size}");
    let began = Instant::now();
    for number in 0.. {
        if step(number) == Step::Stop {
            println!("rank {rank} stops at {number}");
            return;
        }
        if size == "4" && number == 3 {
            return;
        }
        assert!(began.elapsed() < HANG, "nobody comes");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_host_that_comes_later_is_taken_in_at_one_step_of_all_ranks() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("1:2");
    let program = this_test("hosts::rank_that_steps");
    let options = ["--nproc-per-node", "2"];
    let options: Vec<&str> =
        options.into_iter().chain(program.iter().map(String::as_str)).collect();
    let start = |host| meeting.host(host, &options).variable("HOSTS_TEST_STEP", "1").start();
    let mut first = start(0);
    first.wait_for("size 2", 2);
    let second = start(1).end();
    let first = first.end();
    for host in [&first, &second] {
        assert_eq!(host.code, 0, "{}", host.stderr);
        let text = String::from_utf8_lossy(&host.stdout);
        assert_eq!(text.matches("size 4").count(), 2, "{text}{}", host.stderr);
    }
    let text = String::from_utf8_lossy(&first.stdout).into_owned();
    let stops: Vec<&str> =
        text.lines().filter_map(|line| Some(line.split_once(" stops at ")?.1)).collect();
    assert!(matches!(stops[..], [one, other] if one == other), "{text}");
}

#[test]
fn hosts_that_do_not_fit_are_told_at_both_ends() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let script = "exec sleep 100";
    let first = meeting.shell(0, &["--rdzv-conf", "join_timeout=12"], script).start();
    let other = |options: &[&str], secret: &str| {
        let options = [options, &["--rdzv-conf", "join_timeout=12"]].concat();
        let mut launch = meeting.shell(1, &options, script);
        launch.variables = vec![("DRUMLINE_SECRET", secret.into())];
        launch.start().end()
    };
    let wrong_secret = other(&[], "some other secret of a job");
    assert_ne!(wrong_secret.code, 0);
    assert!(wrong_secret.stderr.contains("secret"), "{}", wrong_secret.stderr);
    let wrong_size = other(&["--nnodes", "3"], SECRET);
    assert_eq!(wrong_size.code, 2, "{}", wrong_size.stderr);
    assert!(
        wrong_size.stderr.contains("number of hosts (--nnodes) is 3:3"),
        "{}",
        wrong_size.stderr
    );

    let wrong_name = other(&["--rdzv-id", "another"], SECRET);
    assert_eq!(wrong_name.code, 2, "{}", wrong_name.stderr);
    let told = "its run id is another, that of the job is none";
    assert!(wrong_name.stderr.contains(told), "{}", wrong_name.stderr);

    let first = first.end();
    assert_eq!(first.code, 1, "{}", first.stderr);
    let wrong = ["secret", "number of hosts (--nnodes) is 3:3", told];
    for part in ["1 of 2 hosts are missing"].into_iter().chain(wrong) {
        assert!(first.stderr.contains(part), "{part}: {}", first.stderr);
    }
}

#[test]
fn a_stranger_in_the_place_of_the_first_host_is_told() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    // It takes connections, and says nothing.
    let place = town.network.endpoint(0, 29400);
    let _stranger = town.network.within(Some(0), || TcpListener::bind(place).unwrap());
    let ended = meeting.shell(1, &["--rdzv-conf", "join_timeout=1"], "true").start().end();
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("no launcher of drumline"), "{}", ended.stderr);
}

#[test]
fn without_a_secret_hosts_are_refused_with_what_to_do() {
    let Some(town) = Town::of(2) else { return };
    let mut launch = town.at_first_host("2").shell(0, &[], "true");
    launch.variables.clear();
    let ended = launch.start().end();
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("drumline secret"), "{}", ended.stderr);
}

#[test]
fn strangers_at_the_door_leave_the_job_unharmed() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let endpoint = town.network.endpoint(0, 29400);
    let script = "echo up; sleep 1";
    let first = meeting.shell(0, &[], script).start();
    let began = Instant::now();
    let _strangers = town.network.within(Some(1), || {
        let mut strangers: Vec<TcpStream> = Vec::new();
        while strangers.len() < 500 {
            assert!(began.elapsed() < HANG);
            let Ok(mut stranger) = TcpStream::connect(&endpoint) else { continue };
            let _ = stranger.write_all(b"GET / HTTP/1.1\r\nHost: stranger\r\n\r\n");
            strangers.push(stranger);
        }
        strangers
    });
    let second = meeting.shell(1, &[], script).start();
    for host in [first, second].map(Started::end) {
        assert_eq!(host.code, 0, "{}", host.stderr);
        assert!(host.stderr.lines().count() < 10, "{}", host.stderr);
    }
}

#[test]
fn a_launcher_that_is_stopped_loses_its_workers_before_the_others_go_on() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("1:2");
    let script = "echo size $WORLD_SIZE; exec sleep 100";
    let conf = ["--rdzv-conf", "last_call_timeout=15,join_timeout=15"];
    // A stopped process might keep a file locked.
    let mut hosts = [1, 0].map(|host| meeting.shell(host, &conf, script).start());
    hosts.iter_mut().for_each(|host| host.wait_for("size 2", 1));
    let [stopped, mut other] = hosts;
    stopped.signal(Signal::STOP);
    other.wait_for("size 1", 1);
    // Only its launcher and its keeper live.
    assert_eq!(sleepers(&stopped), 0, "two worlds at once");
    stopped.signal(Signal::CONT);
    // It comes anew, and is taken in.
    other.wait_for("size 2", 2);
    other.signal(Signal::TERM);
    stopped.signal(Signal::TERM);
    for host in [stopped, other].map(Started::end) {
        assert_eq!(host.code, 143, "{}", host.stderr);
        // Keepers have killed the workers.
        assert!(!host.stderr.contains("did not send it"), "{}", host.stderr);
    }
}

/// The first host is stopped before it says where the ranks meet.
#[test]
fn a_launcher_that_waits_for_the_first_host_ends_on_a_signal() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.meeting("2", "file", &town.file());
    let start = |host: usize, number: &str| {
        meeting.shell(host, &["--node-rank", number], "exec sleep 100").start()
    };
    let waits = start(0, "1");
    let said = |text: &str| fs::read(town.file()).is_ok_and(|it| memmem(&it, text.as_bytes()));
    eventually("it leads", || said("\"leader\":1,"));
    let first = start(1, "0");
    eventually("there is a world", || said("\"phase\":\"Running\""));
    // Before it reads that. And it must not keep the file locked.
    let lock = fs::File::open(town.file()).unwrap();
    lock.lock().unwrap();
    first.signal(Signal::STOP);
    drop(lock);
    eventually("it waits", || said("\"world\":1,\"state\":\"Waiting\""));
    waits.signal(Signal::TERM);
    let waits = waits.end();
    assert_eq!(waits.code, 143, "{}", waits.stderr);
    first.signal(Signal::CONT);
    first.signal(Signal::TERM);
    assert_eq!(first.end().code, 143);
}

fn memmem(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|it| it == part)
}

/// Each rank stops the process that starts the next one. All together this takes longer than a host may be silent.
#[test]
fn beats_go_on_while_ranks_start() {
    let Some(town) = Town::of(2) else { return };
    let meeting = town.at_first_host("2");
    let slow = "kill -STOP $PPID; sleep 0.3; kill -CONT $PPID; echo size $WORLD_SIZE";
    let hosts = [(0, "1", "true"), (1, "40", slow)].map(|(host, ranks, script)| {
        meeting.shell(host, &["--nproc-per-node", ranks], script).start()
    });
    let [first, second] = hosts.map(Started::end);
    assert_eq!((first.code, second.code), (0, 0), "{}{}", first.stderr, second.stderr);
    assert_eq!(second.sorted_stdout().len(), 40, "another world: {}", second.stderr);
    assert!(second.sorted_stdout().iter().all(|line| line.ends_with("size 41")));
}

/// The workers of a launcher that are alive.
fn sleepers(launcher: &Started) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let is_worker = |entry: &std::fs::DirEntry| {
        let read = |file| std::fs::read(entry.path().join(file)).unwrap_or_default();
        let has = |text: Vec<u8>, what: &[u8]| text.split(|&byte| byte == 0).any(|it| it == what);
        has(read("environ"), launcher.marker.as_bytes()) && has(read("cmdline"), b"sleep")
    };
    processes.filter(is_worker).count()
}
