//! Gradients leave while backward goes on: shown by counting, not by a clock.

use std::sync::{Arc, Mutex};

use crate::common::{Mlp, on_ranks, tensor};
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
    tensor::{Device, Tensor, activation::tanh},
};
use drumline_burn::{DdpOptions, DistributedDataParallel};

const LAYERS: usize = 6;

/// Notes, when backward comes by, how many buckets have left.
#[derive(Clone, Debug)]
struct Probe {
    place: usize,
    ddp: Arc<DistributedDataParallel>,
    seen: Arc<Mutex<Vec<(usize, u64)>>>,
}

#[backend_extension(Autodiff, Flex)]
trait Probed: Backend {
    fn probe(x: FloatTensor<Self>, probe: Probe) -> FloatTensor<Self>;
}

impl Probed for Flex {
    fn probe(x: FloatTensor<Self>, _: Probe) -> FloatTensor<Self> {
        x
    }
}

impl<C: CheckpointStrategy> Probed for Autodiff<Flex, C> {
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
        let Probe { place, ddp, seen } = ops.state;
        seen.lock().unwrap().push((place, ddp.stats().buckets_launched));
        unary::<B, _>(ops.parents, ops.node, grads, |gradient| gradient);
    }
}

#[test]
fn each_layers_gradients_leave_before_backward_reaches_the_layer_below() {
    on_ranks(2, |group| {
        let device = Device::flex().autodiff();
        // One bucket per parameter.
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
        let model = Mlp::new(8, LAYERS, &device);
        let (ddp, model) = DistributedDataParallel::wrap_with(model, &group, &options).unwrap();
        let ddp = Arc::new(ddp);
        for step in 0..3 {
            let seen = Arc::new(Mutex::new(Vec::new()));
            let mut x: Tensor<2> = tensor([4, 8], 1, &device);
            for (place, layer) in model.layers.iter().enumerate() {
                x = tanh(layer.forward(x));
                let probe = Probe { place, ddp: ddp.clone(), seen: seen.clone() };
                x = Tensor::from_dispatch(Dispatch::probe(x.into_dispatch(), probe));
            }
            let loss = model.head.forward(x).square().mean();
            ddp.backward(loss, &model).unwrap();

            // Above place k lie the head and layers k+1 and up, with two parameters each.
            let before = step * 2 * (LAYERS as u64 + 1);
            let wanted: Vec<(usize, u64)> =
                (0..LAYERS).rev().map(|k| (k, before + 2 * (LAYERS - k) as u64)).collect();
            assert_eq!(*seen.lock().unwrap(), wanted);
        }
        let timeline = ddp.timeline();
        assert_eq!((timeline.step, timeline.buckets.len()), (3, 2 * (LAYERS + 1)));
        assert!(timeline.buckets.iter().all(|bucket| bucket.launched_us <= timeline.backward_us));
        assert!(timeline.to_string().lines().count() == 2 + timeline.buckets.len(), "{timeline}");
        let stats = ddp.stats();
        assert_eq!(stats.buckets_launched, 3 * 2 * (LAYERS as u64 + 1));
        assert_eq!(stats.buckets_launched_early, stats.buckets_launched);
    });
}
