//! Connections over TCP and Unix sockets, and which of them are accepted.
//!
//! | module | what it holds |
//! |---|---|
//! | [`stream`] | a connection: TCP or Unix |
//! | [`Endpoint`] | an address to listen on, as text: `tcp://host:port`, `unix:@name` |
//! | [`gate`] | a listener that accepts only ends that prove themselves |
//! | [`call`] | opens a connection to a gate |
//! | [`dial`] | the same without blocking |
//! | `owner` | which user is at the other end of a connection on loopback |
//! | `warnings` | limits how often strangers make this process write to its log |
//! | `pacing` | the congestion control of connections that stay on this host |
//! | [`sign`] | whether processes live, as their sockets show |
//! | [`interface`] | addresses of this machine's network interfaces |
//! | [`site`] | where a process listens that others call by a name |

pub mod call;
pub mod dial;
mod endpoint;
pub mod gate;
pub mod interface;
mod owner;
mod pacing;
pub mod poll;
mod port;
pub mod sign;
pub mod site;
pub mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod warnings;

pub use endpoint::Endpoint;
pub use port::free_port;

use std::time::{Duration, Instant};

use drumline_shm::named;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

/// Waits until one of `interests` is ready, at most until `deadline`. Waking early does no harm:
/// all callers look again.
pub fn sleep_until_ready(interests: &mut [PollFd<'_>], deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    // A day at a time keeps the conversion from overflowing.
    let left = left.min(Duration::from_secs(86_400));
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(interests, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => tracing::warn!(error = %named("ppoll")(error), "poll failed"),
    }
}

/// Waits until `descriptor` can be read or written without blocking.
pub fn sleep_until(descriptor: &impl std::os::fd::AsFd, flags: PollFlags, deadline: Instant) {
    sleep_until_ready(&mut [PollFd::new(descriptor, flags)], deadline);
}
