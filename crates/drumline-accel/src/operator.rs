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
    /// An `Operator<T>`, where `T` has this type.
    Typed {
        dtype: DType,
        name: &'static str,
        operator: Arc<dyn Any + Send + Sync>,
    },
}

impl From<ReduceOp> for DeviceOp {
    fn from(op: ReduceOp) -> DeviceOp {
        DeviceOp(Kind::Builtin(op))
    }
}

impl<T: Element> From<Operator<T>> for DeviceOp {
    fn from(operator: Operator<T>) -> DeviceOp {
        let name = operator.kind().name();
        DeviceOp(Kind::Typed { dtype: T::DTYPE, name, operator: Arc::new(operator) })
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

    pub(crate) fn check(&self, operation: &'static str, data: DType) -> Result<()> {
        let problem = match &self.0 {
            Kind::Builtin(op) if !op.supports(data) => {
                let others = ReduceOp::ALL.into_iter().filter(|op| op.supports(data));
                let others: Vec<_> = others.map(ReduceOp::name).collect();
                format!("{data} has no operator {op}, but {}", others.join(", "))
            }
            Kind::Typed { dtype, name, .. } if *dtype != data => {
                format!("the operator {name} is one of {dtype}, but the data is {data}")
            }
            _ => return Ok(()),
        };
        Err(Error::Argument { operation, problem })
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
