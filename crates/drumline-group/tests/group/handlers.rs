//! Foreign code while a call waits: handlers of signals, and wakers. Neither holds a group up.

use std::{
    cell::{Cell, RefCell},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    task::{Context, Wake, Waker},
    thread,
    time::Duration,
};

use drumline_group::{
    Cause, DType, ProcessGroup, ReduceOp, Result,
    algorithms::explain,
    backend::{Collective, interruptible},
    metrics,
};

use crate::common::{Barrier, everywhere, world_with};

thread_local! {
    static GROUP: RefCell<Option<ProcessGroup>> = const { RefCell::new(None) };
    static HANDLER: Cell<fn(&ProcessGroup)> = const { Cell::new(|_| {}) };
    static RUNS: Cell<usize> = const { Cell::new(0) };
}

/// Calls the handler of this thread, the first time that a call waits.
fn ask() -> bool {
    let runs = RUNS.replace(RUNS.get() + 1);
    if runs == 0 {
        let group = GROUP.with_borrow(Option::clone).unwrap();
        HANDLER.get()(&group);
    }
    false
}

/// Makes a call that waits, and runs `handler` meanwhile.
fn handled<R>(group: &ProcessGroup, handler: fn(&ProcessGroup), call: impl FnOnce() -> R) -> R {
    GROUP.set(Some(group.clone()));
    HANDLER.set(handler);
    RUNS.set(0);
    let result = interruptible(ask, call);
    GROUP.set(None);
    assert!(RUNS.get() > 0, "the call has never waited");
    result
}

fn problem(result: Result<()>) -> String {
    result.unwrap_err().to_string()
}

/// What a handler may do in a call of the same group, and what is refused.
fn within_a_call(group: &ProcessGroup) {
    let inside = "this thread is in all_reduce(sum) of 1 f32";
    let refused = problem(group.barrier());
    assert!(refused.starts_with("barrier: ") && refused.contains(inside), "{refused}");
    let work = group.all_reduce_async(vec![1.0_f32], ReduceOp::Sum).unwrap();
    let refused = work.wait().unwrap_err().error.to_string();
    assert!(refused.starts_with("wait: ") && refused.contains(inside), "{refused}");
    let mut got = [0.0_f32];
    group.send(&[2.0_f32], 1, 0).unwrap();
    group.recv(&mut got, 1, 0).unwrap();
    assert_eq!(got, [3.0]);
    assert!(!metrics::text([group]).is_empty());
    explain(group, Collective::AllReduce, 10, DType::F32, false).unwrap();
    let alone = group.new_group(&[0], &Default::default()).unwrap();
    alone.barrier().unwrap();
    alone.destroy().unwrap();
}

#[test]
fn a_handler_calls_the_group_whose_call_it_interrupts() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let mut sum = [1.0_f32];
            if group.rank() == 0 {
                let call = || group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                handled(&group, within_a_call, call);
            } else {
                let mut got = [0.0_f32];
                group.recv(&mut got, 0, 0).unwrap();
                group.send(&[got[0] + 1.0], 0, 0).unwrap();
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                group.all_reduce(&mut [1.0_f32], ReduceOp::Sum).unwrap(); // that of the handler
            }
            assert_eq!(sum, [2.0]);
            group.destroy().unwrap();
        });
    });
}

#[test]
fn a_handler_ends_the_group_whose_call_it_interrupts() {
    let ends: [fn(&ProcessGroup); 3] = [
        |group| group.clone().destroy().unwrap(),
        |group| group.clone().leave(Duration::from_secs(600)).unwrap(),
        ProcessGroup::abort,
    ];
    let calls: [fn(&ProcessGroup) -> Result<()>; 3] = [
        ProcessGroup::barrier,
        |group| {
            // A call behind one in the background.
            let _goes_on = group.all_reduce_async(vec![1.0_f32], ReduceOp::Sum).unwrap();
            group.barrier()
        },
        |group| group.within(Duration::MAX).monitored_barrier(Duration::MAX),
    ];
    everywhere(|config| {
        for (end, call) in ends.into_iter().flat_map(|end| calls.map(|call| (end, call))) {
            let over = Barrier::new(2);
            world_with(2, config, |group| {
                if group.rank() == 0 {
                    let error = handled(&group, end, || call(&group)).unwrap_err();
                    assert_eq!(error.cause(), Some(&Cause::Aborted), "{error}");
                    over.wait();
                } else {
                    over.wait();
                    // The first may have all that it needs of rank 0.
                    let error = (0..2).find_map(|_| call(&group).err()).unwrap().to_string();
                    assert!(error.contains("rank 0"), "{error}");
                }
            });
        }
    });
}

thread_local! {
    static OTHER: RefCell<Option<(ProcessGroup, Sender<()>)>> = const { RefCell::new(None) };
}

/// They may wait for the call that the handler interrupts.
#[test]
fn a_handler_leaves_another_group_whose_ranks_do_not_come() {
    everywhere(|config| {
        let (left, has_left) = channel();
        let has_left = Mutex::new(has_left);
        world_with(2, &config.clone().timeout(Duration::MAX), |group| {
            let other = group.new_group(&[0, 1], &Default::default()).unwrap();
            if group.rank() == 0 {
                OTHER.set(Some((other, left.clone())));
                let leave = |_: &ProcessGroup| {
                    let (other, left) = OTHER.take().unwrap();
                    other.destroy().unwrap();
                    left.send(()).unwrap();
                };
                handled(&group, leave, || group.barrier()).unwrap();
            } else {
                has_left.lock().unwrap().recv().unwrap();
                group.barrier().unwrap();
                assert!(problem(other.barrier()).contains("rank 0 has closed the group"));
            }
        });
    });
}

#[test]
fn a_handler_that_panics_leaves_no_group_behind_that_hangs() {
    let over = Barrier::new(2);
    world_with(2, &Default::default(), |group| {
        if group.rank() == 0 {
            let call = || handled(&group, |_| panic!("in a handler"), || group.barrier());
            assert!(catch_unwind(AssertUnwindSafe(call)).is_err());
            assert!(problem(group.barrier()).contains("panicked"));
            over.wait();
        } else {
            over.wait();
            let error = (0..2).find_map(|_| group.barrier().err()).unwrap().to_string();
            assert!(error.contains("rank 0"), "{error}");
        }
    });
}

#[test]
fn questions_are_answered_while_another_thread_is_in_a_call() {
    everywhere(|config| {
        let asked = Barrier::new(2);
        world_with(2, config, |group| {
            if group.rank() == 1 {
                asked.wait();
                return group.barrier().unwrap();
            }
            thread::scope(|threads| {
                let calling = threads.spawn(|| group.barrier());
                let usage = || metrics::text([&group]);
                // Half of the questions come before the call, and half while it waits.
                for _ in 0..20 {
                    assert!(usage().contains("drumline_group_failed"));
                    metrics::communication_time(&group);
                    explain(&group, Collective::Barrier, 0, DType::U8, false).unwrap();
                    thread::sleep(Duration::from_millis(1));
                }
                asked.wait();
                calling.join().unwrap().unwrap();
            });
        });
    });
}

#[test]
fn a_thread_that_waits_for_another_call_gives_up_after_the_time_limit() {
    let config = drumline_group::Config::default().timeout(Duration::from_secs(2));
    let over = Barrier::new(2);
    world_with(2, &config, |group| {
        if group.rank() == 1 {
            over.wait();
            return;
        }
        let handler = |group: &ProcessGroup| {
            let group = group.clone();
            let late = thread::spawn(move || group.barrier()).join().unwrap();
            let error = late.unwrap_err();
            assert_eq!(error.cause(), Some(&Cause::Timeout { waiting_for: vec![0] }), "{error}");
            let told = error.to_string();
            assert!(told.contains("a handler interrupts all_reduce(sum) of 1 f32"), "{told}");
        };
        let call = || group.all_reduce(&mut [1.0_f32], ReduceOp::Sum);
        assert!(problem(handled(&group, handler, call)).contains("barrier"));
        over.wait();
    });
}

/// A waker that blocks until it gets a word.
struct Blocks(Mutex<Receiver<()>>);

impl Wake for Blocks {
    fn wake(self: Arc<Self>) {
        self.0.lock().unwrap().recv().unwrap();
    }
}

#[test]
fn a_waker_that_blocks_holds_up_no_call() {
    world_with(2, &Default::default(), |group| {
        let (let_go, blocked) = channel();
        let waker = Waker::from(Arc::new(Blocks(Mutex::new(blocked))));
        let mut first =
            pin!(group.all_reduce_async(vec![1.0_f32], ReduceOp::Sum).unwrap().into_future());
        let is_pending = first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending();
        // Nobody waits, so the thread of the library carries these out.
        let works = [0, 1].map(|_| group.all_reduce_async(vec![1.0_f32], ReduceOp::Sum).unwrap());
        while !works.iter().all(|work| work.is_completed()) {
            thread::yield_now();
        }
        if is_pending {
            let_go.send(()).unwrap();
        }
        works.into_iter().for_each(|work| drop(work.wait().unwrap()));
    });
}
