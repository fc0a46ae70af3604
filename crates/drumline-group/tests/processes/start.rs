//! How the processes of a job come together, again and again.

use std::{
    collections::BTreeSet,
    env,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use crate::common::{Barrier, on_threads};
use drumline_group::{
    Config, ProcessGroup, ReduceOp,
    auth::Secret,
    default_group, init_process_group, init_with_store, is_initialized,
    rendezvous::{Rendezvous, register_rendezvous_handler},
    store::HashStore,
};
use drumline_testing::itself;

/// An address of this machine that no other test uses, so that its ports are free.
fn fresh_host() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(100);
    let [.., high, low] = process::id().to_be_bytes();
    format!("127.{high}.{low}.{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn url(host: &str, rank: usize, world_size: usize) -> String {
    format!("tcp://{host}:29500?rank={rank}&world_size={world_size}")
}

fn within(timeout_ms: u64) -> Config {
    Config::default().timeout(Duration::from_millis(timeout_ms))
}

fn sum_of_ranks(group: &ProcessGroup) -> usize {
    let mut sum = [group.rank() as u64];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    sum[0] as usize
}

/// A place for a file that no other test uses.
fn fresh_path() -> PathBuf {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let name = format!("drumline-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    env::temp_dir().join(name)
}

fn file_url(path: &Path, rank: usize, world_size: usize) -> String {
    format!("file://{}?rank={rank}&world_size={world_size}", path.display())
}

/// Every rank comes back as soon as it can, to a store whose host may not have left the last one.
#[test]
fn the_world_is_made_again_and_again_at_one_place() {
    let host = fresh_host();
    on_threads((0..3).collect(), |rank: usize| {
        for round in 0..12 {
            // The last rank stays away from every third world.
            let world_size = if round % 3 == 2 { 2 } else { 3 };
            if rank >= world_size {
                continue;
            }
            let world = init_process_group(&url(&host, rank, world_size), &within(60_000)).unwrap();
            assert_eq!(sum_of_ranks(&world), world_size * (world_size - 1) / 2);
            assert!(is_initialized());
            world.destroy().unwrap();
        }
    });
}

/// Every rank comes back as soon as it can, to a file that others may not have closed yet, or that
/// the last of them is just deleting.
#[test]
fn the_world_is_made_again_and_again_in_one_file() {
    let path = fresh_path();
    on_threads((0..3).collect(), |rank: usize| {
        for round in 0..8 {
            let world_size = if round % 3 == 2 { 2 } else { 3 };
            if rank >= world_size {
                continue;
            }
            let url = file_url(&path, rank, world_size);
            let world = init_process_group(&url, &within(60_000)).unwrap();
            assert_eq!(sum_of_ranks(&world), world_size * (world_size - 1) / 2);
            assert!(path.exists());
            world.destroy().unwrap();
        }
    });
    assert!(!path.exists());
}

/// This test starts itself as ranks 0, 1 and 2.
#[test]
fn processes_meet_in_a_file() {
    const URL: &str = "DRUMLINE_TEST_URL";
    if let Ok(url) = env::var(URL) {
        for _ in 0..3 {
            let world = init_process_group(&url, &within(60_000)).unwrap();
            assert_eq!(sum_of_ranks(&world), 3);
            world.destroy().unwrap();
        }
        return;
    }
    let path = fresh_path();
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            itself("start::processes_meet_in_a_file")
                .env(URL, file_url(&path, rank, 3))
                .spawn()
                .unwrap()
        })
        .collect();
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
    assert!(!path.exists());
}

#[test]
fn a_file_that_others_can_read_takes_a_secret_or_ones_word() {
    let path = fresh_path();
    let url = file_url(&path, 0, 1);
    let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    let world = init_process_group(&url, &within(5_000)).unwrap();
    assert_eq!(mode(), 0o600);
    world.destroy().unwrap();

    for others_may in [0o604, 0o660] {
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(others_may)).unwrap();
        let error = init_process_group(&url, &within(5_000)).unwrap_err().to_string();
        assert!(
            error.contains("DRUMLINE_SECRET: not set") && error.contains("chmod 600"),
            "{error}"
        );
        let trusting = within(5_000).trust_store(true);
        let knowing = within(5_000).secret(Secret::random().unwrap());
        for config in [trusting, knowing] {
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(others_may)).unwrap();
            init_process_group(&url, &config).unwrap().destroy().unwrap();
        }
    }
}

#[test]
fn a_rank_that_is_missing_in_a_file_is_named() {
    let path = fresh_path();
    let error = init_process_group(&file_url(&path, 0, 2), &within(100)).unwrap_err().to_string();
    assert!(error.contains("rank 1 has not come"), "{error}");
    // What this attempt has left in the file is in nobody's way.
    on_threads((0..2).collect(), |rank: usize| {
        let world = init_process_group(&file_url(&path, rank, 2), &within(60_000)).unwrap();
        assert_eq!(sum_of_ranks(&world), 1);
        world.destroy().unwrap();
    });
    assert!(!path.exists());
}

#[test]
fn a_bad_file_url_says_what_is_wrong() {
    for (rest, parts) in [
        ("", &["path in file://, rank in", "world_size in", "not set", "file:///path?"][..]),
        ("/x", &["rank in file:///x, world_size in file:///x: not set"]),
        ("tmp/x?rank=0&world_size=1", &["`tmp/x` does not begin", "file:///tmp/x"]),
        ("/x?rank=2&world_size=2", &["rank 2 of a job of 2"]),
        ("/x?rank=0&world_size=1&y=2", &["`y` is unknown"]),
        ("/no-such-place/x?rank=0&world_size=1", &["/no-such-place/x", "its directory must exist"]),
        ("/dev/null?rank=0&world_size=1", &["/dev/null"]),
    ] {
        let error = init_process_group(&format!("file://{rest}"), &within(100)).unwrap_err();
        let error = error.to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// Nobody could ever connect to rank 2: the others do not wait for it until their time is over.
#[test]
fn a_rank_that_failed_is_heard_of_by_those_who_wait_for_its_connections() {
    let store = Arc::new(HashStore::new());
    let config = within(60_000).unix_sockets(false);
    let nowhere = config.clone().bind_addresses(vec!["0.0.0.0".parse().unwrap()]);
    on_threads((0..3).collect(), |rank: usize| {
        let config = if rank == 2 { &nowhere } else { &config };
        let told = drumline_group::rendezvous::connect("failing", store.clone(), rank, 3, config);
        let told = told.unwrap_err().to_string();
        assert!(told.contains("0.0.0.0 is every address"), "{told}");
        assert!(rank == 2 || told.contains("rank 2: it has failed"), "{told}");
    });
}

#[test]
fn ranks_that_failed_alone_still_meet() {
    let host = fresh_host();
    let failed = Barrier::new(2);
    on_threads((0..2).collect(), |rank: usize| {
        if rank == 0 {
            for _ in 0..3 {
                let error = init_process_group(&url(&host, 0, 2), &within(100)).unwrap_err();
                assert!(error.to_string().contains("not heard from: rank 1"), "{error}");
            }
        }
        failed.wait();
        let world = init_process_group(&url(&host, rank, 2), &within(60_000)).unwrap();
        assert_eq!(sum_of_ranks(&world), 1);
        world.destroy().unwrap();
    });
}

/// Rank 1 cannot go on, says so, and comes again to the same store.
#[test]
fn a_rank_whose_settings_were_wrong_may_try_again() {
    let host = fresh_host();
    let has_left = Barrier::new(2);
    on_threads((0..3).collect(), |rank: usize| {
        if rank == 1 {
            let place = drumline_group::rendezvous::rendezvous(&url(&host, 1, 3), &within(60_000));
            assert!(place.unwrap().leave(Duration::ZERO));
        }
        if rank > 0 {
            has_left.wait();
        }
        let world = init_process_group(&url(&host, rank, 3), &within(60_000)).unwrap();
        assert_eq!(sum_of_ranks(&world), 3);
        world.destroy().unwrap();
    });
}

/// What this process holds: threads, and descriptors.
fn holdings() -> (usize, BTreeSet<String>) {
    let links = fs::read_dir("/proc/self/fd").unwrap().map(|entry| {
        let path = entry.unwrap().path();
        fs::read_link(&path).map_or_else(|_| String::new(), |it| it.display().to_string())
    });
    // The descriptor of this very listing leads to /proc.
    let open = links.filter(|link| !link.is_empty() && !link.starts_with("/proc"));
    (fs::read_dir("/proc/self/task").unwrap().count(), open.collect())
}

/// In a process of its own, where nobody else opens anything.
#[test]
fn a_failed_start_leaves_no_thread_and_no_socket() {
    const ALONE: &str = "DRUMLINE_TEST_ALONE";
    if env::var_os(ALONE).is_none() {
        let child =
            itself("start::a_failed_start_leaves_no_thread_and_no_socket").env(ALONE, "1").status();
        return assert!(child.unwrap().success());
    }
    let host = fresh_host();
    let mut before = None;
    for _ in 0..3 {
        // Nobody comes; nobody hosts; nobody comes to a store that is there.
        init_process_group(&url(&host, 0, 2), &within(50)).unwrap_err();
        init_process_group(&url(&host, 1, 2), &within(50)).unwrap_err();
        init_with_store(Arc::new(HashStore::new()), 1, 2, &within(50)).unwrap_err();
        init_process_group("tcp://nothing", &within(50)).unwrap_err();
        assert!(!is_initialized() && default_group().is_err());
        // The first connection makes the socket that stands for all sockets in a fork, once.
        before.get_or_insert_with(holdings);
    }
    assert_eq!(Some(holdings()), before);
}

#[test]
fn a_program_brings_its_own_store_and_scheme() {
    let store = Arc::new(HashStore::new());
    let meeting = store.clone();
    register_rendezvous_handler("memory", move |url, config| {
        let rank = url.strip_prefix("memory://").and_then(|rank| rank.parse().ok());
        Rendezvous::with_store(meeting.clone(), rank.unwrap(), 3, config)
    })
    .unwrap();
    on_threads((0..3).collect(), |rank: usize| {
        let world = init_process_group(&format!("memory://{rank}"), &within(60_000)).unwrap();
        assert_eq!((world.name(), sum_of_ranks(&world)), ("world", 3));
        // The secret that they have agreed on reaches groups that are made of it.
        let pair = world.new_group(&[0, 1], &drumline_group::GroupOptions::default());
        assert!(pair.is_ok() || rank == 2);
        world.barrier().unwrap();
        world.destroy().unwrap();
    });
    for (scheme, part) in [("memory", "already"), ("tcp", "already"), ("A b", "small letters")] {
        let error = register_rendezvous_handler(scheme, |_, _| unreachable!()).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    let error = init_process_group("unknown://", &within(50)).unwrap_err().to_string();
    assert!(error.contains("unknown is not a known way"), "{error}");
    let error = init_with_store(store, 3, 3, &within(50)).unwrap_err().to_string();
    assert!(error.contains("rank 3 does not exist"), "{error}");
}

/// The local addresses of this process's network namespace that TCP connections are made to, as
/// the kernel writes them.
fn established() -> Vec<(String, u16)> {
    let table = fs::read_to_string("/proc/self/net/tcp").unwrap();
    let words = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let connections = words.filter(|words| words.get(3) == Some(&"01"));
    // While others come and go, the kernel may list one twice.
    let ends: BTreeSet<(&str, &str)> = connections.map(|words| (words[1], words[2])).collect();
    let local = ends.into_iter().filter_map(|(local, _)| local.split_once(':'));
    local.map(|(ip, port)| (ip.to_owned(), u16::from_str_radix(port, 16).unwrap())).collect()
}

#[test]
fn connections_are_spread_over_addresses_within_the_ports_allowed() {
    let hosts = [fresh_host(), fresh_host()];
    let config = within(30_000)
        .unix_sockets(false)
        .bind_addresses(hosts.iter().map(|host| host.parse().unwrap()).collect())
        .port_range(41_000..=41_002)
        .streams(4);
    let groups = drumline_group::rendezvous::local_world_with(3, &config).unwrap();
    // Ranks are connected when they first need each other.
    let groups = on_threads(groups, |group| {
        let mut all = [0; 3];
        group.all_gather(&[group.rank() as u64], &mut all).unwrap();
        assert_eq!(all, [0, 1, 2]);
        group
    });
    let counts = hosts.map(|host| {
        let octets = host.split('.').map(|octet| octet.parse::<u8>().unwrap());
        let hex: String = octets.rev().map(|octet| format!("{octet:02X}")).collect();
        let here = established().into_iter().filter(|(ip, _)| *ip == hex);
        // This end is the one that was listened on; the other end's port is the system's choice.
        here.filter(|(_, port)| (41_000..=41_002).contains(port)).count()
    });
    // Three pairs of ranks, four connections for data and two others each.
    assert_eq!(counts.iter().sum::<usize>(), 18, "{counts:?}");
    assert!(counts.iter().all(|&count| count >= 6), "{counts:?}");
    on_threads(groups, |group| assert_eq!(sum_of_ranks(&group), 3));

    // All ranks listen on each address: one port is too few, whoever comes first.
    let config = config.port_range(41_000..=41_000);
    let config = config.timeout(Duration::from_secs(3));
    let store = Arc::new(HashStore::new());
    let told = on_threads((0..3).collect(), |rank: usize| {
        drumline_group::rendezvous::connect("narrow", store.clone(), rank, 3, &config)
            .unwrap_err()
            .to_string()
    });
    let names =
        |text: &String| text.contains("DRUMLINE_PORT_RANGE") && text.contains("41000 to 41000");
    assert!(told.iter().any(names), "{told:?}");
}
