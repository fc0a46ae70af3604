//! A step as shards: what a rank does with its own, and how the ranks add theirs.

use std::{ops::Range, sync::Arc};

use drumline_group::{DType, ProcessGroup, ReduceOp, algorithms::SumOrder};
use drumline_schedule::Dealing;

use super::{DdpOptions, ParameterSpec, Wire};
use crate::{Error, Result};

/// So many shards a step has at most.
const MOST: usize = 1 << 16;

/// The shards of a step, dealt to the ranks of a group.
#[derive(Debug)]
pub(super) struct Shards {
    /// How many there are.
    pub(super) count: usize,
    /// This rank's.
    pub(super) run: Range<usize>,
    /// Where their gradients go, in their order.
    pub(super) leaves: Vec<Leaf>,
    /// How many shards each rank has.
    pub(super) lengths: Vec<usize>,
    /// How many sums each rank brings.
    pub(super) nodes: Vec<usize>,
    /// How the sums of all ranks are added: see [`Dealing::merges_of_nodes`].
    pub(super) merges: Vec<usize>,
    /// What all ranks pass to a collective that gives the sum, if there is one.
    pub(super) op: Option<ReduceOp>,
}

/// Where a gradient goes: the sums of a bucket are a stack, and each has a level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Leaf {
    pub(super) level: usize,
    /// Whether it is added to the sum there. If not, it is the first of a new sum.
    pub(super) is_added: bool,
    /// How often the topmost sum is then added to the one below it.
    pub(super) folds: usize,
}

impl Shards {
    /// `None` unless the options say that a step is shards.
    ///
    /// # Errors
    ///
    /// There cannot be so many shards, or the gradients of one cannot be added exactly alike on any number of ranks.
    pub(super) fn deal(
        parameters: &[ParameterSpec],
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<Option<Arc<Self>>> {
        let Some(count) = options.shards else { return Ok(None) };
        let refuse = |problem| Err(Error::argument("DdpOptions::shards", problem));
        let world_size = group.world_size();
        if count > MOST {
            return refuse(format!("{count} shards are more than {MOST}"));
        }
        if options.wire != Wire::AsIs {
            return refuse("sums of shards travel as f32: leave `wire` as it is".to_owned());
        }
        let is_narrow = |spec: &&ParameterSpec| !matches!(spec.dtype, DType::F32 | DType::F64);
        if let Some(narrow) = parameters.iter().find(is_narrow) {
            return refuse(format!(
                "gradients of parameter {narrow} would be rounded on the way from shard to shard: keep parameters in \
                 f32 or f64, or leave `shards` unset"
            ));
        }
        let Some(dealing) = Dealing::new(count, world_size) else {
            return refuse(format!(
                "{count} shards are too few for {world_size} ranks: each needs at least one"
            ));
        };
        let mut height = 0;
        let leaf = |merges: usize| {
            let is_added = merges > 0;
            let leaf = Leaf {
                level: height - usize::from(is_added),
                is_added,
                folds: merges.saturating_sub(1),
            };
            height = height + 1 - merges;
            leaf
        };
        let op = match count == world_size {
            true => ReduceOp::Avg,
            false => ReduceOp::Sum,
        };
        Ok(Some(Arc::new(Self {
            count,
            run: dealing.run(group.rank()),
            leaves: dealing.merges_of_run(group.rank()).into_iter().map(leaf).collect(),
            lengths: (0..world_size).map(|rank| dealing.run(rank).len()).collect(),
            nodes: (0..world_size).map(|rank| dealing.nodes(rank).len()).collect(),
            merges: dealing.merges_of_nodes(),
            op: adds_in_order(&dealing, group).then_some(op),
        })))
    }
}

/// Whether a collective of `group` adds what the ranks bring in the order of the tree of shards.
#[doc(hidden)]
pub fn adds_in_order(dealing: &Dealing, group: &ProcessGroup) -> bool {
    dealing.is_tree_of_ranks() && group.config().sum_order == SumOrder::Rank
}

#[cfg(test)]
mod tests {
    use drumline_group::Config;

    use super::*;

    #[test]
    fn the_leaves_of_a_rank_alone_are_a_binary_counter() {
        let options = DdpOptions::default().shards(7);
        let shards = Shards::deal(&[], &options, &ProcessGroup::alone()).unwrap().unwrap();
        // (((0 + 1) + (2 + 3)) + ((4 + 5) + 6)) in the order in which they come.
        let told: Vec<(usize, bool, usize)> =
            shards.leaves.iter().map(|it| (it.level, it.is_added, it.folds)).collect();
        let (new, more) = (false, true);
        let wanted = [
            (0, new, 0),
            (0, more, 0),
            (1, new, 0),
            (1, more, 1),
            (1, new, 0),
            (1, more, 0),
            (1, more, 1),
        ];
        assert_eq!(told, wanted);
        assert_eq!((shards.run.clone(), &shards.nodes[..]), (0..7, &[1][..]));
    }

    #[test]
    fn a_collective_adds_only_if_its_order_is_that_of_ranks() {
        let ops = |shards: usize, config: &Config| {
            let options = DdpOptions::default().shards(shards);
            let groups = drumline_group::rendezvous::local_world_with(2, config).unwrap();
            let op = |group| Shards::deal(&[], &options, group).unwrap().unwrap().op;
            [op(&groups[0]), op(&groups[1])]
        };
        let by_rank = Config::default();
        assert_eq!(ops(2, &by_rank), [Some(ReduceOp::Avg); 2]);
        assert_eq!(ops(8, &by_rank), [Some(ReduceOp::Sum); 2]);
        assert_eq!(ops(6, &by_rank), [None; 2]);
        assert_eq!(ops(8, &by_rank.sum_order(SumOrder::Placement)), [None; 2]);
    }
}
