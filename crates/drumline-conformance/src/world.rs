use std::fmt::Debug;

use drumline::{Config, ProcessGroup};

/// Makes groups.
pub trait World: Debug {
    /// The name, for reports.
    fn name(&self) -> &str;

    /// Makes a group of `world_size` ranks and calls `rank` once for each of them, all at the same time.
    ///
    /// # Errors
    ///
    /// The errors of the ranks that fail, or why the group could not be made.
    fn run(
        &self,
        world_size: usize,
        rank: &(dyn Fn(&ProcessGroup) -> Result<(), String> + Sync),
    ) -> Result<(), String>;
}

/// Every rank is a thread of this process.
#[derive(Clone, Debug)]
pub struct Threads {
    name: String,
    config: Config,
}

impl Threads {
    /// Groups with these settings.
    pub fn new(name: &str, config: Config) -> Threads {
        Threads { name: name.to_owned(), config }
    }

    /// Changes the settings of the groups.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Config)) -> Threads {
        change(&mut self.config);
        self
    }

    /// Groups over shared memory, over Unix sockets alone, and over TCP.
    pub fn everywhere() -> [Threads; 3] {
        let with = |shared_memory, unix_sockets| {
            Config::default()
                .shared_memory(shared_memory)
                .unix_sockets(unix_sockets)
                .registered_bytes_max(256 << 20)
        };
        [
            Threads::new("over shared memory", with(true, true)),
            Threads::new("over Unix sockets", with(false, true)),
            Threads::new("over TCP", with(false, false)),
        ]
    }
}

impl World for Threads {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(
        &self,
        world_size: usize,
        rank: &(dyn Fn(&ProcessGroup) -> Result<(), String> + Sync),
    ) -> Result<(), String> {
        let groups = drumline::rendezvous::local_world_with(world_size, &self.config)
            .map_err(|error| format!("no group of {world_size}: {error}"))?;
        std::thread::scope(|threads| {
            let running: Vec<_> = groups
                .into_iter()
                .map(|group| {
                    threads.spawn(move || {
                        rank(&group).map_err(|problem| {
                            // The other ranks then fail at once instead of at the time limit.
                            group.abort();
                            format!("rank {} of {world_size}: {problem}", group.rank())
                        })?;
                        group.destroy().map_err(|error| error.to_string())
                    })
                })
                .collect();
            let results = running.into_iter().map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            // A rank that fails aborts, and all others report that. The texts show which failed first.
            let problems: Vec<String> = results.filter_map(Result::err).collect();
            if problems.is_empty() { Ok(()) } else { Err(problems.join("\n")) }
        })
    }
}
