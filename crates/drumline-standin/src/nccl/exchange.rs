//! An operation on a stream: what it sends, and what it does with what it gets.

use std::sync::Arc;

use super::communicator::{Communicator, Shared, lock};
use super::kinds::{Factor, Reduction, Type};
use super::mail::{Channel, Key, Mail};
use super::sums;
use crate::memory::{Memory, POISON, Span};
use crate::work::{Foreign, Foreigner};

/// What becomes of the messages that come.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    Nothing,
    /// They are reduced in the order of ranks.
    Reduced(Span, Type, Reduction),
    /// The message of a rank goes to a place.
    Placed(Vec<(usize, Span)>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Every rank sends something to every rank, though it be nothing: a collective needs all of them.
    Collective,
    Send(usize),
    Receive(usize),
}

/// One call of the program.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The ranks that get bytes, and which.
    pub(crate) outgoing: Vec<(usize, Span)>,
    pub(crate) outcome: Outcome,
    number: u64,
    is_over: bool,
}

impl Part {
    pub(crate) fn new(
        name: &'static str,
        kind: Kind,
        outgoing: Vec<(usize, Span)>,
        outcome: Outcome,
    ) -> Self {
        Part { name, kind, outgoing, outcome, number: 0, is_over: false }
    }

    /// Its number among those that go the same way, which the peers count as well.
    pub(crate) fn count(&mut self, communicator: &mut Communicator) {
        let count = match self.kind {
            Kind::Collective => &mut communicator.collectives,
            Kind::Send(to) => &mut communicator.sent[to],
            Kind::Receive(from) => &mut communicator.received[from],
        };
        *count += 1;
        self.number = *count;
    }

    fn channel(&self) -> Channel {
        match self.kind {
            Kind::Collective => Channel::Collective,
            Kind::Send(_) | Kind::Receive(_) => Channel::Data,
        }
    }

    fn destinations(&self) -> Vec<Span> {
        match &self.outcome {
            Outcome::Nothing => Vec::new(),
            Outcome::Reduced(to, ..) => vec![*to],
            Outcome::Placed(places) => places.iter().map(|(_, to)| *to).collect(),
        }
    }

    /// What this rank has in place already is only read, and never written.
    fn forget_what_is_in_place(&mut self, own: usize) {
        let outgoing = &self.outgoing;
        if let Outcome::Placed(places) = &mut self.outcome {
            places.retain(|(from, to)| {
                *from != own
                    || !outgoing.iter().any(|(rank, it)| *rank == own && it.address == to.address)
            });
        }
    }

    fn send(&self, size: usize, mail: &mut Mail, memory: &Memory) {
        let mut messages: Vec<(usize, Arc<Vec<u8>>)> = Vec::new();
        for (rank, from) in &self.outgoing {
            // The same bytes go to many ranks in most operations.
            let known = self
                .outgoing
                .iter()
                .position(|(_, it)| it.address == from.address && it.len == from.len);
            let bytes = match known.and_then(|at| messages.get(at)) {
                Some((_, bytes)) => bytes.clone(),
                None => Arc::new(self.read(from, memory)),
            };
            messages.push((*rank, bytes));
        }
        match self.kind {
            Kind::Collective => {
                for rank in 0..size {
                    let bytes =
                        messages.iter().find(|(to, _)| *to == rank).map(|(_, bytes)| bytes.clone());
                    mail.send(rank, Channel::Collective, self.number, bytes.unwrap_or_default());
                }
            }
            _ => messages
                .into_iter()
                .for_each(|(to, bytes)| mail.send(to, Channel::Data, self.number, bytes)),
        }
    }

    /// The bytes of a span, multiplied with the factor of this rank.
    fn read(&self, from: &Span, memory: &Memory) -> Vec<u8> {
        let mut bytes = vec![POISON; from.len];
        memory.read(from, &mut bytes);
        if let Outcome::Reduced(_, kind, Reduction { factor: Some(factor), .. }) = &self.outcome {
            sums::scale(*kind, &mut bytes, &value_of(factor, *kind, memory));
        }
        bytes
    }

    /// Ends if all messages have come. Some(mistake): their lengths do not fit.
    fn go_on(&mut self, size: usize, mail: &mut Mail, memory: &mut Memory) -> Option<String> {
        let channel = self.channel();
        let key = |from, channel, number| Key { from, channel, number };
        let from: Vec<usize> = match self.kind {
            Kind::Collective => (0..size).collect(),
            Kind::Receive(from) => vec![from],
            Kind::Send(to) => {
                self.is_over = mail.take(key(to, Channel::Receipt, self.number)).is_some();
                return None;
            }
        };
        if !from.iter().all(|rank| mail.has_come(key(*rank, channel, self.number))) {
            return None;
        }
        self.is_over = true;
        let come: Vec<(usize, Vec<u8>)> = from
            .iter()
            .map(|rank| (*rank, mail.take(key(*rank, channel, self.number)).unwrap_or_default()))
            .collect();
        if let Kind::Receive(from) = self.kind {
            mail.send(from, Channel::Receipt, self.number, Arc::default());
        }
        self.finish(&come, memory)
    }

    fn finish(&self, come: &[(usize, Vec<u8>)], memory: &mut Memory) -> Option<String> {
        let misfit = |rank: usize, came: usize, wanted: usize| {
            Some(format!(
                "{}: {came} bytes came from rank {rank}, and {wanted} were expected",
                self.name
            ))
        };
        match &self.outcome {
            Outcome::Nothing => {}
            Outcome::Reduced(to, kind, reduction) => {
                if let Some((rank, bytes)) = come.iter().find(|(_, bytes)| bytes.len() != to.len) {
                    return misfit(*rank, bytes.len(), to.len);
                }
                let mut inputs = come.iter().map(|(_, bytes)| bytes);
                let mut sum = inputs.next().cloned().unwrap_or_default();
                inputs.for_each(|it| sums::fold(*kind, reduction.operator, &mut sum, it));
                if let Some(divisor) = reduction.divisor {
                    sums::divide(*kind, &mut sum, divisor);
                }
                memory.write(to, &sum);
            }
            Outcome::Placed(places) => {
                for (rank, to) in places {
                    let bytes =
                        come.iter().find(|(from, _)| from == rank).map_or(&[][..], |(_, it)| it);
                    if bytes.len() != to.len {
                        return misfit(*rank, bytes.len(), to.len);
                    }
                    memory.write(to, bytes);
                }
            }
        }
        None
    }
}

fn value_of(factor: &Factor, kind: Type, memory: &Memory) -> Vec<u8> {
    match factor {
        Factor::Value(bytes) => bytes.clone(),
        Factor::At(address) => {
            let mut bytes = vec![POISON; kind.size()];
            if let Ok(span) = memory.span(*address, bytes.len()) {
                memory.read(&span, &mut bytes);
            }
            bytes
        }
    }
}

/// The calls of a group on one communicator and one stream: they go on together.
pub(crate) struct Exchange {
    communicator: Shared,
    parts: Vec<Part>,
    has_begun: bool,
}

impl Exchange {
    pub(crate) fn new(communicator: Shared, parts: Vec<Part>) -> Self {
        Exchange { communicator, parts, has_begun: false }
    }

    /// Reads all that is sent, and then poisons what is to be written.
    fn begin(&mut self, size: usize, rank: usize, mail: &mut Mail, memory: &mut Memory) {
        for part in &mut self.parts {
            part.send(size, mail, memory);
            part.forget_what_is_in_place(rank);
        }
        for to in self.parts.iter().flat_map(Part::destinations) {
            memory.fill(&to, POISON);
        }
    }
}

impl Foreign for Exchange {
    fn spans(&self) -> Vec<Span> {
        let outgoing =
            self.parts.iter().flat_map(|part| part.outgoing.iter().map(|(_, span)| *span));
        outgoing.chain(self.parts.iter().flat_map(Part::destinations)).collect()
    }

    fn step(&mut self, memory: &mut Memory) -> Foreigner {
        let shared = self.communicator.clone();
        let mut communicator = lock(&shared);
        let (size, rank) = (communicator.size, communicator.rank);
        // Aborted: what was to be written stays poison.
        let Some(mail) = &mut communicator.mail else { return Foreigner::Ended };
        if !self.has_begun {
            self.has_begun = true;
            self.begin(size, rank, mail, memory);
            mail.pump();
            return Foreigner::Moved;
        }
        let mut moved = mail.pump();
        for part in self.parts.iter_mut().filter(|it| !it.is_over) {
            if let Some(mistake) = part.go_on(size, mail, memory) {
                return Foreigner::Failed(mistake);
            }
            moved |= part.is_over;
        }
        moved |= mail.pump();
        let has_left = |part: &Part| match part.kind {
            Kind::Receive(_) => mail.has_left(Channel::Receipt, part.number),
            _ => mail.has_left(part.channel(), part.number),
        };
        if self.parts.iter().all(|part| part.is_over && has_left(part)) {
            Foreigner::Ended
        } else if moved {
            Foreigner::Moved
        } else {
            Foreigner::Waits
        }
    }
}
