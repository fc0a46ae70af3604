//! Training that is resumed, and checkpoints of another one.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap, linear};
use drumline::{
    ProcessGroup,
    checkpoint::{Checkpoint, CheckpointDirectory},
    sampler::DistributedSampler,
};
use drumline_candle::{AdamW, DataParallel, checkpoint, resume, variables_digest};

use crate::{numbers, on_ranks, variable};

/// Trains on 60 samples in two epochs of batches of three, up to `stop` steps, and saves every step.
pub(crate) fn train(
    group: &ProcessGroup,
    out: &CheckpointDirectory,
    dtype: DType,
    stop: u64,
) -> u64 {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, dtype, &Device::Cpu);
    let layers = [linear(4, 8, vb.pp("first")).unwrap(), linear(8, 1, vb.pp("second")).unwrap()];
    let mut ddp = DataParallel::wrap(&varmap, group).unwrap();
    // Other settings than those that were saved, which win.
    let lr = if out.steps().unwrap().is_empty() { 0.05 } else { 9.0 };
    let params = ParamsAdamW { lr, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(varmap.all_vars(), params).unwrap();
    let mut sampler =
        DistributedSampler::builder(60, group.world_size(), group.rank()).build().unwrap();
    let mut step = 0;
    out.prepare_on_root(group).unwrap();
    if let Some(found) = out.newest_on_root(group).unwrap() {
        resume(&found.checkpoint, &varmap, &mut optimizer, &mut sampler).unwrap();
        step = found.step;
    }
    for epoch in sampler.state().epoch..2 {
        if epoch > sampler.state().epoch {
            sampler.set_epoch(epoch);
        }
        let indices: Vec<usize> = sampler.iter().collect();
        for batch in indices.chunks(3) {
            if step == stop {
                return variables_digest(&varmap).unwrap();
            }
            let rows: Vec<Tensor> =
                batch.iter().map(|&sample| numbers(&[1, 4], sample, dtype)).collect();
            let input = Tensor::cat(&rows, 0).unwrap();
            let hidden = layers[0].forward(&input).unwrap().tanh().unwrap();
            let loss = (layers[1].forward(&hidden).unwrap() - 0.5).unwrap();
            ddp.backward_step(&mut optimizer, &loss.sqr().unwrap().mean_all().unwrap()).unwrap();
            optimizer.set_learning_rate(optimizer.learning_rate() * 0.99);
            sampler.advance(batch.len());
            step += 1;
            out.save_on_root(group, step, || checkpoint(&varmap, &optimizer, &sampler)).unwrap();
        }
    }
    variables_digest(&varmap).unwrap()
}

#[test]
fn resumed_training_ends_with_the_same_bits() {
    for (world_size, dtype) in [(1, DType::F32), (2, DType::F32), (3, DType::F64), (2, DType::BF16)]
    {
        let temporary = tempfile::tempdir().unwrap();
        let whole = CheckpointDirectory::new(temporary.path().join("whole"));
        let parts = CheckpointDirectory::new(temporary.path().join("parts"));
        // Random weights cannot be seeded, so both go on from the first step.
        on_ranks(world_size, |group| train(&group, &whole, dtype, 1));
        parts.prepare().unwrap();
        parts.save(1, &whole.newest().unwrap().unwrap().checkpoint).unwrap();
        let wanted = on_ranks(world_size, |group| train(&group, &whole, dtype, u64::MAX));
        for stop in [2, 5, 9] {
            on_ranks(world_size, |group| train(&group, &parts, dtype, stop));
        }
        let ends = on_ranks(world_size, |group| train(&group, &parts, dtype, u64::MAX));
        assert_eq!(ends, wanted, "{world_size} ranks, {dtype:?}");
        let [whole, parts] = [whole, parts].map(|it| it.newest().unwrap().unwrap());
        assert_eq!(whole.step, parts.step);
        assert_eq!(whole.checkpoint, parts.checkpoint, "{world_size} ranks, {dtype:?}");
    }
}

/// A model of one variable, with an optimizer that has made a step, and a sampler of 10 samples.
fn small(name: &str, shape: &[usize]) -> (VarMap, AdamW, DistributedSampler) {
    let varmap = VarMap::new();
    let weight = variable(&varmap, name, shape, DType::F32);
    let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.1).unwrap();
    optimizer.backward_step(&(weight + 1.0).unwrap().sum_all().unwrap()).unwrap();
    (varmap, optimizer, DistributedSampler::builder(10, 1, 0).build().unwrap())
}

fn saved() -> Checkpoint {
    let (varmap, optimizer, sampler) = small("weight", &[2]);
    checkpoint(&varmap, &optimizer, &sampler).unwrap()
}

#[test]
fn checkpoints_of_another_training_are_refused_and_change_nothing() {
    let refused = |given: &Checkpoint, name: &str, shape: &[usize]| {
        let (varmap, mut optimizer, mut sampler) = small(name, shape);
        sampler.advance(3);
        let before = checkpoint(&varmap, &optimizer, &sampler).unwrap();
        let error = resume(given, &varmap, &mut optimizer, &mut sampler).unwrap_err();
        assert_eq!(checkpoint(&varmap, &optimizer, &sampler).unwrap(), before);
        error.to_string()
    };
    let good = saved();
    let text = refused(&good, "bias", &[2]);
    assert!(text.contains("`bias` f32[2] is missing; the model has no `weight` f32[2]"), "{text}");
    let text = refused(&good, "weight", &[3]);
    assert!(text.contains("`weight` is f32[2], the model has f32[3]"), "{text}");

    let rebuilt = |keep: &dyn Fn(&str) -> bool| {
        let mut other = Checkpoint::default();
        other.metadata = good.metadata.clone();
        for tensor in good.tensors().filter(|tensor| keep(tensor.name())) {
            other.insert(tensor.clone());
        }
        other
    };
    let text = refused(&rebuilt(&|name| !name.starts_with("optimizer.")), "weight", &[2]);
    assert!(text.contains("`weight.first_moment` f32[2] is missing"), "{text}");
    let mut other = good.clone();
    other.metadata.clear();
    let text = refused(&other, "weight", &[2]);
    assert!(text.contains("has no state of a sampler"), "{text}");
    other.metadata.insert("sampler".into(), "epoch=1".into());
    assert!(refused(&other, "weight", &[2]).contains("is not the state of a sampler"));
    let elsewhere = DistributedSampler::builder(11, 1, 0).build().unwrap().state().to_string();
    other.metadata.insert("sampler".into(), elsewhere);
    let text = refused(&other, "weight", &[2]);
    assert!(text.contains("samples 11, but this sampler has 10"), "{text}");
    let mut other = good.clone();
    let negative = drumline::checkpoint::Tensor::from_values("optimizer.steps", [], &[-1_i64]);
    other.insert(negative.unwrap());
    let text = refused(&other, "weight", &[2]);
    assert!(text.contains("unusable value of `steps`"), "{text}");
}

#[test]
fn candles_sgd_resumes_and_refuses_the_state_of_another_optimizer() {
    let (varmap, _, mut sampler) = small("weight", &[2]);
    let mut sgd = SGD::new(varmap.all_vars(), 0.1).unwrap();
    let mine = checkpoint(&varmap, &sgd, &sampler).unwrap();
    resume(&mine, &varmap, &mut sgd, &mut sampler).unwrap();
    let text = resume(&saved(), &varmap, &mut sgd, &mut sampler).unwrap_err().to_string();
    assert!(
        text.contains("the model has no `lr, beta1, beta2, eps, weight_decay` f64[5]"),
        "{text}"
    );
}

#[test]
fn an_optimizer_of_another_map_has_no_names() {
    let (varmap, _, sampler) = small("weight", &[2]);
    let (_, other, _) = small("weight", &[4, 2]);
    let error = checkpoint(&varmap, &other, &sampler).unwrap_err();
    assert!(error.to_string().contains("a variable of shape [4, 2] that is not in"), "{error}");
}
