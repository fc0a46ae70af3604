//! A step as shards: a closure computes the loss of each shard that this rank has.

use std::error::Error as StdError;

use candle_core::{DType, Tensor, Var, backprop::GradStore};
use drumline::{ProcessGroup, sampler::shards_of_rank};

use crate::{
    Error, Result,
    data_parallel::{DataParallel, Own, Trained, submit},
    failure::OrFail,
};

/// Why a program cannot compute a loss.
type ProgramError = Box<dyn StdError + Send + Sync>;

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
    /// Runs step `number` of a training whose steps are [shards](crate::DdpOptions::shards): `loss` computes that of a shard,
    /// once for each shard that this rank has, and backward runs inside. The gradients of all shards are averaged, and so are their
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
    ///             let step = ddp.step(number as u64, |shard| Ok(weight.mul(&input(shard)?)?.sqr()?.sum_all()?))?;
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
    /// If a rank dies, the others deal its shards to themselves and run the step again, with buffers as they were before: see
    /// [`ElasticGroup`](drumline::ElasticGroup). So `loss` may be called again for a shard.
    ///
    /// # Errors
    ///
    /// As for [`average`](Self::average), and if ranks pass different numbers. If `loss` fails on some rank, every rank gets an error that names it.
    /// [`Argument`](crate::ErrorKind::Argument) if the options do not say that a step is shards.
    pub fn step(
        &mut self,
        number: u64,
        mut loss: impl FnMut(usize) -> std::result::Result<Tensor, ProgramError>,
    ) -> Result<ShardedStep> {
        if self.options.shards.is_none() {
            let problem = "the options do not say how many there are: wrap the `VarMap` with \
                           `DdpOptions::default().shards(count)`";
            return Err(Error::argument("a step of shards", problem));
        }
        let (elastic, before) = (self.elastic().clone(), self.values_of_buffers()?);
        let steps = self.trained.as_ref().map(|trained| trained.reducer.steps_before());
        let stepped = elastic.run(|group| {
            match (&self.trained, steps) {
                (Some(trained), Some(steps)) => trained.reducer.regroup(group, steps)?,
                // The ranks that are left find out anew what is trained.
                _ => self.trained = None,
            }
            self.run_shards(number, group, &before, &mut loss)
        });
        match &stepped {
            Ok(_) => self.steps += 1,
            Err(_) => set_values(&before)?,
        }
        stepped
    }

    /// Runs this rank's shards of a step together with all ranks of `group`.
    fn run_shards(
        &mut self,
        number: u64,
        group: &ProcessGroup,
        before: &[(Var, Tensor)],
        loss: &mut impl FnMut(usize) -> std::result::Result<Tensor, ProgramError>,
    ) -> Result<ShardedStep> {
        let count = self.options.shards.unwrap_or(1);
        let run = shards_of_rank(count, group.world_size(), group.rank())?;
        self.check_values()?;
        let (mut after, mut losses, mut problem) = (None, Vec::new(), None);
        for shard in run.clone() {
            set_values(before)?;
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
                self.agree(&own)?;
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
        let ended =
            self.end(problem, |reducer| reducer.finish_shards(number, &losses).map(Some))?;
        let Some((averages, loss)) = ended else { unreachable!("all ranks have shards") };
        set_values(after.as_deref().unwrap_or(before))?;
        if self.trained.as_ref().is_some_and(|it| it.places.len() < self.variables.len()) {
            self.sync_buffers()?;
        }
        let mut gradients = GradStore::default();
        for (place, average) in averages {
            gradients.insert(&self.variables[place].var, average);
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
