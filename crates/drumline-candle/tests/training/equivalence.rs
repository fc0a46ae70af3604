//! Several ranks with shares of a batch train like one with the whole batch.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, Optimizer, VarMap};
use drumline::ProcessGroup;
use drumline_candle::{AdamW, DataParallel, DdpOptions, UnusedParameters, variables_digest};
use proptest::prelude::*;

use crate::{elements, named, numbers, on_ranks};

/// A random model, and how it is trained.
#[derive(Clone, Debug)]
struct Case {
    /// The widths of input, hidden layers and output.
    widths: Vec<usize>,
    /// How often the first hidden layer, which is square, is applied: more than once shares its weights.
    shared: usize,
    /// The layers whose weights are frozen: backward finds no gradient for them.
    frozen: Vec<bool>,
    /// Whether the model has a layer that forward does not use.
    has_unused: bool,
    /// Samples of each rank.
    samples: usize,
    dtype: DType,
    world_size: usize,
    bucket_bytes: usize,
}

fn case(dtype: DType) -> impl Strategy<Value = Case> {
    let widths = (1usize..6, 1usize..6, prop::collection::vec(1usize..6, 1..4));
    let frozen = prop::collection::vec(prop::bool::weighted(0.2), 6);
    (widths, 1usize..4, frozen, any::<bool>(), 1usize..5, 1usize..=4, 1usize..200).prop_map(
        move |(
            (input, hidden, rest),
            shared,
            frozen,
            has_unused,
            samples,
            world_size,
            bucket_bytes,
        )| {
            let widths = [vec![input, hidden, hidden], rest].concat();
            Case { widths, shared, frozen, has_unused, samples, dtype, world_size, bucket_bytes }
        },
    )
}

impl Case {
    /// The model's variables. Those of rank 0 depend on nothing but the case, those of other ranks are wrong.
    fn build(&self, rank: usize) -> VarMap {
        let varmap = VarMap::new();
        let new = |name: &str, shape: &[usize], seed: usize| {
            let (dtype, device) = (self.dtype, &Device::Cpu);
            varmap.get(shape, name, Init::Const(0.0), dtype, device).unwrap();
            named(&varmap, name).set(&numbers(shape, seed + 17 * rank, dtype)).unwrap();
        };
        for (at, pair) in self.widths.windows(2).enumerate() {
            new(&format!("{at}.weight"), &[pair[0], pair[1]], at);
            new(&format!("{at}.bias"), &[pair[1]], at + 50);
        }
        if self.has_unused {
            new("unused.weight", &[3], 99);
        }
        varmap
    }

    fn forward(&self, varmap: &VarMap, input: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = input.clone();
        for at in 0..self.widths.len() - 1 {
            let part = |name: &str| {
                let var = named(varmap, &format!("{at}.{name}"));
                if self.frozen[at] { var.as_detached_tensor() } else { var.as_tensor().clone() }
            };
            for _ in 0..if at == 1 { self.shared } else { 1 } {
                x = x.matmul(&part("weight"))?.broadcast_add(&part("bias"))?.tanh()?;
            }
        }
        Ok(x)
    }

    /// The variables that are trained.
    fn trained(&self) -> Vec<String> {
        let layers = (0..self.widths.len() - 1).filter(|&at| !self.frozen[at]);
        layers.flat_map(|at| ["weight", "bias"].map(|name| format!("{at}.{name}"))).collect()
    }

    /// Trains for some steps. Returns the gradients of each step, the values at the end, and the digest.
    fn train(&self, group: &ProcessGroup, shares: std::ops::Range<usize>) -> Trained {
        const STEPS: usize = 3;
        let varmap = self.build(group.rank());
        let policy = match self.has_unused {
            true => UnusedParameters::Ignore,
            false => UnusedParameters::Error, // frozen variables are found in the first step
        };
        let options = DdpOptions::default()
            .first_bucket_bytes(self.bucket_bytes)
            .bucket_bytes(self.bucket_bytes)
            .unused_parameters(policy);
        let mut ddp = DataParallel::wrap_with(&varmap, group, &options).unwrap();
        let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.01).unwrap();
        let mut all = Vec::new();
        for step in 0..STEPS {
            let (first, last) = (self.widths[0], self.widths[self.widths.len() - 1]);
            let batch = |width: usize, seed: usize| {
                let shares: Vec<_> = shares
                    .clone()
                    .map(|share| {
                        numbers(&[self.samples, width], seed + share + 10 * step, self.dtype)
                    })
                    .collect();
                Tensor::cat(&shares, 0).unwrap()
            };
            let output = self.forward(&varmap, &batch(first, 1000)).unwrap();
            let loss = (output - batch(last, 2000)).unwrap().sqr().unwrap().mean_all().unwrap();
            let mut gradients = loss.backward().unwrap();
            ddp.average(&mut gradients).unwrap();
            let of = |name: &String| elements(gradients.get(&named(&varmap, name)).unwrap());
            all.push(self.trained().iter().map(of).collect::<Vec<_>>().concat());
            optimizer.step(&gradients).unwrap();
        }
        let values: Vec<f64> =
            self.trained().iter().flat_map(|name| elements(&named(&varmap, name))).collect();
        Trained { gradients: all, values, digest: variables_digest(&varmap).unwrap() }
    }

    fn check(&self, gradients_within: f64, values_within: f64) -> Result<(), TestCaseError> {
        prop_assume!(!self.trained().is_empty());
        let whole = self.train(&ProcessGroup::alone(), 0..self.world_size);
        let ranks =
            on_ranks(self.world_size, |group| self.train(&group, group.rank()..group.rank() + 1));
        for rank in &ranks {
            prop_assert_eq!(rank.digest, ranks[0].digest);
            for (step, (ours, wanted)) in rank.gradients.iter().zip(&whole.gradients).enumerate() {
                let off = largest_difference(ours, wanted);
                prop_assert!(
                    off <= gradients_within,
                    "gradients of step {} differ by {}",
                    step,
                    off
                );
            }
            let off = largest_difference(&rank.values, &whole.values);
            prop_assert!(off <= values_within, "values differ by {}", off);
        }
        Ok(())
    }
}

struct Trained {
    gradients: Vec<Vec<f64>>,
    values: Vec<f64>,
    digest: u64,
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn double_precision_agrees_with_one_process(case in case(DType::F64)) {
        case.check(1e-9, 1e-9)?;
    }

    #[test]
    fn single_precision_agrees_with_one_process(case in case(DType::F32)) {
        // AdamW divides by the size of a gradient, so it makes much of small differences.
        case.check(1e-6, f64::INFINITY)?;
    }
}
