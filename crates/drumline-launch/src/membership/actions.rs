//! What the membership of a host wants done.

use std::fmt;

use crate::{
    Ending, NoRestart,
    ending::{signal_exit_code, signal_name},
};

use super::values::{Member, Named, Origin, Plan, Verdict, Why};

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write the plan by `compare_set`, and hand in [`Event::Planned`](super::Event::Planned). If the store does not answer, forget it.
    WritePlan {
        /// The plan that must be in the store. `None`: there must be none.
        expected: Option<Box<Plan>>,
        /// The plan to write.
        plan: Box<Plan>,
    },
    /// Start the workers, if the [lease](super::Membership::lease) has not run out. [`Local::Started`](super::Local::Started) follows, or
    /// [`Local::Failed`](super::Local::Failed) and [`Local::Ended`](super::Local::Ended).
    Start(WorldPlan),
    /// Hold the workers at their next step. [`Local::Held`](super::Local::Held) follows.
    Hold,
    /// Let the workers stop before this step; if they never call `step`, end them gently. [`Local::Ended`](super::Local::Ended) follows.
    StopAt(u64),
    /// End the workers, for this reason. [`Local::Ended`](super::Local::Ended) follows. With [`Why::CutOff`], kill
    /// them, and carry out the next action when they are gone.
    Abandon(Why),
    /// Tell people.
    Note(String),
    /// This host was cut off from the store. When no worker runs any more, join anew: with a new number and a new
    /// [`Membership`](super::Membership).
    Rejoin,
    /// This host's part is over. None of its workers run.
    End(End),
}

/// What a host needs to know to start its workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldPlan {
    /// The number of the world; it is new for each.
    pub world: u64,
    /// How often the job has started again after a failure.
    pub restart: u32,
    /// How many ranks there are.
    pub size: usize,
    /// The place of this host among the hosts.
    pub place: usize,
    /// All hosts, in the order of their ranks.
    pub members: Vec<Member>,
}

impl WorldPlan {
    /// The rank of this host's first worker.
    pub(crate) fn first_rank(&self) -> usize {
        self.members.get(self.place).map_or(0, |member| member.first_rank)
    }
}

/// Why a host's part is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The job is over.
    Over(Verdict, Option<Origin>),
    /// This host may not take part, for this reason.
    Refused(String),
    /// The launcher of this host got this signal. The job may go on without it.
    Left(i32),
    /// The store has lost the plan: it was started anew.
    Forgotten,
}

impl End {
    /// The exit code of the launcher.
    pub fn exit_code(&self) -> u8 {
        match self {
            End::Over(Verdict::Finished, _) => 0,
            End::Over(Verdict::Failed(_), origin) => {
                let ending = origin.as_ref().map(|it| it.failure.ending);
                ending.map_or(1, Ending::exit_code)
            }
            End::Over(Verdict::Stopped(_, signal), _) | End::Left(signal) => {
                signal_exit_code(*signal)
            }
            End::Over(Verdict::NoQuorum { .. }, _) | End::Forgotten => 1,
            End::Refused(_) => 2,
        }
    }
}

/// One line for people.
impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Over(Verdict::Finished, _) => f.write_str("all ranks have ended well"),
            End::Over(Verdict::Failed(_), Some(Origin { name, failure, .. })) => {
                write!(f, "rank {} on host {name} failed: {}", failure.rank, failure.ending)
            }
            End::Over(Verdict::Failed(NoRestart::HostsLost(worlds)), None) => write!(
                f,
                "{worlds} worlds in a row lost a host before their first step: the hosts hear each other, but not all that \
                 they say; look for lost packets (ping -i 0.2) and for large ones that do not come through \
                 (ping -s 1400 -M do)"
            ),
            End::Over(Verdict::Failed(_), None) => f.write_str("a rank failed"),
            End::Over(Verdict::NoQuorum { came, needed }, _) => {
                let missing = needed.saturating_sub(came.len());
                write!(f, "{missing} of {needed} hosts are missing; ")?;
                match came.iter().map(Named::to_string).collect::<Vec<_>>().join(", ") {
                    names if names.is_empty() => f.write_str("none came"),
                    names => write!(f, "those that came: {names}"),
                }
            }
            End::Over(Verdict::Stopped(host, signal), _) => {
                write!(f, "the launcher of host {host} got {}", signal_name(*signal))
            }
            End::Refused(why) => write!(f, "this host may not take part: {why}"),
            End::Left(signal) => write!(f, "stopped by {}", signal_name(*signal)),
            End::Forgotten => {
                f.write_str("the store has lost the plan of the job: it was started anew")
            }
        }
    }
}
