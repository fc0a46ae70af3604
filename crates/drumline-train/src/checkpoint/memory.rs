//! How much more memory a process can take.

use std::{fs, path::Path};

const CGROUPS: &str = "/sys/fs/cgroup";

/// The memory in bytes that the system can still give: what is available on the machine, limited by the
/// control groups (version 2) of this process. `None` if the system does not tell.
pub(super) fn available() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| of_machine(&text));
    machine.into_iter().chain(cgroup_limit()).min()
}

/// The available memory that `/proc/meminfo` tells, in bytes.
fn of_machine(text: &str) -> Option<u64> {
    let entry = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let kib = entry("MemAvailable:")?.saturating_add(entry("SwapFree:").unwrap_or(0));
    Some(kib.saturating_mul(1024))
}

/// The lowest limit of the control groups around this process.
fn cgroup_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let limit = |group: &Path| -> Option<u64> {
        let file = Path::new(CGROUPS).join(group).join("memory.max");
        fs::read_to_string(file).ok()?.trim().parse().ok() // It may say "max".
    };
    Path::new(own).ancestors().filter_map(limit).min()
}

#[test]
fn the_lines_of_the_system_are_read() {
    let text = "MemTotal: 900 kB\nMemAvailable:     100 kB\nSwapFree:   28 kB\n";
    assert_eq!(of_machine(text), Some(128 * 1024));
    assert_eq!(of_machine("MemTotal: 900 kB\n"), None);
    assert!(available().is_none_or(|bytes| bytes > 1 << 20));
}
