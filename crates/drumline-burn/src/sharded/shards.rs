use burn::{
    module::{Module, Param},
    tensor::Tensor,
};
use drumline::{ProcessGroup, ddp::Owners};

use crate::{
    gradients::Slots,
    tensors::{VisitFloat, visit_floats},
};

/// Which rank has what.
#[derive(Debug)]
pub(crate) struct Shards {
    pub(super) group: ProcessGroup,
    pub(super) owners: Owners,
    /// The index of each parameter that has an owner, by path.
    pub(super) slots: Slots,
    /// The paths of all floating-point tensors, in the order in which the model defines them.
    pub(super) order: Vec<String>,
}

impl Shards {
    pub(super) fn new<M: Module>(
        group: ProcessGroup,
        owners: Owners,
        slots: Slots,
        model: &M,
    ) -> Self {
        struct Names(Vec<String>);
        impl VisitFloat for Names {
            fn float<const D: usize>(&mut self, name: &str, _: &Param<Tensor<D>>) {
                self.0.push(name.to_owned());
            }
        }
        let mut names = Names(Vec::new());
        visit_floats(model, &mut names);
        Self { group, owners, slots, order: names.0 }
    }

    /// The owner of a parameter. `None` if it has none: it is not trained, or every rank keeps it for itself.
    pub(crate) fn owner(&self, name: &str) -> Option<usize> {
        self.owners.of(*self.slots.get(name)?)
    }

    /// Whether this rank takes the optimizer's steps for a parameter.
    pub(crate) fn keeps(&self, name: &str) -> bool {
        self.owner(name).is_none_or(|owner| owner == self.group.rank())
    }

    /// Whether this rank brings the state of a parameter to a checkpoint. What has no owner is rank 0's there.
    pub(crate) fn saves(&self, name: &str) -> bool {
        self.owner(name).unwrap_or(0) == self.group.rank()
    }
}
