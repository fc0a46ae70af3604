//! Ranks with devices that have no hardware, as threads of this process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use drumline_accel::{Device, DeviceGroup, DeviceOptions, DeviceSlice, Stream};
use drumline_cuda::{CudaDevice, DeviceMemory, Driver};
use drumline_group::{Config, Element, ProcessGroup, Rank};
use drumline_standin::{Controls, library};

/// How long what is given back may take on a busy machine.
const MOST: Duration = Duration::from_secs(120);

/// The stand-in belongs to the process, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

pub(crate) struct Bench {
    pub(crate) controls: Controls,
    driver: Driver,
    /// Whether a test has waited for what is given back.
    is_settled: AtomicBool,
    _turn: MutexGuard<'static, ()>,
}

/// A watcher that gives a context back after the next test has begun would take it from that test.
impl Drop for Bench {
    fn drop(&mut self) {
        if !self.is_settled.load(Ordering::Relaxed) && !thread::panicking() {
            self.wait_for(0, 0);
        }
    }
}

/// The two devices of this machine. Whoever has them is alone with them.
pub(crate) fn bench() -> Bench {
    bench_of(2)
}

/// The same with so many devices.
pub(crate) fn bench_of(devices: usize) -> Bench {
    bench_with(devices, &[])
}

/// The same with variables of the stand-in.
pub(crate) fn bench_with(devices: usize, variables: &[(&str, &str)]) -> Bench {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let controls = Controls::load();
    controls.unset_all();
    controls.set("STANDIN_DEVICES", Some(&devices.to_string()));
    variables.iter().for_each(|(name, value)| controls.set(name, Some(value)));
    controls.reset();
    let driver = Driver::load(Some(&library())).unwrap();
    Bench { controls, driver, is_settled: AtomicBool::new(false), _turn: turn }
}

/// One rank: its group, and its device.
pub(crate) struct Member {
    pub(crate) group: ProcessGroup,
    pub(crate) device: CudaDevice,
}

pub(crate) fn config() -> Config {
    // Who hangs fails.
    Config::default().timeout(Duration::from_secs(30)).registered_bytes_max(64 << 20)
}

pub(crate) fn small() -> DeviceOptions {
    DeviceOptions::default().window_bytes(4096)
}

impl Bench {
    pub(crate) fn device(&self, ordinal: usize) -> CudaDevice {
        self.driver.device(ordinal).unwrap()
    }

    /// Runs `rank` for each rank, on a thread of its own.
    pub(crate) fn world<R: Send>(
        &self,
        ranks: usize,
        config: &Config,
        rank: impl Fn(Member) -> R + Sync,
    ) -> Vec<R> {
        let devices = self.driver.devices().unwrap();
        let groups = drumline_group::rendezvous::local_world_with(ranks, config).unwrap();
        thread::scope(|threads| {
            let start = |group: ProcessGroup| {
                let device = self.device(group.rank() % devices);
                let rank = &rank;
                threads.spawn(move || rank(Member { group, device }))
            };
            let ranks: Vec<_> = groups.into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Nothing was done too early, and all was given back. Watchers may still be about to do so.
    pub(crate) fn is_clean(&self) {
        self.gives_back();
        assert_eq!(self.controls.violations(), 0, "{}", self.controls.last_violation());
    }

    pub(crate) fn gives_back(&self) {
        self.gives_back_all_but(0, 0);
    }

    /// At most so much is not given back.
    pub(crate) fn gives_back_all_but(&self, things: u64, contexts: u64) {
        self.settle();
        self.wait_for(things, contexts);
        let (leaks, retained) = (self.controls.leaks(), self.controls.retained());
        assert!(leaks <= things && retained <= contexts, "{leaks} things, {retained} contexts");
    }

    /// The next test need not wait for what this one gives back.
    pub(crate) fn settle(&self) {
        self.is_settled.store(true, Ordering::Relaxed);
    }

    fn wait_for(&self, things: u64, contexts: u64) {
        let deadline = Instant::now() + MOST;
        let is_held = || self.controls.leaks() > things || self.controls.retained() > contexts;
        while is_held() && Instant::now() < deadline {
            // A stream lets words go that it has passed.
            drop(self.driver.device(0).map(|device| device.stream()));
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Member {
    pub(crate) fn rank(&self) -> Rank {
        self.group.rank()
    }

    pub(crate) fn on(&self, options: &DeviceOptions) -> DeviceGroup {
        DeviceGroup::new(&self.group, Arc::new(self.device.clone()), options).unwrap()
    }

    pub(crate) fn stream(&self) -> Arc<dyn Stream> {
        self.device.stream().unwrap()
    }
}

/// Elements on a device, which a stream has yet to put there.
pub(crate) struct Data<T> {
    /// Where they come from.
    source: DeviceMemory,
    /// What calls get.
    memory: DeviceMemory,
    /// Where a stream puts results.
    result: DeviceMemory,
    len: usize,
    elements: std::marker::PhantomData<T>,
}

impl<T: Element> Data<T> {
    pub(crate) fn new(device: &CudaDevice, values: &[T]) -> Data<T> {
        let bytes = size_of_val(values);
        let allocate = || device.allocate(bytes).unwrap();
        let (mut source, memory, result) = (allocate(), allocate(), allocate());
        if bytes > 0 {
            source.write(bytemuck::cast_slice(values)).unwrap();
        }
        Data { source, memory, result, len: values.len(), elements: std::marker::PhantomData }
    }

    /// Has the stream put them there.
    pub(crate) fn put(&self, stream: &dyn Stream) {
        stream.copy_within(self.source.place(), self.memory.place()).unwrap();
    }

    /// Has the stream fetch them, and then overwrite them.
    pub(crate) fn fetch(&self, stream: &dyn Stream) {
        stream.copy_within(self.memory.place(), self.result.place()).unwrap();
        stream.copy_within(self.source.place(), self.memory.place()).unwrap();
    }

    pub(crate) fn slice(&self) -> DeviceSlice {
        DeviceSlice::new(self.memory.place(), T::DTYPE)
    }

    /// What was fetched by the stream, which has ended.
    pub(crate) fn found(&self) -> Vec<T> {
        let mut found = vec![T::zeroed(); self.len];
        if self.len > 0 {
            self.result.read(bytemuck::cast_slice_mut(&mut found)).unwrap();
        }
        found
    }
}

/// Waits until a stream has done all that was queued.
pub(crate) fn finish(stream: &Arc<dyn Stream>) {
    stream.record().unwrap().wait().unwrap();
}
