//! Key-value stores in which ranks meet.
//!
//! | store | users |
//! |---|---|
//! | [`HashStore`] | threads of one process |
//! | [`FileStore`] | processes that see one file; they may use torch |
//! | `EtcdStore` | hosts any of which may go; with the feature `etcd` |
//! | [`TcpStore`] | processes on any number of hosts; with a secret, or with torch |
//! | [`PrefixStore`] | users of a part of another store |
//!
//! ```
//! # use drumline_store as drumline;
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
//!
//! Every store has limits: a key has at most 8,191 bytes, a value 8 MiB (in etcd 1 MiB), and a call 131,072 keys and 32
//! MiB. A store holds at most [`BYTES_MAX`] bytes, unless it was opened with another limit. What torch calls each
//! method, and where ours differs: `docs/reference/stores.md`.

#[cfg(feature = "etcd")]
pub mod etcd;
mod file;
mod hash;
mod interface;
mod limits;
mod prefix;
pub mod tcp;
mod timeout;
mod values;

#[cfg(feature = "etcd")]
pub use self::etcd::{Cluster, EtcdStore};
pub use self::{
    file::FileStore,
    hash::HashStore,
    interface::{BYTES_MAX, DEFAULT_TIMEOUT, Store},
    prefix::PrefixStore,
    tcp::TcpStore,
};
pub use drumline_error::MissingKeys;
