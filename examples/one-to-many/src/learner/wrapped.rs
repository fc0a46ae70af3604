//! burn's `Learner` in many processes: gradients travel during backward, and each epoch is shuffled over all ranks.

use std::sync::Arc;

use anyhow::{Result, bail};
use burn::{
    lr_scheduler::constant::ConstantLr,
    optim::AdamConfig,
    tensor::Device,
    train::{
        Learner, SupervisedTraining,
        metric::{AccuracyMetric, LossMetric},
    },
};
use drumline::ProcessGroup;
use drumline_burn::{DistributedDataParallel, data::DataLoaderBuilder, distribute};
use fashion_mnist::data::DataSet;
use fashion_mnist_learner::{
    data::{Numbers, Stack, loader},
    model::Classifier,
};

pub(crate) fn train() -> Result<f64> {
    let group = ProcessGroup::from_env()?;
    let device = Device::flex().autodiff();
    let data = DataSet::load(None)?;
    let images = Numbers(data.train.count());

    let (ddp, model) = DistributedDataParallel::wrap(Classifier::new(&device), &group)?;
    let train = DataLoaderBuilder::new(Stack(Arc::new(data.train)))
        .batch_size(32)
        .shuffle(42)
        .num_workers(2)
        .build(images, &group)?;
    let valid = loader(data.test.clone(), 500, None);
    let training = SupervisedTraining::new("runs/learner", train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_default_checkpointers()
        .num_epochs(2);
    let learner = Learner::new(model, AdamConfig::new().init(), ConstantLr::new(0.001));
    let result = distribute(training, &group).wrapped(&ddp).launch(learner);
    if let Some(error) = result.error {
        bail!("{error}");
    }
    group.destroy()?;
    Ok(result.model.accuracy(data.test)?)
}
