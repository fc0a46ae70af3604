//! The variables of a `VarMap`, in the same order on all ranks.

use std::{
    collections::HashMap,
    sync::{MutexGuard, PoisonError},
};

use candle_core::Var;
use candle_nn::VarMap;
use drumline::ddp::{Broadcast, DdpOptions, ParameterSpec, StateDigest};

use crate::{
    Result,
    failure::{self, OrFail},
    host,
};

/// A variable and its name.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) var: Var,
}

impl Variable {
    /// Name, shape and type, if drumline carries that type.
    pub(crate) fn spec(&self) -> Option<ParameterSpec> {
        let dtype = host::carried_as(self.var.dtype())?;
        Some(ParameterSpec::new(self.name.clone(), self.var.dims(), dtype))
    }
}

/// All variables, sorted by name. (`VarMap::all_vars` has another order in every process.)
pub(crate) fn sorted(varmap: &VarMap) -> Vec<Variable> {
    let named = data(varmap);
    let mut variables: Vec<Variable> =
        named.iter().map(|(name, var)| Variable { name: name.clone(), var: var.clone() }).collect();
    drop(named);
    variables.sort_by(|a, b| a.name.cmp(&b.name));
    variables
}

/// The problem with variables that drumline cannot carry or average, or with their absence.
pub(crate) fn find_problem(variables: &[Variable]) -> Option<String> {
    let unfit = |it: &&Variable| {
        let dtype = it.var.dtype();
        host::carried_as(dtype).is_none() || dtype.is_float() && host::averaged_as(dtype).is_none()
    };
    if let Some(Variable { name, var }) = variables.iter().find(unfit) {
        return Some(format!(
            "variable `{name}` is {}; gradients are averaged in f64, f32, f16 and bf16",
            var.dtype().as_str()
        ));
    }
    let has_float = variables.iter().any(|it| it.var.dtype().is_float());
    (!has_float).then(|| {
        format!(
            "the VarMap has {} variables and none of a floating-point type; build the model before `wrap`",
            variables.len()
        )
    })
}

/// The problem if one variable has two names: each may have another owner, which both would take a step for it.
pub(crate) fn find_shared(variables: &[Variable]) -> Option<String> {
    let mut names = HashMap::new();
    variables.iter().find_map(|Variable { name, var }| {
        let first = names.insert(var.id(), name)?;
        Some(format!(
            "`{first}` and `{name}` are one variable, and a sharded optimizer needs one owner for it; keep it in the \
             VarMap under one name, and use it twice in forward"
        ))
    })
}

/// The problem if `varmap` no longer has exactly these variables, beside those that the options ignore.
pub(crate) fn find_change(
    varmap: &VarMap,
    variables: &[Variable],
    options: &DdpOptions,
) -> Option<String> {
    let named = data(varmap);
    let is_same = |it: &Variable| named.get(&it.name).is_some_and(|var| var.id() == it.var.id());
    if let Some(gone) = variables.iter().find(|it| !is_same(it)) {
        return Some(format!(
            "variable `{}` was taken out of the VarMap, or replaced, after `wrap`; wrap the VarMap again, on all \
             ranks",
            gone.name
        ));
    }
    let is_new = |name: &&String| {
        variables.binary_search_by(|it| it.name.cmp(name)).is_err() && !options.ignores(name)
    };
    let first = named.keys().filter(is_new).min()?;
    Some(format!(
        "variable `{first}` was added to the VarMap after `wrap`, so the ranks do not share it; build the whole \
         model first, or wrap the VarMap again, on all ranks"
    ))
}

/// Copies rank 0's values of these variables to all ranks.
pub(crate) fn broadcast<'a>(
    variables: impl Iterator<Item = &'a Variable> + Clone,
    group: &drumline::ProcessGroup,
) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let bytes_of = |it: &Variable| it.var.elem_count() * it.var.dtype().size_in_bytes();
    let mut broadcast = Broadcast::new(group, variables.clone().map(bytes_of).sum());
    for variable in variables {
        if broadcast.is_source() {
            broadcast.put(&host::to_bytes(&variable.var).or_fail()?)?;
        } else {
            let mut bytes = vec![0_u8; bytes_of(variable)];
            broadcast.take(&mut bytes)?;
            let values = host::from_bytes(&bytes, &variable.var).or_fail()?;
            variable.var.set(&values).or_fail()?;
        }
    }
    broadcast.finish()
}

/// A digest of all variables of a `VarMap`. It is equal on all ranks as long as these have the same values.
///
/// Buffers drift apart between ranks in training; call [`sync_buffers`](crate::DataParallel::sync_buffers) first.
///
/// # Errors
///
/// A variable has a type that drumline does not carry, or cannot be read from its device.
pub fn variables_digest(varmap: &VarMap) -> Result<u64> {
    let mut digest = StateDigest::default();
    for variable in sorted(varmap) {
        digest.tensor(&carried(&variable)?, &host::to_bytes(&variable.var).or_fail()?);
    }
    Ok(digest.finish())
}

/// Name, shape and type of a variable, which drumline must carry.
pub(crate) fn carried(variable: &Variable) -> Result<ParameterSpec> {
    variable.spec().ok_or_else(|| {
        let (name, dtype) = (&variable.name, variable.var.dtype().as_str());
        failure::candle(format!("variable `{name}` is {dtype}, which drumline does not carry"))
    })
}

fn data(varmap: &VarMap) -> MutexGuard<'_, HashMap<String, Var>> {
    // If candle panicked while it held the lock, an insertion is missing at worst.
    varmap.data().lock().unwrap_or_else(PoisonError::into_inner)
}
