//! Times `all_reduce(sum)` of `f32` from 8 B to 64 MiB over everything that can carry it.
//!
//! ```sh
//! cargo build --release -p drumline-launch -p drumline --example all_reduce_speed
//! cargo run --release -p drumline-launch -- run --nproc-per-node 2 \
//!     target/release/examples/all_reduce_speed
//! ```
//!
//! Without a launcher its ranks are two threads. The ways take turns, so that all see the same
//! moods of the machine, and every rank rewrites its buffer before each operation, as training
//! does; the rewriting is not timed. `memcpy` is a copy of as many bytes by all ranks at once.
//! Figures are medians in microseconds of rank 0, with the fastest in parentheses. `BYTES_MIN`,
//! `BYTES_MAX` and `WAYS` (such as `tcp,unix`) leave sizes and ways out.

use std::{
    env,
    error::Error,
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant},
};

use drumline::{
    Config, ProcessGroup, ReduceOp, RegisteredBuffer, is_launched,
    rendezvous::rendezvous,
    store::{HashStore, Store},
};

fn main() -> Result<(), Box<dyn Error>> {
    let limit = |name, default| env::var(name).map_or(Ok(default), |text| text.parse());
    let bytes = limit("BYTES_MIN", 0_usize)?..=limit("BYTES_MAX", 64 << 20)?;
    if is_launched() {
        let config = Config::from_env()?;
        let job = rendezvous("env://", &config)?;
        return Ok(measure(job.store.clone(), job.rank, job.world_size, &config, bytes)?);
    }
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|threads| {
        let ranks = [0, 1].map(|rank| {
            let (store, bytes) = (store.clone(), bytes.clone());
            threads.spawn(move || measure(store, rank, 2, &Config::default(), bytes))
        });
        for rank in ranks {
            rank.join().map_err(|_| "a rank panicked")??;
        }
        Ok(())
    })
}

const WAYS: [&str; 5] = ["memcpy", "registered", "staged", "unix", "tcp"];

fn measure(
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
    config: &Config,
    bytes_limits: RangeInclusive<usize>,
) -> drumline::Result<()> {
    let wanted = env::var("WAYS").unwrap_or_else(|_| WAYS.join(","));
    let connect = |name: &str, config: Config| {
        ProcessGroup::connect(name, store.clone(), rank, world_size, &config)
    };
    let shared = connect("shared", config.clone())?;
    let unix = connect("unix", Config { shared_memory: false, ..config.clone() })?;
    let tcp =
        connect("tcp", Config { shared_memory: false, unix_sockets: false, ..config.clone() })?;
    if rank == 0 {
        println!("{world_size} ranks; shared memory: {}", shared.shares_memory());
        print!("{:>10}", "bytes");
        WAYS.iter().for_each(|way| print!(" {way:>22}"));
        println!(" {:>10} {:>10}", "registered", "staged");
    }

    let sizes = [3, 5, 8, 11, 14, 17, 20, 23, 26].map(|shift| 1_usize << shift);
    for bytes in sizes.into_iter().filter(|bytes| bytes_limits.contains(bytes)) {
        let mut private = vec![0_f32; bytes / 4];
        let mut copy = vec![0_f32; bytes / 4];
        let mut registered: RegisteredBuffer<f32> = shared.alloc_registered(bytes / 4)?;
        let repetitions = ((128 << 20) / bytes).clamp(16, 1000);
        let mut times = [const { Vec::<Duration>::new() }; WAYS.len()];
        for _ in 0..repetitions + 2 {
            let ways = WAYS.iter().zip(&mut times);
            for (way, times) in ways.filter(|(way, _)| wanted.split(',').any(|it| it == **way)) {
                private.fill(1.0);
                registered.fill(1.0);
                shared.barrier()?;
                let start = Instant::now();
                match *way {
                    "memcpy" => copy.copy_from_slice(&private),
                    "registered" => shared.all_reduce(&mut registered, ReduceOp::Sum)?,
                    "staged" => shared.all_reduce(&mut private, ReduceOp::Sum)?,
                    "unix" => unix.all_reduce(&mut private, ReduceOp::Sum)?,
                    _ => tcp.all_reduce(&mut private, ReduceOp::Sum)?,
                }
                times.push(start.elapsed());
                std::hint::black_box(&copy);
            }
        }
        if rank == 0 {
            print!("{bytes:>10}");
            let mut medians = [0.0; WAYS.len()];
            for (times, median) in times.iter_mut().zip(&mut medians) {
                let Some(times) = times.get_mut(2..) else {
                    print!(" {:>22}", "");
                    continue;
                };
                times.sort_unstable();
                let us = |time: Duration| time.as_secs_f64() * 1e6;
                *median = us(times[times.len() / 2]);
                print!(" {:>22}", format!("{median:.2} ({:.2})", us(times[0])));
            }
            let [memcpy, registered, staged, ..] = medians;
            println!(" {:>9.2}x {:>9.2}x", memcpy / registered, memcpy / staged);
        }
    }
    for group in [shared, unix, tcp] {
        group.destroy()?;
    }
    Ok(())
}
