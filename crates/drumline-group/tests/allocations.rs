//! Calls like those before them ask for no memory.
//!
//! In a test of its own: it replaces the allocator by one that counts what each thread asks for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{hint::black_box, sync::Arc, time::Instant};

use allocation_counter::measure;
use drumline_group::{
    Cause, CollectiveError, Config, ProcessGroup, ReduceOp, Result,
    backend::{Backend, Guard, Request, register_backend},
};

/// A rank that has to sleep until another one comes allocates to do so. So calls are made until so
/// many of them have allocated nothing, but at most as many times that.
const CALLS: usize = 1_000;
const ATTEMPTS: usize = 200;

type Calls = fn(&ProcessGroup, &mut [f32], &mut [f32]) -> Result<()>;

#[test]
fn repeated_short_calls_allocate_nothing() {
    let kinds: [(&str, Calls); 5] = [
        ("all_reduce", |group, data, _| group.all_reduce(data, ReduceOp::Sum)),
        ("of another length", |group, data, long| {
            group.all_reduce(data, ReduceOp::Max)?;
            group.all_reduce(long, ReduceOp::Max)
        }),
        ("broadcast", |group, data, _| group.broadcast(data, 1)),
        ("all_gather", |group, data, long| group.all_gather(data, long)),
        ("barrier", |group, _, _| group.barrier()),
    ];
    allocate_nothing(&Config::default(), &kinds);
}

/// The backend itself does nothing here.
#[test]
fn a_guard_allocates_nothing_either() {
    #[derive(Debug)]
    struct Empty(Guard);

    impl Backend for Empty {
        fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
            self.0.check()
        }

        fn abort(&self, _: &CollectiveError) {}

        fn shutdown(&self, _: Instant) -> Result<(), Cause> {
            Ok(())
        }
    }

    register_backend("empty", |options| Ok(Arc::new(Empty(options.guard()?)))).unwrap();
    let kinds: [(&str, Calls); 2] = [
        ("guarded all_reduce", |group, data, _| group.all_reduce(data, ReduceOp::Sum)),
        ("guarded barrier", |group, _, _| group.barrier()),
    ];
    allocate_nothing(&Config::default().backend("empty"), &kinds);
}

fn allocate_nothing(config: &Config, kinds: &[(&str, Calls)]) {
    let counts = measure(|| drop(black_box(vec![0_u8; 64]))).count_total > 0;
    assert!(counts, "the allocator in use is another one");
    let groups = drumline_group::rendezvous::local_world_with(2, config).unwrap();
    let meetings = drumline_group::rendezvous::local_world(2).unwrap();
    std::thread::scope(|threads| {
        for (group, meeting) in groups.into_iter().zip(meetings) {
            threads.spawn(move || {
                assert!(drumline_group::algorithms::shares_memory(&meeting));
                for (kind, call) in kinds {
                    let (mut data, mut long) = ([1.0; 2], [0.0; 4]);
                    let mut clean = 0;
                    for _ in 0..ATTEMPTS {
                        for _ in 0..CALLS {
                            let asked = measure(|| call(&group, &mut data, &mut long).unwrap());
                            clean += usize::from(asked.count_total == 0);
                        }
                        // Both go on until both have seen enough.
                        let mut fewest = [clean as u64];
                        meeting.all_reduce(&mut fewest, ReduceOp::Min).unwrap();
                        if fewest[0] >= CALLS as u64 {
                            break;
                        }
                    }
                    assert!(clean >= CALLS, "only {clean} calls of {kind} allocated nothing");
                }
                group.destroy().unwrap();
            });
        }
    });
}
