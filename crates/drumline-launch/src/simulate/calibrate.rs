//! The prices of this machine: those with which replays take as long as measured runs.

use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use drumline_schedule::{Algorithm, price::PriceList, replay::replay};

use super::measure::{Run, Way, cores};
use crate::{Error, Result};

/// A price, and a run that it decides.
struct Fit {
    name: &'static str,
    run: Run,
}

/// Each price is found with the others as they are, the first ones first, so a run may depend on
/// prices that stand before it. Those which depend on each other are found in turns.
fn fits() -> Vec<Fit> {
    let two = |way, bytes: usize, algorithm| Run { ranks: 2, way, elements: bytes / 4, algorithm };
    let (direct, oneshot) = (Some("direct"), Some("shm-oneshot"));
    vec![
        Fit { name: "call_ps", run: Run { ranks: 1, ..two(Way::Staged, 8, None) } },
        Fit { name: "post_ps", run: two(Way::Staged, 0, None) },
        // More ranks than cores.
        Fit { name: "switch_ps", run: Run { ranks: 2 * cores(), ..two(Way::Staged, 0, None) } },
        Fit { name: "combine.cached_fs", run: two(Way::Registered, 256 << 10, None) },
        Fit { name: "combine.memory_fs", run: two(Way::Registered, 32 << 20, None) },
        Fit { name: "slot_byte_fs", run: two(Way::Staged, 128 << 10, oneshot) },
        Fit { name: "near.round_ps", run: two(Way::Unix, 8, Some("doubling")) },
        Fit { name: "near.byte.cached_fs", run: two(Way::Unix, 512 << 10, direct) },
        Fit { name: "near.byte.memory_fs", run: two(Way::Unix, 32 << 20, direct) },
        Fit { name: "far.round_ps", run: two(Way::Tcp, 8, Some("doubling")) },
        Fit { name: "far.byte.cached_fs", run: two(Way::Tcp, 512 << 10, direct) },
        Fit { name: "far.byte.memory_fs", run: two(Way::Tcp, 32 << 20, direct) },
    ]
}

/// How often the fits are gone through.
const TURNS: usize = 4;

/// Which part of the time of a short message is work at its ends; the rest is waiting. It cannot be
/// told apart with two ranks.
const WORK_SHARE: u64 = 3;

/// Measures this machine, each run for so long, and tells of it line by line. Where other programs run,
/// longer finds more moments in which all ranks have a core.
///
/// # Errors
///
/// What the library said.
pub(super) fn calibrate(budget: Duration, tell: &mut dyn FnMut(&str)) -> Result<PriceList> {
    let mut prices = PriceList::default();
    copies(&mut prices);
    let mut measured = Vec::new();
    for fit in fits() {
        let found = fit.run.measure(budget).map_err(Error::Measure)?;
        let Run { ranks, way, elements, .. } = fit.run;
        tell(&format!(
            "{ranks} ranks, {}, {} bytes, {}: {:.2} us",
            way.name(),
            4 * elements,
            found.algorithm,
            found.time.as_secs_f64() * 1e6
        ));
        let ps = found.time.as_nanos() as u64 * 1_000;
        measured.push((fit, found.algorithm, ps));
    }
    for _ in 0..TURNS {
        for (fit, algorithm, ps) in &measured {
            settle(&mut prices, fit, algorithm, *ps)?;
        }
    }
    Ok(prices)
}

/// Sets a price to the value with which the replay of its run takes so long, or as near as it comes.
fn settle(prices: &mut PriceList, fit: &Fit, algorithm: &str, ps: u64) -> Result<()> {
    let problem = |error: drumline_schedule::Error| Error::Simulate { problem: error.to_string() };
    let algorithm = Algorithm::find(fit.run.collective(), algorithm).map_err(problem)?;
    let time_with = |value: u64| {
        let mut prices = prices.clone();
        set(&mut prices, fit.name, value);
        let outcome = replay(&fit.run.cluster(&prices), &fit.run.operation(algorithm));
        outcome.map(|outcome| outcome.time_ps).map_err(problem)
    };
    // The smallest value that takes at least as long.
    let (mut low, mut high) = (0, VALUE_MAX);
    while low < high {
        let middle = low + (high - low) / 2;
        match time_with(middle)? < ps {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    set(prices, fit.name, low);
    Ok(())
}

/// A millisecond; a megabyte a second.
const VALUE_MAX: u64 = 1_000_000_000;

/// A round of a link stands for what a message takes, of which a part is work.
fn set(prices: &mut PriceList, name: &str, value: u64) {
    let link = match name {
        "near.round_ps" => &mut prices.near,
        "far.round_ps" => &mut prices.far,
        _ => {
            prices.set(name, value);
            return;
        }
    };
    link.message_ps = value / WORK_SHARE;
    link.round_ps = value - link.message_ps;
}

/// What memory does: copies by one thread, and by as many as there are cores.
fn copies(prices: &mut PriceList) {
    const CACHED: usize = 128 << 10;
    const LARGE: usize = 32 << 20;
    prices.copy.cached_fs = copied_byte_fs(CACHED, 200);
    prices.copy.memory_fs = copied_byte_fs(LARGE, 1).max(prices.copy.cached_fs);
    let threads = cores();
    let together: Vec<u64> = thread::scope(|scope| {
        let copying: Vec<_> =
            (0..threads).map(|_| scope.spawn(|| copied_byte_fs(LARGE, 1))).collect();
        copying.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let mean = together.iter().sum::<u64>() / together.len().max(1) as u64;
    // Each byte is read, and fetched to be overwritten, and written.
    prices.memory_byte_fs = (mean / 3 / threads as u64).max(1);
}

/// Femtoseconds for a byte that is copied, the fastest of some rounds.
fn copied_byte_fs(bytes: usize, copies: usize) -> u64 {
    let (source, mut target) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    let mut best = u128::MAX;
    for _ in 0..9 {
        let began = Instant::now();
        for _ in 0..copies {
            target.copy_from_slice(black_box(&source));
            black_box(&mut target);
        }
        best = best.min(began.elapsed().as_nanos());
    }
    (best * 1_000_000 / (bytes * copies) as u128) as u64
}

#[cfg(test)]
mod tests {
    use drumline_schedule::price::{Link, Rate};

    use super::*;

    /// Runs that take exactly what a list of prices says are fitted by that list.
    #[test]
    fn fits_find_the_prices_of_a_machine_that_is_replayed() {
        let byte = Rate { cached_fs: 220_000, memory_fs: 420_000 };
        let near = Link { round_ps: 3_000_000, message_ps: 1_500_000, byte };
        let truth = PriceList { near, post_ps: 230_000, call_ps: 910_000, ..PriceList::default() };
        let mut found = PriceList {
            copy: truth.copy,
            memory_byte_fs: truth.memory_byte_fs,
            ..PriceList::default()
        };
        let wanted = ["call_ps", "post_ps", "near.round_ps", "near.byte.cached_fs"];
        for fit in fits().iter().filter(|fit| wanted.contains(&fit.name)) {
            let name = match (fit.run.algorithm, fit.run.elements) {
                (Some(name), _) => name,
                (None, 0) => "shm",
                (None, _) => "shm-oneshot",
            };
            let algorithm = Algorithm::find(fit.run.collective(), name).unwrap();
            let cluster = fit.run.cluster(&truth);
            let ps = replay(&cluster, &fit.run.operation(algorithm)).unwrap().time_ps;
            settle(&mut found, fit, name, ps).unwrap();
        }
        let near = |one: u64, other: u64| one.abs_diff(other) <= other / 1_000;
        assert!(near(found.call_ps, truth.call_ps), "{found}");
        assert!(near(found.post_ps, truth.post_ps), "{found}");
        assert!(near(found.near.round_ps, truth.near.round_ps), "{found}");
        assert!(near(found.near.byte.cached_fs, truth.near.byte.cached_fs), "{found}");
    }
}
