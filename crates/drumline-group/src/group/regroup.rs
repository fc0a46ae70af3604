//! How the ranks that are left form a smaller group after others have died.
//!
//! ```text
//! regroup/L/N/came/R        3                       rank R is here, and has lost rank 3: written by every rank that is left
//! regroup/L/N/members       0,1,3                   written once: the first rank that has made up its mind
//! ```
//!
//! `L` tells lines of groups apart, `N` counts the attempts of a line. The store lets one list of members win, so there is
//! one group. If another rank dies before these have connected, they see it at start-up and go on with attempt `N + 1`.

use std::{
    collections::BTreeSet,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drumline_engine::{CollectiveError, deadline};
use drumline_error::{Cause, Error, ErrorKind, ErrorOrigin, Reason, Section};
use drumline_schedule::step::Rank;
use drumline_store::store::Store;

use super::{GroupOptions, ProcessGroup, process_group::Carrier};
use crate::Result;

/// A line of groups: each but the first is what is left of the one before.
#[derive(Clone, Debug)]
pub struct Line {
    id: u64,
    /// The number of the next attempt. All members of the newest group have the same.
    attempt: u64,
    /// So many ranks must be left.
    min_ranks: usize,
}

impl Line {
    /// Begins a line of groups with this one, if it is the group of all ranks of the job. All ranks must begin their lines in
    /// the same order. So many ranks must be left.
    pub fn begin(group: &ProcessGroup, min_ranks: usize) -> Option<Line> {
        let family = group.inner.family().filter(|family| family.root == group.name())?;
        Some(Line { id: family.next_line(), attempt: 0, min_ranks })
    }

    /// The number of the newest group of this line: the first is 1.
    pub fn group_number(&self) -> u64 {
        self.attempt + 1
    }

    /// Connects the ranks that are left of `group`, the newest of this line, after its loss.
    ///
    /// # Errors
    ///
    /// Fewer than the line's least ranks are left, or the others have gone on without this one. Or the ranks that are left
    /// could not be connected, or have lost the store.
    pub fn regroup(&mut self, group: &ProcessGroup, loss: Loss) -> Result<ProcessGroup> {
        let deadline = deadline::after(Instant::now(), group.inner.config.timeout);
        let own = group.ranks()[group.rank()];
        let mut candidates: BTreeSet<Rank> = group.ranks().into_iter().collect();
        let mut loss = loss;
        loop {
            let settled = self.settle(group, &candidates, &loss);
            let members = settled.map_err(|error| cannot_meet(&loss.failure, &error))?;
            self.attempt += 1;
            if !members.contains(&own) {
                return Err(left_behind(group, own, &members));
            }
            if members.len() < self.min_ranks {
                return Err(too_few(&loss.failure, self.min_ranks, &members));
            }
            let ranks: Vec<Rank> = members.iter().filter_map(|it| group.group_rank(*it)).collect();
            let name = format!("regroup-{}-{}", self.id, self.attempt);
            let error = match group.new_group(&ranks, &GroupOptions::default().name(name)) {
                Ok(next) => return Ok(next),
                Err(error) => error,
            };
            if error.kind() != ErrorKind::Connect || Instant::now() >= deadline {
                return Err(cannot_meet(&loss.failure, &error));
            }
            tracing::debug!("the ranks that are left could not be connected: {error}");
            candidates = members;
            let ranks = error.culprit().into_iter().collect();
            loss = Loss { failure: error, ranks, told_by: None };
        }
    }

    /// The members of the next group: the candidates without those that are `lost` and do not come. All ranks get the
    /// same.
    fn settle(
        &self,
        group: &ProcessGroup,
        candidates: &BTreeSet<Rank>,
        loss: &Loss,
    ) -> Result<BTreeSet<Rank>> {
        let family = group.inner.family().ok_or_else(|| {
            Error::argument("regroup", format!("group {:?} has been destroyed", group.name()))
        })?;
        let (store, own) = (&*family.store, group.ranks()[group.rank()]);
        let key = format!("{}/regroup/{}/{}", family.place(), self.id, self.attempt);
        let came = |rank: Rank| format!("{key}/came/{rank}");
        let mut lost = loss.ranks.clone();
        if let Some(by) = loss.told_by {
            // It may have heard it from another one, and then comes after that one.
            match absent(store, &[by], came, loss.patience())?.is_empty() {
                true => lost.extend(ranks(&store.get(&came(by))?)),
                false => lost.extend([by]),
            }
        }
        store.set(&came(own), list(lost.iter().copied()).as_bytes())?;
        lost.extend(family.lost());
        lost.extend(family.seen.ended());
        let suspects: Vec<Rank> =
            candidates.intersection(&lost).copied().filter(|rank| *rank != own).collect();
        let absent = absent(store, &suspects, came, loss.patience())?;
        let members = candidates.iter().copied().filter(|rank| !absent.contains(rank));
        let mine = list(members);
        let agreed = store.compare_set(&format!("{key}/members"), b"", mine.as_bytes())?;
        Ok(ranks(&agreed))
    }
}

/// What a group has lost.
#[derive(Clone, Debug)]
pub struct Loss {
    /// Why it has failed.
    pub failure: Error,
    /// The ranks, by their numbers in the job.
    pub ranks: BTreeSet<Rank>,
    /// The rank that has told of the failure, and not which ranks are lost.
    told_by: Option<Rank>,
}

impl Loss {
    /// Why `group` has failed, and which ranks it has lost. `None` if it has not failed, or for another reason.
    pub fn of(group: &ProcessGroup) -> Option<Loss> {
        let began = Instant::now();
        let failure = loop {
            let checked = match &group.inner.carrier {
                Carrier::Lane(lane) => lane.check("regroup", began),
                Carrier::Backend(backend) => backend.check("regroup", began),
            };
            match checked {
                Err(failure) => break failure,
                // Another thread may have the lane for a moment.
                Ok(()) if group.usage().has_failed() && began.elapsed() < HAS_LANE_WITHIN => {
                    thread::sleep(Duration::from_micros(100));
                }
                Ok(()) => return None,
            }
        };
        let cause = failure.cause()?;
        let (lost, named, all) = (cause.lost()?, cause.named(), group.ranks());
        let global = |ranks: Vec<Rank>| ranks.into_iter().filter_map(|it| all.get(it).copied());
        let (ranks, told_by) = match cause {
            _ if !lost.is_empty() => (global(lost).collect(), None),
            Cause::Reported { .. } => (BTreeSet::new(), global(named).next()),
            _ => (global(named).collect(), None),
        };
        // As the call told it that has failed, and not as those after it do.
        let first = failure.detail::<CollectiveError>().map(|it| Arc::new(it.clone()).error());
        Some(Loss { failure: first.unwrap_or(failure), ranks, told_by })
    }

    /// How long to wait for ranks that are lost. A connection that broke proves little.
    fn patience(&self) -> Duration {
        let section = self.failure.cause().map(Cause::section);
        let is_doubtful = section == Some(Section::Disconnected) || self.told_by.is_some();
        if is_doubtful { DOUBTFUL_COMES_WITHIN } else { COMES_WITHIN }
    }

    /// Whether the ranks may run on: they did not answer, or a connection broke.
    pub fn may_live(&self) -> bool {
        let Some(cause) = self.failure.cause() else { return false };
        cause.reason() == Reason::Timeout
            || matches!(
                cause.section(),
                Section::HostSilent | Section::Disconnected | Section::Unreachable
            )
    }
}

/// How long a thread may have the lane of a group that has failed.
const HAS_LANE_WITHIN: Duration = Duration::from_secs(1);

/// How long a rank waits for one that others have lost: that one may live, and be about to come.
const COMES_WITHIN: Duration = Duration::from_millis(15);

/// The same for one to which a connection broke: it sees that, too, once it writes.
const DOUBTFUL_COMES_WITHIN: Duration = Duration::from_secs(1);

/// The suspects that do not come in time.
fn absent(
    store: &dyn Store,
    suspects: &[Rank],
    came: impl Fn(Rank) -> String,
    within: Duration,
) -> Result<BTreeSet<Rank>> {
    let began = Instant::now();
    let mut absent: BTreeSet<Rank> = suspects.iter().copied().collect();
    loop {
        let is_last = began.elapsed() >= within;
        for rank in suspects {
            if absent.contains(rank) && store.check(&[&came(*rank)])? {
                absent.remove(rank);
            }
        }
        if absent.is_empty() || is_last {
            return Ok(absent);
        }
        thread::sleep(COMES_WITHIN / 5);
    }
}

/// Reads a [`list`].
fn ranks(text: &[u8]) -> BTreeSet<Rank> {
    String::from_utf8_lossy(text).split(',').filter_map(|rank| rank.parse().ok()).collect()
}

fn list(ranks: impl IntoIterator<Item = Rank>) -> String {
    let ranks: Vec<String> = ranks.into_iter().map(|rank| rank.to_string()).collect();
    ranks.join(",")
}

fn left_behind(group: &ProcessGroup, own: Rank, members: &BTreeSet<Rank>) -> Error {
    let members = list(members.iter().copied());
    let text = format!(
        "group {:?}, rank {}: the other ranks have lost this one (rank {own} of the job), and go on without it: {members}",
        group.name(),
        group.rank(),
    );
    Error::new(ErrorKind::Connect, Section::Regroup, text).of_origin(ErrorOrigin::Peer)
}

/// After `failure`: the place where they meet may have gone with the rank that has died.
fn cannot_meet(failure: &Error, error: &Error) -> Error {
    let text = format!("{failure}; and the ranks that are left cannot meet: {error}");
    failure.told_as(failure.kind(), text)
}

/// After `failure`.
fn too_few(failure: &Error, min_ranks: usize, members: &BTreeSet<Rank>) -> Error {
    let are = if members.len() == 1 { "rank is" } else { "ranks are" };
    let text = format!(
        "{} {are} left ({}), and the job needs {min_ranks} to go on (min_ranks, DRUMLINE_MIN_RANKS): {failure}",
        members.len(),
        list(members.iter().copied()),
    );
    failure.told_as(failure.kind(), text)
}
