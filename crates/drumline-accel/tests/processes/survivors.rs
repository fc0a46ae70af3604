//! What each process of a job does in which one is killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use drumline_accel::{
    DType, Device, DeviceGroup, DeviceOp, DeviceOptions, DeviceSlice, Place, Result, Stream,
};
use drumline_cuda::{CudaDevice, DeviceMemory, Driver};
use drumline_group::{self as group, Operator, Rank, ReduceOp};
use drumline_standin::{Controls, library};
use rustix::process::{Signal, getpid, kill_process};

use crate::deaths::STAGES;
use crate::job::Role;

/// Twenty windows of a call.
const LEN: usize = 20_000;
const WINDOW: usize = LEN * 4 / 20;

/// The code with which a call of the stand-in kills its process.
const KILLED: i32 = -9;

/// After so many sums of two values this process is killed; never, if it is 0 or less.
static SUMS_TO_LIVE: AtomicI64 = AtomicI64::new(0);

fn die() {
    kill_process(getpid(), Signal::KILL).unwrap();
}

/// A sum that may kill.
fn lethal() -> DeviceOp {
    let sum = |left: f32, right: f32| {
        if SUMS_TO_LIVE.fetch_sub(1, Ordering::Relaxed) == 1 {
            die();
        }
        left + right
    };
    Operator::custom("lethal", sum).into()
}

/// Brings about a death in a call that is made next.
fn aim(controls: &Controls, stage: &str) {
    match stage {
        "copy out" => controls.fail("cuMemcpyDtoHAsync", 7, KILLED),
        "copy in" => controls.fail("cuMemcpyHtoDAsync", 7, KILLED),
        "staged copy out" => controls.fail("cuMemcpyDtoHAsync", 1, KILLED),
        "staged copy in" => controls.fail("cuMemcpyHtoDAsync", 1, KILLED),
        "look at events" => controls.fail("cuEventQuery", 25, KILLED),
        "sum" | "staged sum" => SUMS_TO_LIVE.store(1_234, Ordering::Relaxed),
        "between calls" => die(),
        other => panic!("no stage: {other}"),
    }
}

/// The memory of a rank on its device.
struct Memory {
    /// What the rank brings.
    own: DeviceMemory,
    /// What calls get.
    data: DeviceMemory,
}

impl Memory {
    fn new(device: &CudaDevice, value: f32) -> Memory {
        let mut own = device.allocate(LEN * 4).unwrap();
        own.write(bytemuck::cast_slice(&[value; LEN])).unwrap();
        Memory { own, data: device.allocate(LEN * 4).unwrap() }
    }

    fn put(&self, stream: &dyn Stream) {
        stream.copy_within(self.own.place(), self.data.place()).unwrap();
    }

    fn slice(&self) -> DeviceSlice {
        DeviceSlice::new(self.data.place(), DType::F32)
    }

    /// What lies there once the stream has done all.
    fn found(&self, stream: &Arc<dyn Stream>) -> Vec<f32> {
        stream.record().unwrap().wait().unwrap();
        let mut found = vec![0.0; LEN];
        self.data.read(bytemuck::cast_slice_mut(&mut found)).unwrap();
        found
    }
}

/// One call of each kind, each after `before` was told where in which stage a rank may die. Results are compared.
fn round(
    on: &DeviceGroup,
    stream: &Arc<dyn Stream>,
    memory: &Memory,
    before: impl Fn(&[&str]),
) -> Result<()> {
    let (rank, ranks) = (on.rank(), on.world_size());
    let sum_of_first = |count: usize| (count * (count + 1) / 2) as f32;

    for (op, stages) in [
        (ReduceOp::Sum.into(), ["copy out", "copy in", "look at events"].as_slice()),
        (lethal(), ["sum"].as_slice()),
    ] {
        memory.put(&**stream);
        before(stages);
        let work = on.all_reduce_on(stream, memory.slice(), op)?;
        // A stream waits for it, too: it must go on if a rank is dead.
        work.join(stream)?;
        work.wait()?;
        assert_eq!(memory.found(stream), [sum_of_first(ranks); LEN], "all_reduce");
    }
    memory.put(&**stream);
    before(&["staged copy out", "staged sum", "staged copy in"]);
    // Each rank sums its block of the input, and gets it there.
    let DeviceSlice { place, dtype } = memory.slice();
    let block = LEN / ranks;
    let bytes = block * dtype.size();
    let whole = DeviceSlice::new(Place { bytes: bytes * ranks, ..place }, dtype);
    let own = Place { address: place.address + (bytes * rank) as u64, bytes };
    let work = on.reduce_scatter_on(stream, whole, DeviceSlice::new(own, dtype), lethal())?;
    work.join(stream)?;
    work.wait()?;
    let own = &memory.found(stream)[block * rank..][..block];
    assert!(own.iter().all(|sum| *sum == sum_of_first(ranks)), "reduce_scatter");
    before(&["between calls"]);
    on.barrier_on(stream)?.wait()
}

#[test]
fn rank_process() {
    let Some(role) = Role::of_environment() else { return };
    let (_, victim) = STAGES.into_iter().find(|(stage, _)| *stage == role.stage).unwrap();
    let controls = Controls::load();
    controls.seed(role.rank as u64);
    let driver = Driver::load(Some(&library())).unwrap();
    let device = driver.device(role.rank % driver.devices().unwrap()).unwrap();
    live(&role, victim, &controls, &device);
    drop((device, driver));

    // Nothing of all that is held, and no copy came late.
    let deadline = Instant::now() + Duration::from_secs(20);
    while (controls.leaks(), controls.retained()) != (0, 0) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((controls.leaks(), controls.retained()), (0, 0));
    assert_eq!(controls.violations(), 0, "{}", controls.last_violation());
    println!("went on");
}

fn live(role: &Role, victim: Rank, controls: &Controls, device: &CudaDevice) {
    let options = DeviceOptions::default().window_bytes(WINDOW);
    let on = |group: &group::ProcessGroup| {
        DeviceGroup::new(group, Arc::new(device.clone()), &options).unwrap()
    };
    let all: Vec<Rank> = (0..role.world_size).collect();
    let world = role.connect("world", &all);
    let with_all = on(&world);
    let stream = device.stream().unwrap();
    let memory = Memory::new(device, (role.rank + 1) as f32);
    // Start-up is not what is tried here.
    round(&with_all, &stream, &memory, |_| ()).unwrap();

    let error = round(&with_all, &stream, &memory, |stages| {
        if role.rank == victim && stages.contains(&&*role.stage) {
            aim(controls, &role.stage);
        }
    });
    let error = error.err().unwrap();
    assert_eq!(error.culprit(), Some(victim), "{error}");
    // The memory of the call is the caller's again: nothing may come late.
    memory.put(&*stream);
    let later = with_all.barrier_on(&stream).unwrap_err();
    assert_eq!(later.culprit(), Some(victim), "{later}");
    drop((with_all, world));

    let survivors: Vec<Rank> = all.into_iter().filter(|rank| *rank != victim).collect();
    let group = role.connect("survivors", &survivors);
    let with_survivors = on(&group);
    let renumbered = Memory::new(device, (group.rank() + 1) as f32);
    for _ in 0..3 {
        round(&with_survivors, &stream, &renumbered, |_| ()).unwrap();
    }
    assert_eq!(memory.found(&stream), [(role.rank + 1) as f32; LEN], "a copy came late");
    with_survivors.destroy().unwrap();
    group.destroy().unwrap();
}
