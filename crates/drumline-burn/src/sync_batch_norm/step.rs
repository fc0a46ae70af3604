//! The recorded step of autodiff: normalises by given statistics. Its backward takes into account that
//! the statistics depend on the samples of all ranks.
//!
//! With `y` the normalised values and `g` the gradient of the loss with respect to the output,
//! and means taken over the samples of all ranks,
//! `dx = gamma / std · (g - mean(g) - y · mean(g · y))`.

use std::{cell::RefCell, sync::Arc};

use burn::tensor::{Shape, Tensor, TensorData};
use drumline::{ProcessGroup, ReduceOp};

use super::statistics::unread;
#[cfg(feature = "gpu")]
use crate::burn_version::gpu::Cube;
use crate::{
    Error, Result,
    burn_version::backend::{
        Autodiff, Backend, Backward, CheckpointStrategy, Checkpointer, Dispatch, Flex, FloatTensor,
        Gradients, NodeId, Ops, OpsKind, TensorMetadata, backend_extension, read_sync,
    },
};

/// The samples behind the statistics.
#[derive(Clone, Debug)]
pub(super) struct Over {
    pub(super) group: ProcessGroup,
    /// Values per channel, on all ranks together.
    pub(super) count: f64,
    pub(super) epsilon: f64,
}

/// Normalises `input` by `mean` and `variance`, which are constants to autodiff.
pub(super) fn normalize<const D: usize>(
    input: Tensor<D>,
    gamma: Tensor<1>,
    beta: Tensor<1>,
    variance: Tensor<1>,
    mean: Tensor<1>,
    over: Over,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::normalize(
        input.into_dispatch(),
        gamma.into_dispatch(),
        beta.into_dispatch(),
        mean.into_dispatch(),
        variance.into_dispatch(),
        Arc::new(over),
    ))
}

thread_local! {
    /// A backward step cannot return an error. It puts the error here, where the caller of backward takes it
    /// on the same thread. It also makes the gradient NaN, so that no training uses it.
    static FAILURE: RefCell<Option<Error>> = const { RefCell::new(None) };
}

/// Why a layer failed in the last backward on this thread, if one did.
pub(crate) fn take_failure() -> Option<Error> {
    FAILURE.take()
}

#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "gpu"))]
pub(crate) trait Normalize: Backend {
    fn normalize(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        over: Arc<Over>,
    ) -> FloatTensor<Self> {
        Self::batch_norm(x, gamma, beta, mean, variance, over.epsilon)
    }
}

impl Normalize for Flex {}

#[cfg(feature = "gpu")]
impl Normalize for Cube {}

impl<B: Backend, C: CheckpointStrategy> Normalize for Autodiff<B, C> {
    fn normalize(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        over: Arc<Over>,
    ) -> FloatTensor<Self> {
        let nodes = [x.node(), gamma.node(), beta.node()];
        let (mean, variance) = (mean.into_primitive(), variance.into_primitive());
        match NormalizeBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let state = Saved {
                    x: prep.checkpoint(&x),
                    gamma: prep.checkpoint(&gamma),
                    mean: mean.clone(),
                    variance: variance.clone(),
                    over: over.clone(),
                };
                let [x, gamma, beta] = [x, gamma, beta].map(|tensor| tensor.into_primitive());
                prep.finish(state, B::batch_norm(x, gamma, beta, mean, variance, over.epsilon))
            }
            OpsKind::UnTracked(prep) => {
                let [x, gamma, beta] = [x, gamma, beta].map(|tensor| tensor.into_primitive());
                prep.finish(B::batch_norm(x, gamma, beta, mean, variance, over.epsilon))
            }
        }
    }
}

#[derive(Debug)]
struct NormalizeBackward;

/// The values that forward keeps for backward.
#[derive(Clone, Debug)]
struct Saved<F> {
    x: NodeId,
    gamma: NodeId,
    mean: F,
    variance: F,
    over: Arc<Over>,
}

impl<B: Backend> Backward<B, 3> for NormalizeBackward {
    type State = Saved<B::FloatTensorPrimitive>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [x_node, gamma_node, beta_node] = ops.parents;
        let gradient = grads.consume::<B>(&ops.node);
        let Saved { x, gamma, mean, variance, over } = ops.state;
        let x = checkpointer.retrieve_node_output::<B::FloatTensorPrimitive>(x);
        let gamma = checkpointer.retrieve_node_output::<B::FloatTensorPrimitive>(gamma);

        let shape = x.shape();
        let channels = shape[1];
        let flat = Shape::new([channels, shape.num_elements() / channels]);
        let mut per_channel = vec![1; shape.num_dims()];
        per_channel[1] = channels;
        let per_channel = |tensor| B::float_reshape(tensor, Shape::from(per_channel.clone()));
        let sums = |tensor| {
            let tensor = B::float_reshape(B::float_swap_dims(tensor, 0, 1), flat.clone());
            B::float_reshape(B::float_sum_dim(tensor, 1), Shape::new([channels]))
        };

        let variance = B::float_add_scalar(variance, over.epsilon.into());
        let inverse_std = per_channel(B::float_recip(B::float_sqrt(variance)));
        let normalized = B::float_mul(B::float_sub(x, per_channel(mean)), inverse_std.clone());
        let beta_gradient = sums(gradient.clone());
        let gamma_gradient = sums(B::float_mul(gradient.clone(), normalized.clone()));

        // Even if nothing needs the gradient of `x`, because all ranks must make the same calls.
        let means = means_over_all_ranks::<B>(&over, &beta_gradient, &gamma_gradient);
        if let Some(node) = x_node {
            let [mean_gradient, mean_projection] = means.map(per_channel);
            let projected = B::float_mul(normalized, mean_projection);
            let centred = B::float_sub(B::float_sub(gradient, mean_gradient), projected);
            let scale = B::float_mul(per_channel(gamma), inverse_std);
            grads.register::<B>(node.id, B::float_mul(scale, centred));
        }
        // These are parameters, so DDP averages them like all others.
        if let Some(node) = gamma_node {
            grads.register::<B>(node.id, gamma_gradient);
        }
        if let Some(node) = beta_node {
            grads.register::<B>(node.id, beta_gradient);
        }
    }
}

/// The means over the samples of all ranks, given each rank's sums.
fn means_over_all_ranks<B: Backend>(
    over: &Over,
    first: &FloatTensor<B>,
    second: &FloatTensor<B>,
) -> [FloatTensor<B>; 2] {
    let (dtype, device, channels) = (first.dtype(), first.device(), first.shape()[0]);
    let sums = sums_over_all_ranks::<B>(over, [first, second]).unwrap_or_else(|error| {
        FAILURE.set(Some(error));
        vec![f64::NAN; 2 * channels]
    });
    [&sums[..channels], &sums[channels..]].map(|sums| {
        let means = sums.iter().map(|sum| sum / over.count).collect();
        let means = TensorData::new(means, [channels]).convert_dtype(dtype);
        B::float_from_data(means, &device)
    })
}

/// The elements of both vectors, in double precision, summed over all ranks.
fn sums_over_all_ranks<B: Backend>(over: &Over, own: [&FloatTensor<B>; 2]) -> Result<Vec<f64>> {
    let mut sums = Vec::new();
    for own in own {
        let own = read_sync(B::float_into_data(own.clone()));
        let own = own.map_err(|error| unread(&error))?;
        sums.extend(own.iter::<f64>());
    }
    over.group.all_reduce(&mut sums, ReduceOp::Sum)?;
    Ok(sums)
}
