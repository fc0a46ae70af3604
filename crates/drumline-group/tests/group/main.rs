//! Groups whose ranks are threads of one process, over every kind of connection.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod asynchrony;
mod backend;
mod collectives;
mod errors;
mod given_back;
mod group;
mod groups;
mod guard;
mod handlers;
mod late;
mod meddler;
mod metrics;
mod mismatch;
mod objects;
mod operators;
mod points;
mod prices;
mod same_bits;
mod slices;

use drumline_testing as common;
