use std::ops::Range;

use drumline::{DType, ReduceOp};
use drumline_kernels::with_element;
use drumline_schedule::{Collective, Topology, slice_holders};
use fastrand::Rng;

use crate::value::random_elements;

/// One collective, as all ranks of a group call it. All its data follow from the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// The collective.
    pub kind: Kind,
    /// The type of the elements.
    pub dtype: DType,
    /// Elements of a block: of what a rank contributes, or of what it gets. Uneven blocks have at most this
    /// many elements.
    pub elements: usize,
    /// Whether the blocks of the ranks differ in length, in collectives with blocks.
    pub uneven: bool,
    /// The seed of all data.
    pub seed: u64,
}

/// A collective, with its operator and root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Every rank gets the data of all ranks, reduced.
    AllReduce(ReduceOp),
    /// On each host every rank gets a slice of the data of all ranks, reduced, where its neighbours read it.
    ReduceSlices(ReduceOp),
    /// This rank gets the data of all ranks, reduced.
    Reduce(ReduceOp, usize),
    /// Every rank gets its block of the data of all ranks, reduced.
    ReduceScatter(ReduceOp),
    /// Every rank gets the data of this one.
    Broadcast(usize),
    /// Every rank gets the inputs of all.
    AllGather,
    /// This rank gets the inputs of all.
    Gather(usize),
    /// Every rank gets its block of this rank's input.
    Scatter(usize),
    /// Every rank gets its block of the input of each rank.
    AllToAll,
    /// No rank returns before all have called.
    Barrier,
}

impl Kind {
    /// Whether the collective has blocks, which may differ in length.
    pub fn has_blocks(self) -> bool {
        matches!(
            self,
            Kind::AllGather
                | Kind::ReduceScatter(_)
                | Kind::Gather(_)
                | Kind::Scatter(_)
                | Kind::AllToAll
        )
    }

    /// The collective without operator and root.
    pub fn collective(self) -> Collective {
        match self {
            Kind::AllReduce(_) => Collective::AllReduce,
            Kind::ReduceSlices(_) => Collective::ReduceSlices,
            Kind::Reduce(..) => Collective::Reduce,
            Kind::ReduceScatter(_) => Collective::ReduceScatter,
            Kind::Broadcast(_) => Collective::Broadcast,
            Kind::AllGather => Collective::AllGather,
            Kind::Gather(_) => Collective::Gather,
            Kind::Scatter(_) => Collective::Scatter,
            Kind::AllToAll => Collective::AllToAll,
            Kind::Barrier => Collective::Barrier,
        }
    }

    /// The root, where there is one.
    pub fn root(self) -> Option<usize> {
        match self {
            Kind::Reduce(_, root)
            | Kind::Broadcast(root)
            | Kind::Gather(root)
            | Kind::Scatter(root) => Some(root),
            _ => None,
        }
    }

    /// The operator, where there is one.
    pub fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            Kind::AllReduce(op)
            | Kind::ReduceSlices(op)
            | Kind::Reduce(op, _)
            | Kind::ReduceScatter(op) => Some(op),
            _ => None,
        }
    }
}

/// The contents of a rank's buffers, as bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// The buffer of the result.
    pub data: Vec<u8>,
    /// The buffer that is only read; empty if the call has none.
    pub input: Vec<u8>,
}

impl Case {
    /// Elements of the block of `rank`, in a collective whose blocks belong to ranks.
    pub fn count(&self, rank: usize) -> usize {
        match self.uneven {
            true => self.draw(rank as u64),
            false => self.elements,
        }
    }

    /// Elements that `from` sends to `to` in an all-to-all.
    pub fn count_between(&self, from: usize, to: usize) -> usize {
        match self.uneven {
            true => self.draw((from as u64) << 32 | to as u64),
            false => self.elements,
        }
    }

    /// The lengths of the blocks, by rank.
    pub fn counts(&self, world_size: usize) -> Vec<usize> {
        (0..world_size).map(|rank| self.count(rank)).collect()
    }

    /// Elements that `rank` sends to each rank in an all-to-all, and gets from each.
    pub fn counts_by_pair(&self, rank: usize, world_size: usize) -> (Vec<usize>, Vec<usize>) {
        let sent = (0..world_size).map(|to| self.count_between(rank, to)).collect();
        let received = (0..world_size).map(|from| self.count_between(from, rank)).collect();
        (sent, received)
    }

    /// A random length: often 0 or the longest.
    fn draw(&self, of: u64) -> usize {
        let mut rng =
            Rng::with_seed(self.seed.wrapping_add(of.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        match rng.u8(0..4) {
            0 => 0,
            1 => self.elements,
            _ => rng.usize(0..=self.elements),
        }
    }

    /// The buffers of `rank` before the call.
    pub fn buffers(&self, rank: usize, world_size: usize) -> Buffers {
        let own = |elements| self.contribution(rank, elements);
        let noise = |elements: usize| vec![0xa5; elements * self.dtype.size()];
        let all = || self.counts(world_size).iter().sum::<usize>();
        let only = |root: usize, bytes: &dyn Fn() -> Vec<u8>| match rank == root {
            true => bytes(),
            false => Vec::new(),
        };
        let (data, input) = match self.kind {
            Kind::AllReduce(_) | Kind::ReduceSlices(_) | Kind::Reduce(..) | Kind::Broadcast(_) => {
                (own(self.elements), vec![])
            }
            Kind::ReduceScatter(_) => (noise(self.count(rank)), own(all())),
            Kind::AllGather => (noise(all()), own(self.count(rank))),
            Kind::Gather(root) => (only(root, &|| noise(all())), own(self.count(rank))),
            Kind::Scatter(root) => (noise(self.count(rank)), only(root, &|| own(all()))),
            Kind::AllToAll => {
                let (sent, received) = self.counts_by_pair(rank, world_size);
                (noise(received.iter().sum()), own(sent.iter().sum()))
            }
            Kind::Barrier => (vec![], vec![]),
        };
        Buffers { data, input }
    }

    /// Which of the `bytes` of the result of `rank` the collective sets: all of them, but for slices.
    pub fn defined(&self, rank: usize, topology: &Topology, bytes: usize) -> Range<usize> {
        let Kind::ReduceSlices(_) = self.kind else { return 0..bytes };
        let size = self.dtype.size();
        let holders = slice_holders(topology, rank);
        let border = |slice: usize| self.elements * slice / holders.len() * size;
        match holders.iter().position(|holder| *holder == rank) {
            Some(slice) => border(slice)..border(slice + 1),
            None => 0..0,
        }
    }

    /// The first `elements` that `rank` contributes, as bytes.
    pub(crate) fn contribution(&self, rank: usize, elements: usize) -> Vec<u8> {
        let rng = Rng::with_seed(self.seed ^ (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        with_element!(self.dtype, T => random_elements::<T>(rng, elements))
    }
}
