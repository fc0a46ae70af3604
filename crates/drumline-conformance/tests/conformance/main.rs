//! The oracle, and the library's own transports held against it.

#![allow(clippy::unwrap_used, clippy::panic)]

mod oracle;
mod programs;
mod transports;
