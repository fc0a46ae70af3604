//! The place of each gradient in the buckets.

use std::{ops::Range, sync::Arc};

use drumline_group::{DType, ProcessGroup, ReduceOp};

use super::{
    super::{
        Bucket, DdpOptions, Owners, ParameterSpec, Wire, plan_buckets,
        shards::{Leaf, Shards},
    },
    activity, sizes,
};
use crate::{Error, Result};

/// The buckets, and the place of each parameter in them.
#[derive(Debug)]
pub(super) struct Plan {
    /// The buckets, in launch order.
    pub(super) buckets: Vec<Bucket>,
    /// The blocks of each bucket: one or, if the optimizer is sharded, one for each rank.
    blocks: Vec<Vec<Block>>,
    /// The places, by parameter.
    pub(super) slots: Vec<Slot>,
    pub(super) wire: Wire,
    /// The owners of parameters, if each rank gets the averages of its own parameters alone.
    pub(super) owners: Option<Arc<Owners>>,
    /// The shards of a step, if it is shards.
    pub(super) shards: Option<Arc<Shards>>,
    rank: usize,
    world_size: usize,
}

/// The place of a parameter.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    pub(super) bucket: usize,
    /// Its elements in the bucket.
    pub(super) range: Range<usize>,
    /// The element of the bucket that says whether the parameter was used.
    pub(super) mark: usize,
}

/// A part of a bucket that a rank gets back.
///
/// It has gradients, one mark for each of them, and marks of ranks. A rank must get back each kind of mark at least
/// once. If all get the whole bucket, each bucket says whether a rank has seen a fault, and the first one says which
/// ranks have data. If a rank gets its own blocks alone, the blocks of the last bucket say both: they are launched
/// when all is known, and marks of every block cost bytes.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// Its elements in the bucket.
    pub(super) all: Range<usize>,
    /// Those that are gradients.
    pub(super) gradients: Range<usize>,
    /// The element that says whether a rank has seen a fault.
    pub(super) fault_mark: Option<usize>,
    /// The elements that say which ranks have data of their own.
    pub(super) active_marks: Option<Range<usize>>,
}

impl Block {
    /// Makes the places in the bucket those in the block.
    fn by_itself(&self) -> Self {
        let start = self.all.start;
        let shift = |range: &Range<usize>| range.start - start..range.end - start;
        Self {
            all: shift(&self.all),
            gradients: shift(&self.gradients),
            fault_mark: self.fault_mark.map(|mark| mark - start),
            active_marks: self.active_marks.as_ref().map(shift),
        }
    }
}

impl Plan {
    /// The plan for gradients that are expected in `order`. A bucket that is fitted to the model has at least
    /// `least_bytes`.
    pub(super) fn new(
        parameters: &[ParameterSpec],
        order: impl IntoIterator<Item = usize>,
        least_bytes: usize,
        options: &DdpOptions,
        owners: Option<&Arc<Owners>>,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let limits = sizes::limits(parameters, least_bytes, options);
        let buckets = plan_buckets(parameters, order, &limits)?;
        let owners = owners.filter(|_| group.world_size() > 1).cloned();
        let mut slots = vec![Slot::default(); parameters.len()];
        let mut blocks = Vec::with_capacity(buckets.len());
        for (bucket, Bucket { parameters: members, .. }) in buckets.iter().enumerate() {
            let is_last = bucket + 1 == buckets.len();
            let mut layout = Layout { parameters, slots: &mut slots, bucket, end: 0 };
            let active_marks = activity::marks(group.world_size());
            blocks.push(match &owners {
                None => vec![layout.block(members, true, (bucket == 0).then_some(active_marks))],
                Some(owners) => {
                    let of_rank = |rank| -> Vec<usize> {
                        let all = members.iter().copied();
                        all.filter(|&it| owners.of(it) == Some(rank)).collect()
                    };
                    let active_marks = is_last.then_some(active_marks);
                    let ranks = 0..group.world_size();
                    ranks.map(|rank| layout.block(&of_rank(rank), is_last, active_marks)).collect()
                }
            });
        }
        let shards = Shards::deal(parameters, options, group)?;
        let (wire, rank, world_size) = (options.wire, group.rank(), group.world_size());
        Ok(Self { buckets, blocks, slots, wire, owners, shards, rank, world_size })
    }

    /// The plan for the order that the rank `source` has observed, and for the prices that it sees. All ranks must
    /// call this.
    pub(super) fn agree(
        parameters: &[ParameterSpec],
        observed: &[usize],
        source: usize,
        options: &DdpOptions,
        owners: Option<&Arc<Owners>>,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let least_bytes = sizes::least_bytes_by_price(group)?;
        let numbers = observed.iter().copied().chain([least_bytes]);
        let mut numbers: Vec<i64> = numbers.map(|number| number as i64).collect();
        group.broadcast(&mut numbers, source)?;
        // `plan_buckets` refuses a number that is no index, like any wrong order.
        let mut numbers: Vec<usize> =
            numbers.into_iter().map(|it| usize::try_from(it).unwrap_or(usize::MAX)).collect();
        let least_bytes = numbers.pop().unwrap_or(least_bytes);
        Plan::new(parameters, numbers, least_bytes, options, owners, group)
    }

    pub(super) fn slot(&self, parameter: usize) -> &Slot {
        &self.slots[parameter]
    }

    /// Where the next gradient of a parameter goes, of which this rank has `so_many` in this step. `None` if it has one
    /// of each shard.
    pub(super) fn leaf(&self, so_many: usize) -> Option<Leaf> {
        match &self.shards {
            Some(shards) => shards.leaves.get(so_many).copied(),
            None => Some(Leaf { is_added: so_many > 0, ..Leaf::default() }),
        }
    }

    /// How many gradients of each parameter this rank must have at the end of a step.
    pub(super) fn leaves(&self) -> usize {
        self.shards.as_ref().map_or(1, |shards| shards.leaves.len())
    }

    /// By what a collective has divided the sum over all ranks.
    pub(super) fn divided_by(&self) -> usize {
        match &self.shards {
            Some(shards) if shards.op != Some(ReduceOp::Avg) => 1,
            _ => self.world_size,
        }
    }

    /// How many elements of a bucket each rank gets: its block, or an even share that it then hands on.
    pub(super) fn counts(&self, bucket: usize) -> Vec<usize> {
        match &self.owners {
            Some(_) => self.blocks[bucket].iter().map(|block| block.all.len()).collect(),
            None => {
                let (all, ranks) = (self.all_elements(bucket), self.world_size);
                (0..ranks).map(|rank| all * (rank + 1) / ranks - all * rank / ranks).collect()
            }
        }
    }

    /// The blocks of a bucket, in order of rank.
    pub(super) fn blocks(&self, bucket: usize) -> &[Block] {
        &self.blocks[bucket]
    }

    /// What this rank gets back of a bucket, with places in that memory.
    pub(super) fn own_block(&self, bucket: usize) -> Block {
        let blocks = &self.blocks[bucket];
        blocks[if self.owners.is_some() { self.rank } else { 0 }].by_itself()
    }

    /// The place of a parameter in what this rank gets back. `None` if the parameter belongs to another rank.
    pub(super) fn own_slot(&self, parameter: usize) -> Option<Slot> {
        let Slot { bucket, range, mark } = self.slots.get(parameter)?;
        let start = match &self.owners {
            None => 0,
            Some(owners) if owners.of(parameter) == Some(self.rank) => {
                self.blocks[*bucket][self.rank].all.start
            }
            Some(_) => return None,
        };
        let range = range.start - start..range.end - start;
        Some(Slot { bucket: *bucket, range, mark: mark - start })
    }

    pub(super) fn gradient_bytes(&self, bucket: usize) -> usize {
        let elements: usize = self.blocks[bucket].iter().map(|block| block.gradients.len()).sum();
        elements * self.buckets[bucket].dtype.size()
    }

    /// The number of elements of a bucket, marks among them.
    pub(super) fn all_elements(&self, bucket: usize) -> usize {
        self.blocks[bucket].last().map_or(0, |block| block.all.end)
    }
}

/// Deals out the elements of a bucket, from the first on.
struct Layout<'a> {
    parameters: &'a [ParameterSpec],
    /// The places, by parameter.
    slots: &'a mut [Slot],
    bucket: usize,
    /// The first element that is free.
    end: usize,
}

impl Layout<'_> {
    /// Puts a block behind those before it: the gradients of `members`, a mark for each of them, one that says whether
    /// a rank has seen a fault, and this many that say which ranks have data.
    fn block(
        &mut self,
        members: &[usize],
        has_fault_mark: bool,
        active_marks: Option<usize>,
    ) -> Block {
        let start = self.end;
        for &member in members {
            let range = self.take(self.parameters[member].elements());
            self.slots[member] = Slot { bucket: self.bucket, range, mark: 0 };
        }
        let gradients = start..self.end;
        for &member in members {
            self.slots[member].mark = self.take(1).start;
        }
        let fault_mark = has_fault_mark.then(|| self.take(1).start);
        let active_marks = active_marks.map(|count| self.take(count));
        Block { all: start..self.end, gradients, fault_mark, active_marks }
    }

    fn take(&mut self, elements: usize) -> Range<usize> {
        let start = self.end;
        self.end += elements;
        start..self.end
    }
}

/// Refuses parameters that cannot be averaged.
pub(super) fn check_trainable(parameters: &[ParameterSpec]) -> Result<()> {
    let can_be_averaged = |spec: &&ParameterSpec| {
        matches!(spec.dtype, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
    };
    let problem = match parameters.iter().find(|spec| !can_be_averaged(spec)) {
        Some(parameter) if matches!(parameter.dtype, DType::F8E4M3 | DType::F8E5M2) => format!(
            "parameter {parameter} cannot be averaged: sums of 8-bit floats lose nearly all digits; train in \
             bf16 or f32, and round to 8 bits for computing only"
        ),
        Some(parameter) => {
            format!("parameter {parameter} cannot be averaged; use f32, f64, f16 or bf16")
        }
        None if parameters.is_empty() => "the model has no parameter to train".to_owned(),
        None => return Ok(()),
    };
    Err(Error::argument("data-parallel training", problem))
}
