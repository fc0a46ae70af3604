//! See `tests/handoff.rs`.
