//! A step in a graph that tells when backward comes by.

use std::{fmt, sync::Arc};

#[cfg(feature = "gpu")]
use burn::backend::Cube;
use burn::{
    backend::{
        Autodiff, Backend, Dispatch, Flex,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind, unary},
        },
        backend_extension,
        tensor::FloatTensor,
    },
    tensor::Tensor,
};

/// `x`, with a step in the graph at which backward calls `passed`.
pub(crate) fn probe<const D: usize>(
    x: Tensor<D>,
    passed: impl Fn() + Send + Sync + 'static,
) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::probe(x.into_dispatch(), Probe(Arc::new(passed))))
}

#[derive(Clone)]
struct Probe(Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Probe")
    }
}

#[backend_extension(Autodiff, Flex, Cube: cfg(feature = "gpu"))]
trait Probed: Backend {
    fn probe(x: FloatTensor<Self>, probe: Probe) -> FloatTensor<Self>;
}

impl Probed for Flex {
    fn probe(x: FloatTensor<Self>, _: Probe) -> FloatTensor<Self> {
        x
    }
}

#[cfg(feature = "gpu")]
impl Probed for Cube {
    fn probe(x: FloatTensor<Self>, _: Probe) -> FloatTensor<Self> {
        x
    }
}

impl<B: Probed, C: CheckpointStrategy> Probed for Autodiff<B, C> {
    fn probe(x: FloatTensor<Self>, probe: Probe) -> FloatTensor<Self> {
        match ProbeBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(probe, x.into_primitive()),
            OpsKind::UnTracked(prep) => prep.finish(x.into_primitive()),
        }
    }
}

#[derive(Debug)]
struct ProbeBackward;

impl<B: Backend> Backward<B, 1> for ProbeBackward {
    type State = Probe;

    fn backward(self, ops: Ops<Probe, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Probe(passed) = ops.state;
        passed();
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| gradient);
    }
}
