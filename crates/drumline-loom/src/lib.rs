//! `tests/handoff.rs`: the threads around the lane of a group. `drumline-shm/loom/flags.rs`: ranks that post and
//! sleep.
