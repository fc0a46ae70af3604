//! Gradients leave while backward goes on: shown by counting, not by a clock.

use std::sync::{Arc, Mutex};

use crate::common::{Mlp, on_ranks, probe::probe, tensor};
use burn::tensor::{Device, Tensor, activation::tanh};
use drumline_burn::{DdpOptions, DistributedDataParallel};

const LAYERS: usize = 6;

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
                let (ddp, seen) = (ddp.clone(), seen.clone());
                // Notes, when backward comes by, how many buckets have left.
                x = probe(tanh(layer.forward(x)), move || {
                    seen.lock().unwrap().push((place, ddp.stats().buckets_launched));
                });
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
