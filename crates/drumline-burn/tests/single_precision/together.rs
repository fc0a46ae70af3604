//! Several wrapped models under one loss.

use crate::common::{on_ranks, tensor};
use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::GradientsParams,
    tensor::{Device, Tensor},
};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, Error, accumulate_all, backward_all, shadow_all,
};

fn device() -> Device {
    Device::flex().autodiff()
}

fn layer() -> Linear {
    LinearConfig::new(4, 4).init(&device())
}

fn loss(encoder: &Linear, decoder: &Linear, data: usize) -> Tensor<1> {
    let hidden = encoder.forward(tensor([3, 4], data, &device())).tanh();
    decoder.forward(hidden).square().mean()
}

fn values(layer: &Linear, gradients: &GradientsParams) -> Vec<f32> {
    let weight = gradients.get::<2>(layer.weight.id).unwrap().into_data();
    let bias = gradients.get::<1>(layer.bias.as_ref().unwrap().id).unwrap().into_data();
    [weight, bias].map(|data| data.try_into_vec::<f32>().unwrap()).concat()
}

#[test]
fn one_backward_serves_both_models_as_if_they_were_one() {
    let start = (layer(), layer());
    for world_size in [1, 2, 3] {
        on_ranks(world_size, |group| {
            let rank = group.rank();
            let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
            let wrap = |model: &Linear| {
                DistributedDataParallel::wrap_with(model.clone(), &group, &options).unwrap()
            };
            let (encoders, encoder) = wrap(&start.0);
            let (decoders, decoder) = wrap(&start.1);
            let (ddp, both) =
                DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
            let pair = || [encoders.with(&encoder), decoders.with(&decoder)];
            for step in 0..3 {
                let wanted = ddp.backward(loss(&both.0, &both.1, rank + step), &both).unwrap();
                let wanted = [values(&both.0, &wanted), values(&both.1, &wanted)];
                let [a, b] = backward_all(loss(&encoder, &decoder, rank + step), pair()).unwrap();
                assert_eq!([values(&encoder, &a), values(&decoder, &b)], wanted);
                assert_eq!((a.len(), b.len()), (2, 2));

                // As in a GAN: this loss changes the decoder only.
                let launched = encoders.stats().buckets_launched;
                let alone = decoders.backward(loss(&encoder, &decoder, rank + step), &decoder);
                assert_eq!(values(&decoder, &alone.unwrap()), wanted[1]);
                assert_eq!(encoders.stats().buckets_launched, launched);
            }
            if world_size > 1 {
                let stats = encoders.stats();
                assert_eq!((stats.steps, stats.buckets_launched), (3, 3 * 4));
                assert_eq!(stats.buckets_launched_early, 3 * 4, "during backward");
            }
            // Micro-batches, and a rank without data.
            let [early, late] = [0, 1].map(|data| loss(&both.0, &both.1, data));
            ddp.accumulate(early, &both).unwrap();
            let wanted = ddp.backward(late, &both).unwrap();
            let wanted = [values(&both.0, &wanted), values(&both.1, &wanted)];
            accumulate_all(loss(&encoder, &decoder, 0), pair()).unwrap();
            let [a, b] = backward_all(loss(&encoder, &decoder, 1), pair()).unwrap();
            assert_eq!([values(&encoder, &a), values(&decoder, &b)], wanted);
            if rank == 0 {
                backward_all(loss(&encoder, &decoder, 1), pair()).unwrap();
            }
            let mut shadowed = 0;
            while let Some([a, b]) = shadow_all(pair()).unwrap() {
                assert_eq!((a.len(), b.len()), (2, 2));
                shadowed += 1;
            }
            assert_eq!(shadowed, usize::from(rank > 0));
        });
    }
}

#[test]
fn an_unused_parameter_of_either_model_is_named_on_every_rank() {
    for error in on_ranks(2, |group| {
        let wrap = || DistributedDataParallel::wrap(layer(), &group).unwrap();
        let ((encoders, encoder), (decoders, decoder)) = (wrap(), wrap());
        let loss = match group.rank() {
            0 => loss(&encoder, &decoder, 1),
            _ => encoder.forward(tensor([3, 4], 1, &device())).mean(),
        };
        backward_all(loss, [encoders.with(&encoder), decoders.with(&decoder)]).unwrap_err()
    }) {
        let wanted = "parameters `weight of model 2`, `bias of model 2` got no gradient on rank 1";
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

#[test]
fn models_that_cannot_step_together_are_refused() {
    on_ranks(2, |group| {
        let (encoders, encoder) = DistributedDataParallel::wrap(layer(), &group).unwrap();
        let (decoders, decoder) = DistributedDataParallel::wrap(layer(), &group).unwrap();
        let other = DdpOptions::default().bucket_bytes(7);
        let (others, odd) = DistributedDataParallel::wrap_with(layer(), &group, &other).unwrap();
        let refused = |answer: Result<[GradientsParams; 2], Error>, wanted: &str| {
            let error = answer.unwrap_err();
            assert!(error.to_string().contains("cannot take a step together"), "{error}");
            assert!(error.to_string().contains(wanted), "{error}");
        };
        let fresh = || loss(&encoder, &decoder, 1);
        let twice = backward_all(fresh(), [encoders.with(&encoder), encoders.with(&encoder)]);
        refused(twice, "a model comes twice");
        let unlike = backward_all(fresh(), [encoders.with(&encoder), others.with(&odd)]);
        refused(unlike, "the same options");
        encoders.accumulate(fresh(), &encoder).unwrap();
        let pending = backward_all(fresh(), [encoders.with(&encoder), decoders.with(&decoder)]);
        refused(pending, "earlier micro-batches");
        encoders.backward(fresh(), &encoder).unwrap();
        backward_all(fresh(), [encoders.with(&encoder), decoders.with(&decoder)]).unwrap();
        assert!(encoders.unwrap(encoder).valid().weight.val().dims() == [4, 4]);
    });
}
