//! Models of different types in one list.

use burn::{module::Module, optim::GradientsParams, tensor::Gradients};
use drumline::ddp::{Averaged, GradientReducer, UnusedParameters};

use crate::{
    Result, check,
    gradients::{self, Kept, Slots},
};

/// What a step does with a model. See the functions of [`gradients`] and [`check`].
pub(crate) trait AnyModel {
    fn submit_missing(
        &self,
        reducer: &GradientReducer,
        slots: &Slots,
        gradients: &Gradients,
    ) -> Result<()>;

    fn accumulate(
        &self,
        reducer: &GradientReducer,
        slots: &Slots,
        gradients: &Gradients,
    ) -> Result<()>;

    fn keep(&self, kept: &Kept, gradients: &Gradients);

    fn digest(&self, slots: &Slots, digests: &mut [u64]) -> Result<()>;

    fn own(
        &self,
        slots: &Slots,
        gradients: &mut Gradients,
        kept: GradientsParams,
        policy: UnusedParameters,
        step: u64,
    ) -> Result<GradientsParams>;

    fn collect(
        &self,
        averaged: &Averaged<'_>,
        slots: &Slots,
        kept: GradientsParams,
        own: Option<&mut Gradients>,
    ) -> GradientsParams;
}

impl<M: Module> AnyModel for M {
    fn submit_missing(
        &self,
        reducer: &GradientReducer,
        slots: &Slots,
        gradients: &Gradients,
    ) -> Result<()> {
        gradients::submit_missing(reducer, slots, gradients, self)
    }

    fn accumulate(
        &self,
        reducer: &GradientReducer,
        slots: &Slots,
        gradients: &Gradients,
    ) -> Result<()> {
        gradients::accumulate(reducer, slots, gradients, self)
    }

    fn keep(&self, kept: &Kept, gradients: &Gradients) {
        kept.add(gradients, self);
    }

    fn digest(&self, slots: &Slots, digests: &mut [u64]) -> Result<()> {
        check::digest(slots, self, digests)
    }

    fn own(
        &self,
        slots: &Slots,
        gradients: &mut Gradients,
        kept: GradientsParams,
        policy: UnusedParameters,
        step: u64,
    ) -> Result<GradientsParams> {
        gradients::own(slots, gradients, self, kept, policy, step)
    }

    fn collect(
        &self,
        averaged: &Averaged<'_>,
        slots: &Slots,
        kept: GradientsParams,
        own: Option<&mut Gradients>,
    ) -> GradientsParams {
        gradients::collect(averaged, slots, self, kept, own)
    }
}
