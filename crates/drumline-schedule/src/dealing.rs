//! Which rank works on which shards of a step, and which sums of the tree it brings.
//!
//! A step is a fixed number of shards, and their sum follows the [`tree`](crate::tree) with a shard in the place of a
//! rank. Every rank works on a run of neighbouring shards. It can add those that form a node of the tree by itself. So
//! the ranks together bring nodes that tile the tree, and any dealing gives the same sum.

use std::ops::Range;

use crate::{
    step::Rank,
    tree::{Node, merges},
};

/// The shards of a step, dealt to ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dealing {
    /// Where the run of each rank ends.
    ends: Vec<usize>,
}

impl Dealing {
    /// Deals `shards` to `ranks`. Runs differ in length by at most one. Of all such dealings it takes one with the fewest
    /// [nodes](Self::nodes), because each costs a rank as many bytes as a whole result; of those, the one whose longer runs
    /// come first, as the larger parts of the tree do. `None` if a rank would get no shard.
    pub fn new(shards: usize, ranks: usize) -> Option<Self> {
        let (short, longer) = (shards.checked_div(ranks)?, shards.checked_rem(ranks)?);
        if short == 0 {
            return None;
        }
        let root = Node::root(shards);
        let nodes = |rank: Rank, long_before: usize, is_long: bool| {
            let start = rank * short + long_before;
            maximal(root, start..start + short + usize::from(is_long)).len()
        };
        // From the last rank back to the first: the fewest nodes of the ranks from this one on, by the number of longer
        // runs before it, and whether this rank's run is longer then.
        let mut fewest: Vec<Option<usize>> = vec![None; longer + 1];
        fewest[longer] = Some(0);
        let mut is_long = Vec::with_capacity(ranks);
        for rank in (0..ranks).rev() {
            let least = |long_before: usize, long: bool| {
                let after = fewest.get(long_before + usize::from(long)).copied().flatten()?;
                Some(after + nodes(rank, long_before, long))
            };
            let (best, long): (Vec<_>, Vec<_>) = (0..=longer.min(rank))
                .map(|before| match (least(before, false), least(before, true)) {
                    (Some(without), with) if with.is_none_or(|with| without < with) => {
                        (Some(without), false)
                    }
                    (_, with) => (with, true),
                })
                .unzip();
            fewest = best;
            is_long.push(long);
        }
        let (mut end, mut long_before) = (0, 0);
        let ends = is_long.into_iter().rev().map(|is_long| {
            let more = usize::from(is_long[long_before]);
            long_before += more;
            end += short + more;
            end
        });
        Some(Self { ends: ends.collect() })
    }

    /// The number of shards.
    pub fn shards(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ends.len()
    }

    /// The shards of a rank.
    pub fn run(&self, rank: Rank) -> Range<usize> {
        let start = rank.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[rank]
    }

    /// The sums that a rank brings: the fewest nodes that tile its run.
    pub fn nodes(&self, rank: Rank) -> Vec<Node> {
        maximal(Node::root(self.shards()), self.run(rank))
    }

    /// The program for a stack that adds a rank's shards to its nodes: after each shard, the two topmost sums are added
    /// so many times. The nodes are left on the stack.
    pub fn merges_of_run(&self, rank: Rank) -> Vec<usize> {
        self.nodes(rank).into_iter().flat_map(merges_of_leaves).collect()
    }

    /// The program for a stack that adds the nodes of all ranks, in the order of ranks.
    pub fn merges_of_nodes(&self) -> Vec<usize> {
        let nodes: Vec<Node> = (0..self.ranks()).flat_map(|rank| self.nodes(rank)).collect();
        tiling(merges(Node::root(self.shards()), &nodes))
    }

    /// Whether every rank brings one node, and the sum of these is that of a collective over the ranks.
    pub fn is_tree_of_ranks(&self) -> bool {
        self.merges_of_nodes() == merges_of_leaves(Node::root(self.ranks()))
    }
}

/// The fewest nodes of the tree of `node` that tile `run`, which lies in it.
fn maximal(node: Node, run: Range<usize>) -> Vec<Node> {
    let end = node.lo + node.len;
    if run.start >= end || run.end <= node.lo {
        return Vec::new();
    }
    match node.children() {
        Some((left, right)) if run.start > node.lo || run.end < end => {
            let mut nodes = maximal(left, run.clone());
            nodes.extend(maximal(right, run));
            nodes
        }
        _ => vec![node],
    }
}

fn merges_of_leaves(node: Node) -> Vec<usize> {
    let leaves: Vec<Node> = (node.lo..node.lo + node.len).map(Node::leaf).collect();
    tiling(merges(node, &leaves))
}

fn tiling(merges: Option<Vec<usize>>) -> Vec<usize> {
    merges.unwrap_or_else(|| unreachable!("nodes of runs tile the tree"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the program of a stack over texts.
    fn run(inputs: impl IntoIterator<Item = String>, merges: &[usize]) -> Vec<String> {
        let mut stack: Vec<String> = Vec::new();
        for (input, &merges) in inputs.into_iter().zip(merges) {
            stack.push(input);
            for _ in 0..merges {
                let (right, left) = (stack.pop().unwrap(), stack.pop().unwrap());
                stack.push(format!("({left} + {right})"));
            }
        }
        stack
    }

    /// The sum of shards, straight from the definition.
    fn sum(node: Node) -> String {
        match node.children() {
            None => node.lo.to_string(),
            Some((left, right)) => format!("({} + {})", sum(left), sum(right)),
        }
    }

    /// All dealings, as lengths of runs that differ by at most one.
    fn all(shards: usize, ranks: usize) -> Vec<Vec<usize>> {
        (0_usize..1 << ranks)
            .map(|bits| (0..ranks).map(|rank| shards / ranks + ((bits >> rank) & 1)).collect())
            .filter(|runs: &Vec<usize>| runs.iter().sum::<usize>() == shards)
            .collect()
    }

    #[test]
    fn every_dealing_gives_the_sum_of_all_shards() {
        for (shards, ranks) in (1..=32).flat_map(|s| (1..=s.min(12)).map(move |p| (s, p))) {
            let dealing = Dealing::new(shards, ranks).unwrap();
            let of_rank = |rank: usize| {
                let nodes =
                    run(dealing.run(rank).map(|it| it.to_string()), &dealing.merges_of_run(rank));
                assert_eq!(nodes.len(), dealing.nodes(rank).len());
                nodes
            };
            let nodes: Vec<String> = (0..ranks).flat_map(of_rank).collect();
            let total = run(nodes.clone(), &dealing.merges_of_nodes());
            assert_eq!(total, [sum(Node::root(shards))], "{shards} shards, {ranks} ranks");
            if dealing.is_tree_of_ranks() {
                let over_ranks = run(nodes, &merges_of_leaves(Node::root(ranks)));
                assert_eq!(over_ranks, total, "{shards} shards, {ranks} ranks");
            }
        }
    }

    #[test]
    fn runs_are_even_and_no_dealing_has_fewer_nodes() {
        for (shards, ranks) in (1..=16).flat_map(|s| (1..=s.min(8)).map(move |p| (s, p))) {
            let dealing = Dealing::new(shards, ranks).unwrap();
            let runs: Vec<usize> = (0..ranks).map(|rank| dealing.run(rank).len()).collect();
            let dealings = all(shards, ranks);
            assert!(dealings.contains(&runs), "{runs:?}");
            let nodes = |runs: &Vec<usize>| {
                let mut end = 0;
                let ends = runs.iter().map(|run| {
                    end += run;
                    end
                });
                let dealing = Dealing { ends: ends.collect() };
                (0..ranks).map(|rank| dealing.nodes(rank).len()).sum::<usize>()
            };
            assert_eq!(Some(nodes(&runs)), dealings.iter().map(nodes).min(), "{runs:?}");
        }
    }

    #[test]
    fn parts_of_the_tree_that_add_up_like_ranks_are_a_collective_over_ranks() {
        for (shards, ranks) in [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3), (6, 4), (5, 5), (7, 4)] {
            assert!(Dealing::new(shards, ranks).unwrap().is_tree_of_ranks(), "{shards}, {ranks}");
        }
        for (shards, ranks) in [(8, 3), (6, 2), (12, 4)] {
            assert!(!Dealing::new(shards, ranks).unwrap().is_tree_of_ranks(), "{shards}, {ranks}");
        }
        assert_eq!(Dealing::new(3, 4), None);
        assert_eq!(Dealing::new(3, 0), None);
    }
}
