//! The tensors of a model, before it is wrapped.

use std::collections::HashMap;

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId, Reparameterization},
    tensor::Tensor,
};
use drumline::ddp::ParameterSpec;

use crate::{
    Error, Result, pack,
    tap::TapParameter,
    tensors::{self, Path},
};

/// The tensors of a model.
#[derive(Debug, Default)]
pub(crate) struct Inspected {
    /// The trained tensors.
    pub(crate) parameters: Vec<ParameterSpec>,
    /// The other tensors.
    pub(crate) buffers: Vec<ParameterSpec>,
    /// The trained tensors whose gradients cannot be tapped, and why.
    pub(crate) untappable: Vec<(String, String)>,
    /// Whether some tensor has a reparameterization of the user.
    pub(crate) is_reparameterized: bool,
    /// Why the model cannot be wrapped. It is not returned at once, because the ranks compare their models
    /// first: otherwise ranks with a good model would wait for a rank that has already returned.
    pub(crate) problem: Option<Error>,
}

/// Looks at all tensors of `model`.
pub(crate) fn inspect<M: Module>(model: &M) -> Result<Inspected> {
    let mut visitor = Visitor::default();
    model.visit(&mut visitor);
    let mut inspected = Inspected {
        is_reparameterized: !visitor.carried.is_empty(),
        problem: visitor.problem,
        ..Inspected::default()
    };
    tensors::visit(model, |tensor| {
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
    })?;
    Ok(inspected)
}

impl Inspected {
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
        if container_type == "Reparameterization" {
            let parameter = self.path.name();
            if name == TapParameter::NAME {
                self.problem.get_or_insert(Error::AlreadyWrapped { name: parameter.clone() });
            }
            self.carried.insert(parameter, name.to_owned());
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}
