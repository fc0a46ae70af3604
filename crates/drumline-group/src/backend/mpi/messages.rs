//! Messages from rank to rank over MPI.
//!
//! A message is its bytes and, behind them, a [`Trailer`]. MPI's tags are shorter than ours: those below
//! [`PLAIN`] stand for themselves, and the others share tags, so a receive may get a message that another one
//! waits for. It goes to the inbox. What exceeds [`FIRST_BYTES_MAX`] follows in messages with a tag of their own.

use std::{
    sync::{MutexGuard, PoisonError, atomic::Ordering},
    time::Instant,
};

use drumline_engine::Cause;
use drumline_schedule::step::Rank;

use super::{rank::OverMpi, wait::failed};
use crate::backend::{Arrived, Label, Outgoing, Wanted};

/// Tags below this are MPI's tags. MPI promises 32,767 tags.
const PLAIN: u64 = 1 << 13;
/// Others are spread over as many.
const SHARED: u64 = 1 << 13;
/// The rest of a long message has one of these.
const RESTS: u64 = 1 << 13;

/// The most bytes of a message that travel with its trailer, and of each message behind it.
const FIRST_BYTES_MAX: usize = 1 << 30;

/// What stands behind the bytes of a message.
#[derive(Debug, PartialEq, Eq)]
struct Trailer {
    label: Label,
    tag: u64,
    /// The bytes that follow in other messages, and the tag of these.
    rest: u64,
    rest_tag: u32,
}

impl OverMpi {
    pub(super) fn send_message(&self, message: &Outgoing<'_>) -> Result<(), Cause> {
        let Outgoing { to, tag, label, bytes, deadline } = *message;
        if to == self.rank {
            self.inbox.put(tag, Arrived { from: to, label, bytes: bytes.to_vec() });
            return Ok(());
        }
        let (first, rest) = bytes.split_at(bytes.len().min(FIRST_BYTES_MAX));
        let number = match rest.is_empty() {
            true => 0,
            false => self.inbox.long.fetch_add(1, Ordering::Relaxed),
        };
        let rest_tag = (PLAIN + SHARED + number % RESTS) as u32;
        let trailer = Trailer { label, tag, rest: rest.len() as u64, rest_tag };
        let len = first.len() + Trailer::BYTES;
        let mut buffer = self.buffers.take(len);
        buffer[..first.len()].copy_from_slice(first);
        buffer[first.len()..len].copy_from_slice(&trailer.encode());
        self.send_bytes(buffer, len, to, mpi_tag(tag), deadline)?;
        for part in rest.chunks(FIRST_BYTES_MAX) {
            let mut buffer = self.buffers.take(part.len());
            buffer[..part.len()].copy_from_slice(part);
            self.send_bytes(buffer, part.len(), to, rest_tag, deadline)?;
        }
        Ok(())
    }

    fn send_bytes(
        &self,
        buffer: Vec<u8>,
        len: usize,
        to: Rank,
        tag: u32,
        deadline: Instant,
    ) -> Result<(), Cause> {
        let sending = self.communicator.send(buffer, len, to, tag);
        let sending = sending.map_err(failed)?;
        let (sent, _) = self.waiting.until_over(sending, deadline)?;
        self.buffers.give([sent]);
        Ok(())
    }

    pub(super) fn receive_message(&self, wanted: &Wanted) -> Result<Arrived, Cause> {
        let Wanted { from, tag, deadline } = *wanted;
        if self.world_size == 1 || from == Some(self.rank) {
            let here = || Ok(self.inbox.take(from, tag));
            return self.waiting.until(deadline, here).map_err(|cause| late(cause, from));
        }
        let came = self.waiting.until(deadline, || {
            if let Some(arrived) = self.inbox.take(from, tag) {
                return Ok(Some(Came::Wanted(arrived)));
            }
            let shared = (tag >= PLAIN).then(|| self.inbox.shared.lock());
            let matched = self.communicator.probe(from, mpi_tag(tag))?;
            Ok(matched.map(|matched| Came::Matched(matched, shared)))
        });
        match came.map_err(|cause| late(cause, from))? {
            Came::Wanted(arrived) => Ok(arrived),
            Came::Matched(matched, shared) => {
                let (its_tag, arrived) = self.take_in(matched, deadline)?;
                if its_tag == tag {
                    return Ok(arrived);
                }
                self.inbox.put(its_tag, arrived);
                drop(shared);
                self.receive_message(wanted)
            }
        }
    }

    /// Receives the whole of a message that MPI has matched.
    fn take_in(
        &self,
        matched: drumline_mpi::Matched,
        deadline: Instant,
    ) -> Result<(u64, Arrived), Cause> {
        let (from, len) = (matched.from(), matched.len());
        let broken = |problem: &str| Cause::Protocol { peer: from, problem: problem.to_owned() };
        let receiving = matched.receive(vec![0; len]).map_err(failed)?;
        let (_, mut bytes) = self.waiting.until_over(receiving, deadline)?;
        let first =
            len.checked_sub(Trailer::BYTES).ok_or_else(|| broken("a message is cut short"))?;
        let trailer = Trailer::decode(&bytes[first..]);
        let trailer = trailer.ok_or_else(|| broken("the end of a message makes no sense"))?;
        bytes.truncate(first);
        let whole = usize::try_from(trailer.rest).ok().and_then(|rest| rest.checked_add(first));
        let whole = whole.ok_or_else(|| broken("a message is longer than the memory"))?;
        while bytes.len() < whole {
            let probe = || self.communicator.probe(Some(from), trailer.rest_tag);
            let matched = self.waiting.until(deadline, probe)?;
            let len = matched.len();
            if len == 0 || len > whole - bytes.len() {
                return Err(broken("a part of a long message has another length than it should"));
            }
            let receiving = matched.receive(self.buffers.take(len));
            let receiving = receiving.map_err(failed)?;
            let (_, part) = self.waiting.until_over(receiving, deadline)?;
            bytes.extend_from_slice(&part[..len]);
            self.buffers.give([part]);
        }
        Ok((trailer.tag, Arrived { from, label: trailer.label, bytes }))
    }
}

enum Came<'a> {
    Wanted(Arrived),
    Matched(drumline_mpi::Matched, Option<Shared<'a>>),
}

type Shared<'a> = std::result::Result<MutexGuard<'a, ()>, PoisonError<MutexGuard<'a, ()>>>;

/// The tag that MPI sees.
fn mpi_tag(tag: u64) -> u32 {
    let seen = if tag < PLAIN { tag } else { PLAIN + tag % SHARED };
    seen as u32
}

/// A receive that nobody answers waits for its sender.
fn late(cause: Cause, from: Option<Rank>) -> Cause {
    match cause {
        Cause::Timeout { .. } | Cause::Backend { .. } => {
            Cause::Timeout { waiting_for: from.into_iter().collect() }
        }
        cause => cause,
    }
}

impl Trailer {
    const BYTES: usize = Label::BYTES + 20;

    fn encode(&self) -> [u8; Trailer::BYTES] {
        let mut bytes = [0; Trailer::BYTES];
        let (label, numbers) = bytes.split_at_mut(Label::BYTES);
        label.copy_from_slice(&self.label.0);
        numbers[..8].copy_from_slice(&self.tag.to_le_bytes());
        numbers[8..16].copy_from_slice(&self.rest.to_le_bytes());
        numbers[16..].copy_from_slice(&self.rest_tag.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Trailer> {
        let (label, numbers) = bytes.split_first_chunk()?;
        let (tag, numbers) = numbers.split_first_chunk()?;
        let (rest, numbers) = numbers.split_first_chunk()?;
        let rest_tag = u32::from_le_bytes(numbers.try_into().ok()?);
        let is_rest_tag = (PLAIN + SHARED..PLAIN + SHARED + RESTS).contains(&rest_tag.into());
        is_rest_tag.then(|| Trailer {
            label: Label(*label),
            tag: u64::from_le_bytes(*tag),
            rest: u64::from_le_bytes(*rest),
            rest_tag,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trailer_survives_its_bytes() {
        let trailer = Trailer {
            label: Label([9; Label::BYTES]),
            tag: u64::MAX,
            rest: 1 << 40,
            rest_tag: (PLAIN + SHARED + 5) as u32,
        };
        assert_eq!(Trailer::decode(&trailer.encode()), Some(trailer));
        assert_eq!(Trailer::decode(&[0; Trailer::BYTES]), None);
        assert_eq!(Trailer::decode(&[]), None);
    }

    #[test]
    fn every_tag_of_mpi_is_one_that_mpi_promises() {
        for tag in [0, PLAIN - 1, PLAIN, 1 << 40, u64::MAX] {
            assert!(u64::from(mpi_tag(tag)) < PLAIN + SHARED);
        }
    }
}
