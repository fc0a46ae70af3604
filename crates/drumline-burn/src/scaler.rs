//! A loss scale that adapts.

use burn::{module::Module, tensor::Tensor};
use drumline::ddp::{DdpOptions, LossScale, Values};

use crate::{Result, averaged::AveragedGradients, clip, failure};

/// Scales losses up and gradients down again, for training in f16: torch's `GradScaler`.
///
/// All ranks need the same settings. Then they have the same scale, and skip the same steps, without a message: averaged
/// gradients are equal, so all ranks see alike whether they are finite.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, optim::{ModuleOptimizer, SgdConfig}};
/// use burn::tensor::{Device, Tensor};
/// use drumline::ProcessGroup;
/// use drumline_burn::{DistributedDataParallel, GradScaler, clip_grad_norm};
///
/// let device = Device::flex().autodiff();
/// let model: Linear = LinearConfig::new(2, 1).init(&device);
/// let (ddp, mut model) = DistributedDataParallel::wrap(model, &ProcessGroup::alone())?;
/// let mut optimizer = SgdConfig::new().init();
/// let mut scaler = GradScaler::default();
/// for factor in [1.0, f32::INFINITY, 1.0] {
///     let loss = model.forward(Tensor::<2>::ones([1, 2], &device)).sum() * factor;
///     let mut gradients = ddp.backward(scaler.scale(loss), &model)?;
///     if scaler.unscale(&mut gradients, &model)? {
///         clip_grad_norm(&mut gradients, &model, 1.0)?;
///         model = optimizer.step(0.1, model, gradients);
///     } // otherwise the step is skipped
///     scaler.update();
/// }
/// assert_eq!(scaler.loss_scale().value(), 32768.0); // half of what it was
/// # Ok::<_, drumline_burn::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GradScaler {
    loss_scale: LossScale,
    /// Whether a gradient of this step was infinite or NaN.
    found_inf: bool,
    options: DdpOptions,
}

impl GradScaler {
    /// A scaler with other settings, or from a checkpoint.
    pub fn new(loss_scale: LossScale) -> Self {
        Self { loss_scale, ..Self::default() }
    }

    /// Does not look whether the gradients of these parameters are finite: those that [`DdpOptions::ignore`] keeps on
    /// each rank. They differ between ranks, so the scales would, too. They are scaled down like the others.
    #[must_use]
    pub fn ignore(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.options = self.options.ignore(names);
        self
    }

    /// The present scale, for a checkpoint or a log.
    pub fn loss_scale(&self) -> LossScale {
        self.loss_scale
    }

    /// `loss`, multiplied with the scale.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        loss.mul_scalar(self.loss_scale.value())
    }

    /// Divides the gradients of `model` by the scale. Returns whether all of them are finite. If not, skip the optimizer.
    ///
    /// Gradients of a [`ShardedOptimizer`](crate::ShardedOptimizer) are shared out, so all ranks must call this; it takes
    /// one small collective.
    ///
    /// A step may do this for several models: [`update`](Self::update) knows of all of them.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) if a gradient is f16: keep the parameters in f32, and cast them in forward.
    /// [`Device`](crate::ErrorKind::Device) if a device cannot be read.
    pub fn unscale<M: Module>(
        &mut self,
        gradients: &mut impl AveragedGradients,
        model: &M,
    ) -> Result<bool> {
        let (mut has_inf, mut is_half) = (false, false);
        let is_ignored = |name: &str| self.options.ignores(name);
        let looked = clip::each(gradients.here(), model, &is_ignored, |_, values| {
            has_inf |= !values.are_finite();
            is_half |= matches!(values, Values::F16(_));
        });
        let [has_inf, is_half] = gradients.any(looked.map(|()| [has_inf, is_half]))?;
        if is_half {
            let problem = "gradients of f16 become zero when they are divided by the loss scale";
            return Err(failure::cannot_scale(problem.to_owned()));
        }
        clip::scale(gradients.here_mut(), model, &|_| false, self.loss_scale.value().recip());
        self.found_inf |= has_inf;
        Ok(!has_inf)
    }

    /// Ends the step: the scale grows or shrinks.
    pub fn update(&mut self) {
        self.loss_scale.update(std::mem::take(&mut self.found_inf));
    }
}
