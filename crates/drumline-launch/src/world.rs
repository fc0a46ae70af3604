//! Which ranks run on this host, and among which others.

use crate::Job;

/// The ranks of all hosts that run at the same time, as one host sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct World {
    /// How many worlds this host has run before.
    pub(crate) attempt: u32,
    /// How often the job has started again before, because of failures.
    pub(crate) restart: u32,
    /// The rank of this host's first worker.
    pub(crate) first_rank: usize,
    /// How many workers this host has.
    pub(crate) local_size: usize,
    /// How many workers all hosts have.
    pub(crate) size: usize,
    /// The number of this host.
    pub(crate) host: usize,
    /// How many hosts there are.
    pub(crate) hosts: usize,
}

impl World {
    /// The only host has all ranks.
    pub(crate) fn alone(job: &Job, restart: u32) -> World {
        let ranks = job.nproc_per_node.get();
        World {
            attempt: restart,
            restart,
            first_rank: 0,
            local_size: ranks,
            size: ranks,
            host: 0,
            hosts: 1,
        }
    }
}
