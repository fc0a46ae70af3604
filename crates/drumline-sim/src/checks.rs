//! The properties that every job must have at its end, whatever fault struck.

use std::{cell::OnceCell, collections::BTreeSet, sync::Arc};

use drumline_engine::{Error, ErrorKind};

use crate::member::posting::Side;
use drumline_launch::{Ending, supervisor::Verdict};

use crate::{
    process::{Process, Record, RecordKind},
    scenario::FaultKind,
    simulation::Simulation,
    time::{MS, Nanos, TIMEOUT, WARN_AFTER},
    warnings::Warning,
};

/// The results of a call by rank, computed when the first rank's result is checked.
type Answers = OnceCell<Vec<Arc<Vec<u8>>>>;

impl Simulation {
    /// Checks a job that has run to its end.
    pub(crate) fn check(&self) -> Result<(), String> {
        let answers: Vec<_> = self.scenario.calls.iter().map(|_| OnceCell::new()).collect();
        for process in &self.processes {
            for record in &process.records {
                self.check_record(process, record, &answers)
                    .map_err(|problem| format!("rank {}: {problem}", process.rank))?;
            }
            self.check_poison(process)?;
        }
        self.check_that_all_hear()?;
        self.check_warnings()?;
        self.check_launchers()
    }

    fn check_record(
        &self,
        process: &Process,
        record: &Record,
        answers: &[Answers],
    ) -> Result<(), String> {
        let what = match &record.kind {
            RecordKind::Call { index, .. } => format!("{:?}", self.scenario.calls[*index]),
            RecordKind::Message { index, side, .. } => {
                format!("{side:?} of {:?}", self.scenario.messages[*index])
            }
            RecordKind::End => format!("the end of group {}", record.group),
        };
        if let RecordKind::Call { buffer: Some((own, then)), .. } = &record.kind
            && own.bytes() != then
        {
            return Err(format!("{what}: the buffer was written to after its call had ended"));
        }
        let stopped = match self.struck() {
            Some((victim, FaultKind::Slow(time))) if victim == process.rank => time,
            _ => 0,
        };
        let began = process.began(record);
        if record.blocking && record.ended - began > TIMEOUT * 11 / 10 + stopped + 100 * MS {
            let took = (record.ended - began) as f64 / 1e9;
            return Err(format!("{what}: took {took:.3} s, more than the time limit"));
        }
        match &record.error {
            None => {
                self.check_result(process, record, answers).map_err(|bad| format!("{what}: {bad}"))
            }
            Some(error) => self
                .check_error(process, record, error)
                .map_err(|bad| format!("{what}: {bad}: {error}")),
        }
    }

    fn check_result(
        &self,
        process: &Process,
        record: &Record,
        answers: &[Answers],
    ) -> Result<(), String> {
        if let RecordKind::Message { index, side, peer, bytes } = &record.kind {
            return self.check_message(process, *index, *side, *peer, bytes);
        }
        let (Some(index), Some(bytes)) = (record.call(), record.bytes()) else { return Ok(()) };
        let case = &self.scenario.calls[index].case;
        // The victim of a mismatch has no right result, nor have calls that met another call of it.
        if let Some((victim, FaultKind::Mismatch { call: wrong, with })) = self.struck()
            && self.scenario.calls[wrong].group == record.group
            && (victim == process.rank || (with.is_none() && index >= wrong))
        {
            return Ok(());
        }
        let topology = &self.scenario.groups[record.group].topology;
        let answers = answers[index].get_or_init(|| case.answers(topology));
        let defined = case.defined(process.rank, topology, bytes.len());
        match case.agree(&bytes[defined.clone()], &answers[process.rank][defined]) {
            true => Ok(()),
            false => Err("wrong result".to_owned()),
        }
    }

    /// Checks that a message is right and came once from its sender.
    fn check_message(
        &self,
        process: &Process,
        index: usize,
        side: Side,
        peer: Option<usize>,
        bytes: &[u8],
    ) -> Result<(), String> {
        let messages = &self.scenario.messages[index];
        let from = match (side, peer) {
            (Side::SendTo(to), _) if to == messages.to => process.rank,
            (Side::ReceiveFrom(from), Some(peer)) if from == peer => from,
            (Side::ReceiveFromAny, Some(peer)) => peer,
            _ => return Err(format!("a message with rank {peer:?}")),
        };
        if !messages.from.contains(&from) || bytes != messages.sent_by(from) {
            return Err(format!("a wrong message of rank {from}"));
        }
        let same = |it: &&Record| match it.kind {
            RecordKind::Message { index: of, side: and, peer: with, .. } => {
                (of, and, with) == (index, side, peer)
            }
            _ => false,
        };
        match process.records.iter().filter(same).count() {
            1 => Ok(()),
            times => Err(format!("{times} times the message of rank {from}")),
        }
    }

    /// The ranks to which the victim's failure spreads in a group: those that are linked to the
    /// victim, then those that are linked to a rank that failed before it left, and so on.
    fn in_touch_with(&self, victim: usize, group: usize) -> BTreeSet<usize> {
        let mut all = BTreeSet::from([victim]);
        let mut next = vec![victim];
        while let Some(rank) = next.pop() {
            let records = &self.processes[rank].records;
            let failure = records.iter().find(|it| it.group == group && it.error.is_some());
            if rank != victim && failure.is_none_or(|it| matches!(it.kind, RecordKind::End)) {
                continue;
            }
            let near =
                (0..self.scenario.world_size).filter(|it| self.scenario.same_host(*it, rank));
            let far = self.links.keys().filter_map(|(of, a, b)| match *of == group {
                true if *a == rank => Some(*b),
                true if *b == rank => Some(*a),
                _ => None,
            });
            next.extend(near.chain(far).filter(|it| all.insert(*it)));
        }
        all
    }

    /// Checks that after a failure every later call of the group repeats the failure.
    fn check_poison(&self, process: &Process) -> Result<(), String> {
        let mut first: Vec<Option<&Error>> = vec![None; self.scenario.groups.len()];
        // Calls and messages that end at the same time are recorded in any order.
        let mut records: Vec<&Record> = process.records.iter().collect();
        let is_poisoned = |error: &Error| error.kind() == ErrorKind::Poisoned;
        records.sort_by_key(|it| (it.ended, it.error.as_ref().map(is_poisoned)));
        for Record { group, error, .. } in records {
            match (first[*group], error) {
                (None, Some(error))
                    if is_poisoned(error) && !self.was_aborted(process.rank, *group) =>
                {
                    return Err(format!("rank {}: poisoned by nothing", process.rank));
                }
                (None, error) => first[*group] = error.as_ref(),
                (Some(_), Some(error)) if is_poisoned(error) => {}
                (Some(_), other) => {
                    return Err(format!(
                        "rank {}: a call on a poisoned group gave {other:?}",
                        process.rank
                    ));
                }
            }
        }
        Ok(())
    }

    fn was_aborted(&self, rank: usize, group: usize) -> bool {
        matches!(
            self.struck(),
            Some((victim, FaultKind::Abort { group: of })) if victim == rank && of == group
        )
    }

    /// Checks that the other ranks learn of the fault if the victim cannot go on.
    fn check_that_all_hear(&self) -> Result<(), String> {
        let Some((victim, fault)) = self.struck() else { return self.check_complete() };
        let leaving = self.fault.as_ref().map(|(_, leaving)| &leaving[..]).unwrap_or_default();
        let left = |group: usize| leaving.get(group).copied().unwrap_or(false);
        let groups: Vec<usize> = match fault {
            FaultKind::Crash => (0..self.scenario.groups.len()).filter(|it| !left(*it)).collect(),
            // Ranks that no longer need the victim do not learn of its fault.
            FaultKind::Slow(time) if time > TIMEOUT => vec![],
            FaultKind::Slow(_) => return self.check_complete(),
            FaultKind::Abort { group } if !left(group) => vec![group],
            FaultKind::Mismatch { .. } => {
                // If the call needs no answer, a single rank may notice the mismatch, and only at the end.
                let any = self.processes.iter().any(|it| it.groups.iter().any(|it| it.failed));
                return if any { Ok(()) } else { Err("nobody noticed the mismatch".to_owned()) };
            }
            FaultKind::Abort { .. }
            | FaultKind::LostConnection { .. }
            | FaultKind::SilentHost(_) => vec![],
        };
        for group in groups {
            // The remaining ranks have never needed any of these ranks, so they need not learn of it.
            for rank in self.in_touch_with(victim, group) {
                let process = &self.processes[rank];
                let by_itself = matches!(process.ended, Some((_, Ending::Code(0 | 1))));
                let gave_up =
                    !self.scenario.goes_on && process.groups.iter().any(|state| state.failed);
                // Other ranks may have linked to this one after it left.
                let left_before = process.records.iter().any(|it| {
                    it.group == group
                        && matches!(it.kind, RecordKind::End)
                        && it.error.is_none()
                        && self.fault.as_ref().is_some_and(|(struck, _)| it.ended <= *struck)
                });
                let has_heard = left_before || process.groups[group].failed;
                if by_itself && !gave_up && !has_heard {
                    return Err(format!(
                        "rank {} has not heard that rank {victim} failed in group {group}",
                        process.rank
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that every rank has run its whole program without an error.
    pub(crate) fn check_complete(&self) -> Result<(), String> {
        for process in &self.processes {
            let all = process.groups.iter().all(|state| state.closed && !state.failed);
            if !all || !matches!(process.ended, Some((_, Ending::Code(0)))) {
                return Err(format!("rank {} has not done everything", process.rank));
            }
        }
        Ok(())
    }

    /// Checks that ranks which wait long for a stopped rank warn, and that warnings name it.
    fn check_warnings(&self) -> Result<(), String> {
        let Some((victim, FaultKind::Slow(_))) = self.struck() else { return Ok(()) };
        for process in self.processes.iter().filter(|it| it.rank != victim) {
            let waits = |it: &&Record| match it.kind {
                RecordKind::Call { .. } => it.blocking,
                RecordKind::Message { .. } => true,
                RecordKind::End => false,
            };
            for record in process.records.iter().filter(waits) {
                // Unlike calls, messages do not queue behind each other.
                let began = match record.kind {
                    RecordKind::Call { .. } => process.began(record),
                    _ => record.started,
                };
                let waited = record.ended - began > WARN_AFTER + 100 * MS;
                let said = |warning: &Warning| {
                    warning.rank == process.rank && warning.group == record.group.to_string()
                };
                if waited && !self.warnings.iter().any(said) {
                    return Err(format!("rank {} did not warn of late ranks", process.rank));
                }
            }
        }
        let Some((struck, _)) = self.fault else { return Ok(()) };
        let stopped = struck..self.processes[victim].stopped_until;
        for warning in &self.warnings {
            let meanwhile =
                stopped.contains(&warning.at) && warning.at - WARN_AFTER >= stopped.start;
            let group = warning.group.parse().map_err(|_| "a warning of an unknown group")?;
            let to_blame = |rank: &usize| *rank == victim || self.waited_elsewhere(*rank, group);
            // A call that ended while the victim was stopped waited for a slow network instead.
            let by_itself = self.processes[warning.rank].records.iter().any(|it| {
                it.group == group
                    && it.error.is_none()
                    && it.started <= warning.at
                    && (warning.at..stopped.end).contains(&it.ended)
            });
            // A receive from any rank may wait for every rank.
            let of_any = |of: usize, side: &Side| of == group && *side == Side::ReceiveFromAny;
            let warned = &self.processes[warning.rank];
            let from_any = warned.records.iter().any(|it| match &it.kind {
                RecordKind::Message { side, .. } => {
                    of_any(it.group, side) && (it.started..=it.ended).contains(&warning.at)
                }
                _ => false,
            }) || warned
                .abandoned
                .iter()
                .any(|(of, side, started)| of_any(*of, side) && *started <= warning.at);
            let waits = meanwhile && !by_itself && !from_any;
            if warning.rank != victim && waits && !warning.late.iter().all(to_blame) {
                return Err(format!("only rank {victim} is late: {warning:?}"));
            }
        }
        Ok(())
    }

    fn check_launchers(&self) -> Result<(), String> {
        for (ranks, supervisor) in &self.launchers {
            let failed = match supervisor.verdict() {
                Some(Verdict::Success) => None,
                Some(Verdict::Failed { worker }) => Some(ranks[worker]),
                other => return Err(format!("a launcher says {other:?}")),
            };
            match self.struck() {
                None if failed.is_some() => {
                    return Err(format!("a launcher blames rank {failed:?} for nothing"));
                }
                Some((victim, FaultKind::Crash))
                    if ranks.contains(&victim) && failed != Some(victim) =>
                {
                    return Err(format!("a launcher blames {failed:?}, not rank {victim}"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Process {
    /// When a call's time limit began: when the calls before it in its group had ended.
    fn began(&self, record: &Record) -> Nanos {
        let before = self.records.iter().filter(|it| {
            it.group == record.group && it.started <= record.started && it.ended < record.ended
        });
        before.map(|it| it.ended).chain([record.started]).max().unwrap_or_default()
    }
}
