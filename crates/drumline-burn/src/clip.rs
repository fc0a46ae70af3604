//! Clips all gradients of a model together.

use burn::{
    module::{Module, Param},
    optim::GradientsParams,
    tensor::Tensor,
};
use drumline::ddp::{DdpOptions, GradientNorm, Values};

use crate::{
    Result,
    averaged::AveragedGradients,
    failure,
    host::Batch,
    tensors::{VisitFloat, visit_floats},
};

/// Scales the gradients of `model` down, so that their norm is at most `max_norm`. Returns the norm that they had.
///
/// This is torch's `clip_grad_norm_`: the norm is that of all gradients together, and each is multiplied with
/// `max_norm / (norm + 1e-6)` if that is below 1. (burn's own `GradientClippingConfig::Norm` takes the norm of each
/// parameter by itself.) The norm is computed in double precision, in the order in which the model defines its
/// parameters. So averaged gradients are clipped alike on all ranks, without a message. (Those of a
/// [`ShardedOptimizer`](crate::ShardedOptimizer) are shared out, so all ranks must call this. They exchange one number for
/// each parameter, and the bits are the same.)
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
/// use drumline::ProcessGroup;
/// use drumline_burn::{DistributedDataParallel, clip_grad_norm};
///
/// let device = Device::flex().autodiff();
/// let model: Linear = LinearConfig::new(2, 1).init(&device);
/// let (ddp, model) = DistributedDataParallel::wrap(model, &ProcessGroup::alone())?;
/// let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum() * 3; // gradients of 3
/// let mut gradients = ddp.backward(loss, &model)?;
/// let norm = clip_grad_norm(&mut gradients, &model, 1.0)?;
/// assert_eq!(norm, 27_f64.sqrt()); // of two weights and a bias
/// let weight = gradients.get::<2>(model.weight.id).unwrap().to_data().to_vec::<f32>().unwrap();
/// assert!((weight[0] - 1.0 / 3_f32.sqrt()).abs() < 1e-6);
/// # Ok::<_, drumline_burn::Error>(())
/// ```
///
/// # Errors
///
/// As for [`ClipGradNorm::clip`].
#[doc(alias = "clip_grad_norm_")]
pub fn clip_grad_norm<M: Module>(
    gradients: &mut impl AveragedGradients,
    model: &M,
    max_norm: f64,
) -> Result<f64> {
    ClipGradNorm::new(max_norm).clip(gradients, model)
}

/// How [`clip_grad_norm`] clips.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
/// use drumline::ProcessGroup;
/// use drumline_burn::{ClipGradNorm, DistributedDataParallel, ErrorKind};
///
/// let device = Device::flex().autodiff();
/// let model: Linear = LinearConfig::new(2, 1).init(&device);
/// let (ddp, model) = DistributedDataParallel::wrap(model, &ProcessGroup::alone())?;
/// let backward = |factor: f32| {
///     let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum() * factor;
///     ddp.backward(loss, &model)
/// };
/// let largest = ClipGradNorm::new(1.0).norm_type(f64::INFINITY).error_if_nonfinite(true);
/// assert_eq!(largest.clip(&mut backward(3.0)?, &model)?, 3.0);
/// let error = largest.clip(&mut backward(f32::NAN)?, &model);
/// assert_eq!(error.unwrap_err().kind(), ErrorKind::NonFiniteNorm);
/// # Ok::<_, drumline_burn::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ClipGradNorm {
    max_norm: f64,
    norm_type: f64,
    error_if_nonfinite: bool,
    options: DdpOptions,
}

impl ClipGradNorm {
    /// Clips the Euclidean norm to `max_norm`.
    pub fn new(max_norm: f64) -> Self {
        let options = DdpOptions::default();
        Self { max_norm, norm_type: 2.0, error_if_nonfinite: false, options }
    }

    /// The order of the norm: 2 unless set. `f64::INFINITY` takes the largest absolute value.
    #[must_use]
    pub fn norm_type(mut self, order: f64) -> Self {
        self.norm_type = order;
        self
    }

    /// Whether a norm that is infinite or NaN is an error, which leaves the gradients as they are. Otherwise, as with
    /// torch, a NaN makes all gradients NaN, and an infinite norm makes the finite ones 0.
    #[must_use]
    pub fn error_if_nonfinite(mut self, is_error: bool) -> Self {
        self.error_if_nonfinite = is_error;
        self
    }

    /// Leaves gradients out of the norm, and as they are: those that [`DdpOptions::ignore`] keeps on each rank. They
    /// differ between ranks, so the norm would, too.
    #[must_use]
    pub fn ignore(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.options = self.options.ignore(names);
        self
    }

    /// Clips the gradients of `model`. Returns the norm that they had. Parameters without a gradient are passed over.
    ///
    /// # Errors
    ///
    /// [`NonFiniteNorm`](crate::ErrorKind::NonFiniteNorm), if that was asked for. [`Argument`](crate::ErrorKind::Argument) if the order of the norm is not above
    /// zero, or a gradient has a type without a norm. [`Device`](crate::ErrorKind::Device) if a device cannot be read.
    pub fn clip<M: Module>(
        &self,
        gradients: &mut impl AveragedGradients,
        model: &M,
    ) -> Result<f64> {
        let is_ignored = |name: &str| self.options.ignores(name);
        let norm = self.norm(gradients, model)?;
        let value = norm.value();
        if self.error_if_nonfinite && !value.is_finite() {
            return Err(failure::non_finite_norm(value));
        }
        let coefficient = norm.clip_coefficient(self.max_norm);
        if coefficient != 1.0 {
            scale(gradients.here_mut(), model, &is_ignored, coefficient);
        }
        Ok(value)
    }

    /// The norm of all gradients together.
    fn norm<M: Module>(
        &self,
        gradients: &impl AveragedGradients,
        model: &M,
    ) -> Result<GradientNorm> {
        let order = self.norm_type;
        let mut norm = GradientNorm::of_order(order).ok_or_else(|| {
            failure::cannot_scale(format!("a norm has an order above zero, not {order}"))
        })?;
        let is_ignored = |name: &str| self.options.ignores(name);
        let mut parts = Vec::new();
        let of_each = each(gradients.here(), model, &is_ignored, |name, values| {
            parts.push((name.to_owned(), norm.part(values)));
        });
        let parts = of_each.map(|()| parts);
        gradients.complete(parts)?.into_iter().for_each(|part| norm.add_part(part));
        Ok(norm)
    }
}

/// Calls `look` with names and gradients of `model` in the order of definition, but for those that `skip` names.
pub(crate) fn each<M: Module>(
    gradients: &GradientsParams,
    model: &M,
    skip: &dyn Fn(&str) -> bool,
    mut look: impl FnMut(&str, Values<'_>),
) -> Result<()> {
    let mut seen = Seen { gradients, skip, batch: Batch::default() };
    visit_floats(model, &mut seen);
    for (name, tensor) in seen.batch.read()? {
        tensor.with_values(|values| look(&name, values)).ok_or_else(|| {
            failure::cannot_scale(format!("the gradient of `{name}` has a type without a norm"))
        })?;
    }
    Ok(())
}

/// Collects gradients in the order of definition.
struct Seen<'a> {
    gradients: &'a GradientsParams,
    skip: &'a dyn Fn(&str) -> bool,
    batch: Batch,
}

impl VisitFloat for Seen<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        if (self.skip)(name) {
            return;
        }
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            self.batch.add(name, gradient);
        }
    }
}

/// Multiplies the gradients of `model` with `factor`, but for those that `skip` names.
pub(crate) fn scale<M: Module>(
    gradients: &mut GradientsParams,
    model: &M,
    skip: &dyn Fn(&str) -> bool,
    factor: f64,
) {
    visit_floats(model, &mut Scale { gradients, skip, factor });
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    skip: &'a dyn Fn(&str) -> bool,
    factor: f64,
}

impl VisitFloat for Scale<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        if (self.skip)(name) {
            return;
        }
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            self.gradients.register(param.id, gradient.mul_scalar(self.factor));
        }
    }
}
