//! Operations in the background: several groups at once, mixed with blocking calls, awaited,
//! dropped, aborted, too late.

use std::{
    future::IntoFuture,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::channel,
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use crate::common::{
    Barrier, everywhere, everywhere_with, failure, log::Log, on_threads, world_with,
};
use drumline_group::{
    Cause, Config, Error, ErrorKind, ProcessGroup, ReduceOp, Result, Work,
    store::{HashStore, Store},
};
use drumline_testing::{itself, tree_sum};

/// Adding in another order would give other bits.
fn sample(rank: usize, operation: usize, len: usize) -> Vec<f32> {
    let value = |index: usize| {
        let noise = ((rank + 1) * 7919 + operation * 104_729 + index * 31) as u32;
        (noise.wrapping_mul(2_654_435_761) >> 9) as f32 * 2.0_f32.powi((noise % 30) as i32 - 15)
    };
    (0..len).map(value).collect()
}

/// The sum of all ranks in the order of the canonical tree.
fn summed(world_size: usize, operation: usize, len: usize) -> Vec<u32> {
    let ranks: Vec<_> = (0..world_size).map(|rank| sample(rank, operation, len)).collect();
    let column = |index| ranks.iter().map(|rank| rank[index]).collect::<Vec<_>>();
    (0..len).map(|index| tree_sum(&column(index)).to_bits()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// One group per name, with the same ranks: `[rank][group]`.
fn connect(names: &[&str], world_size: usize, config: &Config) -> Vec<Vec<ProcessGroup>> {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    on_threads((0..world_size).collect(), |rank| {
        let connect = |name: &&str| {
            drumline_group::rendezvous::connect(name, store.clone(), rank, world_size, config)
        };
        names.iter().map(|name| connect(name).unwrap()).collect()
    })
}

#[test]
fn a_thousand_operations_in_flight_give_the_right_bits_in_order() {
    everywhere(|config| {
        world_with(3, config, |group| {
            let len = |operation: usize| [0, 1, 17, 300, 5000][operation % 5];
            let works: Vec<_> = (0..1000)
                .map(|operation| {
                    let data = sample(group.rank(), operation, len(operation));
                    group.all_reduce_async(data, ReduceOp::Sum).unwrap()
                })
                .collect();
            works[999 - group.rank()].is_completed();
            for (operation, work) in works.into_iter().enumerate() {
                let data = work.wait().unwrap();
                assert_eq!(bits(&data), summed(3, operation, len(operation)), "{operation}");
            }
            group.destroy().unwrap();
        });
    });
}

#[test]
fn groups_whose_calls_are_interleaved_differently_never_block_one_another() {
    const ROUNDS: usize = 30;
    everywhere(|config| {
        let ranks = connect(&["a", "b", "c"], 3, config);
        on_threads(ranks, |groups| {
            let rank = groups[0].rank();
            // Rank 0 calls on group a first, rank 1 on b, rank 2 on c; and each waits in its own
            // order, too.
            let mut works: Vec<Vec<Work<Vec<f32>>>> = (0..3).map(|_| Vec::new()).collect();
            for round in 0..ROUNDS {
                for turn in 0..3 {
                    let which = (rank + turn) % 3;
                    let data = sample(rank, round * 3 + which, 2000);
                    works[which].push(groups[which].all_reduce_async(data, ReduceOp::Sum).unwrap());
                }
            }
            for turn in 0..3 {
                let which = (2 * rank + turn) % 3;
                for (round, work) in std::mem::take(&mut works[which]).into_iter().enumerate() {
                    let data = work.wait().unwrap();
                    assert_eq!(bits(&data), summed(3, round * 3 + which, 2000));
                }
            }
            groups.into_iter().for_each(|group| group.destroy().unwrap());
        });
    });
}

#[test]
fn a_group_whose_peer_is_late_holds_up_no_other() {
    everywhere(|config| {
        let ranks = connect(&["late", "prompt"], 2, config);
        let prompt_is_done = Barrier::new(2);
        on_threads(ranks, |groups| {
            let [late, prompt] = &groups[..] else { unreachable!() };
            let early =
                (late.rank() == 0).then(|| late.all_reduce_async(vec![1], ReduceOp::Sum).unwrap());
            for operation in 0..50 {
                let mut data = sample(prompt.rank(), operation, 100);
                if operation % 2 == 0 {
                    prompt.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                } else {
                    data = prompt.all_reduce_async(data, ReduceOp::Sum).unwrap().wait().unwrap();
                }
                assert_eq!(bits(&data), summed(2, operation, 100));
            }
            prompt_is_done.wait();
            let work =
                early.unwrap_or_else(|| late.all_reduce_async(vec![1_i32], ReduceOp::Sum).unwrap());
            assert_eq!(work.wait().unwrap(), [2]);
        });
    });
}

#[test]
fn blocking_and_asynchronous_calls_run_in_the_order_of_the_calls() {
    everywhere(|config| {
        world_with(4, config, |group| {
            let me = group.rank();
            let mut works = Vec::new();
            for operation in 0..120 {
                let mut data = sample(me, operation, 700);
                match operation % 4 {
                    // Waited for at once, by a thread that helps.
                    0 => {
                        data = group.all_reduce_async(data, ReduceOp::Sum).unwrap().wait().unwrap()
                    }
                    // Behind those that are under way.
                    1 => group.all_reduce(&mut data, ReduceOp::Sum).unwrap(),
                    _ => {
                        works.push((
                            operation,
                            group.all_reduce_async(data, ReduceOp::Sum).unwrap(),
                        ));
                        continue;
                    }
                }
                assert_eq!(bits(&data), summed(4, operation, 700), "{operation}");
            }
            for (operation, work) in works {
                assert_eq!(bits(&work.wait().unwrap()), summed(4, operation, 700), "{operation}");
            }
        });
    });
}

/// Wakes the thread that polls.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs futures to their ends on this thread.
fn block_on<F: IntoFuture>(future: F) -> F::Output {
    let mut future = pin!(future.into_future());
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            // A thread that was unparked too early just polls once more.
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn operations_can_be_awaited() {
    everywhere(|config| {
        world_with(3, config, |group| {
            let next = (group.rank() + 1) % 3;
            let before = (group.rank() + 2) % 3;
            block_on(std::pin::Pin::from(Box::new(async {
                for operation in 0..100 {
                    let data = sample(group.rank(), operation, 500);
                    let sum = group.all_reduce_async(data, ReduceOp::Sum).unwrap();
                    let sent = group.send_async(vec![operation as u64; 3], next, 1).unwrap();
                    let received = group.recv_async(vec![0_u64; 3], before, 1).unwrap();
                    assert_eq!(bits(&sum.await.unwrap()), summed(3, operation, 500));
                    assert_eq!(received.await.unwrap(), [operation as u64; 3]);
                    sent.await.unwrap();
                }
            })));
            group.destroy().unwrap();
        });
    });
}

/// A callback starts the next operation, of a group that it can also lock.
#[test]
fn callbacks_get_results_and_start_other_operations() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let (sender, results) = channel();
            let again = group.clone();
            let first = group.all_reduce_async(vec![1_u32; 5000], ReduceOp::Sum).unwrap();
            first
                .on_complete(move |sum| {
                    assert_eq!(thread::current().name(), Some("drumline-callbacks"));
                    let _ = drumline_group::metrics::communication_time(&again); // would hang if the group were locked
                    let next = again.all_reduce_async(sum.unwrap(), ReduceOp::Sum).unwrap();
                    next.on_complete(move |sum| sender.send(sum).unwrap()).unwrap();
                })
                .unwrap();
            let sum = results.recv_timeout(Duration::from_secs(60)).unwrap();
            assert_eq!(sum.unwrap(), [4; 5000]);
        });
    });
}

#[test]
fn callbacks_hear_of_ends_that_were_before_and_of_failures_and_survive_panics() {
    let group = ProcessGroup::alone();
    let (sender, results) = channel();
    let submit = |value: u8| group.all_reduce_async(vec![value], ReduceOp::Max).unwrap();
    submit(0).on_complete(|_| panic!("on purpose")).unwrap();

    let ended = submit(1);
    while !ended.is_completed() {
        thread::yield_now();
    }
    let to = sender.clone();
    ended.on_complete(move |result| to.send(result).unwrap()).unwrap();
    assert_eq!(results.recv_timeout(Duration::from_secs(60)).unwrap().unwrap(), [1]);

    group.abort();
    submit(2).on_complete(move |result| sender.send(result).unwrap()).unwrap();
    let error = results.recv_timeout(Duration::from_secs(60)).unwrap().unwrap_err();
    assert!(matches!(failure(error).cause, Cause::Aborted));
}

#[test]
fn a_dropped_work_goes_on() {
    everywhere(|config| {
        world_with(3, config, |group| {
            for operation in 0..50 {
                drop(group.all_reduce_async(vec![1.0_f32; 5000], ReduceOp::Sum).unwrap());
                let mut data = sample(group.rank(), operation, 300);
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(bits(&data), summed(3, operation, 300));
            }
        });
    });
}

#[test]
fn a_group_that_is_dropped_ends_its_operations_and_then_leaves() {
    everywhere(|config| {
        let told = world_with(2, config, |group| {
            if group.rank() == 0 {
                let work = group.all_reduce_async(sample(0, 0, 30_000), ReduceOp::Sum).unwrap();
                drop(group);
                // Nobody but the engine can bring it to its end.
                return bits(&block_on(work).unwrap());
            }
            let data = group
                .all_reduce_async(sample(1, 0, 30_000), ReduceOp::Sum)
                .unwrap()
                .wait()
                .unwrap();
            // The other rank is gone now, and says so.
            let error = failure(group.recv(&mut [0_u8], 0, 0).unwrap_err());
            assert_eq!(error.cause, Cause::PeerLeft { peer: 0 }, "{error}");
            bits(&data)
        });
        assert!(told.iter().all(|bits| *bits == summed(2, 0, 30_000)));
    });
}

#[test]
fn waiting_can_be_given_up_and_taken_up_again() {
    everywhere(|config| {
        let given_up = Barrier::new(2);
        world_with(2, config, |group| {
            if group.rank() == 1 {
                given_up.wait();
                return group.barrier().unwrap();
            }
            let work = group.barrier_async().unwrap();
            let work = work.wait_timeout(Duration::from_millis(20)).unwrap_err();
            assert!(!work.is_completed());
            given_up.wait();
            // From here on only the engine drives it.
            assert!(block_on(work).unwrap().is_empty());
        });
    });
}

#[test]
fn an_abort_in_mid_operation_names_the_rank_everywhere() {
    everywhere(|config| {
        for blocking in [true, false] {
            let told = world_with(3, config, |group| {
                if group.rank() == 2 {
                    // Takes part in nothing; and the others wait for it.
                    thread::scope(|threads| {
                        let receive = threads.spawn(|| group.recv(&mut [0_u8], 0, 0).unwrap_err());
                        group.abort();
                        failure(receive.join().unwrap())
                    })
                } else if blocking {
                    failure(
                        group.all_reduce(&mut vec![1.0_f32; 100_000], ReduceOp::Sum).unwrap_err(),
                    )
                } else {
                    let work =
                        group.all_reduce_async(vec![1.0_f32; 100_000], ReduceOp::Sum).unwrap();
                    let behind = group.all_reduce_async(vec![1.0_f32; 10], ReduceOp::Sum).unwrap();
                    assert!(behind.wait().unwrap_err().error.kind() == ErrorKind::Poisoned);
                    failure(block_on(work).unwrap_err())
                }
            });
            for failure in told {
                assert_eq!(failure.culprit(), Some(2), "{failure}");
                assert!(failure.to_string().contains("this rank has aborted the group"));
            }
        }
    });
}

#[test]
fn an_abort_ends_the_operation_that_another_thread_is_in() {
    everywhere(|config| {
        let told = world_with(2, config, |group| {
            if group.rank() == 1 {
                // In no call until the other has given up.
                return failure(group.recv(&mut [0_u8], 0, 9).unwrap_err());
            }
            let begun = AtomicBool::new(false);
            thread::scope(|threads| {
                let call = threads.spawn(|| {
                    begun.store(true, Ordering::SeqCst);
                    group.barrier().unwrap_err()
                });
                while !begun.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                group.abort();
                failure(call.join().unwrap())
            })
        });
        assert_eq!(told[0].cause, Cause::Aborted);
        assert!(told.iter().all(|failure| failure.culprit() == Some(0)), "{told:?}");
    });
}

#[test]
fn a_deadline_ends_the_operation_and_all_behind_it() {
    let config = Config::default().timeout(Duration::from_secs(3));
    everywhere_with(&config, |config| {
        let given_up = Barrier::new(2);
        world_with(2, config, |group| {
            if group.rank() == 1 {
                given_up.wait();
                let heard = failure(group.recv(&mut [0_u8], 0, 0).unwrap_err());
                return assert_eq!(heard.culprit(), Some(1), "{heard}");
            }
            let works: Vec<_> = (0..3)
                .map(|_| group.all_reduce_async(vec![1_u8], ReduceOp::Sum).unwrap())
                .collect();
            let mut errors = works.into_iter().map(|work| block_on(work).unwrap_err());
            let first = failure(errors.next().unwrap());
            assert_eq!(first.cause, Cause::Timeout { waiting_for: vec![1] });
            for error in errors {
                assert_eq!(error.error.kind(), ErrorKind::Poisoned, "{error}");
                assert!(error.to_string().starts_with("all_reduce did not happen"), "{error}");
            }
            given_up.wait();
        });
    });
}

/// A buffer that stumbles when it is worked on.
struct Stumbling(Vec<f32>);

impl AsRef<[f32]> for Stumbling {
    fn as_ref(&self) -> &[f32] {
        &self.0
    }
}

impl AsMut<[f32]> for Stumbling {
    fn as_mut(&mut self) -> &mut [f32] {
        panic!("the buffer stumbles on purpose")
    }
}

#[test]
fn a_buffer_that_panics_fails_its_group_and_no_other() {
    everywhere(|config| {
        for message in [false, true] {
            let ranks = connect(&["stumbles", "stands"], 2, config);
            on_threads(ranks, |groups| {
                let [stumbles, stands] = &groups[..] else { unreachable!() };
                let peer = 1 - stumbles.rank();
                let slow = stands.all_reduce_async(vec![1_u8; 10], ReduceOp::Sum).unwrap();
                let work = match (message, stumbles.rank()) {
                    (true, 0) => Ok(stumbles.recv_async(Stumbling(vec![1.0]), 1, 0)),
                    (true, _) => Err(stumbles.send_async(vec![1.0_f32], 0, 0)),
                    (false, 0) => {
                        Ok(stumbles.all_reduce_async(Stumbling(vec![1.0; 9]), ReduceOp::Sum))
                    }
                    (false, _) => Err(stumbles.all_reduce_async(vec![1.0_f32; 9], ReduceOp::Sum)),
                };
                match work.map(Result::unwrap).map_err(Result::unwrap) {
                    Ok(work) => {
                        let failure = failure(block_on(work).map(drop).unwrap_err());
                        assert!(failure.to_string().contains("stumbles on purpose"), "{failure}");
                    }
                    Err(work) => {
                        // A message may have been sent before the receiver stumbled over it.
                        let error = work.wait().err().map(Error::from);
                        let error = error
                            .unwrap_or_else(|| stumbles.recv(&mut [0_u8], peer, 9).unwrap_err());
                        let failure = failure(error);
                        assert_eq!(failure.culprit(), Some(0), "{failure}");
                        assert!(failure.to_string().contains("stumbles on purpose"), "{failure}");
                    }
                }
                assert!(
                    matches!(stumbles.barrier(), Err(error) if error.kind() == ErrorKind::Poisoned)
                );
                assert_eq!(slow.wait().unwrap(), [2; 10]);
                stands.barrier().unwrap();
            });
        }
    });
}

/// A waker that stumbles.
struct StumblingWaker;

impl Wake for StumblingWaker {
    fn wake(self: Arc<Self>) {
        panic!("the waker stumbles on purpose")
    }
}

#[test]
fn a_waker_that_panics_harms_nobody() {
    let polled = Barrier::new(2);
    world_with(2, &Config::default(), |group| {
        if group.rank() == 0 {
            let mut future = pin!(group.barrier_async().unwrap().into_future());
            let waker = Waker::from(Arc::new(StumblingWaker));
            assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            polled.wait();
        } else {
            polled.wait();
            group.barrier().unwrap();
        }
        group.barrier().unwrap();
        assert_eq!(group.all_reduce_async(vec![1_u8], ReduceOp::Sum).unwrap().wait().unwrap(), [2]);
    });
}

#[test]
fn a_new_group_takes_the_place_of_one_that_failed() {
    everywhere(|config| {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        on_threads(vec![0, 1], |rank| {
            for life in 0..3 {
                let group =
                    drumline_group::rendezvous::connect("phoenix", store.clone(), rank, 2, config)
                        .unwrap();
                let mut data = sample(rank, life, 4000);
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(bits(&data), summed(2, life, 4000));
                // It fails with operations of every kind under way.
                let work = group.all_reduce_async(vec![1_u8; 3 + rank], ReduceOp::Sum).unwrap();
                let behind = group.barrier_async().unwrap();
                let receive = group.recv_async(vec![0_u8], 1 - rank, 0).unwrap();
                let failures = [
                    failure(work.wait().unwrap_err()),
                    failure(behind.wait().unwrap_err()),
                    failure(receive.wait().unwrap_err()),
                ];
                for failure in failures {
                    assert!(failure.to_string().contains("of 4 u8"), "{failure}");
                }
            }
        });
    });
}

#[test]
fn operations_submitted_by_many_threads_all_end() {
    everywhere(|config| {
        world_with(2, config, |group| {
            thread::scope(|threads| {
                for thread in 0..4 {
                    let group = &group;
                    threads.spawn(move || {
                        for round in 0..100 {
                            let work =
                                group.all_reduce_async(vec![1_i64; 8], ReduceOp::Sum).unwrap();
                            let sum = match (thread + round) % 3 {
                                0 => work.wait().unwrap(),
                                1 => block_on(work).unwrap(),
                                _ => patiently(work).unwrap(),
                            };
                            assert_eq!(sum, [2; 8]);
                        }
                    });
                }
            });
            group.destroy().unwrap();
        });
    });
}

/// Waits a little at a time.
fn patiently<B>(mut work: Work<B>) -> Result<B> {
    loop {
        match work.wait_timeout(Duration::from_micros(50)) {
            Ok(result) => return Ok(result?),
            Err(again) => work = again,
        }
    }
}

/// Runs the test of this name again, in a process of its own.
fn alone(name: &str) -> bool {
    if std::env::var_os("DRUMLINE_TEST_ALONE").is_some() {
        return true;
    }
    let output =
        itself(&format!("asynchrony::{name}")).env("DRUMLINE_TEST_ALONE", "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    false
}

/// Processor time that this process has used, of all its threads.
fn cpu_time() -> Duration {
    let seconds = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(seconds.tv_sec as u64, seconds.tv_nsec as u32)
}

#[test]
fn waiting_costs_no_processor_time() {
    const WAITED: Duration = Duration::from_millis(400);
    if !alone("waiting_costs_no_processor_time") {
        return;
    }
    everywhere(|config| {
        for case in 0..5 {
            let done = Barrier::new(3);
            let used = world_with(3, config, |group| {
                // All have met.
                group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap();
                let late = group.rank() == 2;
                let before = cpu_time();
                let come = Instant::now() + WAITED;
                let come_late = || thread::sleep(come.saturating_duration_since(Instant::now()));
                match case {
                    // In a collective that a rank is late for.
                    0 if late => come_late(),
                    // On the engine.
                    1 if late => {
                        come_late();
                        group.barrier().unwrap();
                    }
                    1 => drop(block_on(group.barrier_async().unwrap()).unwrap()),
                    // In a receive, while data of the next collective lies unread in a stream.
                    2 if group.rank() == 0 => group.recv(&mut [0_u8], 2, 0).unwrap(),
                    2 if late => {
                        come_late();
                        group.send(&[1_u8], 0, 0).unwrap();
                    }
                    // The same, on the engine.
                    3 if group.rank() == 0 => {
                        block_on(group.recv_async(vec![0_u8], 2, 0).unwrap()).map(drop).unwrap();
                    }
                    3 if late => {
                        come_late();
                        group.send(&[1_u8], 0, 0).unwrap();
                    }
                    // In `destroy`, which one rank is late for.
                    4 if late => come_late(),
                    _ => {}
                }
                if case == 4 {
                    group.destroy().unwrap();
                } else {
                    // Rank 1 sends its part to both others without waiting for them.
                    group.broadcast(&mut [1.0_f32; 10], 1).unwrap();
                    group.barrier().unwrap();
                }
                let used = cpu_time() - before;
                done.wait();
                used
            });
            let most = used.into_iter().max().unwrap();
            println!("case {case}: {most:?}");
            assert!(most < WAITED / 2, "case {case}: {most:?} of {WAITED:?}");
        }
    });
}

#[test]
fn late_ranks_are_named_in_a_warning() {
    if !alone("late_ranks_are_named_in_a_warning") {
        return;
    }
    let log = Log::default();
    let (writer, level) = (log.clone(), tracing::Level::WARN);
    tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_max_level(level)
        .with_ansi(false)
        .init();
    let logged = || log.text();
    let config = Config::default().warn_after(Duration::from_millis(200));
    everywhere_with(&config, |config| {
        let calls = [
            "all_reduce(sum) of 3 f32",
            "recv(from 1, tag 4) of 2 i16 and 0 other",
            "send(to 1, tag 4) of 2 i16 and 0 other",
        ];
        for (case, call) in calls.into_iter().enumerate() {
            log.clear();
            world_with(2, config, |group| {
                if group.rank() == 1 {
                    // Late until it is reported as late.
                    while !logged().contains(call) {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
                match (case, group.rank()) {
                    (0, _) => group.all_reduce(&mut [1.0_f32; 3], ReduceOp::Sum).unwrap(),
                    (1, 0) | (2, 1) => group.recv(&mut [1_i16; 2], 1 - group.rank(), 4).unwrap(),
                    _ => group.send(&[1_i16; 2], 1 - group.rank(), 4).unwrap(),
                }
            });
            let logged = logged();
            let line = logged.lines().find(|line| line.contains(call)).unwrap();
            assert!(
                line.contains("rank=0") && line.contains("1}") | line.contains("[1]"),
                "{line}"
            );
            assert!(line.contains("DRUMLINE_TIMEOUT_S"), "{line}");
        }
    });
}
