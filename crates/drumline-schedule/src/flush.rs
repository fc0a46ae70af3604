//! The pass that makes memory safe to overwrite.
//!
//! A message may be read from its source long after `Send` has returned. Before a step that
//! overwrites such a source this pass waits for the messages concerned, and at the end for all.
//!
//! It waits per destination, and only for as many messages as it must. Waiting for everything
//! would deadlock direct exchange: each rank would wait for its all-gather messages to be
//! fetched, and nobody fetches them before having got rid of its own.

use std::collections::BTreeMap;

use crate::step::{Loc, Rank, Step};

struct Pending {
    to: Rank,
    /// This message and those before it to the same rank.
    upto: usize,
    src: Loc,
}

pub(crate) fn insert(steps: Vec<Step>) -> Vec<Step> {
    let mut out = Vec::with_capacity(steps.len());
    let mut sent: BTreeMap<Rank, usize> = BTreeMap::new();
    let mut pending: Vec<Pending> = vec![];
    for step in steps {
        let overwritten = |message: &Pending| step.writes().any(|dst| message.src.overlaps(dst));
        flush(&mut pending, overwritten, &mut out);
        if let Step::Send { to, src } = step {
            let upto = sent.entry(to).or_default();
            *upto += 1;
            pending.push(Pending { to, upto: *upto, src });
        }
        out.push(step);
    }
    flush(&mut pending, |_| true, &mut out);
    out
}

fn flush(pending: &mut Vec<Pending>, must: impl Fn(&Pending) -> bool, out: &mut Vec<Step>) {
    // Pending messages stand in the order of sending, so the last one to a rank wins.
    let flushed: BTreeMap<Rank, usize> =
        pending.iter().filter(|m| must(m)).map(|m| (m.to, m.upto)).collect();
    if flushed.is_empty() {
        return;
    }
    pending.retain(|m| flushed.get(&m.to).is_none_or(|&upto| m.upto > upto));
    out.extend(flushed.into_iter().map(|(to, upto)| Step::Flush { to, upto }));
}

#[cfg(test)]
mod tests {
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
        assert_eq!(insert(steps), expected);
    }
}
