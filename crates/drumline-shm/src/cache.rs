//! The size of the cache.

/// The size in bytes of the largest cache of core 0, which other cores may share. 32 MiB if the system does
/// not tell.
pub fn cache_bytes() -> usize {
    const UNKNOWN: usize = 32 << 20;
    let Ok(levels) = std::fs::read_dir("/sys/devices/system/cpu/cpu0/cache") else {
        return UNKNOWN;
    };
    let size = |level: std::fs::DirEntry| std::fs::read_to_string(level.path().join("size")).ok();
    let sizes = levels.filter_map(|level| in_bytes(&size(level.ok()?)?));
    sizes.max().unwrap_or(UNKNOWN)
}

/// Parses a size as the system writes it, such as `512K`.
fn in_bytes(text: &str) -> Option<usize> {
    let text = text.trim();
    let (number, unit) = match text.strip_suffix(['K', 'M']) {
        Some(number) if text.ends_with('K') => (number, 1 << 10),
        Some(number) => (number, 1 << 20),
        None => (text, 1),
    };
    number.parse::<usize>().ok()?.checked_mul(unit).filter(|bytes| *bytes > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_system_writes_them() {
        assert_eq!(in_bytes("32768K\n"), Some(32 << 20));
        assert_eq!(in_bytes("2M"), Some(2 << 20));
        assert_eq!(in_bytes("65536"), Some(1 << 16));
        for wrong in ["", "K", "0K", "many", "-1K", "99999999999999999999K"] {
            assert_eq!(in_bytes(wrong), None, "{wrong:?}");
        }
    }
}
