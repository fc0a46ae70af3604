//! Runs a program on one rank.

use std::collections::{BTreeMap, VecDeque};

use drumline::{ErrorKind, GroupOptions, ProcessGroup};
use drumline_schedule::step::Rank;
use fastrand::Rng;

use super::script::{Action, Script};
use crate::{
    on_group::{Form, UnderWay, begin, compare, perform},
    wait::Wait,
};

pub(super) struct Performer<'p> {
    script: &'p Script,
    /// The rank's number in the world.
    me: Rank,
    /// The groups of which this rank is a member, by their index in [`Script::groups`].
    groups: BTreeMap<usize, ProcessGroup>,
    under_way: Vec<Begun<'p>>,
    rng: Rng,
    trace: bool,
}

/// An action that has begun and was not awaited yet.
struct Begun<'p> {
    round: usize,
    action: &'p Action,
    end: UnderWay<()>,
}

impl<'p> Performer<'p> {
    pub(super) fn new(
        script: &'p Script,
        seed: u64,
        world: &ProcessGroup,
        trace: bool,
    ) -> Performer<'p> {
        let me = world.rank();
        let of_rank = (me as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let rng = Rng::with_seed(seed ^ of_rank);
        let groups = BTreeMap::from([(0, world.clone())]);
        Performer { script, me, groups, under_way: Vec::new(), rng, trace }
    }

    /// Ends all groups but the world, which the caller ends.
    pub(super) fn perform(mut self) -> Result<(), String> {
        let done = self.rounds().and_then(|()| self.end_all());
        if done.is_err() {
            // Lets the other ranks fail, so that they do not wait for this one.
            self.groups.values().for_each(ProcessGroup::abort);
        }
        done
    }

    fn rounds(&mut self) -> Result<(), String> {
        for (number, round) in self.script.rounds.iter().enumerate() {
            let mut queues = BTreeMap::<_, VecDeque<(&Action, bool)>>::new();
            for (at, action) in round.iter().enumerate() {
                if self.groups.contains_key(&action.group()) {
                    queues.entry(action.queue()).or_default().push_back((action, at == 0));
                }
            }
            while !queues.is_empty() {
                // All ranks have begun the earlier rounds, so any of their actions can be awaited.
                if self.rng.u8(0..4) == 0 {
                    self.await_one(|begun| begun.round < number)?;
                }
                let keys: Vec<_> = queues.keys().copied().collect();
                let key = keys[self.rng.usize(0..keys.len())];
                match queues.get_mut(&key).and_then(VecDeque::pop_front) {
                    Some((action, may_block)) => self.take_part(number, action, may_block)?,
                    None => drop(queues.remove(&key)),
                }
            }
            for _ in 0..self.rng.usize(0..=self.under_way.len()) {
                self.await_one(|_| true)?;
            }
        }
        Ok(())
    }

    fn take_part(
        &mut self,
        round: usize,
        action: &'p Action,
        may_block: bool,
    ) -> Result<(), String> {
        let blocks = may_block && self.rng.bool();
        self.tell(round, if blocks { "does" } else { "begins" }, action);
        let group = &self.groups[&action.group()];
        let begun = match action {
            Action::NewGroup { ranks, keep_order, made, .. } => {
                let is_member = ranks.contains(&group.rank());
                // Ranks that are no members need not call.
                match is_member || blocks {
                    true => new_group(group, ranks, *keep_order)
                        .and_then(|new| self.join(&[*made], new))
                        .map(|()| None),
                    false => Ok(None),
                }
            }
            Action::Split { colors, keys, made, .. } => {
                let rank = group.rank();
                let new = group.split(colors[rank], keys[rank], &GroupOptions::default());
                new.map_err(|error| error.to_string())
                    .and_then(|new| self.join(made, new))
                    .map(|()| None)
            }
            Action::End { group } => self.end(*group).map(|()| None),
            Action::Call { case, registered, .. } if blocks => {
                let form = match registered {
                    true => Form::Registered,
                    false => Form::Blocking,
                };
                let (rank, size) = (group.rank(), group.world_size());
                perform(case, form, group)
                    .and_then(|found| compare(case, rank, size, &found))
                    .map(|()| None)
            }
            Action::Call { case, registered, .. } => {
                let (rank, size) = (group.rank(), group.world_size());
                let case = *case;
                begin(&case, *registered, group).map(|call| {
                    let end: UnderWay<()> =
                        Box::new(move |wait| compare(&case, rank, size, &call(wait)?));
                    Some(end)
                })
            }
            // A rank that sends to itself must not wait for the end of the send.
            Action::Messages { messages, .. }
                if blocks && !messages.from.contains(&messages.to) =>
            {
                messages.perform(group).map(|()| None)
            }
            Action::Messages { messages, .. } => messages.begin(group).map(Some),
        };
        let begun = begun.map_err(|problem| self.problem(round, action, &problem))?;
        self.under_way.extend(begun.map(|end| Begun { round, action, end }));
        Ok(())
    }

    /// Adds the new group. It must be the group of `made` that has this rank as a member, if there is one.
    fn join(&mut self, made: &[usize], new: Option<ProcessGroup>) -> Result<(), String> {
        let members = |at: &usize| &self.script.groups[*at].members;
        let expected = made.iter().find(|at| members(at).contains(&self.me));
        match (expected, new) {
            (None, None) => Ok(()),
            (Some(at), Some(new)) if new.ranks() == *members(at) => {
                self.groups.insert(*at, new);
                Ok(())
            }
            (expected, new) => Err(format!("joined {new:?} instead of group {expected:?}")),
        }
    }

    /// Awaits a random action for which `may_end` holds.
    fn await_one(&mut self, may_end: impl Fn(&Begun<'_>) -> bool) -> Result<(), String> {
        let found = (0..self.under_way.len()).filter(|&at| may_end(&self.under_way[at]));
        let found: Vec<usize> = found.collect();
        if found.is_empty() {
            return Ok(());
        }
        let begun = self.under_way.swap_remove(found[self.rng.usize(0..found.len())]);
        let Begun { round, action, end } = begun;
        // An action that is not awaited ends at the latest when its group is destroyed.
        if self.script.groups[action.group()].is_destroyed && self.rng.u8(0..16) == 0 {
            self.tell(round, "does not await", action);
            return Ok(());
        }
        let wait = Wait::ALL[self.rng.usize(0..Wait::ALL.len())];
        self.tell(round, &format!("awaits ({wait:?})"), action);
        end(wait).map_err(|problem| self.problem(round, action, &problem))
    }

    fn end(&mut self, group: usize) -> Result<(), String> {
        let is_destroyed = self.script.groups[group].is_destroyed;
        if !is_destroyed || self.rng.bool() {
            let of_group = |begun: &Begun<'_>| begun.action.group() == group;
            while self.under_way.iter().any(of_group) {
                self.await_one(of_group)?;
            }
        }
        match self.groups.remove(&group) {
            Some(group) if is_destroyed => group.destroy().map_err(|error| error.to_string()),
            _ => Ok(()),
        }
    }

    /// Ends all groups but the world, in the same order on all ranks, and awaits all actions.
    fn end_all(&mut self) -> Result<(), String> {
        while let Some(group) = self.groups.keys().next_back().copied().filter(|&it| it > 0) {
            self.end(group).map_err(|problem| format!("at the end of group {group}: {problem}"))?;
        }
        while !self.under_way.is_empty() {
            self.await_one(|_| true)?;
        }
        Ok(())
    }

    fn problem(&self, round: usize, action: &Action, problem: &str) -> String {
        format!("round {round}, {action:?}: {problem}")
    }

    #[expect(clippy::print_stderr, reason = "the trace is for people")]
    fn tell(&self, round: usize, what: &str, action: &Action) {
        if self.trace {
            eprintln!("rank {} {what} round {round}, {action:?}", self.me);
        }
    }
}

/// `None` if this rank is no member.
fn new_group(
    group: &ProcessGroup,
    ranks: &[Rank],
    keep_order: bool,
) -> Result<Option<ProcessGroup>, String> {
    let options = GroupOptions::default();
    let options = if keep_order { options.keep_order() } else { options };
    match group.new_group(ranks, &options) {
        Ok(new) => Ok(Some(new)),
        Err(error) if error.kind() == ErrorKind::NotAMember && !ranks.contains(&group.rank()) => {
            Ok(None)
        }
        Err(error) => Err(error.to_string()),
    }
}
