//! The ways to wait for a [`Work`].

use std::{
    pin::pin,
    sync::{Arc, Mutex, PoisonError, mpsc},
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::Duration,
};

use drumline::Work;

/// A way to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// [`Work::wait`].
    Blocking,
    /// [`Work::wait_timeout`], again and again.
    InTurns,
    /// As a future.
    Await,
    /// [`Work::on_complete`].
    Callback,
}

impl Wait {
    pub(crate) const ALL: [Wait; 4] = [Wait::Blocking, Wait::InTurns, Wait::Await, Wait::Callback];

    /// Waits in this way.
    pub(crate) fn of<B: Send + 'static>(self, mut work: Work<B>) -> Result<B, String> {
        let result = match self {
            Wait::Blocking => work.wait(),
            Wait::InTurns => loop {
                match work.wait_timeout(Duration::from_millis(1)) {
                    Ok(result) => break result,
                    Err(goes_on) => work = goes_on,
                }
            },
            Wait::Await => block_on(work),
            Wait::Callback => {
                // The channel carries no result: a channel for each type takes long to compile.
                let (called, wait) = mpsc::channel::<()>();
                let slot = Arc::new(Mutex::new(None));
                let filled = Arc::clone(&slot);
                let callback = move |result| {
                    *filled.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                    let _ = called.send(());
                };
                work.on_complete(callback).map_err(|error| error.to_string())?;
                wait.recv().map_err(|_| "the callback was never called".to_owned())?;
                let result = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
                result.ok_or("the callback got no result")?
            }
        };
        result.map_err(|error| error.to_string())
    }
}

/// The smallest executor.
fn block_on<F: IntoFuture>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future.into_future());
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
