//! A peer that sends given bytes: for `drumline-fuzz`; not part of the API.

use std::{
    io::{self, Read, Write},
    time::Instant,
};

use drumline_kernels::DType;
use drumline_schedule::step::Rank;

use super::{
    by_tag::ByTag,
    link::PointLink,
    point::{Content, Direction, Message, Outcome, Point, PointCall},
};
use crate::{Cause, Result, transport::duplex::Duplex};

/// The longest object that is received.
const OBJECT_BYTES_MAX: usize = 4096;

/// Lets a peer send the bytes `said` in pieces of `piece` bytes, and then end. This rank has a send (tag 0),
/// two receives of four numbers (tags 1 and 2), two receives of objects (tag 3) and a receive from any rank
/// (tag 4). Returns how many of these are complete.
///
/// # Errors
///
/// When the peer breaks the protocol.
pub fn messages_of(said: &[u8], piece: usize) -> Result<usize, Cause> {
    const PEER: Rank = 1;
    let numbers = Content::Elements { dtype: DType::F32, count: 4 };
    let object = Content::Object { bytes: OBJECT_BYTES_MAX };
    let point = |direction, peer, tag, content| {
        let call = PointCall { direction, peer, tag, content };
        let bytes = if content == numbers { vec![0; 16] } else { Vec::new() };
        Point::new(call, Box::new(Buffer(bytes)), Instant::now())
    };
    let mut link = PointLink::new(PEER);
    let (mut any, mut ended) = (ByTag::default(), Vec::new());
    link.post(point(Direction::Send, Some(PEER), 0, numbers), &mut ended);
    for (tag, content) in [(1, numbers), (2, numbers), (3, object), (3, object)] {
        link.post(point(Direction::Receive, Some(PEER), tag, content), &mut ended);
    }
    any.push(4, point(Direction::Receive, None, 4, numbers));
    link.connect(Said { rest: said, piece: piece.max(1) });
    while link.broken().is_none() {
        link.on_readable();
        if !link.progress(&mut any, &mut ended)? {
            break;
        }
    }
    Ok(ended.iter().filter(|ended| matches!(ended.outcome, Outcome::Done)).count())
}

#[derive(Debug)]
struct Said<'b> {
    rest: &'b [u8],
    piece: usize,
}

impl Read for Said<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let piece = self.piece.min(bytes.len());
        self.rest.read(&mut bytes[..piece])
    }
}

impl Write for Said<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Duplex for Said<'_> {
    fn end(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Buffer(Vec<u8>);

impl Message for Buffer {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn make_room(&mut self, bytes: usize) {
        self.0.resize(bytes, 0);
    }

    fn complete(self: Box<Self>, _: Result<Rank>) {}
}
