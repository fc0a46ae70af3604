//! Tables of text, and medians.

use std::time::{Duration, Instant};

/// The median time of `rounds` calls, after one that does not count.
pub(crate) fn median(
    rounds: usize,
    mut call: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Duration> {
    call()?;
    let mut times = Vec::new();
    for _ in 0..rounds.max(1) {
        let begun = Instant::now();
        call()?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// `4 KiB`
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

/// Gigabytes per second.
pub(crate) fn gb_s(bytes: usize, time: Duration) -> String {
    format!("{:.2}", bytes as f64 / time.as_secs_f64().max(1e-12) / 1e9)
}

/// A line of a table.
pub(crate) fn row(name: &str, cells: impl IntoIterator<Item = String>) {
    let cells: String = cells.into_iter().map(|cell| format!("{cell:>12}")).collect();
    println!("{name:>10}{cells}");
}
