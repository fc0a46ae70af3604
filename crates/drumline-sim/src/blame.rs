//! Which errors a fault may cause, and which ranks the errors must blame.

use std::collections::BTreeSet;

use drumline_engine::{Cause, CollectiveError, Error, Reason};
use drumline_launch::Ending;

use crate::{
    messages::Messages,
    process::{Process, Record, RecordKind},
    scenario::FaultKind,
    simulation::Simulation,
    time::{TIMEOUT, WARN_AFTER},
};

impl Simulation {
    /// The fault, if it has struck.
    pub(crate) fn struck(&self) -> Option<(usize, FaultKind)> {
        let fault = self.scenario.fault?;
        let always = matches!(fault.kind, FaultKind::Mismatch { .. });
        (always || self.fault.is_some()).then_some((fault.victim, fault.kind))
    }

    /// Checks that the fault explains an error, and that the error blames a rank at fault.
    pub(crate) fn check_error(
        &self,
        process: &Process,
        record: &Record,
        error: &Error,
    ) -> Result<(), String> {
        let group = record.group;
        let Some((victim, fault)) = self.struck() else {
            return Err("an error although nothing is wrong".to_owned());
        };
        let rank = process.rank;
        let error =
            error.detail::<CollectiveError>().ok_or("an error of the wrong kind".to_owned())?;
        let mut guilty: BTreeSet<usize> = match fault {
            FaultKind::SilentHost(_) => {
                let inside = self.scenario.same_host(rank, victim);
                let ranks = 0..self.scenario.world_size;
                ranks.filter(|other| self.scenario.same_host(*other, victim) != inside).collect()
            }
            FaultKind::LostConnection { peer, .. } => [victim, peer].into(),
            FaultKind::Crash
            | FaultKind::Slow(_)
            | FaultKind::Mismatch { .. }
            | FaultKind::Abort { .. } => [victim].into(),
        };
        if matches!(fault, FaultKind::Slow(time) if time < TIMEOUT) {
            return Err("an error although nobody is slower than the time limit".to_owned());
        }
        // A rank that failed in another group may have ended, and so left this group.
        let elsewhere = |it: &&Process| {
            self.scenario.groups.len() > 1
                && !self.scenario.goes_on
                && it.ended.is_some()
                && it.groups.iter().enumerate().any(|(at, state)| at != group && state.failed)
        };
        guilty.extend(self.processes.iter().filter(elsewhere).map(|it| it.rank));
        // A launcher ends the remaining processes of a job.
        let ended = |it: &&Process| {
            matches!(it.ended, Some((_, Ending::Signal { number: 15 | 9, .. })))
                && it.rank != victim
        };
        guilty.extend(self.processes.iter().filter(ended).map(|it| it.rank));

        let named: Vec<usize> = match &error.cause {
            Cause::PeerExited { peer }
            | Cause::PeerLeft { peer }
            | Cause::HostSilent { peer }
            | Cause::Unreachable { peer, .. }
            | Cause::Disconnected { peer, .. } => vec![*peer],
            Cause::NobodyLeft { left, unreachable } => {
                let ended = unreachable.iter().map(|(peer, _)| *peer);
                let gone: Vec<usize> = left.iter().copied().chain(ended).collect();
                self.check_nobody_left(process, record, &gone)?;
                gone
            }
            Cause::Protocol { .. } => return Err("a protocol error".to_owned()),
            Cause::Reported { culprit: Some(culprit), .. } => vec![*culprit],
            Cause::Reported { culprit: None, text, .. } => {
                // A time-out blames only the ranks that did not answer.
                let blamed = text.split("without an answer from rank").last().unwrap_or(text);
                let blamed = match blamed.split_once("nobody is left to send; ") {
                    Some((_, gone)) => gone,
                    None => blamed.split(';').next().unwrap_or(blamed),
                };
                let numbers = blamed.split(|it: char| !it.is_ascii_digit());
                let ranks = numbers.filter_map(|it| it.parse().ok());
                ranks.filter(|rank| *rank < self.scenario.world_size).collect()
            }
            Cause::Timeout { waiting_for } => waiting_for.clone(),
            Cause::Mismatch { .. } if !matches!(fault, FaultKind::Mismatch { .. }) => {
                return Err("a mismatch although all call the same".to_owned());
            }
            Cause::Mismatch { .. } if rank == victim => return Ok(()),
            Cause::Mismatch { peer, .. } => vec![*peer],
            Cause::Aborted => vec![rank],
            other => return Err(format!("an unknown cause {other:?}")),
        };
        let chain = error.cause.reason() == Reason::Timeout;
        let lost = matches!(fault, FaultKind::LostConnection { .. });
        // On a host, only the end of a process breaks connections.
        if let Cause::PeerExited { peer } = error.cause
            && !self.scenario.same_host(rank, peer)
            && self.processes[peer].ended.is_none_or(|(at, _)| at > record.ended)
        {
            return Err(format!("says that rank {peer} has ended, which lives"));
        }
        if !lost && error.to_string().contains(" broke: ") {
            return Err("a broken connection although none broke by itself".to_owned());
        }
        if chain && self.victim_leaves_early() {
            return Err("waits in vain for a rank that has left".to_owned());
        }
        let late = named.iter().copied().chain(late_in(&error.to_string()));
        if chain && late.into_iter().any(|it| self.waited_elsewhere(it, group)) {
            return Ok(());
        }
        // The victim omits a call and waits for a message. The sender waits for the victim in that
        // call, so the victim blames the sender.
        let omits = matches!(fault, FaultKind::Mismatch { with: None, .. });
        if omits && chain && rank == victim && self.has_messages(victim, group) {
            return Ok(());
        }
        let told_by_victim = match &error.cause {
            Cause::PeerLeft { .. } | Cause::Unreachable { .. } => rank == victim,
            Cause::Reported { text, .. } => text.contains(&format!("rank {victim}:")),
            _ => false,
        };
        if named.iter().any(|it| self.could_tell_nobody(*it, group, error)) {
            return Ok(());
        }
        let own_view = matches!(fault, FaultKind::Mismatch { .. }) && told_by_victim;
        match own_view || named.iter().any(|rank| guilty.contains(rank)) {
            true => Ok(()),
            false => Err(format!("blames {named:?} where {guilty:?} are at fault")),
        }
    }

    /// Checks a receive from any rank that failed because all other ranks, `gone`, had left or ended.
    ///
    /// A rank that leaves without an error has sent all its messages. So of the ranks whose messages are
    /// missing, at least one failed and ended before it could report the failure, or was cut off.
    fn check_nobody_left(
        &self,
        process: &Process,
        record: &Record,
        gone: &[usize],
    ) -> Result<(), String> {
        let Record { group, ended: at, .. } = *record;
        let others = (0..self.scenario.world_size).filter(|it| *it != process.rank);
        if !others.eq(gone.iter().copied().collect::<BTreeSet<_>>()) {
            return Err(format!("only {gone:?} are gone"));
        }
        let is_cut_off = |rank: usize| match self.struck() {
            Some((victim, FaultKind::SilentHost(_))) => {
                self.scenario.same_host(rank, victim)
                    != self.scenario.same_host(process.rank, victim)
            }
            _ => false,
        };
        let is_gone = |rank: &usize| {
            let Process { ended, groups, .. } = &self.processes[*rank];
            let moments = [groups[group].closing_since, ended.map(|(at, _)| at)];
            is_cut_off(*rank) || moments.into_iter().flatten().any(|since| since <= at)
        };
        if let Some(stays) = gone.iter().find(|rank| !is_gone(rank)) {
            return Err(format!("rank {stays} is still there"));
        }
        let came = |index: usize, from: usize| {
            process.records.iter().any(|it| match it.kind {
                RecordKind::Message { index: of, peer, .. } => {
                    it.error.is_none() && (of, peer) == (index, Some(from))
                }
                _ => false,
            })
        };
        let has_failed = |rank: usize| {
            let Process { ended, groups, .. } = &self.processes[rank];
            let in_trouble = !matches!(ended, Some((_, Ending::Code(0))) | None);
            groups[group].failed || in_trouble || is_cut_off(rank)
        };
        let messages = self.scenario.messages.iter().enumerate();
        let mut missing = messages
            .filter(|(_, it)| (it.group, it.to, it.any) == (group, process.rank, true))
            .flat_map(|(index, it)| it.from.iter().filter(move |from| !came(index, **from)));
        match missing.any(|from| has_failed(*from)) {
            true => Ok(()),
            false => Err("says that nobody is left to send although all have sent".to_owned()),
        }
    }

    /// Whether `error` says that `rank` is gone, and `rank` had failed and ended before it was linked to the
    /// rank that reports the error. In that case it could not report its failure.
    fn could_tell_nobody(&self, rank: usize, group: usize, error: &CollectiveError) -> bool {
        let process = &self.processes[rank];
        let mut failures =
            process.records.iter().filter(|it| it.group == group && it.error.is_some());
        let (Some(failed), true) = (failures.next(), process.ended.is_some()) else { return false };
        let text = error.to_string();
        let connected_later = self.links.iter().any(|((of, a, b), agreed)| {
            *of == group && (*a == rank || *b == rank) && *agreed >= failed.ended
        });
        text.contains(&format!("cannot connect to rank {rank} "))
            || (text.contains(&format!("the process of rank {rank} has ended")) && connected_later)
    }

    /// Whether a rank has waited long in another group. It is late in this group, where no rank can
    /// know why: the links of a group carry failures of that group alone.
    pub(crate) fn waited_elsewhere(&self, rank: usize, group: usize) -> bool {
        let process = &self.processes[rank];
        let long = |it: &Record| it.group != group && it.ended - it.started >= WARN_AFTER / 2;
        // A killed process has no record of its last call.
        let killed = matches!(process.ended, Some((_, Ending::Signal { .. })));
        self.scenario.groups.len() > 1 && (killed || process.records.iter().any(long))
    }

    /// Whether a rank sends or receives messages in a group.
    fn has_messages(&self, rank: usize, group: usize) -> bool {
        let takes_part = |it: &Messages| it.to == rank || it.from.contains(&rank);
        self.scenario.messages.iter().any(|it| it.group == group && takes_part(it))
    }

    /// Whether the victim omits the last call, and so leaves while all other ranks wait for it.
    fn victim_leaves_early(&self) -> bool {
        let Some((_, FaultKind::Mismatch { call, with: None })) = self.struck() else {
            return false;
        };
        // With messages, the victim may still wait.
        let leaves = self.scenario.messages.is_empty();
        leaves && self.scenario.groups.len() == 1 && call + 1 == self.scenario.calls.len()
    }
}

/// The late ranks in the text of a time-out, which may have happened on another rank.
fn late_in(text: &str) -> Vec<usize> {
    let list = text.split("without an answer from rank").nth(1).and_then(|it| it.split(';').next());
    let numbers = list.into_iter().flat_map(|it| it.split(|it: char| !it.is_ascii_digit()));
    numbers.filter_map(|number| number.parse().ok()).collect()
}
