//! A loop in burn in many processes.

use std::sync::Arc;

use anyhow::Result;
use burn::{data::dataloader::DataLoader, module::Module, optim::AdamConfig, tensor::Device};
use drumline::ProcessGroup;
use drumline_burn::{DistributedDataParallel, data::DataLoaderBuilder};
use fashion_mnist::data::DataSet;
use fashion_mnist_learner::{
    data::{Numbers, Stack},
    model::Classifier,
};

pub(crate) fn train() -> Result<f64> {
    let group = ProcessGroup::from_env()?;
    let device = Device::flex().autodiff();
    let data = DataSet::load(None)?;
    let images = Numbers(data.train.count());

    let (ddp, mut model) = DistributedDataParallel::wrap(Classifier::new(&device), &group)?;
    let mut optimizer = AdamConfig::new().init();
    let loader = DataLoaderBuilder::new(Stack(Arc::new(data.train)))
        .batch_size(32)
        .shuffle(42)
        .num_workers(2)
        .set_device(device)
        .build(images, &group)?;
    for _epoch in 0..2 {
        for batch in loader.iter() {
            let loss = model.classify(batch?).loss;
            let gradients = ddp.backward(loss, &model)?;
            model = optimizer.step(0.001, model, gradients);
        }
    }
    if group.rank() == 0 {
        model.clone().into_record().save("model")?;
    }
    group.destroy()?;
    Ok(model.accuracy(data.test)?)
}
