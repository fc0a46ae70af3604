//! Times `all_reduce` between two ranks over loopback, for sizes from 8 B to 64 MiB.
//!
//! ```sh
//! cargo run --release -p drumline --example all_reduce_speed [world size]
//! ```
//!
//! Every rank rewrites its buffer before each operation, as training does; the rewriting is not
//! timed. Each line gives the minimum, median and maximum over the repetitions.

use std::{
    env,
    error::Error,
    time::{Duration, Instant},
};

use drumline::{ProcessGroup, ReduceOp};

fn main() -> Result<(), Box<dyn Error>> {
    let world_size = env::args().nth(1).map_or(Ok(2), |text| text.parse())?;
    println!("all_reduce(sum) of f32, {world_size} ranks, TCP over loopback");
    println!(
        "{:>12} {:>12} {:>12} {:>12} {:>10}",
        "bytes", "min us", "median us", "max us", "GB/s"
    );
    std::thread::scope(|threads| {
        let ranks: Vec<_> = ProcessGroup::local_world(world_size)?
            .into_iter()
            .map(|group| threads.spawn(move || measure(&group)))
            .collect();
        for rank in ranks {
            rank.join().map_err(|_| "a rank panicked")??;
        }
        Ok(())
    })
}

fn measure(group: &ProcessGroup) -> drumline::Result<()> {
    for shift in (3..=26).filter(|shift| shift % 3 == 2 || *shift == 3) {
        let bytes = 1_usize << shift;
        let mut buffer = vec![0_f32; bytes / 4];
        let repetitions = ((64 << 20) / bytes).clamp(10, 1000);
        let mut times: Vec<Duration> = Vec::with_capacity(repetitions);
        for _ in 0..repetitions + 3 {
            buffer.fill(1.0);
            group.barrier()?;
            let start = Instant::now();
            group.all_reduce(&mut buffer, ReduceOp::Sum)?;
            times.push(start.elapsed());
        }
        let times = &mut times[3..];
        times.sort_unstable();
        let median = times[times.len() / 2];
        if group.rank() == 0 {
            let us = |time: Duration| time.as_secs_f64() * 1e6;
            println!(
                "{bytes:>12} {:>12.1} {:>12.1} {:>12.1} {:>10.3}",
                us(times[0]),
                us(median),
                us(times[times.len() - 1]),
                bytes as f64 / median.as_secs_f64() / 1e9,
            );
        }
    }
    Ok(())
}
