//! What an operation could at best be as fast as, measured in the same minutes.
//!
//! Between ranks that share memory: a copy of as many bytes, by all ranks at once. Over links: a
//! plain stream between two ranks, both ways at once.

use std::{
    hint, io,
    time::{Duration, Instant},
};

use super::{line::Line, operation::Operation};

/// A way to move as many bytes as an operation, without an operation.
pub(super) enum Bound {
    Copy {
        from: Vec<u8>,
        to: Vec<u8>,
    },
    /// `None` on ranks that have no end of it.
    Line(Option<Line>),
}

impl Bound {
    pub(super) fn copy() -> Bound {
        Bound::Copy { from: Vec::new(), to: Vec::new() }
    }

    /// What it is called in a report.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Bound::Copy { .. } => "copy by all ranks at once",
            Bound::Line(_) => "plain stream both ways at once",
        }
    }

    /// How many times the size moves in an operation: through the memory of a rank, or over the line
    /// of a host, whose ranks have it in common. `hosts`: by rank, the number of its host.
    pub(super) fn factor(&self, operation: Operation, hosts: &[u64]) -> f64 {
        let here = hosts.iter().filter(|host| **host == hosts[0]).count();
        if here == hosts.len() {
            return operation.bus_factor(hosts.len());
        }
        let mut distinct = hosts.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let each = match operation {
            // Every rank has bytes of its own for every other.
            Operation::AllToAll => here as f64,
            _ => 1.0,
        };
        each * operation.bus_factor(distinct.len())
    }

    /// Moves `bytes`, and says how long that took on this rank.
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
            Bound::Line(Some(line)) => line.both_ways(bytes),
            Bound::Line(None) => Ok(Duration::ZERO),
        }
    }
}
