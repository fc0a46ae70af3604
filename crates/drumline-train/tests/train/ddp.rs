//! Data-parallel training of a model written by hand, in f64: N ranks with a batch of b must end
//! where one rank with a batch of N·b ends.

use drumline_group::{DType, ProcessGroup};
use drumline_train::ddp::{
    Broadcast, DdpOptions, GradientReducer, ParameterSpec, StateDigest, verify_model,
};
use drumline_train::local;

const INPUTS: usize = 5;
const HIDDEN: usize = 7;
const STEPS: usize = 20;
const BATCH_PER_RANK: usize = 3;

/// `y = w2 · tanh(w1 · x + b1)`, mean squared error against `target`.
#[derive(Clone, Debug, PartialEq)]
struct Mlp {
    w1: Vec<f64>,
    b1: Vec<f64>,
    w2: Vec<f64>,
}

impl Mlp {
    fn new(seed: f64) -> Self {
        let fill = |n: usize, shift: f64| (0..n).map(|i| (seed + shift + i as f64).sin()).collect();
        Self { w1: fill(HIDDEN * INPUTS, 0.1), b1: fill(HIDDEN, 0.2), w2: fill(HIDDEN, 0.3) }
    }

    fn specs() -> Vec<ParameterSpec> {
        vec![
            ParameterSpec::new("w1", [HIDDEN, INPUTS], DType::F64),
            ParameterSpec::new("b1", [HIDDEN], DType::F64),
            ParameterSpec::new("w2", [HIDDEN], DType::F64),
        ]
    }

    fn parameters(&mut self) -> [&mut Vec<f64>; 3] {
        [&mut self.w1, &mut self.b1, &mut self.w2]
    }

    /// The gradient of the mean loss over `samples`.
    fn gradient(&self, samples: &[usize]) -> [Vec<f64>; 3] {
        let mut gradient = [vec![0.0; HIDDEN * INPUTS], vec![0.0; HIDDEN], vec![0.0; HIDDEN]];
        for &sample in samples {
            let x: Vec<f64> = (0..INPUTS).map(|i| ((sample * INPUTS + i) as f64).cos()).collect();
            let target = (sample as f64 * 0.37).sin();
            let hidden: Vec<f64> = (0..HIDDEN)
                .map(|h| {
                    let row = &self.w1[h * INPUTS..][..INPUTS];
                    let sum: f64 = row.iter().zip(&x).map(|(w, x)| w * x).sum();
                    (sum + self.b1[h]).tanh()
                })
                .collect();
            let y: f64 = self.w2.iter().zip(&hidden).map(|(w, h)| w * h).sum();
            let dy = 2.0 * (y - target) / samples.len() as f64;
            for h in 0..HIDDEN {
                let dh = dy * self.w2[h] * (1.0 - hidden[h] * hidden[h]);
                gradient[2][h] += dy * hidden[h];
                gradient[1][h] += dh;
                for i in 0..INPUTS {
                    gradient[0][h * INPUTS + i] += dh * x[i];
                }
            }
        }
        gradient
    }
}

#[derive(Clone, Copy, Debug)]
enum Optimizer {
    Sgd,
    Adam,
}

/// Adam's moments, one pair per parameter.
#[derive(Default)]
struct State {
    moments: [Vec<(f64, f64)>; 3],
    step: i32,
}

impl Optimizer {
    fn apply(self, state: &mut State, model: &mut Mlp, gradients: [&[f64]; 3]) {
        state.step += 1;
        let moments = state.moments.iter_mut();
        for ((values, gradient), moments) in
            model.parameters().into_iter().zip(gradients).zip(moments)
        {
            moments.resize(values.len(), (0.0, 0.0));
            for ((value, gradient), (m, v)) in values.iter_mut().zip(gradient).zip(moments) {
                match self {
                    Optimizer::Sgd => *value -= 0.1 * gradient,
                    Optimizer::Adam => {
                        *m = 0.9 * *m + 0.1 * gradient;
                        *v = 0.999 * *v + 0.001 * gradient * gradient;
                        let m = *m / (1.0 - 0.9_f64.powi(state.step));
                        let v = *v / (1.0 - 0.999_f64.powi(state.step));
                        *value -= 0.01 * m / (v.sqrt() + 1e-8);
                    }
                }
            }
        }
    }
}

/// Trains on `group`; rank r of a step of B = N·b samples takes the r-th b of them.
fn train(group: &ProcessGroup, batch: usize, optimizer: Optimizer, options: &DdpOptions) -> Mlp {
    let mut model = Mlp::new(group.rank() as f64); // different on each rank: rank 0's must win
    verify_model(group, &Mlp::specs(), &[], options).unwrap();
    let mut broadcast = Broadcast::new(group, Mlp::specs().iter().map(ParameterSpec::bytes).sum());
    for parameter in model.parameters() {
        broadcast.tensor(parameter).unwrap();
    }
    broadcast.finish().unwrap();

    let reducer = GradientReducer::new(Mlp::specs(), options, group).unwrap();
    let mut state = State::default();
    for step in 0..STEPS {
        let first = (step * group.world_size() + group.rank()) * batch;
        let samples: Vec<usize> = (first..first + batch).collect();
        let gradients = model.gradient(&samples);
        for parameter in [2, 0, 1] {
            reducer.submit(parameter, gradients[parameter].as_slice().into());
        }
        let averaged = reducer.finish().unwrap();
        let gradients = [0, 1, 2].map(|parameter| averaged.get(parameter).unwrap());
        optimizer.apply(&mut state, &mut model, gradients);
    }
    model
}

fn train_on_threads(world_size: usize, optimizer: Optimizer, options: &DdpOptions) -> Vec<Mlp> {
    local(world_size, |group| Ok(train(&group, BATCH_PER_RANK, optimizer, options))).unwrap()
}

#[test]
fn n_ranks_with_batch_b_equal_one_rank_with_batch_n_times_b() {
    for optimizer in [Optimizer::Sgd, Optimizer::Adam] {
        for world_size in [2, 3, 4] {
            let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
            let mut ranks = train_on_threads(world_size, optimizer, &options);
            let alone = ProcessGroup::alone();
            let mut one = train(&alone, BATCH_PER_RANK * world_size, optimizer, &options);

            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "the ranks differ");
            assert_ne!(one, Mlp::new(0.0), "nothing was learnt");
            for (ours, theirs) in ranks[0].parameters().into_iter().zip(one.parameters()) {
                for (a, b) in ours.iter().zip(theirs) {
                    assert!(
                        (a - *b).abs() < 1e-9,
                        "{optimizer:?}, {world_size} ranks: {a} and {b}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_bucket_size() {
    let digest = |bucket_bytes: usize| {
        let options =
            DdpOptions::default().first_bucket_bytes(bucket_bytes).bucket_bytes(bucket_bytes);
        let mut digest = StateDigest::default();
        let mut model = train_on_threads(3, Optimizer::Adam, &options).swap_remove(0);
        for (spec, values) in Mlp::specs().iter().zip(model.parameters()) {
            digest.tensor(spec, bytemuck::cast_slice(values));
        }
        digest.finish()
    };
    let wanted = digest(1);
    for bucket_bytes in [64, 300, 1 << 20, 25 << 20] {
        assert_eq!(digest(bucket_bytes), wanted, "buckets of {bucket_bytes} bytes");
    }
}
