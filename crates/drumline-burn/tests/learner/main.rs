//! burn's `Learner` on many ranks.

#![allow(clippy::panic, clippy::unwrap_used)]

mod dealt;
mod devices;
mod equality;
mod files;
mod killed;
mod network;
mod processes;
mod refusals;
mod resumed;
mod shards;
mod stopping;
mod training;
