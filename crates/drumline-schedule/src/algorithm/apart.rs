//! The pass that gives sums that are not finished places of their own.
//!
//! Floats of 16 and 8 bits are added as `f32`, and only the finished sum is rounded. Algorithms know nothing of
//! that: the sum of a host may lie in the data. The pass moves it to a [`Buffer::Sum`], so that all other buffers hold
//! what callers bring and what they get, in the type of the call.
//!
//! ```text
//!   hierarchical, a rank of the first of two hosts       with sums apart
//!   reduce  data[0/2] = data[0/2] + rank 1's slot[0/2]   sum0[0/2] = data[0/2] + rank 1's slot[0/2]
//!   send    data[1/4] -> rank 2                          sum0[1/4] -> rank 2
//!   recv    scratch1[0/4] <- rank 2                      sum3[0/4] <- rank 2
//!   reduce  data[0/4] = finish(data[0/4] + scratch1[0/4])   data[0/4] = finish(sum0[0/4] + sum3[0/4])
//!   send    data[0/4] -> rank 2                          the same
//! ```
//!
//! A message has the width of the place that it was sent from. The receiver finds out from the steps of the sender: a
//! rank that is alone on its host sends what it brings, and that is no sum. The checker proves that both ends agree,
//! and that no unfinished sum lies elsewhere.
//!
//! With [`Rounding::Host`] the sum of a host stays where the algorithm puts it, and is rounded there.

use std::collections::HashMap;
use std::rc::Rc;

use super::row::Algorithm;
use crate::collective::Collective;
use crate::step::{Buffer, Loc, Rank, Side, Span, Step};
use crate::topology::{Rounding, Topology};
use crate::tree::Node;

/// The place for sums that are received to be added to another.
const INCOMING: usize = 1;

/// The steps of `rank` with sums apart.
pub(super) fn sums(
    row: &Algorithm,
    topology: &Topology,
    root: Rank,
    rank: Rank,
    steps: Vec<Step>,
) -> Vec<Step> {
    let steps: Rc<[Step]> = steps.into();
    let known = HashMap::from([(rank, steps.clone())]);
    let mut pass = Pass { row, topology, root, rank, known };
    (0..steps.len()).flat_map(|index| pass.apart(&steps, index)).collect()
}

struct Pass<'a> {
    row: &'a Algorithm,
    topology: &'a Topology,
    root: Rank,
    rank: Rank,
    /// The steps of this rank, and of ranks whose messages it adds.
    known: HashMap<Rank, Rc<[Step]>>,
}

impl Pass<'_> {
    /// What takes the place of a step of this rank.
    fn apart(&mut self, steps: &[Step], index: usize) -> Vec<Step> {
        let one = match &steps[index] {
            Step::Send { to, src } => Step::Send { to: *to, src: self.found(index, *src) },
            Step::Recv { from, dst } => {
                let is_sum = self.brings_sum(index);
                Step::Recv { from: *from, dst: self.kept(*dst, is_sum) }
            }
            Step::RecvReduce { from, dst, side, finish } => {
                let incoming = match self.sent_sum(self.rank, index) {
                    true => Loc::sum(INCOMING, dst.span),
                    false => Loc::scratch(spare(steps), dst.span),
                };
                let sum = self.pair(index, *dst, incoming, *side, *finish);
                return vec![Step::Recv { from: *from, dst: incoming }, sum];
            }
            Step::Reduce { dst, src, side, finish } => {
                let incoming = self.found(index, *src);
                self.pair(index, *dst, incoming, *side, *finish)
            }
            Step::ReduceTree { dsts, srcs, finish } => Step::ReduceTree {
                dsts: dsts
                    .iter()
                    .map(|dst| self.kept(*dst, !finish && !self.rounds(srcs)))
                    .collect(),
                srcs: srcs.iter().map(|(node, src)| (*node, self.found(index, *src))).collect(),
                finish: *finish,
            },
            Step::Copy { dst, src } => {
                let src = self.found(index, *src);
                Step::Copy { dst: self.kept(*dst, src.is_wide()), src }
            }
            other => other.clone(),
        };
        vec![one]
    }

    /// `dst = dst + incoming`, where the sum may lie elsewhere than its parts.
    fn pair(&mut self, index: usize, dst: Loc, incoming: Loc, side: Side, finish: bool) -> Step {
        let own = self.found(index, dst);
        let srcs = match side {
            Side::Left => [incoming, own],
            Side::Right => [own, incoming],
        };
        let srcs = srcs.into_iter().enumerate().map(|(leaf, src)| (Node::leaf(leaf), src));
        Step::ReduceTree { dsts: vec![self.kept(dst, !finish)], srcs: srcs.collect(), finish }
    }

    /// Where a step of this rank finds what the algorithm has put to `loc`.
    fn found(&mut self, index: usize, loc: Loc) -> Loc {
        let is_sum = self.is_sum(self.rank, index, loc);
        self.kept(loc, is_sum)
    }

    /// Where what the algorithm puts to `loc` lies.
    fn kept(&self, loc: Loc, is_sum: bool) -> Loc {
        let place = match loc.buffer {
            Buffer::Data if is_sum => 0,
            Buffer::Scratch(slot) if is_sum => INCOMING + 1 + slot,
            _ => return loc,
        };
        let span = match (self.row.collective, loc.buffer) {
            // The data is the rank's own block, and the span of a place for sums says whose block lies there.
            (Collective::ReduceScatter, Buffer::Data) => {
                Span::block(self.rank, self.topology.world_size)
            }
            _ => loc.span,
        };
        Loc { buffer: Buffer::Sum(place), span, ..loc }
    }

    /// Whether step `index` of this rank receives a sum that is not finished. What is only kept or handed on is a
    /// result.
    fn brings_sum(&mut self, index: usize) -> bool {
        let steps = self.steps_of(self.rank);
        let is_used = |step: &&Step, dst: Loc| {
            step.reads().chain(step.writes()).any(|place| place.overlaps(dst))
        };
        let next = steps[index]
            .writes()
            .next()
            .and_then(|dst| steps[index + 1..].iter().find(|step| is_used(step, dst)));
        matches!(next, Some(Step::ReduceTree { .. } | Step::Reduce { .. }))
            && self.sent_sum(self.rank, index)
    }

    /// Whether the message that `rank` receives in step `index` was sent from an unfinished sum.
    fn sent_sum(&mut self, rank: Rank, index: usize) -> bool {
        let steps = self.steps_of(rank);
        let sender = |step: &Step| match step {
            Step::Recv { from, .. } | Step::RecvReduce { from, .. } => Some(*from),
            _ => None,
        };
        let Some(from) = sender(&steps[index]) else { return false };
        let before = steps[..index].iter().filter(|step| sender(step) == Some(from)).count();
        let theirs = self.steps_of(from);
        let mut sends = theirs.iter().enumerate().filter_map(|(at, step)| match step {
            Step::Send { to, src } if *to == rank => Some((at, *src)),
            _ => None,
        });
        sends.nth(before).is_some_and(|(at, src)| self.is_sum(from, at, src))
    }

    /// Whether an unfinished sum lies at `loc`, in the memory of `rank`, before its step `index`.
    fn is_sum(&mut self, rank: Rank, index: usize, loc: Loc) -> bool {
        if loc.peer.is_some() {
            return false; // neighbours show what they bring, and results
        }
        let steps = self.steps_of(rank);
        let writes = |step: &Step| step.writes().any(|dst| dst.overlaps(loc));
        // What nobody has written is what the caller brings.
        let Some(last) = steps[..index].iter().rposition(writes) else { return false };
        match &steps[last] {
            Step::RecvReduce { finish, .. } | Step::Reduce { finish, .. } => !finish,
            Step::ReduceTree { srcs, finish, .. } => !finish && !self.rounds(srcs),
            Step::Copy { src, .. } => self.is_sum(rank, last, *src),
            // A message that others add as they get it is looked at where they add it.
            Step::Recv { .. } => rank == self.rank && self.brings_sum(last),
            Step::Send { .. } | Step::Flush { .. } | Step::Post | Step::Wait { .. } => false,
        }
    }

    /// Whether a rank rounds a sum of these, because it is the sum of its host: it reads what neighbours bring.
    fn rounds(&self, srcs: &[(Node, Loc)]) -> bool {
        self.topology.rounding == Rounding::Host && srcs.iter().any(|(_, src)| src.peer.is_some())
    }

    fn steps_of(&mut self, rank: Rank) -> Rc<[Step]> {
        let Pass { row, topology, root, .. } = *self;
        let written = || (row.generate)(topology, rank, root).into();
        self.known.entry(rank).or_insert_with(written).clone()
    }
}

/// A number that the steps give to no scratch.
fn spare(steps: &[Step]) -> usize {
    let places = steps.iter().flat_map(|step| step.reads().chain(step.writes()));
    let numbers = places.filter_map(|place| match place.buffer {
        Buffer::Scratch(slot) => Some(slot + 1),
        _ => None,
    });
    numbers.max().unwrap_or(0)
}
