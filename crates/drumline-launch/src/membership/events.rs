//! What the membership of a host gets to know.

use std::time::Duration;

use super::values::{Failure, Host, Outcome, Plan, Report};

/// What to write and to read at a poll, besides the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Poll {
    /// To be written to `report/N`, before anything is read.
    pub report: Report,
    /// Whether to read `count`.
    pub count: bool,
    /// The numbers whose `host/N` to read. Some may not be there.
    pub hosts: Vec<u64>,
    /// The numbers whose `report/N` to read. Some may not be there.
    pub reports: Vec<u64>,
}

/// The answers to a [`Poll`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// When the poll began: before its report was written.
    pub began: Duration,
    /// The plan. `None`: there is none.
    pub plan: Option<Plan>,
    /// `count`, if it was asked for.
    pub count: Option<u64>,
    /// The hosts that are there. An error says why a value cannot be used.
    pub hosts: Vec<(u64, Result<Host, String>)>,
    /// All reports that were asked for. `None`: it is not there, or cannot be used.
    pub reports: Vec<(u64, Option<Report>)>,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A poll has come to its end: its report is written, and this was read.
    Polled(View),
    /// After [`Action::WritePlan`](super::Action::WritePlan): this plan is in the store. It is that of another host if that one was faster.
    Planned(Plan),
    /// Something happened on this host.
    Local(Local),
    /// Only time has passed. Due at [`Membership::deadline`](super::Membership::deadline).
    Tick,
}

/// What happened on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Local {
    /// All workers run.
    Started,
    /// A worker failed. A second one replaces the first: it is the likelier origin.
    Failed(Failure),
    /// All workers have said that they go on when others die, while so many ranks are left.
    Regroups(usize),
    /// After [`Action::Hold`](super::Action::Hold): all ranks are held. The last step that one of them has begun.
    Held(Option<u64>),
    /// None of the workers run any more.
    Ended(Outcome),
    /// This signal ends the launcher. The caller ends the workers, without an
    /// [`Action::Abandon`](super::Action::Abandon). The caller then waits for [`Action::End`](super::Action::End).
    Leaving(i32),
}
