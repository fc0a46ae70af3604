//! Messages from rank to rank, beside collectives and each other.

use std::time::Duration;

use crate::common::{Barrier, everywhere, everywhere_with, failure, on_threads, world_with};
use drumline_group::{Cause, Config, Error, ErrorKind, ProcessGroup, ReduceOp};

fn content(from: usize, to: usize, tag: u64, number: usize, len: usize) -> Vec<i32> {
    let base = from * 1_000_003 + to * 10_007 + (tag as usize & 0xff) * 101 + number * 13;
    (0..len).map(|index| (base + index * 31) as i32).collect()
}

#[test]
fn messages_between_all_ranks_arrive_in_order_by_tag() {
    const TAGS: [u64; 3] = [0, 7, u64::MAX];
    const LENS: [usize; 5] = [0, 1, 1000, 70_000, 3];
    everywhere(|config| {
        for world_size in [2, 4] {
            world_with(world_size, config, |group| {
                let me = group.rank();
                let peers = (0..world_size).filter(|&peer| peer != me);
                let mut sends = Vec::new();
                let mut receives = Vec::new();
                for peer in peers {
                    for (number, len) in LENS.into_iter().enumerate() {
                        for tag in TAGS {
                            let message = content(me, peer, tag, number, len);
                            sends.push(group.send_async(message, peer, tag).unwrap());
                        }
                        // Asked for in another order of tags than they are sent.
                        for tag in TAGS.into_iter().rev() {
                            let work = group.recv_async(vec![0; len], peer, tag).unwrap();
                            receives.push((content(peer, me, tag, number, len), work));
                        }
                    }
                }
                // Waited for in yet another order.
                for (expected, work) in receives.into_iter().rev() {
                    assert_eq!(work.wait().unwrap(), expected);
                }
                sends.into_iter().for_each(|work| drop(work.wait().unwrap()));
                group.destroy().unwrap();
            });
        }
    });
}

#[test]
fn a_message_that_nobody_receives_holds_up_nothing() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let peer = 1 - group.rank();
            let large: Vec<f64> = (0..3_000_000).map(f64::from).collect();
            let first = group.send_async(large.clone(), peer, 1).unwrap();
            for _ in 0..50 {
                let mut one = [1.0_f32];
                group.all_reduce(&mut one, ReduceOp::Sum).unwrap();
                assert_eq!(one, [2.0]);
            }
            // Nor other messages.
            let second = group.send_async(vec![group.rank() as u64], peer, 3).unwrap();
            let mut received = [9_u64];
            group.recv(&mut received, peer, 3).unwrap();
            assert_eq!(received, [peer as u64]);
            second.wait().unwrap();
            assert!(!first.is_completed());

            let received = group.recv_async(vec![0.0_f64; large.len()], peer, 1).unwrap();
            assert_eq!(received.wait().unwrap(), large);
            assert_eq!(first.wait().unwrap(), large);
            group.destroy().unwrap();
        });
    });
}

#[test]
fn a_receive_gets_its_message_while_a_collective_waits_on_another_thread() {
    everywhere(|config| {
        world_with(2, config, |group| {
            if group.rank() == 1 {
                // Only then does this rank come to the barrier that the other waits in.
                group.send(&[3_i64, 4], 0, 5).unwrap();
                group.recv(&mut [0_u8; 100_000], 0, 6).unwrap();
                group.barrier().unwrap();
                return;
            }
            std::thread::scope(|threads| {
                threads.spawn(|| group.barrier().unwrap());
                threads.spawn(|| {
                    let mut message = [0_i64; 2];
                    group.recv(&mut message, 1, 5).unwrap();
                    assert_eq!(message, [3, 4]);
                    group.send(&[1_u8; 100_000], 1, 6).unwrap();
                });
            });
        });
    });
}

#[test]
fn collectives_go_on_while_a_receive_waits_on_another_thread() {
    everywhere(|config| {
        world_with(2, config, |group| {
            if group.rank() == 1 {
                for _ in 0..20 {
                    group.barrier().unwrap();
                    let mut sum = [1.0_f32; 5000];
                    let work = group.all_reduce_async(vec![1_i32], ReduceOp::Sum).unwrap();
                    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert_eq!(work.wait().unwrap(), [2]);
                }
                return group.send(&[7_u16], 0, 0).unwrap();
            }
            std::thread::scope(|threads| {
                // It may hold the group while it waits; the barriers come all the same.
                threads.spawn(|| {
                    let mut message = [0_u16];
                    group.recv(&mut message, 1, 0).unwrap();
                    assert_eq!(message, [7]);
                });
                for _ in 0..20 {
                    group.barrier().unwrap();
                    let mut sum = [1.0_f32; 5000];
                    let work = group.all_reduce_async(vec![1_i32], ReduceOp::Sum).unwrap();
                    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                    assert_eq!(sum, [2.0; 5000]);
                    assert_eq!(work.wait().unwrap(), [2]);
                }
            });
        });
    });
}

#[test]
fn many_threads_talk_at_once() {
    everywhere(|config| {
        world_with(3, config, |group| {
            std::thread::scope(|threads| {
                for tag in 0..4 {
                    let group = &group;
                    threads.spawn(move || {
                        let (next, before) = ((group.rank() + 1) % 3, (group.rank() + 2) % 3);
                        for number in 0..100 {
                            let message = content(group.rank(), next, tag, number, number * 20);
                            let sent = group.send_async(message, next, tag).unwrap();
                            let mut message = vec![0; number * 20];
                            group.recv(&mut message, before, tag).unwrap();
                            let expected = content(before, group.rank(), tag, number, number * 20);
                            assert_eq!(message, expected);
                            sent.wait().unwrap();
                        }
                    });
                }
                for _ in 0..100 {
                    let mut ones = vec![1_i64; 3000];
                    group.all_reduce(&mut ones, ReduceOp::Sum).unwrap();
                    assert!(ones.iter().all(|sum| *sum == 3));
                }
            });
            group.destroy().unwrap();
        });
    });
}

#[test]
fn sides_that_differ_fail_on_both_ranks_with_both_calls() {
    everywhere(|config| {
        for receive_f32 in [true, false] {
            let told = world_with(2, config, |group| {
                let result = match group.rank() {
                    0 => group.send(&[1.0_f32; 4], 1, 7),
                    _ if receive_f32 => group.recv(&mut [0.0_f32; 5], 0, 7),
                    _ => group.recv(&mut [0_i32; 4], 0, 7),
                };
                let error = result.unwrap_err();
                assert!(
                    matches!(group.barrier(), Err(error) if error.kind() == ErrorKind::Poisoned)
                );
                assert!(matches!(
                    group.send(&[1_u8], 1 - group.rank(), 0),
                    Err(error) if error.kind() == ErrorKind::Poisoned
                ));
                failure(error)
            });
            let receive = if receive_f32 { "5 f32" } else { "4 i32" };
            for failure in told {
                let text = failure.to_string();
                assert!(text.contains("send(tag 7) of 4 f32"), "{text}");
                assert!(text.contains(&format!("recv(from 0, tag 7) of {receive}")), "{text}");
            }
        }
    });
}

#[test]
fn a_rank_that_has_left_is_named() {
    everywhere(|config| {
        let told = world_with(3, config, |group| match group.rank() {
            2 => None,
            0 => Some(failure(group.recv(&mut [0_u8], 2, 1).unwrap_err())),
            _ => Some(failure(group.send(&[0_u8], 2, 1).unwrap_err())),
        });
        for failure in told.into_iter().flatten() {
            assert_eq!(failure.culprit(), Some(2), "{failure}");
            assert!(failure.to_string().contains("rank 2 has closed the group"), "{failure}");
        }
    });
}

#[test]
fn what_was_sent_before_leaving_still_arrives() {
    everywhere(|config| {
        for _ in 0..20 {
            world_with(2, config, |group| {
                let mut message = [group.rank() as f32; 20_000];
                match group.rank() {
                    0 => group.send(&message, 1, 0).unwrap(),
                    _ => group.recv(&mut message, 0, 0).unwrap(),
                }
                assert_eq!(message, [0.0; 20_000]);
            });
        }
    });
}

#[test]
fn a_rank_that_dies_is_named() {
    everywhere(|config| {
        let groups = drumline_group::rendezvous::local_world_with(3, config).unwrap();
        std::thread::scope(|threads| {
            let run = |group: ProcessGroup| {
                assert_ne!(group.rank(), 1, "this rank stumbles on purpose");
                failure(group.recv(&mut [0_u8], 1, 1).unwrap_err())
            };
            let running: Vec<_> =
                groups.into_iter().map(|group| threads.spawn(move || run(group))).collect();
            for thread in running {
                let Ok(failure) = thread.join() else { continue };
                assert_eq!(failure.culprit(), Some(1), "{failure}");
                // Nobody listens any more where a rank of another host was.
                let text = failure.to_string();
                assert!(
                    text.contains("has ended") || text.contains("has probably ended"),
                    "{text}"
                );
            }
        });
    });
}

#[test]
fn a_message_that_nobody_receives_in_time_names_the_receiver() {
    let config = Config::default().timeout(Duration::from_secs(3));
    everywhere_with(&config, |config| {
        let given_up = Barrier::new(2);
        let told = world_with(2, config, |group| {
            if group.rank() == 1 {
                given_up.wait();
                let heard = failure(group.barrier().unwrap_err());
                assert_eq!(heard.culprit(), Some(1), "{heard}");
                return None;
            }
            let failure = failure(group.send(&[1.0_f64], 1, 3).unwrap_err());
            given_up.wait();
            Some(failure)
        });
        let failure = told[0].clone().unwrap();
        assert_eq!(failure.cause, Cause::Timeout { waiting_for: vec![1] }, "{failure}");
        assert_eq!(failure.operation, "send(to 1, tag 3) of 1 f64");
    });
}

#[test]
fn an_abort_ends_everything_that_waits() {
    everywhere(|config| {
        let told = world_with(3, config, |group| {
            let peer = (group.rank() + 1) % 3;
            let receive = group.recv_async(vec![0_u8], peer, 0).unwrap();
            let send = group.send_async(vec![0_u8], peer, 1).unwrap();
            if group.rank() == 2 {
                group.abort();
            }
            [receive, send].map(|work| failure(work.wait().unwrap_err()))
        });
        for failure in told.into_iter().flatten() {
            assert_eq!(failure.culprit(), Some(2), "{failure}");
            assert!(failure.to_string().contains("this rank has aborted"), "{failure}");
        }
    });
}

#[test]
fn a_failed_collective_ends_sends_and_receives() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let receive = group.recv_async(vec![0_u8], 1 - group.rank(), 0).unwrap();
            let mut data = vec![0_u8; 1 + group.rank()];
            let collective = group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
            let receive = receive.wait().unwrap_err().error;
            // The other rank's word may reach either of them first.
            let poisoned = |error: &Error| error.kind() == ErrorKind::Poisoned;
            assert!(poisoned(&collective) != poisoned(&receive), "{collective}\n{receive}");
            assert_eq!(failure(collective).to_string(), failure(receive).to_string());
        });
    });
}

#[test]
fn arguments_that_cannot_work_are_refused_and_harm_nothing() {
    world_with(2, &Config::default(), |group| {
        let me = group.rank();
        let problem = group.send(&[0_u8], me + 2, 0).unwrap_err().to_string();
        assert!(problem.contains("send: there is no rank"), "{problem}");
        let problem = group.recv(&mut [0_u8], 2, 0).unwrap_err().to_string();
        assert!(problem.contains("rank 2") && problem.contains("0 to 1"), "{problem}");
        group.barrier().unwrap();
    });
}

#[test]
fn there_is_a_limit_to_messages_that_nobody_receives() {
    const LIMIT: usize = 65_536;
    world_with(2, &Config::default(), |group| {
        let peer = 1 - group.rank();
        if group.rank() == 0 {
            let sends: Vec<_> =
                (0..LIMIT).map(|_| group.send_async(vec![1_u8], peer, 0).unwrap()).collect();
            let problem = group.send(&[2_u8], peer, 0).unwrap_err().to_string();
            assert!(problem.contains("65536 calls") && problem.contains("rank 1"), "{problem}");
            group.barrier().unwrap();
            sends.into_iter().for_each(|work| drop(work.wait().unwrap()));
        } else {
            group.barrier().unwrap();
            for _ in 0..LIMIT {
                let mut message = [0_u8];
                group.recv(&mut message, peer, 0).unwrap();
                assert_eq!(message, [1]);
            }
        }
        group.destroy().unwrap();
    });
}

#[test]
fn destroy_finishes_what_is_under_way() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let peer = 1 - group.rank();
            let send = group.send_async(vec![1_u64; 200_000], peer, 0).unwrap();
            let receive = group.recv_async(vec![0_u64; 200_000], peer, 0).unwrap();
            group.destroy().unwrap();
            assert!(send.is_completed() && receive.is_completed());
            assert_eq!(receive.wait().unwrap(), vec![1; 200_000]);
        });
    });
}

#[test]
fn two_ranks_that_both_receive_first_do_not_wait_for_each_other() {
    // Larger than what sockets and shared memory hold.
    const LEN: usize = 4 << 20;
    everywhere(|config| {
        world_with(2, config, |group| {
            let (me, peer) = (group.rank(), 1 - group.rank());
            let receive = group.recv_async(vec![0_u64; LEN], peer, 0).unwrap();
            let send = group.send_async(vec![me as u64; LEN], peer, 0).unwrap();
            let batch: Vec<Vec<u64>> =
                [receive, send].into_iter().map(|work| work.wait().unwrap()).collect();
            assert!(batch[0].iter().all(|&value| value == peer as u64));
            assert!(batch[1].iter().all(|&value| value == me as u64));
        });
    });
}

#[test]
fn a_receive_from_any_rank_gets_every_message_once() {
    const EACH: usize = 50;
    everywhere(|config| {
        world_with(4, config, |group| {
            let me = group.rank();
            let sends: Vec<_> = (0..4 * EACH)
                .filter(|number| number % 4 != me)
                .map(|number| group.send_async(vec![me as u64, number as u64 / 4], number % 4, 9))
                .collect();
            let mut next = [0_u64; 4];
            for _ in 0..3 * EACH {
                let (message, from) = group.recv_any_async([0_u64; 2], 9).unwrap().wait().unwrap();
                // Those of one rank come in order.
                assert_eq!(message, [from as u64, next[from]]);
                next[from] += 1;
            }
            assert!((0..4).all(|peer| next[peer] == if peer == me { 0 } else { EACH as u64 }));
            sends.into_iter().for_each(|send| drop(send.unwrap().wait().unwrap()));
            group.destroy().unwrap();
        });
    });
}

#[test]
fn receives_from_one_rank_and_from_any_are_served_in_the_order_of_the_calls() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let peer = 1 - group.rank();
            let first = group.recv_any_async(vec![0_u8], 5).unwrap();
            let second = group.recv_async(vec![0_u8], peer, 5).unwrap();
            let third = group.recv_any_async(vec![0_u8], 5).unwrap();
            let other_tag = group.recv_any_async(vec![0_u8], 6).unwrap();
            group.barrier().unwrap();
            for (message, tag) in [(4_u8, 6), (1, 5), (2, 5), (3, 5)] {
                group.send(&[message], peer, tag).unwrap();
            }
            assert_eq!(first.wait().unwrap(), (vec![1], peer));
            assert_eq!(second.wait().unwrap(), [2]);
            assert_eq!(third.wait().unwrap(), (vec![3], peer));
            assert_eq!(other_tag.wait().unwrap(), (vec![4], peer));
        });
    });
}

#[test]
fn a_rank_talks_to_itself() {
    let mut groups = drumline_group::rendezvous::local_world(2).unwrap();
    groups.push(ProcessGroup::alone());
    on_threads(groups, |group| {
        let me = group.rank();
        // Sends and receives, each called first once, and from any.
        let sent = group.send_async(vec![1_u16; 3], me, 0).unwrap();
        let mut received = [0_u16; 3];
        group.recv(&mut received, me, 0).unwrap();
        assert_eq!((received, sent.wait().unwrap()), ([1; 3], vec![1; 3]));
        let later = group.recv_async(vec![0_u16; 2], me, 0).unwrap();
        group.send(&[2_u16; 2], me, 0).unwrap();
        assert_eq!(later.wait().unwrap(), [2, 2]);
        let any = group.recv_any_async(vec![0_u16], 0).unwrap();
        group.send(&[3_u16], me, 0).unwrap();
        assert_eq!(any.wait().unwrap(), (vec![3], me));
        // What fails now would end what the other rank is still doing.
        group.barrier().unwrap();

        let sent = group.send_async(vec![1_u8; 3], me, 1).unwrap();
        let text = group.recv(&mut [0_u8; 4], me, 1).unwrap_err().to_string();
        assert!(text.contains("send(tag 1) of 3 u8") && text.contains("of 4 u8"), "{text}");
        assert!(sent.wait().is_err());
    });
}

#[test]
fn a_receive_from_any_rank_fails_when_nobody_is_left() {
    everywhere(|config| {
        world_with(3, config, |group| {
            if group.rank() > 0 {
                return;
            }
            let receive = group.recv_any_async([0_u8], 0).unwrap();
            let failure = failure(receive.wait().unwrap_err().error);
            let Cause::NobodyLeft { mut left, unreachable } = failure.cause else {
                panic!("{failure}");
            };
            left.extend(unreachable.into_iter().map(|(rank, _)| rank));
            left.sort_unstable();
            assert_eq!(left, [1, 2]);
        });
    });
}

#[test]
fn a_receive_from_any_rank_may_be_of_this_one_although_all_others_have_left() {
    everywhere(|config| {
        world_with(2, config, |group| {
            if group.rank() == 1 {
                return;
            }
            let received = group.recv_any_async(vec![0_u8], 0).unwrap();
            let Err(received) = received.wait_timeout(Duration::from_millis(300)) else {
                panic!("nobody has sent anything");
            };
            group.send(&[7_u8], 0, 0).unwrap();
            assert_eq!(received.wait().unwrap(), (vec![7], 0));
        });
    });
}

#[test]
fn a_receive_from_any_rank_that_takes_too_long_names_all() {
    let config = Config::default().timeout(Duration::from_secs(2));
    let given_up = Barrier::new(3);
    world_with(3, &config, |group| {
        if group.rank() == 1 {
            let receive = group.recv_any_async([0_u8], 4).unwrap();
            let failure = failure(receive.wait().unwrap_err().error);
            assert_eq!(failure.cause, Cause::Timeout { waiting_for: vec![0, 2] });
            assert_eq!(failure.operation, "recv(from any, tag 4) of 1 u8");
        }
        given_up.wait();
    });
}
