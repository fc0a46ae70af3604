//! Three small trainings: burn's `Learner`, a loop in burn, and a loop in candle. Each stands here twice, as a program of
//! one process (`one.rs`) and as one of many (`many.rs`). The book shows what differs: `docs/start/many-processes.md`.
//!
//! ```sh
//! cargo run --release -p one-to-many learner                                   # or burn, or candle
//! drumline run --nproc-per-node 2 -- target/release/one-to-many learner
//! ```

mod candle_loop {
    pub(crate) mod many;
    pub(crate) mod one;
}
mod learner {
    pub(crate) mod many;
    pub(crate) mod one;
    pub(crate) mod wrapped;
}
mod training_loop {
    pub(crate) mod many;
    pub(crate) mod one;
}

use anyhow::{Result, bail};
use drumline::rendezvous::is_launched;

fn main() -> Result<()> {
    let accuracy = match (std::env::args().nth(1).as_deref(), is_launched()) {
        (Some("learner"), false) => learner::one::train()?,
        (Some("learner"), true) => learner::many::train()?,
        (Some("wrapped"), _) => learner::wrapped::train()?,
        (Some("burn"), false) => training_loop::one::train()?,
        (Some("burn"), true) => training_loop::many::train()?,
        (Some("candle"), false) => candle_loop::one::train()?,
        (Some("candle"), true) => candle_loop::many::train()?,
        _ => bail!("name one of learner, burn and candle"),
    };
    println!("test accuracy {accuracy:.2} %");
    Ok(())
}
