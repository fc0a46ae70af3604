//! The place of each gradient in the buckets.

use std::ops::Range;

use drumline_group::{DType, ProcessGroup};

use super::super::{Bucket, DdpOptions, ParameterSpec, plan_buckets};
use crate::{Error, Result};

/// The buckets, and the place of each parameter in them.
#[derive(Debug)]
pub(super) struct Plan {
    /// The buckets, in launch order.
    pub(super) buckets: Vec<Bucket>,
    /// The number of elements of gradients in each bucket. After them a bucket has one mark for each of its
    /// parameters, and two for the rank.
    elements: Vec<usize>,
    /// The places, by parameter.
    pub(super) slots: Vec<Slot>,
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
    /// The plan for gradients that are expected in `order`.
    pub(super) fn new(
        parameters: &[ParameterSpec],
        order: impl IntoIterator<Item = usize>,
        options: &DdpOptions,
    ) -> Result<Self> {
        let buckets = plan_buckets(parameters, order, options)?;
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
        Ok(Self { buckets, elements, slots })
    }

    /// The plan for the order that rank 0 has observed. All ranks must call this.
    pub(super) fn agree(
        parameters: &[ParameterSpec],
        observed: &[usize],
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let mut order: Vec<i64> = observed.iter().map(|&parameter| parameter as i64).collect();
        group.broadcast(&mut order, 0)?;
        // `plan_buckets` refuses a number that is no index, like any wrong order.
        let order = order.into_iter().map(|index| usize::try_from(index).unwrap_or(usize::MAX));
        Plan::new(parameters, order, options)
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

    /// The element that says whether a rank has data of its own.
    pub(super) fn active_mark(&self, bucket: usize) -> usize {
        self.fault_mark(bucket) + 1
    }
}

/// Refuses parameters that cannot be averaged.
pub(super) fn check_trainable(parameters: &[ParameterSpec]) -> Result<()> {
    let problem = match parameters.iter().find(|p| !matches!(p.dtype, DType::F32 | DType::F64)) {
        Some(parameter) => format!("parameter {parameter} cannot be averaged; use f32 or f64"),
        None if parameters.is_empty() => "the model has no parameter to train".to_owned(),
        None => return Ok(()),
    };
    Err(Error::InvalidArgument { operation: "data-parallel training", problem })
}
