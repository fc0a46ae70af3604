//! `SyncBatchNorm` on a GPU gives what it gives on the CPU, and what one rank with all samples gives.

use std::sync::Mutex;

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{ModuleOptimizer, SgdConfig},
    tensor::{Device, Tensor},
};
use drumline::ProcessGroup;
use drumline_burn::{
    DistributedDataParallel, NamedTensor, SyncBatchNorm, SyncBatchNormConfig, TensorValues,
    load_named_tensors, named_tensors,
};

use crate::{
    common::{on_ranks, tensor},
    device,
};

#[derive(Module, Debug)]
struct Normed {
    first: Linear,
    norm: SyncBatchNorm,
    last: Linear,
}

impl Normed {
    fn new(statistics: &ProcessGroup, device: &Device) -> Self {
        Self {
            first: LinearConfig::new(3, 4).init(device),
            norm: SyncBatchNormConfig::new(2).init(statistics, device),
            last: LinearConfig::new(4, 1).init(device),
        }
    }

    /// The sum over samples. Normalises little images.
    fn loss(&self, input: Tensor<2>) -> Tensor<1> {
        let hidden = self.first.forward(input);
        let samples = hidden.dims()[0];
        let normed = self.norm.forward(hidden.reshape([samples, 2, 1, 2])).unwrap();
        (self.last.forward(normed.reshape([samples, 4])) - 0.5).square().sum()
    }
}

/// Trains on six samples, of which each rank has its share. Returns all tensors at the end, by rank.
fn train(start: &[NamedTensor], device: &Device, shares: &[usize]) -> Vec<Vec<NamedTensor>> {
    let statistics = drumline::rendezvous::local_world(shares.len()).unwrap();
    let statistics = Mutex::new(statistics.into_iter().map(Some).collect::<Vec<_>>());
    on_ranks(shares.len(), |group| {
        let statistics = statistics.lock().unwrap()[group.rank()].take().unwrap();
        let model = load_named_tensors(Normed::new(&statistics, device), start.to_vec()).unwrap();
        let (ddp, mut model) = DistributedDataParallel::wrap(model, &group).unwrap();
        let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
        let first: usize = shares[..group.rank()].iter().sum();
        for step in 0..3 {
            let batch: Tensor<2> = tensor([6, 3], step, device) * 3.0 + 1.0;
            let input = batch.slice([first..first + shares[group.rank()], 0..3]);
            // Averaged over the ranks, this is the mean over all samples.
            let loss = model.loss(input) * (shares.len() as f64 / 6.0);
            let gradients = ddp.backward(loss, &model).unwrap();
            model = optimizer.step(0.1, model, gradients);
        }
        named_tensors(&model).unwrap()
    })
}

#[test]
fn ranks_learn_together_what_the_cpu_learns_alone() {
    let start = named_tensors(&Normed::new(&ProcessGroup::alone(), &Device::flex())).unwrap();
    let wanted = train(&start, &Device::flex().autodiff(), &[6]).remove(0);
    for shares in [&[3, 3][..], &[4, 2]] {
        let ranks = train(&start, &device(), shares);
        assert_eq!(ranks[0], ranks[1], "parameters, buffers and all");
        for (ours, wanted) in ranks[0].iter().zip(&wanted) {
            let (TensorValues::F32(ours), TensorValues::F32(values)) =
                (&ours.values, &wanted.values)
            else {
                panic!("{} is {}", ours.name, ours.values.dtype());
            };
            for (ours, value) in ours.iter().zip(values) {
                assert!((ours - value).abs() < 1e-4, "{}: {ours}, not {value}", wanted.name);
            }
        }
        let moved = |(new, old): (&NamedTensor, &NamedTensor)| new.values != old.values;
        assert!(ranks[0].iter().zip(&start).all(moved), "every tensor has learnt");
    }
}

#[test]
fn an_empty_batch_is_refused() {
    let layer = SyncBatchNormConfig::new(3).init(&ProcessGroup::alone(), &device());
    let error = layer.forward(Tensor::<2>::zeros([0, 3], &device())).map(drop).unwrap_err();
    assert!(error.to_string().contains("it has no samples"), "{error}");
}

#[test]
fn a_rank_that_leaves_before_backward_is_named_by_backward() {
    let statistics = drumline::rendezvous::local_world(2).unwrap();
    let statistics = Mutex::new(statistics.into_iter().map(Some).collect::<Vec<_>>());
    on_ranks(2, |group| {
        let statistics = statistics.lock().unwrap()[group.rank()].take().unwrap();
        let model = Normed::new(&statistics, &device());
        let (ddp, model) = DistributedDataParallel::wrap(model, &group).unwrap();
        let loss = model.loss(tensor([4, 3], group.rank(), &device()));
        if group.rank() == 1 {
            return;
        }
        let error = ddp.backward(loss, &model).map(drop).unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
    });
}
