//! The facts about ranks that the choice of an algorithm depends on.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::str::FromStr;

use crate::step::Rank;
use crate::tree::Node;

/// The ranks of a group, their hosts and memory nodes, and the order in which they add.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Topology {
    /// Number of ranks.
    pub world_size: usize,
    /// The order in which reductions add.
    pub order: SumOrder,
    /// Where sums of narrow floats are rounded.
    pub rounding: Rounding,
    /// For each rank, an index into `ranks_by_host`.
    host_of: Vec<usize>,
    /// The ranks of each host in ascending order. Hosts are ordered by their lowest rank.
    ranks_by_host: Vec<Vec<Rank>>,
    /// The same for memory nodes. A host without known memory nodes counts as one node.
    ranks_by_node: Vec<Vec<Rank>>,
}

/// The order in which every reduction of a group adds, whatever the algorithm. All ranks of a group must have
/// the same order. Another order may give other bits.
///
/// ```
/// use drumline_schedule::{SumOrder, Topology};
///
/// // Ranks dealt out to two hosts in turn: (0 + 1) + (2 + 3), or (0 + 2) + (1 + 3)?
/// let dealt = Topology::placed(["a", "b", "a", "b"]);
/// assert_eq!(dealt.order, SumOrder::Rank); // unless said otherwise
/// assert!(!dealt.clone().sums_by_placement());
/// assert!(!dealt.with_order(SumOrder::Placement).sums_by_rank());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SumOrder {
    /// The [`tree`](crate::tree) over all ranks. Results do not depend on where ranks run.
    #[default]
    Rank,
    /// A tree over hosts. Each of its leaves is the tree over the ranks of one host. For any placement hosts
    /// can add their own ranks first, but results depend on the placement.
    Placement,
    /// As a foreign backend adds by itself, where it has sums of its own. Their bits may depend on its version,
    /// on the algorithm that it takes, and on where ranks run. The library's own transports refuse this order.
    Backend,
}

impl SumOrder {
    /// The name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            SumOrder::Rank => "rank",
            SumOrder::Placement => "placement",
            SumOrder::Backend => "backend",
        }
    }
}

impl FromStr for SumOrder {
    type Err = String;

    fn from_str(name: &str) -> Result<SumOrder, String> {
        let all = [SumOrder::Rank, SumOrder::Placement, SumOrder::Backend];
        let found = all.into_iter().find(|order| order.name() == name);
        found.ok_or_else(|| format!("{name:?} should be rank, placement or backend"))
    }
}

/// Where sums of floats of 16 or 8 bits are rounded. All ranks of a group must have the same rounding. Another one may
/// give other bits.
///
/// ```
/// use drumline_schedule::{Rounding, Topology};
///
/// let world = Topology::hosts(&[4, 4]);
/// assert_eq!(world.rounding, Rounding::Once); // unless said otherwise
/// assert_eq!(world.with_rounding(Rounding::Host).rounding.to_string(), "host");
/// assert_eq!("once".parse(), Ok(Rounding::Once));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// At the end. Between hosts, sums travel in a wider type.
    #[default]
    Once,
    /// Each host rounds the sum of its ranks, which travels in the type of the call. The sum of these is rounded at the
    /// end. Results depend on the placement of ranks.
    Host,
}

impl Rounding {
    /// The name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Rounding::Once => "once",
            Rounding::Host => "host",
        }
    }
}

impl fmt::Display for Rounding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Rounding {
    type Err = String;

    fn from_str(name: &str) -> Result<Rounding, String> {
        let found = [Rounding::Once, Rounding::Host].into_iter().find(|it| it.name() == name);
        found.ok_or_else(|| format!("{name:?} should be once or host"))
    }
}

impl Topology {
    /// `world_size` ranks, all equally far from one another, none on the host of another.
    pub fn flat(world_size: usize) -> Topology {
        Topology::placed(0..world_size)
    }

    /// Consecutive ranks on hosts of these sizes.
    pub fn hosts(sizes: &[usize]) -> Topology {
        let hosts = sizes.iter().enumerate();
        Topology::placed(hosts.flat_map(|(host, &size)| std::iter::repeat_n(host, size)))
    }

    /// The host of each rank, by any name.
    pub fn placed<H: Eq + Hash>(hosts: impl IntoIterator<Item = H>) -> Topology {
        let (host_of, ranks_by_host) = grouped(hosts);
        Topology {
            world_size: host_of.len(),
            order: SumOrder::Rank,
            rounding: Rounding::Once,
            host_of,
            ranks_by_node: ranks_by_host.clone(),
            ranks_by_host,
        }
    }

    /// The same ranks, with the name of the memory node that each runs on, unique on its host. `None` is a
    /// rank that may run on several nodes; its host then counts as one node.
    pub fn with_nodes<N: Eq + Hash>(self, nodes: impl IntoIterator<Item = Option<N>>) -> Topology {
        let nodes: Vec<Option<N>> = nodes.into_iter().collect();
        let node = |rank: Rank| nodes.get(rank).and_then(Option::as_ref);
        let is_known: Vec<bool> = self
            .ranks_by_host
            .iter()
            .map(|ranks| ranks.iter().all(|&it| node(it).is_some()))
            .collect();
        let place = |(rank, &host): (Rank, &usize)| (host, node(rank).filter(|_| is_known[host]));
        let (_, ranks_by_node) = grouped(self.host_of.iter().enumerate().map(place));
        Topology { ranks_by_node, ..self }
    }

    /// The same ranks with another order of sums.
    pub fn with_order(self, order: SumOrder) -> Topology {
        Topology { order, ..self }
    }

    /// The same ranks with another rounding.
    pub fn with_rounding(self, rounding: Rounding) -> Topology {
        Topology { rounding, ..self }
    }

    /// The ranks of each host, ascending; hosts come in the order of their lowest ranks.
    pub fn ranks_by_host(&self) -> &[Vec<Rank>] {
        &self.ranks_by_host
    }

    /// The ranks of each memory node, ascending; nodes come in the order of their lowest ranks.
    pub fn ranks_by_node(&self) -> &[Vec<Rank>] {
        &self.ranks_by_node
    }

    /// The index of a rank's host in [`Topology::ranks_by_host`].
    pub fn host_of(&self, rank: Rank) -> usize {
        self.host_of[rank]
    }

    /// The ranks that share memory with `rank`, itself included, ascending.
    pub fn neighbours(&self, rank: Rank) -> &[Rank] {
        &self.ranks_by_host[self.host_of[rank]]
    }

    /// Whether there are several hosts, and one of them has several ranks.
    pub fn has_hosts_of_several(&self) -> bool {
        self.ranks_by_host.len() > 1 && self.ranks_by_host.len() < self.world_size
    }

    /// Whether all ranks share one host.
    pub fn is_one_host(&self) -> bool {
        self.ranks_by_host.len() == 1
    }

    /// Whether the tree over all ranks gives sums in the order of this topology.
    pub fn sums_by_rank(&self) -> bool {
        self.order == SumOrder::Rank || self.orders_agree()
    }

    /// Whether a tree over hosts, of trees over their ranks, gives sums in the order of this topology.
    pub fn sums_by_placement(&self) -> bool {
        self.order == SumOrder::Placement || self.orders_agree()
    }

    /// Whether there is one host, and a tree over its memory nodes, of trees over their ranks, gives sums in
    /// the order of this topology.
    pub fn sums_by_node(&self) -> bool {
        self.is_one_host() && are_of_the_tree(&self.ranks_by_node)
    }

    fn orders_agree(&self) -> bool {
        are_of_the_tree(&self.ranks_by_host)
    }
}

/// Returns the group of each rank, and the ranks of each group. `names` has the name of each rank's group.
fn grouped<H: Eq + Hash>(names: impl IntoIterator<Item = H>) -> (Vec<usize>, Vec<Vec<Rank>>) {
    let mut known: HashMap<H, usize> = HashMap::new();
    let mut groups: Vec<Vec<Rank>> = vec![];
    let mut group_of = vec![];
    for (rank, name) in names.into_iter().enumerate() {
        let group = *known.entry(name).or_insert(groups.len());
        if group == groups.len() {
            groups.push(vec![]);
        }
        groups[group].push(rank);
        group_of.push(group);
    }
    (group_of, groups)
}

/// Whether each group has consecutive ranks that are a node of the tree over all ranks. That holds for groups
/// of the same power of two, where the last group may be smaller.
fn are_of_the_tree(groups: &[Vec<Rank>]) -> bool {
    fn agree(sizes: &[usize]) -> bool {
        let Some((groups, _)) = Node::root(sizes.len()).children() else { return true };
        let (left, right) = sizes.split_at(groups.len);
        let ranks = Node::root(sizes.iter().sum()).children();
        ranks.is_some_and(|(ranks, _)| ranks.len == left.iter().sum::<usize>())
            && agree(left)
            && agree(right)
    }
    let sizes: Vec<usize> = groups.iter().map(Vec::len).collect();
    groups.concat().is_sorted() && agree(&sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_known_by_their_lowest_rank() {
        let world = Topology::placed(["b", "a", "b", "c", "a"]);
        assert_eq!(world.ranks_by_host(), [vec![0, 2], vec![1, 4], vec![3]]);
        assert_eq!(world.neighbours(4), [1, 4]);
        assert_eq!(Topology::hosts(&[1, 1, 1]), Topology::flat(3));
        assert_eq!(Topology::hosts(&[2, 1]), Topology::placed([7, 7, 5]));
    }

    #[test]
    fn orders_agree_when_hosts_are_nodes_of_the_tree() {
        for sizes in [&[3][..], &[1, 1, 1], &[2, 2, 2, 1], &[4, 4, 3], &[4, 4, 8]] {
            assert!(Topology::hosts(sizes).sums_by_placement(), "{sizes:?}");
        }
        for sizes in [&[3, 3][..], &[1, 2], &[4, 2, 2], &[2, 4]] {
            assert!(!Topology::hosts(sizes).sums_by_placement(), "{sizes:?}");
        }
        assert!(!Topology::placed([0, 1, 0, 1]).sums_by_placement());
        assert!(!Topology::hosts(&[3, 3]).with_order(SumOrder::Placement).sums_by_rank());
    }
}
