//! Messages from rank to rank, as the plan has them.

use drumline_engine::DType;

use crate::member::{MessageOrder, Side};
use drumline_conformance::{Case, Kind};
use drumline_schedule::Topology;
use fastrand::Rng;

use crate::plan::Instruction;

/// What some ranks send to one, perhaps to itself.
#[derive(Clone, Debug)]
pub(crate) struct Messages {
    pub(crate) group: usize,
    pub(crate) from: Vec<usize>,
    pub(crate) to: usize,
    tag: u64,
    /// Whether they are received as they come.
    pub(crate) any: bool,
    /// Its data are what is sent.
    case: Case,
    /// They come before the planned call with this index.
    before: usize,
}

/// Messages that are received from any rank have tags of their own from here on: a receive from
/// any takes whatever has its tag.
const ANY_TAGS: u64 = 100;

/// Half of the jobs have some.
pub(crate) fn draw(rng: &mut Rng, world_size: usize, groups: usize, calls: usize) -> Vec<Messages> {
    let most = if world_size > 16 { 4 } else { 12 };
    let count = if rng.bool() { rng.usize(1..=most) } else { 0 };
    let one = |number| {
        let any = rng.u8(0..3) == 0;
        let mut from: Vec<usize> = (0..world_size).collect();
        rng.shuffle(&mut from);
        from.truncate(if any { rng.usize(1..=world_size.min(8)) } else { 1 });
        let dtype = DType::ALL[rng.usize(0..DType::ALL.len())];
        let elements = if rng.u8(0..4) == 0 { rng.usize(0..=2) } else { rng.usize(0..=400) };
        let kind = Kind::Broadcast(from[0]);
        Messages {
            group: rng.usize(0..groups),
            from,
            to: rng.usize(0..world_size),
            tag: if any { ANY_TAGS + number } else { rng.u64(0..3) },
            any,
            case: Case { kind, dtype, elements, uneven: false, seed: rng.u64(..) },
            before: rng.usize(0..=calls),
        }
    };
    (0..count as u64).map(one).collect()
}

/// What `rank` does before the call with that index. All ranks go through all messages and calls
/// in one order, so each may wait for any of them before it goes on; except for what it sends to
/// itself.
pub(crate) fn posts(rng: &mut Rng, all: &[Messages], rank: usize, call: usize) -> Vec<Instruction> {
    let mut posts = Vec::new();
    for (messages, it) in all.iter().enumerate().filter(|(_, it)| it.before == call) {
        let to = it.from.iter().filter(|from| **from == rank).map(|_| Side::SendTo(it.to));
        let receive = |from: &usize| match it.any {
            true => Side::ReceiveFromAny,
            false => Side::ReceiveFrom(*from),
        };
        let from = it.from.iter().filter(|_| it.to == rank).map(receive);
        let mut sides: Vec<Side> = to.chain(from).collect();
        // What is received from any rank, and sent by this one, is sent first: if all others have
        // left, there is nobody else to wait for.
        if !it.any && rng.bool() {
            sides.reverse();
        }
        let takes_part = !sides.is_empty();
        posts.extend(sides.into_iter().map(|side| Instruction::Post { messages, side }));
        if takes_part && rng.u8(0..3) == 0 {
            posts.push(Instruction::Wait { group: it.group });
        }
    }
    posts
}

impl Messages {
    /// What `rank` is to post.
    pub(crate) fn order(&self, rank: usize, side: Side) -> MessageOrder {
        let sent = self.sent_by(rank);
        let bytes = match side {
            Side::SendTo(_) => sent,
            Side::ReceiveFrom(_) | Side::ReceiveFromAny => vec![0xa5; sent.len()],
        };
        MessageOrder { side, tag: self.tag, dtype: self.case.dtype, bytes }
    }

    /// What a rank sends.
    pub(crate) fn sent_by(&self, rank: usize) -> Vec<u8> {
        let case = Case { kind: Kind::Broadcast(rank), ..self.case };
        case.expected(rank, &Topology::flat(rank + 1))
    }
}
