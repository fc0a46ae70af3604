//! The backend `hub` in everything that a backend serves.

#![allow(clippy::unwrap_used, clippy::panic)]

mod conformance;
mod faults;
mod processes;
mod training;
