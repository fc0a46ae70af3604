//! Groups over real connections, and what goes wrong. (What collectives give is compared with a
//! sequential oracle in the conformance suite.)

use std::{
    io::Write,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::common::{Barrier, Least, everywhere, failure, on_threads, world_with};
use drumline_group::{
    Cause, CollectiveError, Config, Error, ErrorKind, GroupOptions, ProcessGroup, ReduceOp,
    auth::Secret,
    auth::{Channel, Hello, Nonce},
    rendezvous::rendezvous,
    store::{HashStore, Store},
};

const ALL_REDUCE: [&str; 5] = ["direct", "halving", "doubling", "gather", "binomial"];

/// Runs `rank` on a thread for every rank of a world and collects what they return.
fn world<R: Send>(world_size: usize, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    world_with(world_size, &Config::default(), rank)
}

fn with_algorithm(name: &str) -> Config {
    Config::default().all_reduce(name)
}

#[test]
fn messages_larger_than_any_socket_buffer_go_through() {
    let len = 6 << 20;
    for name in ALL_REDUCE {
        for unix_sockets in [true, false] {
            let config = with_algorithm(name).unix_sockets(unix_sockets);
            world_with(3, &config, |group| {
                let mut data = vec![group.rank() as f32 + 1.0; len];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert!(data.iter().all(|value| *value == 6.0));
                group.broadcast(&mut data, 2).unwrap();
            });
        }
    }
}

/// [`Duration::MAX`] means no limit, wherever a limit is counted.
#[test]
fn any_duration_is_a_valid_time_limit() {
    for shared_memory in [true, false] {
        let config = Config::default().timeout(Duration::MAX).warn_after(Duration::MAX);
        world_with(2, &config.shared_memory(shared_memory), |group| {
            group.barrier().unwrap();
            let peer = 1 - group.rank();
            let sent = group.send_async(vec![1_u8], peer, 7);
            group.recv(&mut [0_u8], peer, 7).unwrap();
            sent.unwrap().wait().unwrap();
            group.within(Duration::MAX).barrier().unwrap();
            group.destroy().unwrap();
        });
    }
    let config = Config::default().timeout(Duration::MAX);
    let job = rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1", &config).unwrap();
    assert!(job.leave(Duration::MAX));
}

#[test]
fn whoever_leaves_takes_its_keys_out_of_a_store_that_lives_on() {
    for leaves in [ProcessGroup::destroy, |it: ProcessGroup| it.leave(Duration::from_secs(60))] {
        let store = Arc::new(HashStore::new());
        on_threads((0..3).collect(), |rank: usize| {
            let config = Config::default();
            let group = drumline_group::rendezvous::connect("job", store.clone(), rank, 3, &config)
                .unwrap();
            leaves(group).unwrap();
        });
        assert_eq!(store.list_keys().unwrap(), Vec::<String>::new());
    }
    // Also one that leaves without the others.
    let store = Arc::new(HashStore::new());
    on_threads((0..2).collect(), |rank: usize| {
        let config = Config::default();
        let group =
            drumline_group::rendezvous::connect("job", store.clone(), rank, 2, &config).unwrap();
        group.barrier().unwrap(); // both have started up
        if rank == 1 {
            group.leave(Duration::ZERO).unwrap();
            assert_eq!(store.list_keys().unwrap(), ["drumline/job/process/0"]);
        }
    });
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_entered() {
    let entered = AtomicUsize::new(0);
    for world_size in [1, 2, 5] {
        entered.store(0, Ordering::SeqCst);
        world(world_size, |group| {
            for round in 1..=20 {
                entered.fetch_add(1, Ordering::SeqCst);
                group.barrier().unwrap();
                assert!(entered.load(Ordering::SeqCst) >= round * world_size);
                group.barrier().unwrap();
            }
        });
    }
}

#[test]
fn calls_of_clones_on_many_threads_run_one_after_another() {
    world(2, |group| {
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for _ in 0..50 {
                        let mut one = [1.0_f32];
                        group.clone().all_reduce(&mut one, ReduceOp::Sum).unwrap();
                        assert_eq!(one, [2.0]);
                    }
                });
            }
        });
    });
}

#[test]
fn arguments_that_cannot_work_are_refused_and_harm_nothing() {
    world(2, |group| {
        let problem = group.broadcast(&mut [0_u8], 2).unwrap_err().to_string();
        assert!(problem.contains("rank 2") && problem.contains("0 to 1"), "{problem}");
        let problem = group.all_gather(&[1_u8, 2], &mut [0; 3]).unwrap_err().to_string();
        assert!(problem.contains("3 elements"), "{problem}");
        group.barrier().unwrap();
    });
    let problem = drumline_group::rendezvous::local_world_with(2, &with_algorithm("ring"))
        .unwrap_err()
        .to_string();
    assert!(problem.contains("ring") && problem.contains("doubling"), "{problem}");
    assert!(drumline_group::rendezvous::local_world(0).is_err());
}

/// Every rank makes its call and then a barrier: by then all of them must have failed, with a
/// text that names both calls, each in one of the forms between bars.
fn ranks_disagree(
    config: &Config,
    world_size: usize,
    calls: [&str; 2],
    call: impl Fn(&ProcessGroup) -> Result<(), Error> + Sync,
) {
    let config = config.clone().timeout(Duration::from_secs(20));
    let told = world_with(world_size, &config, |group| {
        let error = call(&group).and_then(|()| group.barrier()).unwrap_err();
        assert!(group.barrier().is_err(), "the group must be poisoned");
        failure(error)
    });
    for failure in told {
        let text = failure.to_string();
        assert!(
            calls.iter().all(|call| call.split('|').any(|form| text.contains(form))),
            "rank {}: {text}",
            failure.rank
        );
    }
}

#[test]
fn every_rank_learns_who_called_what_when_ranks_disagree() {
    everywhere(|config| {
        for world_size in [2, 3, 5] {
            let odd = |group: &ProcessGroup| group.rank() == world_size - 1;
            ranks_disagree(
                config,
                world_size,
                ["all_reduce(sum) of 4 f32", "all_reduce(max) of 4 f32"],
                |g| {
                    g.all_reduce(
                        &mut [1_f32; 4],
                        if odd(g) { ReduceOp::Max } else { ReduceOp::Sum },
                    )
                },
            );
            ranks_disagree(config, world_size, ["(sum) of 4 f32", "(sum) of 5 f32"], |g| {
                g.all_reduce(&mut vec![1_f32; if odd(g) { 5 } else { 4 }], ReduceOp::Sum)
            });
            ranks_disagree(
                config,
                world_size,
                ["(sum) of 4 f32", "(sum) of 2 f64"],
                |g| match odd(g) {
                    true => g.all_reduce(&mut [1_f64; 2], ReduceOp::Sum),
                    false => g.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
                },
            );
            ranks_disagree(config, world_size, ["all_reduce(sum)", "all_gather of 1 u8"], |g| {
                match odd(g) {
                    true => g.all_gather(&[1_u8], &mut vec![0; world_size]),
                    false => g.all_reduce(&mut [1_f32; 4], ReduceOp::Sum),
                }
            });
            let calls = ["broadcast(root 0)|barrier", "broadcast(root 1)"];
            ranks_disagree(config, world_size, calls, |g| {
                // Roots need nobody's answer: they learn of it in the next call. That may be the
                // first that others hear of.
                g.broadcast(&mut [1_f32; 4], usize::from(odd(g))).and_then(|()| g.barrier())
            });
            ranks_disagree(config, world_size, ["barrier", "all_reduce(sum) of 3000000 u8"], |g| {
                match odd(g) {
                    true => g.barrier(),
                    false => g.all_reduce(&mut vec![1_u8; 3_000_000], ReduceOp::Sum),
                }
            });
        }
    });
}

#[test]
fn a_rank_that_makes_one_call_less_is_found_out() {
    let told = world(3, |group| match group.rank() {
        1 => group.barrier().unwrap_err(),
        _ => {
            let mut data = [1_i64; 3];
            group.all_reduce(&mut data, ReduceOp::Sum).and_then(|()| group.barrier()).unwrap_err()
        }
    });
    for error in told {
        let text = error.to_string();
        assert!(text.contains("all_reduce(sum) of 3 i64") && text.contains("barrier"), "{text}");
    }
}

#[test]
fn a_one_way_call_that_nobody_took_part_in_is_found_at_the_end() {
    let told = world(2, |group| {
        if group.rank() == 0 {
            group.broadcast(&mut [7_u8; 10], 0).unwrap();
        }
        group.destroy()
    });
    let text = told[1].clone().unwrap_err().to_string();
    assert!(text.contains("rank 0") && text.contains("broadcast(root 0) of 10 u8"), "{text}");
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let told = world(3, |group| match group.rank() {
        2 => None,
        _ => Some(failure(group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err())),
    });
    for failure in told.into_iter().flatten() {
        assert_eq!(failure.culprit(), Some(2), "{failure}");
    }
}

#[test]
fn a_root_is_told_that_its_receiver_has_left() {
    let told = world(2, |group| {
        if group.rank() == 1 {
            return None;
        }
        // What fits the socket's buffer may be sent before anything can be noticed.
        let mut data = vec![0_u8; 1 << 20];
        let error = (0..1000).find_map(|_| group.broadcast(&mut data, 0).err());
        Some(failure(error.expect("a thousand broadcasts to nobody succeeded")))
    });
    let failure = told.into_iter().flatten().next().unwrap();
    assert_eq!(failure.cause, Cause::PeerLeft { peer: 1 }, "{failure}");
}

#[test]
fn what_is_sent_to_a_rank_that_has_left_unconnected_is_not_lost_unsaid() {
    let config = Config::default().shared_memory(false).unix_sockets(false);
    let left = Barrier::new(2);
    let told = world_with(2, &config, |group| {
        if group.rank() == 1 {
            group.destroy().unwrap();
            left.wait();
            return None;
        }
        left.wait();
        Some(failure(group.broadcast(&mut [7_u8; 10], 0).unwrap_err()))
    });
    let failure = told.into_iter().flatten().next().unwrap();
    assert_eq!(failure.cause, Cause::PeerLeft { peer: 1 }, "{failure}");
}

#[test]
fn what_a_rank_sent_before_it_left_still_counts() {
    for _ in 0..50 {
        world(2, |group| {
            let mut data = vec![group.rank() as f32; 100_000];
            group.broadcast(&mut data, 0).unwrap();
            assert!(data.iter().all(|value| *value == 0.0));
        });
    }
}

#[test]
fn a_rank_that_panics_is_dead_to_the_others() {
    let groups = drumline_group::rendezvous::local_world(3).unwrap();
    std::thread::scope(|threads| {
        let running: Vec<_> = groups
            .into_iter()
            .map(|group| {
                threads.spawn(move || {
                    assert_ne!(group.rank(), 1, "this rank stumbles on purpose");
                    group.barrier().unwrap_err()
                })
            })
            .collect();
        for (rank, thread) in running.into_iter().enumerate() {
            let Ok(error) = thread.join() else {
                assert_eq!(rank, 1);
                continue;
            };
            let failure = failure(error);
            assert_eq!(failure.culprit(), Some(1), "{failure}");
            assert!(failure.to_string().contains("has ended"), "{failure}");
        }
    });
}

#[test]
fn a_deadline_names_the_ranks_that_did_not_answer() {
    // Long enough to connect on a busy machine.
    let config = Config::default().timeout(Duration::from_secs(3));
    let gave_up = AtomicUsize::new(0);
    let told = world_with(3, &config, |group| {
        if group.rank() == 2 {
            // Alive, but in no call until the others have given up.
            while gave_up.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return None;
        }
        let error = group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap_err();
        gave_up.fetch_add(1, Ordering::SeqCst);
        Some(failure(error))
    });
    let told: Vec<CollectiveError> = told.into_iter().flatten().collect();
    // One of the two may hear of it from the other first.
    let named =
        |cause: &Cause| matches!(cause, Cause::Timeout { waiting_for } if waiting_for == &[2]);
    assert!(told.iter().any(|failure| named(&failure.cause)), "{told:?}");
    assert!(told.iter().all(|failure| failure.culprit() == Some(2)), "{told:?}");
}

/// In a tree rank 1 waits for 0, which waits for 2, which waits for 3.
#[test]
fn a_deadline_names_the_root_of_a_chain() {
    rank_1_waits_for_3_in_the_end("chain", |group, _| {
        group.all_reduce(&mut [1.0_f32], ReduceOp::Sum)
    });
}

/// The same, but rank 0 has not come to the call, because it waits for a message of rank 2, which waits
/// for 3 to take one.
#[test]
fn a_deadline_names_the_root_of_a_chain_of_calls_and_messages() {
    rank_1_waits_for_3_in_the_end("messages", |group, rank| match rank {
        0 => group.recv(&mut [0.0_f32], 2, 7),
        2 => group.send(&[1.0_f32], 3, 7),
        _ => group.all_reduce(&mut [1.0_f32], ReduceOp::Sum),
    });
}

/// Rank 1 waits for 0, which waits for 2, which waits for 3, and loses patience first.
fn rank_1_waits_for_3_in_the_end(
    name: &str,
    call: impl Fn(&ProcessGroup, usize) -> drumline_group::Result<()> + Sync,
) {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let gave_up = AtomicUsize::new(0);
    let told = crate::common::on_threads((0..4).collect(), |rank| {
        // Long enough to connect, and to answer, on a busy machine.
        let timeout = Duration::from_secs(if rank == 1 { 6 } else { 60 });
        let config = with_algorithm("binomial")
            .timeout(timeout)
            .warn_after(Duration::from_secs(2))
            .shared_memory(false);
        let group =
            drumline_group::rendezvous::connect(name, store.clone(), rank, 4, &config).unwrap();
        if rank == 3 {
            // Alive, but in no call until the others have given up.
            while gave_up.load(Ordering::SeqCst) < 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return None;
        }
        let error = call(&group, rank).unwrap_err();
        gave_up.fetch_add(1, Ordering::SeqCst);
        Some(failure(error))
    });
    let [zero, one, two] = [0, 1, 2].map(|rank| told[rank].clone().unwrap());
    assert_eq!(one.cause, Cause::Timeout { waiting_for: vec![3] }, "{one}");
    for failure in [zero, two] {
        assert!(failure.to_string().contains("rank 1 reports"), "{failure}");
        assert_eq!(failure.culprit(), Some(3), "{failure}");
    }
}

/// Rank 0 waits for rank 1 in a gather in which rank 2 has done its part: when nobody else leaves the
/// group, rank 2 must not blame rank 0.
#[test]
fn a_rank_that_has_left_blames_the_root_as_well() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let gave_up = AtomicUsize::new(0);
    let told = crate::common::on_threads((0..3).collect(), |rank| {
        let config = Config::default()
            .timeout(Duration::from_secs(if rank == 2 { 4 } else { 8 }))
            .warn_after(Duration::from_secs(1))
            .shared_memory(false);
        let group =
            drumline_group::rendezvous::connect("left", store.clone(), rank, 3, &config).unwrap();
        if rank == 1 {
            while gave_up.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return None;
        }
        let mut all = vec![0_u8; if rank == 0 { 3 } else { 0 }];
        let end = group.gather(&[1], &mut all, 0).and_then(|()| group.destroy());
        gave_up.fetch_add(1, Ordering::SeqCst);
        Some(failure(end.unwrap_err()))
    });
    let two = told[2].clone().unwrap();
    assert_eq!(two.cause, Cause::Timeout { waiting_for: vec![1] }, "{two}");
    assert_eq!(told[0].clone().unwrap().culprit(), Some(1));
}

/// Each of two ranks takes the other for the root, so that no message passes between them.
#[test]
fn ranks_that_wait_for_each_other_in_different_calls_learn_of_it() {
    let config = Config::default().warn_after(Duration::from_millis(200));
    crate::common::everywhere_with(&config, |config| {
        let calls = ["broadcast(root 0) of 4 f32", "broadcast(root 1) of 4 f32"];
        ranks_disagree(config, 2, calls, |g| g.broadcast(&mut [1_f32; 4], 1 - g.rank()));
    });
}

#[test]
fn a_poisoned_group_says_why() {
    world(2, |group| {
        let first = group.all_reduce(&mut vec![0_u8; 1 + group.rank()], ReduceOp::Sum);
        let again = group.barrier().unwrap_err();
        assert_eq!(again.kind(), ErrorKind::Poisoned, "{again}");
        assert!(again.to_string().starts_with("barrier did not happen"), "{again}");
        assert!(again.to_string().contains(&failure(first.unwrap_err()).to_string()));
    });
}

#[test]
fn communication_is_timed() {
    world(2, |group| {
        let before = drumline_group::metrics::communication_time(&group);
        group.barrier().unwrap();
        assert!(drumline_group::metrics::communication_time(&group) > before);
    });
}

#[test]
fn ranks_meet_in_a_store_of_nine_methods() {
    everywhere(|config| {
        let store = Least::default();
        let stores = (0..3).map(|rank| (rank, store.try_clone().unwrap())).collect();
        on_threads(stores, |(rank, store)| {
            let group =
                drumline_group::rendezvous::connect("own", store.into(), rank, 3, config).unwrap();
            let mut sum = [rank as u32];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [3]);
            if rank != 1 {
                let part = group.new_group(&[2, 0], &GroupOptions::default()).unwrap();
                part.barrier().unwrap();
            }
            group.destroy().unwrap();
        });
    });
}

#[test]
fn a_group_can_be_made_again_under_its_name() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    for sum in 1_i64..=3 {
        std::thread::scope(|threads| {
            for rank in 0..2 {
                let store = store.clone();
                threads.spawn(move || {
                    let config = Config::default();
                    let group =
                        drumline_group::rendezvous::connect("again", store, rank, 2, &config)
                            .unwrap();
                    let mut data = [sum];
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, [2 * sum]);
                    group.destroy().unwrap();
                });
            }
        });
    }
}

/// One rank that can share no memory, as in a container of its own: all go on over sockets.
#[test]
fn ranks_share_memory_all_together_or_not_at_all() {
    for alone in [None, Some(1)] {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let told = crate::common::on_threads((0..3).collect(), |rank| {
            let shared_memory = alone != Some(rank);
            let config = Config::default().shared_memory(shared_memory);
            let group =
                drumline_group::rendezvous::connect("mixed", store.clone(), rank, 3, &config)
                    .unwrap();
            let mut data = group.alloc_registered::<i64>(100_000).unwrap();
            data.fill(1 << rank);
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|sum| *sum == 7));
            drumline_group::algorithms::shares_memory(&group)
        });
        assert_eq!(told, [alone.is_none(); 3]);
    }
}

/// With so many neighbours, a rank maps their slots only when it uses them.
#[test]
fn many_ranks_of_a_host_share_memory_and_send_messages() {
    const RANKS: usize = 12;
    let shared = world(RANKS, |group| {
        let (before, after) = ((group.rank() + RANKS - 1) % RANKS, (group.rank() + 1) % RANKS);
        // More than both slots hold.
        let mut data = vec![1_i64 << group.rank(); 300_000];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert!(data.iter().all(|sum| *sum == (1 << RANKS) - 1));
        let sent = group.send_async(vec![group.rank() as u64], after, 7).unwrap();
        let mut received = [0_u64];
        group.recv(&mut received, before, 7).unwrap();
        sent.wait().unwrap();
        assert_eq!(received, [before as u64]);
        drumline_group::algorithms::shares_memory(&group)
    });
    assert_eq!(shared, [true; RANKS]);
}

#[test]
fn strangers_at_the_door_hold_up_nobody() {
    // Over TCP, where strangers can come; ranks of other hosts are connected when they first need
    // each other, so strangers are there before them.
    let host = "127.77.3.1";
    let config = Config::default()
        .unix_sockets(false)
        .bind_addresses(vec![host.parse().unwrap()])
        .port_range(45_000..=45_001);
    let groups = drumline_group::rendezvous::local_world_with(2, &config).unwrap();
    std::thread::scope(|threads| {
        let strangers: Vec<TcpStream> = (0..600)
            .map(|stranger| {
                let port = 45_000 + stranger as u16 / 8 % 2;
                let mut stream = TcpStream::connect((host, port)).unwrap();
                match stranger % 4 {
                    0 => {} // says nothing
                    1 => stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap(),
                    2 => stream.write_all(b"DRUM\x01").unwrap(), // stops in the middle
                    _ => {
                        // A well-formed greeting as rank 1 of 2, of another group.
                        let channel = [Channel::Control, Channel::Data(0)][stranger / 4 % 2];
                        let hello = Hello { channel, rank: 1, world_size: 2, group: 42 };
                        let nonce = Nonce::random().unwrap();
                        stream.write_all(&hello.encode(None, &nonce)).unwrap();
                    }
                }
                stream
            })
            .collect();
        let meeting = groups.into_iter().map(|group| threads.spawn(move || group.barrier()));
        for rank in meeting.collect::<Vec<_>>() {
            rank.join().unwrap().unwrap();
        }
        drop(strangers);
    });
}

#[test]
fn ranks_that_do_not_share_one_secret_do_not_meet() {
    let secret = |text: &str| Some(Secret::new(text).unwrap());
    let ours = secret("the secret of this job");
    let other = secret("the secret of another");
    let cases = [
        (&other, "this job's secret", true),
        (&other, "this job's secret", false),
        (&None, "it has no secret", true),
        (&None, "it has no secret", false),
    ];
    // Rank 0, which waits for its peer, hears from it why it does not come.
    std::thread::scope(|threads| {
        for (theirs, part, unix_sockets) in cases {
            let store: Arc<dyn Store> = Arc::new(HashStore::new());
            let connect = move |store: Arc<dyn Store>, rank, secret: &Option<Secret>| {
                let (timeout, secret) = (Duration::from_secs(60), secret.clone());
                let config =
                    Config::default().unix_sockets(unix_sockets).timeout(timeout).secret(secret);
                // Ranks of one host meet at once, others when they first need each other.
                let group = drumline_group::rendezvous::connect("secret", store, rank, 2, &config)?;
                group.barrier()
            };
            let shared = store.clone();
            threads.spawn(move || {
                let error = connect(shared, 0, theirs).unwrap_err().to_string();
                match unix_sockets {
                    true => {
                        assert!(error.contains("rank 1: it has failed"), "{error}");
                        assert!(error.contains(part), "{error}");
                    }
                    false => assert!(error.contains("rank 1 at"), "{error}"),
                }
            });
            let ours = &ours;
            threads.spawn(move || {
                let error = connect(store, 1, ours).unwrap_err().to_string();
                assert!(error.contains("rank 0 at") && error.contains("secret"), "{error}");
                // Whoever calls hears what is wrong.
                assert!(!unix_sockets || error.contains(part), "{error}");
                assert!(error.contains("DRUMLINE_SECRET"), "{error}");
            });
        }
    });
    let config = Config::default().secret(ours);
    world_with(3, &config, |group| group.barrier().unwrap());
}

#[test]
fn peers_on_other_addresses_need_a_secret_and_one_address() {
    let wildcard = vec!["0.0.0.0".parse().unwrap()];
    for (config, part) in [
        (Config::default().bind_addresses(wildcard.clone()), "every address"),
        (Config::default().socket_ifname("no-such-0"), "no-such-0"),
        (Config::default().bind_addresses(wildcard).socket_ifname("lo"), "which is meant"),
        // 192.0.2.0/24 is for documentation: nobody's.
        (
            Config::default().bind_addresses(vec!["192.0.2.1".parse().unwrap()]),
            "DRUMLINE_SECRET: not set",
        ),
        (Config::default().streams(0), "DRUMLINE_STREAMS: 0 connections"),
        (Config::default().streams(17), "there can be 1 to 16"),
    ] {
        let config = config.unix_sockets(false).timeout(Duration::from_secs(3));
        let error =
            drumline_group::rendezvous::local_world_with(2, &config).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        // On one host nothing of this is looked at.
        let config = config.unix_sockets(true);
        drumline_group::rendezvous::local_world_with(2, &config).unwrap();
    }
}

#[test]
fn ranks_with_other_numbers_of_connections_are_named() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let told = on_threads(vec![(0, 2), (1, 2), (2, 3)], |(rank, streams)| {
        let config = Config::default().streams(streams).unix_sockets(false);
        drumline_group::rendezvous::connect("streams", store.clone(), rank, 3, &config)
            .unwrap_err()
            .to_string()
    });
    for (rank, culprit) in
        [(0, "rank 2: it sends data over 3"), (2, "rank 0: it sends data over 2")]
    {
        assert!(told[rank].contains(culprit), "{}", told[rank]);
        assert!(told[rank].contains("DRUMLINE_STREAMS"), "{}", told[rank]);
    }
}
