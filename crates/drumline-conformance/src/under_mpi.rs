//! Ranks that an MPI starts: the launchers that tests find, and a world of such ranks.

use std::sync::atomic::{AtomicUsize, Ordering};

use drumline::{GroupOptions, ProcessGroup};
pub use drumline_testing::installed::{Installed, VARIABLE};

use crate::World;

/// The world of a rank that is a process: its groups are groups of the first ranks of the job.
#[derive(Debug)]
pub struct OfProcess {
    name: String,
    world: ProcessGroup,
    options: GroupOptions,
    /// How many groups were made, which tells their names apart.
    made: AtomicUsize,
}

impl OfProcess {
    /// Groups of the ranks of `world`, made with `options`.
    pub fn new(name: &str, world: ProcessGroup, options: GroupOptions) -> OfProcess {
        OfProcess { name: name.to_owned(), world, options, made: AtomicUsize::new(0) }
    }
}

impl World for OfProcess {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(
        &self,
        world_size: usize,
        rank: &(dyn Fn(&ProcessGroup) -> Result<(), String> + Sync),
    ) -> Result<(), String> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        if self.world.rank() >= world_size {
            return Ok(());
        }
        let ranks: Vec<usize> = (0..world_size).collect();
        let options = self.options.clone().name(format!("{} {number}", self.name));
        let group = self.world.new_group(&ranks, &options).map_err(|error| error.to_string())?;
        rank(&group).map_err(|problem| {
            group.abort(); // the other ranks then fail at once
            format!("rank {} of {world_size}: {problem}", group.rank())
        })?;
        group.destroy().map_err(|error| error.to_string())
    }
}
