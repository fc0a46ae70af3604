//! Every collective other than all-reduce, over every kind of connection, against what it should
//! give by definition.

use crate::common::{everywhere, world_with};
use drumline_group::{DType, Operator, ProcessGroup, ReduceOp, backend::Collective};
use half::bf16;

/// What `rank` has at `index`: different everywhere, and exact in `f16`.
fn value(rank: usize, index: usize) -> i64 {
    (rank * 100 + index % 83) as i64
}

fn values(rank: usize, len: usize) -> Vec<i64> {
    (0..len).map(|index| value(rank, index)).collect()
}

/// Every kind of connection, several worlds, and lengths that are short, long, or nothing. The
/// longest does not fit a staging slot.
fn every_world(test: impl Fn(&ProcessGroup, usize) + Sync) {
    everywhere(|config| {
        for world_size in [1, 2, 3, 5, 8] {
            world_with(world_size, config, |group| {
                for len in [0, 1, 7, 1000] {
                    test(&group, len);
                }
                if world_size == 3 {
                    test(&group, 300_001);
                }
                group.destroy().unwrap();
            });
        }
    });
}

/// Lengths by rank, some of nothing.
fn counts(group: &ProcessGroup, len: usize) -> Vec<usize> {
    (0..group.world_size()).map(|rank| len * (rank % 3) / 2).collect()
}

fn roots(group: &ProcessGroup) -> [usize; 2] {
    [0, group.world_size() - 1]
}

/// The blocks of all ranks, behind each other.
fn blocks(counts: &[usize], of: impl Fn(usize, usize) -> i64) -> Vec<i64> {
    let block = |(rank, &count): (usize, &usize)| {
        (0..count).map(|index| of(rank, index)).collect::<Vec<_>>()
    };
    counts.iter().enumerate().flat_map(block).collect()
}

#[test]
fn reduce_gives_the_root_the_sum_and_leaves_others_alone() {
    every_world(|group, len| {
        for root in roots(group) {
            let own = values(group.rank(), len);
            let ranks = 0..group.world_size();
            let sum = |index| ranks.clone().map(|rank| value(rank, index)).sum();
            let sum: Vec<i64> = (0..len).map(sum).collect();
            let expected = if group.rank() == root { &sum } else { &own };

            let mut data = own.clone();
            group.reduce(&mut data, ReduceOp::Sum, root).unwrap();
            assert!(data == *expected);
            let data =
                group.reduce_async(own.clone(), ReduceOp::Sum, root).unwrap().wait().unwrap();
            assert!(data == *expected);

            let mut output = vec![0; if group.rank() == root { len } else { 0 }];
            group.reduce_into(&own, &mut output, ReduceOp::Sum, root).unwrap();
            assert!(group.rank() != root || output == sum);
            let mut all = vec![0; len];
            group.all_reduce_into(&own, &mut all, ReduceOp::Sum).unwrap();
            assert!(all == sum);
        }
    });
}

#[test]
fn blocks_of_any_length_are_gathered() {
    every_world(|group, len| {
        let even = vec![len; group.world_size()];
        for counts in [even, counts(group, len)] {
            let own = values(group.rank(), counts[group.rank()]);
            let expected = blocks(&counts, value);
            let mut all = vec![-1; expected.len()];
            group.all_gather_v(&own, &mut all, &counts).unwrap();
            assert!(all == expected);
            let all = vec![-1; expected.len()];
            let work = group.all_gather_v_async(own.clone(), all, &counts).unwrap();
            assert!(work.wait().unwrap() == expected);

            for root in roots(group) {
                let at_root = group.rank() == root;
                let mut all = vec![-1; if at_root { expected.len() } else { 0 }];
                group.gather_v(&own, &mut all, &counts, root).unwrap();
                assert!(!at_root || all == expected);
                let all = group.gather_v_async(own.clone(), all, &counts, root).unwrap();
                assert!(!at_root || all.wait().unwrap() == expected);
            }
        }
    });
}

#[test]
fn even_blocks_are_gathered_and_scattered() {
    every_world(|group, len| {
        let ranks = group.world_size();
        let expected = blocks(&vec![len; ranks], value);
        for root in roots(group) {
            let at_root = group.rank() == root;
            let own = values(group.rank(), len);
            let mut all = vec![-1; if at_root { ranks * len } else { 0 }];
            group.gather(&own, &mut all, root).unwrap();
            assert!(!at_root || all == expected);
            let all = group.gather_async(own.clone(), all, root).unwrap().wait().unwrap();

            let mut back = vec![-1; len];
            group.scatter(&all, &mut back, root).unwrap();
            assert!(back == own);
            let back = group.scatter_async(all, vec![-1; len], root).unwrap().wait().unwrap();
            assert!(back == own);
        }
    });
}

#[test]
fn blocks_of_any_length_are_scattered() {
    every_world(|group, len| {
        let counts = counts(group, len);
        let all = blocks(&counts, value);
        for root in roots(group) {
            let input = if group.rank() == root { &all[..] } else { &[] };
            let mut own = vec![-1; counts[group.rank()]];
            group.scatter_v(input, &counts, &mut own, root).unwrap();
            assert!(own == values(group.rank(), own.len()));
            let output = vec![-1; own.len()];
            let work = group.scatter_v_async(input.to_vec(), &counts, output, root).unwrap();
            assert!(work.wait().unwrap() == own);
        }
    });
}

#[test]
fn sums_of_blocks_of_any_length_are_scattered() {
    every_world(|group, len| {
        let even = vec![len; group.world_size()];
        for counts in [even, counts(group, len)] {
            let own = counts[group.rank()];
            let input = values(group.rank(), counts.iter().sum());
            let first: usize = counts[..group.rank()].iter().sum();
            let sum = |index| (0..group.world_size()).map(|rank| value(rank, first + index)).sum();
            let expected: Vec<i64> = (0..own).map(sum).collect();
            let mut sums = vec![-1; own];
            group.reduce_scatter_v(&input, &counts, &mut sums, ReduceOp::Sum).unwrap();
            assert!(sums == expected);
            let (op, output) = (ReduceOp::Sum, vec![-1; own]);
            let work = group.reduce_scatter_v_async(input, &counts, output, op).unwrap();
            assert!(work.wait().unwrap() == expected);
        }
    });
}

/// What goes from one rank to another at `index`.
fn pair(from: usize, to: usize, index: usize) -> i64 {
    value(from * 10 + to, index)
}

#[test]
fn everyone_gets_a_block_from_everyone() {
    every_world(|group, len| {
        let (ranks, own) = (group.world_size(), group.rank());
        let even = vec![len; ranks];
        let input = blocks(&even, |to, index| pair(own, to, index));
        let expected = blocks(&even, |from, index| pair(from, own, index));
        let mut output = vec![-1; ranks * len];
        group.all_to_all(&input, &mut output).unwrap();
        assert!(output == expected);
        let output = vec![-1; ranks * len];
        assert!(group.all_to_all_async(input, output).unwrap().wait().unwrap() == expected);

        let count = |from: usize, to: usize| len * ((from + 2 * to) % 4) / 3;
        let send: Vec<usize> = (0..ranks).map(|to| count(own, to)).collect();
        let recv: Vec<usize> = (0..ranks).map(|from| count(from, own)).collect();
        let input = blocks(&send, |to, index| pair(own, to, index));
        let expected = blocks(&recv, |from, index| pair(from, own, index));
        let mut output = vec![-1; expected.len()];
        group.all_to_all_v(&input, &send, &mut output, &recv).unwrap();
        assert!(output == expected);
        let output = vec![-1; expected.len()];
        let work = group.all_to_all_v_async(input, &send, output, &recv).unwrap();
        assert!(work.wait().unwrap() == expected);
    });
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

/// Ordinary buffers go through slots, which the tests above look at by definition.
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
                for len in [0, 5, 3_000, 300_001] {
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
                        expect_same(&group, &own, |group, data| {
                            let is_root = group.rank() == root;
                            let output = if is_root { data } else { &mut [] };
                            group.reduce_into(&own, output, ReduceOp::Sum, root)
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
                        group.all_gather_v(block, data, &counts)
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
                            |group, input, data| group.reduce_scatter_v(input, &counts, data, op),
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
                            group.gather_v(input, data, &counts, root)
                        });
                    }
                }
                let explained = |collective| {
                    group.explain(collective, 300_001, DType::F64, true).unwrap().algorithm
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
                    assert_eq!(in_place, group.shares_memory(), "{collective}");
                }
                group.destroy().unwrap();
            });
        }
    });
}
