//! What the values are called by which the hosts of a job agree.

pub(super) const COUNT: &str = "count";
pub(super) const PLAN: &str = "plan";
pub(super) const HOST: &str = "host/";
pub(super) const REPORT: &str = "report/";
pub(super) const BEAT: &str = "beat/";
/// Where the ranks of a world meet.
pub(super) const WORLD: &str = "world/";

/// The key of a host or of a world.
pub(super) fn key(kind: &str, number: u64) -> String {
    format!("{kind}{number}")
}
