//! A rank that is killed: how soon the others name it, and that they go on without it.

use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail, ensure};
use drumline::device::{
    CudaDevice, Device, DeviceGroup, DeviceMemory, DeviceOptions, DeviceSlice, Stream, Wanted,
};
use drumline::store::Store;
use drumline::{DType, ReduceOp};
use rustix::process::{Signal, getpid, kill_process};

use crate::Options;
use crate::job::{Job, Role};
use crate::left_out::LeftOut;
use crate::part::Part;
use crate::sums::bytes_of;
use crate::table::row;

/// What the ranks sum.
const BYTES: usize = 4 << 20;

/// All-reduces before the rank is killed: start-up is not what is tried here.
const CALLS: u64 = 20;

/// How long the ranks sum if nobody is killed.
const PATIENCE: Duration = Duration::from_secs(120);

/// When the rank was killed.
const KILLED_AT: &str = "killed at";

pub(crate) fn headline() {
    println!(
        "\na rank is killed amid all_reduces; the others name it, and sum without it; ms of the slowest of them"
    );
    row("ranks", ["way", "killed", "named", "sums again"].map(str::to_owned));
}

/// The first of two, and the one in the middle of three.
fn victim(ranks: usize) -> usize {
    (ranks - 1) / 2
}

/// Has a job run in which a rank is killed.
pub(crate) fn measure(
    options: &Options,
    part: Part,
    ranks: usize,
    left_out: &mut LeftOut,
) -> anyhow::Result<()> {
    let ended = Job::start(options, part, ranks)?.end()?;
    if let Some(why) = ended.left_out {
        left_out.add(&format!("a rank of {ranks} that is killed, by NCCL"), why);
        return Ok(());
    }
    for (rank, status) in ended.statuses.into_iter().enumerate() {
        let is_right = match rank == victim(ranks) {
            true => status.signal() == Some(Signal::KILL.as_raw()),
            false => status.success(),
        };
        ensure!(is_right, "rank {rank} of {ranks} ({part:?}): {status}");
    }
    Ok(())
}

/// What one rank does.
pub(crate) fn one(options: &Options, role: &Role, way: Wanted) -> anyhow::Result<()> {
    let (victim, device) = (victim(role.ranks), role.device(options)?);
    let on = DeviceOptions::default().way(way);
    let all: Vec<usize> = (0..role.ranks).collect();
    let world = role.connect("world", &all)?;
    let with_all = match DeviceGroup::new(&world, Arc::new(device.clone()), &on) {
        Ok(with_all) => with_all,
        Err(error) if way == Wanted::Nccl => {
            role.leave_out(error)?;
            return Ok(world.destroy()?);
        }
        Err(error) => return Err(error.into()),
    };
    let sums = Sums::new(&device, BYTES.min(options.bytes_max), role.rank)?;
    sums.once(&with_all, all.iter().sum::<usize>() + all.len())?;
    if role.rank == victim {
        kill_amid(role.store.clone(), sums.calls.clone());
    }
    let error = sums.until_one_fails(&with_all)?;
    let named_at = now();
    let culprit = error.culprit();
    ensure!(culprit == Some(victim), "rank {victim} was killed, not {culprit:?}: {error}");
    let killed_at: u64 = String::from_utf8(role.store.get(KILLED_AT)?)?.parse()?;
    drop((with_all, world));

    let survivors: Vec<usize> = all.into_iter().filter(|rank| *rank != victim).collect();
    let group = role.connect(&format!("without rank {victim}"), &survivors)?;
    let with_survivors = DeviceGroup::new(&group, Arc::new(device), &on)?;
    sums.once(&with_survivors, survivors.iter().sum::<usize>() + survivors.len())?;
    let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
    let mut times = [ms(killed_at, named_at), ms(named_at, now())];
    group.all_reduce(&mut times, ReduceOp::Max)?;
    if group.rank() == 0 {
        let way = if way == Wanted::Nccl { "nccl" } else { "host" };
        let [named, regrouped] = times.map(|time| format!("{time:.1}"));
        row(&role.ranks.to_string(), [way.to_owned(), format!("rank {victim}"), named, regrouped]);
    }
    with_survivors.destroy().context("at the end")?;
    Ok(group.destroy()?)
}

/// Kills this process while another thread of it sums.
fn kill_amid(store: Arc<dyn Store>, calls: Arc<AtomicU64>) {
    thread::spawn(move || {
        while calls.load(Ordering::Relaxed) < CALLS {
            thread::yield_now();
        }
        // If that fails, the others say so.
        let _ = store.set(KILLED_AT, now().to_string().as_bytes());
        let _ = kill_process(getpid(), Signal::KILL);
    });
}

/// Microseconds, alike in all processes of the host.
fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |it| it.as_micros() as u64)
}

/// All-reduces of one value for each rank.
struct Sums {
    stream: Arc<dyn Stream>,
    own: DeviceMemory,
    data: DeviceMemory,
    calls: Arc<AtomicU64>,
}

impl Sums {
    fn new(device: &CudaDevice, bytes: usize, rank: usize) -> anyhow::Result<Sums> {
        let mut own = device.allocate(bytes)?;
        own.write(&bytes_of(&vec![(rank + 1) as f32; bytes / 4]))?;
        let (stream, data) = (device.stream()?, device.allocate(bytes)?);
        Ok(Sums { stream, own, data, calls: Arc::default() })
    }

    /// One call, and the device has done it.
    fn call(&self, on: &DeviceGroup) -> drumline::device::Result<()> {
        let data = DeviceSlice::new(self.data.place(), DType::F32);
        on.all_reduce_on(&self.stream, data, ReduceOp::Sum)?.wait()?;
        self.calls.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// One call, whose result must be this. Whole numbers have one sum, in whichever order.
    fn once(&self, on: &DeviceGroup, expected: usize) -> anyhow::Result<()> {
        self.stream.copy_within(self.own.place(), self.data.place())?;
        self.call(on)?;
        let bytes = self.data.place().bytes;
        let mut found = vec![0; bytes];
        self.data.read(&mut found)?;
        let is_right = found == bytes_of(&vec![expected as f32; bytes / 4]);
        ensure!(is_right, "{} ranks did not sum to {expected}", on.world_size());
        Ok(())
    }

    /// Calls until one fails, and its error. Every fifth is a barrier, which goes through the host also where sums do not.
    fn until_one_fails(&self, on: &DeviceGroup) -> anyhow::Result<drumline::device::Error> {
        let begun = Instant::now();
        for number in 1_u64.. {
            self.stream.copy_within(self.own.place(), self.data.place())?;
            let called = match number % 5 {
                0 => on.barrier_on(&self.stream).and_then(|work| work.wait()),
                _ => self.call(on),
            };
            match called {
                Err(error) => return Ok(error),
                Ok(()) if begun.elapsed() < PATIENCE => {}
                Ok(()) => break,
            }
        }
        bail!("nobody was killed within {} s", PATIENCE.as_secs())
    }
}
