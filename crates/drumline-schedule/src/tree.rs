//! The canonical tree: the one order in which every algorithm adds.
//!
//! `T(lo, 1)` is the value of rank `lo`; `T(lo, m) = T(lo, h) + T(lo + h, m - h)` with `h` the
//! largest power of two below `m`. Lower ranks stand on the left. It is the shape that a binary
//! counter builds: at level `k` adjacent aligned runs of `2^k` ranks merge, and an odd one is
//! carried up. Its depth is `ceil(log2 m)`.

use crate::step::Rank;

/// The node of the tree that sums ranks `lo..lo + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node {
    /// Lowest rank.
    pub lo: Rank,
    /// Number of ranks, at least 1.
    pub len: usize,
}

impl Node {
    /// The value of one rank.
    pub const fn leaf(rank: Rank) -> Node {
        Node { lo: rank, len: 1 }
    }

    /// The sum of all ranks.
    pub const fn root(world_size: usize) -> Node {
        Node { lo: 0, len: world_size }
    }

    /// The two nodes that this one is the sum of, or `None` for a leaf.
    pub fn children(self) -> Option<(Node, Node)> {
        if self.len < 2 {
            return None;
        }
        let left = 1 << (self.len - 1).ilog2();
        Some((Node { lo: self.lo, len: left }, Node { lo: self.lo + left, len: self.len - left }))
    }
}

/// How to sum `inputs` to `root` with a stack: after input `i` has been pushed, the two topmost
/// entries are added `merges[i]` times.
///
/// `None` when the inputs, taken in order, do not tile `root` with nodes of its tree.
///
/// ```
/// use drumline_schedule::tree::{Node, merges};
///
/// let leaves: Vec<_> = (0..5).map(Node::leaf).collect();
/// assert_eq!(merges(Node::root(5), &leaves), Some(vec![0, 1, 0, 2, 1]));
/// ```
pub fn merges(root: Node, inputs: &[Node]) -> Option<Vec<usize>> {
    fn visit(node: Node, inputs: &[Node], next: &mut usize, merges: &mut [usize]) -> Option<()> {
        if inputs.get(*next) == Some(&node) {
            *next += 1;
            return Some(());
        }
        let (left, right) = node.children()?;
        visit(left, inputs, next, merges)?;
        visit(right, inputs, next, merges)?;
        merges[*next - 1] += 1;
        Some(())
    }
    let mut merges = vec![0; inputs.len()];
    let mut next = 0;
    visit(root, inputs, &mut next, &mut merges)?;
    (next == inputs.len()).then_some(merges)
}
