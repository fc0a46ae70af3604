//! A step as shards: a closure computes the loss of each shard that this rank has.

use std::error::Error as StdError;

use candle_core::{DType, Tensor, Var, backprop::GradStore};
use drumline::{sampler::shards_of_rank, train};

use crate::{
    Result,
    data_parallel::{DataParallel, Own, Trained, submit},
    failure::OrFail,
};

/// What a step of shards gives: the same bits on all ranks, and on any number of ranks.
#[derive(Debug)]
#[non_exhaustive]
pub struct ShardedStep {
    /// The averages over all shards.
    pub gradients: GradStore,
    /// The average of the losses of all shards.
    pub loss: f64,
}

impl DataParallel {
    /// Runs a step of a training whose steps are [shards](crate::DdpOptions::shards): `loss` computes that of a shard, once for each
    /// shard that this rank has, and backward runs inside. The gradients of all shards are averaged, and so are their
    /// losses. The bits are the same on any number of ranks, as long as `loss` depends on the step and the shard alone.
    ///
    /// Buffers become those of shard 0, on all ranks; the other shards begin from the same. candle's CPU has no seed: what
    /// `loss` draws must come from a generator of its own for each step and shard.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Init, Optimizer, SGD, VarMap};
    /// use drumline_candle::{DataParallel, DdpOptions, variables_digest};
    ///
    /// let train = |ranks: usize| {
    ///     drumline::local(ranks, |group| {
    ///         let varmap = VarMap::new();
    ///         let weight = varmap.get(2, "weight", Init::Const(0.5), DType::F32, &Device::Cpu)?;
    ///         let mut ddp = DataParallel::wrap_with(&varmap, &group, &DdpOptions::default().shards(4))?;
    ///         let mut optimizer = SGD::new(varmap.all_vars(), 0.1)?;
    ///         for number in 0..3 {
    ///             let input = |shard: usize| Tensor::full((number + shard) as f32 + 0.1, 2, &Device::Cpu);
    ///             let step = ddp.step(|shard| Ok(weight.mul(&input(shard)?)?.sqr()?.sum_all()?))?;
    ///             optimizer.step(&step.gradients)?;
    ///         }
    ///         Ok(variables_digest(&varmap)?)
    ///     })
    /// };
    /// let alone = train(1)?[0];
    /// assert_eq!(train(3)?, [alone; 3]);
    /// # Ok::<_, anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`average`](Self::average). If `loss` fails on some rank, every rank gets an error that names it.
    /// [`Argument`](crate::ErrorKind::Argument) if the options do not say that a step is shards.
    pub fn step(
        &mut self,
        mut loss: impl FnMut(usize) -> std::result::Result<Tensor, Box<dyn StdError + Send + Sync>>,
    ) -> Result<ShardedStep> {
        let Some(count) = self.options.shards else {
            let problem = "the options do not say how many there are: wrap the `VarMap` with \
                           `DdpOptions::default().shards(count)`";
            return Err(train::Error::argument("a step of shards", problem));
        };
        let run = shards_of_rank(count, self.group.world_size(), self.group.rank())?;
        self.check_values()?;
        let before = self.values_of_buffers()?;
        let (mut after, mut losses, mut problem) = (None, Vec::new(), None);
        for shard in run.clone() {
            set_values(&before)?;
            let computed = loss(shard).and_then(|loss| {
                losses.push(loss.to_dtype(DType::F64)?.to_scalar()?);
                Ok(loss.backward()?)
            });
            let gradients = match computed {
                Ok(gradients) => {
                    problem = self.find_problem(&gradients);
                    gradients
                }
                Err(error) => {
                    problem = Some(format!("the closure of a step of shards failed: {error}"));
                    GradStore::default()
                }
            };
            if shard == 0 {
                after = Some(self.values_of_buffers()?);
            }
            if self.trained.is_none() {
                let own = Own { gradients: Some(&gradients), problem: problem.clone() };
                if let Err(error) = self.agree(&own) {
                    set_values(&before)?;
                    return Err(error);
                }
            }
            let Some(Trained { reducer, places, .. }) = &self.trained else { break };
            let is_last = shard + 1 == run.end;
            match problem {
                Some(_) => reducer.fail_step(),
                None => problem = submit(reducer, &self.variables, places, &gradients, is_last),
            }
            if problem.is_some() {
                break;
            }
            if !is_last {
                reducer.end_shard();
            }
        }
        let averages = self.finish(true, problem);
        set_values(after.as_ref().filter(|_| averages.is_ok()).unwrap_or(&before))?;
        let mut gradients = GradStore::default();
        for (place, average) in averages?.into_iter().flatten() {
            gradients.insert(&self.variables[place].var, average);
        }
        self.steps += 1;
        let Some(Trained { reducer, places, .. }) = &self.trained else {
            unreachable!("a step has been averaged")
        };
        let loss = reducer.average_of_shards(&losses)?;
        if places.len() < self.variables.len() {
            self.sync_buffers()?;
        }
        Ok(ShardedStep { gradients, loss })
    }

    /// The variables that are not trained, as far as that is known, and their values.
    fn values_of_buffers(&self) -> Result<Vec<(Var, Tensor)>> {
        let places = self.trained.as_ref().map_or(&[][..], |trained| &trained.places);
        let is_buffer = |at: &usize| places.binary_search(at).is_err();
        let buffers = (0..self.variables.len()).filter(is_buffer);
        let value = |at: usize| {
            let var = &self.variables[at].var;
            Ok((var.clone(), var.copy().or_fail()?))
        };
        buffers.map(value).collect()
    }
}

fn set_values(values: &[(Var, Tensor)]) -> Result<()> {
    values.iter().try_for_each(|(var, value)| var.set(value).or_fail())
}
