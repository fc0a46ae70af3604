use std::{collections::HashMap, sync::Arc};

use burn::optim::GradientsParams;
use drumline::ReduceOp;

use super::shards::Shards;
use crate::{
    Error, Result,
    agreement::agree,
    averaged::{AveragedGradients, sealed},
    failure,
};

/// The averages of the gradients of one step, of which this rank has those of its own parameters.
/// [`ShardedOptimizer::backward`](crate::ShardedOptimizer::backward) makes them, and only
/// [`ShardedOptimizer::step`](crate::ShardedOptimizer::step) takes them.
///
/// [`clip_grad_norm`](crate::clip_grad_norm) and [`GradScaler`](crate::GradScaler) take them like whole ones.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, optim::SgdConfig, tensor::{Device, Tensor}};
/// use drumline_burn::{ShardedOptimizer, clip_grad_norm};
///
/// drumline::local(2, |group| {
///     let device = Device::flex().autodiff();
///     let model: Linear = LinearConfig::new(2, 1).init(&device); // weight and bias
///     let (optimizer, model) =
///         ShardedOptimizer::wrap(model, SgdConfig::new(), &group)?;
///     let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum() * 3;
///     let mut gradients = optimizer.backward(loss, &model)?;
///     assert_eq!(gradients.here().len(), 1);
///     let norm = clip_grad_norm(&mut gradients, &model, 1.0)?;
///     assert_eq!(norm, 27_f64.sqrt()); // of all three elements
///     Ok(())
/// })?;
/// # Ok::<_, drumline_burn::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "`ShardedOptimizer::step` takes them"]
pub struct ShardedGradients {
    pub(super) here: GradientsParams,
    pub(super) shards: Arc<Shards>,
}

impl ShardedGradients {
    /// What this rank has: the averages for the parameters that it owns, and its gradients of parameters that every rank
    /// keeps for itself ([`DdpOptions::ignore`](crate::DdpOptions::ignore)).
    pub fn here(&self) -> &GradientsParams {
        &self.here
    }

    /// If some rank has failed, every rank gets an error. `failed` says whether one has, alike on all ranks.
    fn fail_alike<T>(&self, own: Result<T>, failed: bool) -> Result<T> {
        if !failed {
            return own;
        }
        let text = own.as_ref().map(|_| ()).map_err(Error::to_string);
        match (own, agree(&self.shards.group, text)?) {
            (Err(own), _) => Err(own),
            (Ok(_), Err(problem)) => Err(failure::sharded(problem)),
            (Ok(own), Ok(())) => Ok(own),
        }
    }
}

impl AveragedGradients for ShardedGradients {}

impl sealed::Averaged for ShardedGradients {
    fn here(&self) -> &GradientsParams {
        &self.here
    }

    fn here_mut(&mut self) -> &mut GradientsParams {
        &mut self.here
    }

    fn complete(&self, own: Result<Vec<(String, f64)>>) -> Result<Vec<f64>> {
        let Shards { group, owners, slots, order } = &*self.shards;
        let numbers: HashMap<&str, f64> = match &own {
            Ok(own) => own.iter().map(|(name, number)| (&name[..], *number)).collect(),
            Err(_) => HashMap::new(),
        };
        let mut names = vec![""; slots.len()];
        slots.iter().for_each(|(name, &slot)| names[slot] = name);
        // Behind the numbers of a rank it says whether it has failed.
        let ranks = 0..group.world_size();
        let counts: Vec<usize> =
            ranks.clone().map(|rank| owners.parameters(rank).count() + 1).collect();
        let mine = owners.parameters(group.rank());
        let mut mine: Vec<f64> =
            mine.map(|slot| numbers.get(names[slot]).copied().unwrap_or(0.0)).collect();
        mine.push(if own.is_ok() { 0.0 } else { 1.0 });
        let mut all = vec![0.0; counts.iter().sum()];
        group.in_blocks(&counts).all_gather(&mine, &mut all)?;

        let (mut of_slots, mut has_failed) = (vec![0.0; slots.len()], false);
        let mut all = all.into_iter();
        for rank in ranks {
            for (slot, number) in owners.parameters(rank).zip(all.by_ref()) {
                of_slots[slot] = number;
            }
            has_failed |= all.next() == Some(1.0);
        }
        let number = |name: &String| match slots.get(name) {
            Some(&slot) => Some(of_slots[slot]),
            None => numbers.get(&name[..]).copied(),
        };
        let complete = order.iter().filter_map(number).collect();
        self.fail_alike(own, has_failed).map(|_| complete)
    }

    fn any<const N: usize>(&self, own: Result<[bool; N]>) -> Result<[bool; N]> {
        let mut marks: Vec<u8> = match &own {
            Ok(own) => own.iter().copied().map(u8::from).collect(),
            Err(_) => vec![0; N],
        };
        marks.push(own.is_err().into());
        self.shards.group.all_reduce(&mut marks, ReduceOp::Max)?;
        self.fail_alike(own, marks[N] != 0)?;
        Ok(std::array::from_fn(|at| marks[at] != 0))
    }
}
