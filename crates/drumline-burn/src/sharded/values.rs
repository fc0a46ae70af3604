//! The values of parameters, between the model and the reducer.

use std::collections::HashMap;

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::Tensor,
};
use drumline::ddp::{GradientReducer, Place, Values, ValuesMut};

use super::shards::Shards;
use crate::{
    Result,
    gradients::Slots,
    host::{Readable, parameter_values},
    tensors::{Path, TensorValues},
};

/// Gives all parameters of `model` the values that their owners have.
pub(super) fn gather<M: Module>(model: M, shards: &Shards, reducer: &GradientReducer) -> Result<M> {
    if shards.group.world_size() == 1 {
        return Ok(model);
    }
    let own_slot = |name: &str| {
        let slot = *shards.slots.get(name)?;
        (shards.owners.of(slot) == Some(shards.group.rank())).then_some(slot)
    };
    let (own, failure): (HashMap<usize, Readable>, _) = match parameter_values(&model, &own_slot) {
        Ok(own) => (own.into_iter().map(|it| (it.slot, it.value)).collect(), Ok(())),
        Err(error) => (HashMap::new(), Err(error)),
    };
    let mut of_others = HashMap::new();
    let gathered = reducer.gather(
        |slot, values: ValuesMut<'_>| {
            own.get(&slot).is_some_and(|it| it.pack(Place { values, holds_sum: false }))
        },
        |slot, values| {
            of_others.insert(slot, copied(values));
        },
    );
    failure?; // the other ranks have an error, too
    gathered?;
    let mut put = Put { path: Path::default(), slots: &shards.slots, values: of_others };
    Ok(model.map(&mut put))
}

fn copied(values: Values<'_>) -> Option<TensorValues> {
    Some(match values {
        Values::F32(values) => TensorValues::F32(values.to_vec()),
        Values::F64(values) => TensorValues::F64(values.to_vec()),
        Values::F16(values) => TensorValues::F16(values.to_vec()),
        Values::Bf16(values) => TensorValues::Bf16(values.to_vec()),
        _ => return None,
    })
}

/// Replaces the values of parameters.
struct Put<'a> {
    path: Path,
    slots: &'a Slots,
    values: HashMap<usize, Option<TensorValues>>,
}

impl ModuleMapper for Put<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let slot = self.slots.get(&self.path.name());
        let Some(values) = slot.and_then(|slot| self.values.remove(slot)).flatten() else {
            return param;
        };
        let (old, is_trained) = (param.base(), param.is_require_grad());
        let data = values.into_data(old.shape());
        let new = Tensor::from_data(data, (&old.device(), old.dtype()));
        param.map(|_| new.set_require_grad(is_trained))
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}
