//! Sums that stay in slices: what devices fetch.

use std::sync::mpsc;

use drumline_group::{
    Config, DType, Element, ProcessGroup, ReduceOp, RegisteredBuffer, Result, bf16,
    driving::{self, reduce_slices_then, slice_holders, window_of},
    f16,
    types::{Bool, F8E4M3},
};

use crate::common::world_with;

/// Carries out the call, and waits for its end.
fn reduce_slices<T: Element>(
    group: &ProcessGroup,
    buffer: RegisteredBuffer<T>,
    op: ReduceOp,
) -> Result<RegisteredBuffer<T>> {
    let (told, hears) = mpsc::channel();
    reduce_slices_then::<T, _>(group, buffer, op, move |result, buffer| {
        let _ = told.send(result.map(|()| buffer));
    });
    hears.recv().unwrap()
}

/// Every rank fetches the slices of its neighbours, and has what all_reduce gives.
fn check<T: Element>(ranks: usize, len: usize, op: ReduceOp, value: fn(usize, usize) -> T) {
    world_with(ranks, &Config::default(), |group| {
        let holders = slice_holders(&group, T::DTYPE).unwrap().unwrap();
        assert_eq!(holders, (0..ranks).collect::<Vec<_>>());
        let brought: Vec<T> = (0..len).map(|index| value(group.rank(), index)).collect();
        let mut expected = brought.clone();
        group.all_reduce(&mut expected, op).unwrap();

        let mut buffer = group.alloc_registered::<T>(len).unwrap();
        let arena = driving::arena(&group).unwrap();
        let offset = arena.offset_of(&buffer[..]).unwrap() as u64;
        let mut offsets = vec![0; ranks];
        group.all_gather(&[offset], &mut offsets).unwrap();
        buffer.copy_from_slice(&brought);
        let buffer = reduce_slices(&group, buffer, op).unwrap();

        let (mut found, width) = (Vec::new(), size_of::<T>());
        for (slice, &holder) in holders.iter().enumerate() {
            let border = |slice: usize| len * slice / ranks;
            let range = border(slice) * width..border(slice + 1) * width;
            if holder == group.rank() {
                found.extend_from_slice(&bytemuck::cast_slice(&buffer)[range]);
            } else {
                let window = window_of(&group, holder, offsets[holder] as usize, len * width);
                found.extend(window.unwrap().to_vec(range).unwrap());
            }
        }
        let expected: &[u8] = bytemuck::cast_slice(&expected);
        assert!(found == expected, "{ranks} ranks, {len} of {}, {op}", T::DTYPE);
        // Nobody frees what others read.
        group.barrier().unwrap();
    });
}

fn mixed(rank: usize, index: usize) -> f64 {
    let x = (rank as u64 * 0x9e37_79b9 + index as u64 + 1).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f64 / 4096.0 - 2048.0) * 2.0_f64.powi((x & 7) as i32 - 4)
}

#[test]
fn slices_hold_the_bits_of_all_reduce() {
    for ranks in 2..=8 {
        for len in [1, 7, 1_000, 65_537] {
            check::<f32>(ranks, len, ReduceOp::Avg, |rank, index| mixed(rank, index) as f32);
        }
        let len = 4_099;
        check::<f64>(ranks, len, ReduceOp::Sum, mixed);
        check::<f16>(ranks, len, ReduceOp::Sum, |rank, index| f16::from_f64(mixed(rank, index)));
        check::<bf16>(ranks, len, ReduceOp::Avg, |rank, index| bf16::from_f64(mixed(rank, index)));
        check::<F8E4M3>(ranks, len, ReduceOp::Sum, |rank, index| {
            F8E4M3::from_f32(mixed(rank, index) as f32 / 4096.0)
        });
        check::<i32>(ranks, len, ReduceOp::Max, |rank, index| mixed(rank, index) as i32);
        check::<Bool>(ranks, len, ReduceOp::Bor, |rank, index| Bool::from(index % 8 == rank));
    }
}

#[test]
fn ordinary_memory_is_refused_before_any_rank_hears() {
    world_with(2, &Config::default(), |group| {
        let (told, hears) = mpsc::channel();
        reduce_slices_then::<f32, _>(&group, vec![1.0; 3], ReduceOp::Sum, move |result, _| {
            told.send(result).unwrap();
        });
        let error = hears.recv().unwrap().unwrap_err().to_string();
        assert!(error.contains("reduce_slices: it takes registered buffers only"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn a_window_must_lie_in_the_arena_of_a_neighbour() {
    world_with(2, &Config::default(), |group| {
        let other = 1 - group.rank();
        for (peer, offset) in [(other, usize::MAX), (7, 0), (group.rank(), 0)] {
            assert!(window_of(&group, peer, offset, 1).is_err());
        }
        assert_eq!(window_of(&group, other, 0, 1).unwrap().len(), 1);
        group.barrier().unwrap();
    });
}

#[test]
fn ranks_that_share_no_memory_have_no_slices() {
    world_with(2, &Config::default().shared_memory(false), |group| {
        assert_eq!(slice_holders(&group, DType::F32).unwrap(), None);
        assert!(window_of(&group, 1 - group.rank(), 0, 1).is_err());
    });
}

#[test]
fn ranks_in_different_calls_hear_of_it() {
    world_with(2, &Config::default(), |group| {
        let mut buffer = group.alloc_registered::<f32>(100).unwrap();
        let error = match group.rank() {
            0 => reduce_slices(&group, buffer, ReduceOp::Sum).unwrap_err(),
            _ => group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap_err(),
        };
        let error = error.to_string();
        assert!(error.contains("reduce_slices") && error.contains("all_reduce"), "{error}");
    });
}
