//! The program as a user starts it: alone, as a job of several processes, and resumed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod alone;
mod deaths;
mod job;
mod resume;
