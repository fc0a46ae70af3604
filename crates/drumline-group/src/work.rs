//! Calls that are under way in the background.

use std::{
    fmt,
    future::{Future, IntoFuture},
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use crate::{
    Error, Result, callbacks,
    group::{Driven, Inner},
};

mod later;

pub(crate) use later::Later;

/// The result of a call in the background.
type Ended<B> = Result<B, WorkError<B>>;

/// A call that runs in the background, and its buffer.
///
/// The call owns the buffer until [`Work::wait`] (or `.await`) gives it back, so the buffer can be neither
/// read nor freed too early. Collectives of a group run one after another, in the order of the calls. Sends
/// and receives run beside them, on a thread of the library. A thread that waits for a `Work` helps. Dropping
/// a `Work` does not stop its call, because the other ranks take part in it.
///
/// When the call fails, the buffer comes back with the error ([`WorkError`]). `?` turns a `WorkError` into an
/// [`Error`]. A call whose arguments cannot be used does not begin: see [`Begun`].
///
/// [`Work::on_complete`] passes the result to a function. A `Work` can also be awaited, in any executor. The
/// waker is called without any lock of this library: on the caller's thread that has ended the call, or, where nobody
/// waited for it, on the thread `drumline-wakers`.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{ProcessGroup, ReduceOp};
///
/// let group = ProcessGroup::alone();
/// let work = group.all_reduce_async(vec![1.0_f32; 1000], ReduceOp::Avg)?;
/// // ... compute something else ...
/// let averaged: Vec<f32> = work.wait()?;
/// assert_eq!(averaged.len(), 1000);
/// # Ok::<_, drumline::Error>(())
/// ```
#[must_use = "wait for it to get the buffer back, and to learn whether it succeeded"]
pub struct Work<B> {
    completion: Arc<Completion<B>>,
    group: Weak<Driven>,
    /// Whether it runs after all collectives that were called before.
    in_order: bool,
}

/// What every function returns that ends in `_async`: the call that has begun, or why it cannot begin.
///
/// It cannot begin if an argument cannot be used. Then nothing was sent to any peer, the group goes on, and the buffer
/// comes back with the error, which is an [`Argument`](crate::ErrorKind::Argument). All other errors come with the end
/// of the call, from the [`Work`]. Both are of one type, so one place can handle both:
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{ErrorKind, ProcessGroup, Work};
///
/// let group = ProcessGroup::alone();
/// let failed = group.broadcast_async(vec![1.0, 2.0], 3).and_then(Work::wait).unwrap_err();
/// assert_eq!(failed.error.kind(), ErrorKind::Argument);
/// assert_eq!(failed.buffer, Some(vec![1.0, 2.0]));
/// # Ok::<_, drumline::Error>(())
/// ```
pub type Begun<B> = Result<Work<B>, WorkError<B>>;

/// The place where a call leaves its result.
struct Completion<B> {
    state: Mutex<State<B>>,
    done: Condvar,
    ended: OnceLock<Instant>,
}

/// The call's end of a [`Work`]. If it is dropped without a result, the waiting thread gets an error.
pub(crate) struct Promise<B>(Arc<Completion<B>>);

impl<B> Promise<B> {
    pub(crate) fn complete(self, result: Ended<B>) {
        self.0.complete(result);
    }
}

impl<B> Drop for Promise<B> {
    fn drop(&mut self) {
        if !self.0.is_done() {
            self.0.complete(Err(WorkError::without_buffer(Error::argument(
                "wait",
                "the operation was given up before it ended",
            ))));
        }
    }
}

/// Why a call in the background failed, and its buffer.
///
/// The buffer belongs to the caller again: no late rank writes to it or reads it. Its contents are undefined,
/// because the call may have ended half-way; a call that could not begin has left it as it was.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{ProcessGroup, ReduceOp};
///
/// let group = ProcessGroup::alone();
/// group.abort();
/// let failed = group.all_reduce_async(vec![1.0_f32; 1000], ReduceOp::Avg)?.wait().unwrap_err();
/// assert!(failed.to_string().contains("abort"), "{failed}");
/// assert_eq!(failed.buffer.map(|buffer| buffer.len()), Some(1000));
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone)]
pub struct WorkError<B> {
    /// Why the call failed.
    pub error: Error,
    /// What the call would have given back. `None` if only success provides it: the rank that sent, for a
    /// receive from any rank.
    pub buffer: Option<B>,
}

impl<B> WorkError<B> {
    pub(crate) fn without_buffer(error: Error) -> WorkError<B> {
        WorkError { error, buffer: None }
    }
}

/// Gives the buffer of a call that has ended back, with the error if it failed.
pub(crate) fn give_back<B>(result: Result<()>, buffer: B) -> Result<B, WorkError<B>> {
    match result {
        Ok(()) => Ok(buffer),
        Err(error) => Err(WorkError { error, buffer: Some(buffer) }),
    }
}

impl<B> From<WorkError<B>> for Error {
    fn from(failed: WorkError<B>) -> Error {
        failed.error
    }
}

impl<B> fmt::Debug for WorkError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<B> fmt::Display for WorkError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for WorkError<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

enum State<B> {
    Pending(Listener<B>),
    Done(Ended<B>),
    Taken,
}

/// A listener that learns of the end, in addition to threads that wait.
enum Listener<B> {
    Nobody,
    Waker(Waker),
    /// Passes the result on to the thread of callbacks.
    Callback(Box<dyn FnOnce(Ended<B>) + Send>),
}

impl<B> Completion<B> {
    fn complete(&self, result: Ended<B>) {
        self.ended.get_or_init(Instant::now);
        let mut state = self.lock();
        let before = std::mem::replace(&mut *state, State::Taken);
        if let State::Pending(Listener::Callback(pass_on)) = before {
            drop(state);
            return pass_on(result);
        }
        *state = State::Done(result);
        drop(state);
        self.done.notify_all();
        if let State::Pending(Listener::Waker(waker)) = before {
            later::wake(waker);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_done(&self) -> bool {
        !matches!(*self.lock(), State::Pending(_))
    }

    fn take(&self) -> Option<Ended<B>> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Done(result) => Some(result),
            before => {
                *state = before;
                None
            }
        }
    }
}

impl<B> Work<B> {
    /// A new [`Work`], and the promise through which it gets its result.
    pub(crate) fn of(group: &Inner, in_order: bool) -> (Promise<B>, Work<B>) {
        let state = Mutex::new(State::Pending(Listener::Nobody));
        let completion =
            Arc::new(Completion { state, done: Condvar::new(), ended: OnceLock::new() });
        (Promise(completion.clone()), Work { completion, group: group.driven(), in_order })
    }

    /// Whether the call has ended, successfully or not.
    pub fn is_completed(&self) -> bool {
        self.completion.is_done()
    }

    /// Waits for the end of the call and gives the buffer back.
    ///
    /// # Errors
    ///
    /// As for the blocking call: [`Collective`](crate::ErrorKind::Collective) says which rank did what, and
    /// [`Poisoned`](crate::ErrorKind::Poisoned) that an earlier call has failed. The buffer comes back with the error.
    pub fn wait(self) -> Result<B, WorkError<B>> {
        match self.wait_until(None) {
            Ok(result) => result,
            Err(_) => Err(taken_already()),
        }
    }

    /// Waits at most for `timeout`. When the time is over, the call goes on, and the `Work` comes back to be
    /// waited for again.
    ///
    /// # Errors
    ///
    /// The outer error is the `Work`, when its call has not ended in time. The inner result is as for [`Work::wait`].
    pub fn wait_timeout(self, timeout: Duration) -> Result<Result<B, WorkError<B>>, Work<B>> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// Calls `callback` with the result when the call has ended, or at once if it has ended already.
    ///
    /// Callbacks run on a thread of their own, `drumline-callbacks`, one after another and without any lock
    /// of this library. They may start other calls, and hold up none. But they hold up each other, and are
    /// lost if the process ends before their turn. A panic in a callback is logged.
    ///
    /// # Errors
    ///
    /// [`Io`](crate::ErrorKind::Io) when the thread cannot be started. Then the callback is not called, and the call
    /// goes on. The callback gets the errors of [`Work::wait`].
    pub fn on_complete<F>(self, callback: F) -> Result<()>
    where
        B: Send + 'static,
        F: FnOnce(Result<B, WorkError<B>>) + Send + 'static,
    {
        let callbacks = callbacks::get()?;
        let pass_on = move |result: Ended<B>| {
            // This cannot fail, because the thread never ends.
            let _ = callbacks.send(Box::new(move || callback(result)));
        };
        let mut state = self.completion.lock();
        if let State::Pending(listener) = &mut *state {
            // The `Work` has not been polled: the types do not allow both.
            *listener = Listener::Callback(Box::new(pass_on));
            return Ok(());
        }
        drop(state);
        pass_on(self.completion.take().unwrap_or_else(|| Err(taken_already())));
        Ok(())
    }

    /// [`Work::wait`] that also returns when the call ended.
    pub(crate) fn wait_and_tell(self) -> Result<(B, Instant), WorkError<B>> {
        let completion = self.completion.clone();
        let buffer = self.wait()?;
        Ok((buffer, *completion.ended.get_or_init(Instant::now)))
    }

    fn wait_until(self, deadline: Option<Instant>) -> Result<Ended<B>, Work<B>> {
        loop {
            if let Some(result) = self.completion.take() {
                return Ok(result);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(self);
            }
            // Help, unless another thread drives the group or wants to. That thread completes this call, too.
            let helped = self
                .group
                .upgrade()
                .is_some_and(|group| group.help(deadline, &|| self.completion.is_done()));
            if !helped {
                if deadline.is_none()
                    && let Some(error) = self.hindrance()
                {
                    return Ok(Err(WorkError::without_buffer(error)));
                }
                self.sleep(deadline);
            }
        }
    }

    /// Why this thread cannot wait for the end of the call.
    pub(crate) fn hindrance(&self) -> Option<Error> {
        self.group.upgrade().filter(|_| self.in_order)?.hindrance()
    }

    /// Sleeps until the call has ended.
    fn sleep(&self, deadline: Option<Instant>) {
        let state = self.completion.lock();
        if !matches!(*state, State::Pending(_)) {
            return;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // The caller checks whether it was woken or timed out.
        match left {
            Some(left) => drop(self.completion.done.wait_timeout(state, left)),
            None => drop(self.completion.done.wait(state)),
        }
    }
}

impl<B> IntoFuture for Work<B> {
    type Output = Result<B, WorkError<B>>;
    type IntoFuture = WorkFuture<B>;

    fn into_future(self) -> WorkFuture<B> {
        WorkFuture { completion: self.completion }
    }
}

/// The future of a [`Work`]. The call goes on whether or not the future is polled.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{ProcessGroup, ReduceOp, Work, WorkFuture};
///
/// let group = ProcessGroup::alone();
/// let work: Work<Vec<u32>> = group.all_reduce_async(vec![1, 2], ReduceOp::Sum)?;
/// let sum: WorkFuture<Vec<u32>> = work.into_future(); // what .await begins with
/// # drop(sum);
/// # Ok::<_, drumline::Error>(())
/// ```
#[must_use = "futures do nothing unless they are awaited"]
pub struct WorkFuture<B> {
    completion: Arc<Completion<B>>,
}

impl<B> Future for WorkFuture<B> {
    type Output = Result<B, WorkError<B>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Ended<B>> {
        // Cloned and dropped without the lock, because both run code of the executor.
        let mut listener = Listener::Waker(context.waker().clone());
        let mut state = self.completion.lock();
        if let State::Pending(before) = &mut *state {
            std::mem::swap(before, &mut listener);
            drop(state);
            return Poll::Pending;
        }
        drop(state);
        Poll::Ready(self.completion.take().unwrap_or_else(|| Err(taken_already())))
    }
}

/// The error for a result that was taken before. The types rule that out, except for a future that is polled
/// after it was ready.
fn taken_already<B>() -> WorkError<B> {
    WorkError::without_buffer(Error::argument(
        "wait",
        "the result of this operation has been taken already",
    ))
}

impl<B> fmt::Debug for Work<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("is_completed", &self.is_completed()).finish_non_exhaustive()
    }
}

impl<B> fmt::Debug for WorkFuture<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkFuture").finish_non_exhaustive()
    }
}
