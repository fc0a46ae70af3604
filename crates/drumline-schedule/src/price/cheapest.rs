use super::prices::{ElementKind, Prices};
use crate::algorithm::{ALGORITHMS, Algorithm};
use crate::collective::Collective;
use crate::situation::{Situation, eligible};
use crate::topology::Topology;

/// The cheapest algorithm over links when every rank contributes `elements`, or `None` where no algorithm
/// serves. Among equal prices the first row of [`ALGORITHMS`] wins.
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
pub fn candidates(
    collective: Collective,
    topology: &Topology,
    elements: usize,
    kind: ElementKind,
    prices: &Prices,
) -> impl Iterator<Item = (&'static Algorithm, u128)> {
    let situation = Situation::over_links(collective, topology, elements, kind);
    let rows = ALGORITHMS.iter().filter(move |row| eligible(row, &situation).is_ok());
    rows.map(move |row| (row, price(row, topology, elements, kind, prices)))
}

/// The price of `row` in picoseconds when every rank contributes `elements`. It leaves shared memory out.
pub fn price(
    row: &Algorithm,
    topology: &Topology,
    elements: usize,
    kind: ElementKind,
    prices: &Prices,
) -> u128 {
    prices.of((row.cost)(topology, 0, elements), row.travelling(kind.bytes, kind.sum_bytes))
}

/// The cheapest algorithms over links for all lengths. One choice, made for a power of two, serves all
/// lengths up to the next power.
#[derive(Clone, Debug)]
pub struct Choices {
    by_log2: Vec<&'static Algorithm>,
}

impl Choices {
    /// All lengths from `2^39` elements on have the same choice.
    const CLASSES: u32 = 40;

    /// Makes the choices; `None` where no algorithm serves.
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
        // There is only one algorithm for a reduce.
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
        // Devices alone call it, and only where ranks share memory.
        let is_for_all = |row: &&Algorithm| row.collective != Collective::ReduceSlices;
        for row in ALGORITHMS.iter().filter(is_for_all) {
            for world_size in [1, 2, 257, 5_000] {
                let topology = Topology::flat(world_size);
                assert!(choose(row.collective, &topology, 100, F32, &Prices::TCP).is_some());
            }
        }
    }
}
