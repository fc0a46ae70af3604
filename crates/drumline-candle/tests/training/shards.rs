//! Steps of shards: one model, whatever the number of ranks.

use candle_core::{DType, Device, Tensor};
use candle_nn::{BatchNorm, Init, Linear, Module, ModuleT, Optimizer, SGD, VarMap};
use drumline::ProcessGroup;
use drumline_candle::{DataParallel, DdpOptions, Result, variables_digest};

use super::{named, numbers, on_ranks};

struct Net {
    first: Linear,
    norm: BatchNorm,
    last: Linear,
}

impl Net {
    fn new(varmap: &VarMap) -> Self {
        let get = |shape: &[usize], name: &str, init: f64| {
            varmap.get(shape, name, Init::Const(init), DType::F32, &Device::Cpu).unwrap()
        };
        let linear = |name: &str, inputs: usize, outputs: usize| {
            let weight = get(&[outputs, inputs], &format!("{name}.weight"), 0.0);
            named(varmap, &format!("{name}.weight"))
                .set(&numbers(&[outputs, inputs], inputs, DType::F32))
                .unwrap();
            Linear::new(weight, Some(get(&[outputs], &format!("{name}.bias"), 0.1)))
        };
        let (first, last) = (linear("first", 3, 9), linear("last", 9, 1));
        let [mean, var] = [("norm.mean", 0.0), ("norm.var", 1.0)].map(|(n, x)| get(&[9], n, x));
        let [weight, bias] =
            [("norm.weight", 1.0), ("norm.bias", 0.0)].map(|(n, x)| get(&[9], n, x));
        let norm = BatchNorm::new(9, mean, var, weight, bias, 1e-5).unwrap();
        Self { first, norm, last }
    }

    fn loss(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        let hidden = self.norm.forward_t(&self.first.forward(input)?, true)?.relu()?;
        self.last.forward(&hidden)?.sqr()?.mean_all()
    }
}

fn batch(number: usize, shard: usize) -> Tensor {
    (numbers(&[5, 3], number * 100 + shard, DType::F32) * (shard + 1) as f64).unwrap()
}

fn wrapped(group: &ProcessGroup, shards: usize) -> (VarMap, Net, DataParallel) {
    let varmap = VarMap::new();
    let net = Net::new(&varmap);
    let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(64).shards(shards);
    let ddp = DataParallel::wrap_with(&varmap, group, &options).unwrap();
    (varmap, net, ddp)
}

fn train(group: &ProcessGroup, shards: usize) -> Result<(Vec<f64>, u64)> {
    train_telling(group, shards, || ())
}

/// The losses, and a digest of variables and running statistics. Calls `reached` at the begin of each shard and at the end of
/// each step.
pub(crate) fn train_telling(
    group: &ProcessGroup,
    shards: usize,
    reached: impl Fn(),
) -> Result<(Vec<f64>, u64)> {
    let (varmap, net, mut ddp) = wrapped(group, shards);
    let mut optimizer = SGD::new(varmap.all_vars(), 0.05).unwrap();
    let mut losses = Vec::new();
    for number in 0..4 {
        let step = ddp.step(number as u64, |shard| {
            reached();
            Ok(net.loss(&batch(number, shard))?)
        })?;
        optimizer.step(&step.gradients).unwrap();
        losses.push(step.loss);
        reached();
    }
    let digest = variables_digest(&varmap)?;
    ddp.elastic().close()?;
    Ok((losses, digest))
}

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    for shards in [4, 6] {
        let alone = train(&ProcessGroup::alone(), shards).unwrap();
        for ranks in 2..=4 {
            for of_rank in on_ranks(ranks, |group| train(&group, shards).unwrap()) {
                assert_eq!(of_rank, alone, "{shards} shards, {ranks} ranks");
            }
        }
    }
    let of = |shards| train(&ProcessGroup::alone(), shards).unwrap();
    assert_ne!(of(4), of(6), "the digest shows nothing");
}

#[test]
fn running_statistics_are_those_of_shard_0() {
    let (varmap, net, mut ddp) = wrapped(&ProcessGroup::alone(), 3);
    let reference = VarMap::new();
    let plain = Net::new(&reference);
    for number in 0..2 {
        ddp.step(number as u64, |shard| Ok(net.loss(&batch(number, shard))?)).unwrap();
        plain.loss(&batch(number, 0)).unwrap();
        assert_eq!(variables_digest(&varmap).unwrap(), variables_digest(&reference).unwrap());
    }
}

#[test]
fn failures_and_misuse_are_named_on_all_ranks_and_change_nothing() {
    on_ranks(3, |group| {
        let (varmap, net, mut ddp) = wrapped(&group, 5);
        let before = variables_digest(&varmap).unwrap();
        for first in [true, false] {
            let failing = |shard| match shard {
                3 => Err("no data".into()),
                _ => Ok(net.loss(&batch(0, shard))?),
            };
            let error = ddp.step(0, failing).unwrap_err().to_string();
            assert!(error.contains("the closure of a step of shards failed: no data"), "{error}");
            assert!(error.contains("rank "), "{error}");
            assert!(!first || variables_digest(&varmap).unwrap() == before);
            ddp.step(0, |shard| Ok(net.loss(&batch(0, shard))?)).unwrap();
        }
        let loss = net.loss(&batch(0, 0)).unwrap();
        let error = ddp.backward(&loss).unwrap_err().to_string();
        assert!(error.contains("a step is one call of `step`"), "{error}");
        let error =
            ddp.step(6 + group.rank() as u64, |_| Ok(loss.clone())).unwrap_err().to_string();
        assert!(error.contains("rank 0 runs step 6, and rank 1 step 7"), "{error}");
        let mut plain = DataParallel::wrap(&varmap, &group).unwrap();
        let error = plain.step(0, |_| Ok(loss.clone())).unwrap_err().to_string();
        assert!(error.contains("shards(count)"), "{error}");
    });
}
