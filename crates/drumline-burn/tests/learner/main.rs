//! burn's `Learner` on many ranks.

#![allow(clippy::panic, clippy::unwrap_used)]

mod dealt;
mod equality;
mod files;
mod network;
mod processes;
mod refusals;
mod stopping;
mod training;
