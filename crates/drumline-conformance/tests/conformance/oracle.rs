//! The suite would notice.

use std::collections::HashSet;

use drumline::{DType, ReduceOp};
use drumline_conformance::{
    Case, Extent, Kind, Part,
    suite::{self, Call},
};
use drumline_schedule::Topology;

fn case(kind: Kind, dtype: DType) -> Case {
    Case { kind, dtype, elements: 5, uneven: false, seed: 3 }
}

#[test]
fn every_wrong_bit_of_an_integer_is_noticed() {
    let case = case(Kind::AllReduce(ReduceOp::Sum), DType::I16);
    let right = case.expected(0, &Topology::flat(3));
    for bit in 0..right.len() * 8 {
        let mut wrong = right.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        assert!(!case.agree(&wrong, &right), "bit {bit}");
    }
    assert!(!case.agree(&right[2..], &right), "an element is missing");
}

#[test]
fn the_order_of_sums_shows() {
    let case = Case { elements: 200, ..case(Kind::AllReduce(ReduceOp::Sum), DType::F32) };
    let read = |rank| -> Vec<f32> {
        let bytes = case.buffers(rank, 4).data;
        bytes.chunks(4).map(bytemuck::pod_read_unaligned).collect()
    };
    let [a, b, c, d] = [read(0), read(1), read(2), read(3)];
    let from_left: Vec<f32> = (0..200).map(|at| ((a[at] + b[at]) + c[at]) + d[at]).collect();
    let tree: Vec<f32> = (0..200).map(|at| (a[at] + b[at]) + (c[at] + d[at])).collect();
    let expected = case.expected(2, &Topology::flat(4));
    assert!(case.agree(bytemuck::cast_slice(&tree), &expected));
    assert!(!case.agree(bytemuck::cast_slice(&from_left), &expected));
}

#[test]
fn payloads_of_nan_do_not_matter_and_numbers_do() {
    let case = Case { elements: 1, ..case(Kind::Barrier, DType::F32) };
    let nan = |bits: u32| f32::from_bits(bits).to_ne_bytes();
    assert!(case.agree(&nan(0x7fc0_0000), &nan(0xffc0_0001)));
    assert!(!case.agree(&nan(0x7fc0_0000), &1_f32.to_ne_bytes()));
    assert!(!case.agree(&0_f32.to_ne_bytes(), &(-0_f32).to_ne_bytes()));
}

#[test]
fn blocks_of_all_ranks_meet() {
    let case = Case { uneven: true, elements: 9, ..case(Kind::AllToAll, DType::U32) };
    let topology = Topology::flat(4);
    let mut sent: Vec<u32> = Vec::new();
    let mut received: Vec<u32> = Vec::new();
    for rank in 0..4 {
        sent.extend(bytemuck::cast_slice::<u8, u32>(&case.buffers(rank, 4).input));
        received.extend(bytemuck::cast_slice::<u8, u32>(&case.expected(rank, &topology)));
    }
    sent.sort_unstable();
    received.sort_unstable();
    assert_eq!(sent, received);
    assert!(!sent.is_empty());
}

#[test]
fn no_case_stands_for_nothing() {
    for world_size in [1, 2, 16] {
        let small = suite::calls(Extent::Small, world_size);
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)) {
                let covers =
                    |(case, _): &Call| case.dtype == dtype && case.kind.reduce_op() == Some(op);
                assert!(small.iter().any(covers), "{op} of {dtype}");
            }
        }
        assert!(small.iter().any(|(case, _)| case.uneven && case.elements > 1000));
    }
}

/// Each two values that stand together at a size where all do stand together in long calls.
#[test]
fn long_calls_have_every_pair_of_values() {
    for world_size in suite::WORLD_SIZES {
        let all = suite::calls(Extent::All, world_size);
        let of_size = |fits: fn(usize) -> bool| -> Vec<&Call> {
            all.iter().filter(|(case, _)| fits(case.elements)).collect()
        };
        let (long, short) = (of_size(|size| size > suite::LONG / 17), of_size(|size| size == 7));
        let pairs = |calls: &[&Call]| -> HashSet<(String, String)> {
            let of = |call: &&Call| {
                let values = suite::values(call);
                let pairs = values.iter().flat_map(|a| values.iter().map(move |b| (a, b)));
                pairs.map(|(a, b)| (a.clone(), b.clone())).collect::<Vec<_>>()
            };
            calls.iter().flat_map(of).collect()
        };
        let missing: Vec<_> = pairs(&short).difference(&pairs(&long)).cloned().collect();
        assert_eq!(missing, [], "{world_size} ranks");
        println!("{world_size} ranks: {} calls, {} of them long", all.len(), long.len());
        assert!(short.len() > 6 * long.len() && all.len() > 36 * long.len());
    }
}

#[test]
fn parts_are_of_one_size_and_make_up_the_whole() {
    let list: Vec<usize> = (0..1_000).collect();
    let mut all = Vec::new();
    for number in 1..=24 {
        let part: Part = format!("{number}/24").parse().unwrap();
        let items = part.of(list.clone());
        assert!((41..=42).contains(&items.len()));
        all.extend(items);
    }
    all.sort_unstable();
    assert_eq!(all, list);
    for wrong in ["0/3", "4/3", "3", "a/3", ""] {
        assert!(wrong.parse::<Part>().is_err(), "{wrong}");
    }
}
