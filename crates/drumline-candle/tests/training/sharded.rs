//! Moments that are shared out between the ranks.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use drumline::{
    ProcessGroup, checkpoint::CheckpointDirectory, ddp::ParameterSpec, sampler::DistributedSampler,
};
use drumline_candle::{
    AdamW, DataParallel, DdpOptions, ShardedOptimizer, UnusedParameters, checkpoint,
    load_variables, resume, save_variables, variables_digest,
};

use crate::{numbers, on_ranks, variable};

/// Two layers, and a variable that nothing trains.
pub(crate) struct Model {
    pub(crate) varmap: VarMap,
    layers: [candle_nn::Linear; 2],
}

impl Model {
    pub(crate) fn new(dtype: DType) -> Self {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, dtype, &Device::Cpu);
        let first = linear(4, 8, vb.pp("first")).unwrap();
        let layers = [first, linear(8, 1, vb.pp("second")).unwrap()];
        variable(&varmap, "running", &[30], dtype);
        Self { varmap, layers }
    }

    /// With the values of `other`.
    pub(crate) fn like(other: &Self, dtype: DType) -> Self {
        let model = Self::new(dtype);
        let mut values = drumline::checkpoint::Checkpoint::default();
        save_variables(&other.varmap, &mut values).unwrap();
        load_variables(&values, &model.varmap).unwrap();
        model
    }

    pub(crate) fn loss(&self, seed: usize, dtype: DType) -> Tensor {
        let input = numbers(&[3, 4], seed, dtype);
        let hidden = self.layers[0].forward(&input).unwrap().tanh().unwrap();
        let loss = (self.layers[1].forward(&hidden).unwrap() - 0.5).unwrap();
        loss.sqr().unwrap().mean_all().unwrap()
    }
}

pub(crate) fn params() -> ParamsAdamW {
    ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() }
}

#[test]
fn variables_end_with_the_bits_of_plain_training() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        for (world_size, options) in [
            (1, DdpOptions::default()),
            (2, DdpOptions::default()),
            (3, DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1)),
            (4, DdpOptions::default().unused_parameters(UnusedParameters::Ignore)),
        ] {
            let start = Model::new(dtype);
            // The ranks have one step less each, and then shadow the others.
            let steps = |rank: usize| 5 - rank;
            let plain = on_ranks(world_size, |group| {
                let model = Model::like(&start, dtype);
                let mut ddp = DataParallel::wrap_with(&model.varmap, &group, &options).unwrap();
                let mut optimizer = AdamW::new(model.varmap.all_vars(), params()).unwrap();
                for step in 0..steps(group.rank()) {
                    let loss = model.loss(10 * group.rank() + step, dtype);
                    ddp.backward_step(&mut optimizer, &loss).unwrap();
                }
                while let Some(gradients) = ddp.shadow().unwrap() {
                    optimizer.step(&gradients).unwrap();
                }
                variables_digest(&model.varmap).unwrap()
            });
            let sharded = on_ranks(world_size, |group| {
                let model = Model::like(&start, dtype);
                let mut optimizer =
                    ShardedOptimizer::wrap_with(&model.varmap, params(), &group, &options).unwrap();
                for step in 0..steps(group.rank()) {
                    let loss = model.loss(10 * group.rank() + step, dtype);
                    if step % 2 == 0 {
                        optimizer.backward_step(&loss).unwrap();
                    } else {
                        let gradients = optimizer.average(loss.backward().unwrap()).unwrap();
                        optimizer.step(gradients).unwrap();
                    }
                }
                while let Some(gradients) = optimizer.shadow().unwrap() {
                    optimizer.step(gradients).unwrap();
                }
                assert_eq!(optimizer.stats().steps, 5);
                variables_digest(&model.varmap).unwrap()
            });
            assert_ne!(plain[0], variables_digest(&start.varmap).unwrap(), "nothing was learnt");
            assert!(plain.iter().chain(&sharded).all(|it| *it == plain[0]), "{dtype:?}");
        }
    }
}

#[test]
fn a_rank_keeps_the_moments_of_its_own_variables_alone() {
    for world_size in 1..=4 {
        let own = on_ranks(world_size, |group| {
            let model = Model::new(DType::F32);
            let optimizer = ShardedOptimizer::wrap(&model.varmap, params(), &group).unwrap();
            let named: BTreeSet<String> = model
                .varmap
                .data()
                .lock()
                .unwrap()
                .keys()
                .filter(|name| optimizer.owner(name) == Some(group.rank()))
                .cloned()
                .collect();
            (named, optimizer.owners().bytes(group.rank()))
        });
        let all: BTreeSet<&String> = own.iter().flat_map(|(names, _)| names).collect();
        assert_eq!(all.len(), 5, "each variable has an owner");
        assert_eq!(own.iter().map(|(names, _)| names.len()).sum::<usize>(), 5, "and one only");
        let (total, largest) = (4 * (32 + 8 + 8 + 1 + 30), 4 * 32);
        assert!(own.iter().all(|(_, bytes)| *bytes <= total / world_size + largest));
    }
}

/// The samples of a step, of all ranks together.
const SAMPLES_PER_STEP: usize = 12;

/// Trains up to `stop` steps, and saves every step.
fn train(group: &ProcessGroup, out: &CheckpointDirectory, stop: u64, is_sharded: bool) {
    let model = Model::new(DType::F32);
    let batch_size = SAMPLES_PER_STEP / group.world_size();
    let mut sampler =
        DistributedSampler::builder(60, group.world_size(), group.rank()).build().unwrap();
    out.prepare_on_root(group).unwrap();
    let found = out.newest_on_root(group).unwrap();
    let mut step = found.as_ref().map_or(0, |found| found.step);
    let varmap = &model.varmap;
    let mut sharded = is_sharded.then(|| ShardedOptimizer::wrap(varmap, params(), group).unwrap());
    let mut plain = (!is_sharded).then(|| {
        let ddp = DataParallel::wrap(varmap, group).unwrap();
        (ddp, AdamW::new(varmap.all_vars(), params()).unwrap())
    });
    if let Some(found) = &found {
        match (&mut sharded, &mut plain) {
            (Some(sharded), _) => sharded.resume(&found.checkpoint, &mut sampler).unwrap(),
            (_, Some((_, plain))) => {
                resume(&found.checkpoint, varmap, plain, &mut sampler).unwrap();
            }
            _ => unreachable!(),
        }
    }
    while step < stop {
        let batch: Vec<usize> = sampler.iter().take(batch_size).collect();
        if batch.is_empty() {
            sampler.set_epoch(sampler.state().epoch + 1);
            continue;
        }
        let losses: Vec<Tensor> =
            batch.iter().map(|&sample| model.loss(sample, DType::F32)).collect();
        let loss = Tensor::stack(&losses, 0).unwrap().mean_all().unwrap();
        sampler.advance(batch.len());
        step += 1;
        if let Some(sharded) = &mut sharded {
            sharded.backward_step(&loss).unwrap();
            let whole = sharded.checkpoint(&sampler).unwrap();
            out.save_on_root(group, step, || Ok::<_, drumline_candle::Error>(whole)).unwrap();
        } else if let Some((ddp, optimizer)) = &mut plain {
            ddp.backward_step(optimizer, &loss).unwrap();
            out.save_on_root(group, step, || checkpoint(varmap, optimizer, &sampler)).unwrap();
        }
    }
}

#[test]
fn checkpoints_are_those_of_plain_training_and_any_number_of_ranks_goes_on_from_them() {
    let temporary = tempfile::tempdir().unwrap();
    let out = |name: &str| CheckpointDirectory::new(temporary.path().join(name));
    // Random weights cannot be seeded, so all go on from the first step.
    on_ranks(2, |group| train(&group, &out("first"), 1, true));
    let first = out("first").newest().unwrap().unwrap().checkpoint;
    let go_on = |name: &str, from: u64, file, world_size: usize, is_sharded: bool| {
        let out = out(name);
        out.prepare().unwrap();
        out.save(from, file).unwrap();
        on_ranks(world_size, |group| train(&group, &out, from + 4, is_sharded));
        out.newest().unwrap().unwrap().checkpoint
    };
    let plain = go_on("plain", 1, &first, 2, false);
    let sharded = go_on("sharded", 1, &first, 2, true);
    assert_eq!(sharded, plain);
    for world_size in [1, 3, 4] {
        let plain = go_on(&format!("plain on {world_size}"), 5, &sharded, world_size, false);
        let other = go_on(&format!("sharded on {world_size}"), 5, &sharded, world_size, true);
        assert_eq!(other, plain, "{world_size} ranks");
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused_on_every_rank() {
    let temporary = tempfile::tempdir().unwrap();
    let out = CheckpointDirectory::new(temporary.path());
    on_ranks(2, |group| train(&group, &out, 1, true));
    let saved = out.newest().unwrap().unwrap().checkpoint;
    let errors = on_ranks(3, |group| {
        let varmap = VarMap::new();
        variable(&varmap, "other", &[3], DType::F32);
        let mut optimizer = ShardedOptimizer::wrap(&varmap, params(), &group).unwrap();
        let mut sampler = DistributedSampler::builder(60, 3, group.rank()).build().unwrap();
        optimizer.resume(&saved, &mut sampler).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let missing = ParameterSpec::new("other.first_moment", [3], drumline::DType::F32);
    assert!(errors[0].contains(&format!("{missing} is missing")), "{}", errors[0]);
}

#[test]
fn a_wrong_combination_is_an_error_on_every_rank() {
    for error in on_ranks(2, |group| {
        let model = Model::new(DType::F32);
        let options = DdpOptions::default().sharded(true);
        DataParallel::wrap_with(&model.varmap, &group, &options).unwrap_err().to_string()
    }) {
        assert!(error.contains("use `ShardedOptimizer::wrap_with`"), "{error}");
    }
    for error in on_ranks(2, |group| {
        let model = Model::new(DType::F32);
        match group.rank() {
            0 => ShardedOptimizer::wrap(&model.varmap, params(), &group).map(drop),
            _ => DataParallel::wrap(&model.varmap, &group).map(drop),
        }
        .unwrap_err()
        .to_string()
    }) {
        let wanted = "rank 1: option `sharded optimizer` is false, rank 0 has true";
        assert!(error.contains(wanted), "{error}");
    }
    for error in on_ranks(2, |group| {
        let model = Model::new(DType::F32);
        let tied = crate::named(&model.varmap, "first.weight");
        model.varmap.data().lock().unwrap().insert("other.weight".to_owned(), tied);
        DataParallel::wrap(&model.varmap, &group).unwrap();
        ShardedOptimizer::wrap(&model.varmap, params(), &group).unwrap_err().to_string()
    }) {
        assert!(error.contains("`first.weight` and `other.weight` are one variable"), "{error}");
    }
    let models = [Model::new(DType::F32), Model::new(DType::F32)];
    let [mut first, mut second] = [&models[0], &models[1]].map(|model| {
        ShardedOptimizer::wrap(&model.varmap, params(), &ProcessGroup::alone()).unwrap()
    });
    let mut gradients = first.backward(&models[0].loss(1, DType::F32)).unwrap();
    let clipped = second.clip_grad_norm(&mut gradients, 1.0).map(|_| ());
    for error in [clipped, second.step(gradients)] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("computed by another `ShardedOptimizer`"), "{error}");
    }
}
