//! From URLs and variables to a plan, and from a plan to a store.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicU8, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::common::log::Log;
use drumline_group::{
    Config,
    auth::Secret,
    rendezvous::{Endpoint, Plan, Rendezvous, StoreHost, is_launched, rendezvous},
    store::tcp::TcpStore,
};
use drumline_testing::itself;

const HANG: Duration = Duration::from_secs(60);

fn patient() -> Config {
    Config::default().timeout(HANG)
}

fn with(secret: &Secret) -> Config {
    patient().secret(secret.clone())
}

/// `A=1 B=2`.
fn parse(url: &str, variables: &str) -> Result<Plan, String> {
    let variables: HashMap<_, _> =
        variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
    Plan::parse(url, &|name| variables.get(name).map(|value| value.to_string()))
        .map_err(|error| error.to_string())
}

fn plan(host: &str, port: u16, rank: usize, world_size: usize) -> Plan {
    let store = Endpoint::Tcp { host: host.into(), port };
    Plan { store, host: StoreHost::RankZero, rank, world_size }
}

const ALL: &str = "RANK=1 WORLD_SIZE=4 MASTER_ADDR=node-0.example MASTER_PORT=29500";

#[test]
fn good_urls() {
    for (url, variables, expected) in [
        ("env://", ALL, plan("node-0.example", 29500, 1, 4)),
        ("env:///", ALL, plan("node-0.example", 29500, 1, 4)),
        ("env://?rank=2", ALL, plan("node-0.example", 29500, 2, 4)),
        ("env://?world_size=3&rank=2", "MASTER_ADDR=h MASTER_PORT=1", plan("h", 1, 2, 3)),
        ("env://?rank=0&world_size=1", "MASTER_ADDR=::1 MASTER_PORT=0", plan("::1", 0, 0, 1)),
        ("env://?rank=0&world_size=1", "MASTER_ADDR=[::1] MASTER_PORT=0", plan("::1", 0, 0, 1)),
        ("tcp://localhost:29500?rank=0&world_size=2", "", plan("localhost", 29500, 0, 2)),
        ("tcp://localhost:29500/?rank=0&world_size=2", ALL, plan("localhost", 29500, 0, 2)),
        ("tcp://[fe80::1]:65535?world_size=1&rank=0", "", plan("fe80::1", 65535, 0, 1)),
        ("tcp://10.0.0.1:0?rank=0&world_size=1", "", plan("10.0.0.1", 0, 0, 1)),
    ] {
        assert_eq!(parse(url, variables), Ok(expected), "{url}");
    }
}

#[test]
fn bad_urls_say_what_is_wrong() {
    let tcp = |rest: &str| format!("tcp://{rest}");
    for (url, variables, parts) in [
        // Everything that is missing, at once.
        (
            "env://",
            "",
            &["RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: not set", "drumline run"][..],
        ),
        ("env://?rank=0", "MASTER_PORT=1", &["WORLD_SIZE, MASTER_ADDR: not set"]),
        ("env://", "RANK= WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1", &["RANK: not set"]),
        ("tcp://", "", &["host in", "port in", "rank in", "world_size in", "tcp://host:port?"]),
        (&tcp("h?rank=0&world_size=1"), ALL, &["port in", "not set"]),
        (&tcp("h:?rank=0&world_size=1"), ALL, &["port in", "not set"]),
        (&tcp(":1?rank=0&world_size=1"), ALL, &["host in", "not set"]),
        (&tcp("h:1?rank=0"), ALL, &["world_size in", "not set"]),
        // Schemes.
        ("", "", &["where to meet: the URL is empty", "env://"]),
        ("mpi://", "", &["mpi is not a known way", "env://", "tcp://", "file://"]),
        ("ENV://", ALL, &["ENV is not a known way"]),
        ("localhost:29500", "", &["not a known way"]),
        ("env://host:1", ALL, &["env:// takes no address (host:1)"]),
        // Numbers.
        (&tcp("h:65536?rank=0&world_size=1"), "", &["port in", "`65536`", "0 to 65535"]),
        (&tcp("h:1?rank=-1&world_size=1"), "", &["rank in", "`-1` is not a whole number"]),
        (&tcp("h:1?rank=+1&world_size=2"), "", &["rank in", "`+1` is not a whole number"]),
        (&tcp("h:1?rank=0&world_size=0"), "", &["world_size in", "`0`", "from 1"]),
        (&tcp("h:1?rank=0&world_size=99999999999999999999"), "", &["is not a whole number"]),
        (&tcp("h:1?rank=4&world_size=4"), "", &["rank 4 of a job of 4", "from 0 to 3"]),
        ("env://", &ALL.replace("WORLD_SIZE=4", "WORLD_SIZE=1"), &["RANK: rank 1 of a job of 1"]),
        ("env://", &ALL.replace("29500", "many"), &["MASTER_PORT: `many` is not a whole number"]),
        ("env://?rank=x", ALL, &["rank in env://?rank=x: `x`"]),
        (&tcp("h:0?rank=0&world_size=2"), "", &["port in", "the others cannot know"]),
        // Addresses and parameters.
        (&tcp("::1:29500?rank=0&world_size=1"), "", &["brackets"]),
        (&tcp("[::1?rank=0&world_size=1"), "", &["brackets"]),
        (&tcp("[::1]29500?rank=0&world_size=1"), "", &["brackets"]),
        (&tcp("[host]:29500?rank=0&world_size=1"), "", &["brackets"]),
        (&tcp("user@h:1?rank=0&world_size=1"), "", &["`user@h` is neither a host name"]),
        (&tcp("h:1/path?rank=0&world_size=1"), "", &["port in", "`1/path`"]),
        (&tcp("h:1?rank=0&world_size=1&rnak=3"), "", &["`rnak` is unknown", "rank, world_size"]),
        (&tcp("h:1?rank=0&rank=1&world_size=2"), "", &["`rank` is given twice"]),
    ] {
        let error = parse(url, variables).expect_err(url);
        for part in parts {
            assert!(error.contains(part), "{url}: {error}: lacks {part}");
        }
    }
}

#[test]
fn the_launchers_store_is_used_where_it_is_meant() {
    let agent = format!("{ALL} TORCHELASTIC_USE_AGENT_STORE=True");
    let hosts = |url: &str, variables: &str| {
        let plan = parse(url, variables).unwrap();
        (plan.host == StoreHost::Launcher, plan.hosts_store())
    };
    assert_eq!(hosts("env://?rank=0", ALL), (false, true));
    assert_eq!(hosts("env://", ALL), (false, false));
    assert_eq!(hosts("env://?rank=0", &agent), (true, false));
    assert_eq!(hosts("env://?rank=0", &agent.replace("True", "False")), (false, true));
    let same = "tcp://node-0.example:29500?rank=0&world_size=2";
    assert_eq!(hosts(same, &agent), (true, false));
    assert_eq!(hosts(same, ALL), (false, true));
    assert_eq!(hosts("tcp://other:29500?rank=0&world_size=2", &agent), (false, true));
    assert_eq!(hosts("tcp://node-0.example:29501?rank=0&world_size=2", &agent), (false, true));
}

#[test]
fn the_store_of_drumline_run_goes_before_the_masters() {
    let given =
        |store: &str, rest: &str| parse("env://", &format!("DRUMLINE_STORE={store} {rest}"));
    for store in ["unix:@drumline-7", "tcp://10.0.0.1:4711"] {
        let all = format!("{ALL} TORCHELASTIC_USE_AGENT_STORE=True");
        for rest in ["RANK=1 WORLD_SIZE=4", &all] {
            let plan = given(store, rest).unwrap();
            assert_eq!(plan.store.to_string(), store);
            assert_eq!((plan.host, plan.hosts_store()), (StoreHost::Drumline, false));
            assert_eq!((plan.rank, plan.world_size), (1, 4));
        }
    }
    // A URL that says where to meet is obeyed.
    let url = "tcp://h:1?rank=0&world_size=1";
    let plan = parse(url, "DRUMLINE_STORE=unix:@drumline-7").unwrap();
    assert_eq!(plan.store.to_string(), "tcp://h:1");

    for (store, rest, part) in [
        ("/tmp/socket", "RANK=0 WORLD_SIZE=1", "DRUMLINE_STORE: \"/tmp/socket\" should be"),
        ("unix:@a", "RANK=0", "WORLD_SIZE: not set"),
        ("unix:@a", "RANK=1 WORLD_SIZE=1", "rank 1 of a job of 1"),
        ("tcp://h:0", "RANK=0 WORLD_SIZE=1", "the others cannot know"),
    ] {
        let error = given(store, rest).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    let plan = given("unix:@drumline-7", "RANK=0 WORLD_SIZE=1").unwrap();
    let error = plan.meet(&patient()).unwrap_err().to_string();
    assert!(error.contains("DRUMLINE_SECRET_FILE: not set"), "{error}");
}

#[test]
fn a_place_that_others_can_reach_takes_a_secret_or_ones_word() {
    // 192.0.2.0/24 is for documentation: nobody's. The name stands for nothing.
    for host in ["192.0.2.1", "no-such-host.invalid"] {
        for (rank, store_host) in
            [(0, StoreHost::RankZero), (1, StoreHost::RankZero), (0, StoreHost::Launcher)]
        {
            let plan = Plan { host: store_host, ..plan(host, PORT, rank, 2) };
            let error = plan.meet(&patient()).unwrap_err().to_string();
            for part in [
                "DRUMLINE_SECRET: not set",
                "DRUMLINE_SECRET_FILE",
                "DRUMLINE_TRUST_STORE=1",
                &format!("tcp://{host}:{PORT}"),
            ] {
                assert!(error.contains(part), "{error}");
            }
            // Either gets past this: now it fails because the place is not there.
            let soon = Duration::from_millis(50);
            let trusting = patient().trust_store(true).timeout(soon);
            let knowing = with(&Secret::random().unwrap()).timeout(soon);
            for config in [trusting, knowing] {
                let error = plan.meet(&config).unwrap_err().to_string();
                assert!(error.starts_with("store tcp://"), "{error}");
            }
        }
    }
}

#[test]
fn ranks_with_a_secret_meet_and_others_stay_out() {
    let host = &fresh_host();
    let secret = &Secret::random().unwrap();
    thread::scope(|scope| {
        for rank in [0, 2] {
            scope.spawn(move || {
                let job = plan(host, PORT, rank, 3).meet(&with(secret)).unwrap();
                assert_eq!(job.secret, *secret);
                meet_and_part(job);
            });
        }
        let other = Secret::random().unwrap();
        let error = plan(host, PORT, 1, 3).meet(&with(&other)).unwrap_err().to_string();
        assert!(error.contains("does not know this job's secret"), "{error}");
        meet_and_part(plan(host, PORT, 1, 3).meet(&with(secret)).unwrap());
    });
}

#[test]
fn ranks_without_a_secret_agree_on_one() {
    let host = &fresh_host();
    let secrets: Vec<Secret> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn(move || {
                    let job = plan(host, PORT, rank, 3).meet(&patient()).unwrap();
                    let secret = job.secret.clone();
                    meet_and_part(job);
                    secret
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(secrets.iter().all(|secret| *secret == secrets[0]));
}

const PORT: u16 = 29500;

/// An address of this machine that no other test uses, so that the port is free there.
fn fresh_host() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    format!("127.{high}.{low}.{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Every rank publishes something, reads the others' and leaves; the host last.
fn meet_and_part(job: Rendezvous) {
    let (rank, world_size) = (job.rank, job.world_size);
    job.store.set(&format!("rank/{rank}"), &[rank as u8]).unwrap();
    for peer in 0..world_size {
        assert_eq!(job.store.get(&format!("rank/{peer}")).unwrap(), [peer as u8]);
    }
    assert!(job.leave(HANG), "rank {rank}");
}

#[test]
fn ranks_meet_over_tcp() {
    for world_size in [1, 2, 5] {
        let host = &fresh_host();
        thread::scope(|scope| {
            for rank in 0..world_size {
                scope.spawn(move || {
                    let url = format!("tcp://{host}:{PORT}?rank={rank}&world_size={world_size}");
                    meet_and_part(rendezvous(&url, &patient()).unwrap());
                });
            }
        });
    }
}

#[test]
fn ranks_meet_in_the_launchers_store() {
    let launcher = TcpStore::host("127.0.0.1", 0).unwrap();
    let port = launcher.address().unwrap().port();
    // Twice: the launcher's store outlives a restart of the ranks.
    for _ in 0..2 {
        thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let variables = format!(
                        "RANK={rank} WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} \
                         TORCHELASTIC_USE_AGENT_STORE=True"
                    );
                    meet_and_part(parse("env://", &variables).unwrap().meet(&patient()).unwrap());
                });
            }
        });
    }
}

#[test]
fn the_store_that_a_rank_hosts_holds_no_more_than_it_may() {
    let config = patient().store_bytes_max(10_000);
    let knowing = config.clone().secret(Secret::random().unwrap());
    let path = std::env::temp_dir().join(format!("drumline-full-{}", std::process::id()));
    let file = format!("file://{}?rank=0&world_size=1", path.display());
    let tcp = "tcp://127.0.0.1:0?rank=0&world_size=1";
    for (url, config) in [(tcp, &config), (tcp, &knowing), (&file, &config)] {
        let job = rendezvous(url, config).unwrap();
        job.store.set("fits", &[0; 5_000]).unwrap();
        let error = job.store.set("does not fit", &[0; 5_000]).unwrap_err().to_string();
        assert!(error.contains("full") || error.contains("10000 bytes"), "{error}");
    }
}

#[test]
fn the_host_says_whom_it_waits_for_as_soon_as_it_shall() {
    let log = Log::default();
    let logged = || log.text();
    let config = patient().warn_after(Duration::from_millis(20));
    let host = fresh_host();
    let url = |rank| format!("tcp://{host}:{PORT}?rank={rank}&world_size=2");
    thread::scope(|scope| {
        scope.spawn(|| {
            let writer = log.clone();
            let log = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
            let job = rendezvous(&url(0), &config).unwrap();
            let leave = || {
                // What another test begins while nobody listens would never be heard.
                let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
                job.leave(HANG)
            };
            assert!(tracing::subscriber::with_default(log, leave));
        });
        let job = rendezvous(&url(1), &config).unwrap();
        // Far less than the 10 s that are the default.
        let started = Instant::now();
        while logged().is_empty() && started.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(job.leave(HANG));
    });
    assert!(logged().contains("waits until those who still use it"), "{}", logged());
}

/// The variables of real processes: this test starts itself as ranks 0, 1 and 2.
#[test]
fn processes_meet_over_env() {
    if is_launched() {
        meet_and_part(rendezvous("env://", &patient()).unwrap());
        return;
    }
    let host = fresh_host();
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            itself("rendezvous::processes_meet_over_env")
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "3")
                .env("MASTER_ADDR", &host)
                .env("MASTER_PORT", PORT.to_string())
                .env_remove("TORCHELASTIC_USE_AGENT_STORE")
                .env_remove("DRUMLINE_STORE")
                .spawn()
                .unwrap()
        })
        .collect();
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
}

#[test]
fn the_host_names_the_ranks_that_are_missing() {
    let host = &fresh_host();
    // Long enough for two.
    let config = patient().timeout(Duration::from_secs(2));
    thread::scope(|scope| {
        for rank in [1, 3] {
            scope.spawn(move || {
                // It may be cut off in the middle, for the host gives up.
                let _ = plan(host, PORT, rank, 5).meet(&patient()).map(|job| {
                    job.store.set_timeout(HANG);
                    job.store.get("never").unwrap_err()
                });
            });
        }
        let error = plan(host, PORT, 0, 5).meet(&config).unwrap_err().to_string();
        assert!(error.contains("3 of 5 have joined"), "{error}");
        assert!(error.contains("not heard from: rank 2, 4"), "{error}");
    });
}

#[test]
fn a_rank_that_comes_twice_is_an_error() {
    let host = &fresh_host();
    thread::scope(|scope| {
        let first_rank = scope.spawn(move || plan(host, PORT, 0, 3).meet(&patient()).unwrap());
        let first = plan(host, PORT, 1, 3).meet(&patient()).unwrap();
        let error = plan(host, PORT, 1, 3).meet(&patient()).unwrap_err().to_string();
        assert!(error.contains("join as rank 1") && error.contains("RANK"), "{error}");
        let second = plan(host, PORT, 2, 3).meet(&patient()).unwrap();
        drop((first, second));
        assert!(first_rank.join().unwrap().leave(HANG));
    });
}
