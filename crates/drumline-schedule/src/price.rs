//! Which algorithm to take over links: a price for each, and the cheapest for every length.
//!
//! All algorithms add in the same order, so the choice changes the time and nothing else, and
//! a rough price will do. But it must be the same on all ranks: it depends on nothing but its
//! arguments, and is computed in integers. Where the prices come from is a matter of the caller:
//! [`PriceList`] is what is known of a machine and its network.

mod list;

pub use list::{Entry, Link, ParseError, PriceList, Rate, entries, unknown};

use crate::algorithm::{ALGORITHMS, Algorithm, Collective, Cost, MemoryUse};
use crate::topology::Topology;

/// What the parts of a [`Cost`] cost, in picoseconds.
///
/// ```
/// use drumline_schedule::{Cost, price::Prices};
///
/// let prices = Prices { round_ps: 10, message_ps: 1, byte_ps: 2, combined_byte_ps: 3 };
/// let cost = Cost { rounds: 2, messages: 4, elements: 5, ..Cost::default() };
/// assert_eq!(prices.of(cost, 4), 2 * 10 + 4 * 1 + 5 * 4 * 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prices {
    /// A round: from a send to what the receiver does next.
    pub round_ps: u64,
    /// A message: what sender and receiver do for each, however long it is.
    pub message_ps: u64,
    /// A byte on the wire.
    pub byte_ps: u64,
    /// A byte that is combined into another.
    pub combined_byte_ps: u64,
}

impl Prices {
    /// TCP between processes of one host. Measured with what is `drumline bench` now, on two
    /// shared cores of a virtual machine, the best of many: 7 us for 8 bytes between 2 ranks;
    /// 3 GB/s, combining included, from 128 KiB to 1 MiB. The price of a message is two system calls' and not measured
    /// by itself; that of combining is 10 GB/s, from memory to memory.
    pub const TCP: Prices =
        Prices { round_ps: 7_000_000, message_ps: 2_000_000, byte_ps: 300, combined_byte_ps: 100 };

    /// The price of an operation on elements of so many bytes, in picoseconds; that of shared
    /// memory left out.
    ///
    /// ```
    /// use drumline_schedule::{Cost, price::Prices};
    ///
    /// let cost =
    ///     Cost { rounds: 1, messages: 1, elements: 1_000, combined: 1_000, ..Cost::default() };
    /// assert_eq!(Prices::TCP.of(cost, 4), 10_600_000);
    /// ```
    pub fn of(&self, cost: Cost, element_bytes: usize) -> u128 {
        let Cost { rounds, messages, elements, combined, shared_elements: _ } = cost;
        let of = |count: usize, ps: u64| count as u128 * u128::from(ps);
        of(rounds, self.round_ps)
            + of(messages, self.message_ps)
            + of(elements, self.byte_ps) * element_bytes as u128
            + of(combined, self.combined_byte_ps) * element_bytes as u128
    }
}

/// What has to be known of an element type.
///
/// ```
/// use drumline_schedule::price::ElementKind;
///
/// let bf16 = ElementKind { bytes: 2, sum_bytes: 4 };
/// assert!(bf16.sum_bytes > bf16.bytes); // partial sums travel as f32
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ElementKind {
    /// Its width.
    pub bytes: usize,
    /// The width that it is summed in, more than its own for narrow floats (f16, bf16). Partial
    /// sums travel in this width, because they must not be rounded.
    pub sum_bytes: usize,
}

impl ElementKind {
    /// The width of what an algorithm sends.
    pub(crate) fn travelling(self, row: &Algorithm) -> usize {
        if row.partial_sums_travel { self.sum_bytes } else { self.bytes }
    }
}

/// The cheapest algorithm of a collective without shared memory when every rank contributes
/// `elements`, or `None` where none serves. Equal prices go to the row that comes first in
/// [`ALGORITHMS`].
///
/// ```
/// use drumline_schedule::{Collective, Topology, price::{ElementKind, Prices, choose}};
///
/// let world = Topology::flat(8);
/// let name = |elements, kind| {
///     choose(Collective::AllReduce, &world, elements, kind, &Prices::TCP).unwrap().name
/// };
/// let f32 = ElementKind { bytes: 4, sum_bytes: 4 };
/// assert_eq!([2, 1_000_000].map(|elements| name(elements, f32)), ["doubling", "direct"]);
/// ```
pub fn choose(
    collective: Collective,
    topology: &Topology,
    elements: usize,
    kind: ElementKind,
    prices: &Prices,
) -> Option<&'static Algorithm> {
    let candidates = candidates(collective, topology, elements, kind, prices);
    candidates.min_by_key(|(_, price)| *price).map(|(row, _)| row)
}

/// The algorithms that [`choose`] chooses from, each with its price in picoseconds.
///
/// ```
/// use drumline_schedule::{Collective, Topology, price::{ElementKind, Prices, candidates, choose}};
///
/// let (world, f32) = (Topology::flat(8), ElementKind { bytes: 4, sum_bytes: 4 });
/// let priced = candidates(Collective::AllReduce, &world, 1_000, f32, &Prices::TCP);
/// let cheapest = priced.min_by_key(|(_, price_ps)| *price_ps).unwrap().0;
/// let chosen = choose(Collective::AllReduce, &world, 1_000, f32, &Prices::TCP).unwrap();
/// assert_eq!(cheapest.name, chosen.name);
/// ```
pub fn candidates(
    collective: Collective,
    topology: &Topology,
    elements: usize,
    kind: ElementKind,
    prices: &Prices,
) -> impl Iterator<Item = (&'static Algorithm, u128)> {
    let rows = ALGORITHMS.iter().filter(move |row| {
        row.collective == collective && row.memory == MemoryUse::Private && (row.applies)(topology)
    });
    rows.map(move |row| (row, price(row, topology, elements, kind, prices)))
}

/// What `row` costs in picoseconds when every rank contributes `elements`; shared memory is left out.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, Prices, price}};
///
/// let (world, f32) = (Topology::hosts(&[4, 4]), ElementKind { bytes: 4, sum_bytes: 4 });
/// let of = |name, elements| {
///     let row = Algorithm::find(Collective::AllReduce, name)?;
///     Ok::<_, drumline_schedule::Error>(price(row, &world, elements, f32, &Prices::TCP))
/// };
/// // Leaders exchange short data in one message, and long data by all ranks at once.
/// assert!(of("hierarchical-doubling", 2)? < of("hierarchical", 2)?);
/// assert!(of("hierarchical-doubling", 1_000_000)? > of("hierarchical", 1_000_000)?);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
pub fn price(
    row: &Algorithm,
    topology: &Topology,
    elements: usize,
    kind: ElementKind,
    prices: &Prices,
) -> u128 {
    prices.of((row.cost)(topology, 0, elements), kind.travelling(row))
}

/// The choices for all lengths, made once for a group: one for each power of two, which stands
/// for the lengths up to the next.
///
/// ```
/// use drumline_schedule::{Collective, Topology, price::{Choices, ElementKind, Prices}};
///
/// let (world, f32) = (Topology::flat(8), ElementKind { bytes: 4, sum_bytes: 4 });
/// let choices = Choices::new(Collective::AllReduce, &world, f32, &Prices::TCP).unwrap();
/// assert_eq!(choices.algorithm(2).name, "doubling");
/// assert_eq!(choices.algorithm(1 << 20).name, "direct");
/// ```
#[derive(Clone, Debug)]
pub struct Choices {
    by_log2: Vec<&'static Algorithm>,
}

impl Choices {
    /// Lengths from `2^39` elements on are one class.
    const CLASSES: u32 = 40;

    /// `None` where no algorithm serves.
    ///
    /// ```
    /// use drumline_schedule::{Collective, Topology, price::{Choices, ElementKind, Prices}};
    ///
    /// let (world, f32) = (Topology::flat(8), ElementKind { bytes: 4, sum_bytes: 4 });
    /// let choices = Choices::new(Collective::AllReduce, &world, f32, &Prices::TCP).unwrap();
    /// // Lengths up to the next power of two are one class.
    /// assert_eq!(choices.algorithm(1024).name, choices.algorithm(2047).name);
    /// ```
    pub fn new(
        collective: Collective,
        topology: &Topology,
        kind: ElementKind,
        prices: &Prices,
    ) -> Option<Choices> {
        let of_class = |class| choose(collective, topology, 1_usize << class, kind, prices);
        let by_log2: Option<Vec<_>> = (0..Choices::CLASSES).map(of_class).collect();
        by_log2.map(|by_log2| Choices { by_log2 })
    }

    /// The algorithm when every rank contributes `elements`.
    ///
    /// ```
    /// use drumline_schedule::{Collective, Topology, price::{Choices, ElementKind, Prices}};
    ///
    /// let (world, f32) = (Topology::flat(8), ElementKind { bytes: 4, sum_bytes: 4 });
    /// let choices = Choices::new(Collective::AllReduce, &world, f32, &Prices::TCP).unwrap();
    /// assert_eq!(choices.algorithm(0).name, choices.algorithm(1).name);
    /// ```
    pub fn algorithm(&self, elements: usize) -> &'static Algorithm {
        let class = elements.max(1).ilog2().min(Choices::CLASSES - 1);
        self.by_log2[class as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: ElementKind = ElementKind { bytes: 4, sum_bytes: 4 };
    const BF16: ElementKind = ElementKind { bytes: 2, sum_bytes: 4 };

    fn all_reduce(world_size: usize, elements: usize, kind: ElementKind) -> &'static str {
        let topology = Topology::flat(world_size);
        choose(Collective::AllReduce, &topology, elements, kind, &Prices::TCP).unwrap().name
    }

    #[test]
    fn short_data_takes_few_rounds_and_long_data_few_bytes() {
        let few_rounds = ["doubling", "gather"];
        let few_bytes = ["direct", "halving"];
        for world_size in [2, 3, 4, 5, 8, 33, 64, 300, 1_000] {
            assert!(few_rounds.contains(&all_reduce(world_size, 1, F32)), "{world_size} ranks");
            let long = all_reduce(world_size, 100_000_000, F32);
            assert!(few_bytes.contains(&long), "{world_size} ranks: {long}");
        }
        assert_eq!(all_reduce(4, 1 << 20, F32), "direct");
        assert_eq!(all_reduce(64, 1 << 14, F32), "halving");
        assert_eq!(all_reduce(1_000, 1 << 14, F32), "halving");
    }

    #[test]
    fn partial_sums_of_narrow_floats_cost_twice_their_width() {
        let narrow = ElementKind { bytes: 2, sum_bytes: 2 };
        for world_size in [2, 4, 5, 64] {
            let name = all_reduce(world_size, 100_000_000, BF16);
            assert_eq!(name, "direct", "{world_size} ranks");
        }
        // Few leaves are shorter than their sum; many are not, and then it may travel.
        assert_eq!([BF16, narrow].map(|kind| all_reduce(3, 1_000, kind)), ["gather", "doubling"]);
        assert_eq!(all_reduce(64, 100, BF16), "doubling");
        assert_eq!(all_reduce(300, 100_000_000, BF16), "halving");
        // All that there is for a reduce.
        assert!(choose(Collective::Reduce, &Topology::flat(5), 10, BF16, &Prices::TCP).is_some());
    }

    #[test]
    fn choices_are_those_of_the_powers_of_two() {
        let topology = Topology::flat(5);
        let choices = Choices::new(Collective::AllReduce, &topology, F32, &Prices::TCP).unwrap();
        for elements in [1, 2, 64, 1 << 12, 1 << 20] {
            assert_eq!(choices.algorithm(elements).name, all_reduce(5, elements, F32));
            assert_eq!(choices.algorithm(2 * elements - 1).name, all_reduce(5, elements, F32));
        }
        assert_eq!(choices.algorithm(0).name, choices.algorithm(1).name);
        assert_eq!(choices.algorithm(usize::MAX).name, choices.algorithm(1 << 39).name);
    }

    #[test]
    fn every_collective_has_an_algorithm_for_every_world() {
        for row in ALGORITHMS {
            for world_size in [1, 2, 257, 5_000] {
                let topology = Topology::flat(world_size);
                assert!(choose(row.collective, &topology, 100, F32, &Prices::TCP).is_some());
            }
        }
    }
}
