//! What ranks are told that pass arguments which cannot work, disagree, or are missing, in
//! collectives other than all-reduce and broadcast.

use std::time::Duration;

use crate::common::{Barrier, everywhere, everywhere_with, failure, world_with};
use drumline_group::{
    Cause, Config, DType, Error, ErrorKind, Operator, ProcessGroup, ReduceOp, backend::Collective,
    driving::Ask,
};

#[test]
fn arguments_that_cannot_work_are_refused_and_harm_nothing() {
    let expect = |result: Result<(), Error>, part: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
        assert!(error.message().contains(part), "{error}");
    };
    world_with(2, &Config::default(), |group| {
        let (mut one, mut two) = ([0_u8], [0_u8; 2]);
        let op = ReduceOp::Sum;
        let other = 1 - group.rank();
        expect(group.reduce(&mut one, op, 2), "no rank 2");
        expect(group.gather(&[1_u8], &mut two, other), "not the root");
        expect(group.scatter(&[1_u8; 3], &mut one, group.rank()), "3 elements");
        expect(group.in_blocks(&[1]).all_gather(&[1_u8], &mut two), "1 entries");
        expect(group.in_blocks(&[2, 2]).all_gather(&[1_u8], &mut two), "this rank's block");
        expect(group.in_blocks(&[1, 1]).all_gather(&[1_u8], &mut one), "buffer of all blocks");
        expect(group.in_blocks(&[usize::MAX, 1]).all_gather(&[1_u8], &mut one), "no memory");
        expect(group.in_blocks((&[1, 1], &[1, 1])).all_gather(&[1_u8], &mut two), "one list");
        expect(group.all_to_all(&[1_u8; 3], &mut [0; 3]), "3 elements");
        expect(group.all_to_all(&[1_u8; 2], &mut one), "should be 2");
        let mut counts = [0, 0];
        counts[group.rank()] = 1;
        expect(
            group.in_blocks((&counts, &[0, 0])).all_to_all(&[1_u8], &mut []),
            "to itself but expects 0",
        );
        let bytes = |ask: Ask<'_>, len| {
            let mut words = [0_u64; 2];
            ask.run(&group, &mut bytemuck::bytes_of_mut(&mut words)[..len], &[])
        };
        let floats = || Ask::new(Collective::AllReduce, DType::F32);
        expect(bytes(floats().by(op), 6), "no whole number of f32");
        expect(bytes(floats(), 8), "has no operator");
        expect(bytes(floats().by(ReduceOp::Band), 8), "f32 has no operator band");
        expect(bytes(floats().by(Operator::premul_sum(2_i32)), 8), "is one of i32");
        expect(
            bytes(Ask::new(Collective::Broadcast, DType::U8).at(0).by(op), 8),
            "reduces nothing",
        );
        expect(bytes(Ask::new(Collective::AllGather, DType::U8), 3), "3 elements");
        let mut words = [0_u64; 2];
        let misaligned = &mut bytemuck::bytes_of_mut(&mut words)[1..9];
        expect(floats().by(op).run(&group, misaligned, &[]), "begin at multiples of 4");
        expect(group.monitored_barrier(Duration::ZERO), "longer time limit");
        group.barrier().unwrap();
    });
}

// ---- Ranks that disagree ----

/// Over every kind of connection, the last rank makes the odd call. By the end of the barrier after it
/// every rank has an error that names both calls.
fn ranks_disagree(
    calls: [&str; 2],
    call: impl Fn(&ProcessGroup, bool) -> Result<(), Error> + Sync,
) {
    everywhere(|config| {
        for world_size in [2, 3] {
            let config = config.clone().timeout(Duration::from_secs(20));
            let told = world_with(world_size, &config, |group| {
                let odd = group.rank() == world_size - 1;
                failure(call(&group, odd).and_then(|()| group.barrier()).unwrap_err())
            });
            for failure in told {
                let text = failure.to_string();
                let named = calls.iter().all(|call| text.contains(call));
                assert!(named, "rank {}: {text}", failure.rank);
            }
        }
    });
}

#[test]
fn reduces_that_differ_are_found_out() {
    ranks_disagree(
        ["reduce(sum)(root 0) of 4 f32", "reduce(sum)(root 1) of 4 f32"],
        |group, odd| group.reduce(&mut [1_f32; 4], ReduceOp::Sum, usize::from(odd)),
    );
    ranks_disagree(
        ["reduce(sum)(root 0) of 4 f32", "reduce(min)(root 0) of 4 f32"],
        |group, odd| {
            let op = if odd { ReduceOp::Min } else { ReduceOp::Sum };
            group.reduce(&mut [1_f32; 4], op, 0)
        },
    );
}

#[test]
fn gathers_that_differ_are_found_out() {
    let long = |group: &ProcessGroup, block: usize| match group.rank() {
        0 => vec![0_u8; block * group.world_size()],
        _ => vec![],
    };
    ranks_disagree(["gather(root 0) of 3 u8", "gather(root 0) of 4 u8"], |group, odd| {
        group.gather(&vec![0_u8; if odd { 4 } else { 3 }], &mut long(group, 3), 0)
    });
    ranks_disagree(["gather(root 0) of 3 u8", "gather(root 0) of 3 i8"], |group, odd| match odd {
        true => group.gather(&[0_i8; 3], &mut [], 0),
        false => group.gather(&[0_u8; 3], &mut long(group, 3), 0),
    });
    ranks_disagree(["scatter(root 0) of 3 u8", "gather(root 0) of 3 u8"], |group, odd| match odd {
        true => group.gather(&[0_u8; 3], &mut [], 0),
        false => group.scatter(&long(group, 3), &mut [0_u8; 3], 0),
    });
    ranks_disagree(["scatter(root 0) of 3 u8", "scatter(root 0) of 2 u8"], |group, odd| {
        group.scatter(&long(group, 3), &mut vec![0_u8; if odd { 2 } else { 3 }], 0)
    });
}

#[test]
fn counts_that_differ_are_found_out() {
    // The same number of elements in all.
    ranks_disagree(["rank", "all_gather of 10 u16 in blocks #"], |group, odd| {
        let mut counts = vec![0; group.world_size()];
        (counts[0], counts[group.world_size() - 1]) = if odd { (4, 6) } else { (3, 7) };
        let own = vec![0_u16; counts[group.rank()]];
        group.in_blocks(&counts).all_gather(&own, &mut [0; 10])
    });
    ranks_disagree(["with 2 elements", "with 3 elements"], |group, odd| {
        // The last rank expects more from rank 0 than that one has for it.
        let last = group.world_size() - 1;
        let (mut send, mut recv) = (vec![0; last + 1], vec![0; last + 1]);
        match group.rank() {
            0 => send[last] = 2,
            _ if odd => recv[0] = 3,
            _ => {}
        }
        let input = vec![0_u8; send.iter().sum()];
        let mut output = vec![0; recv.iter().sum()];
        group.in_blocks((&send, &recv)).all_to_all(&input, &mut output)
    });
    ranks_disagree(["all_to_all of 2 u8", "all_to_all of u8 in uneven blocks"], |group, odd| {
        let ranks = group.world_size();
        let (input, mut output) = (vec![0_u8; 2 * ranks], vec![0; 2 * ranks]);
        match odd {
            true => {
                group.in_blocks((&vec![2; ranks], &vec![2; ranks])).all_to_all(&input, &mut output)
            }
            false => group.all_to_all(&input, &mut output),
        }
    });
    ranks_disagree(["all_reduce(sum) of 5 f32 in blocks #", "rank"], |group, odd| {
        let parts = if odd { vec![2, 3] } else { vec![3, 2] };
        let ask = Ask::new(Collective::AllReduce, DType::F32).by(ReduceOp::Sum).in_parts(parts);
        ask.run(group, bytemuck::bytes_of_mut(&mut [1_f32; 5]), &[])
    });
}

#[test]
fn a_rank_that_is_missing_is_named() {
    type Attempt = fn(&ProcessGroup) -> Result<(), Error>;
    let calls: [Attempt; 4] = [
        |group| group.all_to_all(&[0_u8; 3], &mut [0; 3]),
        |group| group.in_blocks((&[0, 0, 1], &[0, 0, 1])).all_to_all(&[0_u8], &mut [0]),
        |group| group.in_blocks(&[1, 1, 2]).all_gather(&[0_u8], &mut [0; 4]),
        |group| match group.rank() {
            0 => group.gather(&[0_u8], &mut [0; 3], 0),
            _ => group.gather(&[0_u8], &mut [], 0).and_then(|()| group.barrier()),
        },
    ];
    everywhere(|config| {
        for call in calls {
            let told = world_with(3, config, |group| match group.rank() {
                2 => None,
                _ => Some(call(&group).and_then(|()| group.barrier()).unwrap_err()),
            });
            for error in told.into_iter().flatten() {
                assert_eq!(failure(error).culprit(), Some(2));
            }
        }
    });
}

/// Its own call needs nobody's answer, another rank waits in another call, and no message of a call is
/// under way between the two.
#[test]
fn a_rank_that_waits_for_a_message_only_learns_that_ranks_disagree() {
    let soon = Config::default().warn_after(Duration::from_secs(1));
    everywhere_with(&soon, |config| {
        let told = world_with(3, config, |group| {
            let result = match group.rank() {
                0 => group
                    .gather(&[1_f32; 4], &mut [], 2)
                    .and_then(|()| group.recv(&mut [0_u8], 1, 0)),
                1 => group.broadcast(&mut [1_f32; 4], 2),
                _ => group.recv(&mut [0_u8], 0, 0),
            };
            failure(result.unwrap_err())
        });
        for failure in told {
            let text = failure.to_string();
            for call in ["gather(root 2) of 4 f32", "broadcast(root 2) of 4 f32"] {
                assert!(text.contains(call), "rank {}: {text}", failure.rank);
            }
        }
    });
}

// ---- Monitored barrier ----

#[test]
fn a_monitored_barrier_lets_all_pass_who_come() {
    everywhere(|config| {
        for world_size in [1, 2, 5] {
            world_with(world_size, config, |group| {
                for _ in 0..5 {
                    group.monitored_barrier(Duration::from_secs(20)).unwrap();
                }
            });
        }
    });
}

#[test]
fn a_monitored_barrier_names_all_missing_ranks_on_every_rank() {
    let patient = Config::default().warn_after(Duration::from_secs(120));
    everywhere_with(&patient, |config| {
        let gave_up = Barrier::new(5);
        let told = world_with(5, config, |group| {
            let missing = [1, 3].contains(&group.rank());
            let result = match missing {
                // Alive, but in no call until the others have given up.
                true => Ok(()),
                false => group.monitored_barrier(Duration::from_secs(1)),
            };
            gave_up.wait();
            let error = match missing {
                true => group.monitored_barrier(Duration::from_secs(20)).unwrap_err(),
                false => result.unwrap_err(),
            };
            failure(error)
        });
        let names_both = |cause: &Cause| matches!(cause, Cause::Timeout { waiting_for } if waiting_for == &[1, 3]);
        assert!(told.iter().any(|failure| names_both(&failure.cause)), "{told:?}");
        for failure in told {
            assert!(failure.to_string().contains("ranks 1, 3"), "rank {}: {failure}", failure.rank);
            // It has a time limit of its own.
            assert!(failure.elapsed < Duration::from_secs(30), "{failure}");
        }
    });
}
