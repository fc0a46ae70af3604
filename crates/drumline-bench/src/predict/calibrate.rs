//! The prices of this host, with which replays take as long as measured runs.

use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use drumline_inspect::replay::replay_in_a_row;
use drumline_schedule::{
    Algorithm,
    price::{PriceList, Rate},
};

use super::runs::{Found, Run, Way, cores, measure_all};
use crate::{Error, Result};

/// A price, and a run whose time depends on it.
struct Fit {
    name: &'static str,
    run: Run,
}

/// Each price is fitted while all other prices stay as they are. A run may depend on prices that stand
/// before its own. Several turns fit prices that depend on each other.
fn fits() -> Vec<Fit> {
    let two = |way, bytes: usize, algorithm| Run { ranks: 2, way, elements: bytes / 4, algorithm };
    // More ranks than cores, and more than two.
    let ranks = (2 * cores()).max(4);
    let crowded = |way, bytes: usize| Run { ranks, ..two(way, bytes, None) };
    let (direct, doubling) = (Some("direct"), Some("doubling"));
    vec![
        Fit { name: "call_ps", run: Run { ranks: 1, ..two(Way::Staged, 8, None) } },
        Fit { name: "post_ps", run: two(Way::Staged, 0, None) },
        Fit { name: "touch_ps", run: two(Way::Staged, 8, None) },
        Fit { name: "switch_ps", run: crowded(Way::Staged, 0) },
        Fit { name: "combine.cached_fs", run: two(Way::Registered, 256 << 10, None) },
        Fit { name: "combine.memory_fs", run: two(Way::Registered, 32 << 20, None) },
        Fit { name: "cache_bytes", run: two(Way::Registered, 16 << 20, None) },
        Fit { name: "slot_byte_fs", run: two(Way::Staged, 128 << 10, Some("shm-oneshot")) },
        Fit { name: "shared_slot_byte_fs", run: crowded(Way::Staged, 256 << 10) },
        // A message costs waiting and work. A run of two ranks gives the sum of both; where ranks wait
        // for a core, the cost is mostly work.
        Fit { name: "near.round_ps", run: two(Way::Unix, 8, doubling) },
        Fit { name: "near.byte.cached_fs", run: two(Way::Unix, 512 << 10, direct) },
        Fit { name: "near.byte.memory_fs", run: two(Way::Unix, 32 << 20, direct) },
        Fit { name: "near.message_ps", run: crowded(Way::Unix, 8) },
        Fit { name: "far.round_ps", run: two(Way::Tcp, 8, doubling) },
        Fit { name: "far.byte.cached_fs", run: two(Way::Tcp, 512 << 10, direct) },
        Fit { name: "far.byte.memory_fs", run: two(Way::Tcp, 32 << 20, direct) },
        Fit { name: "far.message_ps", run: crowded(Way::Tcp, 8) },
    ]
}

/// How often all prices are fitted in turn.
const TURNS: usize = 6;

/// Measures this host, each run for about `budget`, and passes a line for each run to `tell`. The same
/// passes measure the runs in `beside`. Beside other programs a longer budget finds more moments in
/// which all ranks have a core.
pub(super) fn calibrate(
    beside: &[Run],
    budget: Duration,
    tell: &mut dyn FnMut(&str),
) -> Result<(PriceList, Vec<Found>)> {
    let fits = fits();
    let runs: Vec<Run> = fits.iter().map(|fit| fit.run).chain(beside.iter().copied()).collect();
    let before = Copies::measure();
    let mut found = measure_all(&runs, budget).map_err(Error::Measure)?;
    let beside = found.split_off(fits.len());
    for (Run { ranks, way, elements, .. }, Found { algorithm, time }) in runs.iter().zip(&found) {
        tell(&format!(
            "{ranks} ranks, {}, {} bytes, {algorithm}: {:.2} us",
            way.name(),
            4 * elements,
            time.as_secs_f64() * 1e6
        ));
    }
    let mut prices = PriceList::default();
    before.fastest(Copies::measure()).set(&mut prices);
    for _ in 0..TURNS {
        for (fit, found) in fits.iter().zip(&found) {
            settle(&mut prices, fit, &found.algorithm, found.time.as_nanos() as u64 * 1_000)?;
        }
    }
    Ok((prices, beside))
}

/// Sets a price to the value at which the replay of its run takes `ps`, or comes nearest to it.
fn settle(prices: &mut PriceList, fit: &Fit, algorithm: &str, ps: u64) -> Result<()> {
    let problem = |error: drumline_schedule::Error| Error::Usage(error.to_string());
    let algorithm = Algorithm::find(fit.run.collective(), algorithm).map_err(problem)?;
    let time_with = |value: u64| {
        let mut prices = prices.clone();
        set(&mut prices, fit.name, value);
        let outcome = replay_in_a_row(&fit.run.cluster(&prices), &fit.run.operation(algorithm));
        outcome.map(|outcome| outcome.time_ps).map_err(problem)
    };
    // Finds the smallest value whose replay takes at least `ps`. For the size of caches, a larger value gives
    // a shorter replay, so it finds the smallest value whose replay takes at most `ps`.
    let (mut low, mut high) = (0, VALUE_MAX);
    let rises = time_with(low)? < time_with(high)?;
    while low < high {
        let middle = low + (high - low) / 2;
        match (time_with(middle)? < ps) == rises {
            true => low = middle + 1,
            false => high = middle,
        }
    }
    set(prices, fit.name, low);
    Ok(())
}

/// The largest price: 1 ms, or 1 us for a byte (1 MB/s), or caches of 1 GB.
const VALUE_MAX: u64 = 1_000_000_000;

/// Sets a price. The sum of waiting and work of a message stays as it is when its work is set, and
/// memory never becomes faster than caches.
fn set(prices: &mut PriceList, name: &str, value: u64) {
    let link = match name {
        "combine.memory_fs" => return set_memory(&mut prices.combine, value),
        "near.byte.memory_fs" => return set_memory(&mut prices.near.byte, value),
        "far.byte.memory_fs" => return set_memory(&mut prices.far.byte, value),
        "near.message_ps" => &mut prices.near,
        "far.message_ps" => &mut prices.far,
        _ => {
            prices.set(name, value);
            return;
        }
    };
    let whole_ps = link.round_ps + link.message_ps;
    link.message_ps = value.min(whole_ps);
    link.round_ps = whole_ps - link.message_ps;
}

fn set_memory(rate: &mut Rate, value: u64) {
    rate.memory_fs = value.max(rate.cached_fs);
}

/// The time to copy a byte, in femtoseconds.
struct Copies {
    /// In the caches.
    cached: u64,
    /// In memory, by one thread.
    alone: u64,
    /// In memory, by as many threads as there are cores.
    together: u64,
}

impl Copies {
    fn measure() -> Copies {
        const CACHED: usize = 128 << 10;
        const LARGE: usize = 32 << 20;
        let together: Vec<u64> = thread::scope(|scope| {
            let copying: Vec<_> =
                (0..cores()).map(|_| scope.spawn(|| copied_byte_fs(LARGE, 1))).collect();
            copying.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        Copies {
            cached: copied_byte_fs(CACHED, 200),
            alone: copied_byte_fs(LARGE, 1),
            together: together.iter().sum::<u64>() / together.len().max(1) as u64,
        }
    }

    fn fastest(self, other: Copies) -> Copies {
        Copies {
            cached: self.cached.min(other.cached),
            alone: self.alone.min(other.alone),
            together: self.together.min(other.together),
        }
    }

    fn set(&self, prices: &mut PriceList) {
        prices.copy = Rate { cached_fs: self.cached, memory_fs: self.alone.max(self.cached) };
        // A copied byte crosses memory three times: it is read, its target is fetched, and written.
        prices.memory_byte_fs = (self.together / 3 / cores() as u64).max(1);
    }
}

/// Femtoseconds to copy a byte, in the fastest of nine rounds.
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
    use drumline_schedule::price::Link;

    use super::*;

    /// If runs take exactly as long as their replays with a list of prices, the fits find that list.
    #[test]
    fn fits_find_the_prices_of_a_machine_that_is_replayed() {
        let byte = Rate { cached_fs: 220_000, memory_fs: 420_000 };
        let near = Link { round_ps: 3_000_000, message_ps: 1_500_000, byte };
        let truth = PriceList {
            near,
            post_ps: 230_000,
            call_ps: 910_000,
            touch_ps: 20_000,
            switch_ps: 3_100_000,
            cache_bytes: 10_000_000,
            ..PriceList::default()
        };
        let mut found = PriceList {
            copy: truth.copy,
            combine: truth.combine,
            memory_byte_fs: truth.memory_byte_fs,
            ..PriceList::default()
        };
        let wanted = [
            "call_ps",
            "post_ps",
            "touch_ps",
            "switch_ps",
            "cache_bytes",
            "near.round_ps",
            "near.message_ps",
            "near.byte.cached_fs",
        ];
        let fits: Vec<Fit> = fits().into_iter().filter(|fit| wanted.contains(&fit.name)).collect();
        for fit in fits.iter().cycle().take(TURNS * fits.len()) {
            let name = match (fit.run.algorithm, fit.run.elements, fit.run.way) {
                (Some(name), ..) => name,
                (None, 0, _) => "shm",
                (None, _, Way::Unix) => "doubling",
                (None, _, Way::Registered) => "shm-push",
                (None, ..) => "shm-oneshot",
            };
            let algorithm = Algorithm::find(fit.run.collective(), name).unwrap();
            let cluster = fit.run.cluster(&truth);
            let ps = replay_in_a_row(&cluster, &fit.run.operation(algorithm)).unwrap().time_ps;
            settle(&mut found, fit, name, ps).unwrap();
        }
        for name in wanted {
            let [found, truth] = [&found, &truth].map(|prices| value_of(prices, name));
            assert!(found.abs_diff(truth) <= truth / 100, "{name}: {found}, and not {truth}");
        }
    }

    fn value_of(prices: &PriceList, name: &str) -> u64 {
        let text = prices.to_string();
        let entries = drumline_schedule::price::entries(&text).unwrap();
        entries.iter().find(|entry| entry.name == name).unwrap().value
    }
}
