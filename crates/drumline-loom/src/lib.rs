//! `tests/handoff.rs`: the threads around the lane of a group. `tests/flags.rs`: ranks that post and sleep.
