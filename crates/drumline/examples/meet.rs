//! What a job of many ranks costs that does nothing else: its ranks meet, sum one number, and part.
//!
//! ```sh
//! cargo build --release -p drumline-cli -p drumline --example meet
//! perf stat -e task-clock,page-faults target/release/drumline run --nproc-per-node 64 target/release/examples/meet
//! ```

use std::error::Error;

use drumline::{ProcessGroup, ReduceOp};

fn main() -> Result<(), Box<dyn Error>> {
    let group = ProcessGroup::from_env()?;
    let mut ranks = [1_u64];
    group.all_reduce(&mut ranks, ReduceOp::Sum)?;
    if ranks[0] != group.world_size() as u64 {
        return Err(format!("the sum of {} ones is {}", group.world_size(), ranks[0]).into());
    }
    group.destroy()?;
    Ok(())
}
