//! Ranks that are processes, each with a stand-in for a device of its own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails this way")]

mod deaths;
mod hosts;
mod job;
mod survivors;
