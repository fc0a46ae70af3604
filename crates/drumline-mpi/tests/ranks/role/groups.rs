//! Communicators of some ranks.

use std::thread;

use super::{made, over, world};

/// All but the last rank, and all but the first in reverse order. Each rank makes its groups on threads of their own, and
/// uses them at the same time.
pub(super) fn overlapping() {
    let world = world();
    let (rank, size) = (world.rank(), world.size());
    let first: Vec<usize> = (0..size - 1).collect();
    let second: Vec<usize> = (1..size).rev().collect();
    thread::scope(|threads| {
        for (tag, ranks) in [(7, &first), (8, &second)] {
            if !ranks.contains(&rank) {
                continue;
            }
            threads.spawn(move || {
                let group = made(world, ranks, tag);
                assert_eq!(group.size(), ranks.len());
                assert_eq!(ranks[group.rank()], rank, "ranks have the order of the list");
                for round in 0..50_u8 {
                    let blocks: Vec<_> =
                        (0..group.size()).map(|rank| rank * 2..rank * 2 + 2).collect();
                    let mut data = vec![0; 2 * group.size()];
                    data[blocks[group.rank()].clone()].copy_from_slice(&[rank as u8, round]);
                    let (_, data) = over(group.all_gather(data, &blocks));
                    let expected: Vec<u8> =
                        ranks.iter().flat_map(|rank| [*rank as u8, round]).collect();
                    assert_eq!(data, expected);
                }
            });
        }
    });
}
