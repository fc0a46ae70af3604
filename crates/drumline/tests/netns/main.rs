//! Jobs over several hosts: namespaces of one machine, each with an address of its own, joined by a bridge.
//!
//! They take root and iproute2. Without these the tests say so and do nothing; with `DRUMLINE_TEST_HOSTS` set
//! they fail.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod hosts;
mod ranks;

use std::{
    io::Write,
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use crate::{
    hosts::{Family, Hosts, Rank, SECRET, skip},
    ranks::{BLOCK, CALLS, HEADER, STEPS},
};

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
fn a_sharded_step_sends_as_much_as_a_plain_one() {
    for hosts in [2, 4] {
        let Some(network) = Hosts::new(hosts) else { return };
        let mut ranks = network.start_all(hosts, "train, sharded and not");
        let sent = ranks.iter_mut().map(|rank| {
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
            ];
            for (name, messages, bytes) in calls {
                let sent: u64 = rank.line(&format!("{name} of short data: ")).parse().unwrap();
                let bound = messages * CALLS * (HEADER + bytes);
                // Barriers, and what ranks tell each other now and then.
                let most = bound + 60 * HEADER;
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

/// With a link slowed on purpose, a third of the buckets or more come back while backward goes on.
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
        3 * hidden.parse::<usize>().unwrap() >= all.parse().unwrap()
    });
    assert!(most.count() > 0, "{told:?}");
}

/// The store, and each rank: for its group, and for its sign if it had to show that to the other host.
const LISTENERS: [RangeInclusive<usize>; 2] = [3..=5, 1..=2];

#[test]
fn every_host_listens_on_its_one_address_only() {
    let Some(network) = Hosts::new(2) else { return };
    let mut ranks = network.start_all(3, "work until something breaks");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "6"));
    for (host, rank) in ranks.iter().enumerate().take(2) {
        let addresses = rank.listens_at("tcp");
        let own = format!("{:02X}0012C6:", host + 1);
        assert!(LISTENERS[host].contains(&addresses.len()), "{addresses:?}");
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
        assert!(LISTENERS[host].contains(&addresses.len()), "{addresses:?}");
        assert!(addresses.iter().all(|address| address.starts_with(&own)), "{addresses:?}, {own}");
        assert_eq!(rank.listens_at("tcp"), [""; 0]);
    }
}

/// On Debian a host's own name is 127.0.1.1, elsewhere 127.0.0.1, ::1, that and its true address, or nothing. The other
/// host knows the true address.
#[test]
fn what_a_host_thinks_of_its_own_name_does_not_matter() {
    let Some(mut network) = Hosts::new(2) else { return };
    network.close();
    network.meeting = "tcp://host0:29500".to_owned();
    for own in ["127.0.1.1 host0", "::1 host0", "127.0.0.1 host0\\n198.18.0.1 host0", ""] {
        network.prepare = format!(
            "mount -t tmpfs none /mnt; \
             if [ $0 = 0 ]; then printf '127.0.0.1 localhost\\n{own}\\n'; else echo 198.18.0.1 host0; fi >/mnt/hosts; \
             umount /etc/hosts; mount --bind /mnt/hosts /etc/hosts"
        );
        for mut rank in network.start_all(3, "leave") {
            assert_eq!(rank.line("sum: "), "6", "{own}");
        }
    }
}

/// There is no default route, and no master to which a route could lead.
#[test]
fn ranks_that_meet_in_a_file_take_the_only_network_of_their_host() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = |name: &str| format!("file://{}", directory.path().join(name).display());
    for (name, family) in [("v6", Family::V6), ("v4", Family::V4)] {
        let Some(mut network) = Hosts::with(family, 2) else { return };
        network.close();
        network.meeting = place(name);
        for mut rank in network.start_all(2, "leave") {
            assert_eq!(rank.line("sum: "), "3", "{name}");
        }
        if name == "v4" {
            network.add_cables();
            network.meeting = place("two networks");
            let told = network.start_all(2, "leave")[0].line("refused: ");
            assert!(told.contains("198.18.0.1 (eth0), 198.19.0.1 (eth1)"), "{told}");
            assert!(told.contains("DRUMLINE_SOCKET_IFNAME"), "{told}");
        }
    }
}

/// Copies have one boot id, as all hosts of this test, and the first network namespace always has the same number.
#[test]
fn copies_of_one_virtual_machine_are_told_apart() {
    let Some(mut network) = Hosts::new(2) else { return };
    network.prepare = "mount -t tmpfs none /mnt; ln -s net:[4026531840] /mnt/net; \
                       mount --bind /mnt /proc/$$/ns"
        .to_owned();
    for mut rank in network.start_all(5, "add in order") {
        assert_eq!(rank.line("same bits; "), "shares memory: true");
        assert!(rank.child.wait().unwrap().success());
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

/// As a firewall does that has lost its table, or that refuses what it has allowed before.
#[test]
fn nobody_says_that_a_rank_has_ended_whose_connections_are_reset() {
    for (level, refuses) in [("auth", false), ("tls", false), ("auth", true), ("tls", true)] {
        let Some(network) = Hosts::new(3) else { return };
        let variables = [("DRUMLINE_SECRET", SECRET), ("DRUMLINE_SECURITY", level)];
        let task = "work until something breaks, and stay";
        let start = |rank| network.start_on(rank, rank, 3, task, variables);
        let mut ranks = [0, 1, 2].map(start);
        ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "6"));
        for (host, other) in [(1, 2), (2, 1)].into_iter().filter(|_| refuses) {
            if let Err(reason) = network.refuse_connections(host, other) {
                return skip(&format!("no firewall here: {reason}"));
            }
        }
        let Some(reset) = network.reset_connections(1, 2) else { return };
        assert!(reset > 2, "{reset} connections");
        for (number, rank) in ranks.iter_mut().enumerate() {
            let told = rank.line("culprit: ");
            println!("{level}, refuses: {refuses}, rank {number}: {told}");
            assert!(told.starts_with("None: "), "{told}");
            assert!(told.contains("; its process lives, so something between"), "{told}");
            assert!(!told.contains("has ended"), "{told}");
        }
    }
}

/// A child of a torch `DataLoader` is such a fork.
#[test]
fn a_rank_that_is_killed_is_named_although_a_fork_of_it_lives() {
    let Some(network) = Hosts::new(2) else { return };
    let mut ranks = network.start_all(2, "fork, and work until something breaks");
    ranks.iter_mut().for_each(|rank| assert_eq!(rank.line("sum: "), "3"));
    // Its number on the host.
    let child = ranks[1].line("child: ");
    ranks[1].line("goes on");
    ranks[1].signal(rustix::process::Signal::KILL);
    let killed = Instant::now();
    let told = ranks[0].line("culprit: ");
    let noticed_after = killed.elapsed();
    let line = format!("kill -KILL {child}");
    assert!(network.on(1).args(["sh", "-c", &line]).status().unwrap().success());
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
