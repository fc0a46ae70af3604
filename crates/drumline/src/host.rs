//! The memory that the ranks of one host share: this rank's segment, and those of its
//! neighbours.

use std::{collections::BTreeMap, ops::Range};

use drumline_kernels::{Element, Target};
use drumline_schedule::step::Rank;
use drumline_shm::{Arena, Parity, PeerSegment, Segment};

use crate::{
    error::Cause,
    executor::{Flags, Header, History, Machine},
};

/// This rank's segment and those of its neighbours: the ranks of the group on the same host.
#[derive(Debug)]
pub(crate) struct Host {
    segment: Segment,
    neighbours: BTreeMap<Rank, Neighbour>,
    /// Which slots and announcements the piece at hand uses.
    parity: Parity,
    /// Between operations: what the next one goes on with.
    flags: Option<Flags>,
    /// How often a wait looks again before it sleeps.
    spins_max: u32,
    slot_bytes_max: usize,
}

#[derive(Debug)]
struct Neighbour {
    segment: PeerSegment,
    /// Where in its arena its data lies, as it announced.
    data: u64,
}

impl Host {
    pub(crate) fn new(segment: Segment, neighbours: BTreeMap<Rank, PeerSegment>) -> Host {
        let ranks_here = neighbours.len() + 1;
        let flags = Flags::new(neighbours.keys().copied());
        let neighbour = |segment| Neighbour { segment, data: u64::MAX };
        let slot_bytes_max = segment.slot_bytes();
        Host {
            segment,
            neighbours: neighbours.into_iter().map(|(rank, it)| (rank, neighbour(it))).collect(),
            parity: Parity::Even,
            flags: Some(flags),
            spins_max: drumline_shm::spin_limit(ranks_here),
            slot_bytes_max,
        }
    }

    /// Uses only so many bytes of every slot, on all ranks alike, so that short operations are
    /// done in pieces, too.
    #[cfg(feature = "internals")]
    pub(crate) fn with_slots_of(self, slot_bytes_max: usize) -> Host {
        Host { slot_bytes_max, ..self }
    }

    /// Where registered buffers of this rank lie.
    pub(crate) fn arena(&self) -> &Arena {
        self.segment.arena()
    }

    /// Bytes of a staging slot: the same on all ranks, or the smallest.
    pub(crate) fn slot_bytes(&self) -> usize {
        let of_neighbours = self.neighbours.values().map(|it| it.segment.slot_bytes());
        of_neighbours.chain([self.slot_bytes_max]).min().unwrap_or(0)
    }

    /// The flags, for the time of an operation.
    pub(crate) fn take_flags(&mut self) -> Flags {
        self.flags.take().unwrap_or_default()
    }

    pub(crate) fn put_flags(&mut self, flags: Flags) {
        self.flags = Some(flags);
    }

    /// How often a neighbour has posted.
    pub(crate) fn posted(&self, peer: Rank) -> u64 {
        self.neighbours.get(&peer).map_or(0, |it| it.segment.posted())
    }

    /// Writes this rank's announcement of a piece.
    pub(crate) fn announce(&mut self, piece: u64, header: &Header) {
        self.parity = Parity::of(piece);
        self.segment.announce(self.parity, &header.encode());
    }

    pub(crate) fn post(&self) {
        self.segment.post_and_wake(self.neighbours.values().map(|it| &it.segment));
    }

    /// What a neighbour has announced for a piece. It must have posted in that piece.
    pub(crate) fn announcement(&self, peer: Rank, piece: u64) -> Result<Header, Cause> {
        let problem = || "wrote something that is no announcement".to_owned();
        let Some(neighbour) = self.neighbours.get(&peer) else {
            unreachable!("only neighbours are watched");
        };
        let line = neighbour.segment.announcement(Parity::of(piece));
        Header::decode(&line).ok_or_else(|| Cause::Protocol { peer, problem: problem() })
    }

    /// A neighbour's data lies there in its arena, as it announced last.
    pub(crate) fn set_data_of(&mut self, peer: Rank, place: u64) {
        if let Some(neighbour) = self.neighbours.get_mut(&peer) {
            neighbour.data = place;
        }
    }

    /// Neighbours that have left: what they have announced and this rank has not taken part in.
    pub(crate) fn left_over(&mut self, history: &History) -> Result<(), Cause> {
        let Some(mut flags) = self.flags.take() else { return Ok(()) };
        for (&peer, neighbour) in &self.neighbours {
            flags.on_posted(peer, neighbour.segment.posted());
        }
        for (peer, piece, ours) in flags.left_over() {
            let theirs = self.announcement(peer, piece)?.description;
            match ours {
                Some(ours) if theirs == ours => {}
                Some(ours) => return Err(Cause::mismatch(peer, theirs, Some(ours))),
                None => return Err(history.explain(peer, theirs)),
            }
        }
        self.flags = Some(flags);
        Ok(())
    }

    /// Elements of this rank's own staging slot.
    pub(crate) fn own_slot<T: Element>(&self, range: Range<usize>) -> Target<'_, T> {
        match self.segment.slot(self.parity, range) {
            Ok(target) => target,
            Err(error) => unreachable!("pieces fit their slots: {error}"),
        }
    }

    /// Elements of a neighbour's staging slot.
    pub(crate) fn slot_of<T: Element>(
        &self,
        peer: Rank,
        range: Range<usize>,
    ) -> Result<Target<'_, T>, Cause> {
        self.of(peer, |it| it.segment.slot_mut(self.parity, range))
    }

    /// Elements of a neighbour's registered data.
    pub(crate) fn data_of<T: Element>(
        &self,
        peer: Rank,
        range: Range<usize>,
    ) -> Result<Target<'_, T>, Cause> {
        self.of(peer, |it| {
            // A place beyond the arena, or one that overflows, is refused by the segment.
            let start = (it.data as usize).saturating_add(range.start * size_of::<T>());
            it.segment.arena(start, range.len())
        })
    }

    fn of<'a, R>(
        &'a self,
        peer: Rank,
        place: impl FnOnce(&'a Neighbour) -> drumline_shm::Result<R>,
    ) -> Result<R, Cause> {
        let Some(neighbour) = self.neighbours.get(&peer) else {
            unreachable!("schedules name only neighbours' memory");
        };
        place(neighbour).map_err(|error| Cause::Protocol {
            peer,
            problem: format!("announced a buffer that cannot be: {error}"),
        })
    }

    /// Looks at what the machine waits for in shared memory, for a short while. Whether it is
    /// worth going on.
    pub(crate) fn spin(&self, machine: &Machine) -> bool {
        let Some((peer, level)) = machine.watching() else { return false };
        drumline_shm::spin(self.spins_max, || self.posted(peer) >= level)
    }

    /// Whether a neighbour has posted what the machine waits for, or has called something that
    /// has not been compared yet.
    pub(crate) fn has_news(&self, machine: &Machine) -> bool {
        let awaited = machine.watching().is_some_and(|(peer, level)| self.posted(peer) >= level);
        awaited || machine.strangers().any(|peer| machine.news(peer, self.posted(peer)).is_some())
    }

    /// From now on, posts of neighbours ring the doorbell.
    pub(crate) fn begin_sleep(&self) {
        self.segment.begin_sleep();
    }

    pub(crate) fn end_sleep(&self) {
        self.segment.end_sleep();
    }
}
