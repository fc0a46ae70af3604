//! The place of each gradient in the buckets.

use std::ops::Range;

use drumline_group::{DType, ProcessGroup};

use super::{
    super::{Bucket, DdpOptions, ParameterSpec, Wire, plan_buckets},
    activity, sizes,
};
use crate::{Error, Result};

/// The buckets, and the place of each parameter in them.
#[derive(Debug)]
pub(super) struct Plan {
    /// The buckets, in launch order.
    pub(super) buckets: Vec<Bucket>,
    /// The number of elements of gradients in each bucket. After them a bucket has one mark for each of its
    /// parameters, and one for a fault of the rank. In the first bucket, marks that say which ranks have data
    /// follow.
    elements: Vec<usize>,
    /// The places, by parameter.
    pub(super) slots: Vec<Slot>,
    pub(super) wire: Wire,
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

impl Plan {
    /// The plan for gradients that are expected in `order`. A bucket that is fitted to the model has at least
    /// `least_bytes`.
    pub(super) fn new(
        parameters: &[ParameterSpec],
        order: impl IntoIterator<Item = usize>,
        least_bytes: usize,
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let limits = sizes::limits(parameters, least_bytes, options);
        let buckets = plan_buckets(parameters, order, &limits)?;
        let mut slots = vec![Slot::default(); parameters.len()];
        let mut elements = Vec::with_capacity(buckets.len());
        for (bucket, Bucket { parameters: members, .. }) in buckets.iter().enumerate() {
            let mut end = 0;
            for &member in members {
                let range = end..end + parameters[member].elements();
                end = range.end;
                slots[member] = Slot { bucket, range, mark: 0 };
            }
            for (number, &member) in members.iter().enumerate() {
                slots[member].mark = end + number;
            }
            elements.push(end);
        }
        Ok(Self { buckets, elements, slots, wire: options.wire, world_size: group.world_size() })
    }

    /// The plan for the order that the rank `source` has observed, and for the prices that it sees. All ranks must
    /// call this.
    pub(super) fn agree(
        parameters: &[ParameterSpec],
        observed: &[usize],
        source: usize,
        options: &DdpOptions,
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
        Plan::new(parameters, numbers, least_bytes, options, group)
    }

    pub(super) fn slot(&self, parameter: usize) -> &Slot {
        &self.slots[parameter]
    }

    pub(super) fn elements(&self, bucket: usize) -> usize {
        self.elements[bucket]
    }

    pub(super) fn gradient_bytes(&self, bucket: usize) -> usize {
        self.elements[bucket] * self.buckets[bucket].dtype.size()
    }

    /// The element that says whether a rank has seen a fault.
    pub(super) fn fault_mark(&self, bucket: usize) -> usize {
        self.elements[bucket] + self.buckets[bucket].parameters.len()
    }

    /// The elements of the first bucket that say which ranks have data of their own.
    pub(super) fn active_marks(&self) -> Range<usize> {
        let first = self.fault_mark(0) + 1;
        first..first + activity::marks(self.world_size)
    }

    /// The number of elements of a bucket, marks among them.
    pub(super) fn all_elements(&self, bucket: usize) -> usize {
        match bucket {
            0 => self.active_marks().end,
            _ => self.fault_mark(bucket) + 1,
        }
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
    Err(Error::InvalidArgument { operation: "data-parallel training", problem })
}
