//! How long hosts wait for each other.

use std::time::Duration;

use crate::Joining;

/// How long hosts wait for each other. All hosts of a job have the same, but for what [`Joining`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The pause between two polls while workers run...
    pub poll: Duration,
    /// ... and while hosts wait for each other, ...
    pub poll_waiting: Duration,
    /// ... and what each host adds to either, so that the store has the same load with many hosts.
    pub poll_per_host: Duration,
    /// A host whose beat stands still for this long is lost. Many ranks make this and the lease longer.
    pub silent: Duration,
    /// Workers of a host that has not completed a beat within this time are killed. It is shorter than `silent`, by
    /// the time that killing takes and by what clocks may differ.
    pub lease: Duration,
    /// Failures within this time may have one origin.
    pub settle: Duration,
    /// For how long a running world waits for further hosts when one has come.
    pub newcomers: Duration,
    /// For how long a new leader waits for a beat of a host that it knows only from the store.
    pub look: Duration,
    /// When the leader is silent, each place in the order waits this much longer than the one before.
    pub take_over_step: Duration,
    /// How long the host with the store waits until all have heard that the job is over.
    pub linger: Duration,
    /// How long the first hosts wait for more, once there are enough.
    pub last_call: Duration,
    /// How long the job waits for enough hosts.
    pub join_timeout: Duration,
}

impl Timing {
    /// With the times that the user has chosen.
    pub fn of(joining: &Joining) -> Timing {
        let ms = Duration::from_millis;
        Timing {
            poll: ms(100),
            poll_waiting: ms(20),
            poll_per_host: ms(1),
            silent: ms(3_000),
            lease: ms(2_000),
            settle: ms(100),
            newcomers: ms(500),
            look: ms(1_000),
            take_over_step: ms(100),
            linger: ms(5_000),
            last_call: joining.last_call,
            join_timeout: joining.join_timeout,
        }
    }
}

/// A launcher shares the cores with its ranks: 1,000 of them double the time that it has.
pub(super) fn with_ranks(time: Duration, ranks: usize) -> Duration {
    time + time * u32::try_from(ranks).unwrap_or(u32::MAX) / 1_000
}
