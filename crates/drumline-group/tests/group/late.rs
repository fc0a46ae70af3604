//! A rank that comes to a call after others have given it up.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use drumline_group::{Objects, ProcessGroup, Rank, Reason, ReduceOp, Result};

use crate::common::{everywhere, failure, world_with};

const RANKS: usize = 3;

/// A call of three ranks, and the rank that is late in it: one for whose part others wait.
type Case = (&'static str, Rank, fn(&ProcessGroup) -> Result<()>);

fn all_reduce(group: &ProcessGroup, len: usize) -> Result<()> {
    group.all_reduce(&mut vec![1.0_f32; len], ReduceOp::Sum)
}

/// As long as the whole on the rank that is the root, and else empty.
fn at_root<T: Clone>(group: &ProcessGroup, root: Rank, value: T) -> Vec<T> {
    vec![value; if group.rank() == root { RANKS } else { 0 }]
}

const CASES: [Case; 17] = [
    ("all_reduce of 4 bytes", 2, |group| all_reduce(group, 1)),
    ("all_reduce of 4 KB", 2, |group| all_reduce(group, 1000)),
    ("all_reduce of 4 MiB", 0, |group| all_reduce(group, 1 << 20)),
    ("all_reduce of nothing", 1, |group| all_reduce(group, 0)),
    ("all_reduce in the background", 2, |group| {
        group
            .all_reduce_async(vec![1.0_f32; 1000], ReduceOp::Sum)
            .unwrap()
            .wait()
            .map(drop)
            .map_err(Into::into)
    }),
    ("all_reduce of registered memory", 2, |group| {
        group.all_reduce(&mut group.alloc_registered::<f32>(1000)?, ReduceOp::Sum)
    }),
    ("broadcast", 1, |group| group.broadcast(&mut [1_u8; 9], 1)),
    ("long broadcast", 1, |group| group.broadcast(&mut vec![1_u8; 1 << 20], 1)),
    ("reduce", 2, |group| group.reduce(&mut [1_i32; 9], ReduceOp::Sum, 0)),
    ("gather", 2, |group| group.gather(&[1_u8], &mut at_root(group, 0, 0), 0)),
    ("scatter", 0, |group| group.scatter(&at_root(group, 0, 7_u8), &mut [0], 0)),
    ("all_gather", 2, |group| group.all_gather(&[1_u8; 5], &mut [0; 5 * RANKS])),
    ("reduce_scatter", 1, |group| {
        group.reduce_scatter(&[1.0_f32; RANKS], &mut [0.0], ReduceOp::Sum)
    }),
    ("all_to_all", 1, |group| group.all_to_all(&[1_u8; RANKS], &mut [0; RANKS])),
    ("barrier", 2, ProcessGroup::barrier),
    ("all_gather_object", 2, |group| group.all_gather_object(&group.rank()).map(drop)),
    ("send to a rank that receives", 2, |group| match group.rank() {
        2 => group.send(&[1_u8], 0, 7),
        0 => group.recv(&mut [0_u8], 2, 7),
        _ => Ok(()),
    }),
];

#[test]
fn a_late_rank_does_not_succeed_where_others_have_given_up() {
    everywhere(|config| {
        for (name, late, call) in CASES {
            let gave_up = AtomicUsize::new(0);
            let ends = world_with(RANKS, config, |group| {
                call(&group).unwrap(); // connects
                if group.rank() == late {
                    while gave_up.load(Ordering::SeqCst) < RANKS - 1 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    return call(&group);
                }
                let end = call(&group.within(Duration::from_millis(50)));
                gave_up.fetch_add(1, Ordering::SeqCst);
                end
            });
            let others = ends.iter().enumerate().filter(|(rank, _)| *rank != late);
            let failures = others.filter_map(|(_, end)| Some(failure(end.clone().err()?)));
            let failures: Vec<_> = failures.collect();
            assert!(
                failures.iter().any(|it| it.cause.reason() == Reason::Timeout),
                "{name}: {ends:?}"
            );
            let told = ends[late].clone().expect_err(name);
            let told = failure(told);
            assert_eq!(told.cause.reason(), Reason::Timeout, "{name}: {told}");
            // In shared memory the ranks know that the late one does not succeed, over links they do not.
            let may_succeed = "; whether other ranks complete this call cannot be known";
            let is_told = failures.iter().all(|it| it.to_string().contains(may_succeed));
            if name.starts_with("all_reduce of 4") {
                assert_eq!(is_told, !config.shared_memory, "{name}: {failures:?}");
            }
            let limit = "(this limit is the timeout that the program gives)";
            assert!(
                failures.iter().all(|it| it.to_string().contains(limit)),
                "{name}: {failures:?}"
            );
        }
    });
}
