//! Ranks that compute on expressions.

use std::collections::HashMap;
use std::ops::Range;

use drumline_schedule::step::{Buffer, Loc, Rank, Side, Span, Step};
use drumline_schedule::tree::{Node, merges, tiled};
use drumline_schedule::{
    Collective, Cost, Counts, MemoryUse, Rounding, Schedule, Topology, slice_holders,
};

use super::error::CheckError;
use super::expressions::{CALLS, Expressions, Id};
use super::races::{Access, Clock, Race, Touched, borders};
use crate::walk::{At, Combine, Visitor};

/// Which of its staging slots a rank uses in a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Slots {
    /// It has this number of slots, and calls use them in turn.
    InTurn(usize),
    /// Two ranks that are alone on a host have one slot each, and swap slots from one call to the next. Other
    /// ranks have two, in turn.
    Exchanged,
}

/// What ranks do with sums that are not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// They keep them to themselves.
    Stay,
    /// They send them. All places of the call have the width of sums.
    Travel,
    /// They send them, and keep them in places for sums. All other places have the width of elements.
    Apart,
}

/// The memories of all ranks: a visitor of the walk.
pub(super) struct Symbols<'a> {
    topology: &'a Topology,
    schedules: &'a [Schedule],
    /// The counts of each rank.
    counts: &'a [Counts],
    expressions: Expressions,
    /// The expected sum of all ranks in each call, element by element; empty in collectives without one.
    wanted: Vec<Vec<Id>>,
    ranks: Vec<Memory>,
    /// Whether ranks keep clocks: where they share memory, and in a barrier.
    has_clocks: bool,
    rounds: usize,
    slots: Slots,
    sums: Sums,
}

/// The buffers of one rank, and its state.
struct Memory {
    /// New on entry, so nothing survives a call.
    buffers: HashMap<Buffer, Cells>,
    /// Staging slots, which calls that post use in turn. They survive a call, because a neighbour may write
    /// to the next slot before its owner has entered.
    slots: Vec<Slot>,
    /// Accesses to the registered buffer, if there is one.
    touched: Option<Touched>,
    /// Messages whose source may still be read.
    in_flight: Vec<InFlight>,
    /// Messages sent in this call, by receiver.
    sent: HashMap<Rank, usize>,
    /// Messages and posts in the longest chain up to now.
    round: usize,
    /// Elements combined in this call.
    combined: usize,
    /// What the rank knows of other ranks; empty without clocks.
    clock: Clock,
    /// The clock at the start of the current run of receives.
    clock_of_receives: Clock,
    /// The time at which this rank entered each call.
    entered: Vec<u32>,
    /// The posts of each call.
    posts: Vec<Vec<Posted>>,
}

struct Slot {
    cells: Cells,
    touched: Touched,
}

struct Posted {
    clock: Clock,
    round: usize,
}

/// A part of a buffer that schedules name, from element `start` on.
struct Cells {
    start: usize,
    /// `None` where nothing has been written.
    values: Vec<Option<Id>>,
}

struct InFlight {
    to: Rank,
    /// Its place among the messages to that rank, counted from 1.
    number: usize,
    call: usize,
    step: usize,
    src: Loc,
    buffer: Buffer,
    range: Range<usize>,
}

impl InFlight {
    fn sent(&self, rank: Rank) -> At {
        At { rank, call: self.call, step: self.step }
    }
}

fn access(At { rank, call, step }: At, writes: bool) -> Access {
    Access { rank, call, step: Some(step), writes }
}

fn race(
    (owner, buffer, element): (Rank, Buffer, usize),
    late: Access,
    early: Access,
) -> CheckError {
    CheckError::Race(Box::new(Race { owner, buffer, element, late, early }))
}

pub(super) struct Message {
    sent: At,
    src: Loc,
    round: usize,
    clock: Clock,
}

impl<'a> Symbols<'a> {
    /// `first` is the first of the schedules.
    pub(super) fn new(
        topology: &'a Topology,
        first: &'a Schedule,
        schedules: &'a [Schedule],
        counts: &'a [Counts],
        slots: Slots,
        sums: Sums,
    ) -> Symbols<'a> {
        let Schedule { collective, world_size, memory, .. } = *first;
        let longest = |buffer| {
            let lengths = (0..world_size).map(|rank| len(schedules, counts, rank, buffer));
            lengths.max().unwrap_or(0)
        };
        let brought = longest(source(collective));
        let mut expressions = Expressions::new(world_size, brought);
        let rounds = rounds_on_hosts(topology, sums);
        let reduces = matches!(
            collective,
            Collective::AllReduce
                | Collective::Reduce
                | Collective::ReduceScatter
                | Collective::ReduceSlices
        );
        let wanted = (0..CALLS)
            .map(|call| {
                let elements = 0..if reduces { brought } else { 0 };
                elements
                    .map(|element| expressions.wanted(topology, rounds, call, element))
                    .collect()
            })
            .collect();
        let shared = memory != MemoryUse::Private;
        let has_clocks = shared || collective.is_barrier();
        let untouched = |buffer, len| Touched::new(len, borders(schedules, buffer, counts));
        let slot_len = borders(schedules, Buffer::Slot, counts).last().copied().unwrap_or(0);
        let registered = collective.registered_buffer();
        let (slot, registered) =
            (untouched(Buffer::Slot, slot_len), untouched(registered, longest(registered)));
        let slots_of_rank = match slots {
            Slots::InTurn(slots) => slots,
            Slots::Exchanged => 2,
        };
        let ranks = (0..world_size)
            .map(|rank| {
                let clock = Clock::start(rank, if has_clocks { world_size } else { 0 });
                let new_slot = || Slot {
                    cells: Cells { start: 0, values: vec![None; slot_len] },
                    touched: slot.clone(),
                };
                Memory {
                    buffers: HashMap::new(),
                    slots: (0..if shared { slots_of_rank } else { 0 })
                        .map(|_| new_slot())
                        .collect(),
                    touched: (memory == MemoryUse::Registered).then(|| registered.clone()),
                    in_flight: vec![],
                    sent: HashMap::new(),
                    round: 0,
                    combined: 0,
                    clock_of_receives: clock.clone(),
                    clock,
                    entered: vec![],
                    posts: vec![],
                }
            })
            .collect();
        Symbols {
            topology,
            schedules,
            counts,
            expressions,
            wanted,
            ranks,
            has_clocks,
            rounds: 0,
            slots,
            sums,
        }
    }

    /// The cost of one call.
    pub(super) fn cost(&self) -> Cost {
        let ranks = || self.schedules.iter().zip(self.counts);
        let sent = || ranks().map(|(schedule, counts)| schedule.sent(counts));
        Cost {
            rounds: self.rounds,
            messages: sent().map(|(messages, _)| messages).max().unwrap_or(0),
            elements: sent().map(|(_, elements)| elements).max().unwrap_or(0),
            combined: self.ranks.iter().map(|memory| memory.combined).max().unwrap_or(0),
            shared_elements: ranks()
                .map(|(schedule, counts)| schedule.shared(counts))
                .max()
                .unwrap_or(0),
        }
    }

    /// The elements of a place that `rank` names.
    fn resolve(&self, rank: Rank, loc: Loc) -> Range<usize> {
        self.schedules[rank].resolve(loc, &self.counts[rank])
    }

    /// The place of a rank's slot in a call: the owner of the memory, and the index there.
    fn slot(&self, owner: Rank, call: usize) -> (Rank, usize) {
        match (self.slots, self.topology.neighbours(owner)) {
            (Slots::Exchanged, &[a, b]) if call % 2 == 1 => (a + b - owner, 0),
            (Slots::Exchanged, &[_, _]) => (owner, 0),
            (Slots::Exchanged, _) => (owner, call % 2),
            (Slots::InTurn(slots), _) => (owner, call % slots),
        }
    }

    /// The elements of `rank`'s data, of `len`, whose values a call defines.
    fn defined(&self, rank: Rank, len: usize) -> Range<usize> {
        if self.schedules[rank].collective != Collective::ReduceSlices {
            return 0..len;
        }
        let holders = slice_holders(self.topology, rank);
        let slice = holders.iter().position(|holder| *holder == rank);
        slice.map_or(0..0, |slice| Span::block(slice, holders.len()).resolve(len))
    }

    /// The expected data of `rank` after a call.
    fn expected(&mut self, rank: Rank, call: usize, element: usize) -> Id {
        let Schedule { collective, world_size, root, .. } = self.schedules[rank];
        // A rank alone combines nothing, so it finishes nothing.
        let finished = |expressions: &mut Expressions, sum, ranks| match ranks {
            0 | 1 => sum,
            _ => expressions.finish(sum),
        };
        // The owner of the block with this element, and the index in the block.
        let in_block = |counts: &Counts| {
            let mut at = element;
            for peer in 0..world_size {
                match at.checked_sub(counts.block(Buffer::Data, peer)) {
                    Some(rest) => at = rest,
                    None => return (peer, at),
                }
            }
            unreachable!("the element lies in the data")
        };
        let brought_for_me = |sender: Rank| {
            let own = Loc::input(Span::block(rank, world_size));
            self.schedules[sender].resolve(own, &self.counts[sender]).start
        };
        let counts = &self.counts[rank];
        match collective {
            Collective::Reduce if rank != root => self.expressions.leaf(call, rank, element),
            Collective::AllReduce | Collective::Reduce | Collective::ReduceSlices => {
                finished(&mut self.expressions, self.wanted[call][element], world_size)
            }
            Collective::ReduceScatter => {
                let sum = self.wanted[call][brought_for_me(rank) + element];
                finished(&mut self.expressions, sum, world_size)
            }
            Collective::Broadcast => self.expressions.leaf(call, root, element),
            Collective::AllGather | Collective::Gather => {
                let (peer, at) = in_block(counts);
                self.expressions.leaf(call, peer, at)
            }
            Collective::Scatter => {
                self.expressions.leaf(call, root, brought_for_me(root) + element)
            }
            Collective::AllToAll => {
                let (peer, at) = in_block(counts);
                self.expressions.leaf(call, peer, brought_for_me(peer) + at)
            }
            Collective::Barrier | Collective::MonitoredBarrier => {
                unreachable!("a barrier has no elements")
            }
        }
    }

    /// The values that a step reads from `loc`, in its rank's or in a neighbour's memory.
    fn read(&mut self, at: At, loc: Loc) -> Result<Vec<Id>, CheckError> {
        self.touch(at, loc, false, None)?;
        let values = self.values(at, loc)?;
        if let Some(peer) = loc.peer {
            self.travels(at, peer, &values)?;
        }
        Ok(values)
    }

    /// What a rank may do after a [`Collective::ReduceSlices`]: read the slices of its neighbours. Nothing in the
    /// schedules keeps a neighbour from its next call meanwhile, so later calls are left out.
    fn fetch_slices(&mut self, rank: Rank, call: usize) -> Result<(), CheckError> {
        if self.schedules[rank].collective != Collective::ReduceSlices {
            return Ok(());
        }
        let topology = self.topology;
        for &holder in slice_holders(topology, rank).iter().filter(|holder| **holder != rank) {
            let len = len(self.schedules, self.counts, holder, Buffer::Data);
            let slice = self.defined(holder, len);
            let touched = self.ranks[holder].touched.as_ref();
            let clock = &self.ranks[rank].clock;
            let early = touched.and_then(|it| it.unknown_write(slice.clone(), clock, call));
            if let Some((element, early)) = early {
                let late = Access { rank, call, step: None, writes: false };
                return Err(race((holder, Buffer::Data, element), late, early));
            }
            if self.ranks[holder].posts.len() != call + 1 {
                continue; // it has made its next call
            }
            for element in slice {
                let found = self.ranks[holder].buffers[&Buffer::Data].values[element];
                let expected = self.expected(holder, call, element);
                self.compare(rank, call, element, found, expected)?;
            }
        }
        Ok(())
    }

    fn compare(
        &self,
        rank: Rank,
        call: usize,
        element: usize,
        found: Option<Id>,
        expected: Id,
    ) -> Result<(), CheckError> {
        if found == Some(expected) {
            return Ok(());
        }
        let text = |id| self.expressions.text(id, call);
        Err(CheckError::Result {
            rank,
            call,
            element,
            found: found.map_or_else(|| "never written".to_owned(), text),
            expected: text(expected),
        })
    }

    /// Checks values that go from or to a peer.
    fn travels(&self, at: At, peer: Rank, values: &[Id]) -> Result<(), CheckError> {
        let At { rank, step, .. } = at;
        match self.sums == Sums::Stay && values.iter().any(|&id| self.expressions.is_sum(id)) {
            true => Err(CheckError::PartialSum { rank, step, peer }),
            false => Ok(()),
        }
    }

    fn values(&self, At { rank, step, call }: At, loc: Loc) -> Result<Vec<Id>, CheckError> {
        let Loc { peer, buffer, .. } = loc;
        let owner = peer.unwrap_or(rank);
        let range = self.resolve(rank, loc);
        let unwritten = |element| CheckError::Unwritten { rank, step, owner, buffer, element };
        let cells = match buffer {
            Buffer::Slot => {
                let (holder, place) = self.slot(owner, call);
                Some(&self.ranks[holder].slots[place].cells)
            }
            _ => self.ranks[owner].buffers.get(&buffer),
        };
        let Some(cells) = cells else {
            return if range.is_empty() { Ok(vec![]) } else { Err(unwritten(range.start)) };
        };
        range
            .map(|element| cells.values[element - cells.start].ok_or_else(|| unwritten(element)))
            .collect()
    }

    fn write(&mut self, at: At, loc: Loc, values: &[Id]) -> Result<(), CheckError> {
        if let Some(peer) = loc.peer {
            self.travels(at, peer, values)?;
        }
        self.write_since(at, loc, values, None)
    }

    /// A write that may have begun when the rank knew only `known`.
    fn write_since(
        &mut self,
        at: At,
        loc: Loc,
        values: &[Id],
        known: Option<&Clock>,
    ) -> Result<(), CheckError> {
        let At { rank, step, call } = at;
        let Loc { peer, buffer, .. } = loc;
        let owner = peer.unwrap_or(rank);
        let range = self.resolve(rank, loc);
        for message in self.ranks[owner].in_flight.iter().filter(|m| m.buffer == buffer) {
            let element = range.start.max(message.range.start);
            if element < range.end.min(message.range.end) {
                let InFlight { to, step: sent_step, .. } = *message;
                return Err(match peer {
                    None => CheckError::TornRead { rank, step, buffer, element, to, sent_step },
                    Some(_) => race(
                        (owner, buffer, element),
                        access(at, true),
                        access(message.sent(owner), false),
                    ),
                });
            }
        }
        let is_sum = |id: &Id| self.expressions.is_sum(*id);
        if self.sums == Sums::Apart && values.iter().any(|id| is_sum(id) != loc.is_wide()) {
            return Err(CheckError::Width { rank, step, place: Box::new(loc) });
        }
        self.touch(at, loc, true, known)?;
        let (holder, place) = self.slot(owner, call);
        let cells = match buffer {
            Buffer::Slot => Some(&mut self.ranks[holder].slots[place].cells),
            _ => self.ranks[owner].buffers.get_mut(&buffer),
        };
        if let Some(cells) = cells {
            for (element, &value) in range.zip(values) {
                cells.values[element - cells.start] = Some(value);
            }
        }
        Ok(())
    }

    fn touch(
        &mut self,
        at: At,
        loc: Loc,
        writes: bool,
        known: Option<&Clock>,
    ) -> Result<(), CheckError> {
        self.touch_as(access(at, writes), loc, known)
    }

    /// Notes an access to memory that peers share, and compares it with those before it.
    fn touch_as(&mut self, by: Access, loc: Loc, known: Option<&Clock>) -> Result<(), CheckError> {
        let owner = loc.peer.unwrap_or(by.rank);
        let range = self.resolve(by.rank, loc);
        let clock = known.unwrap_or(&self.ranks[by.rank].clock).clone();
        let (holder, place) = self.slot(owner, by.call);
        // A rank that reads the slot of its only neighbour may write the data back there, so that its core
        // owns the cache lines. So a read counts as a write.
        let takes = matches!(self.slots, Slots::Exchanged)
            && is_of_pair(self.topology, owner)
            && loc.peer.is_some();
        let by = Access { writes: by.writes || (takes && loc.buffer == Buffer::Slot), ..by };
        let registered = self.schedules[owner].collective.registered_buffer();
        let touched = match loc.buffer {
            Buffer::Slot => Some(&mut self.ranks[holder].slots[place].touched),
            buffer if buffer == registered => self.ranks[owner].touched.as_mut(),
            _ => None,
        };
        match touched.and_then(|touched| touched.access(by, range, &clock)) {
            None => Ok(()),
            Some((element, early)) => Err(race((owner, loc.buffer, element), by, early)),
        }
    }

    /// Notes an access by the user to the whole buffer that may be registered.
    fn touch_by_user(&mut self, rank: Rank, call: usize, writes: bool) -> Result<(), CheckError> {
        let user = Access { rank, call, step: None, writes };
        let buffer = self.schedules[rank].collective.registered_buffer();
        self.touch_as(user, Loc { peer: None, buffer, span: Span::WHOLE }, None)
    }

    fn combine(
        &mut self,
        at: At,
        dst: Loc,
        incoming: Vec<Id>,
        Combine { side, finish }: Combine,
    ) -> Result<(), CheckError> {
        let own = self.read(at, dst)?;
        self.ranks[at.rank].combined += own.len();
        let pairs = own.into_iter().zip(incoming);
        let sums: Vec<Id> = pairs
            .map(|(own, incoming)| match side {
                Side::Left => self.expressions.sum(incoming, own),
                Side::Right => self.expressions.sum(own, incoming),
            })
            .collect();
        let sums = self.finished(sums, finish);
        self.write(at, dst, &sums)
    }

    fn finished(&mut self, mut sums: Vec<Id>, finish: bool) -> Vec<Id> {
        if finish {
            for sum in &mut sums {
                *sum = self.expressions.finish(*sum);
            }
        }
        sums
    }

    /// The clock that a rank tells others.
    fn tell(&mut self, rank: Rank) -> Clock {
        let clock = &mut self.ranks[rank].clock;
        if self.has_clocks { clock.tell(rank) } else { clock.clone() }
    }

    fn reach(&mut self, rank: Rank, round: usize) {
        let own = &mut self.ranks[rank].round;
        *own = round.max(*own);
        self.rounds = self.rounds.max(round);
    }

    fn same_length(&self, at: At, dst: Loc, src: Loc) -> Result<(), CheckError> {
        let (dst_len, src_len) =
            (self.resolve(at.rank, dst).len(), self.resolve(at.rank, src).len());
        match dst_len == src_len {
            true => Ok(()),
            false => Err(CheckError::OperandLengths {
                rank: at.rank,
                step: at.step,
                dst: Box::new(dst),
                dst_len,
                src: Box::new(src),
                src_len,
            }),
        }
    }
}

impl Visitor for Symbols<'_> {
    type Message = Message;

    fn enter(&mut self, rank: Rank, call: usize) -> Result<(), CheckError> {
        let schedule = &self.schedules[rank];
        let Schedule { collective, root, .. } = *schedule;
        let brings = collective != Collective::Broadcast || rank == root;
        let cells = |buffer| {
            let of_user = brings && buffer == source(collective);
            let leaf = |element| of_user.then(|| self.expressions.leaf(call, rank, element));
            let elements = 0..len(self.schedules, self.counts, rank, buffer);
            Cells { start: 0, values: elements.map(leaf).collect() }
        };
        let (data, input) = (cells(Buffer::Data), cells(Buffer::Input));
        let memory = &mut self.ranks[rank];
        memory.buffers = HashMap::from([(Buffer::Data, data), (Buffer::Input, input)]);
        let scratch = schedule.scratch(&self.counts[rank]);
        memory.buffers.extend(scratch.into_iter().map(|(buffer, hull)| {
            (buffer, Cells { start: hull.start, values: vec![None; hull.len()] })
        }));
        memory.sent.clear();
        memory.round = 0;
        memory.combined = 0;
        memory.posts.push(vec![]);
        self.touch_by_user(rank, call, true)?;
        if self.has_clocks {
            let memory = &mut self.ranks[rank];
            memory.entered.push(memory.clock.now(rank));
        }
        Ok(())
    }

    fn begin(&mut self, rank: Rank, call: usize) -> Result<(), CheckError> {
        if call == 0 || !self.has_clocks {
            return Ok(());
        }
        for &peer in self.topology.neighbours(rank) {
            if let Some(first) = self.ranks[peer].posts[call - 1].first() {
                let told = first.clock.clone();
                self.ranks[rank].clock.learn(&told);
            }
        }
        Ok(())
    }

    fn send(&mut self, at: At, to: Rank, src: Loc) -> Result<Message, CheckError> {
        let values = self.read(at, src)?;
        self.travels(at, to, &values)?;
        let range = self.resolve(at.rank, src);
        let memory = &mut self.ranks[at.rank];
        let number = memory.sent.entry(to).or_default();
        *number += 1;
        memory.in_flight.push(InFlight {
            to,
            number: *number,
            call: at.call,
            step: at.step,
            src,
            buffer: src.buffer,
            range,
        });
        let clock = self.tell(at.rank);
        Ok(Message { sent: at, src, round: self.ranks[at.rank].round + 1, clock })
    }

    fn receive(
        &mut self,
        at: At,
        dst: Loc,
        combine: Option<Combine>,
        message: Message,
    ) -> Result<(), CheckError> {
        let Message { sent, src, round, clock } = message;
        let (expected, found) =
            (self.resolve(at.rank, dst).len(), self.resolve(sent.rank, src).len());
        if expected != found {
            return Err(CheckError::MessageLengths {
                rank: at.rank,
                step: at.step,
                expected,
                from: sent.rank,
                sent_step: sent.step,
                sent: found,
            });
        }
        self.reach(at.rank, round);
        let memory = &mut self.ranks[at.rank];
        let steps = &self.schedules[at.rank].steps[..at.step];
        if !matches!(steps.last(), Some(Step::Recv { .. })) {
            memory.clock_of_receives = memory.clock.clone();
        }
        memory.clock.learn(&clock);
        // A transport may read the source as late as now, so this reads the sender's memory as it is now.
        let incoming = self.values(sent, src)?;
        match combine {
            Some(combine) => self.combine(at, dst, incoming, combine),
            None => {
                // An executor starts all receives of a run at once, so it may write as early as then.
                let known = self.ranks[at.rank].clock_of_receives.clone();
                self.write_since(at, dst, &incoming, Some(&known))
            }
        }
    }

    fn flush(&mut self, at: At, to: Rank, upto: usize) -> Result<(), CheckError> {
        let in_flight = &mut self.ranks[at.rank].in_flight;
        let covered = |message: &mut InFlight| message.to == to && message.number <= upto;
        let flushed: Vec<InFlight> = in_flight.extract_if(.., covered).collect();
        // The transport read the source until now. The rank does not know that the receiver has the message:
        // the transport may still carry it.
        flushed
            .iter()
            .try_for_each(|message| self.touch(message.sent(at.rank), message.src, false, None))
    }

    fn reduce(&mut self, at: At, dst: Loc, src: Loc, how: Combine) -> Result<(), CheckError> {
        self.same_length(at, dst, src)?;
        let incoming = self.read(at, src)?;
        self.combine(at, dst, incoming, how)
    }

    fn reduce_tree(
        &mut self,
        at: At,
        dsts: &[Loc],
        srcs: &[(Node, Loc)],
        finish: bool,
    ) -> Result<(), CheckError> {
        let nodes: Vec<Node> = srcs.iter().map(|&(node, _)| node).collect();
        let merges = tiled(&nodes).and_then(|node| merges(node, &nodes)).unwrap_or_default();
        let mut stack: Vec<Vec<Id>> = vec![];
        for (&(_, src), merges) in srcs.iter().zip(merges) {
            for &dst in dsts {
                self.same_length(at, dst, src)?;
            }
            let mut right = self.read(at, src)?;
            for _ in 0..merges {
                let left = stack.pop().unwrap_or_default();
                self.ranks[at.rank].combined += left.len();
                let pairs = left.into_iter().zip(right);
                right = pairs.map(|(left, right)| self.expressions.sum(left, right)).collect();
            }
            stack.push(right);
        }
        let mut sums = self.finished(stack.concat(), finish);
        if !finish
            && rounds_on_hosts(self.topology, self.sums)
            && !dsts.iter().any(|dst| dst.is_wide())
        {
            sums.iter_mut().for_each(|sum| *sum = self.expressions.round(*sum));
        }
        dsts.iter().try_for_each(|&dst| self.write(at, dst, &sums))
    }

    fn copy(&mut self, at: At, dst: Loc, src: Loc) -> Result<(), CheckError> {
        self.same_length(at, dst, src)?;
        let values = self.read(at, src)?;
        self.write(at, dst, &values)
    }

    fn post(&mut self, At { rank, call, .. }: At) -> Result<(), CheckError> {
        let clock = self.tell(rank);
        let memory = &mut self.ranks[rank];
        memory.posts[call].push(Posted { clock, round: memory.round + 1 });
        Ok(())
    }

    fn wait(&mut self, at: At, peer: Rank, upto: usize) -> Result<(), CheckError> {
        let posts = &self.ranks[peer].posts[at.call];
        if let Some(Posted { clock, round }) = upto.checked_sub(1).and_then(|last| posts.get(last))
        {
            let (clock, round) = (clock.clone(), *round);
            self.ranks[at.rank].clock.learn(&clock);
            self.reach(at.rank, round);
        }
        Ok(())
    }

    fn leave(&mut self, rank: Rank, call: usize) -> Result<(), CheckError> {
        let collective = self.schedules[rank].collective;
        self.touch_by_user(rank, call, false)?;
        let memory = &self.ranks[rank];
        if let Some(&InFlight { to, step: sent_step, .. }) = memory.in_flight.first() {
            return Err(CheckError::NotFlushed { rank, sent_step, to });
        }
        if collective.is_barrier() {
            let knows = |peer: &Memory, rank| {
                peer.entered.get(call).is_some_and(|&then| memory.clock.now(rank) >= then)
            };
            let mut peers = self.ranks.iter().enumerate();
            if let Some((peer, _)) = peers.find(|&(rank, peer)| !knows(peer, rank)) {
                return Err(CheckError::EarlyExit { rank, peer });
            }
        }
        self.fetch_slices(rank, call)?;
        let found = self.ranks[rank].buffers[&Buffer::Data].values.clone();
        let defined = self.defined(rank, found.len());
        let found = found.into_iter().enumerate();
        for (element, found) in found.filter(|(element, _)| defined.contains(element)) {
            let expected = self.expected(rank, call, element);
            self.compare(rank, call, element, found, expected)?;
        }
        Ok(())
    }
}

/// Whether a sum that is put to a place of the width of elements is the rounded sum of a host.
fn rounds_on_hosts(topology: &Topology, sums: Sums) -> bool {
    sums == Sums::Apart && topology.rounding == Rounding::Host && topology.has_hosts_of_several()
}

/// Whether the rank and one neighbour are alone on their host.
fn is_of_pair(topology: &Topology, rank: Rank) -> bool {
    topology.neighbours(rank).len() == 2
}

/// The buffer with a rank's contribution.
fn source(collective: Collective) -> Buffer {
    if collective.has_input() { Buffer::Input } else { Buffer::Data }
}

/// The elements of a whole buffer.
fn len(schedules: &[Schedule], counts: &[Counts], rank: Rank, buffer: Buffer) -> usize {
    let whole = Loc { peer: None, buffer, span: Span::WHOLE };
    schedules[rank].resolve(whole, &counts[rank]).len()
}
