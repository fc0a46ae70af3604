//! Collectives on devices, on a stand-in for the driver that has no hardware.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails this way")]

mod arguments;
mod collectives;
mod common;
mod drops;
mod each_call;
mod failures;
mod messages;
mod mixed;
mod mixed_calls;
mod nccl;
mod pieces;
mod rounds;
mod seeds;
mod streams;
mod sums;
