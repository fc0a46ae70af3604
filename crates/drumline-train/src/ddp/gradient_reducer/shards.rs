//! Steps of shards, and a group that loses ranks between or within them.

use std::{ops::Range, sync::Arc};

use drumline_group::{Begun, ProcessGroup, ReduceOp, Work};
use drumline_kernels::{Source, Target, reduce_tree, with_ieee_rounding};
use drumline_schedule::tree::{Node, merges};

use super::{
    super::{FaultKind, GradientFault, shards::Shards},
    Averaged, GradientReducer,
    plan::Plan,
    sizes,
    step::{Step, StepsBefore},
};
use crate::{Error, Result, failure};

impl GradientReducer {
    /// This rank's shards of a step, in the order in which it must hand in their gradients. `None` unless the options
    /// say [`shards`](super::super::DdpOptions::shards).
    pub fn shards(&self) -> Option<Range<usize>> {
        self.lock().plan.shards.as_ref().map(|shards| shards.run.clone())
    }

    /// The gradients of one of this rank's [shards](GradientReducer#shards) were all accumulated, and another shard follows.
    pub fn end_shard(&self) {
        self.lock().end_shard(self.options.unused_parameters);
    }

    /// [`finish`](GradientReducer::finish) for step `number` of shards. Also returns the average of `losses`, of which there
    /// is one for each of this rank's shards: the same bits on all ranks, and on any number of ranks.
    ///
    /// A rank whose program fails in the step says [`fail_step`](GradientReducer::fail_step) and calls this with what it has.
    ///
    /// # Errors
    ///
    /// As for [`finish`](GradientReducer::finish). [`Mismatch`](crate::ErrorKind::Mismatch) on all ranks if they have passed different
    /// numbers. [`Argument`](crate::ErrorKind::Argument) if there are not as many losses as shards of this rank; the other ranks are
    /// told that this one has failed.
    pub fn finish_shards(&self, number: u64, losses: &[f64]) -> Result<(Averaged<'_>, f64)> {
        let misfit = self.check_losses(losses.len());
        let ended = self.end_step(true, |step| tell(step, number, losses, misfit.is_some()));
        if let Some(misfit) = misfit {
            return Err(misfit);
        }
        let ((averaged, _), told) = ended?;
        let Some((shards, begun)) = told else { unreachable!("the losses fit a step of shards") };
        let told = begun.and_then(Work::wait).map_err(|failed| failed.error)?;
        average(&shards, &told).map(|loss| (averaged, loss))
    }

    /// What is wrong with so many losses, unless this rank has failed already.
    fn check_losses(&self, count: usize) -> Option<Error> {
        let step = self.lock();
        let refuse = |problem| Some(Error::argument("GradientReducer::finish_shards", problem));
        match &step.plan.shards {
            None => refuse("the options do not say that a step is shards".to_owned()),
            Some(shards) if shards.run.len() != count && step.faults.is_empty() => refuse(format!(
                "{count} losses are not those of this rank's {} shards",
                shards.run.len()
            )),
            Some(_) => None,
        }
    }

    /// How many steps there were before the present one, for [`regroup`](Self::regroup).
    pub fn steps_before(&self) -> StepsBefore {
        self.lock().before()
    }

    /// Goes on with `group`, which is what is left of the group of before: its shards are dealt anew. `before` is from the
    /// begin of the step that is run again, or of the next one. All ranks of the group must call this. It does nothing if the
    /// reducer has that group already.
    ///
    /// # Errors
    ///
    /// As for [`new`](GradientReducer::new). [`Argument`](crate::ErrorKind::Argument) if parameters have owners, because those of a
    /// lost rank are lost with it.
    pub fn regroup(&self, group: &ProcessGroup, before: StepsBefore) -> Result<()> {
        if self.lock().group.name() == group.name() {
            return Ok(());
        }
        if self.owners.is_some() {
            let problem = "the state of a sharded optimizer is lost with its rank: start again from a checkpoint";
            return Err(Error::argument("GradientReducer::regroup", problem));
        }
        let order = (0..self.parameters.len()).rev();
        let plan =
            Plan::new(&self.parameters, order, sizes::LEAST_BYTES, &self.options, None, group)?;
        let mut step = self.lock();
        *step = step.after(before, Arc::new(plan), group)?;
        Ok(())
    }
}

/// The number of the step and the losses of all ranks, on their way.
type Told = (Arc<Shards>, Begun<Vec<f64>>);

/// What each rank tells before its losses: the number of the step, and whether it has failed.
const HEADER: usize = 2;

/// Tells the other ranks the number of the step and the losses of this rank.
fn tell(step: &Step, number: u64, losses: &[f64], has_failed: bool) -> Option<Told> {
    let shards = step.plan.shards.clone()?;
    let mut own = vec![f64::NAN; HEADER + shards.run.len()];
    (own[0], own[1]) = (f64::from_bits(number), f64::from(u8::from(has_failed)));
    own.iter_mut().skip(HEADER).zip(losses).for_each(|(place, loss)| *place = *loss);
    let counts: Vec<usize> = shards.lengths.iter().map(|length| HEADER + length).collect();
    let all = vec![0.0; counts.iter().sum()];
    Some((shards, step.group.in_blocks(&counts).all_gather_async(own, all)))
}

/// The average of the losses that ranks have told, if all are of one step.
fn average(shards: &Shards, told: &[f64]) -> Result<f64> {
    let (mut rest, mut numbers, mut failed, mut losses) = (told, vec![], vec![], vec![]);
    for (rank, length) in shards.lengths.iter().enumerate() {
        let (of_rank, others) = rest.split_at(HEADER + length);
        numbers.push(of_rank[0].to_bits());
        failed.extend((of_rank[1] != 0.0).then_some(rank));
        losses.extend_from_slice(&of_rank[HEADER..]);
        rest = others;
    }
    if let Some(other) = numbers.iter().position(|number| *number != numbers[0]) {
        return Err(failure::steps_differ(numbers[0], other, numbers[other]));
    }
    if !failed.is_empty() {
        let fault = GradientFault::new("", FaultKind::Program, failed);
        return Err(failure::gradients(numbers[0], vec![fault]));
    }
    let leaves: Vec<Node> = (0..shards.count).map(Node::leaf).collect();
    let merges = merges(Node::root(shards.count), &leaves).unwrap_or_default();
    let numbers: Vec<Source<'_, f64>> = losses.chunks_exact(1).map(Source::from).collect();
    let mut average = [0.0];
    let to = Target::from(&mut average[..]);
    with_ieee_rounding(|| reduce_tree(ReduceOp::Avg, &[to], &numbers, &merges, Some(shards.count)));
    Ok(average[0])
}
