use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::algorithm::{ALGORITHMS, Algorithm, Cost, Lengths};
use crate::collective::Collective;
use crate::extent::Counts;
use crate::price::{Choices, ElementKind, Prices, price};
use crate::schedule::MemoryUse;
use crate::situation::{Situation, eligible};
use crate::step::Step;

/// Chooses the algorithms of one group by prices that all its ranks have agreed on.
///
/// All ranks that ask about the same situation get the same answer. The topology must be the same in
/// every situation: a chooser remembers its choices over links.
#[derive(Debug)]
pub struct Chooser {
    prices: Prices,
    over_links: HashMap<(Collective, ElementKind), Choices>,
}

impl Default for Chooser {
    fn default() -> Chooser {
        Chooser::by(Prices::TCP)
    }
}

/// Largest data for which one round, in which every rank reads every slot whole, beats two rounds in which
/// each rank reads only its part. A constant and not a measurement, so that all ranks agree.
const ONE_SHOT_BYTES: usize = 32 * 1024;

/// The same for narrow elements: widening them takes longer than reading them.
const ONE_SHOT_NARROW_BYTES: usize = 8 * 1024;

/// What a post and the waits for it take, in picoseconds.
const POST_PS: u128 = 1_000_000;

/// What a byte takes that a host collects from its ranks or lays out for them, in picoseconds: it is copied twice.
const COPIED_BYTE_PS: u128 = 200;

impl Chooser {
    /// Chooses by these prices.
    pub fn by(prices: Prices) -> Chooser {
        Chooser { prices, over_links: HashMap::new() }
    }

    /// The prices of links.
    pub fn prices(&self) -> &Prices {
        &self.prices
    }

    /// The algorithm for this situation, or `None` where none is eligible. On one host an eligible algorithm in shared
    /// memory wins over all algorithms over links; between hosts, one that is not dearer. There the best for any data, the
    /// best for short data and the best over links are compared.
    pub fn choose(&mut self, situation: &Situation<'_>) -> Option<&'static Algorithm> {
        let Situation { topology, elements, kind, .. } = *situation;
        let shared = || {
            let staged = ALGORITHMS.iter().filter(|row| row.memory != MemoryUse::Private);
            staged.filter(|row| eligible(row, situation).is_ok())
        };
        if topology.is_one_host() {
            // Prices leave shared memory out, and there is nothing else.
            let preferred = shared().min_by_key(|row| preference(row, situation));
            return preferred.or_else(|| self.choose_over_links(situation));
        }
        let price_of = |row: &Algorithm| match row.collective.has_root() {
            true => self.price_between_hosts(row, situation),
            false => price(row, topology, elements, kind, &self.prices),
        };
        let is_long = elements.saturating_mul(kind.bytes) >= situation.long_bytes.unwrap_or(0);
        let best = |is_short: bool| {
            let rows = shared()
                .filter(|row| (row.meant_for == Lengths::Short) == is_short)
                .filter(|row| is_long || row.meant_for != Lengths::Long);
            rows.min_by_key(|row| (price_of(row), preference(row, situation)))
        };
        let shared = [best(false), best(true)].into_iter().flatten();
        let over_links = match situation.rounds_on_hosts() {
            true => None, // no algorithm over links does
            false => self.choose_over_links(situation),
        };
        let rows: Vec<_> = shared.chain(over_links).collect();
        match rows[..] {
            [only] => Some(only),
            _ => rows.into_iter().min_by_key(|row| self.price_between_hosts(row, situation)),
        }
    }

    /// The price of an algorithm whose rounds on a host are no rounds between hosts.
    ///
    /// A [`Cost`] knows only what ranks send. A root may receive from all others, so the price looks at rank 0 as the
    /// root. Where data is copied to be sent in fewer messages, these copies are what long data costs more.
    fn price_between_hosts(&self, row: &Algorithm, situation: &Situation<'_>) -> u128 {
        let Situation { topology, elements, kind, .. } = *situation;
        let cost = (row.cost)(topology, 0, elements);
        let width = row.travelling(kind.bytes, kind.sum_bytes);
        if row.memory == MemoryUse::Private && !row.collective.has_root() {
            return self.prices.of(cost, width);
        }
        let Ok(first) = row.schedule(topology, 0, 0) else { return u128::MAX };
        let counts = Counts::Even(elements);
        let (messages, received) = first.received(&counts);
        let on_host = rounds_on_host(&first.steps);
        let between_hosts = match row.hops {
            Some(hops) => hops(topology),
            None => cost.rounds.saturating_sub(on_host).max(usize::from(cost.messages > 0)),
        };
        let cost = Cost {
            rounds: between_hosts,
            messages: cost.messages.max(messages),
            elements: cost.elements.max(received),
            ..cost
        };
        let copied = match row.meant_for {
            Lengths::Short => first.copied(&counts) as u128 * width as u128,
            Lengths::Any | Lengths::Long => 0,
        };
        self.prices.of(cost, width) + on_host as u128 * POST_PS + copied * COPIED_BYTE_PS
    }

    fn choose_over_links(&mut self, situation: &Situation<'_>) -> Option<&'static Algorithm> {
        let Situation { collective, topology, elements, kind, uneven, .. } = *situation;
        if uneven {
            let serves = |row: &&Algorithm| {
                row.memory == MemoryUse::Private && eligible(row, situation).is_ok()
            };
            return ALGORITHMS.iter().find(serves);
        }
        let choices = match self.over_links.entry((collective, kind)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                new.insert(Choices::new(collective, topology, kind, &self.prices)?)
            }
        };
        Some(choices.algorithm(elements))
    }
}

/// How often a rank waits for its neighbours or they for it. A post and the waits after it are one round.
fn rounds_on_host(steps: &[Step]) -> usize {
    let is_post = |step: &&Step| matches!(step, Step::Post);
    let first = steps.iter().find(|step| is_post(step) || matches!(step, Step::Wait { .. }));
    let waits_first = first.is_some_and(|step| !is_post(&step));
    steps.iter().filter(is_post).count() + usize::from(waits_first)
}

/// The place of an algorithm among those in shared memory that have the same price. The lowest is taken.
fn preference(row: &Algorithm, situation: &Situation<'_>) -> u8 {
    let Situation { collective, topology, kind, elements, .. } = *situation;
    let bytes = elements.saturating_mul(kind.bytes);
    let long_bytes = situation.long_bytes.unwrap_or(0);
    // Two ranks move as much in one round (read a slot) as in two (read half a slot, and copy half).
    let one_shot = match situation.is_narrow() {
        true => bytes <= ONE_SHOT_NARROW_BYTES,
        false => bytes <= ONE_SHOT_BYTES || topology.world_size == 2,
    };
    let in_place = bytes > in_place_from(collective, topology.world_size, long_bytes);
    match (row.memory, row.meant_for) {
        (_, Lengths::Long) if bytes < long_bytes => u8::MAX,
        // On one host an algorithm without incomplete sums need not widen, which is faster.
        _ if topology.is_one_host() && situation.widens(row) => u8::MAX,
        (MemoryUse::Registered, Lengths::Long) if in_place => 0,
        (MemoryUse::Registered, _) if in_place => 1,
        (MemoryUse::Registered, _) => 6,
        (_, Lengths::Long) => 2,
        (_, Lengths::Short) if one_shot => 3,
        (_, Lengths::Any) => 4,
        (_, Lengths::Short) => 5,
    }
}

/// Smallest block, in bytes, for which working in place beats copying through slots (in place costs one
/// more round of posts). Parts of `long_bytes`, which is 1 MiB by default.
fn in_place_from(collective: Collective, ranks: usize, long_bytes: usize) -> usize {
    match collective {
        Collective::AllReduce => long_bytes / 512,
        Collective::Broadcast => long_bytes / 512 * ranks * ranks,
        // Memory that neighbours have read since is slow to write, unless it has left their caches.
        Collective::AllGather => long_bytes / 2 * ranks,
        Collective::AllToAll => long_bytes / 2,
        Collective::ReduceScatter => long_bytes / 2048 * ranks * ranks,
        // The root makes all copies either way, and most of the data comes out of its cache.
        Collective::Gather if ranks > 2 => long_bytes,
        _ => long_bytes / 512 * ranks,
    }
}
