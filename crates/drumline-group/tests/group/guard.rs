//! Groups on a backend that notices nothing: the guard beside it names the rank at fault.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use drumline_group::{
    Cause, CollectiveError, Config, Error, ErrorKind, ProcessGroup, ReduceOp,
    backend::{Backend, Guard, Request, register_backend},
};

use crate::common::{
    everywhere_with, failure,
    log::Log,
    on_threads,
    tacit::{Stage, cause_of, no_fault, register},
    world_with,
};

/// Long enough that no test waits for it.
const PATIENT: Duration = Duration::from_secs(300);

fn guarded(name: &str) -> Config {
    register(name, true, no_fault);
    Config::default().backend(name).timeout(PATIENT)
}

/// Worlds of 1 to 4 ranks, with guards over every kind of connection.
fn each_world(name: &str, rank: impl Fn(ProcessGroup) + Sync) {
    everywhere_with(&guarded(name), |config| {
        for world_size in 1..=4 {
            world_with(world_size, config, &rank);
        }
    });
}

#[test]
fn what_goes_well_goes_well_beside_a_guard() {
    each_world("guard-well", |group| {
        let (own, world) = (group.rank() as u64 + 1, group.world_size() as u64);
        // They wait beside all of the collectives.
        let others = || (0..group.world_size()).filter(|rank| *rank != group.rank());
        let awaited: Vec<_> =
            others().map(|from| group.recv_async(vec![0_u64], from, 9).unwrap()).collect();
        let expected = world * (world + 1) / 2;
        for _ in 0..20 {
            let mut sum = [own; 3];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [expected; 3]);
        }
        let works: Vec<_> = (0..20)
            .map(|turn| group.all_reduce_async(vec![own * turn], ReduceOp::Sum).unwrap())
            .collect();
        group.barrier().unwrap();
        for (turn, work) in works.into_iter().enumerate() {
            assert_eq!(work.wait().unwrap(), [expected * turn as u64]);
        }
        let next = (group.rank() + 1) % group.world_size();
        if next != group.rank() {
            let sent = group.send_async(vec![own], next, 7).unwrap();
            let mut received = [0_u64];
            let before = (group.rank() + group.world_size() - 1) % group.world_size();
            group.recv(&mut received, before, 7).unwrap();
            assert_eq!(received, [before as u64 + 1]);
            sent.wait().unwrap();
        }
        let sent: Vec<_> = others().map(|to| group.send_async(vec![own], to, 9).unwrap()).collect();
        for (from, work) in others().zip(awaited) {
            assert_eq!(work.wait().unwrap(), [from as u64 + 1]);
        }
        sent.into_iter().for_each(|work| drop(work.wait().unwrap()));
        group.destroy().unwrap();
    });
}

fn until_it_fails(call: impl Fn() -> drumline_group::Result<()>) -> Error {
    loop {
        if let Err(error) = call() {
            return error;
        }
    }
}

/// The calls of rank 0 and of the others, as every rank is told of them.
fn assert_both(group: &ProcessGroup, cause: &Cause, first: &str, others: &str) {
    let Cause::Mismatch { peer, theirs, ours } = cause else { panic!("{cause:?}") };
    let (expected_ours, expected_theirs) = match group.rank() {
        0 => (first, others),
        _ => (others, first),
    };
    assert!(ours.contains(expected_ours), "{ours}");
    assert!(theirs.contains(expected_theirs), "{theirs}");
    assert_ne!(*peer, group.rank());
}

#[test]
fn every_rank_is_told_both_calls() {
    each_world("guard-mismatch", |group| {
        if group.world_size() == 1 {
            return;
        }
        group.barrier().unwrap();
        let result = match group.rank() {
            0 => group.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum),
            _ => group.all_reduce(&mut [1.0_f32; 9], ReduceOp::Sum),
        };
        let failed = failure(result.unwrap_err());
        assert_both(
            &group,
            &failed.cause,
            "#1 all_reduce(sum) of 8 f32",
            "#1 all_reduce(sum) of 9 f32",
        );
        assert!(failed.operation.contains("all_reduce"), "{failed}");
        assert!(matches!(group.barrier(), Err(error) if error.kind() == ErrorKind::Poisoned));
    });
}

#[test]
fn destroy_does_not_go_with_a_call() {
    each_world("guard-destroy", |group| {
        if group.world_size() == 1 {
            return;
        }
        let result = match group.rank() {
            0 => group.clone().destroy(),
            _ => group.broadcast(&mut [1_u8], 0),
        };
        assert_both(&group, &cause_of(result.unwrap_err()), "destroy", "#0 broadcast(root 0)");
    });
}

#[test]
fn who_is_late_is_named_at_the_deadline() {
    everywhere_with(&guarded("guard-late"), |config| {
        world_with(3, config, |group| {
            group.barrier().unwrap();
            if group.rank() != 2 {
                let hurried = group.within(Duration::from_millis(300));
                let failed = failure(hurried.all_reduce(&mut [1], ReduceOp::Sum).unwrap_err());
                match &failed.cause {
                    Cause::Timeout { waiting_for } => assert_eq!(waiting_for, &[2], "{failed}"),
                    Cause::Reported { culprit, .. } => assert_eq!(*culprit, Some(2), "{failed}"),
                    other => panic!("{other:?}"),
                }
                let text = failed.to_string();
                assert!(text.contains("all_reduce(sum) of 1 i32"), "{text}");
                assert!(!text.contains("all_gather"), "{text}");
            }
            group // rank 2 stays until the others have failed
        });
    });
}

#[test]
fn an_abort_is_heard_by_all_who_wait() {
    each_world("guard-abort", |group| {
        if group.rank() == 0 {
            group.abort();
            assert_eq!(cause_of(group.barrier().unwrap_err()), Cause::Aborted);
            return;
        }
        let cause = match group.rank() {
            // Amid a message that never comes.
            1 => cause_of(group.recv(&mut [0_u8], 0, 7).unwrap_err()),
            _ => cause_of(until_it_fails(|| group.barrier())),
        };
        match &cause {
            Cause::Reported { culprit, text, .. } => {
                assert_eq!(*culprit, Some(0), "{cause:?}");
                assert!(text.contains("this rank has aborted the group"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_panic_in_a_backend_is_told_to_the_peers() {
    register("guard-panic", true, |rank, stage, sequence| {
        assert!((rank, stage, sequence) != (1, Stage::HalfSent, 0), "half is enough");
    });
    let config = Config::default().backend("guard-panic").timeout(PATIENT);
    everywhere_with(&config, |config| {
        for world_size in 2..=4 {
            world_with(world_size, config, |group| {
                // Others may have got their half.
                let failed =
                    failure(until_it_fails(|| group.all_reduce(&mut [1_u8], ReduceOp::Sum)));
                match (group.rank(), &failed.cause) {
                    (1, Cause::Panicked { text }) => assert!(text.contains("half is enough")),
                    (_, Cause::Reported { culprit, text, .. }) => {
                        assert_eq!(*culprit, Some(1), "{text}");
                        assert!(text.contains("half is enough"), "{text}");
                    }
                    (_, other) => panic!("{other:?}"),
                }
            });
        }
    });
}

#[test]
fn who_drops_the_group_has_left() {
    each_world("guard-left", |group| {
        if group.rank() == 1 {
            return group.barrier().unwrap();
        }
        if group.world_size() == 1 {
            return;
        }
        let failed = failure(until_it_fails(|| group.barrier()));
        match &failed.cause {
            Cause::PeerLeft { peer } => assert_eq!(*peer, 1),
            Cause::Reported { culprit, text, .. } => assert_eq!(*culprit, Some(1), "{text}"),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn destroy_does_not_wait_for_who_has_left() {
    each_world("guard-gone", |group| {
        group.barrier().unwrap();
        if group.rank() != 1 {
            group.destroy().unwrap();
        }
    });
}

#[test]
fn who_drops_the_group_in_a_panic_counts_as_dead() {
    everywhere_with(&guarded("guard-dead"), |config| {
        let ranks = drumline_group::rendezvous::local_world_with(3, config).unwrap();
        let caught = on_threads(ranks, |group| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                if group.rank() == 1 {
                    panic!("rank 1 gives up");
                }
                let cause = cause_of(until_it_fails(|| group.barrier()));
                // Over TCP another rank may be sure first.
                assert_eq!(cause.ranks(), [1]);
                assert!(cause.to_string().contains("the process of rank 1 has ended"), "{cause}");
            }))
            .is_err()
        });
        assert_eq!(caught, [false, true, false]);
    });
}

#[test]
fn leaving_waits_for_nobody_who_does_not_come() {
    everywhere_with(&guarded("guard-leave"), |config| {
        let groups = drumline_group::rendezvous::local_world_with(2, config).unwrap();
        let meetings = drumline_group::rendezvous::local_world(2).unwrap();
        on_threads(groups.into_iter().zip(meetings).collect(), |(group, meeting)| {
            group.barrier().unwrap();
            if group.rank() == 0 {
                group.leave(Duration::from_millis(50)).unwrap();
                meeting.barrier().unwrap();
            } else {
                meeting.barrier().unwrap();
                let cause = cause_of(group.barrier().unwrap_err());
                match &cause {
                    Cause::PeerLeft { peer: 0 } => {}
                    Cause::Mismatch { peer: 0, theirs, .. } => assert_eq!(theirs, "destroy"),
                    other => panic!("{other:?}"),
                }
            }
        });
    });
}

/// Of an uneven all-to-all, say: only the receiver sees that lengths differ.
#[test]
fn a_mismatch_that_a_backend_finds_is_told_to_the_peers() {
    #[derive(Debug)]
    struct Picky(Guard, usize);

    impl Backend for Picky {
        fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
            let [theirs, ours] = ["five", "six"].map(str::to_owned);
            match self.1 {
                1 => Err(Cause::Mismatch { peer: 0, theirs, ours }),
                _ => loop {
                    self.0.check()?;
                },
            }
        }

        fn abort(&self, _: &CollectiveError) {}

        fn shutdown(&self, _: Instant) -> Result<(), Cause> {
            Ok(())
        }
    }

    register_backend("guard-picky", |options| Ok(Arc::new(Picky(options.guard()?, options.rank))))
        .unwrap();
    let config = Config::default().backend("guard-picky").timeout(PATIENT);
    everywhere_with(&config, |config| {
        world_with(3, config, |group| {
            let cause = cause_of(group.barrier().unwrap_err());
            match (group.rank(), &cause) {
                (1, Cause::Mismatch { .. }) => {}
                (_, Cause::Reported { text, .. }) => assert!(text.contains("five"), "{text}"),
                (_, other) => panic!("{other:?}"),
            }
        });
    });
}

/// The backend is done at once, so the rank sleeps in the guard.
#[test]
fn an_abort_wakes_a_rank_that_waits_for_the_others() {
    register_empty("guard-sleep", true);
    let config = Config::default().backend("guard-sleep").timeout(PATIENT);
    everywhere_with(&config, |config| {
        for world_size in 2..=4 {
            world_with(world_size, config, |group| {
                if group.rank() == 0 {
                    let work = group.barrier_async().unwrap();
                    // It falls asleep in most runs. If it does not, the rest holds as well.
                    std::thread::sleep(Duration::from_millis(5));
                    group.abort();
                    assert_eq!(cause_of(work.wait().unwrap_err().error), Cause::Aborted);
                } else if group.rank() != 1 {
                    let cause = cause_of(group.barrier().unwrap_err());
                    let is_told = matches!(&cause, Cause::Reported { culprit: Some(0), .. });
                    assert!(is_told, "{cause:?}");
                }
                group // rank 1 stays, and calls nothing
            });
        }
    });
}

#[test]
fn a_warning_names_the_late_and_the_call_of_the_user() {
    register_empty("guard-warn", true);
    let config = Config::default().backend("guard-warn").warn_after(Duration::from_millis(100));
    let log = Log::default();
    let writer = log.clone();
    let subscriber =
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let late = Mutex::new(());
    let held = late.lock().unwrap();
    std::thread::scope(|threads| {
        let mut ranks =
            drumline_group::rendezvous::local_world_with(2, &config).unwrap().into_iter();
        let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
        let waiting = threads.spawn(move || {
            tracing::subscriber::with_default(subscriber, || {
                // What another test begins while nobody listens would never be heard.
                let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
                first.all_reduce(&mut [1_u8; 5], ReduceOp::Sum).unwrap();
            });
        });
        let late = &late;
        threads.spawn(move || {
            drop(late.lock().unwrap());
            second.all_reduce(&mut [1_u8; 5], ReduceOp::Sum).unwrap();
        });
        while !log.text().contains("has been waiting") {
            assert!(!waiting.is_finished());
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(held);
    });
    let text = log.text();
    assert!(text.contains("all_reduce(sum) of 5 u8"), "{text}");
    assert!(text.contains("late=[1]") && !text.contains("all_gather"), "{text}");
    assert!(text.contains("has gone on"), "{text}");
}

/// Not a test: run it in a release build on a quiet machine.
#[test]
#[ignore = "it measures"]
fn what_a_guard_costs() {
    const CALLS: u32 = 200_000;
    for is_guarded in [false, true, false, true] {
        register_empty("guard-cost", is_guarded);
        let config = Config::default().backend("guard-cost");
        let times = world_with(2, &config, |group| {
            let meeting = || (0..1000).for_each(|_| group.barrier().unwrap());
            meeting();
            let started = Instant::now();
            (0..CALLS).for_each(|_| group.barrier().unwrap());
            started.elapsed() / CALLS
        });
        println!("guarded: {is_guarded}: {times:?} per call");
    }
}

fn register_empty(name: &str, is_guarded: bool) {
    register_backend(name, move |options| {
        let guard = is_guarded.then(|| options.guard()).transpose()?;
        Ok(Arc::new(Empty(guard)) as Arc<dyn Backend>)
    })
    .unwrap();
}

/// Its collectives do nothing.
#[derive(Debug)]
struct Empty(Option<Guard>);

impl Backend for Empty {
    fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
        self.0.as_ref().map_or(Ok(()), Guard::check)
    }

    fn abort(&self, _: &CollectiveError) {}

    fn shutdown(&self, _: Instant) -> Result<(), Cause> {
        Ok(())
    }
}
