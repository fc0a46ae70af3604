//! Which ranks run on this host, and among which others.

use serde::Serialize;

use crate::Job;

/// The ranks of all hosts that run at the same time, as one host sees them. The event that tells it has torch's names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct World {
    /// How many worlds this host has run before.
    #[serde(skip)]
    pub(crate) attempt: u32,
    /// How often the job has started again before, because of failures.
    #[serde(rename = "agent_restarts")]
    pub(crate) restart: u32,
    /// The rank of this host's first worker.
    pub(crate) first_rank: usize,
    /// How many workers this host has.
    #[serde(rename = "local_world_size")]
    pub(crate) local_size: usize,
    /// How many workers all hosts have.
    #[serde(rename = "world_size")]
    pub(crate) size: usize,
    /// The number of this host.
    #[serde(rename = "group_rank")]
    pub(crate) host: usize,
    /// How many hosts there are.
    #[serde(rename = "group_world_size")]
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
