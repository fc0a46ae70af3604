//! The built-in prices replay what was measured on a quiet machine.

use drumline_inspect::replay::{Cluster, Workload, replay_in_a_row};
use drumline_schedule::price::{ElementKind, Link, PriceList, Rate};
use drumline_schedule::{Algorithm, Collective, Topology};

#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    Registered,
    Staged,
    Unix,
    Tcp,
}

const CORES: usize = 2;
const RANKS: [usize; 5] = [2, 3, 4, 6, 8];

/// The transport, the bytes, the algorithms for 2 ranks and for more, and the microseconds of an all-reduce
/// among each number of [`RANKS`]: calls in a row, the fastest of many rounds on a quiet virtual machine of 2
/// cores (AMD EPYC, 2026-11-22).
#[rustfmt::skip]
const MEASURED: &[(Way, usize, [&str; 2], [f64; 5])] = &[
    (Way::Staged, 8, ["shm-oneshot", "shm-oneshot"], [0.23, 2.69, 2.73, 5.64, 8.68]),
    (Way::Staged, 4_096, ["shm-oneshot", "shm-oneshot"], [0.50, 3.52, 3.81, 8.00, 12.49]),
    (Way::Staged, 65_536, ["shm-oneshot", "shm-twoshot"], [3.47, 15.44, 14.75, 31.64, 43.14]),
    (Way::Staged, 1_048_576, ["shm-oneshot", "shm-twoshot"], [54.12, 106.8, 106.0, 204.5, 302.0]),
    (Way::Staged, 16_777_216, ["shm-oneshot", "shm-twoshot"], [1_720.0, 3_411.0, 4_398.0, 7_538.0, 10_482.0]),
    (Way::Registered, 8, ["shm-oneshot", "shm-oneshot"], [0.24, 2.70, 2.77, 5.67, 8.74]),
    (Way::Registered, 4_096, ["shm-push", "shm-push"], [0.38, 5.19, 5.28, 11.19, 16.04]),
    (Way::Registered, 65_536, ["shm-push", "shm-push"], [1.75, 8.29, 8.38, 16.85, 24.06]),
    (Way::Registered, 1_048_576, ["shm-push", "shm-push"], [21.24, 54.88, 50.74, 106.8, 139.1]),
    (Way::Registered, 16_777_216, ["shm-push", "shm-push"], [513.7, 1_239.0, 1_511.0, 3_430.0, 4_733.0]),
    (Way::Unix, 8, ["doubling", "doubling"], [4.32, 21.82, 23.46, 55.85, 86.88]),
    (Way::Unix, 4_096, ["doubling", "doubling"], [5.69, 26.12, 29.24, 66.92, 99.40]),
    (Way::Unix, 65_536, ["doubling", "direct"], [15.56, 74.50, 91.04, 211.0, 374.9]),
    (Way::Unix, 1_048_576, ["direct", "direct"], [184.2, 597.7, 584.3, 1_164.0, 1_660.0]),
    (Way::Unix, 16_777_216, ["direct", "direct"], [4_590.0, 12_179.0, 13_789.0, 24_666.0, 39_309.0]),
    (Way::Tcp, 8, ["doubling", "doubling"], [7.83, 30.74, 37.77, 91.63, 141.5]),
    (Way::Tcp, 4_096, ["doubling", "doubling"], [8.65, 40.41, 43.99, 99.01, 178.6]),
    (Way::Tcp, 65_536, ["doubling", "direct"], [22.97, 98.23, 145.8, 311.1, 766.5]),
    (Way::Tcp, 1_048_576, ["direct", "direct"], [190.5, 605.9, 621.4, 1_501.0, 2_432.0]),
    (Way::Tcp, 16_777_216, ["direct", "direct"], [4_483.0, 11_088.0, 15_229.0, 28_751.0, 45_748.0]),
];

/// Measured for TCP on loopback. The built-in `far` is for links between hosts.
const LOOPBACK: Link = Link {
    round_ps: 1_760_000,
    message_ps: 5_950_000,
    byte: Rate { cached_fs: 165_000, memory_fs: 240_000 },
};

fn replayed_us(way: Way, name: &str, ranks: usize, bytes: usize) -> f64 {
    let algorithm = Algorithm::find(Collective::AllReduce, name).unwrap();
    let prices = PriceList::default();
    let cluster = match way {
        Way::Registered | Way::Staged => Cluster::new(Topology::hosts(&[ranks]), prices),
        Way::Unix => Cluster::one_host_apart(ranks, prices),
        Way::Tcp => Cluster::one_host_apart(ranks, PriceList { near: LOOPBACK, ..prices }),
    };
    let cluster = Cluster { cores_per_host: CORES, ..cluster };
    let kind = ElementKind { bytes: 4, sum_bytes: 4 };
    let workload = Workload { algorithm, root: 0, elements: bytes / 4, kind };
    replay_in_a_row(&cluster, &workload).unwrap().time_ps as f64 / 1e6
}

#[test]
fn most_is_within_a_fifth() {
    let (mut good, mut all) = ([0; RANKS.len()], 0);
    for &(way, bytes, [two, more], measured) in MEASURED {
        for (index, ranks) in RANKS.into_iter().enumerate() {
            let name = if ranks == 2 { two } else { more };
            let (us, measured) = (replayed_us(way, name, ranks, bytes), measured[index]);
            let percent = 100.0 * (us / measured - 1.0);
            println!("{way:?} {ranks} {bytes}: {measured} us, replayed {us:.2}, {percent:+.0} %");
            good[index] += usize::from(percent.abs() <= 20.0);
            all += 1;
            assert!(percent.abs() < 60.0, "{way:?}, {ranks} ranks, {bytes}: {percent:+.0} %");
        }
    }
    // The model has one cache for each core. Where buffers just fit into the cache that all cores share, its
    // times are too long.
    println!("{good:?} of {all}, by ranks");
    assert!(good.iter().sum::<usize>() >= 85, "{good:?} of {all}, by ranks");
}
