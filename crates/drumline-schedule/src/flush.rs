//! The pass that inserts [`Step::Flush`], so that memory is safe to overwrite.
//!
//! A transport may read the source of a message long after `Send` has returned. The pass inserts a flush
//! of the messages concerned before each step that overwrites their source, and a flush of all messages at
//! the end.
//!
//! A flush waits per destination, and for no more messages than necessary. Waiting for all messages would
//! deadlock direct exchange: each rank would wait until others have taken its results, and no rank takes
//! results before its own are gone.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::collective::Collective;
use crate::step::{Buffer, Loc, Rank, Span, Step};

pub(crate) fn insert(collective: Collective, steps: Vec<Step>) -> Vec<Step> {
    // Where a span of scratch says whose block lies there, any two lie at the same place.
    let place = |loc: Loc| match (collective, loc.buffer) {
        (Collective::ReduceScatter, Buffer::Scratch(_) | Buffer::Sum(_)) => {
            Loc { span: Span::WHOLE, ..loc }
        }
        _ => loc,
    };
    let mut out = Vec::with_capacity(steps.len());
    let mut sent: BTreeMap<Rank, usize> = BTreeMap::new();
    let mut pending = Pending::default();
    for step in steps {
        let overwritten: Vec<Message> =
            step.writes().flat_map(|dst| pending.read_from(place(dst))).collect();
        flush(&mut pending, overwritten, &mut out);
        if let Step::Send { to, src } = step {
            let upto = sent.entry(to).or_default();
            *upto += 1;
            pending.add(Message { to, upto: *upto }, place(src));
        }
        out.push(step);
    }
    let last = pending.last_to_each();
    flush(&mut pending, last, &mut out);
    out
}

fn flush(pending: &mut Pending, messages: Vec<Message>, out: &mut Vec<Step>) {
    let mut flushed: BTreeMap<Rank, usize> = BTreeMap::new();
    for Message { to, upto } in messages {
        let last = flushed.entry(to).or_default();
        *last = upto.max(*last);
    }
    for (to, upto) in flushed {
        pending.remove(Message { to, upto });
        out.push(Step::Flush { to, upto });
    }
}

/// Message number `upto` to rank `to`, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Message {
    to: Rank,
    upto: usize,
}

/// Messages that may still be read from their source. The index finds the messages that read from a place
/// without a look at all of them, because there may be as many messages and as many look-ups as ranks.
#[derive(Default)]
struct Pending {
    by_place: HashMap<Buffer, Sources>,
    /// The source of each message, by receiver and in the order of sending.
    by_receiver: BTreeMap<Rank, VecDeque<(usize, Loc)>>,
}

/// Messages that are read from one buffer.
#[derive(Default)]
struct Sources {
    /// The messages and their places, by the start of their span.
    by_start: BTreeMap<(u128, Message), Loc>,
    /// The length of the longest span, or more.
    longest: u128,
}

impl Pending {
    fn add(&mut self, message: Message, src: Loc) {
        let (start, end) = borders(src);
        let sources = self.by_place.entry(src.buffer).or_default();
        sources.longest = sources.longest.max(end - start);
        sources.by_start.insert((start, message), src);
        self.by_receiver.entry(message.to).or_default().push_back((message.upto, src));
    }

    fn read_from(&self, dst: Loc) -> impl Iterator<Item = Message> {
        let (start, end) = borders(dst);
        let near = self.by_place.get(&dst.buffer).into_iter().flat_map(move |sources| {
            let first = Message { to: 0, upto: 0 };
            sources.by_start.range((start.saturating_sub(sources.longest), first)..(end, first))
        });
        near.filter(move |(_, src)| src.overlaps(dst)).map(|(&(_, message), _)| message)
    }

    /// Removes this message, and all earlier messages to the same rank.
    fn remove(&mut self, Message { to, upto }: Message) {
        let Some(messages) = self.by_receiver.get_mut(&to) else { return };
        while let Some((number, src)) = messages.pop_front_if(|&mut (number, _)| number <= upto) {
            if let Some(sources) = self.by_place.get_mut(&src.buffer) {
                sources.by_start.remove(&(borders(src).0, Message { to, upto: number }));
            }
        }
    }

    fn last_to_each(&self) -> Vec<Message> {
        let receivers = self.by_receiver.iter();
        receivers.filter_map(|(&to, sent)| Some(Message { to, upto: sent.back()?.0 })).collect()
    }
}

/// The start of a span (rounded down) and its end (rounded up), in 2^-62 of the buffer.
fn borders(Loc { span, .. }: Loc) -> (u128, u128) {
    let [first, count, of] = [span.first, span.count, span.of.max(1)].map(|blocks| blocks as u128);
    ((first << 62) / of, ((first + count) << 62).div_ceil(of))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::step::Span;

    const HALVES: [Loc; 2] = [Loc::data(Span::block(0, 2)), Loc::data(Span::block(1, 2))];

    #[test]
    fn waits_for_what_is_overwritten_and_no_more() {
        let [low, high] = HALVES;
        let send = |to, src| Step::Send { to, src };
        let recv = |from, dst| Step::Recv { from, dst };
        let flush = |to, upto| Step::Flush { to, upto };

        let steps = vec![
            send(1, low),
            send(1, high),
            send(2, low),
            recv(3, Loc::scratch(0, Span::WHOLE)),
            recv(3, low),
            recv(3, low),
            send(1, low),
        ];
        let expected = vec![
            send(1, low),
            send(1, high),
            send(2, low),
            recv(3, Loc::scratch(0, Span::WHOLE)),
            flush(1, 1),
            flush(2, 1),
            recv(3, low),
            recv(3, low),
            send(1, low),
            flush(1, 3),
        ];
        assert_eq!(insert(Collective::AllReduce, steps), expected);
    }

    /// Inserts the same flushes, but looks at all messages for each step.
    fn insert_slowly(steps: &[Step]) -> Vec<Step> {
        let mut out: Vec<Step> = vec![];
        let mut sent: Vec<(Message, Loc)> = vec![];
        let flush = |sent: &mut Vec<(Message, Loc)>, dst: Option<Loc>, out: &mut Vec<Step>| {
            for to in 0..4 {
                let read = sent.iter().filter(|(message, src)| {
                    message.to == to && dst.is_none_or(|dst| src.overlaps(dst))
                });
                if let Some(upto) = read.map(|(message, _)| message.upto).max() {
                    sent.retain(|(message, _)| message.to != to || message.upto > upto);
                    out.push(Step::Flush { to, upto });
                }
            }
        };
        for step in steps {
            step.writes().for_each(|dst| flush(&mut sent, Some(dst), &mut out));
            if let Step::Send { to, src } = *step {
                let before = out
                    .iter()
                    .filter(|step| matches!(step, Step::Send { to: other, .. } if *other == to));
                let upto = before.count() + 1;
                sent.push((Message { to, upto }, src));
            }
            out.push(step.clone());
        }
        flush(&mut sent, None, &mut out);
        out
    }

    fn step() -> impl Strategy<Value = Step> {
        let span = (1_usize..7)
            .prop_flat_map(|of| (0..=of, 0..3_usize, Just(of)))
            .prop_map(|(first, count, of)| Span { first, count: count.min(of - first), of });
        let loc = (span, any::<bool>())
            .prop_map(|(span, own)| if own { Loc::data(span) } else { Loc::scratch(0, span) });
        (loc, 0_usize..4, any::<bool>()).prop_map(|(loc, peer, sends)| match sends {
            true => Step::Send { to: peer, src: loc },
            false => Step::Recv { from: peer, dst: loc },
        })
    }

    proptest! {
        #[test]
        fn nothing_that_is_read_is_overlooked(steps in prop::collection::vec(step(), 0..40)) {
            prop_assert_eq!(insert(Collective::AllReduce, steps.clone()), insert_slowly(&steps));
        }
    }
}
