//! The recorded step of autodiff: normalises by given statistics. Its backward takes into account that
//! the statistics depend on the samples of all ranks.
//!
//! With `y` the normalised values and `g` the gradient of the loss with respect to the output,
//! and means taken over the samples of all ranks,
//! `dx = gamma / std · (g - mean(g) - y · mean(g · y))`.

use std::{cell::RefCell, sync::Arc};

use burn::{
    backend::{
        Autodiff, Backend, Dispatch, Flex, TensorMetadata,
        autodiff::{
            NodeId,
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        flex::FlexTensor,
        ops::{FloatTensorOps, ModuleOps},
        tensor::FloatTensor,
    },
    tensor::{Shape, Tensor, TensorData},
};
use drumline::{ProcessGroup, ReduceOp};

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
    static FAILURE: RefCell<Option<drumline::Error>> = const { RefCell::new(None) };
}

/// Why the communication of the last backward on this thread failed, if it did.
pub(crate) fn take_failure() -> Option<drumline::Error> {
    FAILURE.take()
}

#[backend_extension(Autodiff, Flex)]
pub(crate) trait Normalize: Backend {
    fn normalize(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        over: Arc<Over>,
    ) -> FloatTensor<Self>;
}

impl Normalize for Flex {
    fn normalize(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        variance: FloatTensor<Self>,
        over: Arc<Over>,
    ) -> FloatTensor<Self> {
        Flex::batch_norm(x, gamma, beta, mean, variance, over.epsilon)
    }
}

impl<C: CheckpointStrategy> Normalize for Autodiff<Flex, C> {
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
                prep.finish(state, Flex::normalize(x, gamma, beta, mean, variance, over))
            }
            OpsKind::UnTracked(prep) => {
                let [x, gamma, beta] = [x, gamma, beta].map(|tensor| tensor.into_primitive());
                prep.finish(Flex::normalize(x, gamma, beta, mean, variance, over))
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

impl Backward<Flex, 3> for NormalizeBackward {
    type State = Saved<FlexTensor>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [x_node, gamma_node, beta_node] = ops.parents;
        let gradient = grads.consume::<Flex>(&ops.node);
        let Saved { x, gamma, mean, variance, over } = ops.state;
        let x = checkpointer.retrieve_node_output::<FlexTensor>(x);
        let gamma = checkpointer.retrieve_node_output::<FlexTensor>(gamma);

        let shape = x.shape();
        let channels = shape[1];
        let flat = Shape::new([channels, shape.num_elements() / channels]);
        let mut per_channel = vec![1; shape.num_dims()];
        per_channel[1] = channels;
        let per_channel = |tensor| Flex::float_reshape(tensor, Shape::from(per_channel.clone()));
        let sums = |tensor| {
            let tensor = Flex::float_reshape(Flex::float_swap_dims(tensor, 0, 1), flat.clone());
            Flex::float_reshape(Flex::float_sum_dim(tensor, 1), Shape::new([channels]))
        };

        let variance = Flex::float_add_scalar(variance, over.epsilon.into());
        let inverse_std = per_channel(Flex::float_recip(Flex::float_sqrt(variance)));
        let normalized =
            Flex::float_mul(Flex::float_sub(x, per_channel(mean)), inverse_std.clone());
        let beta_gradient = sums(gradient.clone());
        let gamma_gradient = sums(Flex::float_mul(gradient.clone(), normalized.clone()));

        // Even if nothing needs the gradient of `x`, because all ranks must make the same calls.
        let means = means_over_all_ranks(&over, &beta_gradient, &gamma_gradient);
        if let Some(node) = x_node {
            let [mean_gradient, mean_projection] = means.map(per_channel);
            let projected = Flex::float_mul(normalized, mean_projection);
            let centred = Flex::float_sub(Flex::float_sub(gradient, mean_gradient), projected);
            let scale = Flex::float_mul(per_channel(gamma), inverse_std);
            grads.register::<Flex>(node.id, Flex::float_mul(scale, centred));
        }
        // These are parameters, so DDP averages them like all others.
        if let Some(node) = gamma_node {
            grads.register::<Flex>(node.id, gamma_gradient);
        }
        if let Some(node) = beta_node {
            grads.register::<Flex>(node.id, beta_gradient);
        }
    }
}

/// The means over the samples of all ranks, given each rank's sums.
fn means_over_all_ranks(over: &Over, first: &FlexTensor, second: &FlexTensor) -> [FlexTensor; 2] {
    let mut sums = [elements(first), elements(second)].concat();
    if let Err(error) = over.group.all_reduce(&mut sums, ReduceOp::Sum) {
        FAILURE.set(Some(error));
        sums.fill(f64::NAN);
    }
    let (device, dtype) = (first.device(), first.dtype());
    let channels = sums.len() / 2;
    [&sums[..channels], &sums[channels..]].map(|sums| {
        let means = sums.iter().map(|sum| sum / over.count).collect();
        let means = TensorData::new(means, [channels]).convert_dtype(dtype);
        Flex::float_from_data(means, &device)
    })
}

/// The elements of a vector, in double precision.
fn elements(tensor: &FlexTensor) -> Vec<f64> {
    tensor.clone().into_data().iter::<f64>().collect()
}
