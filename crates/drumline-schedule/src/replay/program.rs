//! A schedule with its lengths and prices filled in.

use std::collections::HashMap;

use super::Cluster;
use super::hosts::of_bytes;
use crate::extent::{Blocks, Counts};
use crate::price::Rate;
use crate::schedule::Schedule;
use crate::step::{Buffer, Loc, Rank, Step};

/// What one rank does.
pub(super) struct Program {
    /// In all pieces but the last.
    pub(super) piece: Vec<Op>,
    /// In the last.
    pub(super) last: Vec<Op>,
    /// How many pieces there are.
    pub(super) pieces: usize,
    /// How often it posts in a piece.
    pub(super) posts: usize,
}

/// A step, priced.
#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    /// Time on a core, and bytes that go to or come from memory meanwhile.
    Work {
        core_ps: u64,
        memory_bytes: u64,
    },
    Send {
        to: u32,
        bytes: u64,
    },
    /// One of a run that may come in any order.
    Recv {
        from: u32,
    },
    /// The same, alone: what comes next needs it.
    RecvAlone {
        from: u32,
    },
    /// Waits until message `sent` of this piece has left its source, counted from 0 and whoever it
    /// is for.
    Flush {
        sent: u32,
    },
    Post,
    Wait {
        peer: u32,
        upto: u32,
    },
}

impl Program {
    /// `schedule` on `elements` of blocks that have `of` elements, in pieces; an element has so many
    /// bytes.
    pub(super) fn of(
        cluster: &Cluster,
        schedule: &Schedule,
        of: usize,
        elements: usize,
        piece: usize,
        element_bytes: usize,
    ) -> Program {
        let pieces = elements.div_ceil(piece.max(1)).max(1);
        let pricing = Pricing::new(cluster, schedule, of, element_bytes);
        let last = elements - (pieces - 1) * piece;
        Program {
            piece: if pieces > 1 { pricing.ops(piece) } else { vec![] },
            last: pricing.ops(last),
            pieces,
            posts: schedule.posts(),
        }
    }
}

struct Pricing<'a> {
    cluster: &'a Cluster,
    schedule: &'a Schedule,
    element_bytes: u64,
    /// Bytes that all ranks of a core work on.
    working_bytes: u64,
}

impl<'a> Pricing<'a> {
    fn new(
        cluster: &'a Cluster,
        schedule: &'a Schedule,
        elements: usize,
        element_bytes: usize,
    ) -> Pricing<'a> {
        let Schedule { collective, rank, root, world_size, .. } = *schedule;
        let blocks = |buffer| match collective.blocks(buffer, rank, root) {
            Blocks::None => 0,
            Blocks::One => 1,
            Blocks::All => world_size,
        };
        let ranks = cluster.machines.neighbours(rank).len();
        let ranks_per_core = ranks.div_ceil(cluster.cores_per_host.max(1));
        let blocks = blocks(Buffer::Data) + blocks(Buffer::Input);
        let working = blocks as u64 * elements as u64 * (element_bytes * ranks_per_core) as u64;
        let element_bytes = element_bytes as u64;
        Pricing { cluster, schedule, element_bytes, working_bytes: working }
    }

    /// The steps on blocks of so many elements.
    fn ops(&self, elements: usize) -> Vec<Op> {
        let counts = Counts::Even(elements);
        let bytes =
            |loc: Loc| self.schedule.resolve(loc, &counts).len() as u64 * self.element_bytes;
        let number = |rank: Rank| rank as u32;
        let mut ops = Vec::with_capacity(self.schedule.steps.len());
        let mut sent: HashMap<Rank, Vec<u32>> = HashMap::new();
        let mut count = 0;
        for step in &self.schedule.steps {
            match step {
                Step::Send { to, src } => {
                    sent.entry(*to).or_default().push(count);
                    count += 1;
                    ops.push(Op::Send { to: number(*to), bytes: bytes(*src) });
                }
                Step::Recv { from, .. } => ops.push(Op::Recv { from: number(*from) }),
                Step::RecvReduce { from, dst, .. } => {
                    ops.push(Op::RecvAlone { from: number(*from) });
                    ops.push(self.combine(&[*dst], 1, 1, bytes(*dst)));
                }
                Step::Reduce { dst, src, .. } => {
                    ops.push(self.combine(&[*dst, *src], 1, 1, bytes(*dst)));
                }
                Step::ReduceTree { dsts, srcs, .. } => {
                    let inputs = srcs.iter().map(|(_, loc)| *loc);
                    let places: Vec<Loc> = inputs.chain(dsts.iter().copied()).collect();
                    let len = dsts.first().map_or(0, |dst| bytes(*dst));
                    let combined = srcs.len().saturating_sub(1);
                    ops.push(self.combine(&places, combined, dsts.len(), len));
                }
                Step::Copy { dst, src } => ops.push(self.copy(*dst, *src, bytes(*dst))),
                Step::Flush { to, upto } => {
                    let last = sent.get(to).and_then(|sent| sent.get(upto.checked_sub(1)?));
                    ops.extend(last.map(|&sent| Op::Flush { sent }));
                }
                Step::Post => ops.push(Op::Post),
                Step::Wait { peer, upto } => {
                    ops.push(Op::Wait { peer: number(*peer), upto: number(*upto) });
                }
            }
        }
        ops
    }

    /// `combined` inputs are added to another, and the sum is written to `dsts` places.
    fn combine(&self, places: &[Loc], combined: usize, dsts: usize, len: u64) -> Op {
        let prices = &self.cluster.prices;
        let added = combined as u64 * self.mean(prices.combine, places);
        let written = dsts.saturating_sub(1) as u64 * self.mean(prices.copy, places) / 2;
        self.work(places, len, added + written)
    }

    fn copy(&self, dst: Loc, src: Loc, len: u64) -> Op {
        let places = [dst, src];
        self.work(&places, len, self.mean(self.cluster.prices.copy, &places))
    }

    fn work(&self, places: &[Loc], len: u64, byte_fs: u64) -> Op {
        let peer = self.cluster.prices.peer;
        let of_peers = places.iter().filter(|place| place.peer.is_some());
        let surcharge: u64 = of_peers.map(|place| self.rate(peer, place)).sum();
        let in_memory = places.iter().filter(|place| place.buffer != Buffer::Slot).count() as u64;
        let cold = self.working_bytes.saturating_sub(self.cluster.prices.cache_bytes);
        let memory_bytes =
            u128::from(len * in_memory) * u128::from(cold) / u128::from(self.working_bytes.max(1));
        Op::Work { core_ps: of_bytes(len, byte_fs + surcharge), memory_bytes: memory_bytes as u64 }
    }

    /// The mean price of a byte in these places.
    fn mean(&self, rate: Rate, places: &[Loc]) -> u64 {
        let sum: u64 = places.iter().map(|place| self.rate(rate, place)).sum();
        sum / places.len().max(1) as u64
    }

    /// Slots are short, and stay in the caches.
    fn rate(&self, rate: Rate, place: &Loc) -> u64 {
        match place.buffer {
            Buffer::Slot => rate.cached_fs,
            _ => rate.of(self.working_bytes, self.cluster.prices.cache_bytes),
        }
    }
}
