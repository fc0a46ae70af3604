//! Calls like those before them ask for no memory.
//!
//! In a test of its own, because it counts what its threads allocate.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use drumline::{ProcessGroup, ReduceOp, Result};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all is handed to the system's allocator, whose contract is the same; a thread-local
// counter without a destructor can be reached at any time and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps to the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps to the contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A rank that has to sleep until another one comes allocates to do so. So calls are made until so
/// many of them have allocated nothing, but at most as many times that.
const CALLS: usize = 1_000;
const ATTEMPTS: usize = 200;

#[test]
fn repeated_short_calls_allocate_nothing() {
    type Calls = fn(&ProcessGroup, &mut [f32], &mut [f32]) -> Result<()>;
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
    let ranks: Vec<_> = ProcessGroup::local_world(2)
        .unwrap()
        .into_iter()
        .map(|group| {
            std::thread::spawn(move || {
                assert!(group.shares_memory());
                for (kind, call) in kinds {
                    let (mut data, mut long) = ([1.0; 2], [0.0; 4]);
                    let mut clean = 0;
                    for _ in 0..ATTEMPTS {
                        for _ in 0..CALLS {
                            let before = ALLOCATIONS.get();
                            call(&group, &mut data, &mut long).unwrap();
                            clean += usize::from(ALLOCATIONS.get() == before);
                        }
                        // Both go on until both have seen enough.
                        let mut fewest = [clean as u64];
                        group.all_reduce(&mut fewest, ReduceOp::Min).unwrap();
                        if fewest[0] >= CALLS as u64 {
                            break;
                        }
                    }
                    assert!(clean >= CALLS, "only {clean} calls of {kind} allocated nothing");
                }
                group.destroy().unwrap();
            })
        })
        .collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}
