//! The limit of descriptors for this process and its ranks.

use drumline::limit_of;
use rustix::process::{Resource, Rlimit, setrlimit};

/// The highest limit. Some programs close every number up to the limit, or keep a table of that length.
/// systemd sets the same limit.
const DESCRIPTORS_MAX: u64 = 512 * 1024;

/// Raises the soft limit of descriptors to the hard one, for this process and all processes that it starts. A
/// rank has one connection for each peer and group, so a few groups of 64 ranks exceed the usual 1,024.
///
/// The soft limit is that low for programs that call `select`, which cannot handle descriptors from 1,024 on.
/// With the low limit such a program would fail at its 1,024th descriptor. A hard limit (`ulimit -Hn 1024`)
/// brings this back.
pub(crate) fn raise() {
    if let Some(limit) = limit_of(Resource::Nofile)
        && let Some(current) = raised(limit)
    {
        // This needs no privilege. If it fails, the present limit may still suffice.
        let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit });
        tracing::debug!(?limit, ?raised, "raised the limit of descriptors to {current}");
    }
}

/// The new soft limit, if it must be raised. `None` in a [`Rlimit`] means no limit.
fn raised(limit: Rlimit) -> Option<u64> {
    let wanted = limit.maximum.unwrap_or(u64::MAX).min(DESCRIPTORS_MAX);
    limit.current.is_some_and(|current| current < wanted).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_rises_to_the_hard_one_but_not_without_end_and_never_falls() {
        let of = |current, maximum| raised(Rlimit { current, maximum });
        assert_eq!(of(Some(1_024), Some(4_096)), Some(4_096));
        assert_eq!(of(Some(1_024), Some(1_000_000_000)), Some(524_288));
        assert_eq!(of(Some(1_024), None), Some(524_288));
        assert_eq!(of(Some(4_096), Some(4_096)), None);
        assert_eq!(of(Some(1_000_000), None), None);
        assert_eq!(of(None, None), None);
    }
}
