//! A job that makes steps until it is ended, and lets hosts come and go:
//!
//! ```text
//! DRUMLINE_SECRET_FILE=~/job-secret drumline run --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint host0 \
//!     target/release/examples/steps
//! ```
//!
//! Rank 0 prints each step, with the time in milliseconds since 1970. The file in its first argument keeps the number of
//! the next step, as a checkpoint would.

use std::{
    env, fs,
    path::Path,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use drumline::{ProcessGroup, ReduceOp, Step, step};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let checkpoint = env::args_os().nth(1);
    let checkpoint = checkpoint.as_deref().map(Path::new);
    let saved = checkpoint.and_then(|path| fs::read_to_string(path).ok());
    let first: u64 = saved.and_then(|text| text.trim().parse().ok()).unwrap_or(0);

    let group = ProcessGroup::from_env()?;
    for number in first.. {
        if step(number) == Step::Stop {
            break;
        }
        let mut sum = [1.0_f32];
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        if group.rank() == 0 {
            let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
            println!("step {number} of {} ranks at {now}", sum[0]);
            if let Some(path) = checkpoint {
                // A step that ends in the middle must not damage the file.
                let new = path.with_extension("new");
                fs::write(&new, (number + 1).to_string())?;
                fs::rename(new, path)?;
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    group.destroy()?;
    Ok(())
}
