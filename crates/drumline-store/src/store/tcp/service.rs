//! Threads that serve until their owner drops them.

use std::{io, net::Shutdown, os::unix::net::UnixStream, thread};

use drumline_shm::{OwnThread, named};

/// A thread that serves. It ends when this is dropped; in a fork of this process it goes on.
#[derive(Debug)]
pub(super) struct Service {
    name: &'static str,
    /// Shut down to end the thread. A fork may hold a copy of this end, so closing it would not wake the thread.
    stop: UnixStream,
    /// Empty once it is joined.
    thread: Option<OwnThread<()>>,
}

impl Service {
    /// Starts the thread `name`. It does what `prepare` returns, and ends when the stream that `prepare` gets is
    /// readable.
    pub(super) fn start<F: FnOnce() + Send + 'static>(
        name: &'static str,
        prepare: impl FnOnce(UnixStream) -> io::Result<F>,
    ) -> io::Result<Service> {
        let (stop, stopped) = UnixStream::pair().map_err(named("socketpair"))?;
        let serve = prepare(stopped)?;
        let thread =
            thread::Builder::new().name(name.into()).spawn(serve).map_err(named("clone3"))?;
        Ok(Service { name, stop, thread: Some(OwnThread::new(thread)) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if thread.is_here() {
            let _ = self.stop.shutdown(Shutdown::Both);
        }
        if thread.join().is_some_and(|ended| ended.is_err()) {
            tracing::error!(thread = self.name, "a thread of a store has panicked");
        }
    }
}
