use std::{collections::BTreeMap, fmt, sync::Arc};

use drumline_error::{Error, ErrorKind, Section};

use super::content::Checkpoint;
use crate::ddp::ParameterSpec;

/// How the tensors of a checkpoint differ from those of a model. See [`Checkpoint::check`].
///
/// ```
/// use drumline::{DType, checkpoint::{Checkpoint, Misfit}, ddp::ParameterSpec};
///
/// let wanted = ParameterSpec::new("bias", [2], DType::F32);
/// let misfit: Misfit = Checkpoint::default().check("", [wanted.clone()]).unwrap_err();
/// assert_eq!(misfit.missing, [wanted]);
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Misfit {
    /// The tensors that the model has and the checkpoint lacks.
    pub missing: Vec<ParameterSpec>,
    /// The tensors that the checkpoint has and the model lacks.
    pub surplus: Vec<ParameterSpec>,
    /// The tensors whose shapes or types differ: (the model's, the checkpoint's).
    pub different: Vec<(ParameterSpec, ParameterSpec)>,
}

impl Checkpoint {
    /// Checks that the [section](Checkpoint::section) `prefix` holds exactly the tensors `wanted`. Their
    /// names come without the prefix. Call it before you fill a model from the checkpoint.
    ///
    /// # Errors
    ///
    /// [`Misfit`] names every tensor that is missing or left over, or has another shape or type.
    pub fn check(
        &self,
        prefix: &str,
        wanted: impl IntoIterator<Item = ParameterSpec>,
    ) -> Result<(), Misfit> {
        let mut misfit = Misfit::default();
        let mut left: BTreeMap<&str, ParameterSpec> = self
            .section(prefix)
            .map(|(name, tensor)| (name, ParameterSpec::new(name, tensor.shape(), tensor.dtype())))
            .collect();
        for wanted in wanted {
            match left.remove(&wanted.name[..]) {
                None => misfit.missing.push(wanted),
                Some(found) if found == wanted => {}
                Some(found) => misfit.different.push((wanted, found)),
            }
        }
        misfit.surplus.extend(left.into_values());
        if misfit == Misfit::default() { Ok(()) } else { Err(misfit) }
    }
}

impl std::error::Error for Misfit {}

/// With the misfit as its detail.
impl From<Misfit> for Error {
    fn from(misfit: Misfit) -> Error {
        Error::quoting(ErrorKind::Checkpoint, Section::Checkpoints, &misfit).with(Arc::new(misfit))
    }
}

/// The text for users, which `unwrap` and a `main` that returns an error print.
impl fmt::Debug for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// A longer list would not help.
        const NAMED_MAX: usize = 8;
        let different = self.different.iter().map(|(model, file)| {
            let (name, file, model) = (&file.name, file.type_name(), model.type_name());
            format!("`{name}` is {file}, the model has {model}")
        });
        let missing = self.missing.iter().map(|spec| format!("{spec} is missing"));
        let surplus = self.surplus.iter().map(|spec| format!("the model has no {spec}"));
        let all: Vec<String> = different.chain(missing).chain(surplus).collect();
        write!(f, "the checkpoint is of another model: ")?;
        f.write_str(&all[..all.len().min(NAMED_MAX)].join("; "))?;
        match all.len().saturating_sub(NAMED_MAX) {
            0 => {}
            more => write!(f, "; and {more} more")?,
        }
        write!(f, " {}", Section::Checkpoints)
    }
}
