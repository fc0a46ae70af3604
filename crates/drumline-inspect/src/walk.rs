//! Runs the schedules of all ranks against each other, without data.
//!
//! No step asks which of two events came first: a receive names its sender, messages between two ranks keep
//! their order, and a wait counts posts. So neither the result nor a deadlock depends on the order in which
//! ranks run. The one interleaving of this walk stands for all interleavings, unless it has a race for shared
//! memory.
//!
//! Transports differ in the moment at which a message has left its source. The walk takes the latest possible
//! moment, when the receiver takes the message, so a flush waits as long as possible.

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};

use drumline_schedule::step::{Loc, Rank, Side, Step};
use drumline_schedule::tree::Node;
use drumline_schedule::{Schedule, Topology};

use crate::check::{CheckError, Wait};

/// The position of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) rank: Rank,
    /// The number of calls that this rank has finished.
    pub(crate) call: usize,
    /// Index into the steps of its schedule.
    pub(crate) step: usize,
}

/// Acts on the events of a walk. Every method may end the walk with an error.
pub(crate) trait Visitor {
    /// The content of a message.
    type Message;

    /// A rank enters a call.
    fn enter(&mut self, rank: Rank, call: usize) -> Result<(), CheckError>;
    /// A rank is about to take its first step. If the call posts and is not the first call, the rank knows
    /// that each neighbour has posted in the call before.
    fn begin(&mut self, rank: Rank, call: usize) -> Result<(), CheckError>;
    /// A rank sends a message.
    fn send(&mut self, at: At, to: Rank, src: Loc) -> Result<Self::Message, CheckError>;
    /// A rank takes a message, and stores it or combines it into `dst`.
    fn receive(
        &mut self,
        at: At,
        dst: Loc,
        combine: Option<Combine>,
        message: Self::Message,
    ) -> Result<(), CheckError>;
    /// A rank combines two of its own values.
    fn reduce(&mut self, at: At, dst: Loc, src: Loc, how: Combine) -> Result<(), CheckError>;
    /// A rank combines many of its own values.
    fn reduce_tree(
        &mut self,
        at: At,
        dsts: &[Loc],
        srcs: &[(Node, Loc)],
        finish: bool,
    ) -> Result<(), CheckError>;
    /// A rank copies.
    fn copy(&mut self, at: At, dst: Loc, src: Loc) -> Result<(), CheckError>;
    /// A rank knows that the first `upto` messages of this call to `to` have been taken.
    fn flush(&mut self, at: At, to: Rank, upto: usize) -> Result<(), CheckError>;
    /// A rank posts.
    fn post(&mut self, at: At) -> Result<(), CheckError>;
    /// A rank knows that `peer` has posted `upto` times in this call.
    fn wait(&mut self, at: At, peer: Rank, upto: usize) -> Result<(), CheckError>;
    /// A rank returns from the call.
    fn leave(&mut self, rank: Rank, call: usize) -> Result<(), CheckError>;
}

/// How a value is combined into another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Combine {
    pub(crate) side: Side,
    pub(crate) finish: bool,
}

/// Every rank `r` runs `schedules[r]` in each of `calls` calls, back to back. The ranks take turns step by
/// step, so they stay abreast as far as waits allow.
///
/// All schedules must post equally often.
pub(crate) fn walk<V: Visitor>(
    topology: &Topology,
    schedules: &[Schedule],
    calls: usize,
    visitor: &mut V,
) -> Result<(), CheckError> {
    let mut walk = Walk {
        topology,
        schedules,
        calls,
        channels: HashMap::new(),
        posting: schedules.iter().any(|schedule| schedule.posts() > 0),
        posts: vec![vec![0; calls]; schedules.len()],
        walkers: vec![Walker { call: 0, next: Next::Call }; schedules.len()],
    };
    loop {
        let mut moved = false;
        for rank in 0..schedules.len() {
            moved |= walk.advance(rank, visitor)?;
        }
        if !moved {
            return walk.end();
        }
    }
}

struct Walk<'a, M> {
    topology: &'a Topology,
    schedules: &'a [Schedule],
    calls: usize,
    /// The channel of each sender and receiver.
    channels: HashMap<(Rank, Rank), Channel<M>>,
    posting: bool,
    /// The number of posts, by rank and call.
    posts: Vec<Vec<usize>>,
    walkers: Vec<Walker>,
}

#[derive(Clone)]
struct Walker {
    call: usize,
    next: Next,
}

/// What a rank does next in its call.
#[derive(Clone, Copy)]
enum Next {
    /// Enter the call.
    Call,
    /// Wait for the neighbours before the first step.
    Entry,
    Step(usize),
}

struct Channel<M> {
    /// Messages under way, and the position of each sender.
    queue: VecDeque<(At, M)>,
    /// The call of the message taken last, and the number of messages taken in that call.
    taken: (usize, usize),
}

impl<M> Channel<M> {
    fn take(&mut self) -> Option<(At, M)> {
        let (sent, message) = self.queue.pop_front()?;
        self.taken = (sent.call, self.taken_in(sent.call) + 1);
        Some((sent, message))
    }

    fn taken_in(&self, call: usize) -> usize {
        if self.taken.0 == call { self.taken.1 } else { 0 }
    }
}

impl<M> Walk<'_, M> {
    /// Takes one step of a rank. Returns whether it could.
    fn advance(
        &mut self,
        rank: Rank,
        visitor: &mut impl Visitor<Message = M>,
    ) -> Result<bool, CheckError> {
        let Walker { call, next } = self.walkers[rank];
        if call == self.calls {
            return Ok(false);
        }
        let step = match next {
            Next::Call => {
                visitor.enter(rank, call)?;
                self.walkers[rank].next = Next::Entry;
                return Ok(true);
            }
            Next::Entry if !self.may_begin(rank, call) => return Ok(false),
            Next::Entry => {
                visitor.begin(rank, call)?;
                self.walkers[rank].next = Next::Step(0);
                return Ok(true);
            }
            Next::Step(step) => step,
        };
        let at = At { rank, call, step };
        match self.schedules[rank].steps.get(step) {
            None => {
                visitor.leave(rank, call)?;
                self.walkers[rank] = Walker { call: call + 1, next: Next::Call };
                return Ok(true);
            }
            Some(&Step::Send { to, src }) => {
                let message = visitor.send(at, to, src)?;
                self.channel(rank, to).queue.push_back((at, message));
            }
            Some(&Step::Recv { from, dst }) => match self.take(at, from)? {
                None => return Ok(false),
                Some(message) => visitor.receive(at, dst, None, message)?,
            },
            Some(&Step::RecvReduce { from, dst, side, finish }) => match self.take(at, from)? {
                None => return Ok(false),
                Some(message) => {
                    visitor.receive(at, dst, Some(Combine { side, finish }), message)?;
                }
            },
            Some(&Step::Reduce { dst, src, side, finish }) => {
                visitor.reduce(at, dst, src, Combine { side, finish })?;
            }
            Some(Step::ReduceTree { dsts, srcs, finish }) => {
                visitor.reduce_tree(at, dsts, srcs, *finish)?;
            }
            Some(&Step::Copy { dst, src }) => visitor.copy(at, dst, src)?,
            Some(&Step::Flush { to, upto }) => {
                if self.channel(rank, to).taken_in(call) < upto {
                    return Ok(false);
                }
                visitor.flush(at, to, upto)?;
            }
            Some(Step::Post) => {
                visitor.post(at)?;
                self.posts[rank][call] += 1;
            }
            Some(&Step::Wait { peer, upto }) => {
                if self.posts[peer][call] < upto {
                    return Ok(false);
                }
                visitor.wait(at, peer, upto)?;
            }
        }
        self.walkers[rank].next = Next::Step(step + 1);
        Ok(true)
    }

    /// Whether each neighbour has posted in the call before.
    fn may_begin(&self, rank: Rank, call: usize) -> bool {
        if call == 0 || !self.posting {
            return true;
        }
        let mut peers = self.topology.neighbours(rank).iter().filter(|&&peer| peer != rank);
        peers.all(|&peer| self.posts[peer][call - 1] > 0)
    }

    /// The next message from `from`, if it is there.
    fn take(&mut self, at: At, from: Rank) -> Result<Option<M>, CheckError> {
        let At { rank, call, step } = at;
        let Some((sent, message)) = self.channel(from, rank).take() else { return Ok(None) };
        match sent.call.cmp(&call) {
            Ordering::Less => Err(CheckError::UnmatchedSend { from, step: sent.step, to: rank }),
            Ordering::Equal => Ok(Some(message)),
            Ordering::Greater => Err(CheckError::UnmatchedRecv { rank, step, from }),
        }
    }

    /// Ends the walk when no rank can move: all have finished, or they are stuck.
    fn end(self) -> Result<(), CheckError> {
        // A rank that waits at its entry waits for a neighbour that is stuck in an earlier call. So at least
        // one rank is stuck at a step.
        let stuck = self.walkers.iter().enumerate().filter_map(|(rank, walker)| {
            let Next::Step(step) = walker.next else { return None };
            let verb = self.schedules[rank].steps.get(step)?.clone();
            Some(Wait { rank, step, on: verb.peer()?, verb })
        });
        let waits: Vec<Wait> = stuck.collect();
        if !waits.is_empty() {
            return Err(CheckError::Deadlock { waits });
        }
        let left = self.channels.iter().filter_map(|(&(_, to), channel)| {
            let (sent, _) = channel.queue.front()?;
            Some((sent.rank, sent.step, to))
        });
        match left.min() {
            None => Ok(()),
            Some((from, step, to)) => Err(CheckError::UnmatchedSend { from, step, to }),
        }
    }

    fn channel(&mut self, from: Rank, to: Rank) -> &mut Channel<M> {
        self.channels
            .entry((from, to))
            .or_insert_with(|| Channel { queue: VecDeque::new(), taken: (0, 0) })
    }
}
