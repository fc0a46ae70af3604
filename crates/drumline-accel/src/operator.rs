use std::any::Any;
use std::fmt;
use std::sync::Arc;

use drumline_group::{DType, Element, Operator, ReduceOp};

use crate::{Error, Result};

/// How a call on a device combines the values of all ranks: a [`ReduceOp`], or an [`Operator`] of the type of the data.
///
/// ```
/// use drumline_accel::DeviceOp;
/// use drumline_group::{Operator, ReduceOp};
///
/// let mean: DeviceOp = ReduceOp::Avg.into();
/// let halves: DeviceOp = Operator::premul_sum(0.5_f32).into();
/// assert_eq!((mean.to_string(), halves.to_string()), ("avg".to_owned(), "premul_sum of f32".to_owned()));
/// ```
#[derive(Clone)]
pub struct DeviceOp(Kind);

#[derive(Clone)]
enum Kind {
    Builtin(ReduceOp),
    /// An `Operator<T>`, where `T` has this type, and why that type does not have it.
    Typed {
        dtype: DType,
        name: &'static str,
        operator: Arc<dyn Any + Send + Sync>,
        problem: Option<String>,
    },
}

impl From<ReduceOp> for DeviceOp {
    fn from(op: ReduceOp) -> DeviceOp {
        DeviceOp(Kind::Builtin(op))
    }
}

impl<T: Element> From<Operator<T>> for DeviceOp {
    fn from(operator: Operator<T>) -> DeviceOp {
        let (dtype, name) = (T::DTYPE, operator.kind().name());
        let problem = operator.kind().problem_with(dtype);
        DeviceOp(Kind::Typed { dtype, name, problem, operator: Arc::new(operator) })
    }
}

impl DeviceOp {
    /// The operator for elements of one type, if it is one for them.
    pub(crate) fn of<T: Element>(&self) -> Option<Operator<T>> {
        match &self.0 {
            Kind::Builtin(op) => Some((*op).into()),
            Kind::Typed { operator, .. } => operator.downcast_ref::<Operator<T>>().cloned(),
        }
    }

    /// The operator, if it is one of the library.
    pub(crate) fn builtin(&self) -> Option<ReduceOp> {
        match &self.0 {
            Kind::Builtin(op) => Some(*op),
            Kind::Typed { .. } => None,
        }
    }

    pub(crate) fn check(&self, operation: &'static str, data: DType) -> Result<()> {
        let problem = match &self.0 {
            Kind::Builtin(op) => Operator::<u8>::from(*op).kind().problem_with(data),
            Kind::Typed { problem: Some(problem), .. } => Some(problem.clone()),
            Kind::Typed { dtype, name, .. } => (*dtype != data)
                .then(|| format!("the operator {name} is one of {dtype}, but the data is {data}")),
        };
        problem.map_or(Ok(()), |problem| Err(Error::Argument { operation, problem }))
    }
}

impl fmt::Display for DeviceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Builtin(op) => write!(f, "{op}"),
            Kind::Typed { dtype, name, .. } => write!(f, "{name} of {dtype}"),
        }
    }
}

impl fmt::Debug for DeviceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceOp({self})")
    }
}
