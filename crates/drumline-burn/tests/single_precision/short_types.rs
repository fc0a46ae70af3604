//! Parameters of 16 bits, and gradients that travel in 16 bits.

use crate::common::{Mlp, on_ranks, tensor};
use burn::{
    module::{Module, ModuleMapper, Param},
    optim::{GradientsParams, SgdConfig},
    tensor::{DType, Device, FloatDType, Tensor},
};
use drumline::{bf16, f16};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, TensorValues, Wire, load_named_tensors, named_tensors,
    parameters_digest,
};

fn device() -> Device {
    Device::flex().autodiff()
}

/// Rounds to another type and back.
type Round = fn(f32) -> f32;

/// Makes all parameters of this type.
struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| Tensor::from_inner(tensor.inner().cast(self.0)).require_grad())
    }
}

fn loss(model: &Mlp, rank: usize, dtype: FloatDType) -> Tensor<1> {
    let input: Tensor<2> = tensor([3, 8], rank, &device());
    model.forward(input.cast(dtype)).square().mean()
}

/// All gradients of the model, as f32.
fn values(model: &Mlp, gradients: &GradientsParams) -> Vec<f32> {
    let layers = model.layers.iter().chain([&model.head]);
    layers
        .flat_map(|layer| {
            let weight = gradients.get::<2>(layer.weight.id).unwrap().cast(FloatDType::F32);
            weight.into_data().try_into_vec::<f32>().unwrap()
        })
        .collect()
}

/// This rank's own gradients.
fn plain(model: &Mlp, rank: usize, dtype: FloatDType) -> Vec<f32> {
    values(model, &GradientsParams::from_grads(loss(model, rank, dtype).backward(), model))
}

#[test]
fn gradients_of_16_bits_are_summed_in_f32_and_rounded_once() {
    let types: [(FloatDType, DType, Round); 2] = [
        (FloatDType::F16, DType::F16, |x| f16::from_f32(x).to_f32()),
        (FloatDType::BF16, DType::BF16, |x| bf16::from_f32(x).to_f32()),
    ];
    for (dtype, same, round) in types {
        let start = Mlp::new(8, 2, &device()).map(&mut Cast(dtype));
        for world_size in [1, 3] {
            let mut sum = vec![0.0_f32; plain(&start, 0, dtype).len()];
            for rank in 0..world_size {
                let own = plain(&start, rank, dtype);
                sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
            }
            let wanted: Vec<f32> = sum.iter().map(|x| round(x / world_size as f32)).collect();
            assert!(wanted.iter().any(|x| *x != 0.0));
            let digests = on_ranks(world_size, |group| {
                let (ddp, model) = DistributedDataParallel::wrap(start.clone(), &group).unwrap();
                let mut optimizer = SgdConfig::new().init();
                let gradients = ddp.backward(loss(&model, group.rank(), dtype), &model).unwrap();
                let weight = gradients.get::<2>(model.head.weight.id).unwrap();
                assert_eq!(weight.dtype(), same);
                assert_eq!(values(&model, &gradients), wanted, "{dtype:?}, {world_size} ranks");

                let model = optimizer.step(0.1, model, gradients);
                let tensors = named_tensors(&model).unwrap();
                assert!(match &tensors[0].values {
                    TensorValues::F16(_) => same == DType::F16,
                    TensorValues::Bf16(_) => same == DType::BF16,
                    _ => false,
                });
                let digest = parameters_digest(&model).unwrap();
                let loaded = load_named_tensors(start.clone(), tensors).unwrap();
                assert_eq!(parameters_digest(&loaded).unwrap(), digest);
                digest
            });
            assert!(digests.iter().all(|digest| *digest == digests[0]));
        }
    }
}

#[test]
fn gradients_of_f32_can_travel_as_bf16_and_come_back_as_f32() {
    const WORLD_SIZE: usize = 3;
    let start = Mlp::new(8, 2, &device());
    let rounded = |x: f32| bf16::from_f32(x).to_f32();
    // Two micro-batches on each rank: added before the first rounding.
    let own = |rank: usize| -> Vec<f32> {
        let [a, b] = [2 * rank, 2 * rank + 1].map(|data| plain(&start, data, FloatDType::F32));
        a.iter().zip(&b).map(|(a, b)| rounded(a + b)).collect()
    };
    let mut sum = vec![0.0_f32; own(0).len()];
    for rank in 0..WORLD_SIZE {
        sum.iter_mut().zip(own(rank)).for_each(|(sum, own)| *sum += own);
    }
    let wanted: Vec<f32> = sum.iter().map(|x| rounded(x / WORLD_SIZE as f32)).collect();
    on_ranks(WORLD_SIZE, |group| {
        let options = DdpOptions::default().wire(Wire::Bf16).bucket_bytes(100);
        let (ddp, model) =
            DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
        for _ in 0..3 {
            let loss = |number| loss(&model, 2 * group.rank() + number, FloatDType::F32);
            ddp.accumulate(loss(0), &model).unwrap();
            let gradients = ddp.backward(loss(1), &model).unwrap();
            assert_eq!(values(&model, &gradients), wanted);
        }
    });
}
