//! Connections at the level `tls`, under everything that somebody between their ends may do.
//! No sockets: bytes in, bytes out.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
};

use drumline_store::{
    auth::{Channel, Expected, Handshake, Hello, Level, Nonce, Refusal, Secret},
    secured::{BLOCK_BYTES, Secured},
};
use proptest::prelude::*;

/// One end of a connection that somebody else carries.
#[derive(Debug, Default)]
struct Pipe {
    /// What has come. `None` at the end: nothing follows.
    incoming: VecDeque<u8>,
    is_cut: bool,
    outgoing: Vec<u8>,
    /// How many bytes it takes until somebody carries them.
    room: usize,
}

impl Read for Pipe {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self.incoming.is_empty() {
            true if self.is_cut => Ok(0),
            true => Err(ErrorKind::WouldBlock.into()),
            false => self.incoming.read(bytes),
        }
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(self.room - self.outgoing.len());
        if taken == 0 && !bytes.is_empty() {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.outgoing.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type End = Secured<PipeCell>;

/// The same, within reach of the test.
#[derive(Clone, Debug)]
struct PipeCell(std::rc::Rc<std::cell::RefCell<Pipe>>);

impl Read for PipeCell {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.borrow_mut().read(bytes)
    }
}

impl Write for PipeCell {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl PipeCell {
    fn new() -> PipeCell {
        let pipe = Pipe { room: usize::MAX, ..Pipe::default() };
        PipeCell(std::rc::Rc::new(std::cell::RefCell::new(pipe)))
    }

    fn sent(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.borrow_mut().outgoing)
    }

    fn come(&self, bytes: &[u8]) {
        self.0.borrow_mut().incoming.extend(bytes);
    }

    fn cut(&self) {
        self.0.borrow_mut().is_cut = true;
    }
}

fn secret() -> Option<Secret> {
    Some(Secret::new("the secret of this job").unwrap())
}

fn hello(rank: usize) -> Hello {
    Hello { channel: Channel::Data(0), rank, world_size: 2, group: 7 }
}

fn expected(rank: usize) -> Expected {
    Expected { ranks: rank..rank + 1, world_size: 2, group: 7 }
}

fn handshakes(levels: [Level; 2]) -> [Handshake; 2] {
    let nonce = || Nonce::random().unwrap();
    [
        Handshake::call(hello(1), expected(0), secret(), nonce()).at(levels[0]),
        Handshake::answer(hello(0), expected(1), secret(), nonce()).at(levels[1]),
    ]
}

/// Carries the bytes of a handshake until both ends are silent. `wire` sees what is sent, and by whom,
/// and may change it.
fn shake(
    ends: &mut [Handshake; 2],
    mut wire: impl FnMut(usize, &mut Vec<u8>),
) -> [Option<Refusal>; 2] {
    let mut refused = [None, None];
    loop {
        let mut moved = false;
        for from in 0..2 {
            let mut bytes = ends[from].take_output();
            if bytes.is_empty() {
                continue;
            }
            moved = true;
            wire(from, &mut bytes);
            let mut rest = &bytes[..];
            while !rest.is_empty() && ends[1 - from].wanted() > 0 {
                let piece = ends[1 - from].wanted().min(rest.len());
                if let Err(refusal) = ends[1 - from].receive(&rest[..piece]) {
                    refused[1 - from] = Some(refusal);
                }
                rest = &rest[piece..];
            }
        }
        if !moved {
            return refused;
        }
    }
}

/// Both ends of a connection, and what carries each.
fn connected() -> [(End, PipeCell); 2] {
    let mut ends = handshakes([Level::Tls; 2]);
    assert_eq!(shake(&mut ends, |_, _| {}), [None, None]);
    ends.map(|mut end| {
        assert!(end.is_done());
        let pipe = PipeCell::new();
        (Secured::new(pipe.clone(), end.take_layer().unwrap()), pipe)
    })
}

/// All that can be read until the end, or the first error; and what was read before.
fn read_all(end: &mut End) -> (Vec<u8>, io::Result<()>) {
    let mut all = Vec::new();
    let mut bytes = [0; 1000];
    loop {
        match end.read(&mut bytes) {
            Ok(0) => return (all, Ok(())),
            Ok(count) => all.extend_from_slice(&bytes[..count]),
            Err(error) => return (all, Err(error)),
        }
    }
}

fn is_forged(error: &io::Error) -> bool {
    error.kind() == ErrorKind::InvalidData
        && error.to_string().contains("somebody changed bytes on the way")
}

#[test]
fn what_is_written_is_read_and_its_end_is_told_from_a_cut() {
    let [(mut a, from_a), (mut b, from_b)] = connected();
    let bytes: Vec<u8> = (0..3 * BLOCK_BYTES + 5).map(|it| (it % 251) as u8).collect();
    for swapped in [false, true] {
        let (from, to, wire, into) = match swapped {
            false => (&mut a, &mut b, &from_a, &from_b),
            true => (&mut b, &mut a, &from_b, &from_a),
        };
        from.write_all(&bytes).unwrap();
        let sealed = wire.sent();
        assert!(!sealed.windows(64).any(|part| part == &bytes[..64]), "not sealed");
        into.come(&sealed);
        let (read, error) = read_all(to);
        assert!(read == bytes && error.unwrap_err().kind() == ErrorKind::WouldBlock);
    }
    a.end().unwrap();
    from_b.come(&from_a.sent());
    assert!(read_all(&mut b).1.is_ok(), "it has ended");
    assert!(a.write(b"more").is_err());
    from_a.cut();
    assert_eq!(read_all(&mut a).1.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// Whether a place in a row of TLS records is in the type and version that begin each of them. They say
/// nothing in TLS 1.3: what is meant is sealed.
fn is_front(records: &[u8], at: usize) -> bool {
    let mut begin = 0;
    while begin + 5 <= at {
        let length = u16::from_be_bytes([records[begin + 3], records[begin + 4]]);
        let next = begin + 5 + usize::from(length);
        if at < next {
            return false;
        }
        begin = next;
    }
    at - begin < 3
}

/// A server reads when the kernel has bytes, and then as long as the layer says that it holds some.
#[test]
fn nothing_that_has_left_the_stream_is_forgotten() {
    let [(mut a, from_a), (mut b, from_b)] = connected();
    a.write_all(&[7; BLOCK_BYTES]).unwrap();
    // TLS is given a few kilobytes at a time. Some of these come in one of them with the block's end.
    for _ in 0..25 {
        a.write_all(&[7; 100]).unwrap();
    }
    from_b.come(&from_a.sent());
    let (mut count, mut bytes) = (0, vec![0; BLOCK_BYTES]);
    while !from_b.0.borrow().incoming.is_empty() || b.holds_input() {
        match b.read(&mut bytes) {
            Ok(read) => count += read,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    assert_eq!(count, BLOCK_BYTES + 2500);
}

/// Every byte of three messages in turn: nothing that was not sent is ever read.
#[test]
fn a_changed_byte_anywhere_is_noticed() {
    let mut length = 1;
    let mut at = 0;
    while at < length {
        let [(mut a, from_a), (mut b, from_b)] = connected();
        for part in [&b"first"[..], b"second", b"third"] {
            a.write_all(part).unwrap();
        }
        a.end().unwrap();
        let mut wire = from_a.sent();
        length = wire.len();
        wire[at] ^= 1 << (at % 8);
        from_b.come(&wire);
        from_b.cut();
        let (read, result) = read_all(&mut b);
        assert!(b"firstsecondthird".starts_with(&read[..]), "byte {at}: {read:?}");
        if is_front(&wire, at) {
            at += 1;
            continue;
        }
        let error = result.unwrap_err();
        // Who makes a record of TLS longer is noticed when so much has come, or at the end.
        let is_cut = error.kind() == ErrorKind::ConnectionReset;
        assert!(is_forged(&error) || is_cut, "byte {at}: {error}");
        at += 1;
    }
    assert!(length > 60);
}

/// Somebody with the whole conversation before him leaves out, repeats, swaps, or puts in what the other
/// end has said.
#[test]
fn blocks_fit_no_other_place() {
    type Change = fn(&mut Vec<Vec<u8>>, &[u8]);
    let changes: [(&str, Change, bool); 5] = [
        ("replay", |blocks, _| blocks.insert(1, blocks[0].clone()), true),
        ("swap", |blocks, _| blocks.swap(0, 1), true),
        ("drop", |blocks, _| drop(blocks.remove(1)), true),
        ("echo", |blocks, theirs| blocks.insert(0, theirs.to_vec()), true),
        ("cut", |blocks, _| blocks.truncate(2), false),
    ];
    for (name, change, forged) in changes {
        let [(mut a, from_a), (mut b, from_b)] = connected();
        b.write_all(b"theirs").unwrap();
        let theirs = from_b.sent();
        let mut blocks = Vec::new();
        for part in [&b"first"[..], b"secnd", b"third"] {
            a.write_all(part).unwrap();
            blocks.push(from_a.sent());
        }
        a.end().unwrap();
        blocks.push(from_a.sent());
        change(&mut blocks, &theirs);
        from_b.come(&blocks.concat());
        from_b.cut();
        let (read, result) = read_all(&mut b);
        assert!(b"firstsecndthird".starts_with(&read[..]), "{name}: {read:?}");
        let error = result.unwrap_err();
        let as_expected = match forged {
            true => is_forged(&error),
            false => error.kind() == ErrorKind::ConnectionReset,
        };
        assert!(as_expected, "{name}: {error}");
        assert!(read_all(&mut b).1.is_err(), "{name}: it stays so");
    }
}

#[test]
fn another_level_is_named_at_both_ends() {
    for ours in Level::ALL {
        for theirs in Level::ALL.into_iter().filter(|theirs| *theirs != ours) {
            let refused = shake(&mut handshakes([ours, theirs]), |_, _| {});
            let [caller, answerer] = refused.map(Option::unwrap);
            assert_eq!(caller, Refusal::OtherLevel { theirs, ours });
            assert_eq!(answerer, Refusal::OtherLevel { theirs: ours, ours: theirs });
            assert!(caller.to_string().contains("DRUMLINE_SECURITY"));
        }
    }
}

/// Somebody in the middle tells each end that the other one has its level: neither lets the other in.
#[test]
fn a_level_that_somebody_has_changed_on_the_way_is_no_level() {
    for [ours, theirs] in [[Level::Tls, Level::Auth], [Level::Auth, Level::Tls]] {
        let codes = [ours, theirs].map(|level| if level == Level::Auth { 1 } else { 3 });
        let mut ends = handshakes([ours, theirs]);
        let mut said = [false; 2];
        let refused = shake(&mut ends, |from, bytes| {
            if !std::mem::replace(&mut said[from], true) {
                bytes[6] = codes[1 - from];
            }
        });
        // One end speaks TLS and the other does not. The one that is refused closes the connection.
        let mut refused = refused.into_iter().flatten().peekable();
        assert!(refused.peek().is_some());
        assert!(refused.all(|it| matches!(it, Refusal::WrongSecret | Refusal::Tls(_))));
        assert!(ends.iter().all(|end| end.peer().is_none()));
    }
}

#[test]
fn levels_above_auth_take_a_secret() {
    let nonce = Nonce::random().unwrap();
    let mut ends = [
        Handshake::call(hello(1), expected(0), None, nonce).at(Level::Tls),
        Handshake::answer(hello(0), expected(1), None, nonce).at(Level::Tls),
    ];
    let refused = shake(&mut ends, |_, _| {});
    assert_eq!(refused, [const { Some(Refusal::LevelWithoutSecret(Level::Tls)) }; 2]);
}

/// Every byte of the handshake at `tls`, in both directions.
#[test]
fn a_changed_byte_of_a_handshake_lets_nobody_in() {
    let mut said = [Vec::new(), Vec::new()];
    shake(&mut handshakes([Level::Tls; 2]), |from, bytes| said[from].extend_from_slice(bytes));
    for (by, said) in said.into_iter().enumerate() {
        let in_front = |at: usize| {
            at.checked_sub(Hello::BYTES).is_some_and(|at| is_front(&said[Hello::BYTES..], at))
        };
        for at in (0..said.len()).filter(|at| !in_front(*at)) {
            let mut ends = handshakes([Level::Tls; 2]);
            let mut seen = 0;
            shake(&mut ends, |from, bytes| {
                if from == by {
                    if let Some(byte) = at.checked_sub(seen).and_then(|at| bytes.get_mut(at)) {
                        *byte ^= 1 << (at % 8);
                    }
                    seen += bytes.len();
                }
            });
            assert_eq!(ends[1 - by].peer(), None, "byte {at} by {by}");
        }
    }
}

proptest! {
    /// Whatever the stream takes at a time, and however writes and reads are cut.
    #[test]
    fn bytes_come_as_they_were_written(
        portions in prop::collection::vec((0..200_usize, 0..100_000_usize, 1..5_000_usize), 1..12),
        room in 1..100_000_usize,
    ) {
        let [(mut a, from_a), (mut b, from_b)] = connected();
        from_a.0.borrow_mut().room = room;
        let (mut written, mut read) = (Vec::new(), Vec::new());
        for (head, rest, most) in portions {
            let bytes: Vec<u8> = (0..head + rest).map(|it| (it % 253) as u8).collect();
            let mut left = &bytes[..];
            while !left.is_empty() {
                let (first, second) = left.split_at(head.min(left.len()));
                match a.write_vectored(&[io::IoSlice::new(first), io::IoSlice::new(second)]) {
                    Ok(count) => left = &left[count..],
                    Err(error) => {
                        prop_assert_eq!(error.kind(), ErrorKind::WouldBlock);
                        prop_assert!(a.holds_output());
                    }
                }
                from_b.come(&from_a.sent());
                let mut portion = vec![0; most];
                match b.read(&mut portion) {
                    Ok(count) => read.extend_from_slice(&portion[..count]),
                    Err(error) => prop_assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
            written.extend(bytes);
        }
        a.end().unwrap();
        while !a.has_ended() {
            from_b.come(&from_a.sent());
            let _ = a.flush();
        }
        from_b.come(&from_a.sent());
        let (rest, result) = read_all(&mut b);
        prop_assert!(result.is_ok());
        read.extend(rest);
        prop_assert!(read == written);
    }
}
