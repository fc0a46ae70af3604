//! Draws a program.

use drumline::{DType, ReduceOp};
use drumline_schedule::step::Rank;
use fastrand::Rng;

use super::script::{Action, Group, Messages, Script};
use crate::{Case, Kind};

/// The most groups that are open at a time.
const GROUPS_MAX: usize = 6;

/// First tag for messages that are received from any rank. Each such receive has its own tag, because it
/// takes any message with its tag.
const ANY_TAGS: u64 = 1000;

pub(super) struct Draft {
    rng: Rng,
    groups: Vec<Group>,
    /// The groups that have not ended.
    open: Vec<usize>,
    next_any_tag: u64,
}

impl Draft {
    pub(super) fn new(mut rng: Rng) -> Draft {
        let world_size = match rng.u8(0..20) {
            0 => 1,
            1..=16 => rng.usize(2..=5),
            _ => rng.usize(6..=8),
        };
        let world = Group { members: (0..world_size).collect(), is_destroyed: true };
        Draft { rng, groups: vec![world], open: vec![0], next_any_tag: ANY_TAGS }
    }

    pub(super) fn script(mut self) -> Script {
        let rounds = (0..self.rng.usize(3..=9)).map(|_| self.round()).collect();
        Script { groups: self.groups, rounds }
    }

    fn round(&mut self) -> Vec<Action> {
        let known = self.groups.len();
        let mut round = match self.rng.u8(0..10) {
            0..=2 if self.open.len() < GROUPS_MAX => vec![self.new_group()],
            3 if self.open.len() < GROUPS_MAX => vec![self.split()],
            4 if self.open.len() > 1 => {
                let at = self.rng.usize(1..self.open.len());
                vec![Action::End { group: self.open.remove(at) }]
            }
            _ => self.something(),
        };
        for _ in 0..self.rng.usize(0..=6) {
            let more = self.something();
            round.extend(more);
        }
        // The new groups can be used from the next round on, when all members have them.
        self.open.extend(known..self.groups.len());
        round
    }

    fn open_group(&mut self) -> usize {
        self.open[self.rng.usize(0..self.open.len())]
    }

    fn size(&self, group: usize) -> usize {
        self.groups[group].members.len()
    }

    /// Some of a group's ranks, at least one, in any order.
    fn some_ranks(&mut self, group: usize) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = (0..self.size(group)).collect();
        self.rng.shuffle(&mut ranks);
        ranks.truncate(self.rng.usize(1..=ranks.len()));
        ranks
    }

    fn add_group(&mut self, parent: usize, ranks: &[Rank]) -> usize {
        let members = ranks.iter().map(|&rank| self.groups[parent].members[rank]).collect();
        self.groups.push(Group { members, is_destroyed: self.rng.bool() });
        self.groups.len() - 1
    }

    fn new_group(&mut self) -> Action {
        let parent = self.open_group();
        let ranks = self.some_ranks(parent);
        let keep_order = self.rng.bool();
        let mut in_order = ranks.clone();
        if !keep_order {
            in_order.sort_unstable();
        }
        let made = self.add_group(parent, &in_order);
        Action::NewGroup { parent, ranks, keep_order, made }
    }

    fn split(&mut self) -> Action {
        let parent = self.open_group();
        let size = self.size(parent);
        let color = |rng: &mut Rng| (rng.u8(0..6) > 0).then(|| rng.u64(0..3));
        let colors: Vec<_> = (0..size).map(|_| color(&mut self.rng)).collect();
        let keys: Vec<_> = (0..size).map(|_| self.rng.i64(-1..=1)).collect();
        let mut made = Vec::new();
        for color in 0..3 {
            let of_color = |rank: &Rank| colors[*rank] == Some(color);
            let mut ranks: Vec<Rank> = (0..size).filter(of_color).collect();
            ranks.sort_by_key(|&rank| keys[rank]);
            if !ranks.is_empty() {
                made.push(self.add_group(parent, &ranks));
            }
        }
        Action::Split { parent, colors, keys, made }
    }

    /// A call or messages in any group.
    fn something(&mut self) -> Vec<Action> {
        let group = self.open_group();
        match self.rng.u8(0..3) {
            0 => self.messages(group),
            _ => vec![self.call(group)],
        }
    }

    fn call(&mut self, group: usize) -> Action {
        let size = self.size(group);
        let (dtype, seed) = (self.dtype(), self.rng.u64(..));
        let ops: Vec<_> = ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)).collect();
        let op = ops[self.rng.usize(0..ops.len())];
        let root = self.rng.usize(0..size);
        let kind = match self.rng.u8(0..12) {
            0..=3 => Kind::AllReduce(op),
            4 => Kind::Reduce(op, root),
            5 => Kind::ReduceScatter(op),
            6 => Kind::Broadcast(root),
            7 => Kind::AllGather,
            8 => Kind::Gather(root),
            9 => Kind::Scatter(root),
            10 => Kind::AllToAll,
            _ => Kind::Barrier,
        };
        let uneven = kind.has_blocks() && self.rng.bool();
        let elements = self.elements() / if kind.has_blocks() { size } else { 1 };
        let case = Case { kind, dtype, elements, uneven, seed };
        let registered = kind != Kind::Barrier && self.rng.u8(0..4) == 0;
        Action::Call { group, case, registered }
    }

    fn messages(&mut self, group: usize) -> Vec<Action> {
        let size = self.size(group);
        let [a, b] = [(); 2].map(|()| self.rng.usize(0..size));
        let tag = self.rng.u64(0..3);
        match self.rng.u8(0..3) {
            0 => vec![self.message(group, vec![a], b, tag, false)],
            1 => {
                let there = self.message(group, vec![a], b, tag, false);
                vec![there, self.message(group, vec![b], a, tag, false)]
            }
            _ => {
                self.next_any_tag += 1;
                let from = self.some_ranks(group);
                vec![self.message(group, from, a, self.next_any_tag, true)]
            }
        }
    }

    fn message(&mut self, group: usize, from: Vec<Rank>, to: Rank, tag: u64, any: bool) -> Action {
        let (dtype, elements, seed) = (self.dtype(), self.elements(), self.rng.u64(..));
        let case = Case { kind: Kind::Broadcast(from[0]), dtype, elements, uneven: false, seed };
        Action::Messages { group, messages: Messages { from, to, tag, any, case } }
    }

    fn dtype(&mut self) -> DType {
        DType::ALL[self.rng.usize(0..DType::ALL.len())]
    }

    /// A random length: mostly short, sometimes more than a slot or a socket buffer holds.
    fn elements(&mut self) -> usize {
        match self.rng.u8(0..40) {
            0..=2 => 0,
            3..=5 => 1,
            6 => self.rng.usize(20_000..=60_000),
            7..=12 => self.rng.usize(0..=5_000),
            _ => self.rng.usize(0..=300),
        }
    }
}
