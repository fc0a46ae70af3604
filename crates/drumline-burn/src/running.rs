//! Running statistics: what forward changes.

use std::{
    any::Any,
    collections::{HashMap, HashSet},
};

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::Tensor,
};
use drumline::ProcessGroup;

use crate::{
    Result,
    tensors::{self, Path, VisitFloat, Which, visit_floats},
};

/// The paths of the running statistics of a model. All clones of a model share their values.
#[derive(Debug, Default)]
pub(crate) struct Running(HashSet<String>);

/// Tensors of any dimensions, by path.
pub(crate) type Tensors = HashMap<String, Box<dyn Any>>;

impl Running {
    /// Those of `model`, but for the tensors that `skip` names. burn does not tell them from frozen parameters, which
    /// clones do not share.
    pub(crate) fn find<M: Module>(model: &M, skip: &dyn Fn(&str) -> bool) -> Self {
        let with_elements = || {
            let mut untrained = Untrained { skip, with_elements: HashSet::new() };
            visit_floats(model, &mut untrained);
            untrained.with_elements
        };
        let all = Self(with_elements());
        let before = all.read(model);
        // Takes the elements of a clone's tensors away.
        all.write(model, &Tensors::new());
        let found = Self(all.0.difference(&with_elements()).cloned().collect());
        found.write(model, &before);
        found
    }

    pub(crate) fn read<M: Module>(&self, model: &M) -> Tensors {
        let mut read = Read { names: &self.0, tensors: HashMap::new() };
        if !self.0.is_empty() {
            tensors::flush_running_state(model);
            visit_floats(model, &mut read);
        }
        read.tensors
    }

    /// A tensor that is not among `tensors` becomes empty.
    pub(crate) fn write<M: Module>(&self, model: &M, tensors: &Tensors) {
        if !self.0.is_empty() {
            tensors::flush_running_state(model);
            drop(model.clone().map(&mut Write { path: Path::default(), names: &self.0, tensors }));
        }
    }

    pub(crate) fn copy_from_rank_0<M: Module>(
        &self,
        model: &M,
        group: &ProcessGroup,
    ) -> Result<()> {
        if !self.0.is_empty() && group.world_size() > 1 {
            let is_other = |name: &str| !self.0.contains(name);
            tensors::broadcast(model.clone(), Which::Buffers, &is_other, 0, group)?;
        }
        Ok(())
    }
}

/// The names of tensors that are not trained and have elements.
struct Untrained<'a> {
    skip: &'a dyn Fn(&str) -> bool,
    with_elements: HashSet<String>,
}

impl VisitFloat for Untrained<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let is_one = !param.is_require_grad() && !(self.skip)(name);
        if is_one && param.base().shape().num_elements() > 0 {
            self.with_elements.insert(name.to_owned());
        }
    }
}

struct Read<'a> {
    names: &'a HashSet<String>,
    tensors: Tensors,
}

impl VisitFloat for Read<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        if self.names.contains(name) {
            self.tensors.insert(name.to_owned(), Box::new(param.base()));
        }
    }
}

struct Write<'a> {
    path: Path,
    names: &'a HashSet<String>,
    tensors: &'a Tensors,
}

impl ModuleMapper for Write<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.path.name();
        if !self.names.contains(&name) {
            return param;
        }
        let tensor = self.tensors.get(&name).and_then(|it| it.downcast_ref::<Tensor<D>>());
        param.map(|old| tensor.cloned().unwrap_or_else(|| Tensor::empty([0; D], &old.device())))
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}
