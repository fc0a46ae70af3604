//! Every collective other than all-reduce, over every kind of connection, against what it should
//! give by definition.

use std::fmt::Debug;

use crate::common::{everywhere, world_with};
use drumline_group::{Collective, DType, Element, Operator, ProcessGroup, ReduceOp};
use half::{bf16, f16};

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

/// The canonical tree, as it is defined.
fn tree(values: &[f32]) -> f32 {
    match values {
        [value] => *value,
        _ => {
            let half = 1 << (values.len() - 1).ilog2();
            tree(&values[..half]) + tree(&values[half..])
        }
    }
}

/// Values of very different size, so that another order of sums gives other bits.
fn noise(rank: usize, index: usize) -> f32 {
    let mut x = (rank as u64 * 0x9e37_79b9 + index as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f32 / 1024.0 - 8192.0) * 2.0_f32.powi((x & 15) as i32 - 12)
}

trait Float: Element + Debug {
    fn of(value: f32) -> Self;
    fn wide(self) -> f32;
}

macro_rules! floats {
    ($($type:ty: $of:expr, $wide:expr;)*) => {$(impl Float for $type {
        fn of(value: f32) -> Self { $of(value) }
        fn wide(self) -> f32 { $wide(self) }
    })*};
}

floats!(
    f32: |x| x, |x| x;
    f16: f16::from_f32, f16::to_f32;
    bf16: bf16::from_f32, bf16::to_f32;
);

fn scans_are_exact<T: Float>(group: &ProcessGroup, len: usize) {
    let own: Vec<T> = (0..len).map(|index| T::of(noise(group.rank(), index))).collect();
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        let prefix = |ranks: usize| -> Vec<T> {
            let sum = |index| {
                let column = (0..ranks).map(|rank| T::of(noise(rank, index)).wide());
                let sum = tree(&column.collect::<Vec<_>>());
                T::of(if op == ReduceOp::Avg { sum / ranks as f32 } else { sum })
            };
            (0..len).map(sum).collect()
        };
        let mut data = own.clone();
        group.scan(&mut data, op).unwrap();
        assert_eq!(data, prefix(group.rank() + 1), "{op}, rank {}", group.rank());
        assert_eq!(group.scan_async(own.clone(), op).unwrap().wait().unwrap(), data);

        let below = if group.rank() == 0 { own.clone() } else { prefix(group.rank()) };
        let mut data = own.clone();
        group.exclusive_scan(&mut data, op).unwrap();
        assert_eq!(data, below, "{op}, exclusive, rank {}", group.rank());
        assert_eq!(group.exclusive_scan_async(own.clone(), op).unwrap().wait().unwrap(), data);
    }
}

#[test]
fn scans_have_the_bits_of_the_tree() {
    everywhere(|config| {
        for world_size in [1, 2, 3, 4, 7] {
            world_with(world_size, config, |group| {
                for len in [0, 1, 100, 30_000] {
                    scans_are_exact::<f32>(&group, len);
                    scans_are_exact::<f16>(&group, len);
                    scans_are_exact::<bf16>(&group, len);
                }
            });
        }
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

#[test]
fn lists_are_the_same_as_one_buffer_behind_the_other() {
    every_world(|group, len| {
        let (ranks, own) = (group.world_size(), group.rank());
        let counts = counts(group, len);
        let mut outputs: Vec<Vec<i64>> = counts.iter().map(|count| vec![-1; *count]).collect();
        let mut list: Vec<&mut [i64]> = outputs.iter_mut().map(|output| &mut output[..]).collect();
        group.torch_spelling().all_gather_list(&values(own, counts[own]), &mut list).unwrap();
        assert!(outputs.concat() == blocks(&counts, value));

        let mut sums = vec![-1; counts[own]];
        let inputs: Vec<&[i64]> = outputs.iter().map(|output| &output[..]).collect();
        group.torch_spelling().reduce_scatter_list(&inputs, &mut sums, ReduceOp::Max).unwrap();
        assert!(sums == values(own, counts[own]));

        let root = ranks - 1;
        let entries = if own == root { ranks } else { 0 };
        let mut outputs = vec![vec![-1; len]; entries];
        let mut list: Vec<&mut [i64]> = outputs.iter_mut().map(|output| &mut output[..]).collect();
        group.torch_spelling().gather_list(&values(own, len), &mut list, root).unwrap();
        assert!(own != root || outputs.concat() == blocks(&vec![len; ranks], value));
        let inputs: Vec<&[i64]> = outputs.iter().map(|output| &output[..]).collect();
        let mut back = vec![-1; len];
        group.torch_spelling().scatter_list(&inputs, &mut back, root).unwrap();
        assert!(back == values(own, len));

        let count = |from: usize, to: usize| len * ((from + 2 * to) % 4) / 3;
        let block = |to| (0..count(own, to)).map(|index| pair(own, to, index)).collect::<Vec<_>>();
        let inputs: Vec<Vec<i64>> = (0..ranks).map(block).collect();
        let inputs: Vec<&[i64]> = inputs.iter().map(|input| &input[..]).collect();
        let mut outputs: Vec<Vec<i64>> =
            (0..ranks).map(|from| vec![-1; count(from, own)]).collect();
        let mut list: Vec<&mut [i64]> = outputs.iter_mut().map(|output| &mut output[..]).collect();
        group.torch_spelling().all_to_all_list(&inputs, &mut list).unwrap();
        let recv: Vec<usize> = (0..ranks).map(|from| count(from, own)).collect();
        assert!(outputs.concat() == blocks(&recv, |from, index| pair(from, own, index)));
    });
}

/// What comes back from the background is what the blocking forms give.
#[test]
fn lists_go_in_the_background_too() {
    every_world(|group, len| {
        let (ranks, own, op) = (group.world_size(), group.rank(), ReduceOp::Sum);
        let counts = counts(group, len);
        let empty = || counts.iter().map(|count| vec![-1; *count]).collect::<Vec<Vec<i64>>>();
        let work = group
            .torch_spelling()
            .all_gather_list_async(values(own, counts[own]), empty())
            .unwrap();
        let lists = work.wait().unwrap();
        assert!(lists.concat() == blocks(&counts, value));

        let inputs: Vec<&[i64]> = lists.iter().map(|list| &list[..]).collect();
        let sums = group
            .torch_spelling()
            .reduce_scatter_list_async(&inputs, vec![-1; counts[own]], op)
            .unwrap();
        let sum = |index| ranks as i64 * value(own, index);
        assert!(sums.wait().unwrap() == (0..counts[own]).map(sum).collect::<Vec<_>>());

        let outputs = vec![vec![-1; len]; if own == 0 { ranks } else { 0 }];
        let work = group.torch_spelling().gather_list_async(values(own, len), outputs, 0).unwrap();
        let lists = work.wait().unwrap();
        let inputs: Vec<&[i64]> = lists.iter().map(|list| &list[..]).collect();
        let work = group.torch_spelling().scatter_list_async(&inputs, vec![-1; len], 0).unwrap();
        assert!(work.wait().unwrap() == values(own, len));

        let to: Vec<Vec<i64>> = (0..ranks).map(|to| vec![pair(own, to, 0); len]).collect();
        let inputs: Vec<&[i64]> = to.iter().map(|list| &list[..]).collect();
        let work = group
            .torch_spelling()
            .all_to_all_list_async(&inputs, vec![vec![-1; len]; ranks])
            .unwrap();
        for (from, list) in work.wait().unwrap().iter().enumerate() {
            assert!(*list == vec![pair(from, own, 0); len]);
        }
    });
}

#[test]
fn several_calls_go_as_one() {
    every_world(|group, len| {
        let (ranks, own, op) = (group.world_size(), group.rank(), ReduceOp::Sum);
        let (a, b) = (values(own, len), values(own + 1, 2 * len));
        let sum = |first: usize, len: usize| -> Vec<i64> {
            let of = |index| (0..ranks).map(|rank| value(rank + first, index)).sum();
            (0..len).map(of).collect()
        };
        let expected = vec![sum(0, len), sum(1, 2 * len)];
        let mut sums = [a.clone(), b.clone()];
        let [first, second] = &mut sums;
        group.torch_spelling().all_reduce_coalesced(&mut [first, second], op).unwrap();
        assert!(sums.to_vec() == expected);
        let work = group
            .torch_spelling()
            .all_reduce_coalesced_async(vec![a.clone(), b.clone()], op)
            .unwrap();
        assert!(work.wait().unwrap() == expected);

        let empty = || vec![vec![-1; ranks * len], vec![-1; 2 * ranks * len]];
        let all = [
            blocks(&vec![len; ranks], value),
            blocks(&vec![2 * len; ranks], |rank, index| value(rank + 1, index)),
        ];
        let work = group.torch_spelling().all_gather_coalesced_async(&[&a, &b], empty()).unwrap();
        assert!(work.wait().unwrap() == all);
        let mut outputs = empty();
        let mut list: Vec<&mut [i64]> = outputs.iter_mut().map(|output| &mut output[..]).collect();
        group.torch_spelling().all_gather_coalesced(&[&a, &b], &mut list).unwrap();
        assert!(outputs == all);

        let inputs = [&all[0][..], &all[1]];
        let times = |values: &[i64]| values.iter().map(|value| ranks as i64 * value).collect();
        let expected: Vec<Vec<i64>> = vec![times(&a), times(&b)];
        let empty = || vec![vec![-1; len], vec![-1; 2 * len]];
        let work =
            group.torch_spelling().reduce_scatter_coalesced_async(&inputs, empty(), op).unwrap();
        assert!(work.wait().unwrap() == expected);
        let mut outputs = empty();
        let mut list: Vec<&mut [i64]> = outputs.iter_mut().map(|output| &mut output[..]).collect();
        group.torch_spelling().reduce_scatter_coalesced(&inputs, &mut list, op).unwrap();
        assert!(outputs == expected);
    });
}

/// The members of all ranks give what that many ranks of one member give, as long as the tree over
/// them has a node for each rank.
#[test]
fn members_count_as_ranks() {
    everywhere(|config| {
        let members = 2;
        for world_size in [1, 2, 3] {
            let len = 9;
            let column = |of: &dyn Fn(usize) -> f32| -> Vec<f32> {
                (0..world_size * members).map(of).collect()
            };
            world_with(world_size, config, |group| {
                let own = |member: usize| -> Vec<bf16> {
                    let number = members * group.rank() + member;
                    (0..len).map(|index| bf16::from_f32(noise(number, index))).collect()
                };
                for op in [ReduceOp::Sum, ReduceOp::Avg] {
                    let sum = |index| {
                        let of = |number| bf16::from_f32(noise(number, index)).to_f32();
                        let sum = tree(&column(&of));
                        let ranks = (world_size * members) as f32;
                        bf16::from_f32(if op == ReduceOp::Avg { sum / ranks } else { sum })
                    };
                    let expected: Vec<bf16> = (0..len).map(sum).collect();
                    let (mut a, mut b) = (own(0), own(1));
                    group.torch_spelling().all_reduce_multi(&mut [&mut a, &mut b], op).unwrap();
                    assert_eq!((&a, &b), (&expected, &expected), "{op}");
                    let work = group
                        .torch_spelling()
                        .all_reduce_multi_async(vec![own(0), own(1)], op)
                        .unwrap();
                    assert_eq!(work.wait().unwrap(), [expected.clone(), expected.clone()]);

                    let (mut a, mut b) = (own(0), own(1));
                    let root = world_size - 1;
                    group
                        .torch_spelling()
                        .reduce_multi(&mut [&mut a, &mut b], op, root, 1)
                        .unwrap();
                    assert_eq!(a, own(0));
                    assert_eq!(b, if group.rank() == root { expected.clone() } else { own(1) });
                    let buffers = vec![own(0), own(1)];
                    let work =
                        group.torch_spelling().reduce_multi_async(buffers, op, root, 1).unwrap();
                    assert_eq!(work.wait().unwrap(), [a, b]);

                    // Every member has its own part of the sum.
                    let (part, all) = (expected[..1].to_vec(), members * world_size);
                    let input = |member| vec![own(member)[0]; all];
                    let (first, second) = (input(0), input(1));
                    let (inputs, outputs) = ([&first[..], &second], vec![vec![bf16::ZERO]; 2]);
                    let work = group
                        .torch_spelling()
                        .reduce_scatter_multi_async(&inputs, outputs, op)
                        .unwrap();
                    assert_eq!(work.wait().unwrap(), [part.clone(), part]);
                }
            });
        }
    });
}

#[test]
fn members_are_gathered_and_told() {
    everywhere(|config| {
        for world_size in [1, 2, 3] {
            world_with(world_size, config, |group| {
                let own = |member| values(10 * group.rank() + member, 5);
                let number = |block: usize| 10 * (block / 2) + block % 2;
                let all =
                    blocks(&vec![5; 2 * world_size], |block, index| value(number(block), index));
                let [mut a, mut b] = [vec![-1; all.len()], vec![-1; all.len()]];
                let (first, second) = (own(0), own(1));
                let inputs = [&first[..], &second];
                group.torch_spelling().all_gather_multi(&inputs, &mut [&mut a, &mut b]).unwrap();
                assert_eq!((&a, &b), (&all, &all));
                let work =
                    group.torch_spelling().all_gather_multi_async(&inputs, vec![a, b]).unwrap();
                assert_eq!(work.wait().unwrap(), [all.clone(), all]);

                let root = world_size - 1;
                let told = values(10 * root + 1, 5);
                let (mut a, mut b) = (own(0), own(1));
                group.torch_spelling().broadcast_multi(&mut [&mut a, &mut b], root, 1).unwrap();
                assert_eq!((&a, &b), (&told, &told));
                let buffers = vec![own(0), own(1)];
                let work = group.torch_spelling().broadcast_multi_async(buffers, root, 1).unwrap();
                assert_eq!(work.wait().unwrap(), [told.clone(), told]);
            });
        }
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
                        expect_same(&group, &own, |group, data| group.scan(data, op));
                        expect_same(&group, &own, |group, data| group.exclusive_scan(data, op));
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
                    Collective::Scan,
                    Collective::ExclusiveScan,
                ] {
                    let in_place = ["shm-push", "shm-pull"].contains(&&*explained(collective));
                    assert_eq!(in_place, group.shares_memory(), "{collective}");
                }
                group.destroy().unwrap();
            });
        }
    });
}
