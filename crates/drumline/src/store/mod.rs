//! Key-value stores through which ranks find each other.
//!
//! | store | its users are |
//! |---|---|
//! | [`HashStore`] | threads of one process |
//! | [`TcpStore`](tcp::TcpStore) | processes on any number of hosts: behind a secret, or torch's among them |
//! | [`PrefixStore`] | users of a part of one of the others |
//!
//! ```
//! use std::time::Duration;
//!
//! use drumline::store::{HashStore, Store};
//!
//! let store = HashStore::new();
//! store.set("address/0", b"10.0.0.1:4000")?;
//! assert_eq!(store.get("address/0")?, b"10.0.0.1:4000");
//! assert_eq!(store.add("ready", 1)?, 1);
//! let error = store.wait(&["ready", "address/1"], Duration::ZERO).unwrap_err();
//! assert!(error.to_string().contains("address/1"));
//! # Ok::<(), drumline::Error>(())
//! ```

mod hash;
mod prefix;
pub mod tcp;
mod values;

use std::{fmt, time::Duration};

use crate::Result;

pub use self::{hash::HashStore, prefix::PrefixStore};

/// How long [`Store::get`] waits unless told otherwise, as in torch.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// A small shared map from text keys to bytes, with waiting.
///
/// Ranks meet through one: they publish their addresses and wait for the others'. All methods
/// may be called from many threads; a call that waits never holds up another thread's call.
pub trait Store: fmt::Debug + Send + Sync {
    /// Sets `key` to `value` and wakes whoever waits for it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists, at most for [`Store::timeout`], and returns its value.
    fn get(&self, key: &str) -> Result<Vec<u8>>;

    /// Adds `amount` to the decimal number under `key` (absent counts as 0) and returns the sum.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Replaces the value of `key` by `desired` if it is `expected`, and returns the value that
    /// `key` has afterwards.
    ///
    /// An absent key is created when `expected` is empty; otherwise nothing is stored and
    /// `expected` comes back, as in torch.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Waits until all `keys` exist, at most for `timeout`.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Whether all `keys` exist now.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key` and tells whether it was there.
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// How long [`Store::get`] waits. 300 s unless set.
    fn timeout(&self) -> Duration;

    /// Sets how long [`Store::get`] waits.
    fn set_timeout(&self, timeout: Duration);
}
