//! Two ends over a pipe that takes and gives bytes in odd portions.

use std::{
    cell::Cell,
    collections::VecDeque,
    io::{self, Read, Write},
    rc::Rc,
    sync::{Arc, Mutex},
    time::Instant,
};

use drumline_schedule::step::Rank;
use proptest::prelude::*;

use super::{
    by_tag::ByTag,
    exchange::{CHUNK_BYTES, Exchange, WAITING_MAX},
    frame::{Frame, Offer},
    *,
};
use crate::transport::duplex::Duplex;
use crate::{Cause, DType, Result};

/// One end of two byte pipes. How much moves in one call is up to the seed.
#[derive(Debug)]
struct Pipe {
    from: Arc<Mutex<VecDeque<u8>>>,
    to: Arc<Mutex<VecDeque<u8>>>,
    random: u64,
}

const PIPE_BYTES: usize = 3000;

impl Pipe {
    fn pair(seed: u64) -> [Pipe; 2] {
        let (a, b) = (Arc::default(), Arc::default());
        [
            Pipe { from: Arc::clone(&a), to: Arc::clone(&b), random: seed },
            Pipe { from: b, to: a, random: !seed },
        ]
    }

    /// At most `max` bytes, or none for now.
    fn portion(&mut self, max: usize) -> io::Result<usize> {
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let portion = (self.random >> 33) as usize % 700;
        match max.min(portion) {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            bytes => Ok(bytes),
        }
    }
}

impl Read for Pipe {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let from = self.from.clone();
        let mut from = from.lock().unwrap();
        let portion = self.portion(bytes.len().min(from.len()))?;
        for (place, byte) in bytes.iter_mut().zip(from.drain(..portion)) {
            *place = byte;
        }
        Ok(portion)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let to = self.to.clone();
        let mut to = to.lock().unwrap();
        let portion = self.portion(bytes.len().min(PIPE_BYTES.saturating_sub(to.len())))?;
        to.extend(&bytes[..portion]);
        Ok(portion)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Duplex for Pipe {
    fn end(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Buffer {
    bytes: Vec<u8>,
    result: Arc<Mutex<Option<Vec<u8>>>>,
}

impl Message for Buffer {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn complete(self: Box<Self>, result: Result<Rank>) {
        result.unwrap();
        assert!(self.result.lock().unwrap().replace(self.bytes).is_none(), "completed twice");
    }
}

type Received = Arc<Mutex<Option<Vec<u8>>>>;

fn point(direction: Direction, tag: u64, bytes: Vec<u8>) -> (Point, Received) {
    let result = Received::default();
    let content = Content::Elements { dtype: DType::U8, count: bytes.len() };
    let call = PointCall { direction, peer: Some(1), tag, content };
    (Point::new(call, Box::new(Buffer { bytes, result: result.clone() }), Instant::now()), result)
}

fn content(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|index| (number * 131 + index * 7 + index / 256) as u8).collect()
}

/// A message of a test: its tag, its length, and when each side calls.
#[derive(Clone, Copy, Debug)]
struct Plan {
    from: usize,
    tag: u64,
    len: usize,
    called: [usize; 2],
}

/// Runs both ends until all messages have arrived. Returns what was received.
fn exchange(plans: &[Plan], seed: u64) -> Vec<Vec<u8>> {
    let mut links = Pipe::pair(seed).map(|pipe| {
        let mut link = PointLink::new(1);
        link.connect(pipe);
        link
    });
    let mut ended: [Vec<Ended>; 2] = Default::default();
    let mut results: Vec<[Received; 2]> = plans.iter().map(|_| Default::default()).collect();
    let open = Rc::new(Cell::new(2 * plans.len()));
    for turn in 0..200_000 {
        for end in 0..2 {
            for (number, plan) in plans.iter().enumerate().filter(|it| it.1.called[end] == turn) {
                let (direction, bytes) = match plan.from == end {
                    true => (Direction::Send, content(number, plan.len)),
                    false => (Direction::Receive, vec![0; plan.len]),
                };
                let (point, result) = point(direction, plan.tag, bytes);
                results[number][usize::from(plan.from != end)] = result;
                links[end].post(point, &mut ended[end]);
            }
            links[end].on_readable();
            links[end].progress(&mut ByTag::default(), &mut ended[end]).unwrap();
            for Ended { point, outcome } in ended[end].drain(..) {
                assert!(matches!(outcome, Outcome::Done), "{outcome:?}");
                point.complete(Ok(()));
                open.set(open.get() - 1);
            }
        }
        if open.get() == 0 {
            assert!(links.iter().all(|link| !link.is_pending() && !link.wants_to_write()));
            return results
                .into_iter()
                .map(|[_, received]| received.lock().unwrap().take().unwrap())
                .collect();
        }
    }
    panic!("{} calls wait for ever", open.get());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn messages_of_one_tag_arrive_in_order_whatever_the_stream_does(
        picks in prop::collection::vec((0_usize..2, 0_u64..3, 0_usize..5000, 0_usize..40, 0_usize..40), 1..12),
        seed: u64,
    ) {
        let mut plans: Vec<Plan> = picks
            .into_iter()
            .map(|(from, tag, len, ours, theirs)| Plan { from, tag, len, called: [ours, theirs] })
            .collect();
        // Both sides make their calls for one direction and tag in the same order.
        for from in 0..2 {
            for tag in 0..3 {
                for end in 0..2 {
                    let same = |plan: &&mut Plan| plan.from == from && plan.tag == tag;
                    let mut turns: Vec<usize> =
                        plans.iter_mut().filter(same).map(|plan| plan.called[end]).collect();
                    turns.sort_unstable();
                    for (plan, turn) in plans.iter_mut().filter(same).zip(turns) {
                        plan.called[end] = turn;
                    }
                }
            }
        }
        let received = exchange(&plans, seed);
        for (number, (plan, received)) in plans.iter().zip(&received).enumerate() {
            prop_assert_eq!(received, &content(number, plan.len), "message {}", number);
        }
    }
}

#[test]
fn a_short_message_overtakes_a_long_one() {
    let mut exchange = Exchange::new(1);
    let mut ended = Vec::new();
    for (tag, len) in [(1, 3 * CHUNK_BYTES), (2, 10)] {
        exchange.post(point(Direction::Send, tag, vec![0; len]).0, &mut ended);
    }
    for id in [0, 1] {
        exchange.next_output().unwrap();
        exchange.on_frame(Frame::Grant { id }, &mut ByTag::default(), &mut ended).unwrap();
    }
    let mut order = Vec::new();
    while let Some((Frame::Payload { id, .. }, Some(chunk))) = exchange.next_output() {
        order.push(id);
        exchange.on_written(chunk, &mut ended);
    }
    assert_eq!(order, [0, 1, 0, 0]);
    assert_eq!(ended.len(), 2);
}

#[test]
fn what_no_correct_peer_sends_is_refused() {
    let offer = |id, bytes| Offer { id, tag: 9, dtype: DType::U8 as u8, count: bytes, bytes };
    let refused = |frames: &[Frame]| {
        let mut exchange = Exchange::new(4);
        let mut ended = Vec::new();
        exchange.post(point(Direction::Receive, 9, vec![0; 8]).0, &mut ended);
        exchange.post(point(Direction::Send, 9, vec![0; 8]).0, &mut ended);
        let error = frames
            .iter()
            .find_map(|frame| match *frame {
                Frame::Payload { id, bytes } => exchange.on_payload(id, bytes).err(),
                frame => exchange.on_frame(frame, &mut ByTag::default(), &mut ended).err(),
            })
            .unwrap();
        assert!(matches!(error, Cause::Protocol { peer: 4, .. }), "{error}");
        error.to_string()
    };
    let grant = Frame::Grant { id: 0 };
    assert!(refused(&[Frame::Offer(offer(1, 8))]).contains("out of order"));
    assert!(refused(&[grant, grant]).contains("not offered"));
    assert!(refused(&[Frame::Grant { id: 7 }]).contains("not offered"));
    assert!(refused(&[Frame::Payload { id: 0, bytes: 8 }]).contains("not asked for"));
    let first = Frame::Offer(offer(0, 8));
    assert!(refused(&[first, Frame::Payload { id: 0, bytes: 9 }]).contains("longer"));
    assert!(refused(&[first, Frame::Payload { id: 0, bytes: 0 }]).contains("longer"));
    let half = Frame::Payload { id: 0, bytes: 5 };
    assert!(refused(&[first, half, half]).contains("longer"));
    let flood: Vec<_> = (0..=WAITING_MAX as u64 + 1).map(|id| Frame::Offer(offer(id, 8))).collect();
    assert!(refused(&flood).contains("more messages"));
}

#[test]
fn frames_survive_the_wire() {
    let offer = Offer { id: 1, tag: u64::MAX, dtype: 3, count: 4, bytes: 16 };
    for frame in
        [Frame::Offer(offer), Frame::Grant { id: 1 << 40 }, Frame::Payload { id: 5, bytes: 6 }]
    {
        assert_eq!(Frame::decode(&frame.encode()), Some(frame));
    }
    assert_eq!(Frame::decode(&[0; Frame::BYTES]), None);
    let bytes = Frame::Offer(offer).encode();
    assert_eq!((bytes[0], bytes[1], bytes[8], bytes[24], bytes[32]), (1, 3, 1, 4, 16));
    assert_eq!(bytes[16..24], [255; 8]);
}

#[test]
fn sides_that_differ_are_told_of_each_other() {
    for (dtype, count, bytes) in [(DType::U8 as u8, 7, 7), (DType::I8 as u8, 8, 8), (99, 8, 8)] {
        let mut exchange = Exchange::new(1);
        let mut ended = Vec::new();
        let offer = Offer { id: 0, tag: 2, dtype, count, bytes };
        exchange.on_frame(Frame::Offer(offer), &mut ByTag::default(), &mut ended).unwrap();
        exchange.post(point(Direction::Receive, 2, vec![0; 8]).0, &mut ended);
        let Outcome::Failed(cause) = &ended[0].outcome else { panic!("{ended:?}") };
        let text = cause.to_string();
        assert!(text.contains(&offer.to_string()), "{text}");
        assert!(text.contains("recv(from 1, tag 2) of 8 u8"), "{text}");
    }
}
