//! Every collective other than all-reduce, over every kind of connection, against what it should
//! give by definition; and what ranks are told that disagree.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::{fmt::Debug, time::Duration};

use common::{everywhere, failure, world_with};
use drumline::{Cause, Config, Element, Error, ProcessGroup, ReduceOp};
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
        assert_eq!(group.scan_async(own.clone(), op).wait().unwrap(), data);

        let below = if group.rank() == 0 { own.clone() } else { prefix(group.rank()) };
        let mut data = own.clone();
        group.exclusive_scan(&mut data, op).unwrap();
        assert_eq!(data, below, "{op}, exclusive, rank {}", group.rank());
        assert_eq!(group.exclusive_scan_async(own.clone(), op).wait().unwrap(), data);
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
        group.all_gather_list(&values(own, counts[own]), &mut list).unwrap();
        assert!(outputs.concat() == blocks(&counts, value));

        let mut sums = vec![-1; counts[own]];
        let inputs: Vec<&[i64]> = outputs.iter().map(|output| &output[..]).collect();
        group.reduce_scatter_list(&inputs, &mut sums, ReduceOp::Max).unwrap();
        assert!(sums == values(own, counts[own]));

        let root = ranks - 1;
        let entries = if own == root { ranks } else { 0 };
        let mut outputs = vec![vec![-1; len]; entries];
        let mut list: Vec<&mut [i64]> = outputs.iter_mut().map(|output| &mut output[..]).collect();
        group.gather_list(&values(own, len), &mut list, root).unwrap();
        assert!(own != root || outputs.concat() == blocks(&vec![len; ranks], value));
        let inputs: Vec<&[i64]> = outputs.iter().map(|output| &output[..]).collect();
        let mut back = vec![-1; len];
        group.scatter_list(&inputs, &mut back, root).unwrap();
        assert!(back == values(own, len));

        let count = |from: usize, to: usize| len * ((from + 2 * to) % 4) / 3;
        let block = |to| (0..count(own, to)).map(|index| pair(own, to, index)).collect::<Vec<_>>();
        let inputs: Vec<Vec<i64>> = (0..ranks).map(block).collect();
        let inputs: Vec<&[i64]> = inputs.iter().map(|input| &input[..]).collect();
        let mut outputs: Vec<Vec<i64>> =
            (0..ranks).map(|from| vec![-1; count(from, own)]).collect();
        let mut list: Vec<&mut [i64]> = outputs.iter_mut().map(|output| &mut output[..]).collect();
        group.all_to_all_list(&inputs, &mut list).unwrap();
        let recv: Vec<usize> = (0..ranks).map(|from| count(from, own)).collect();
        assert!(outputs.concat() == blocks(&recv, |from, index| pair(from, own, index)));
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
                    group.all_reduce_multi(&mut [&mut a, &mut b], op).unwrap();
                    assert_eq!((&a, &b), (&expected, &expected), "{op}");

                    let (mut a, mut b) = (own(0), own(1));
                    let root = world_size - 1;
                    group.reduce_multi(&mut [&mut a, &mut b], op, root, 1).unwrap();
                    assert_eq!(a, own(0));
                    assert_eq!(b, if group.rank() == root { expected } else { own(1) });
                }
            });
        }
    });
}

// ---- Arguments ----

#[test]
fn arguments_that_cannot_work_are_refused_and_harm_nothing() {
    let expect = |result: Result<(), Error>, part: &str| {
        let Err(Error::InvalidArgument { problem, .. }) = result else { panic!("{result:?}") };
        assert!(problem.contains(part), "{problem}");
    };
    world_with(2, &Config::default(), |group| {
        let (mut one, mut two) = ([0_u8], [0_u8; 2]);
        let op = ReduceOp::Sum;
        let other = 1 - group.rank();
        expect(group.reduce(&mut one, op, 2), "no rank 2");
        expect(group.reduce_into(&[1_u8], &mut two, op, group.rank()), "2 elements");
        expect(group.reduce_into(&[1_u8], &mut one, op, other), "not the root");
        expect(group.all_reduce_into(&[1_u8], &mut two, op), "should be 1");
        expect(group.gather(&[1_u8], &mut two, other), "not the root");
        expect(group.scatter(&[1_u8; 3], &mut one, group.rank()), "3 elements");
        expect(group.all_gather_v(&[1_u8], &mut two, &[1]), "1 entries");
        expect(group.all_gather_v(&[1_u8], &mut two, &[2, 2]), "this rank's block");
        expect(group.all_gather_v(&[1_u8], &mut one, &[1, 1]), "buffer of all blocks");
        expect(group.all_gather_v(&[1_u8], &mut one, &[usize::MAX, 1]), "no memory");
        expect(group.all_to_all(&[1_u8; 3], &mut [0; 3]), "3 elements");
        expect(group.all_to_all(&[1_u8; 2], &mut one), "should be 2");
        let mut counts = [0, 0];
        counts[group.rank()] = 1;
        expect(group.all_to_all_v(&[1_u8], &counts, &mut [], &[0, 0]), "to itself but expects 0");
        expect(group.all_gather_list(&[1_u8], &mut [&mut one]), "1 entries");
        expect(group.gather_list(&[1_u8], &mut [&mut one], other), "1 buffers");
        let (inputs, mut outputs) = ([&[1_u8][..]], [&mut one[..]]);
        expect(group.all_gather_coalesced(&inputs, &mut outputs), "an output of 1 elements");
        expect(group.all_reduce_multi::<u8>(&mut [], op), "empty");
        expect(group.all_reduce_multi(&mut [&mut one, &mut two], op), "as long");
        expect(group.broadcast_multi(&mut [&mut two], 0, 1), "no buffer 1");
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
            let config = Config { timeout: Duration::from_secs(20), ..config.clone() };
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
        group.all_gather_v(&own, &mut [0; 10], &counts)
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
        group.all_to_all_v(&input, &send, &mut output, &recv)
    });
    ranks_disagree(["all_to_all of 2 u8", "all_to_all of u8 in uneven blocks"], |group, odd| {
        let ranks = group.world_size();
        let (input, mut output) = (vec![0_u8; 2 * ranks], vec![0; 2 * ranks]);
        match odd {
            true => group.all_to_all_v(&input, &vec![2; ranks], &mut output, &vec![2; ranks]),
            false => group.all_to_all(&input, &mut output),
        }
    });
    ranks_disagree(["all_reduce(sum) of 5 f32 in blocks #", "rank"], |group, odd| {
        let (mut a, mut b) =
            (vec![1_f32; if odd { 2 } else { 3 }], vec![1_f32; if odd { 3 } else { 2 }]);
        group.all_reduce_coalesced(&mut [&mut a, &mut b], ReduceOp::Sum)
    });
}

#[test]
fn scans_that_differ_are_found_out() {
    ranks_disagree(
        ["scan(sum) of 3 i32", "exclusive_scan(sum) of 3 i32"],
        |group, odd| match odd {
            true => group.exclusive_scan(&mut [1_i32; 3], ReduceOp::Sum),
            false => group.scan(&mut [1_i32; 3], ReduceOp::Sum),
        },
    );
    ranks_disagree(["scan(sum) of 3 i32", "scan(max) of 3 i32"], |group, odd| {
        group.scan(&mut [1_i32; 3], if odd { ReduceOp::Max } else { ReduceOp::Sum })
    });
}

#[test]
fn members_that_differ_are_found_out() {
    ranks_disagree(["all_reduce(sum) of 3 f32 in blocks #", "rank"], |group, odd| {
        let (mut a, mut b) = ([1_f32; 3], [1_f32; 3]);
        match odd {
            true => group.all_reduce_multi(&mut [&mut a], ReduceOp::Sum),
            false => group.all_reduce_multi(&mut [&mut a, &mut b], ReduceOp::Sum),
        }
    });
}

#[test]
fn a_rank_that_is_missing_is_named() {
    type Attempt = fn(&ProcessGroup) -> Result<(), Error>;
    let calls: [Attempt; 4] = [
        |group| group.all_to_all(&[0_u8; 3], &mut [0; 3]),
        |group| group.all_to_all_v(&[0_u8], &[0, 0, 1], &mut [0], &[0, 0, 1]),
        |group| group.all_gather_v(&[0_u8], &mut [0; 4], &[1, 1, 2]),
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
    everywhere(|config| {
        let gave_up = std::sync::Barrier::new(5);
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
        }
    });
}
