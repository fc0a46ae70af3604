use std::fmt;

use drumline_group::DType;

/// What all ranks must agree on for one tensor of a model.
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
    ///
    /// ```
    /// use drumline::{DType, ddp::ParameterSpec};
    ///
    /// let steps = ParameterSpec::new("steps", [], DType::I64); // a scalar
    /// assert_eq!((&steps.name[..], steps.elements()), ("steps", 1));
    /// ```
    pub fn new(name: impl Into<String>, shape: impl Into<Vec<usize>>, dtype: DType) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype }
    }

    /// How many elements it has.
    ///
    /// ```
    /// use drumline::{DType, ddp::ParameterSpec};
    ///
    /// assert_eq!(ParameterSpec::new("weight", [10, 128], DType::F32).elements(), 1280);
    /// assert_eq!(ParameterSpec::new("empty", [10, 0], DType::F32).elements(), 0);
    /// ```
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// How many bytes its elements take.
    ///
    /// ```
    /// use drumline::{DType, ddp::ParameterSpec};
    ///
    /// assert_eq!(ParameterSpec::new("weight", [10, 128], DType::Bf16).bytes(), 2560);
    /// ```
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// Dtype and shape as messages show them: `f32[10, 128]`.
    ///
    /// ```
    /// use drumline::{DType, ddp::ParameterSpec};
    ///
    /// assert_eq!(ParameterSpec::new("weight", [10, 128], DType::F32).type_name(), "f32[10, 128]");
    /// ```
    pub fn type_name(&self) -> String {
        format!("{}{:?}", self.dtype, self.shape)
    }
}

impl fmt::Display for ParameterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.name, self.type_name())
    }
}
