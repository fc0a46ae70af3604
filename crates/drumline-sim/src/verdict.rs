//! What must hold after every job, whatever went wrong in it.

use std::{cell::OnceCell, collections::BTreeSet, sync::Arc};

use drumline_engine::{Cause, CollectiveError, Error};

use crate::member::Side;
use drumline_launch::{Ending, supervisor::Verdict};

use crate::{
    message::Messages,
    network::Nanos,
    plan::{FaultKind, MS, TIMEOUT, WARN_AFTER},
    process::{Process, Record, What},
    simulation::Simulation,
};

/// What a call must give each rank, once anybody has asked.
type Answers = OnceCell<Vec<Arc<Vec<u8>>>>;

impl Simulation {
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub(crate) fn check(&self) -> Result<(), String> {
        let answers: Vec<_> = self.plan.calls.iter().map(|_| OnceCell::new()).collect();
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

    /// The fault, if it has struck.
    fn struck(&self) -> Option<(usize, FaultKind)> {
        let fault = self.plan.fault?;
        let always = matches!(fault.kind, FaultKind::Mismatch { .. });
        (always || self.fault.is_some()).then_some((fault.victim, fault.kind))
    }

    fn check_record(
        &self,
        process: &Process,
        record: &Record,
        answers: &[Answers],
    ) -> Result<(), String> {
        let what = match &record.what {
            What::Call { index, .. } => format!("{:?}", self.plan.calls[*index]),
            What::Message { index, side, .. } => {
                format!("{side:?} of {:?}", self.plan.messages[*index])
            }
            What::End => format!("the end of group {}", record.group),
        };
        if let What::Call { buffer: Some((collective, then)), .. } = &record.what
            && collective.bytes() != then
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
        if let What::Message { index, side, peer, bytes } = &record.what {
            return self.check_message(process, *index, *side, *peer, bytes);
        }
        let (Some(index), Some(bytes)) = (record.call(), record.bytes()) else { return Ok(()) };
        let case = &self.plan.calls[index].case;
        // Who calls something else, and calls that met one of its others, have no right result.
        if let Some((victim, FaultKind::Mismatch { call: wrong, with })) = self.struck()
            && self.plan.calls[wrong].group == record.group
            && (victim == process.rank || (with.is_none() && index >= wrong))
        {
            return Ok(());
        }
        let topology = &self.plan.groups[record.group].topology;
        let answers = answers[index].get_or_init(|| case.answers(topology));
        match case.agree(bytes, &answers[process.rank]) {
            true => Ok(()),
            false => Err("wrong result".to_owned()),
        }
    }

    /// Whether a message was the right one, of each rank once.
    fn check_message(
        &self,
        process: &Process,
        index: usize,
        side: Side,
        peer: Option<usize>,
        bytes: &[u8],
    ) -> Result<(), String> {
        let messages = &self.plan.messages[index];
        let from = match (side, peer) {
            (Side::SendTo(to), _) if to == messages.to => process.rank,
            (Side::ReceiveFrom(from), Some(peer)) if from == peer => from,
            (Side::ReceiveFromAny, Some(peer)) => peer,
            _ => return Err(format!("a message with rank {peer:?}")),
        };
        if !messages.from.contains(&from) || bytes != messages.sent_by(from) {
            return Err(format!("a wrong message of rank {from}"));
        }
        let same = |it: &&Record| match it.what {
            What::Message { index: of, side: and, peer: with, .. } => {
                (of, and, with) == (index, side, peer)
            }
            _ => false,
        };
        match process.records.iter().filter(same).count() {
            1 => Ok(()),
            times => Err(format!("{times} times the message of rank {from}")),
        }
    }

    /// Whether an error may be, and blames whom it should.
    fn check_error(&self, process: &Process, record: &Record, error: &Error) -> Result<(), String> {
        let group = record.group;
        let Some((victim, fault)) = self.struck() else {
            return Err("an error although nothing is wrong".to_owned());
        };
        let rank = process.rank;
        let error = match error {
            Error::Collective(error) => error,
            Error::Poisoned { by, .. } => by,
            _ => return Err("an error of the wrong kind".to_owned()),
        };
        let mut guilty: BTreeSet<usize> = match fault {
            FaultKind::SilentHost(_) => {
                let inside = self.plan.same_host(rank, victim);
                let ranks = 0..self.plan.world_size;
                ranks.filter(|other| self.plan.same_host(*other, victim) != inside).collect()
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
        // Whoever has failed in another group may have left this one for that.
        let elsewhere = |it: &&Process| {
            self.plan.groups.len() > 1
                && !self.plan.goes_on
                && it.ended.is_some()
                && it.lanes.iter().enumerate().any(|(at, lane)| at != group && lane.failed)
        };
        guilty.extend(self.processes.iter().filter(elsewhere).map(|it| it.rank));
        // A launcher ends what is left of a job.
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
                // Of a time limit that has passed, only those that did not answer are blamed.
                let blamed = text.split("without an answer from rank").last().unwrap_or(text);
                let blamed = match blamed.split_once("nobody is left to send; ") {
                    Some((_, gone)) => gone,
                    None => blamed.split(';').next().unwrap_or(blamed),
                };
                let numbers = blamed.split(|it: char| !it.is_ascii_digit());
                let ranks = numbers.filter_map(|it| it.parse().ok());
                ranks.filter(|rank| *rank < self.plan.world_size).collect()
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
        let chain = matches!(&error.cause, Cause::Timeout { .. })
            || matches!(&error.cause, Cause::Reported { text, .. } if text.contains("time limit"));
        let lost = matches!(fault, FaultKind::LostConnection { .. });
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
        // Who omits a call, and then waits for a message of a rank that waits for it in that call, cannot
        // know better.
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

    /// Whether a receive from any rank is right to fail because all others are gone, which are these.
    ///
    /// Who leaves in good order has sent all that it was to send. So one of those whose messages
    /// are missing must have failed, and ended before it could tell, or be cut off.
    fn check_nobody_left(
        &self,
        process: &Process,
        record: &Record,
        gone: &[usize],
    ) -> Result<(), String> {
        let Record { group, ended: at, .. } = *record;
        let others = (0..self.plan.world_size).filter(|it| *it != process.rank);
        if !others.eq(gone.iter().copied().collect::<BTreeSet<_>>()) {
            return Err(format!("only {gone:?} are gone"));
        }
        let is_cut_off = |rank: usize| match self.struck() {
            Some((victim, FaultKind::SilentHost(_))) => {
                self.plan.same_host(rank, victim) != self.plan.same_host(process.rank, victim)
            }
            _ => false,
        };
        let is_gone = |rank: &usize| {
            let Process { ended, lanes, .. } = &self.processes[*rank];
            let moments = [lanes[group].closing_since, ended.map(|(at, _)| at)];
            is_cut_off(*rank) || moments.into_iter().flatten().any(|since| since <= at)
        };
        if let Some(stays) = gone.iter().find(|rank| !is_gone(rank)) {
            return Err(format!("rank {stays} is still there"));
        }
        let came = |index: usize, from: usize| {
            process.records.iter().any(|it| match it.what {
                What::Message { index: of, peer, .. } => {
                    it.error.is_none() && (of, peer) == (index, Some(from))
                }
                _ => false,
            })
        };
        let has_failed = |rank: usize| {
            let Process { ended, lanes, .. } = &self.processes[rank];
            let in_trouble = !matches!(ended, Some((_, Ending::Code(0))) | None);
            lanes[group].failed || in_trouble || is_cut_off(rank)
        };
        let messages = self.plan.messages.iter().enumerate();
        let mut missing = messages
            .filter(|(_, it)| (it.group, it.to, it.any) == (group, process.rank, true))
            .flat_map(|(index, it)| it.from.iter().filter(move |from| !came(index, **from)));
        match missing.any(|from| has_failed(*from)) {
            true => Ok(()),
            false => Err("says that nobody is left to send although all have sent".to_owned()),
        }
    }

    /// Whether `error` says that a rank is gone which has failed itself, and ended before it was
    /// connected with whoever says so: then nobody is there who could tell why.
    fn could_tell_nobody(&self, rank: usize, group: usize, error: &CollectiveError) -> bool {
        let process = &self.processes[rank];
        let mut failures =
            process.records.iter().filter(|it| it.group == group && it.error.is_some());
        let (Some(failed), true) = (failures.next(), process.ended.is_some()) else { return false };
        let text = error.to_string();
        let connected_later = self.bundles.iter().any(|((of, a, b), agreed)| {
            *of == group && (*a == rank || *b == rank) && *agreed >= failed.ended
        });
        text.contains(&format!("cannot connect to rank {rank} "))
            || (text.contains(&format!("the process of rank {rank} has ended")) && connected_later)
    }

    /// Those that are connected in a group with a rank that fails, or with one that fails because
    /// of it before it has said goodbye, and so on.
    fn in_touch_with(&self, victim: usize, group: usize) -> BTreeSet<usize> {
        let mut all = BTreeSet::from([victim]);
        let mut next = vec![victim];
        while let Some(rank) = next.pop() {
            let records = &self.processes[rank].records;
            let failure = records.iter().find(|it| it.group == group && it.error.is_some());
            if rank != victim && failure.is_none_or(|it| matches!(it.what, What::End)) {
                continue;
            }
            let near = (0..self.plan.world_size).filter(|it| self.plan.same_host(*it, rank));
            let far = self.bundles.keys().filter_map(|(of, a, b)| match *of == group {
                true if *a == rank => Some(*b),
                true if *b == rank => Some(*a),
                _ => None,
            });
            next.extend(near.chain(far).filter(|it| all.insert(*it)));
        }
        all
    }

    /// Whether a rank has waited in another group than this one. It is late here, and nobody here
    /// can know why: the connections of a group speak of that group alone.
    fn waited_elsewhere(&self, rank: usize, group: usize) -> bool {
        let process = &self.processes[rank];
        let long = |it: &Record| it.group != group && it.ended - it.started >= WARN_AFTER / 2;
        // The call in which a process is killed is in no record.
        let killed = matches!(process.ended, Some((_, Ending::Signal { .. })));
        self.plan.groups.len() > 1 && (killed || process.records.iter().any(long))
    }

    /// Whether a rank sends or receives any in that group.
    fn has_messages(&self, rank: usize, group: usize) -> bool {
        let takes_part = |it: &Messages| it.to == rank || it.from.contains(&rank);
        self.plan.messages.iter().any(|it| it.group == group && takes_part(it))
    }

    /// Whether the victim omits the last call, and so leaves while all others wait for it.
    fn victim_leaves_early(&self) -> bool {
        let Some((_, FaultKind::Mismatch { call, with: None })) = self.struck() else {
            return false;
        };
        // It may still wait for messages.
        let leaves = self.plan.messages.is_empty();
        leaves && self.plan.groups.len() == 1 && call + 1 == self.plan.calls.len()
    }

    /// After a failure every later call repeats it.
    fn check_poison(&self, process: &Process) -> Result<(), String> {
        let mut first: Vec<Option<&Error>> = vec![None; self.plan.groups.len()];
        // Messages and a call that end together are found out one after the other.
        let mut records: Vec<&Record> = process.records.iter().collect();
        records.sort_by_key(|it| {
            let turn = match it.error {
                None => 0,
                Some(Error::Poisoned { .. }) => 2,
                Some(_) => 1,
            };
            (it.ended, turn)
        });
        for Record { group, error, .. } in records {
            match (first[*group], error) {
                (None, Some(Error::Poisoned { .. })) if !self.was_aborted(process.rank, *group) => {
                    return Err(format!("rank {}: poisoned by nothing", process.rank));
                }
                (None, error) => first[*group] = error.as_ref(),
                (Some(_), Some(Error::Poisoned { .. })) => {}
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

    /// Where a rank cannot go on, every rank must learn of it.
    fn check_that_all_hear(&self) -> Result<(), String> {
        let Some((victim, fault)) = self.struck() else { return self.check_complete() };
        let leaving = self.fault.as_ref().map(|(_, leaving)| &leaving[..]).unwrap_or_default();
        let left = |group: usize| leaving.get(group).copied().unwrap_or(false);
        let groups: Vec<usize> = match fault {
            FaultKind::Crash => (0..self.plan.groups.len()).filter(|it| !left(*it)).collect(),
            // Whoever never needed it again has heard nothing.
            FaultKind::Slow(time) if time > TIMEOUT => vec![],
            FaultKind::Slow(_) => return self.check_complete(),
            FaultKind::Abort { group } if !left(group) => vec![group],
            FaultKind::Mismatch { .. } => {
                // A call that needs no answer may be found wrong only at the end, by one rank.
                let any = self.processes.iter().any(|it| it.lanes.iter().any(|it| it.failed));
                return if any { Ok(()) } else { Err("nobody noticed the mismatch".to_owned()) };
            }
            FaultKind::Abort { .. }
            | FaultKind::LostConnection { .. }
            | FaultKind::SilentHost(_) => vec![],
        };
        for group in groups {
            // Whoever has never needed one of these has heard nothing, and need not.
            for rank in self.in_touch_with(victim, group) {
                let process = &self.processes[rank];
                let by_itself = matches!(process.ended, Some((_, Ending::Code(0 | 1))));
                let gave_up = !self.plan.goes_on && process.lanes.iter().any(|lane| lane.failed);
                // Connections of others may have come since.
                let left_before = process.records.iter().any(|it| {
                    it.group == group
                        && matches!(it.what, What::End)
                        && it.error.is_none()
                        && self.fault.as_ref().is_some_and(|(struck, _)| it.ended <= *struck)
                });
                let has_heard = left_before || process.lanes[group].failed;
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

    /// Nothing is left undone.
    pub(crate) fn check_complete(&self) -> Result<(), String> {
        for process in &self.processes {
            let all = process.lanes.iter().all(|lane| lane.closed && !lane.failed);
            if !all || !matches!(process.ended, Some((_, Ending::Code(0)))) {
                return Err(format!("rank {} has not done everything", process.rank));
            }
        }
        Ok(())
    }

    /// Who waits for a stopped rank says so, and somebody names it.
    fn check_warnings(&self) -> Result<(), String> {
        let Some((victim, FaultKind::Slow(_))) = self.struck() else { return Ok(()) };
        for process in self.processes.iter().filter(|it| it.rank != victim) {
            let waits = |it: &&Record| match it.what {
                What::Call { .. } => it.blocking,
                What::Message { .. } => true,
                What::End => false,
            };
            for record in process.records.iter().filter(waits) {
                // Messages do not wait for their turn.
                let began = match record.what {
                    What::Call { .. } => process.began(record),
                    _ => record.started,
                };
                let waited = record.ended - began > WARN_AFTER + 100 * MS;
                let said = |warning: &crate::warnings::Warning| {
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
            // What came to its end while the victim was stopped did not wait for it: the network is
            // slow.
            let by_itself = self.processes[warning.rank].records.iter().any(|it| {
                it.group == group
                    && it.error.is_none()
                    && it.started <= warning.at
                    && (warning.at..stopped.end).contains(&it.ended)
            });
            // What is received from any rank may come from each.
            let of_any = |of: usize, side: &Side| of == group && *side == Side::ReceiveFromAny;
            let warned = &self.processes[warning.rank];
            let from_any = warned.records.iter().any(|it| match &it.what {
                What::Message { side, .. } => {
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
    /// When its time began: when those before it in its group had ended.
    fn began(&self, record: &Record) -> Nanos {
        let before = self.records.iter().filter(|it| {
            it.group == record.group && it.started <= record.started && it.ended < record.ended
        });
        before.map(|it| it.ended).chain([record.started]).max().unwrap_or_default()
    }
}

/// The ranks that the text of a time-out, of this or another rank, says are late.
fn late_in(text: &str) -> Vec<usize> {
    let list = text.split("without an answer from rank").nth(1).and_then(|it| it.split(';').next());
    let numbers = list.into_iter().flat_map(|it| it.split(|it: char| !it.is_ascii_digit()));
    numbers.filter_map(|number| number.parse().ok()).collect()
}
