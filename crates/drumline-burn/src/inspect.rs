//! The tensors of a model, before it is wrapped.

use std::{cell::RefCell, collections::HashMap};

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::Tensor,
};
use drumline::{
    DType, ProcessGroup,
    ddp::{DdpOptions, ParameterSpec, verify_model},
};

use crate::{
    Error, Result, agreement,
    burn_version::REPARAMETERIZATION,
    pack,
    tap::Wrapper,
    tensors::{self, Path},
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
    inspected
}

impl Inspected {
    /// Checks that all ranks have a model that can be wrapped, then that they have the same model and options.
    pub(crate) fn verify(&mut self, group: &ProcessGroup, options: &DdpOptions) -> Result<()> {
        let own = self.problem.as_ref().map_or(Ok(()), |problem| Err(problem.to_string()));
        if let Err(problem) = agreement::agree(group, own)? {
            return Err(self.problem.take().unwrap_or(Error::OnOtherRanks { problem }));
        }
        let ignored = self.ignored.iter().map(|name| ParameterSpec::new(name, [], DType::U8));
        let others: Vec<ParameterSpec> = self.buffers.iter().cloned().chain(ignored).collect();
        Ok(verify_model(group, &self.parameters, &others, options)?)
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
    /// The path of each parameter, by id.
    ids: HashMap<ParamId, String>,
    /// The reparameterization of each parameter that has one, by path.
    carried: HashMap<String, String>,
    problem: Option<Error>,
}

impl ModuleVisitor for Visitor {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let second = self.path.name();
        if let Some(first) = self.ids.insert(param.id, second.clone()) {
            self.problem.get_or_insert(Error::SharedParameter { first, second });
        }
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        // burn visits the reparameterization of a parameter right after the parameter itself.
        if container_type == REPARAMETERIZATION {
            let parameter = self.path.name();
            let name_of = || parameter.clone();
            let problem = Wrapper::of_tap(container_type, name).map(|wrapper| match wrapper {
                Wrapper::Ddp => Error::AlreadyWrapped { name: name_of() },
                Wrapper::ShardedOptimizer => Error::OptimizerIsSharded { name: name_of() },
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
