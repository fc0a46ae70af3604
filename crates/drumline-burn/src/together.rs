//! Several wrapped models under one loss.

use std::fmt;

use burn::{module::Module, optim::GradientsParams, tensor::Tensor};

use crate::{
    Result,
    any_model::AnyModel,
    ddp::DistributedDataParallel,
    step::{Part, Together},
};

/// A model beside its handle, for [`backward_all`]. [`DistributedDataParallel::with`] makes it.
pub struct Wrapped<'a> {
    ddp: &'a DistributedDataParallel,
    model: &'a dyn AnyModel,
}

impl fmt::Debug for Wrapped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Wrapped").field(self.ddp).finish()
    }
}

impl DistributedDataParallel {
    /// The model of this handle, for [`backward_all`], [`accumulate_all`] and [`shadow_all`].
    pub fn with<'a, M: Module>(&'a self, model: &'a M) -> Wrapped<'a> {
        Wrapped { ddp: self, model }
    }
}

/// [`backward`](DistributedDataParallel::backward) of one loss through several wrapped models. Returns the averages of
/// each.
///
/// For models that are wrapped separately but trained together, an encoder and a decoder for example. The gradients of
/// all of them travel while backward still runs. All ranks must pass the models in the same order. A loss that should
/// change only one of them (as in a GAN) needs no more than `backward` of that one: the others send nothing.
///
/// The models must be wrapped with the same group and options (other ignored names are fine). `stats` of the first one
/// counts what the steps communicate.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
/// use drumline_burn::{DistributedDataParallel, backward_all};
///
/// drumline::local(2, |group| {
///     let device = Device::flex().autodiff();
///     let layer = || -> Linear { LinearConfig::new(2, 2).init(&device) };
///     let (encoders, encoder) = DistributedDataParallel::wrap(layer(), &group)?;
///     let (decoders, decoder) = DistributedDataParallel::wrap(layer(), &group)?;
///     let batch = Tensor::<2>::ones([4, 2], &device) * (1 + group.rank()) as f32;
///     let loss = decoder.forward(encoder.forward(batch)).square().mean();
///     let [of_encoder, of_decoder] =
///         backward_all(loss, [encoders.with(&encoder), decoders.with(&decoder)])?;
///     assert_eq!((of_encoder.len(), of_decoder.len()), (2, 2));
///     Ok(())
/// })?;
/// # Ok::<_, drumline_burn::Error>(())
/// ```
///
/// # Errors
///
/// As for [`backward`](DistributedDataParallel::backward), and [`Argument`](crate::ErrorKind::Argument).
pub fn backward_all<const N: usize, const D: usize>(
    loss: Tensor<D>,
    models: [Wrapped<'_>; N],
) -> Result<[GradientsParams; N]> {
    together(&models)?.backward(loss).map(by_model)
}

/// [`accumulate`](DistributedDataParallel::accumulate) for several models. The step ends with [`backward_all`] of the
/// same models.
///
/// # Errors
///
/// As for [`backward_all`].
pub fn accumulate_all<const N: usize, const D: usize>(
    loss: Tensor<D>,
    models: [Wrapped<'_>; N],
) -> Result<()> {
    together(&models)?.accumulate(loss)
}

/// [`shadow`](DistributedDataParallel::shadow) for several models: takes part in a step of [`backward_all`] without
/// data.
///
/// # Errors
///
/// As for [`backward_all`].
pub fn shadow_all<const N: usize>(
    models: [Wrapped<'_>; N],
) -> Result<Option<[GradientsParams; N]>> {
    Ok(together(&models)?.shadow()?.map(by_model))
}

fn together<'a>(models: &[Wrapped<'a>]) -> Result<Together<'a>> {
    let part = |it: &Wrapped<'a>| Part { handle: it.ddp.handle(), model: it.model };
    Together::all(models.iter().map(part).collect())
}

/// There is one element for each of `N` models.
fn by_model<const N: usize>(gradients: Vec<GradientsParams>) -> [GradientsParams; N] {
    let mut gradients = gradients.into_iter();
    std::array::from_fn(|_| gradients.next().unwrap_or_default())
}
