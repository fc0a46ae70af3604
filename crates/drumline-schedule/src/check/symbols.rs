//! Ranks that compute on expressions.

use std::collections::HashMap;
use std::ops::Range;

use super::{CheckError, OPERATIONS};
use crate::algorithm::{Collective, Cost};
use crate::schedule::{Schedule, tiled};
use crate::step::{Buffer, Loc, Rank, Side};
use crate::tree::{Node, merges};
use crate::walk::{At, Combine, Visitor};

/// All ranks, as the walk's visitor.
pub(super) struct Symbols<'a> {
    first: &'a Schedule,
    schedules: &'a [Schedule],
    data_len: usize,
    expressions: Expressions,
    /// What the data must be after each operation; of a reduce-scatter, that of all ranks
    /// together.
    expected: Vec<Vec<Id>>,
    ranks: Vec<Memory>,
    rounds: usize,
    /// Whether sums that are not finished may be sent.
    partial_sums_travel: bool,
}

/// One rank's buffers, and what is known about them.
struct Memory {
    /// Made anew on entry, so nothing survives an operation.
    buffers: HashMap<Buffer, Cells>,
    /// Messages whose source may still be read.
    in_flight: Vec<InFlight>,
    /// Messages sent in this operation, by receiver.
    sent: HashMap<Rank, usize>,
    /// Messages in the longest chain that led here.
    round: usize,
    /// Elements combined in this operation.
    combined: usize,
    /// For each rank, how many operations it is known to have entered. Barriers only.
    entered: Vec<usize>,
}

/// The part of a buffer that schedules name, from element `start` on.
struct Cells {
    start: usize,
    /// `None` where nothing has been written.
    values: Vec<Option<Id>>,
}

struct InFlight {
    to: Rank,
    /// Its place among the messages to that rank, counted from 1.
    number: usize,
    step: usize,
    buffer: Buffer,
    range: Range<usize>,
}

pub(super) struct Message {
    sent: At,
    src: Loc,
    round: usize,
    entered: Vec<usize>,
}

impl<'a> Symbols<'a> {
    /// `first` is the first of the schedules.
    pub(super) fn new(
        first: &'a Schedule,
        schedules: &'a [Schedule],
        elements: usize,
        partial_sums_travel: bool,
    ) -> Symbols<'a> {
        let Schedule { collective, world_size, root, .. } = *first;
        let data_len = collective.data_len(world_size, elements);
        let input_len = collective.input_len(world_size, data_len);
        let brought = if collective.has_input() { input_len } else { elements };
        let mut expressions = Expressions::new(world_size, brought);
        let expected = (0..OPERATIONS)
            .map(|operation| {
                (0..data_len.max(input_len))
                    .map(|element| match collective {
                        Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter => {
                            let sum = expressions.tree(Node::root(world_size), operation, element);
                            // Nothing is combined in a world of one, so nothing can finish.
                            if world_size > 1 { expressions.finish(sum) } else { sum }
                        }
                        // A barrier has no elements.
                        Collective::Broadcast | Collective::Barrier => {
                            expressions.leaf(operation, root, element)
                        }
                        Collective::AllGather => {
                            expressions.leaf(operation, element / elements, element % elements)
                        }
                    })
                    .collect()
            })
            .collect();
        let clocks = if collective == Collective::Barrier { world_size } else { 0 };
        let ranks = (0..world_size)
            .map(|_| Memory {
                buffers: HashMap::new(),
                in_flight: vec![],
                sent: HashMap::new(),
                round: 0,
                combined: 0,
                entered: vec![0; clocks],
            })
            .collect();
        Symbols {
            first,
            schedules,
            data_len,
            expressions,
            expected,
            ranks,
            rounds: 0,
            partial_sums_travel,
        }
    }

    /// What one operation has cost.
    pub(super) fn cost(&self) -> Cost {
        let sent = || self.schedules.iter().map(|schedule| schedule.sent(self.data_len));
        Cost {
            rounds: self.rounds,
            messages: sent().map(|(messages, _)| messages).max().unwrap_or(0),
            elements: sent().map(|(_, elements)| elements).max().unwrap_or(0),
            combined: self.ranks.iter().map(|memory| memory.combined).max().unwrap_or(0),
        }
    }

    fn resolve(&self, loc: Loc) -> Range<usize> {
        self.first.resolve(loc, self.data_len)
    }

    fn read(&self, At { rank, step, .. }: At, loc: Loc) -> Result<Vec<Id>, CheckError> {
        let Loc { buffer, .. } = loc;
        let range = self.resolve(loc);
        let unwritten = |element| CheckError::Unwritten { rank, step, buffer, element };
        let Some(cells) = self.ranks[rank].buffers.get(&buffer) else {
            return if range.is_empty() { Ok(vec![]) } else { Err(unwritten(range.start)) };
        };
        range
            .map(|element| cells.values[element - cells.start].ok_or_else(|| unwritten(element)))
            .collect()
    }

    fn write(
        &mut self,
        At { rank, step, .. }: At,
        loc: Loc,
        values: impl IntoIterator<Item = Id>,
    ) -> Result<(), CheckError> {
        let Loc { buffer, .. } = loc;
        let range = self.resolve(loc);
        let memory = &mut self.ranks[rank];
        for message in memory.in_flight.iter().filter(|message| message.buffer == buffer) {
            let element = range.start.max(message.range.start);
            if element < range.end.min(message.range.end) {
                let InFlight { to, step: sent_step, .. } = *message;
                return Err(CheckError::TornRead { rank, step, buffer, element, to, sent_step });
            }
        }
        if let Some(cells) = memory.buffers.get_mut(&buffer) {
            for (element, value) in range.zip(values) {
                cells.values[element - cells.start] = Some(value);
            }
        }
        Ok(())
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
        self.write(at, dst, sums)
    }

    fn finished(&mut self, mut sums: Vec<Id>, finish: bool) -> Vec<Id> {
        if finish {
            for sum in &mut sums {
                *sum = self.expressions.finish(*sum);
            }
        }
        sums
    }

    fn same_length(&self, at: At, dst: Loc, src: Loc) -> Result<(), CheckError> {
        let (dst_len, src_len) = (self.resolve(dst).len(), self.resolve(src).len());
        match dst_len == src_len {
            true => Ok(()),
            false => Err(CheckError::OperandLengths {
                rank: at.rank,
                step: at.step,
                dst,
                dst_len,
                src,
                src_len,
            }),
        }
    }
}

impl Visitor for Symbols<'_> {
    type Message = Message;

    fn enter(&mut self, rank: Rank, operation: usize) -> Result<(), CheckError> {
        let schedule = &self.schedules[rank];
        let own = |len| -> Vec<Option<Id>> {
            (0..len).map(|element| Some(self.expressions.leaf(operation, rank, element))).collect()
        };
        let (data, input) = match schedule.collective {
            Collective::AllReduce | Collective::Reduce => (own(self.data_len), vec![]),
            Collective::Broadcast if rank == schedule.root => (own(self.data_len), vec![]),
            Collective::AllGather | Collective::ReduceScatter => {
                let world_size = schedule.world_size;
                let input_len = schedule.collective.input_len(world_size, self.data_len);
                (vec![None; self.data_len], own(input_len))
            }
            Collective::Broadcast | Collective::Barrier => (vec![None; self.data_len], vec![]),
        };
        let memory = &mut self.ranks[rank];
        memory.buffers = HashMap::from([
            (Buffer::Data, Cells { start: 0, values: data }),
            (Buffer::Input, Cells { start: 0, values: input }),
        ]);
        memory.buffers.extend(schedule.scratch(self.data_len).into_iter().map(|(slot, hull)| {
            (Buffer::Scratch(slot), Cells { start: hull.start, values: vec![None; hull.len()] })
        }));
        memory.sent.clear();
        memory.round = 0;
        memory.combined = 0;
        if let Some(own) = memory.entered.get_mut(rank) {
            *own = operation + 1;
        }
        Ok(())
    }

    fn send(&mut self, at: At, to: Rank, src: Loc) -> Result<Message, CheckError> {
        let values = self.read(at, src)?;
        if !self.partial_sums_travel && values.iter().any(|&id| self.expressions.is_sum(id)) {
            return Err(CheckError::PartialSum { rank: at.rank, step: at.step, to });
        }
        let range = self.resolve(src);
        let memory = &mut self.ranks[at.rank];
        let number = memory.sent.entry(to).or_default();
        *number += 1;
        memory.in_flight.push(InFlight {
            to,
            number: *number,
            step: at.step,
            buffer: src.buffer,
            range,
        });
        Ok(Message { sent: at, src, round: memory.round + 1, entered: memory.entered.clone() })
    }

    fn receive(
        &mut self,
        at: At,
        dst: Loc,
        combine: Option<Combine>,
        message: Message,
    ) -> Result<(), CheckError> {
        let Message { sent, src, round, entered } = message;
        let (expected, found) = (self.resolve(dst).len(), self.resolve(src).len());
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
        let memory = &mut self.ranks[at.rank];
        memory.round = memory.round.max(round);
        self.rounds = self.rounds.max(round);
        for (own, theirs) in memory.entered.iter_mut().zip(entered) {
            *own = theirs.max(*own);
        }
        // As late as a transport may: from the sender's memory as it is now.
        let incoming = self.read(sent, src)?;
        match combine {
            Some(combine) => self.combine(at, dst, incoming, combine),
            None => self.write(at, dst, incoming),
        }
    }

    fn flush(&mut self, at: At, to: Rank, upto: usize) -> Result<(), CheckError> {
        let in_flight = &mut self.ranks[at.rank].in_flight;
        in_flight.retain(|message| message.to != to || message.number > upto);
        Ok(())
    }

    fn reduce(&mut self, at: At, dst: Loc, src: Loc, how: Combine) -> Result<(), CheckError> {
        self.same_length(at, dst, src)?;
        let incoming = self.read(at, src)?;
        self.combine(at, dst, incoming, how)
    }

    fn reduce_tree(
        &mut self,
        at: At,
        dst: Loc,
        srcs: &[(Node, Loc)],
        finish: bool,
    ) -> Result<(), CheckError> {
        let nodes: Vec<Node> = srcs.iter().map(|&(node, _)| node).collect();
        let merges = tiled(&nodes).and_then(|node| merges(node, &nodes)).unwrap_or_default();
        let mut stack: Vec<Vec<Id>> = vec![];
        for (&(_, src), merges) in srcs.iter().zip(merges) {
            self.same_length(at, dst, src)?;
            let mut right = self.read(at, src)?;
            for _ in 0..merges {
                let left = stack.pop().unwrap_or_default();
                self.ranks[at.rank].combined += left.len();
                let pairs = left.into_iter().zip(right);
                right = pairs.map(|(left, right)| self.expressions.sum(left, right)).collect();
            }
            stack.push(right);
        }
        let sums = self.finished(stack.concat(), finish);
        self.write(at, dst, sums)
    }

    fn copy(&mut self, at: At, dst: Loc, src: Loc) -> Result<(), CheckError> {
        self.same_length(at, dst, src)?;
        let values = self.read(at, src)?;
        self.write(at, dst, values)
    }

    fn leave(&mut self, rank: Rank, operation: usize) -> Result<(), CheckError> {
        let Schedule { collective, root, .. } = self.schedules[rank];
        let memory = &self.ranks[rank];
        if let Some(&InFlight { to, step: sent_step, .. }) = memory.in_flight.first() {
            return Err(CheckError::NotFlushed { rank, sent_step, to });
        }
        if let Some(peer) = memory.entered.iter().position(|&entered| entered <= operation) {
            return Err(CheckError::EarlyExit { rank, peer });
        }
        if collective == Collective::Reduce && rank != root {
            return Ok(());
        }
        let found = &memory.buffers[&Buffer::Data].values;
        let first = if collective == Collective::ReduceScatter { rank * found.len() } else { 0 };
        let expected = &self.expected[operation][first..];
        for (element, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            if found != Some(expected) {
                let text = |id| self.expressions.text(id, operation);
                return Err(CheckError::Result {
                    rank,
                    operation,
                    element,
                    found: found.map_or_else(|| "never written".to_owned(), text),
                    expected: text(expected),
                });
            }
        }
        Ok(())
    }
}

/// An expression. Equal expressions have equal ids.
///
/// The first ids are the leaves: what each rank brings to each operation, element by element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Id(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Expression {
    /// The left and the right operand: neither order nor parentheses are forgotten.
    Sum(Id, Id),
    Finish(Id),
}

struct Expressions {
    world_size: usize,
    /// What a rank brings.
    elements: usize,
    ids: HashMap<Expression, Id>,
    /// Those that are no leaves, in the order of their ids.
    composed: Vec<Expression>,
    /// What was last made of each id as the left operand. There is one tree, so as long as sums
    /// are right this is what is made of it again, and nothing has to be looked up.
    latest: Vec<Option<(Expression, Id)>>,
}

impl Expressions {
    fn new(world_size: usize, elements: usize) -> Expressions {
        Expressions { world_size, elements, ids: HashMap::new(), composed: vec![], latest: vec![] }
    }

    // Memory ends long before 2^32 ids do.
    fn leaf(&self, operation: usize, rank: Rank, element: usize) -> Id {
        Id(((operation * self.world_size + rank) * self.elements + element) as u32)
    }

    fn leaves(&self) -> usize {
        OPERATIONS * self.world_size * self.elements
    }

    /// Whether it is a sum that nothing has finished.
    fn is_sum(&self, id: Id) -> bool {
        let composed = (id.0 as usize).checked_sub(self.leaves());
        composed.is_some_and(|index| matches!(self.composed[index], Expression::Sum(..)))
    }

    fn sum(&mut self, left: Id, right: Id) -> Id {
        self.id(Expression::Sum(left, right))
    }

    fn finish(&mut self, value: Id) -> Id {
        self.id(Expression::Finish(value))
    }

    /// The canonical sum.
    fn tree(&mut self, node: Node, operation: usize, element: usize) -> Id {
        match node.children() {
            None => self.leaf(operation, node.lo, element),
            Some((left, right)) => {
                let left = self.tree(left, operation, element);
                let right = self.tree(right, operation, element);
                self.sum(left, right)
            }
        }
    }

    fn id(&mut self, expression: Expression) -> Id {
        let (Expression::Sum(Id(left), _) | Expression::Finish(Id(left))) = expression;
        let left = left as usize;
        if let Some(&Some((latest, id))) = self.latest.get(left)
            && latest == expression
        {
            return id;
        }
        let next = Id((self.leaves() + self.composed.len()) as u32);
        let id = *self.ids.entry(expression).or_insert_with(|| {
            self.composed.push(expression);
            next
        });
        if self.latest.len() <= left {
            self.latest.resize(self.leaves() + self.composed.len(), None);
        }
        self.latest[left] = Some((expression, id));
        id
    }

    /// `(r0[7] + r1[7])`, cut short where it gets long: a wrong schedule may add sums of sums.
    fn text(&self, id: Id, operation: usize) -> String {
        const LONG: usize = 500;
        let mut text = String::new();
        self.write(id, operation, LONG, &mut text);
        if text.len() > LONG {
            text.push_str(" ...");
        }
        text
    }

    fn write(&self, id: Id, operation: usize, long: usize, text: &mut String) {
        if text.len() > long {
            return;
        }
        let id = id.0 as usize;
        let Some(composed) = id.checked_sub(self.leaves()) else {
            let (rank, element) = (id / self.elements % self.world_size, id % self.elements);
            text.push_str(&format!("r{rank}[{element}]"));
            let of = id / self.elements / self.world_size;
            if of != operation {
                text.push_str(&format!(" of operation {of}"));
            }
            return;
        };
        match self.composed[composed] {
            Expression::Sum(left, right) => {
                text.push('(');
                self.write(left, operation, long, text);
                text.push_str(" + ");
                self.write(right, operation, long, text);
                text.push(')');
            }
            Expression::Finish(value) => {
                text.push_str("finish(");
                self.write(value, operation, long, text);
                text.push(')');
            }
        }
    }
}
