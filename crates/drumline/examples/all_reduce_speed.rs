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
//! Figures are medians in microseconds of rank 0, with the fastest in parentheses.

use std::{
    env,
    error::Error,
    sync::Arc,
    time::{Duration, Instant},
};

use drumline::{
    Config, ProcessGroup, ReduceOp, RegisteredBuffer, is_launched,
    rendezvous::rendezvous,
    store::{HashStore, Store},
};

fn main() -> Result<(), Box<dyn Error>> {
    let bytes_max = env::var("BYTES_MAX").map_or(Ok(64 << 20), |text| text.parse())?;
    if is_launched() {
        let config = Config::from_env()?;
        let job = rendezvous("env://", &config)?;
        return Ok(measure(job.store.clone(), job.rank, job.world_size, &config, bytes_max)?);
    }
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|threads| {
        let ranks = [0, 1].map(|rank| {
            let store = store.clone();
            threads.spawn(move || measure(store, rank, 2, &Config::default(), bytes_max))
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
    bytes_max: usize,
) -> drumline::Result<()> {
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
    for bytes in sizes.into_iter().filter(|bytes| *bytes <= bytes_max) {
        let mut private = vec![0_f32; bytes / 4];
        let mut copy = vec![0_f32; bytes / 4];
        let mut registered: RegisteredBuffer<f32> = shared.alloc_registered(bytes / 4)?;
        let repetitions = ((128 << 20) / bytes).clamp(16, 1000);
        let mut times = [const { Vec::<Duration>::new() }; WAYS.len()];
        for _ in 0..repetitions + 2 {
            for (way, times) in WAYS.iter().zip(&mut times) {
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
                let times = &mut times[2..];
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
