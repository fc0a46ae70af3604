//! HFReduce's micro-benchmark: 46 named tensors of 1024 x 1024 `f32` that come in a different random
//! order on each rank and in each step, against one all-reduce of the same 184 MiB.
//!
//! ```sh
//! cargo build --release -p drumline-cli -p drumline --example async_reduce_speed
//! cargo run --release -p drumline-cli -- run --nproc-per-node 2 \
//!     target/release/examples/async_reduce_speed
//! ```
//!
//! Without a launcher its ranks are two threads. The ways take turns, so that all see the same
//! moods of the machine; every rank rewrites its buffers before each operation, as training does,
//! which is not timed. Both reduce registered memory. `named` brings tensors of a bucket each as
//! they come, `buckets` in buckets of 25 MiB, `tensors` is one asynchronous all-reduce per tensor in
//! an order that ranks have in common, `one` is a single all-reduce. The last column compares each
//! turn with the turn of `one` in the same step: the median of these ratios. Figures are of rank 0,
//! in GB/s of a rank's own bytes (algBW); busBW is 2(n-1)/n times the median.
//! `STEPS`, `WARM_UP` and `LEN` (elements of a tensor) may be set.

use std::{
    env,
    error::Error,
    time::{Duration, Instant},
};

use drumline::{
    Begun, ProcessGroup, ReduceOp, RegisteredBuffer,
    async_reduce::{AsyncReduce, AsyncReduceOptions, TensorRegistry},
    local,
    rendezvous::is_launched,
};

const TENSORS: usize = 46;

fn main() -> Result<(), Box<dyn Error>> {
    let setting = |name: &str, default: usize| env::var(name).map_or(Ok(default), |it| it.parse());
    let settings = Settings {
        warm_up: setting("WARM_UP", 10)?,
        steps: setting("STEPS", 60)?,
        len: setting("LEN", 1024 * 1024)?,
    };
    if is_launched() {
        let group = ProcessGroup::from_env()?;
        return Ok(measure(group, settings)?);
    }
    local(2, |group| Ok(measure(group, settings)?))?;
    Ok(())
}

const WAYS: [&str; 4] = ["named", "one", "buckets", "tensors"];

#[derive(Clone, Copy)]
struct Settings {
    warm_up: usize,
    steps: usize,
    /// Elements of a tensor.
    len: usize,
}

fn measure(group: ProcessGroup, settings: Settings) -> drumline::Result<()> {
    let Settings { warm_up, steps, len } = settings;
    let names: Vec<String> = (0..TENSORS).map(|number| format!("layer{number}.weight")).collect();
    let engine = |bucket_bytes: usize| {
        let mut tensors = TensorRegistry::new();
        names.iter().try_for_each(|name| tensors.register::<f32>(name.as_str(), len))?;
        tensors.freeze(&group, &AsyncReduceOptions::default().bucket_bytes(bucket_bytes))
    };
    let (mut named, mut buckets) = (engine(4 << 20)?, engine(25 << 20)?);
    let mut one = group.alloc_registered::<f32>(TENSORS * len)?;
    let mut tensors: Vec<Option<RegisteredBuffer<f32>>> =
        names.iter().map(|_| group.alloc_registered(len).map(Some)).collect::<Result<_, _>>()?;

    let mut random = Random(group.rank() as u64 + 1);
    let mut order: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut times = [const { Vec::<Duration>::new() }; WAYS.len()];
    for step in 0..warm_up + steps {
        for (way, times) in WAYS.iter().zip(&mut times) {
            let value = (step + group.rank()) as f32;
            random.shuffle(&mut order);
            let sum = match *way {
                "named" => by_name(&group, &mut named, &order, value)?,
                "buckets" => by_name(&group, &mut buckets, &order, value)?,
                "one" => {
                    one.fill(value);
                    group.barrier()?;
                    let start = Instant::now();
                    group.all_reduce(&mut one, ReduceOp::Avg)?;
                    (start.elapsed(), one[0])
                }
                _ => {
                    tensors.iter_mut().flatten().for_each(|tensor| tensor.fill(value));
                    group.barrier()?;
                    let start = Instant::now();
                    let works: Vec<Option<Begun<RegisteredBuffer<f32>>>> = tensors
                        .iter_mut()
                        .map(|it| it.take().map(|it| group.all_reduce_async(it, ReduceOp::Avg)))
                        .collect();
                    for (work, place) in works.into_iter().flatten().zip(&mut tensors) {
                        *place = Some(work?.wait()?);
                    }
                    (start.elapsed(), tensors[0].as_ref().map_or(0.0, |tensor| tensor[0]))
                }
            };
            assert_eq!(sum.1, step as f32 + (group.world_size() - 1) as f32 / 2.0);
            if step >= warm_up {
                times.push(sum.0);
            }
        }
    }
    if group.rank() == 0 {
        println!(
            "{} ranks; shared memory: {}",
            group.world_size(),
            drumline::algorithms::shares_memory(&group)
        );
        println!(
            "{:>10} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "GB/s", "best", "p10", "median", "busBW", "/ one"
        );
        let bus = 2.0 * (group.world_size() - 1) as f64 / group.world_size() as f64;
        let (of_one, bytes) = (times[1].clone(), (TENSORS * len * 4) as f64);
        for (way, times) in WAYS.iter().zip(&times) {
            let mut speeds: Vec<f64> =
                times.iter().map(|time| bytes / time.as_secs_f64() / 1e9).collect();
            let mut ratios: Vec<f64> = of_one
                .iter()
                .zip(times)
                .map(|(one, it)| one.as_secs_f64() / it.as_secs_f64())
                .collect();
            speeds.sort_unstable_by(|a, b| b.total_cmp(a));
            ratios.sort_unstable_by(f64::total_cmp);
            let (middle, tenth) = (speeds.len() / 2, speeds.len() / 10);
            println!(
                "{way:>10} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2}",
                speeds[0],
                speeds[tenth],
                speeds[middle],
                bus * speeds[middle],
                ratios[middle]
            );
        }
        println!("named: {:?}", named.counts());
    }
    named.stop()?;
    buckets.stop()?;
    group.destroy()
}

fn by_name(
    group: &ProcessGroup,
    engine: &mut AsyncReduce,
    order: &[&str],
    value: f32,
) -> drumline::Result<(Duration, f32)> {
    for name in order {
        engine.gradient_mut::<f32>(name)?.fill(value);
    }
    group.barrier()?;
    let start = Instant::now();
    for name in order {
        engine.async_reduce(name)?;
    }
    engine.synchronize()?;
    Ok((start.elapsed(), engine.gradient::<f32>(order[0])?[0]))
}

/// A small generator of random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        (1..items.len()).rev().for_each(|last| items.swap(last, self.below(last + 1)));
    }
}
