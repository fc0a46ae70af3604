//! `AsyncReduce` on devices, on a stand-in for the driver that has no hardware.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails this way")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use drumline_accel::{Device, DeviceAsyncReduce, DeviceOptions, DeviceSlice, Place, Stream};
use drumline_cuda::{CudaDevice, DeviceMemory, Driver};
use drumline_group::Result;
use drumline_group::{Config, DType, ProcessGroup, ReduceOp};
use drumline_standin::{Controls, library};
use drumline_train::async_reduce::{AsyncReduceOptions, MissingTensors, TensorRegistry};

/// The stand-in belongs to the process, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Bench {
    controls: Controls,
    driver: Driver,
    _turn: MutexGuard<'static, ()>,
}

struct Rank {
    group: ProcessGroup,
    device: CudaDevice,
}

/// Three of them share the first bucket.
const LENGTHS: [(&str, usize); 6] =
    [("bias", 10), ("weight", 3_000), ("scale", 1), ("empty", 0), ("head", 5_000), ("last", 700)];

impl Bench {
    fn new() -> Bench {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let controls = Controls::load();
        controls.reset();
        let driver = Driver::load(Some(&library())).unwrap();
        Bench { controls, driver, _turn: turn }
    }

    fn world<R: Send>(&self, ranks: usize, rank: impl Fn(Rank) -> R + Sync) -> Vec<R> {
        let devices = self.driver.devices().unwrap();
        let config =
            Config::default().timeout(Duration::from_secs(30)).registered_bytes_max(64 << 20);
        let groups = drumline_group::rendezvous::local_world_with(ranks, &config).unwrap();
        thread::scope(|threads| {
            let start = |group: ProcessGroup| {
                let device = self.driver.device(group.rank() % devices).unwrap();
                let rank = &rank;
                threads.spawn(move || rank(Rank { group, device }))
            };
            let ranks: Vec<_> = groups.into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Waits until nobody holds anything of the devices, and nothing was done too early.
    fn is_clean(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let is_held = || self.controls.leaks() > 0 || self.controls.retained() > 0;
        while is_held() && Instant::now() < deadline {
            drop(self.driver.device(0).unwrap().stream());
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((self.controls.leaks(), self.controls.retained()), (0, 0));
        assert_eq!(self.controls.violations(), 0, "{}", self.controls.last_violation());
    }
}

impl Rank {
    fn engine(&self) -> (DeviceAsyncReduce, DeviceMemory) {
        let mut tensors = TensorRegistry::new();
        for (name, len) in LENGTHS {
            tensors.register::<f32>(name, len).unwrap();
        }
        tensors.register::<f64>("of f64", 33).unwrap();
        let options = AsyncReduceOptions::default().op(ReduceOp::Sum).bucket_bytes(8 << 10);
        self.freeze(tensors, &options).unwrap()
    }

    fn freeze(
        &self,
        tensors: TensorRegistry,
        options: &AsyncReduceOptions,
    ) -> Result<(DeviceAsyncReduce, DeviceMemory)> {
        let mut fused = None;
        let device = Arc::new(self.device.clone());
        let on = DeviceOptions::default().window_bytes(4096);
        let engine = DeviceAsyncReduce::new(tensors, &self.group, device, &on, options, |bytes| {
            let memory = self.device.allocate(bytes).map_err(|error| error.to_string())?;
            Ok(fused.insert(memory).place())
        })?;
        Ok((engine, fused.unwrap()))
    }

    fn stream(&self) -> Arc<dyn Stream> {
        self.device.stream().unwrap()
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }
}

/// A gradient that a stream has yet to put where the engine finds it.
struct Gradient {
    source: DeviceMemory,
    memory: DeviceMemory,
    result: DeviceMemory,
}

impl Gradient {
    fn new(rank: &Rank, bytes: usize) -> Gradient {
        let allocate = || rank.device.allocate(bytes).unwrap();
        Gradient { source: allocate(), memory: allocate(), result: allocate() }
    }
}

fn value(rank: usize, step: usize, tensor: usize, index: usize) -> f32 {
    ((rank * 7 + step * 3 + tensor * 5 + index) as f32).sin() * 1e3
}

#[test]
fn sums_of_every_step_lie_in_the_fused_buffer() {
    for (ranks, seed) in [(1, 1), (2, 2), (3, 3), (4, 4), (2, 5), (3, 6)] {
        let bench = Bench::new();
        bench.controls.seed(seed);
        bench.world(ranks, |rank| train(&rank, seed));
        bench.is_clean();
    }
}

/// Steps in orders that differ by rank. The streams overwrite gradients as soon as they may.
fn train(rank: &Rank, seed: u64) {
    let (mut engine, fused) = rank.engine();
    let mut random = fastrand::Rng::with_seed(seed * 8 + rank.rank() as u64);
    let streams = [rank.stream(), rank.stream()];
    let mut gradients: Vec<Gradient> =
        LENGTHS.iter().map(|(_, len)| Gradient::new(rank, len * 4)).collect();
    let mut in_place = Gradient::new(rank, 33 * 8);
    for step in 0..5 {
        let mut order: Vec<usize> = (0..LENGTHS.len()).collect();
        random.shuffle(&mut order);
        for (number, tensor) in order.into_iter().enumerate() {
            let (name, len) = LENGTHS[tensor];
            let values: Vec<f32> =
                (0..len).map(|index| value(rank.rank(), step, tensor, index)).collect();
            let Gradient { source, memory, .. } = &mut gradients[tensor];
            if len > 0 {
                source.write(bytemuck::cast_slice(&values)).unwrap();
            }
            let stream = &streams[random.usize(..2)];
            stream.copy_within(source.place(), memory.place()).unwrap();
            let from = DeviceSlice::new(memory.place(), DType::F32);
            if number == 3 {
                // This one is put in its place.
                let own = [(rank.rank() + step + 1) as f64; 33];
                in_place.source.write(bytemuck::cast_slice(&own)).unwrap();
                let place = engine.gradient("of f64").unwrap().place;
                stream.copy_within(in_place.source.place(), place).unwrap();
                engine.async_reduce("of f64", stream).unwrap();
            }
            engine.async_reduce_from(name, from, stream).unwrap();
        }
        engine.synchronize(&streams[0]).unwrap();
        for (tensor, (name, _)) in LENGTHS.iter().enumerate() {
            let Gradient { memory, result, .. } = &gradients[tensor];
            let found = engine.gradient(name).unwrap();
            streams[0].copy_within(found.place, result.place()).unwrap();
            // The next backward: whoever still copied the gradient would find something else.
            streams[0].copy_within(result.place(), memory.place()).unwrap();
        }
        let summed = engine.gradient("of f64").unwrap().place;
        streams[0].copy_within(summed, in_place.result.place()).unwrap();
        streams[0].record().unwrap().wait().unwrap();
        let mut found = [0_f64; 33];
        in_place.result.read(bytemuck::cast_slice_mut(&mut found)).unwrap();
        let ranks = engine.device_group().world_size();
        let expected: usize = (0..ranks).map(|rank| rank + step + 1).sum();
        assert_eq!(found, [expected as f64; 33]);
        for (tensor, (name, len)) in LENGTHS.iter().enumerate() {
            let mut found = vec![0_f32; *len];
            if *len > 0 {
                gradients[tensor].result.read(bytemuck::cast_slice_mut(&mut found)).unwrap();
            }
            let mut expected: Vec<f32> =
                (0..*len).map(|index| value(rank.rank(), step, tensor, index)).collect();
            rank.group.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
            let bits = |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&expected), "{name} in step {step}");
        }
        engine.wait().unwrap();
    }
    assert_eq!(engine.counts().steps, 5);
    engine.stop().unwrap();
    drop(fused);
}

#[test]
fn a_tensor_that_one_rank_lacks_is_named_on_all_and_the_next_step_goes_on() {
    let bench = Bench::new();
    bench.world(3, |rank| {
        let (mut engine, _fused) = rank.engine();
        let stream = rank.stream();
        for step in 0..2 {
            for name in ["of f64"].into_iter().chain(LENGTHS.iter().map(|it| it.0)) {
                if !(step == 0 && rank.rank() == 1 && name == "head") {
                    engine.async_reduce(name, &stream).unwrap();
                }
            }
            match (step, engine.synchronize(&stream)) {
                (0, Err(error)) => {
                    let missing = error.detail::<Vec<MissingTensors>>().unwrap();
                    assert_eq!(missing.len(), 1);
                    assert_eq!(
                        (missing[0].rank, &missing[0].tensors[..]),
                        (1, &["head".to_owned()][..])
                    );
                }
                (1, Ok(())) => {}
                (step, result) => panic!("step {step}: {result:?}"),
            }
        }
        engine.stop().unwrap();
    });
    bench.is_clean();
}

#[test]
fn a_rank_that_drops_its_engine_amid_a_step_is_named() {
    let bench = Bench::new();
    let told = bench.world(3, |rank| {
        let (mut engine, fused) = rank.engine();
        let stream = rank.stream();
        engine.async_reduce("bias", &stream).unwrap();
        if rank.rank() == 2 {
            drop((engine, fused));
            return String::new();
        }
        let others = ["of f64"].into_iter().chain(LENGTHS.iter().map(|it| it.0).skip(1));
        let brought = others.map(|name| engine.async_reduce(name, &stream));
        let brought: Result<()> = brought.collect();
        let error = brought.and_then(|()| engine.synchronize(&stream)).unwrap_err().to_string();
        assert!(engine.async_reduce("bias", &stream).is_err());
        // Its stream goes on.
        stream.record().unwrap().wait().unwrap();
        error
    });
    for text in &told[..2] {
        assert!(text.contains("rank 2"), "{text}");
    }
    bench.is_clean();
}

#[test]
fn a_device_that_breaks_is_named_on_all_ranks() {
    let bench = Bench::new();
    let told = bench.world(2, |rank| {
        let (mut engine, fused) = rank.engine();
        let stream = rank.stream();
        let mut steps = || -> Result<()> {
            for step in 0..40 {
                if step == 5 && rank.rank() == 1 {
                    bench.controls.break_device(1, 700);
                }
                for name in ["of f64"].into_iter().chain(LENGTHS.iter().map(|it| it.0)) {
                    engine.async_reduce(name, &stream)?;
                }
                engine.synchronize(&stream)?;
                engine.wait()?;
            }
            Ok(())
        };
        let error = steps().unwrap_err().to_string();
        // No thread of this world is left to meddle with the next one.
        let on = engine.device_group().clone();
        drop((engine, fused));
        on.destroy().unwrap_err();
        error
    });
    for (rank, text) in told.iter().enumerate() {
        assert!(text.contains("cuda:1"), "rank {rank}: {text}");
        assert!(text.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "rank {rank}: {text}");
    }
}

#[test]
fn wrong_arguments_are_refused_and_harm_nothing() {
    let bench = Bench::new();
    bench.world(2, |rank| {
        let (mut engine, fused) = rank.engine();
        let stream = rank.stream();
        let memory = rank.device.allocate(1_024).unwrap();
        let of = |place: Place, bytes: usize| {
            DeviceSlice::new(place.part(0..bytes).unwrap(), DType::F32)
        };
        let refused = |result: Result<()>, part: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(part), "{error:?} has no {part:?}");
        };
        let bias = of(memory.place(), 40);
        refused(engine.async_reduce_from("nobody", bias, &stream), "no tensor `nobody`");
        refused(engine.async_reduce_from("scale", bias, &stream), "cannot take 10 elements of f32");
        let i32s = DeviceSlice::new(bias.place, DType::I32);
        refused(engine.async_reduce_from("bias", i32s, &stream), "cannot take 10 elements of i32");
        let head = engine.gradient("head").unwrap().place.part(0..40).unwrap();
        let of_head = DeviceSlice::new(head, DType::F32);
        refused(engine.async_reduce_from("bias", of_head, &stream), "lies in the fused buffer");
        let of_host = [0_f32; 10];
        let host = Place { address: of_host.as_ptr().addr() as u64, bytes: 40 };
        let host = DeviceSlice::new(host, DType::F32);
        refused(engine.async_reduce_from("bias", host, &stream), "memory of the host");
        engine.async_reduce_from("bias", bias, &stream).unwrap();
        refused(engine.async_reduce("bias", &stream), "was brought in this step before");
        for name in ["of f64"].into_iter().chain(LENGTHS.iter().map(|it| it.0).skip(1)) {
            engine.async_reduce(name, &stream).unwrap();
        }
        engine.synchronize(&stream).unwrap();
        engine.wait().unwrap();
        engine.stop().unwrap();
        drop((memory, fused));

        let mut tensors = TensorRegistry::new();
        tensors.register::<f32>("one", 100).unwrap();
        let options = AsyncReduceOptions::default();
        let device = Arc::new(rank.device.clone());
        let on = DeviceOptions::default().window_bytes(4096);
        let short = |_| Ok(Place { address: 4096, bytes: 8 });
        let error =
            DeviceAsyncReduce::new(tensors, &rank.group, device, &on, &options, short).unwrap_err();
        assert!(error.to_string().contains("the fused buffer is 8 bytes"), "{error}");
    });
    bench.is_clean();
}
