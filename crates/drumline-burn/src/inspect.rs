//! The tensors of a model, before it is wrapped.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
};

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::{Bool, Device, Int, Tensor},
};
use drumline::{
    DType, ProcessGroup,
    ddp::{DdpOptions, ParameterSpec, verify_model},
};

use crate::{
    Error, Result, agreement,
    burn_version::REPARAMETERIZATION,
    failure, pack,
    tap::Wrapper,
    tensors::{self, Path, VisitFloat},
};

/// The tensors of a model.
#[derive(Debug, Default)]
pub(crate) struct Inspected {
    /// The trained tensors.
    pub(crate) parameters: Vec<ParameterSpec>,
    /// The other tensors.
    pub(crate) buffers: Vec<ParameterSpec>,
    /// The names of tensors that are ignored.
    pub(crate) ignored: Vec<String>,
    /// The trained tensors whose gradients cannot be tapped, and why.
    pub(crate) untappable: Vec<(String, String)>,
    /// Whether some tensor has a reparameterization of the user.
    pub(crate) is_reparameterized: bool,
    /// Why the model cannot be wrapped. It is not returned at once: ranks with a good model would wait for a rank that
    /// has already returned.
    pub(crate) problem: Option<Error>,
}

/// Looks at all tensors of `model`.
pub(crate) fn inspect<M: Module>(model: &M, options: &DdpOptions) -> Inspected {
    let mut visitor = Visitor::default();
    model.visit(&mut visitor);
    let mut inspected = Inspected {
        is_reparameterized: !visitor.carried.is_empty(),
        problem: visitor.problem,
        ..Inspected::default()
    };
    let ignored: RefCell<Vec<String>> = RefCell::default();
    let is_ignored = |name: &str| {
        let is_ignored = options.ignores(name);
        if is_ignored {
            ignored.borrow_mut().push(name.to_owned());
        }
        is_ignored
    };
    let visited = tensors::visit_except(model, &is_ignored, |tensor| {
        if !tensor.is_trained {
            inspected.buffers.push(tensor.spec);
            return Ok(());
        }
        let name = &tensor.spec.name;
        let why = if let Some(carried) = visitor.carried.get(name) {
            Some(format!("it carries the reparameterization `{carried}`"))
        } else if !pack::is_tappable(&tensor.device) {
            Some(format!("it is on {}", pack::device_name(&tensor.device)))
        } else {
            None
        };
        inspected.untappable.extend(why.map(|why| (name.clone(), why)));
        inspected.parameters.push(tensor.spec);
        Ok(())
    });
    inspected.ignored = ignored.into_inner();
    inspected.problem = inspected.problem.or(visited.err());
    if inspected.parameters.is_empty() {
        inspected.problem.get_or_insert_with(|| nothing_to_train(model));
    }
    inspected
}

/// Says why no tensor of `model` requires a gradient.
fn nothing_to_train<M: Module>(model: &M) -> Error {
    #[derive(Default)]
    struct Find {
        has_autodiff: bool,
        other: Option<Device>,
    }
    impl VisitFloat for Find {
        fn float<const D: usize>(&mut self, _: &str, param: &Param<Tensor<D>>) {
            let tensor = param.base();
            self.has_autodiff |= tensor.is_autodiff();
            self.other.get_or_insert_with(|| tensor.device());
        }
    }
    let mut find = Find::default();
    tensors::visit_floats(model, &mut find);
    let problem = match find {
        Find { has_autodiff: false, other: Some(device) } => format!(
            "its device {} has no autodiff; create it on a device with autodiff, such as \
             `Device::flex().autodiff()`, and wrap it before `valid()`",
            pack::device_name(&device)
        ),
        _ => "its tensors are frozen or ignored, or were created on a device without autodiff; create it on a \
              device with autodiff, such as `Device::flex().autodiff()`"
            .to_owned(),
    };
    failure::nothing_to_train(problem)
}

impl Inspected {
    /// Checks that all ranks have a model that can be wrapped, then that they have the same model and options.
    pub(crate) fn verify(&mut self, group: &ProcessGroup, options: &DdpOptions) -> Result<()> {
        let own = self.problem.as_ref().map_or(Ok(()), |problem| Err(problem.to_string()));
        if let Err(problem) = agreement::agree(group, own)? {
            return Err(self.problem.take().unwrap_or(failure::on_other_ranks(problem)));
        }
        let ignored = self.ignored.iter().map(|name| ParameterSpec::new(name, [], DType::U8));
        let others: Vec<ParameterSpec> = self.buffers.iter().cloned().chain(ignored).collect();
        verify_model(group, &self.parameters, &others, options)
    }

    /// Logs a warning with the parameters whose communication cannot overlap backward.
    pub(crate) fn warn(&self, rank: usize) {
        const SHOWN_MAX: usize = 8;
        if self.untappable.is_empty() {
            return;
        }
        let shown = self.untappable.iter().take(SHOWN_MAX);
        let mut list: Vec<String> = shown.map(|(name, why)| format!("`{name}` ({why})")).collect();
        match self.untappable.len().saturating_sub(SHOWN_MAX) {
            0 => {}
            more => list.push(format!("and {more} more")),
        }
        tracing::warn!(
            rank,
            "{} of {} parameters are averaged after backward, which hides none of their \
             communication, because burn lets no gradient tap onto them: {}",
            self.untappable.len(),
            self.parameters.len(),
            list.join(", ")
        );
    }
}

#[derive(Default)]
struct Visitor {
    path: Path,
    paths: HashSet<String>,
    /// The path of each floating-point tensor, by id, and whether it is trained.
    ids: HashMap<ParamId, (String, bool)>,
    /// The reparameterization of each parameter that has one, by path.
    carried: HashMap<String, String>,
    problem: Option<Error>,
}

impl Visitor {
    /// Returns the path of a tensor, which no other may have.
    fn note_path(&mut self) -> String {
        let path = self.path.name();
        if !self.paths.insert(path.clone()) {
            self.problem.get_or_insert(failure::shared_path(path.clone()));
        }
        path
    }
}

impl ModuleVisitor for Visitor {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (second, is_trained) = (self.note_path(), param.is_require_grad());
        let problem = match self.ids.insert(param.id, (second.clone(), is_trained)) {
            Some((first, true)) if is_trained => failure::shared_parameter(first, second),
            Some((first, true)) => failure::frozen_copy(first, second),
            Some((first, false)) if is_trained => failure::frozen_copy(second, first),
            _ => return,
        };
        self.problem.get_or_insert(problem);
    }

    fn visit_int<const D: usize>(&mut self, _: &Param<Tensor<D, Int>>) {
        self.note_path();
    }

    fn visit_bool<const D: usize>(&mut self, _: &Param<Tensor<D, Bool>>) {
        self.note_path();
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        // burn visits the reparameterization of a parameter right after the parameter itself.
        if container_type == REPARAMETERIZATION {
            let parameter = self.path.name();
            let name_of = || parameter.clone();
            let problem = Wrapper::of_tap(container_type, name).map(|wrapper| match wrapper {
                Wrapper::Ddp => failure::already_wrapped(name_of()),
                Wrapper::ShardedOptimizer => failure::optimizer_is_sharded(name_of()),
            });
            self.problem = self.problem.take().or(problem);
            self.carried.insert(parameter, name.to_owned());
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}
