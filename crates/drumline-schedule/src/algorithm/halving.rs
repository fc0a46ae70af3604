//! Subtree halving: the sum of every node of the canonical tree is spread over all ranks of the node.

use std::ops::Range;

use super::cost::{Cost, Load};
use crate::step::{Loc, Rank, Side, Span, Step};
use crate::topology::Topology;
use crate::tree::Node;

/// From the leaves of the tree to its root, the ranks of two children divide the sum of their node among
/// them. Where the part of a left rank meets the part of a right rank, the two ranks cut the common cell in
/// proportion to the sizes of the children. Each keeps one piece and sends the other piece to the other
/// rank. In the end every rank has summed `1/p` of the data. Then the same messages run backwards and carry
/// the results.
///
/// ```text
///   rank       0      1      2      3
///              aaaa   bbbb   cccc   dddd
///   0-1 2-3    xx..   ..xx   yy..   ..yy     x = a + b, y = c + d
///   0-2 1-3    s...   ..s.   .s..   ...s     s = x + y
///   0-2 1-3    ss..   ..ss   ss..   ..ss
///   0-1 2-3    ssss   ssss   ssss   ssss
/// ```
///
/// See [`all_reduce_cost`]. It works in place: a rank does not write what it has given away before the result
/// comes back. It is for long data among many ranks.
pub(super) fn all_reduce(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let scale = Scale::new(topology.world_size);
    let mut levels = vec![];
    scale.climb(Node::root(topology.world_size), rank, &mut levels);

    let mut steps = vec![];
    for (depth, level) in levels.iter().enumerate() {
        let finish = depth + 1 == levels.len();
        for Exchange { peer, give, .. } in level.iter().filter(|cell| !cell.give.is_empty()) {
            steps.push(Step::Send { to: *peer, src: scale.data(give) });
        }
        for Exchange { peer, keep, .. } in level.iter().filter(|cell| !cell.keep.is_empty()) {
            let side = if *peer < rank { Side::Left } else { Side::Right };
            steps.push(Step::RecvReduce { from: *peer, dst: scale.data(keep), side, finish });
        }
    }
    for level in levels.iter().rev() {
        for Exchange { peer, keep, .. } in level.iter().filter(|cell| !cell.keep.is_empty()) {
            steps.push(Step::Send { to: *peer, src: scale.data(keep) });
        }
        for Exchange { peer, give, .. } in level.iter().filter(|cell| !cell.give.is_empty()) {
            steps.push(Step::Recv { from: *peer, dst: scale.data(give) });
        }
    }
    steps
}

/// `2 ceil(log2 p)` rounds. At every node above it a rank sends, in both directions together, as many
/// elements as it had summed before: first its own `n` elements, then its share of each node. For `p = 2^k`
/// that is `n (1 + 1/2 + .. + 2/p) = 2 n (p - 1)/p` elements in `2 k` messages, and no algorithm sends fewer
/// elements. For other `p` it is at most 1.125 times the minimum (for 3 ranks), in more messages: of
/// `2^k + 1` ranks the last one exchanges with all others.
///
/// A rank combines its share of each node. This function finds the shares of all ranks at once, by cutting
/// the whole data.
pub(super) fn all_reduce_cost(topology: &Topology, _root: Rank, n: usize) -> Cost {
    let p = topology.world_size;
    Cost { rounds: rounds(p), ..Load::most(loads(p, n, Span::WHOLE)) }
}

/// The rounds of `p` ranks.
pub(super) fn rounds(p: usize) -> usize {
    2 * super::cost::doublings(p)
}

/// The load of each of `p` ranks that sum `part` of `n` elements.
pub(super) fn loads(p: usize, n: usize, part: Span) -> Vec<Load> {
    let loads = vec![Load::default(); p];
    let mut census = Census { scale: Scale::new(p), elements: n, part, loads };
    census.line(Node::root(p));
    census.loads
}

/// What a rank does with one cell: it exchanges with `peer`, keeps the sum of one part, and gives the other
/// part away. Parts are ranges of units.
struct Exchange {
    peer: Rank,
    keep: Range<usize>,
    give: Range<usize>,
}

/// A part of the data, and the rank that holds the node's sum of it.
#[derive(Clone)]
struct Piece {
    rank: Rank,
    part: Range<usize>,
}

/// The most slices that can be summed separately. With more slices the borders need larger numbers.
pub(super) const SLICES_MAX: usize = 1_000;

/// The data in units. Parts are ranges of units, so all ranks find the same borders.
struct Scale {
    /// Units in the whole. The parts of blocks of `2^k` ranks are whole units.
    units: usize,
}

impl Scale {
    /// For up to some hundred ranks, units that make all borders exact. For more ranks a unit is less than
    /// `2^-40` of the data, and the units are divided as evenly as possible. The data may be a
    /// [slice](SLICES_MAX).
    fn new(world_size: usize) -> Scale {
        const MOST: usize = 1 << 54;
        let mut units = 1 << world_size.ilog2();
        let mut node = Node::root(world_size);
        while let (false, Some((_, right))) = (node.len.is_power_of_two(), node.children()) {
            // Every cut is at a multiple of a power of two, divided by the length of the node.
            let finer = units * (node.len >> node.len.trailing_zeros());
            if finer > MOST {
                break;
            }
            units = finer;
            node = right;
        }
        Scale { units }
    }

    fn span(&self, part: &Range<usize>) -> Span {
        // In lowest terms, so that printed schedules are easy to read.
        let factor = gcd(gcd(self.units, part.start), part.len());
        let [first, count, of] = [part.start, part.len(), self.units].map(|units| units / factor);
        Span { first, count, of }
    }

    fn data(&self, part: &Range<usize>) -> Loc {
        Loc::data(self.span(part))
    }

    /// Lists what `rank` exchanges at each node above it, the lowest node first. Returns, in their order, the
    /// parts for which the rank then holds the sum of `node`.
    fn climb(&self, node: Node, rank: Rank, levels: &mut Vec<Vec<Exchange>>) -> Vec<Range<usize>> {
        let all = 0..self.units;
        let Some((left, right)) = node.children() else { return vec![all] };
        let is_left = rank < right.lo;
        let (own, other) = if is_left { (left, right) } else { (right, left) };
        let parts = self.climb(own, rank, levels);
        let cells = parts.iter().flat_map(|part| {
            let pieces = self.pieces(other, part).into_iter();
            pieces.map(|piece| (piece.rank, common(&piece.part, part)))
        });
        let exchanges = cells.map(|(peer, cell)| {
            let [first, second] = cut(node, cell);
            let (keep, give) = if is_left { (first, second) } else { (second, first) };
            Exchange { peer, keep, give }
        });
        let level: Vec<Exchange> = exchanges.collect();
        let kept = level.iter().map(|cell| cell.keep.clone()).filter(|part| !part.is_empty());
        let kept = kept.collect();
        levels.push(level);
        kept
    }

    /// The pieces of `node` that touch `window`, whole and in their order. It visits no other pieces, so its
    /// time is proportional to what it returns.
    fn pieces(&self, node: Node, window: &Range<usize>) -> Vec<Piece> {
        let Some((left, right)) = node.children().filter(|_| !node.len.is_power_of_two()) else {
            return self.blocks(node, window).collect();
        };
        let mut pieces = vec![];
        for Piece { rank, part } in self.pieces(right, window) {
            for block in self.blocks(left, &common(&part, window)) {
                let [first, second] = cut(node, common(&block.part, &part));
                pieces.push(Piece { rank: block.rank, part: first });
                pieces.push(Piece { rank, part: second });
            }
        }
        pieces.retain(|piece| !common(&piece.part, window).is_empty());
        pieces
    }

    /// The same for a node of `2^k` ranks. Each rank has one block. Every cut gives the higher half to the
    /// right, so the index of the block is the rank with its bits reversed.
    fn blocks(&self, node: Node, window: &Range<usize>) -> impl Iterator<Item = Piece> {
        let len = self.units / node.len;
        let bits = node.len.ilog2();
        let touched = window.start / len..window.end.div_ceil(len);
        touched.map(move |block| {
            let seat = block.reverse_bits().checked_shr(usize::BITS - bits).unwrap_or(0);
            Piece { rank: node.lo + seat, part: block * len..(block + 1) * len }
        })
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// Cuts a cell of `node` in proportion to the sizes of its children. Where the exact border is not a whole
/// unit, it moves up to the next one, so that rounding never moves a border below an exact border.
fn cut(node: Node, cell: Range<usize>) -> [Range<usize>; 2] {
    let left = node.children().map_or(node.len, |(left, _)| left.len);
    let share = (cell.len() as u128 * left as u128).div_ceil(node.len as u128);
    let border = cell.start + share as usize;
    [cell.start..border, border..cell.end]
}

/// The loads of all ranks.
struct Census {
    scale: Scale,
    elements: usize,
    /// The elements that are summed.
    part: Span,
    /// The load of each rank.
    loads: Vec<Load>,
}

impl Census {
    /// Counts the work up to this node, and returns its pieces, which tile the data.
    fn line(&mut self, node: Node) -> Vec<Piece> {
        if node.len.is_power_of_two() {
            return self.block_line(node);
        }
        let Some((left, right)) = node.children() else { return vec![] };
        let (left, right) = (self.block_line(left), self.line(right));
        self.held(&left, |load| &mut load.sent);
        self.held(&right, |load| &mut load.sent);

        let mut line = vec![];
        let mut lefts = left.iter().peekable();
        for Piece { rank, part } in right {
            let mut at = part.start;
            while let Some(block) = lefts.peek().filter(|_| at < part.end) {
                let end = block.part.end.min(part.end);
                let parts = cut(node, at..end);
                let ranks = [block.rank, rank];
                for (rank, part) in ranks.into_iter().zip(parts) {
                    if !part.is_empty() {
                        // One rank sends its value, the other the result.
                        ranks.iter().for_each(|&rank| self.loads[rank].messages += 1);
                        line.push(Piece { rank, part });
                    }
                }
                if end == block.part.end {
                    lefts.next();
                }
                at = end;
            }
        }
        self.held(&line, |load| &mut load.combined);
        line
    }

    /// The same for `2^k` ranks: two messages at every node, and halves of halves.
    fn block_line(&mut self, node: Node) -> Vec<Piece> {
        let all = 0..self.scale.units;
        let line: Vec<Piece> = self.scale.blocks(node, &all).collect();
        for (index, &Piece { rank, .. }) in line.iter().enumerate() {
            self.loads[rank].messages += 2 * node.len.ilog2() as usize;
            let mut blocks = 1;
            while blocks < node.len {
                let block = Span::block(index * blocks / node.len, blocks);
                self.loads[rank].sent += self.len(block);
                blocks *= 2;
                let half = Span::block(index * blocks / node.len, blocks);
                self.loads[rank].combined += self.len(half);
            }
        }
        line
    }

    /// Adds the elements that every rank holds to one of the counts.
    fn held(&mut self, line: &[Piece], count: fn(&mut Load) -> &mut usize) {
        for Piece { rank, part } in line {
            let len = self.len(self.scale.span(part));
            *count(&mut self.loads[*rank]) += len;
        }
    }

    /// The elements of a span of the summed part.
    fn len(&self, span: Span) -> usize {
        span.within(self.part).resolve(self.elements).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_of_powers_of_two_has_a_closed_form() {
        for bits in 1..=10 {
            let p: usize = 1 << bits;
            for n in [0, 1, p - 1, 12 * p + 5] {
                // The highest block is the largest at every level.
                let halves: usize = (1..bits).map(|level| n.div_ceil(1 << level)).sum();
                let cost = all_reduce_cost(&Topology::flat(p), 0, n);
                assert_eq!((cost.messages, cost.elements), (2 * bits, n + halves), "p = {p}");
                assert_eq!(cost.combined, halves + n.div_ceil(p), "p = {p}");
            }
        }
    }

    #[test]
    fn no_world_size_costs_more_than_an_eighth_above_the_least() {
        for p in 2..=300 {
            // So many elements for each rank that rounding does not matter.
            let n = 1_000_000 * p;
            let sent = all_reduce_cost(&Topology::flat(p), 0, n).elements as f64;
            let least = (2 * (p - 1) * 1_000_000) as f64;
            assert!(sent <= 1.125 * least + 10.0, "p = {p}: {}", sent / least);
        }
    }

    #[test]
    fn shares_are_even_where_borders_cannot_be_exact() {
        for p in [1_023, 4_095, 10_007, 16_383] {
            let scale = Scale::new(p);
            for rank in [0, 1, p / 2, p - 2, p - 1] {
                let parts = scale.climb(Node::root(p), rank, &mut vec![]);
                let held: usize = parts.iter().map(Range::len).sum();
                let off = held.abs_diff(scale.units / p) as f64 / scale.units as f64;
                assert!(off < 1e-10, "rank {rank} of {p} is off by {off}");
            }
        }
    }
}
