//! What can be measured: the buffers and the result of each operation, and how its bandwidth counts.

use std::ops::Range;

use super::choice::{Choice, choice};

choice! {
    /// What is measured: a collective, or an exchange of messages.
    Operation {
        AllReduce = "all_reduce",
        Reduce = "reduce",
        Broadcast = "broadcast",
        AllGather = "all_gather",
        Gather = "gather",
        Scatter = "scatter",
        ReduceScatter = "reduce_scatter",
        AllToAll = "all_to_all",
        /// Each rank sends to the next rank and receives from the previous one.
        SendRecv = "sendrecv",
        Barrier = "barrier"
    }
}

choice! {
    /// Whether the result replaces the input.
    Place { Out = "out", In = "in" }
}

/// How many elements the buffers of a rank have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    /// 0 if the operation works in place.
    pub(super) input: usize,
    /// The length of the only buffer if the operation works in place.
    pub(super) output: usize,
}

/// Where elements of a result come from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// The input of this rank.
    Rank(usize),
    /// The inputs of these ranks, combined.
    Combined(Range<usize>),
}

/// A part of a result: `len` elements of `source`, beginning with its element `start`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) source: Source,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Operation {
    /// The places that the library offers for this operation.
    pub(super) fn places(self) -> &'static [Place] {
        use Operation::*;
        match self {
            AllReduce => &[Place::Out, Place::In],
            AllGather | Gather | Scatter | ReduceScatter | AllToAll | SendRecv => &[Place::Out],
            Reduce | Broadcast | Barrier => &[Place::In],
        }
    }

    pub(super) fn reduces(self) -> bool {
        use Operation::*;
        matches!(self, AllReduce | Reduce | ReduceScatter)
    }

    pub(super) fn has_root(self) -> bool {
        use Operation::*;
        matches!(self, Reduce | Broadcast | Gather | Scatter)
    }

    /// The factor from algorithm bandwidth (size divided by time) to bus bandwidth, as in nccl-tests.
    pub(super) fn bus_factor(self, ranks: usize) -> f64 {
        use Operation::*;
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            AllReduce => 2.0 * others,
            AllGather | Gather | Scatter | ReduceScatter | AllToAll => others,
            Reduce | Broadcast | SendRecv | Barrier => 1.0,
        }
    }

    /// The elements of a block if the longest buffer of a rank has `elements`.
    pub(super) fn block(self, elements: usize, ranks: usize) -> usize {
        use Operation::*;
        match self {
            AllReduce | Reduce | Broadcast | SendRecv => elements,
            AllGather | Gather | Scatter | ReduceScatter | AllToAll => elements / ranks,
            Barrier => 0,
        }
    }

    /// The elements of the longest buffer of a rank, for blocks of `block` elements.
    pub(super) fn longest(self, block: usize, ranks: usize) -> usize {
        use Operation::*;
        match self {
            AllGather | Gather | Scatter | ReduceScatter | AllToAll => block * ranks,
            _ => block,
        }
    }

    pub(super) fn lengths(
        self,
        place: Place,
        block: usize,
        ranks: usize,
        is_root: bool,
    ) -> Lengths {
        use Operation::*;
        let all = block * ranks;
        let at_root = |len| if is_root { len } else { 0 };
        let (input, output) = match self {
            _ if place == Place::In => (0, block),
            AllReduce | SendRecv => (block, block),
            AllGather => (block, all),
            Gather => (block, at_root(all)),
            Scatter => (at_root(all), block),
            ReduceScatter => (all, block),
            AllToAll => (all, all),
            Reduce | Broadcast | Barrier => (0, block),
        };
        Lengths { input, output }
    }

    /// The parts of which the output of `rank` must consist.
    pub(super) fn result(self, block: usize, ranks: usize, root: usize, rank: usize) -> Vec<Part> {
        use Operation::*;
        let whole = |source| vec![Part { source, start: 0, len: block }];
        let mine = |source| Part { source, start: rank * block, len: block };
        let blocks = |start: usize| {
            let part = |from| Part { source: Source::Rank(from), start, len: block };
            (0..ranks).map(part).collect()
        };
        match self {
            AllReduce => whole(Source::Combined(0..ranks)),
            Reduce if rank == root => whole(Source::Combined(0..ranks)),
            // Its own input, unchanged.
            Reduce => whole(Source::Rank(rank)),
            Gather if rank == root => blocks(0),
            Gather | Barrier => Vec::new(),
            Broadcast => whole(Source::Rank(root)),
            AllGather => blocks(0),
            Scatter => vec![mine(Source::Rank(root))],
            ReduceScatter => vec![mine(Source::Combined(0..ranks))],
            AllToAll => blocks(rank * block),
            SendRecv => whole(Source::Rank((rank + ranks - 1) % ranks)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_fill_the_outputs() {
        let (ranks, block) = (5, 7);
        for &operation in Operation::ALL {
            for &place in operation.places() {
                for rank in 0..ranks {
                    let lengths = operation.lengths(place, block, ranks, rank == 2);
                    let parts = operation.result(block, ranks, 2, rank);
                    let len: usize = parts.iter().map(|part| part.len).sum();
                    let expected = if operation == Operation::Barrier { 0 } else { lengths.output };
                    assert_eq!(len, expected, "{operation} {place}, rank {rank}");
                    // No part is longer than an input.
                    let longest = operation.longest(block, ranks);
                    assert!(parts.iter().all(|part| part.start + part.len <= longest));
                }
            }
        }
    }

    #[test]
    fn sizes_are_those_of_the_longest_buffer() {
        for &operation in Operation::ALL {
            for &place in operation.places() {
                let block = operation.block(120, 4);
                let of = |is_root| operation.lengths(place, block, 4, is_root);
                let longest = [of(true), of(false)].map(|it| it.input.max(it.output));
                let expected = if operation == Operation::Barrier { 0 } else { 120 };
                assert_eq!(longest.into_iter().max(), Some(expected), "{operation} {place}");
                assert_eq!(operation.longest(block, 4), expected, "{operation}");
            }
        }
    }

    #[test]
    fn bandwidth_counts_as_in_nccl_tests() {
        assert_eq!(Operation::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Operation::AllGather.bus_factor(4), 0.75);
        assert_eq!(Operation::Broadcast.bus_factor(4), 1.0);
    }
}
