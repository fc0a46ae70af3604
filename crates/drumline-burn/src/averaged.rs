//! Averaged gradients, whole or shared out between the ranks.

use burn::optim::GradientsParams;

use crate::Result;

/// Gradients that [`clip_grad_norm`](crate::clip_grad_norm) and [`GradScaler`](crate::GradScaler) take: burn's
/// [`GradientsParams`], which all ranks have alike, and [`ShardedGradients`](crate::ShardedGradients), of which each
/// rank has a part.
///
/// ```
/// use burn::module::Module;
/// use drumline_burn::{AveragedGradients, GradScaler, Result, clip_grad_norm};
///
/// /// Returns whether to take the step.
/// fn prepare<M: Module>(
///     gradients: &mut impl AveragedGradients,
///     model: &M,
///     scaler: &mut GradScaler,
/// ) -> Result<bool> {
///     let is_finite = scaler.unscale(gradients, model)?;
///     clip_grad_norm(gradients, model, 1.0)?;
///     Ok(is_finite)
/// }
/// ```
pub trait AveragedGradients: sealed::Averaged {}

impl AveragedGradients for GradientsParams {}

pub(crate) mod sealed {
    use super::*;

    /// How what each rank knows of its gradients becomes known of all of them.
    pub trait Averaged {
        /// The gradients that this rank has.
        fn here(&self) -> &GradientsParams;

        fn here_mut(&mut self) -> &mut GradientsParams;

        /// A number for each parameter, in the order in which the model defines them. `own` are those of the gradients
        /// that this rank has, in that order. Parameters without a gradient may have 0, or no number.
        fn complete(&self, own: Result<Vec<(String, f64)>>) -> Result<Vec<f64>>;

        /// What is true of some gradient. `own` is what is true of some gradient that this rank has.
        fn any<const N: usize>(&self, own: Result<[bool; N]>) -> Result<[bool; N]>;
    }
}

impl sealed::Averaged for GradientsParams {
    fn here(&self) -> &GradientsParams {
        self
    }

    fn here_mut(&mut self) -> &mut GradientsParams {
        self
    }

    fn complete(&self, own: Result<Vec<(String, f64)>>) -> Result<Vec<f64>> {
        Ok(own?.into_iter().map(|(_, number)| number).collect())
    }

    fn any<const N: usize>(&self, own: Result<[bool; N]>) -> Result<[bool; N]> {
        own
    }
}
