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

/// How many buckets have left when backward has passed each layer of a model of 6 MiB, from the last layer to the first.
fn launched_at_each_layer(options: &DdpOptions) -> Vec<u64> {
    const WIDTH: usize = 512; // a layer has 1 MiB
    let of_ranks = on_ranks(2, |group| {
        let device = Device::flex().autodiff();
        let model = Mlp::new(WIDTH, LAYERS, &device);
        let (ddp, model) = DistributedDataParallel::wrap_with(model, &group, options).unwrap();
        let ddp = Arc::new(ddp);
        let mut last = Vec::new();
        for _ in 0..2 {
            let before = ddp.stats().buckets_launched;
            let seen = Arc::new(Mutex::new(Vec::new()));
            let mut x: Tensor<2> = tensor([2, WIDTH], 1, &device);
            for layer in &model.layers {
                let (ddp, seen) = (ddp.clone(), seen.clone());
                x = probe(x, move || {
                    seen.lock().unwrap().push(ddp.stats().buckets_launched - before);
                });
                // The first probe is on what needs no gradient. So is backward's end.
                x = tanh(layer.forward(x));
            }
            let loss = model.head.forward(x).square().mean();
            ddp.backward(loss, &model).unwrap();
            last = seen.lock().unwrap().clone();
            last.push(ddp.stats().buckets_launched - before);
        }
        last
    });
    assert_eq!(of_ranks[0], of_ranks[1]);
    of_ranks.into_iter().next().unwrap()
}

#[test]
fn most_of_a_small_model_leaves_during_backward_unless_a_size_is_set() {
    // Five layers above the lowest one, and a head that leaves with the first of them.
    let fitted = launched_at_each_layer(&DdpOptions::default());
    assert_eq!(fitted, [1, 2, 3, 4, 5, 6]);
    let set = launched_at_each_layer(&DdpOptions::default().bucket_bytes(25 << 20));
    assert_eq!(set, [1, 1, 1, 1, 1, 2]);
}
