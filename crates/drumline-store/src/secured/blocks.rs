//! The level `integrity`: blocks that are sealed with AES-256-GCM.
//!
//! ```text
//! 0            4               20               20 + length     36 + length
//! ┌────────────┬───────────────┬────────────────┬───────────────┐
//! │length, end │ tag, 16 bytes │ sealed payload │ tag, 16 bytes │
//! └────────────┴───────────────┴────────────────┴───────────────┘
//! ```
//!
//! The highest bit of the first word marks the last block. Both tags also cover the number of the block, as
//! their nonce. Each direction of each connection has its own key. So no nonce is ever used twice with a key,
//! and a block is valid in one place only. The length has a tag of its own: otherwise the receiver would
//! notice a changed length only after that many bytes have come.

use std::{
    fmt,
    io::{self, ErrorKind, Read, Write},
};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use super::seal::{BLOCK_BYTES, forged};

const WORD_BYTES: usize = 4;
const TAG_BYTES: usize = 16;
const HEAD_BYTES: usize = WORD_BYTES + TAG_BYTES;
const WIRE_BYTES_MAX: usize = HEAD_BYTES + BLOCK_BYTES + TAG_BYTES;
const END: u32 = 1 << 31;

/// The length of the buffer for received bytes: at first enough for short messages, later for a few whole
/// blocks.
const INPUT_BYTES_MIN: usize = 4 << 10;
const INPUT_BYTES_MAX: usize = 4 * WIRE_BYTES_MAX;

/// The sealed blocks of one connection, in both directions.
pub(crate) struct Blocks {
    sealing: Numbered,
    opening: Numbered,
    /// Sealed bytes. The first `sent` of them are in the stream.
    output: Vec<u8>,
    sent: usize,
    /// Received bytes. Those from `begin` to `end` are not used yet.
    input: Vec<u8>,
    begin: usize,
    end: usize,
    /// The head of the block at `begin`, if it has been opened.
    body: Option<Body>,
    /// The length of the opened payload at `begin`. Its tag follows.
    opened: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// The last block has come.
    Ended,
    /// Some bytes were wrong. Nothing after them counts.
    Forged,
}

#[derive(Clone, Copy, Debug)]
struct Body {
    length: usize,
    is_last: bool,
}

/// A key, and the number of the next block.
struct Numbered {
    key: LessSafeKey,
    next: u64,
}

impl Numbered {
    fn new(key: &[u8; 32]) -> io::Result<Numbered> {
        let key = UnboundKey::new(&AES_256_GCM, key).map_err(|_| refused("its key"))?;
        Ok(Numbered { key: LessSafeKey::new(key), next: 0 })
    }

    /// The nonces for the head and for the payload of the next block.
    fn nonces(&self) -> [Nonce; 2] {
        [HEAD, PAYLOAD].map(|part| {
            let mut nonce = [0; NONCE_LEN];
            nonce[..8].copy_from_slice(&self.next.to_le_bytes());
            nonce[8] = part;
            Nonce::assume_unique_for_key(nonce)
        })
    }

    fn step(&mut self) -> io::Result<()> {
        self.next = self.next.checked_add(1).ok_or_else(|| refused("another block"))?;
        Ok(())
    }
}

const HEAD: u8 = 0;
const PAYLOAD: u8 = 1;

fn refused(what: &str) -> io::Error {
    io::Error::other(format!("the cipher does not take {what}"))
}

impl Blocks {
    /// The blocks of a connection whose ends seal with these keys.
    pub(crate) fn new(ours: &[u8; 32], theirs: &[u8; 32]) -> io::Result<Blocks> {
        Ok(Blocks {
            sealing: Numbered::new(ours)?,
            opening: Numbered::new(theirs)?,
            output: Vec::new(),
            sent: 0,
            input: Vec::new(),
            begin: 0,
            end: 0,
            body: None,
            opened: 0,
            state: State::Open,
        })
    }

    pub(super) fn holds_output(&self) -> bool {
        self.sent < self.output.len()
    }

    pub(super) fn holds_input(&self) -> bool {
        let head = || self.end - self.begin >= HEAD_BYTES;
        match (self.state, self.body) {
            _ if self.opened > 0 => true,
            (State::Open, None) => head(),
            (State::Open, Some(body)) => self.end - self.begin >= body.length + TAG_BYTES,
            (State::Ended | State::Forged, _) => true,
        }
    }

    /// Seals as much of `parts` as fits one block, behind the bytes that are sealed already. Returns the
    /// number of bytes.
    pub(super) fn seal(&mut self, parts: &[&[u8]]) -> io::Result<usize> {
        self.seal_block(parts, 0)
    }

    pub(super) fn seal_end(&mut self) -> io::Result<()> {
        self.seal_block(&[], END).map(drop)
    }

    fn seal_block(&mut self, parts: &[&[u8]], end: u32) -> io::Result<usize> {
        if self.sent == self.output.len() {
            self.output.clear();
            self.sent = 0;
        }
        let start = self.output.len();
        self.output.extend_from_slice(&[0; HEAD_BYTES]);
        let mut left = BLOCK_BYTES;
        for part in parts {
            let taken = part.len().min(left);
            self.output.extend_from_slice(&part[..taken]);
            left -= taken;
        }
        let length = BLOCK_BYTES - left;
        let [head_nonce, nonce] = self.sealing.nonces();
        self.sealing.step()?;
        let key = &self.sealing.key;
        let (head, payload) = self.output[start..].split_at_mut(HEAD_BYTES);
        let (word, head_tag) = head.split_at_mut(WORD_BYTES);
        word.copy_from_slice(&(length as u32 | end).to_le_bytes());
        let tag = key.seal_in_place_separate_tag(head_nonce, Aad::from(&*word), &mut []);
        head_tag.copy_from_slice(tag.map_err(|_| refused("a head"))?.as_ref());
        let tag = key.seal_in_place_separate_tag(nonce, Aad::empty(), payload);
        self.output.extend_from_slice(tag.map_err(|_| refused("a block"))?.as_ref());
        Ok(length)
    }

    /// Moves sealed bytes into the stream.
    pub(super) fn push(&mut self, stream: &mut impl Write) -> io::Result<()> {
        while self.holds_output() {
            match stream.write(&self.output[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what the stream has. 0: the stream has ended.
    pub(super) fn pull(&mut self, stream: &mut impl Read) -> io::Result<usize> {
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
        if self.input.len() - self.begin < WIRE_BYTES_MAX {
            self.input.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        if self.end == self.input.len() {
            let room = (self.input.len() * 4).clamp(INPUT_BYTES_MIN, INPUT_BYTES_MAX);
            self.input.resize(room, 0);
        }
        let count = stream.read(&mut self.input[self.end..])?;
        self.end += count;
        Ok(count)
    }

    /// Opens received blocks into `bytes`. `None`: no block is complete. 0: the other end has ended in good
    /// order.
    pub(super) fn open(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        let mut count = 0;
        while count < bytes.len() {
            if self.opened == 0 && !self.open_block()? {
                break;
            }
            let taken = self.opened.min(bytes.len() - count);
            bytes[count..count + taken].copy_from_slice(&self.input[self.begin..][..taken]);
            count += taken;
            self.opened -= taken;
            self.begin += taken;
            if self.opened == 0 {
                self.begin += TAG_BYTES;
            }
        }
        Ok((count > 0 || bytes.is_empty() || self.state == State::Ended).then_some(count))
    }

    /// Opens the next block. Returns whether there are opened bytes now.
    fn open_block(&mut self) -> io::Result<bool> {
        let opened = self.try_open();
        if opened.is_err() {
            self.state = State::Forged;
        }
        opened
    }

    fn try_open(&mut self) -> io::Result<bool> {
        while self.opened == 0 {
            match self.state {
                State::Open => {}
                State::Ended => return Ok(false),
                State::Forged => return Err(forged("what came before was")),
            }
            let come = &mut self.input[self.begin..self.end];
            let [head_nonce, nonce] = self.opening.nonces();
            let key = &self.opening.key;
            match self.body {
                None if come.len() < HEAD_BYTES => return Ok(false),
                None => {
                    let (word, tag) = come[..HEAD_BYTES].split_at_mut(WORD_BYTES);
                    key.open_in_place(head_nonce, Aad::from(&*word), tag)
                        .map_err(|_| forged("the seal of a head is wrong"))?;
                    let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    let (length, is_last) = ((word & !END) as usize, word & END != 0);
                    if length > BLOCK_BYTES {
                        return Err(io::Error::other(format!("a block of {length} bytes")));
                    }
                    self.body = Some(Body { length, is_last });
                    self.begin += HEAD_BYTES;
                }
                Some(body) if come.len() < body.length + TAG_BYTES => return Ok(false),
                Some(body) => {
                    let sealed = &mut come[..body.length + TAG_BYTES];
                    key.open_in_place(nonce, Aad::empty(), sealed)
                        .map_err(|_| forged("the seal of a block is wrong"))?;
                    self.opening.step()?;
                    self.body = None;
                    self.opened = body.length;
                    if body.length == 0 {
                        self.begin += TAG_BYTES;
                    }
                    if body.is_last {
                        self.state = State::Ended;
                    }
                }
            }
        }
        Ok(true)
    }
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = (self.sealing.next, self.opening.next);
        f.debug_struct("Blocks").field("next", &numbers).field("state", &self.state).finish()
    }
}
