//! Jobs on several hosts: each launcher is one host, and they meet on loopback or in a file. They share one machine, so
//! this does not test the network; `netns.rs` does.

use std::{
    env,
    io::Write as _,
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::Command,
    time::{Duration, Instant},
};

use drumline::{Config, ReduceOp, Step, init_process_group, step};
use rustix::process::Signal;

use crate::{
    etcd,
    launch::{Ended, HANG, Launch, Started, eventually},
};

const SECRET: &str = "what only the hosts of this test know";

/// How the hosts of a test meet.
struct Meeting(Vec<String>);

impl Meeting {
    /// At the first host, which is the one that is started first.
    fn at_first_host(nnodes: &str) -> Meeting {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let endpoint = free.local_addr().unwrap().to_string();
        Meeting::of(nnodes, "c10d", &endpoint)
    }

    fn of(nnodes: &str, backend: &str, endpoint: &str) -> Meeting {
        let options = ["--nnodes", nnodes, "--rdzv-backend", backend, "--rdzv-endpoint", endpoint];
        let quick = ["--rdzv-conf", "last_call_timeout=0,join_timeout=15"];
        Meeting(options.iter().chain(&quick).map(|&option| option.to_owned()).collect())
    }

    /// A launcher with these further options, and the program.
    fn host(&self, options: &[&str]) -> Launch {
        let options = options.iter().map(|&option| option.to_owned());
        Launch::new(self.0.iter().cloned().chain(options)).variable("DRUMLINE_SECRET", SECRET)
    }

    fn shell(&self, options: &[&str], script: &str) -> Launch {
        self.host(&[options, &["--", "sh", "-c", script]].concat())
    }
}

fn stdout(ended: &Ended) -> Vec<&str> {
    ended.sorted_stdout()
}

#[test]
fn two_hosts_of_different_sizes_run_one_world() {
    let meeting = Meeting::at_first_host("2");
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE \
                  $TORCHELASTIC_RUN_ID $MASTER_ADDR";
    let first = meeting.shell(&["--nproc-per-node", "1", "--rdzv-id", "j"], script).start();
    let second = meeting.shell(&["--nproc-per-node", "2", "--rdzv-id", "j"], script).start();
    let (first, second) = (first.end(), second.end());
    assert_eq!((first.code, second.code), (0, 0), "{}{}", first.stderr, second.stderr);
    // Which of them listens first is the first host.
    let mut all = [stdout(&first), stdout(&second)];
    all.sort_unstable();
    let one_two = [
        vec!["[0] 0 0 3 1 0 2 j 127.0.0.1"],
        vec!["[1] 1 0 3 2 1 2 j 127.0.0.1", "[2] 2 1 3 2 1 2 j 127.0.0.1"],
    ];
    let two_one = [
        vec!["[0] 0 0 3 2 0 2 j 127.0.0.1", "[1] 1 1 3 2 0 2 j 127.0.0.1"],
        vec!["[2] 2 0 3 1 1 2 j 127.0.0.1"],
    ];
    assert!(all == one_two || all == two_one, "{all:?}");
}

/// The program of a rank that sums. Outside of a job, as a test, it does nothing.
#[test]
fn rank_that_sums() {
    if env::var_os("HOSTS_TEST_SUM").is_none() {
        return;
    }
    let group = init_process_group("env://", &Config::from_env().unwrap()).unwrap();
    let mut sum = [group.rank() as f32 + 1.0];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    println!("sum {}", sum[0]);
    group.destroy().unwrap();
}

fn address(server: &etcd::Server) -> String {
    format!("127.0.0.1:{}", server.port)
}

fn this_test(name: &str) -> Vec<String> {
    let this = env::current_exe().unwrap().to_str().unwrap().to_owned();
    vec!["--".into(), this, "--exact".into(), name.into(), "--nocapture".into()]
}

#[test]
fn ranks_of_all_hosts_sum_with_every_way_to_meet() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("job");
    let etcd = etcd::is_installed().then(|| etcd::Server::start(&[]));
    let in_etcd = |server: &etcd::Server| Meeting::of("3", "etcd", &address(server));
    let meetings = [Meeting::at_first_host("3"), Meeting::of("3", "file", file.to_str().unwrap())];
    for meeting in meetings.into_iter().chain(etcd.as_ref().map(in_etcd)) {
        let program = this_test("hosts::rank_that_sums");
        let options = ["--nproc-per-node", "2"];
        let options: Vec<&str> =
            options.into_iter().chain(program.iter().map(String::as_str)).collect();
        let start = || meeting.host(&options).variable("HOSTS_TEST_SUM", "1").start();
        let hosts = [start(), start(), start()].map(Started::end);
        for host in hosts {
            assert_eq!(host.code, 0, "{}", host.stderr);
            let text = String::from_utf8_lossy(&host.stdout);
            assert_eq!(text.matches("sum 21").count(), 2, "{text}");
        }
    }
}

#[test]
fn the_numbers_of_hosts_decide_the_order_of_ranks() {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let host = |number: &str| {
        let options = ["--nnodes", "3", "--node-rank", number];
        let first = ["--master-addr", "127.0.0.1", "--master-port", &port];
        let program = ["--", "sh", "-c", "echo $GROUP_RANK $RANK"];
        let options: Vec<&str> = [&options[..], &first, &program].concat();
        Launch::new(options).variable("DRUMLINE_SECRET", SECRET).start()
    };
    let hosts = ["2", "1", "0"].map(host).map(Started::end);
    for (number, host) in ["2", "1", "0"].into_iter().zip(hosts) {
        assert_eq!(host.code, 0, "{}", host.stderr);
        assert_eq!(stdout(&host), [format!("[{number}] {number} {number}")]);
    }
}

#[test]
fn a_spare_takes_the_place_of_a_lost_host() {
    let meeting = Meeting::at_first_host("2");
    let script = "echo rank $RANK of $WORLD_SIZE; exec sleep 100";
    let start = |is_first: &str| {
        let conf = format!("join_timeout=15,is_host={is_first}");
        meeting.shell(&["--rdzv-conf", &conf], script).start()
    };
    let mut first = start("1");
    let mut second = start("0");
    first.wait_for("of 2", 1);
    second.wait_for("of 2", 1);
    let run =
        concat!("exec env --default-signal ", env!("CARGO_BIN_EXE_drumline"), " run \"$@\" 2>&1");
    let mut command = Command::new("sh");
    command.args(["-c", run, "sh"]);
    let conf = ["--rdzv-conf", "join_timeout=15,is_host=0"];
    let mut spare = meeting.shell(&conf, script).start_as(command);
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
    let meeting = Meeting::at_first_host("2");
    let script = "[ $RANK = 1 ] && { echo out of patience >&2; exit 7; }; exec sleep 100";
    let hosts = [(); 2].map(|()| meeting.shell(&[], script).start()).map(Started::end);
    for host in &hosts {
        assert_eq!(host.code, 7, "{}", host.stderr);
        assert!(host.stderr.contains("rank 1 (pid "), "{}", host.stderr);
        assert!(host.stderr.contains("exited with code 7"), "{}", host.stderr);
        assert!(host.stderr.contains("out of patience"), "{}", host.stderr);
    }
}

#[test]
fn after_a_failure_all_hosts_start_again() {
    let meeting = Meeting::at_first_host("2");
    let script = "echo $RANK.$TORCHELASTIC_RESTART_COUNT
                  [ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ] && exit 7
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 100";
    let options = ["--max-restarts", "1", "--restart-delay", "0"];
    let hosts = [(); 2].map(|()| meeting.shell(&options, script).start()).map(Started::end);
    let mut told: Vec<&str> = Vec::new();
    for host in &hosts {
        assert_eq!(host.code, 0, "{}", host.stderr);
        told.extend(stdout(host));
    }
    told.sort_unstable();
    assert_eq!(told, ["[0] 0.0", "[0] 0.1", "[1] 1.0", "[1] 1.1"]);
}

#[test]
fn a_lost_host_is_named_and_the_others_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("job");
    for lost in [0, 1] {
        let meeting = Meeting::of("1:2", "file", file.to_str().unwrap());
        let id = format!("lost-{lost}");
        // A world of one host may begin before the second one comes.
        let script = "echo size $WORLD_SIZE; [ -e stop ] || exec sleep 100";
        let conf = ["--rdzv-id", &id, "--rdzv-conf", "last_call_timeout=15,join_timeout=15"];
        let mut hosts = [(); 2].map(|()| meeting.shell(&conf, script).start());
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
    let server = etcd::Server::start(&[]);
    let meeting = Meeting::of("1:2", "etcd", &address(&server));
    let conf = ["--rdzv-conf", "last_call_timeout=15,join_timeout=15"];
    let script = "echo size $WORLD_SIZE; exec sleep 100";
    let start = || meeting.shell(&conf, script).start();
    let (mut first, mut second) = (start(), start());
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
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("job");
    let meeting = Meeting::of("2", "file", file.to_str().unwrap());
    for _ in 0..3 {
        let hosts = [(); 2].map(|()| meeting.shell(&[], "echo up").start()).map(Started::end);
        for host in hosts {
            assert_eq!(host.code, 0, "{}", host.stderr);
            assert!(String::from_utf8_lossy(&host.stdout).contains("up"), "{}", host.stderr);
        }
    }
}

#[test]
fn without_the_first_host_there_is_no_store_and_the_job_ends_saying_so() {
    let meeting = Meeting::at_first_host("2");
    let script = "echo up; exec sleep 100";
    let conf = |is_first| ["--rdzv-conf", is_first];
    let mut first = meeting.shell(&conf("join_timeout=15,is_host=1"), script).start();
    let mut second = meeting.shell(&conf("join_timeout=15,is_host=0"), script).start();
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
    let meeting = Meeting::at_first_host("1:2");
    let program = this_test("hosts::rank_that_steps");
    let options = ["--nproc-per-node", "2"];
    let options: Vec<&str> =
        options.into_iter().chain(program.iter().map(String::as_str)).collect();
    let start = || meeting.host(&options).variable("HOSTS_TEST_STEP", "1").start();
    let mut first = start();
    first.wait_for("size 2", 2);
    let second = start().end();
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
    let meeting = Meeting::at_first_host("2");
    let script = "exec sleep 100";
    let first = meeting.shell(&["--rdzv-conf", "join_timeout=12,is_host=1"], script).start();
    let other = |options: &[&str], secret: &str| {
        let options = [options, &["--rdzv-conf", "join_timeout=12,is_host=0"]].concat();
        let mut launch = meeting.shell(&options, script);
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
    // It takes connections, and says nothing.
    let stranger = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let meeting = Meeting::of("2", "c10d", &stranger.local_addr().unwrap().to_string());
    let ended = meeting.shell(&["--rdzv-conf", "join_timeout=1"], "true").start().end();
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("no launcher of drumline"), "{}", ended.stderr);
}

#[test]
fn without_a_secret_hosts_are_refused_with_what_to_do() {
    let mut launch = Meeting::at_first_host("2").shell(&[], "true");
    launch.variables.clear();
    let ended = launch.start().end();
    assert_eq!(ended.code, 1, "{}", ended.stderr);
    assert!(ended.stderr.contains("drumline secret"), "{}", ended.stderr);
}

#[test]
fn strangers_at_the_door_leave_the_job_unharmed() {
    let meeting = Meeting::at_first_host("2");
    let endpoint = meeting.0[5].clone();
    let script = "echo up; sleep 1";
    let first = meeting.shell(&["--rdzv-conf", "join_timeout=15,is_host=1"], script).start();
    let began = Instant::now();
    let mut strangers: Vec<TcpStream> = Vec::new();
    while strangers.len() < 500 {
        assert!(began.elapsed() < HANG);
        let Ok(mut stranger) = TcpStream::connect(&endpoint) else { continue };
        let _ = stranger.write_all(b"GET / HTTP/1.1\r\nHost: stranger\r\n\r\n");
        strangers.push(stranger);
    }
    let second = meeting.shell(&["--rdzv-conf", "join_timeout=15,is_host=0"], script).start();
    for host in [first, second].map(Started::end) {
        assert_eq!(host.code, 0, "{}", host.stderr);
        assert!(host.stderr.lines().count() < 10, "{}", host.stderr);
    }
}

#[test]
fn a_launcher_that_is_stopped_loses_its_workers_before_the_others_go_on() {
    let meeting = Meeting::at_first_host("1:2");
    let script = "echo size $WORLD_SIZE; exec sleep 100";
    let start = |is_first: &str| {
        let conf = format!("last_call_timeout=15,join_timeout=15,is_host={is_first}");
        meeting.shell(&["--rdzv-conf", &conf], script).start()
    };
    // A stopped process might keep a file locked.
    let mut hosts = [start("0"), start("1")];
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
    }
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
