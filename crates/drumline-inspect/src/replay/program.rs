//! A schedule with its lengths and prices filled in.

use std::collections::{HashMap, HashSet};

use drumline_schedule::price::ElementKind;
use drumline_schedule::step::{Buffer, Loc, Rank, Step};
use drumline_schedule::{Blocks, Counts, Schedule};

use super::cluster::Cluster;
use super::hosts::of_bytes;

/// The priced steps of one rank.
pub(super) struct Program {
    /// The steps of every piece but the last.
    pub(super) piece: Vec<PricedStep>,
    /// The steps of the last piece.
    pub(super) last: Vec<PricedStep>,
    /// The number of pieces.
    pub(super) pieces: usize,
    /// By how many pieces each step lags. Empty: no step lags.
    pub(super) lags: Vec<usize>,
    /// The largest of these.
    pub(super) depth: usize,
    /// Bytes that the ranks of a core work on.
    pub(super) working_bytes: u64,
    /// Posts in a piece.
    pub(super) posts: usize,
    /// The windows of a pipeline. Each message is sent once for each window.
    pub(super) windows: u64,
}

/// A step with its price.
#[derive(Clone, Copy, Debug)]
pub(super) enum PricedStep {
    /// Time on a core, and bytes that move to or from memory meanwhile.
    Work {
        core_ps: u64,
        memory_bytes: u64,
    },
    /// `number` counts the messages of a piece, from 0.
    Send {
        to: u32,
        bytes: u64,
        number: u32,
    },
    /// A receive in a run whose messages may come in any order.
    Recv {
        from: u32,
    },
    /// A receive by itself, whose message the next step needs.
    RecvAlone {
        from: u32,
    },
    /// Waits until message number `sent` of this piece, to any receiver and counted from 0, has left its
    /// source.
    Flush {
        sent: Option<u32>,
    },
    Post,
    Wait {
        peer: u32,
        upto: u32,
    },
}

impl Program {
    /// The program of `schedule` on the first `elements` elements of blocks that have `of` elements, in
    /// pieces of `piece` elements.
    pub(super) fn of(
        cluster: &Cluster,
        schedule: &Schedule,
        of: usize,
        elements: usize,
        piece: usize,
        kind: ElementKind,
    ) -> Program {
        let pieces = elements.div_ceil(piece.max(1)).max(1);
        let pricing = Pricing::new(cluster, schedule, of, kind);
        let last = elements - (pieces - 1) * piece;
        let lags = match pieces {
            1 => vec![],
            _ => pricing.lags(),
        };
        Program {
            piece: if pieces > 1 { pricing.ops(piece) } else { vec![] },
            last: pricing.ops(last),
            pieces,
            depth: lags.iter().copied().max().unwrap_or(0),
            lags,
            working_bytes: pricing.working_bytes,
            posts: schedule.posts(),
            windows: match schedule.is_pipelined() && pieces == 1 {
                true => (elements * kind.bytes).div_ceil(WINDOW_BYTES).max(1) as u64,
                false => 1,
            },
        }
    }

    /// The number of turns in a call.
    pub(super) fn turns(&self) -> usize {
        self.pieces + self.depth
    }

    /// The piece on which a step works in a turn, if it does anything then. Posts and waits belong to no piece.
    pub(super) fn piece_of(&self, op: usize, turn: usize) -> Option<usize> {
        if let Some(PricedStep::Post | PricedStep::Wait { .. }) = self.last.get(op) {
            return Some(self.pieces - 1);
        }
        let lag = self.lags.get(op).copied().unwrap_or(0);
        turn.checked_sub(lag).filter(|piece| *piece < self.pieces)
    }

    /// A step, as it is in a piece.
    pub(super) fn op(&self, op: usize, piece: usize) -> Option<PricedStep> {
        let ops = if piece + 1 == self.pieces { &self.last } else { &self.piece };
        ops.get(op).copied()
    }
}

/// The default length of a window of long data over links.
pub(super) const WINDOW_BYTES: usize = 1 << 20;

struct Pricing<'a> {
    cluster: &'a Cluster,
    schedule: &'a Schedule,
    /// Elements of a whole block.
    elements: usize,
    kind: ElementKind,
    /// Bytes that the ranks of a core work on.
    working_bytes: u64,
    /// Whether the rank and one neighbour are alone on their host, and exchange slots.
    swaps_slots: bool,
}

impl<'a> Pricing<'a> {
    fn new(
        cluster: &'a Cluster,
        schedule: &'a Schedule,
        elements: usize,
        kind: ElementKind,
    ) -> Pricing<'a> {
        let Schedule { collective, rank, root, world_size, .. } = *schedule;
        let blocks = |buffer| match collective.blocks(buffer, rank, root) {
            Blocks::None => 0,
            Blocks::One => 1,
            Blocks::All => world_size,
        };
        let blocks = (blocks(Buffer::Data) + blocks(Buffer::Input)) as u64;
        let of_rank = (blocks * kind.bytes as u64).saturating_mul(elements as u64);
        let ranks = cluster.machines.neighbours(rank).len().max(1);
        let cores = cluster.cores_per_host.clamp(1, ranks);
        let working_bytes = of_rank.saturating_mul(ranks as u64) / cores as u64;
        let swaps_slots = ranks == 2;
        Pricing { cluster, schedule, elements, kind, working_bytes, swaps_slots }
    }

    /// The lag of each priced step.
    fn lags(&self) -> Vec<usize> {
        let of_steps = &self.schedule.lags.of_steps;
        let steps = self.schedule.steps.iter().zip(of_steps);
        let priced = steps.flat_map(|(step, &lag)| std::iter::repeat_n(lag, priced_as(step)));
        priced.collect()
    }

    /// The priced steps of a piece of `elements` elements.
    fn ops(&self, elements: usize) -> Vec<PricedStep> {
        let counts = Counts::Even(elements);
        let width = |loc: Loc| if loc.is_wide() { self.kind.sum_bytes } else { self.kind.bytes };
        let bytes = |loc: Loc| (self.schedule.resolve(loc, &counts).len() * width(loc)) as u64;
        let number = |rank: Rank| rank as u32;
        let mut ops = Vec::with_capacity(self.schedule.steps.len());
        let mut sent: HashMap<Rank, Vec<u32>> = HashMap::new();
        let mut count = 0;
        let part = u128::from(self.working_bytes) * elements as u128;
        let mut touched =
            Touched { places: HashSet::new(), bytes: (part / self.elements.max(1) as u128) as u64 };
        for step in &self.schedule.steps {
            match step {
                Step::Send { to, src } => {
                    sent.entry(*to).or_default().push(count);
                    let (to, bytes) = (number(*to), bytes(*src));
                    ops.push(PricedStep::Send { to, bytes, number: count });
                    count += 1;
                }
                Step::Recv { from, .. } => ops.push(PricedStep::Recv { from: number(*from) }),
                Step::RecvReduce { from, dst, .. } => {
                    ops.push(PricedStep::RecvAlone { from: number(*from) });
                    ops.push(self.work(&[*dst], &[*dst], bytes(*dst), (2, 0), &mut touched));
                }
                Step::Reduce { dst, src, .. } => {
                    let reads = [*dst, *src];
                    ops.push(self.work(&reads, &[*dst], bytes(*dst), (2, 0), &mut touched));
                }
                Step::ReduceTree { dsts, srcs, .. } => {
                    let reads: Vec<Loc> = srcs.iter().map(|(_, loc)| *loc).collect();
                    let len = dsts.first().map_or(0, |dst| bytes(*dst));
                    let parts = (reads.len(), dsts.len().saturating_sub(1));
                    ops.push(self.work(&reads, dsts, len, parts, &mut touched));
                }
                // A copy reads and writes; a further destination of a sum is only written.
                Step::Copy { dst, src } => {
                    ops.push(self.work(&[*src], &[*dst], bytes(*dst), (0, 2), &mut touched));
                }
                Step::Flush { to, upto } => {
                    let last = sent.get(to).and_then(|sent| sent.get(upto.checked_sub(1)?));
                    ops.push(PricedStep::Flush { sent: last.copied() });
                }
                Step::Post => ops.push(PricedStep::Post),
                Step::Wait { peer, upto } => {
                    ops.push(PricedStep::Wait { peer: number(*peer), upto: number(*upto) });
                }
            }
            touched.places.extend(step.reads().chain(step.writes()));
        }
        ops
    }

    /// The price of reads and writes of `len` bytes in each of these places. `combined` places are summed,
    /// and `copied` places are read or written without a sum. Each has half the price of a combined, or
    /// copied, pair.
    fn work(
        &self,
        reads: &[Loc],
        writes: &[Loc],
        len: u64,
        (combined, copied): (usize, usize),
        touched: &mut Touched,
    ) -> PricedStep {
        let prices = &self.cluster.prices;
        let fetched = reads.iter().filter(|place| is_slot(place) && place.peer.is_some());
        let fetched_fs =
            if self.swaps_slots { prices.slot_byte_fs } else { prices.shared_slot_byte_fs };
        let byte_fs = combined as u64 * prices.combine.cached_fs / 2
            + copied as u64 * prices.copy.cached_fs / 2
            + fetched.count() as u64 * fetched_fs;
        // A place that is written was read before, or moves into the cache first.
        let fetches = reads.iter().chain(writes.iter().filter(|place| !reads.contains(place)));
        let moved = fetches.chain(writes).map(|place| self.uncached(place, len, touched));
        let memory_bytes = moved.sum();
        // A copied or combined byte moves three times.
        let rate = if combined > 0 { prices.combine } else { prices.copy };
        let moved_fs = rate.memory_fs.saturating_sub(rate.cached_fs) / 3;
        let touch_ps = (reads.len() + writes.len()) as u64 * prices.touch_ps;
        let core_ps = touch_ps + of_bytes(len, byte_fs) + of_bytes(memory_bytes, moved_fs);
        PricedStep::Work { core_ps, memory_bytes }
    }

    /// The number of `len` bytes that are not in the caches. Slots are short and stay in the caches, as do
    /// places that the rank has touched in this piece.
    fn uncached(&self, place: &Loc, len: u64, touched: &Touched) -> u64 {
        let working = self.working(place, touched);
        let beyond = working.saturating_sub(self.cluster.prices.cache_bytes);
        let moved = u128::from(len) * u128::from(beyond) / u128::from(working.max(1));
        if is_slot(place) { 0 } else { moved as u64 }
    }

    fn working(&self, place: &Loc, touched: &Touched) -> u64 {
        if touched.places.contains(place) { touched.bytes } else { self.working_bytes }
    }
}

/// The number of priced steps for a step.
fn priced_as(step: &Step) -> usize {
    match step {
        Step::RecvReduce { .. } => 2,
        _ => 1,
    }
}

/// The places that a rank has touched in a piece.
struct Touched {
    places: HashSet<Loc>,
    /// Bytes that all ranks of the core work on in this piece.
    bytes: u64,
}

fn is_slot(place: &Loc) -> bool {
    place.buffer == Buffer::Slot
}
