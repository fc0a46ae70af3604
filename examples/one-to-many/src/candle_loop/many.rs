//! A loop in candle in many processes, of the form of candle's own example `mnist-training`.

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear, loss, seq};
use drumline::{ProcessGroup, sampler::DistributedSampler};
use drumline_candle::DataParallel;
use fashion_mnist::data::{CLASSES, DataSet, PIXELS, Split};

const BSIZE: usize = 32;

pub(crate) fn train() -> Result<f64> {
    let group = ProcessGroup::from_env()?;
    let dev = Device::Cpu;
    let data = DataSet::load(None)?;
    let (train_images, train_labels) = tensors(&data.train, &dev)?;
    let (test_images, test_labels) = tensors(&data.test, &dev)?;

    let varmap = VarMap::new();
    let vs = VarBuilder::from_varmap(&varmap, DType::F32, &dev);
    let hidden = linear(PIXELS, 100, vs.pp("hidden"))?;
    let output = linear(100, CLASSES, vs.pp("output"))?;
    let model = seq().add(hidden).add_fn(Tensor::relu).add(output);
    let mut ddp = DataParallel::wrap(&varmap, &group)?;
    let params = ParamsAdamW { lr: 0.001, ..ParamsAdamW::default() };
    let mut opt = AdamW::new(varmap.all_vars(), params)?;
    let n_batches = train_images.dim(0)? / BSIZE;
    let mut batch_idxs =
        DistributedSampler::builder(n_batches, group.world_size(), group.rank()).build()?;
    for epoch in 0..2 {
        batch_idxs.set_epoch(epoch);
        for batch_idx in batch_idxs.iter() {
            let images = train_images.narrow(0, batch_idx * BSIZE, BSIZE)?;
            let labels = train_labels.narrow(0, batch_idx * BSIZE, BSIZE)?;
            let loss = loss::cross_entropy(&model.forward(&images)?, &labels)?;
            ddp.backward_step(&mut opt, &loss)?;
        }
    }
    if group.rank() == 0 {
        varmap.save("model.safetensors")?;
    }
    group.destroy()?;

    let hits = model.forward(&test_images)?.argmax(D::Minus1)?.eq(&test_labels)?;
    let hits = hits.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?;
    Ok(100.0 * f64::from(hits))
}

/// Pixels `[count, PIXELS]` and labels `[count]`.
fn tensors(images: &Split, dev: &Device) -> Result<(Tensor, Tensor)> {
    let (pixels, labels) = images.batch(0..images.count());
    let labels: Vec<u32> = labels.into_iter().map(i32::unsigned_abs).collect();
    let count = labels.len();
    Ok((Tensor::from_vec(pixels, (count, PIXELS), dev)?, Tensor::from_vec(labels, count, dev)?))
}
