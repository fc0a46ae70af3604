//! Groups of some of a job's ranks.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::Arc,
    thread,
    time::Duration,
};

use crate::common::{Barrier, everywhere, failure, on_threads, world_with};
use drumline_group::{
    Cause, Config, Error, ErrorKind, GroupOptions, ProcessGroup, ReduceOp, init_process_group,
    store::{Store, tcp::TcpStore},
};

fn options() -> GroupOptions {
    GroupOptions::default()
}

/// The sum over `group` of its members' ranks in the whole job.
fn sum_of_members(group: &ProcessGroup) -> u64 {
    let mut sum = [group.ranks()[group.rank()] as u64];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    sum[0]
}

#[test]
fn any_ranks_make_a_group_in_any_order() {
    everywhere(|config| {
        world_with(5, config, |world| {
            let me = world.rank();
            for (list, keep_order, name, ranks) in [
                (&[3, 1, 4][..], false, "local[1,3,4]", [1, 3, 4]),
                (&[3, 1, 4], true, "local[3,1,4]", [3, 1, 4]),
                (&[2, 3, 4], false, "local[2-4]", [2, 3, 4]),
            ] {
                let options = if keep_order { options().keep_order() } else { options() };
                let group = match world.new_group(list, &options) {
                    Ok(group) => group,
                    Err(error) => {
                        assert!(!list.contains(&me), "{error}");
                        let text = error.to_string();
                        let named = text.contains(&format!("rank {me} ")) && text.contains(name);
                        assert!(error.kind() == ErrorKind::NotAMember && named, "{text}");
                        continue;
                    }
                };
                assert_eq!((group.name(), group.ranks()), (name, ranks.to_vec()));
                assert_eq!(group.ranks()[group.rank()], me);
                assert_eq!(sum_of_members(&group), ranks.iter().sum::<usize>() as u64);
                group.destroy().unwrap();
            }
            world.destroy().unwrap();
        });
    });
}

/// Rank `rank` is no member.
#[track_caller]
fn check_outsider(error: &Error, rank: usize) {
    assert_eq!(error.kind(), ErrorKind::NotAMember, "{error}");
    assert!(error.to_string().starts_with(&format!("rank {rank} is not a member")), "{error}");
}

#[test]
fn groups_of_groups_know_the_whole_job() {
    world_with(5, &Config::default(), |world| {
        let Ok(four) = world.new_group(&[1, 2, 3, 4], &options()) else { return };
        let two = match four.new_group(&[3, 1], &options().name("inner")) {
            Ok(two) => two,
            Err(error) => return check_outsider(&error, world.rank()),
        };
        assert_eq!((two.name(), two.ranks()), ("local/inner[2,4]", vec![2, 4]));
        assert_eq!(sum_of_members(&two), 6);
    });
}

#[test]
fn bad_lists_are_refused_and_harm_nothing() {
    world_with(2, &Config::default(), |world| {
        for (list, part) in [
            (&[0, 2][..], "no rank 2: the ranks of group \"local\" are 0 to 1"),
            (&[0, 1, 0], "rank 0 is listed twice"),
        ] {
            let error = world.new_group(list, &options()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let error = world.new_group(&[], &options()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotAMember, "{error}");
        world.barrier().unwrap();
    });
}

#[test]
fn a_group_divides_by_colour() {
    world_with(6, &Config::default(), |world| {
        let me = world.rank();
        // By the key first, then by rank.
        let group = world.split(Some(me as u64 % 2), i64::from(me < 2), &options()).unwrap();
        let expected = if me.is_multiple_of(2) { [2, 4, 0] } else { [3, 5, 1] };
        assert_eq!(group.unwrap().ranks(), expected);
        // Colour 0 is not the same as none.
        let group = world.split((me != 1).then_some(0), 0, &options()).unwrap();
        assert_eq!(group.map(|group| group.world_size()), (me != 1).then_some(5));
    });
}

/// All pairs, each on a thread of its own, made, used and destroyed in an order that differs from
/// rank to rank.
#[test]
fn many_groups_at_once_need_no_common_order() {
    const RANKS: usize = 4;
    everywhere(|config| {
        world_with(RANKS, config, |world| {
            let me = world.rank();
            thread::scope(|threads| {
                let mut peers: Vec<usize> = (0..RANKS).filter(|&peer| peer != me).collect();
                peers.rotate_left(me % 3);
                for peer in peers {
                    let world = &world;
                    threads.spawn(move || {
                        let pair = world.new_group(&[me, peer], &options()).unwrap();
                        for _ in 0..20 {
                            assert_eq!(sum_of_members(&pair), (me + peer) as u64);
                        }
                        pair.destroy().unwrap();
                    });
                }
                for _ in 0..20 {
                    assert_eq!(sum_of_members(&world), 6);
                }
            });
        });
    });
}

/// One thread, several groups: what is in flight in one of them waits for no other.
#[test]
fn operations_of_groups_are_in_flight_together_in_any_order() {
    everywhere(|config| {
        world_with(3, config, |world| {
            let me = world.rank();
            let all = world.new_group(&[0, 1, 2], &options()).unwrap();
            let named = world.new_group(&[0, 1, 2], &options().name("second")).unwrap();
            let mut groups = [&world, &all, &named];
            groups.rotate_left(me);
            let works: Vec<_> = groups
                .into_iter()
                .map(|group| group.all_reduce_async(vec![me as f64; 5000], ReduceOp::Sum).unwrap())
                .collect();
            for work in works.into_iter().rev() {
                assert_eq!(work.wait().unwrap(), vec![3.0; 5000]);
            }
        });
    });
}

#[test]
fn the_same_ranks_may_meet_again_and_again() {
    world_with(2, &Config::default(), |world| {
        let kept = world.new_group(&[0, 1], &options()).unwrap();
        for _ in 0..10 {
            let group = world.new_group(&[0, 1], &options()).unwrap();
            assert_eq!((sum_of_members(&group), sum_of_members(&kept)), (1, 1));
        }
    });
}

#[test]
fn parents_and_children_go_in_any_order() {
    everywhere(|config| {
        world_with(3, config, |world| {
            let child = world.new_group(&[0, 1, 2], &options()).unwrap();
            world.destroy().unwrap();
            assert_eq!(sum_of_members(&child), 3);
            // A child can still be asked for others.
            let grandchild = child.new_group(&[2, 0, 1], &options()).unwrap();
            child.destroy().unwrap();
            assert_eq!(sum_of_members(&grandchild), 3);
            let clone = grandchild.clone();
            grandchild.destroy().unwrap();
            let error = clone.new_group(&[0, 1, 2], &options()).unwrap_err().to_string();
            assert!(error.contains("has been destroyed"), "{error}");
        });
    });
}

#[test]
fn an_abort_of_one_group_leaves_the_others_alone() {
    everywhere(|config| {
        world_with(3, config, |world| {
            let doomed = world.new_group(&[0, 2], &options());
            let fine = world.new_group(&[1, 2, 0], &options().name("fine")).unwrap();
            if let Ok(doomed) = doomed {
                if doomed.rank() == 1 {
                    doomed.abort();
                }
                let failure = failure(doomed.barrier().unwrap_err());
                assert_eq!(failure.culprit(), Some(1), "{failure}");
                assert_eq!(failure.global_rank(1), 2);
            }
            assert_eq!((sum_of_members(&world), sum_of_members(&fine)), (3, 3));
            fine.destroy().unwrap();
            world.destroy().unwrap();
        });
    });
}

#[test]
fn failures_name_the_ranks_of_the_whole_job_too() {
    everywhere(|config| {
        world_with(4, config, |world| {
            let Ok(group) = world.new_group(&[1, 3], &options()) else { return };
            if group.rank() == 1 {
                return;
            }
            let text = group.recv(&mut [0_u8], 1, 0).unwrap_err().to_string();
            assert!(text.contains("group \"local[1,3]\", rank 0 (global rank 1)"), "{text}");
            assert!(text.contains("rank 1 has closed the group"), "{text}");
            assert!(text.contains(" (rank 1 is global rank 3) (drumline explain "), "{text}");
        });
    });
}

#[test]
fn a_group_has_settings_of_its_own() {
    let config = Config::default().timeout(Duration::from_secs(77));
    world_with(2, &config, |world| {
        let other = Config::default().shared_memory(false);
        let options = options().config(other).timeout(Duration::from_secs(3));
        let hasty = world.new_group(&[0, 1], &options).unwrap();
        assert!(
            drumline_group::algorithms::shares_memory(&world)
                && !drumline_group::algorithms::shares_memory(&hasty)
        );
        assert_eq!(world.config().timeout, Duration::from_secs(77));
        // Only rank 0 calls, so the other one is late; in that group alone.
        if world.rank() == 0 {
            let failure = failure(hasty.barrier().unwrap_err());
            assert_eq!(failure.cause, Cause::Timeout { waiting_for: vec![1] }, "{failure}");
        }
        world.barrier().unwrap();
    });
}

fn hasty() -> GroupOptions {
    options().timeout(Duration::from_secs(2))
}

#[test]
fn ranks_that_make_groups_in_different_orders_are_told() {
    let all_told = Barrier::new(3);
    world_with(3, &Config::default(), |world| {
        let lists: [&[usize]; 2] = [&[0, 1], &[0, 1, 2]];
        let first = if world.rank() == 0 { 0 } else { 1 };
        // Rank 0 waits for 1 in the smaller group, 1 and 2 for 0 in the larger one.
        let text = world.new_group(lists[first], &hasty()).unwrap_err().to_string();
        let expected = match world.rank() {
            0 => "rank 1 waits in group \"local[0-2]\" instead",
            _ => "rank 0 waits in group \"local[0,1]\" instead",
        };
        assert!(text.contains(expected) && text.contains("in the same order"), "{text}");
        all_told.wait();
        // Nothing is shifted: in one order it works.
        for list in lists {
            match world.new_group(list, &options()) {
                Ok(group) => assert_eq!(sum_of_members(&group), list.iter().sum::<usize>() as u64),
                Err(error) => check_outsider(&error, 2),
            }
        }
    });
}

#[test]
fn a_rank_with_another_list_is_named() {
    world_with(4, &Config::default(), |world| {
        let list: &[usize] = match world.rank() {
            0 => return,
            2 => &[2, 3],
            _ => &[1, 2, 3],
        };
        let text = world.new_group(list, &hasty()).unwrap_err().to_string();
        let expected = match world.rank() {
            2 => "rank 1 (global rank 3) waits in group \"local[1-3]\" instead",
            _ => "rank 1 (global rank 2) waits in group \"local[2,3]\" instead",
        };
        assert!(text.contains(expected), "{text}");
    });
}

#[test]
fn attempts_that_failed_on_some_ranks_do_not_count() {
    let failed = Barrier::new(2);
    let config = Config::default();
    world_with(2, &config, |world| {
        if world.rank() == 0 {
            for _ in 0..3 {
                let options = options().timeout(Duration::from_millis(50));
                let text = world.new_group(&[0, 1], &options).unwrap_err().to_string();
                assert!(text.contains("rank 1 has not come"), "{text}");
            }
        }
        failed.wait();
        let group = world.new_group(&[0, 1], &options()).unwrap();
        assert_eq!(sum_of_members(&group), 1);
    });
}

#[test]
fn groups_of_one_name_on_two_threads_are_told_apart_or_refused() {
    world_with(2, &Config::default(), |world| {
        if world.rank() == 0 {
            thread::scope(|threads| {
                let attempts: Vec<_> = (0..2)
                    .map(|_| threads.spawn(|| world.new_group(&[0, 1], &hasty()).unwrap_err()))
                    .collect();
                let told = attempts.into_iter().map(|it| it.join().unwrap().to_string());
                let refused = told.filter(|text| text.contains("another thread is joining"));
                assert_eq!(refused.count(), 1);
            });
        }
    });
}

/// How many keys the store at `port` holds: torch's GETNUMKEYS.
fn keys_at(port: u16) -> i64 {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(&[0, 0xce, 0xf7, 0x85, 0x3c, 7]).unwrap();
    let mut number = [0; 8];
    stream.read_exact(&mut number).unwrap();
    i64::from_le_bytes(number)
}

#[test]
fn nothing_is_left_in_the_store() {
    let host = TcpStore::host("127.0.0.1", 0).unwrap();
    let port = host.address().unwrap().port();
    let store: Arc<dyn Store> = Arc::new(host);
    let brief = &Config::default().timeout(Duration::from_millis(400));
    let text = drumline_group::rendezvous::connect("w", store.clone(), 1, 3, brief)
        .unwrap_err()
        .to_string();
    assert!(text.contains("rank 0 has not come, rank 2 has not come"), "{text}");
    assert_eq!(keys_at(port), 0);

    // Nor when the ranks have met and then fail, and they hear of it at once.
    let nowhere = Some("no-such-0".to_owned());
    let mut config = Config::default().unix_sockets(false);
    config.socket_ifname = nowhere;
    let told = on_threads((0..3).collect(), |rank| {
        drumline_group::rendezvous::connect("w", store.clone(), rank, 3, &config)
            .unwrap_err()
            .to_string()
    });
    assert!(told.iter().all(|text| text.contains("no-such-0")), "{told:?}");
    assert_eq!(keys_at(port), 0);

    let config = Config::default();
    on_threads((0..3).collect(), |rank| {
        let world =
            drumline_group::rendezvous::connect("w", store.clone(), rank, 3, &config).unwrap();
        if let Ok(pair) = world.new_group(&[0, 2], &options()) {
            pair.destroy().unwrap();
        }
        world.destroy().unwrap();
    });
    assert_eq!(keys_at(port), 0);
}

/// The rank that hosts the store keeps it for as long as any group of any rank is there.
#[test]
fn the_store_outlives_the_world_while_groups_are_there() {
    // An address that no other test uses, so that the port is free there.
    let [.., high, low] = std::process::id().to_be_bytes();
    on_threads((0..3).collect(), |rank: usize| {
        let url = format!("tcp://127.{high}.{low}.250:29500?rank={rank}&world_size=3");
        let world = init_process_group(&url, &Config::default()).unwrap();
        assert_eq!(world.name(), "world");
        let child = world.new_group(&[0, 1, 2], &options()).unwrap();
        world.destroy().unwrap();
        // It takes the store.
        if let Ok(pair) = child.new_group(&[1, 2], &options()) {
            assert_eq!(sum_of_members(&pair), 3);
            pair.destroy().unwrap();
        }
        child.destroy().unwrap();
    });
}

/// Rank 1 fails in a group that it shares with rank 0 alone. Rank 0 drops its groups, before the others can hear of
/// rank 1.
#[test]
fn a_rank_that_leaves_after_a_failure_in_another_group_is_not_blamed() {
    everywhere(|config| {
        let over = Barrier::new(3);
        world_with(4, config, |world| {
            let me = world.rank();
            let make = |other| world.new_group(&[0, other], &options());
            let (half, pair) = (make(1).ok(), make(3).ok());
            let mut data = [1_u8];
            match me {
                0 => {
                    let heard = failure(half.unwrap().barrier().unwrap_err());
                    assert_eq!(heard.culprit(), Some(1), "{heard}");
                    return;
                }
                1 => half.unwrap().abort(),
                2 => {
                    let error = world.broadcast(&mut data, 0).unwrap_err();
                    assert_eq!(error.culprit(), Some(1), "{error}");
                }
                _ => {
                    // Rank 1 is not in this group, and no rank of it is at fault.
                    let error = pair.unwrap().broadcast(&mut data, 0).unwrap_err();
                    assert_eq!(error.culprit(), None, "{error}");
                    assert!(error.to_string().contains("local[0,1]"), "{error}");
                }
            }
            over.wait();
        });
    });
}

/// Fails in the group that it gets, and copes with that.
type Failing = fn(&ProcessGroup);

/// Rank 0 has coped with a failure that rank 1 has caused in a group of both, and leaves later: that failure is not
/// why.
#[test]
fn a_rank_that_has_gone_on_after_a_failure_and_leaves_early_is_blamed_itself() {
    let aborted: Failing = |half| {
        if half.rank() == 1 {
            half.abort();
        }
        half.barrier().unwrap_err();
    };
    let late: Failing = |half| {
        if half.rank() == 0 {
            half.within(Duration::from_millis(300)).barrier().unwrap_err();
        }
    };
    for failing in [aborted, late] {
        everywhere(|config| {
            let (met, over) = (Barrier::new(2), Barrier::new(2));
            world_with(3, config, |world| {
                let half = world.new_group(&[0, 1], &options());
                if let Ok(half) = &half {
                    failing(half);
                }
                world.barrier().unwrap();
                if world.rank() == 0 {
                    return;
                }
                // What rank 2 tells when its next call fails may overtake what rank 1 still gets in this one.
                met.wait();
                let called = (world.rank() == 2).then(|| world.broadcast(&mut [1_u8], 0));
                over.wait();
                if let Some(called) = called {
                    let error = failure(called.unwrap_err());
                    assert_eq!(error.cause, Cause::PeerLeft { peer: 0 }, "{error}");
                }
            });
        });
    }
}

/// Ranks 0, 2 and 3 go on without rank 1, which has failed. Then rank 0 leaves early.
#[test]
fn a_rank_that_leaves_the_group_of_those_who_have_gone_on_is_blamed_itself() {
    everywhere(|config| {
        let over = Barrier::new(2);
        world_with(4, config, |world| {
            if world.rank() == 1 {
                return world.abort();
            }
            let error = failure(world.barrier().unwrap_err());
            assert_eq!(error.culprit(), Some(1), "{error}");
            let rest = world.new_group(&[0, 2, 3], &options()).unwrap();
            drop(world);
            if rest.rank() == 0 {
                return;
            }
            let called = (rest.rank() == 1).then(|| rest.broadcast(&mut [1_u8], 0));
            over.wait();
            if let Some(called) = called {
                let error = failure(called.unwrap_err());
                assert_eq!(error.cause, Cause::PeerLeft { peer: 0 }, "{error}");
            }
        });
    });
}
