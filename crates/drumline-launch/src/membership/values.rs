//! What the hosts of a job write for each other.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{Ending, Hosts, NoRestart, RestartBudget, Restarts};

/// What all hosts of a job must have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// The version of Drumline.
    pub version: String,
    /// The name of the job, `--rdzv-id`.
    pub run_id: String,
    /// How the hosts meet, `--rdzv-backend`.
    pub backend: String,
    /// How many hosts the job needs, and may have.
    pub hosts: Hosts,
    /// How often it may start again.
    pub restarts: Restarts,
}

impl Terms {
    /// What these terms differ in from those of the job, for people.
    pub fn difference(&self, of_the_job: &Terms) -> Option<String> {
        let hosts = |terms: &Terms| format!("{}:{}", terms.hosts.min, terms.hosts.max);
        let restarts = |terms: &Terms| {
            let Restarts { max, delay_min, delay_max, reset_after } = terms.restarts;
            let reset = reset_after.map(|calm| format!(", all back after {calm:?}"));
            let reset = reset.unwrap_or_default();
            format!("{max} restarts, {delay_min:?}..{delay_max:?} before each{reset}")
        };
        let facts = [
            ("version of drumline", self.version.clone(), of_the_job.version.clone()),
            ("run id", self.run_id.clone(), of_the_job.run_id.clone()),
            ("backend", self.backend.clone(), of_the_job.backend.clone()),
            ("number of hosts (--nnodes)", hosts(self), hosts(of_the_job)),
            ("budget", restarts(self), restarts(of_the_job)),
        ];
        let (what, here, there) = facts.into_iter().find(|(_, here, there)| here != there)?;
        Some(format!("its {what} is {here}, that of the job is {there}"))
    }
}

/// Who a host is. It writes this once, under a number that is new for every start of a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// What it was started with.
    pub terms: Terms,
    /// Its place in the order of ranks, `--node-rank`.
    pub node_rank: Option<usize>,
    /// How many ranks it has.
    pub ranks: usize,
    /// Its name, for people.
    pub name: String,
    /// Where other hosts reach it.
    pub address: String,
    /// Whether the store ends with it. If it leaves, the job ends.
    pub keeps_store: bool,
}

/// What a host says with each beat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// One more each time. A beat that stands still is a host that is lost.
    pub beat: u64,
    /// The version of the last plan that it has seen.
    pub plan: u64,
    /// The last world that it belonged to; 0 before the first.
    pub world: u64,
    /// How far it is in that world.
    pub state: State,
    /// The first failure of its workers in that world.
    pub failure: Option<Failure>,
    /// Once all its workers in that world have said that they go on when others die: so many ranks must be left.
    pub regroups: Option<usize>,
    /// Once its ranks are held.
    pub held: Option<Held>,
    /// The number of the signal that ends its launcher.
    pub leaves: Option<i32>,
}

/// The ranks of a host are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Held {
    /// The last step that one of them has begun. `None`: none has begun one.
    pub begun: Option<u64>,
}

/// How far a host is in its last world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum State {
    /// Its workers do not run yet.
    #[default]
    Waiting,
    /// Its workers run.
    Running,
    /// None of its workers run, and none will.
    Ended(Outcome),
}

/// How the workers of a host ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// In which way.
    pub how: How,
    /// How long they ran.
    pub lived: Duration,
    /// Whether one of them began a step.
    pub stepped: bool,
}

impl Outcome {
    /// Workers that never ran.
    pub const NEVER_RAN: Outcome =
        Outcome { how: How::Abandoned, lived: Duration::ZERO, stepped: false };
}

/// In which way the workers of a host ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum How {
    /// All exited with 0, and nobody had told them to stop.
    Success,
    /// One failed: see [`Report::failure`].
    Failed,
    /// The launcher ended them.
    Abandoned,
    /// They stopped at the step at which they were told to.
    StoppedAtStep,
}

/// The first failure of a host's workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// The rank that failed.
    pub rank: usize,
    /// Its number on its host.
    pub local_rank: usize,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub ending: Ending,
    /// Whether it only told the end of a rank of another host.
    pub has_only_heard: bool,
    /// When, in milliseconds since 1970, by the clock of its host. It is shown, and of failures that the leader sees
    /// at once the one with the earlier time counts.
    pub time: u64,
    /// What the launcher of its host says about it, at most 8 KiB.
    pub text: String,
}

/// What the hosts do, as the leader has decided it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// One more with every change.
    pub version: u64,
    /// The number of the host that decides.
    pub leader: u64,
    /// The number of the world; 0 before the first.
    pub world: u64,
    /// How often the job has started again after a failure.
    pub restart: u32,
    /// The hosts of the world, in the order of their ranks, without those that were lost. Between two worlds: those
    /// of the last one.
    pub members: Vec<Member>,
    /// How far the world is.
    pub phase: Phase,
    /// The restarts that are left.
    pub budget: RestartBudget,
    /// Hosts that may not take part, and why.
    pub refused: Vec<Refused>,
    /// What ended the last world that failed.
    pub failure: Option<Origin>,
    /// Members that this world has lost, and goes on without.
    pub lost: Vec<Named>,
}

impl Plan {
    /// The place of this host in the order of ranks.
    pub fn place(&self, host: u64) -> Option<usize> {
        self.members.iter().position(|it| it.host == host)
    }

    /// The members that this world goes on with.
    pub fn present(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| !self.has_lost(member.host))
    }

    pub(super) fn has_lost(&self, host: u64) -> bool {
        self.lost.iter().any(|it| it.host == host)
    }

    /// Whether members may have workers.
    pub(super) fn runs(&self) -> bool {
        match self.phase {
            Phase::Running | Phase::Holding | Phase::StoppingAt(_) | Phase::Ending(_) => true,
            Phase::Gathering | Phase::Pausing(_) | Phase::Over(_) => false,
        }
    }
}

/// A host of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Its number.
    pub host: u64,
    /// The rank of its first worker.
    pub first_rank: usize,
    /// How many workers it has.
    pub ranks: usize,
}

/// A host that may not take part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refused {
    /// Its number.
    pub host: u64,
    /// Its name, if it could be read.
    pub name: String,
    /// Why.
    pub why: String,
}

/// A failure and the host that it happened on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The number of the host.
    pub host: u64,
    /// Its name.
    pub name: String,
    /// The failure.
    pub failure: Failure,
}

/// How far a world is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Phase {
    /// Hosts come together for the next world.
    #[default]
    Gathering,
    /// After a failure, the next world has to wait this long.
    Pausing(Duration),
    /// The members run their workers.
    Running,
    /// The members hold their workers at the next step, because a host has come.
    Holding,
    /// The workers stop before this step.
    StoppingAt(u64),
    /// The members end their workers.
    Ending(Why),
    /// The job is over.
    Over(Verdict),
}

/// Why workers are ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Why {
    /// A worker failed: see [`Plan::failure`].
    Failed,
    /// This host was lost.
    Lost(Named),
    /// The launcher of this host was told to end.
    Left(Named, i32),
    /// This host could not reach the store in time. No plan says so: only the host itself knows.
    CutOff,
}

/// A host, for people.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// Its number.
    pub host: u64,
    /// Its name.
    pub name: String,
    /// Its address.
    pub address: String,
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.name, self.address)
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Verdict {
    /// All workers exited with 0.
    Finished,
    /// A worker failed (see [`Plan::failure`]), and the job does not start again for this reason.
    Failed(NoRestart),
    /// Too few hosts came in time.
    NoQuorum {
        /// Those that did.
        came: Vec<Named>,
        /// How many are needed.
        needed: usize,
    },
    /// The launcher of this host was told to end by this signal, and too few remained.
    Stopped(Named, i32),
}
