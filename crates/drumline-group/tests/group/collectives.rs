//! What the conformance suite, which compares every collective with a sequential oracle, does not see.

use crate::common::{everywhere, world_with};
use drumline_group::{
    DType, Operator, ProcessGroup, ReduceOp,
    algorithms::{explain, shares_memory},
    backend::Collective,
};
use half::bf16;

/// What `rank` has at `index`: different everywhere, and exact in `f16`.
fn value(rank: usize, index: usize) -> i64 {
    (rank * 100 + index % 83) as i64
}

fn values(rank: usize, len: usize) -> Vec<i64> {
    (0..len).map(|index| value(rank, index)).collect()
}

/// Lengths by rank, some of nothing.
fn counts(group: &ProcessGroup, len: usize) -> Vec<usize> {
    (0..group.world_size()).map(|rank| len * (rank % 3) / 2).collect()
}

fn roots(group: &ProcessGroup) -> [usize; 2] {
    [0, group.world_size() - 1]
}

/// A payload of NaN that arithmetic would change.
#[test]
fn narrow_floats_that_get_no_result_keep_their_bits() {
    everywhere(|config| {
        world_with(5, config, |group| {
            let signalling = bf16::from_bits(0x7f81);
            let mut data = vec![signalling; 9];
            group.reduce(&mut data, ReduceOp::Sum, 2).unwrap();
            if group.rank() != 2 {
                assert!(data.iter().all(|value| value.to_bits() == 0x7f81));
            }
        });
    });
}

/// Ordinary buffers go through slots. Between two calls nobody reads or writes a registered buffer.
#[test]
fn registered_buffers_get_what_ordinary_ones_get() {
    fn expect_same(
        group: &ProcessGroup,
        data: &[f64],
        call: impl Fn(&ProcessGroup, &mut [f64]) -> drumline_group::Result<()>,
    ) {
        let mut ordinary = data.to_vec();
        call(group, &mut ordinary).unwrap();
        let mut registered = group.alloc_registered(data.len()).unwrap();
        registered.copy_from_slice(data);
        // Twice: what one call leaves behind must not be seen by the next.
        for _ in 0..2 {
            registered.copy_from_slice(data);
            call(group, &mut registered).unwrap();
            assert!(*registered == ordinary);
        }
    }
    fn expect_same_of_input(
        group: &ProcessGroup,
        input: &[f64],
        len: usize,
        call: impl Fn(&ProcessGroup, &[f64], &mut [f64]) -> drumline_group::Result<()>,
    ) {
        let (mut expected, mut result) = (vec![0.0; len], vec![0.0; len]);
        let mut registered = group.alloc_registered(input.len()).unwrap();
        for round in 0..2 {
            let input: Vec<f64> = input.iter().map(|value| value + f64::from(round)).collect();
            registered.copy_from_slice(&input);
            call(group, &registered, &mut result).unwrap();
            // Nobody reads it any more, and nobody has written to it.
            assert!(*registered == input);
            registered.fill(f64::NAN);
            call(group, &input, &mut expected).unwrap();
            assert!(result == expected);
        }
    }
    everywhere(|config| {
        for world_size in [1, 2, 3, 4] {
            world_with(world_size, config, |group| {
                for len in [0, 5, 3_000, 100_001] {
                    let floats = |len| -> Vec<f64> {
                        values(group.rank(), len).into_iter().map(|it| it as f64 / 7.0).collect()
                    };
                    // No block of a rank is like another.
                    let (own, all) = (floats(len), floats(len * world_size));
                    for root in roots(&group) {
                        expect_same(&group, &own, |group, data| group.broadcast(data, root));
                        expect_same(&group, &own, |group, data| {
                            group.reduce(data, ReduceOp::Avg, root)
                        });
                        let brought = if group.rank() == root { &all[..] } else { &[] };
                        expect_same(&group, &own, |group, data| group.scatter(brought, data, root));
                    }
                    for op in [ReduceOp::Avg, ReduceOp::Sum, ReduceOp::Max] {
                        expect_same(&group, &own, |group, data| group.all_reduce(data, op));
                        expect_same(&group, &own, |group, data| {
                            group.reduce_scatter(&all, data, op)
                        });
                    }
                    expect_same(&group, &all, |group, data| group.all_gather(&own, data));
                    expect_same(&group, &all, |group, data| group.all_to_all(&all, data));
                    let counts = counts(&group, len);
                    let block = &own[..counts[group.rank()]];
                    let sum = counts.iter().sum();
                    expect_same(&group, &all[..sum], |group, data| {
                        group.in_blocks(&counts).all_gather(block, data)
                    });
                    // These reach what is brought, not what is got.
                    for op in [ReduceOp::Avg, ReduceOp::Max] {
                        expect_same_of_input(&group, &all, len, |group, input, data| {
                            group.reduce_scatter(input, data, op)
                        });
                        expect_same_of_input(
                            &group,
                            &all[..sum],
                            block.len(),
                            |group, input, data| {
                                group.in_blocks(&counts).reduce_scatter(input, data, op)
                            },
                        );
                    }
                    let factor = Operator::premul_sum(0.5 + group.rank() as f64);
                    expect_same_of_input(&group, &all, len, |group, input, data| {
                        group.reduce_scatter(input, data, &factor)
                    });
                    for root in roots(&group) {
                        let at_root = |len| if group.rank() == root { len } else { 0 };
                        expect_same_of_input(
                            &group,
                            &own,
                            at_root(all.len()),
                            |group, input, data| group.gather(input, data, root),
                        );
                        expect_same_of_input(&group, block, at_root(sum), |group, input, data| {
                            group.in_blocks(&counts).gather(input, data, root)
                        });
                    }
                }
                let explained = |collective| {
                    explain(&group, collective, 300_001, DType::F64, true).unwrap().algorithm
                };
                for collective in [
                    Collective::Broadcast,
                    Collective::Reduce,
                    Collective::AllGather,
                    Collective::AllToAll,
                    Collective::ReduceScatter,
                    Collective::Gather,
                ] {
                    let in_place = ["shm-push", "shm-pull"].contains(&&*explained(collective));
                    assert_eq!(in_place, shares_memory(&group), "{collective}");
                }
                group.destroy().unwrap();
            });
        }
    });
}
