use std::fmt;

use crate::step::Buffer;

/// A kind of collective.
///
/// Its number is its code on the wire, which never changes.
///
/// ```
/// use drumline_schedule::{ALGORITHMS, Collective};
///
/// let names = ALGORITHMS.iter().filter(|row| row.collective == Collective::Barrier);
/// assert!(names.map(|row| row.name).any(|name| name == "dissemination"));
/// assert_eq!(Collective::AllReduce.to_string(), "all_reduce");
/// assert_eq!(Collective::from_code(Collective::Reduce.code()), Some(Collective::Reduce));
/// assert!(Collective::Broadcast.has_root() && !Collective::AllGather.has_root());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Collective {
    /// Every rank gets the sum of all ranks.
    AllReduce = 1,
    /// Every rank gets what the root has.
    Broadcast = 2,
    /// Every rank gets the contributions of all ranks, in the order of ranks.
    AllGather = 3,
    /// No rank leaves before every rank has entered.
    Barrier = 4,
    /// Every rank brings a block for each rank. Rank `i` gets the sum of all blocks `i`.
    ReduceScatter = 5,
    /// The root gets the sum of all ranks. The data of the other ranks stays as it is.
    Reduce = 6,
    /// The root gets the contributions of all ranks, in the order of ranks.
    Gather = 7,
    /// The root brings a block for each rank. Rank `i` gets block `i`.
    Scatter = 8,
    /// Every rank brings a block for each rank, and gets from each rank the block that this rank brought
    /// for it.
    AllToAll = 9,
    // 10 and 11 were scans.
    /// A barrier in which every rank hears from every rank itself, so that it can name every missing one.
    MonitoredBarrier = 12,
    /// Every host gets the sum of all ranks, in [slices](crate::slice_holders): one in the data of each of its ranks.
    /// Nothing else in the data is defined then. Neighbours may read the slices after the call: for devices,
    /// which fetch them from there.
    ReduceSlices = 13,
}

impl Collective {
    /// All collectives, in the order of their codes.
    pub const ALL: [Collective; 11] = [
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::AllGather,
        Collective::Barrier,
        Collective::ReduceScatter,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::MonitoredBarrier,
        Collective::ReduceSlices,
    ];

    /// The name, as functions have it: `all_reduce`.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::Broadcast => "broadcast",
            Collective::AllGather => "all_gather",
            Collective::Barrier => "barrier",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::Reduce => "reduce",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::MonitoredBarrier => "monitored_barrier",
            Collective::ReduceSlices => "reduce_slices",
        }
    }

    /// The code on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The collective with this code.
    pub fn from_code(code: u8) -> Option<Collective> {
        Collective::ALL.into_iter().find(|collective| collective.code() == code)
    }

    /// Whether a rank's contribution lies in a [`Buffer::Input`]. Otherwise it lies in the
    /// [`Buffer::Data`], where the result replaces it.
    pub const fn has_input(self) -> bool {
        matches!(
            self,
            Collective::AllGather
                | Collective::ReduceScatter
                | Collective::Gather
                | Collective::Scatter
                | Collective::AllToAll
        )
    }

    /// The buffer that neighbours access where it is registered: the data, or the input of a
    /// reduce_scatter and of a gather.
    pub const fn registered_buffer(self) -> Buffer {
        match self {
            Collective::ReduceScatter | Collective::Gather => Buffer::Input,
            _ => Buffer::Data,
        }
    }

    /// Whether one rank, the root, has a part of its own.
    pub const fn has_root(self) -> bool {
        matches!(
            self,
            Collective::Reduce | Collective::Broadcast | Collective::Gather | Collective::Scatter
        )
    }

    /// Whether it combines what ranks bring with an operator.
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Collective::AllReduce
                | Collective::Reduce
                | Collective::ReduceScatter
                | Collective::ReduceSlices
        )
    }

    /// Whether it moves no elements.
    pub const fn is_barrier(self) -> bool {
        matches!(self, Collective::Barrier | Collective::MonitoredBarrier)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_wire() {
        assert!(Collective::ALL.map(Collective::code).into_iter().eq((1..=9).chain(12..=13)));
        for collective in Collective::ALL {
            assert_eq!(Collective::from_code(collective.code()), Some(collective));
        }
        assert_eq!([0, 10, 11, 14].map(Collective::from_code), [None; 4]);
    }
}
