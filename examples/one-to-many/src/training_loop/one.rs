//! A loop in burn in one process.

use std::sync::Arc;

use anyhow::Result;
use burn::{
    data::dataloader::DataLoaderBuilder,
    module::Module,
    optim::{AdamConfig, GradientsParams},
    tensor::Device,
};
use fashion_mnist::data::DataSet;
use fashion_mnist_learner::{
    data::{Numbers, Stack},
    model::Classifier,
};

pub(crate) fn train() -> Result<f64> {
    let device = Device::flex().autodiff();
    let data = DataSet::load(None)?;
    let images = Numbers(data.train.count());

    let mut model = Classifier::new(&device);
    let mut optimizer = AdamConfig::new().init();
    let loader = DataLoaderBuilder::new(Stack(Arc::new(data.train)))
        .batch_size(32)
        .shuffle(42)
        .num_workers(2)
        .set_device(device)
        .build(images);
    for _epoch in 0..2 {
        for batch in loader.iter() {
            let loss = model.classify(batch?).loss;
            let gradients = loss.backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optimizer.step(0.001, model, gradients);
        }
    }
    model.clone().into_record().save("model")?;
    Ok(model.accuracy(data.test)?)
}
