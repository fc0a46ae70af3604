//! What a caller gets back of an operation in the background: its buffer, also with an error, and a
//! wake-up that finds the group unlocked.

use std::{
    fmt::Debug,
    future::IntoFuture,
    pin::pin,
    sync::{
        Arc, Mutex,
        mpsc::{Sender, channel},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use crate::common::{everywhere, failure, world_with};
use drumline_group::{Begun, Cause, ErrorKind, ProcessGroup, ReduceOp, WorkError};

/// Whether the buffer that came back is the one that lies at `at`, and belongs to its caller again.
#[track_caller]
fn is_the_callers<B: AsMut<[u32]>>(failed: &mut WorkError<B>, at: *const u32) {
    let buffer = failed.buffer.as_mut().unwrap().as_mut();
    assert_eq!(buffer.as_ptr(), at);
    buffer.fill(7);
}

#[test]
fn buffers_come_back_when_calls_differ() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let buffer = vec![1_u32; 1000 + group.rank()];
            let at = buffer.as_ptr();
            let mut failed =
                group.all_reduce_async(buffer, ReduceOp::Sum).unwrap().wait().unwrap_err();
            is_the_callers(&mut failed, at);
            assert!(matches!(failure(failed).cause, Cause::Mismatch { .. }));

            let buffer = vec![1_u32; 10];
            let at = buffer.as_ptr();
            let mut poisoned =
                group.all_reduce_async(buffer, ReduceOp::Sum).unwrap().wait().unwrap_err();
            is_the_callers(&mut poisoned, at);
        });
    });
}

#[test]
fn registered_buffers_come_back_when_a_rank_leaves() {
    everywhere(|config| {
        world_with(2, config, |group| {
            if group.rank() == 1 {
                return; // and drops the group
            }
            let buffer = group.alloc_registered::<u32>(100_000).unwrap();
            let at = buffer.as_ptr();
            let mut failed =
                group.all_reduce_async(buffer, ReduceOp::Sum).unwrap().wait().unwrap_err();
            is_the_callers(&mut failed, at);
            assert_eq!(failure(failed).culprit(), Some(1));
        });
    });
}

#[test]
fn buffers_of_messages_come_back_after_an_abort() {
    everywhere(|config| {
        world_with(2, config, |group| {
            if group.rank() == 1 {
                // Stays until the other rank has given up.
                group.barrier().unwrap_err();
                return;
            }
            let buffer = vec![1_u32; 1000];
            let at = buffer.as_ptr();
            let from_one = group.recv_async(buffer, 1, 0).unwrap();
            let from_any = group.recv_any_async(vec![1_u32; 1000], 1).unwrap();
            group.abort();
            let mut failed = from_one.wait().unwrap_err();
            is_the_callers(&mut failed, at);
            // Which rank it came from is part of the result, and no rank has sent.
            assert!(from_any.wait().unwrap_err().buffer.is_none());
        });
    });
}

/// The call cannot begin, and its buffer comes back as it was.
#[track_caller]
fn cannot_begin<B: Clone + PartialEq + Debug>(call: impl FnOnce(B) -> Begun<B>, buffer: B) {
    let WorkError { error, buffer: back } = call(buffer.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
    assert_eq!(back, Some(buffer), "{error}");
}

/// Only one rank calls them, with an argument that cannot be used. Whatever it calls next is still what the other
/// calls.
#[test]
fn calls_that_cannot_begin_give_buffers_back_and_take_no_turn() {
    let five = || vec![5.0_f32; 5]; // no two blocks
    everywhere(|config| {
        world_with(2, config, |group| {
            let (sum, bits) = (ReduceOp::Sum, ReduceOp::Band);
            if group.rank() == 1 {
                cannot_begin(|it| group.all_reduce_async(it, bits), five());
                cannot_begin(|it| group.reduce_async(it, sum, 2), five());
                cannot_begin(|it| group.reduce_async(it, bits, 0), five());
                cannot_begin(|it| group.broadcast_async(it, 2), five());
                cannot_begin(|it| group.all_gather_async(five(), it), five());
                cannot_begin(|it| group.in_blocks(&[1]).all_gather_async(five(), it), five());
                cannot_begin(|it| group.gather_async(five(), it, 1), five());
                cannot_begin(|it| group.in_blocks(&[5, 5]).gather_async(five(), it, 0), five());
                cannot_begin(|it| group.scatter_async(five(), it, 1), five());
                cannot_begin(|it| group.in_blocks(&[5, 5]).scatter_async(five(), it, 0), five());
                cannot_begin(|it| group.reduce_scatter_async(five(), it, sum), five());
                cannot_begin(
                    |it| group.in_blocks(&[1]).reduce_scatter_async(five(), it, sum),
                    five(),
                );
                cannot_begin(
                    |it| group.in_blocks(&[0, 5]).reduce_scatter_async(five(), it, bits),
                    five(),
                );
                cannot_begin(|it| group.all_to_all_async(five(), it), five());
                cannot_begin(
                    |it| group.in_blocks((&[5, 0], &[0, 5])).all_to_all_async(five(), it),
                    five(),
                );
                cannot_begin(|it| group.send_async(it, 2, 0), five());
                cannot_begin(|it| group.recv_async(it, 2, 0), five());
            }
            let sum = group.all_reduce_async(vec![1_u32], sum).unwrap();
            assert_eq!(sum.wait().unwrap(), [2]);
        });
    });
}

/// Makes another call on the group when it is woken.
struct CallsAgain {
    group: ProcessGroup,
    sums: Mutex<Sender<u8>>,
}

impl Wake for CallsAgain {
    fn wake(self: Arc<Self>) {
        let mut data = [41_u8];
        self.group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        self.sums.lock().unwrap().send(data[0] + 1).unwrap();
    }
}

#[test]
fn a_waker_finds_the_group_unlocked() {
    let group = ProcessGroup::alone();
    let (sender, sums) = channel();
    let waker = Waker::from(Arc::new(CallsAgain { group: group.clone(), sums: sender.into() }));
    // How far the progress thread gets before the first poll is chance.
    let mut woken = 0;
    while woken < 10 {
        let mut work =
            pin!(group.all_reduce_async(vec![1_u8; 1 << 16], ReduceOp::Sum).unwrap().into_future());
        match work.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => assert_eq!(result.unwrap()[0], 1),
            Poll::Pending => {
                assert_eq!(sums.recv_timeout(Duration::from_secs(60)), Ok(42));
                woken += 1;
            }
        }
    }
}
