//! Ranks that are processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;

mod deaths;
mod guard;
mod rendezvous;
mod start;
mod start_deaths;
