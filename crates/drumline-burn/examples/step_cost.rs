//! What DDP adds to a training step, apart from waiting for other ranks: the step of an MLP with 40 million parameters
//! in plain burn, and with `DistributedDataParallel`, in turns. All ranks compute in both turns.
//!
//! ```sh
//! cargo build --release -p drumline-cli -p drumline-burn --example step_cost
//! drumline run --nproc-per-node 2 -- target/release/examples/step_cost [batch size] [sgd|adamw] [rounds]
//! ```

use std::{
    env,
    error::Error,
    time::{Duration, Instant},
};

use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig},
    tensor::{Device, Distribution, Tensor, activation::relu},
};
use drumline::ProcessGroup;
use drumline_burn::DistributedDataParallel;

const WIDTHS: [usize; 7] = [1024, 3072, 3072, 3072, 3072, 3072, 10];
/// In a turn. The first one of a turn is not counted: it finds the memory of the other turn in the caches.
const STEPS: usize = 4;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let mut arguments = env::args().skip(1);
    let batch_size = arguments.next().map_or(Ok(32), |it| it.parse())?;
    let adamw = match arguments.next().as_deref() {
        None | Some("sgd") => false,
        Some("adamw") => true,
        Some(other) => return Err(format!("expected sgd or adamw, not {other}").into()),
    };
    let rounds: usize = arguments.next().map_or(Ok(15), |it| it.parse())?;
    let group = ProcessGroup::from_env()?;

    let device = Device::flex().autodiff();
    device.seed(group.rank() as u64);
    let random = |width| Tensor::random([batch_size, width], Distribution::Default, &device);
    let batch = Batch { x: random(WIDTHS[0]), y: random(WIDTHS[WIDTHS.len() - 1]) };
    let model = Mlp::new(&device);
    let parameters = model.num_params();
    let (ddp, wrapped) = DistributedDataParallel::wrap(model.clone(), &group)?;
    let training = |ddp, model| {
        let optimizer = if adamw { AdamWConfig::new().init() } else { SgdConfig::new().init() };
        Training { ddp, model: Some(model), optimizer, batch: batch.clone() }
    };
    let mut ways = [training(None, model), training(Some(ddp), wrapped)];
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..=rounds {
        for (way, times) in ways.iter_mut().zip(&mut times) {
            let turn = turn(&group, way)?;
            if round > 0 {
                // the buckets are planned anew after the first step
                times.push(turn);
            }
        }
    }
    report(&group, parameters, &times)?;
    if let Some(ddp) = &ways[1].ddp {
        let stats = ddp.stats();
        println!(
            "bytes copied to buckets / bytes of gradients: {}",
            stats.bytes_copied as f64 / stats.bytes as f64
        );
        print!("{}", ddp.timeline());
    }
    drop(ways);
    Ok(group.destroy()?)
}

/// The mean times of a turn's steps.
fn turn(group: &ProcessGroup, training: &mut Training) -> Result<Times> {
    let mut sum = Times::default();
    for number in 0..=STEPS {
        group.barrier()?;
        let times = training.step()?;
        if number > 0 {
            sum.0.iter_mut().zip(times.0).for_each(|(sum, it)| *sum += it / STEPS as f64);
        }
    }
    Ok(sum)
}

/// Of the parts of a step, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Times([f64; PARTS.len()]);

/// `backward` is without `waiting`.
const PARTS: [&str; 4] = ["forward", "backward", "optimizer", "waiting"];

impl Times {
    fn without_waiting(&self) -> f64 {
        self.0[..3].iter().sum()
    }
}

#[derive(Clone)]
struct Batch {
    x: Tensor<2>,
    y: Tensor<2>,
}

#[derive(Module, Debug)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        let layer = |ends: &[usize]| LinearConfig::new(ends[0], ends[1]).init(device);
        Self { layers: WIDTHS.windows(2).map(layer).collect() }
    }

    fn loss(&self, Batch { x, y }: &Batch) -> Tensor<1> {
        let mut x = x.clone();
        for (number, layer) in self.layers.iter().enumerate() {
            x = layer.forward(if number > 0 { relu(x) } else { x });
        }
        (x - y.clone()).square().mean()
    }
}

const RATE: f64 = 1e-4;

/// Trains a model on a batch. It owns the model during a step, as training loops do.
struct Training {
    /// `None` in plain burn.
    ddp: Option<DistributedDataParallel>,
    model: Option<Mlp>,
    optimizer: ModuleOptimizer,
    batch: Batch,
}

impl Training {
    fn step(&mut self) -> Result<Times> {
        let model = self.model.take().ok_or("the model was lost in a failed step")?;
        let waited = self.waited();
        let began = Instant::now();
        let loss = model.loss(&self.batch);
        let forward = began.elapsed();
        let gradients = match &self.ddp {
            None => GradientsParams::from_grads(loss.backward(), &model),
            Some(ddp) => ddp.backward(loss, &model)?,
        };
        let backward = began.elapsed();
        self.model = Some(self.optimizer.step(RATE, model, gradients));
        let all = began.elapsed();
        let waiting = self.waited() - waited;
        let parts = [forward, backward - forward - waiting, all - backward, waiting];
        Ok(Times(parts.map(|part| part.as_secs_f64())))
    }

    fn waited(&self) -> Duration {
        self.ddp.as_ref().map_or(Duration::ZERO, |ddp| ddp.stats().exposed)
    }
}

fn report(group: &ProcessGroup, parameters: usize, times: &[Vec<Times>; 2]) -> Result<()> {
    let [plain, ddp] = times;
    let ratios =
        plain.iter().zip(ddp).map(|(plain, ddp)| ddp.without_waiting() / plain.without_waiting());
    let mut mine = spread(ratios).to_vec();
    for way in times {
        mine.extend(spread(way.iter().map(|it| 1e3 * it.without_waiting())));
        mine.extend(
            (0..PARTS.len()).flat_map(|part| spread(way.iter().map(|it| 1e3 * it.0[part]))),
        );
    }
    let mut all = vec![0.0; mine.len() * group.world_size()];
    group.all_gather(&mine, &mut all)?;
    if group.rank() > 0 {
        return Ok(());
    }
    println!("{} parameters; medians (least to most) of {} rounds, in ms", parameters, plain.len());
    for (rank, of_rank) in all.chunks(mine.len()).enumerate() {
        let mut figures = of_rank.chunks(3);
        let mut next = || {
            figures.next().map_or_else(String::new, |it| {
                format!("{:.3} ({:.3} to {:.3})", it[0], it[1], it[2])
            })
        };
        println!("rank {rank}: a step without waiting takes {} times as long", next());
        for way in ["plain burn", "DDP"] {
            let whole = next();
            let parts = PARTS.map(|part| format!("{part} {}", next())).join(", ");
            println!("    {way}: {whole}: {parts}");
        }
    }
    Ok(())
}

/// Median, least and most.
fn spread(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}
