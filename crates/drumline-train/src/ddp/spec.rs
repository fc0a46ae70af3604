use std::fmt;

use drumline_group::DType;

/// The properties of a tensor of a model on which all ranks must agree.
///
/// ```
/// use drumline::{DType, ddp::ParameterSpec};
///
/// let weight = ParameterSpec::new("encoder.0.weight", [10, 128], DType::F32);
/// assert_eq!((weight.elements(), weight.bytes()), (1280, 5120));
/// assert_eq!(weight.to_string(), "`encoder.0.weight` f32[10, 128]"); // in errors
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParameterSpec {
    /// Its path in the model: `encoder.0.weight`.
    pub name: String,
    /// Its lengths, outermost dimension first.
    pub shape: Vec<usize>,
    /// The type of its elements.
    pub dtype: DType,
}

impl ParameterSpec {
    /// A tensor called `name`.
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype }
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The length of its elements in bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Dtype and shape as messages show them: `f32[10, 128]`.
    pub fn type_name(&self) -> String {
        format!("{}{:?}", self.dtype, self.shape)
    }
}

impl fmt::Display for ParameterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.name, self.type_name())
    }
}
