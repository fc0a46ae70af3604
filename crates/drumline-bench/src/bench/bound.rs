//! The highest speed that an operation could reach. It is measured in the same rounds as the operation, so
//! that both meet the machine in the same state.
//!
//! Where all ranks share memory, it is the speed of a copy by all ranks at once. Over links, it is the speed
//! of a plain stream between two ranks, in both directions at once.

use std::{
    collections::BTreeSet,
    hint, io,
    time::{Duration, Instant},
};

use super::{operation::Operation, plain_stream::PlainStream};

/// Moves as many bytes as an operation does, by the plainest means.
pub(super) enum Bound {
    Copy {
        from: Vec<u8>,
        to: Vec<u8>,
    },
    /// `None` on ranks other than the two ends of the stream.
    Stream(Option<PlainStream>),
}

impl Bound {
    pub(super) fn copy() -> Bound {
        Bound::Copy { from: Vec::new(), to: Vec::new() }
    }

    /// The name in a report.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Bound::Copy { .. } => "copy by all ranks at once",
            Bound::Stream(_) => "plain stream both ways at once",
        }
    }

    /// How many times an operation moves its bytes through the memory of a rank, or over the network link
    /// that the ranks of a host share. `hosts` has the number of each rank's host.
    pub(super) fn factor(&self, operation: Operation, hosts: &[u64]) -> f64 {
        let here = hosts.iter().filter(|host| **host == hosts[0]).count();
        if here == hosts.len() {
            return operation.bus_factor(hosts.len());
        }
        let distinct: BTreeSet<&u64> = hosts.iter().collect();
        let each = match operation {
            // Every rank has different bytes for every other rank.
            Operation::AllToAll => here as f64,
            _ => 1.0,
        };
        each * operation.bus_factor(distinct.len())
    }

    /// Moves `bytes` and returns the time that it took on this rank.
    pub(super) fn move_bytes(&mut self, bytes: usize) -> io::Result<Duration> {
        match self {
            Bound::Copy { from, to } => {
                from.resize(bytes.max(from.len()), 0);
                to.resize(from.len(), 0);
                let (from, to) = (&mut from[..bytes], &mut to[..bytes]);
                from.fill(1);
                let start = Instant::now();
                to.copy_from_slice(from);
                let time = start.elapsed();
                hint::black_box(to);
                Ok(time)
            }
            Bound::Stream(Some(stream)) => stream.both_ways(bytes),
            Bound::Stream(None) => Ok(Duration::ZERO),
        }
    }
}
