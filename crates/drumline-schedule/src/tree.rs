//! The canonical tree: the one order in which every algorithm adds.
//!
//! `T(lo, 1)` is the value of rank `lo`; `T(lo, m) = T(lo, h) + T(lo + h, m - h)` with `h` the largest power
//! of two below `m`. Lower ranks are on the left. The tree has the shape that a binary counter builds: at
//! level `k` adjacent aligned runs of `2^k` ranks merge, and an odd run is carried up. Its depth is
//! `ceil(log2 m)`.

/// A rank of the group that runs a schedule: `0..world_size`.
pub type Rank = usize;

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

    /// The two nodes whose sum this node is, or `None` for a leaf.
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

/// The only node that `inputs` can tile: it begins at the first input, and has as many ranks as all inputs.
pub fn tiled(inputs: &[Node]) -> Option<Node> {
    let lo = inputs.first()?.lo;
    let end = inputs.iter().try_fold(lo, |end, node| end.checked_add(node.len))?;
    Some(Node { lo, len: end - lo })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The sum as text, straight from the definition.
    fn sum(node: Node) -> String {
        match node.children() {
            None => node.lo.to_string(),
            Some((left, right)) => format!("({} + {})", sum(left), sum(right)),
        }
    }

    /// Nodes that tile `node`: a set bit of `cuts` says to go further down.
    fn tiling(node: Node, cuts: &mut impl Iterator<Item = bool>, tiles: &mut Vec<Node>) {
        match node.children() {
            Some((left, right)) if cuts.next() == Some(true) => {
                tiling(left, cuts, tiles);
                tiling(right, cuts, tiles);
            }
            _ => tiles.push(node),
        }
    }

    #[test]
    fn shape_of_the_tree() {
        assert_eq!(sum(Node::root(1)), "0");
        assert_eq!(sum(Node::root(3)), "((0 + 1) + 2)");
        assert_eq!(sum(Node::root(6)), "(((0 + 1) + (2 + 3)) + (4 + 5))");
        assert_eq!(sum(Node { lo: 8, len: 3 }), "((8 + 9) + 10)");
    }

    proptest! {
        #[test]
        fn stack_evaluates_the_tree(
            lo in 0usize..9,
            len in 1usize..200,
            cuts in proptest::collection::vec(prop::bool::weighted(0.8), 0..400),
        ) {
            let root = Node { lo, len };
            let mut tiles = vec![];
            tiling(root, &mut cuts.into_iter(), &mut tiles);

            let merges = merges(root, &tiles).unwrap();
            let mut stack = vec![];
            for (&tile, merges) in tiles.iter().zip(merges) {
                stack.push(sum(tile));
                for _ in 0..merges {
                    let right = stack.pop().unwrap();
                    let left = stack.pop().unwrap();
                    stack.push(format!("({left} + {right})"));
                }
            }
            prop_assert_eq!(stack, vec![sum(root)]);
        }
    }

    #[test]
    fn inputs_that_do_not_tile_are_refused() {
        let root = Node::root(4);
        let leaf = Node::leaf;
        assert_eq!(merges(root, &[]), None);
        assert_eq!(merges(root, &[leaf(0), leaf(1), leaf(2)]), None);
        assert_eq!(merges(root, &[leaf(0), leaf(1), leaf(3), leaf(2)]), None);
        assert_eq!(merges(root, &[leaf(0), leaf(1), leaf(2), leaf(3), leaf(3)]), None);
        // 1..3 is not a node: rank 1 is added to rank 0 first.
        assert_eq!(merges(root, &[leaf(0), Node { lo: 1, len: 2 }, leaf(3)]), None);
    }
}
