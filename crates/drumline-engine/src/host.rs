//! The memory that the ranks of one host share: this rank's segment and those of its neighbours.

use std::{
    collections::BTreeMap,
    fmt, io,
    ops::Range,
    time::{Duration, Instant},
};

use drumline_kernels::Target;
use drumline_schedule::step::Rank;
use drumline_shm::{
    Announcement, Arena, Core, Cores, Parity, PeerSegment, PeerWindow, Segment, SpinLimit,
};

use crate::{
    error::Cause,
    executor::{Awaited, Flags, Header, History, Machine, Notice, Seat, Seats},
};

/// This rank's segment and those of its neighbours: the ranks of the group on the same host.
#[derive(Debug)]
pub struct Host {
    segment: Segment,
    seats: Seats,
    /// The neighbours, indexed by seat.
    neighbours: Vec<Neighbour>,
    /// Which of the two announcement lines and slots the present piece uses.
    parity: Parity,
    /// How often a waiting rank looks before it sleeps.
    spins_max: SpinLimit,
    /// When [`Host::spread_out`] should look again on which cores ranks run.
    spread_due: Option<Instant>,
    slot_bytes_max: usize,
    /// Each rank's share of the cache, if all ranks use it.
    cache_bytes: usize,
    long_bytes: usize,
}

/// See [`Host::long_bytes`].
const LONG_BYTES: usize = 1 << 20;

#[derive(Debug)]
struct Neighbour {
    rank: Rank,
    segment: PeerSegment,
    /// The offset of the neighbour's registered buffer in its arena, as it announced.
    place: u64,
}

impl Host {
    /// The memory of a host, from the segment of this rank and those of its neighbours.
    pub fn new(segment: Segment, neighbours: BTreeMap<Rank, PeerSegment>) -> Host {
        let ranks_here = neighbours.len() + 1;
        let neighbour = |(rank, segment)| Neighbour { rank, segment, place: u64::MAX };
        let slot_bytes_max = segment.slot_bytes();
        Host {
            segment,
            seats: Seats::of(&neighbours.keys().copied().collect::<Vec<_>>()),
            neighbours: neighbours.into_iter().map(neighbour).collect(),
            parity: Parity::Even,
            spins_max: drumline_shm::spin_limit(ranks_here),
            spread_due: None,
            slot_bytes_max,
            cache_bytes: drumline_shm::cache_bytes() / ranks_here,
            long_bytes: LONG_BYTES,
        }
    }

    /// Limits slots, cache and long data to `slot_bytes_max` bytes, on all ranks alike. So tests need little
    /// data for several windows, for copies past the cache, and for registered buffers.
    pub fn with_slots_of(self, slot_bytes_max: usize) -> Host {
        let [cache_bytes, long_bytes] = [slot_bytes_max; 2];
        Host { slot_bytes_max, cache_bytes, long_bytes, ..self }
    }

    /// The memory in which this rank's registered buffers lie.
    pub fn arena(&self) -> &Arena {
        self.segment.arena()
    }

    /// Bytes of a neighbour's arena, for a device that copies them.
    ///
    /// # Errors
    ///
    /// Why there are no such bytes.
    pub fn window_of(
        &self,
        rank: Rank,
        byte_offset: usize,
        bytes: usize,
    ) -> Result<PeerWindow, String> {
        let neighbour = self.neighbours.iter().find(|neighbour| neighbour.rank == rank);
        let neighbour = neighbour.ok_or_else(|| format!("rank {rank} is on another host"))?;
        neighbour.segment.window(byte_offset, bytes).map_err(|error| error.to_string())
    }

    /// The length of a staging slot: the smallest of all ranks.
    pub fn slot_bytes(&self) -> usize {
        let of_neighbours = self.neighbours.iter().map(|it| it.segment.slot_bytes());
        of_neighbours.chain([self.slot_bytes_max]).min().unwrap_or(0)
    }

    /// Buffers of at least this length are no longer in the cache after a call.
    pub fn cache_bytes(&self) -> usize {
        self.cache_bytes
    }

    /// The length in bytes from which data counts as long in the memory of this host; the same on all ranks.
    pub fn long_bytes(&self) -> usize {
        self.long_bytes
    }

    /// The seats of the neighbours.
    pub fn seats(&self) -> &Seats {
        &self.seats
    }

    /// The state of a machine that has made no call.
    pub fn flags(&self) -> Flags {
        Flags::new(self.neighbours.iter().map(|it| it.rank))
    }

    /// Whether the host has two ranks. Such a pair [exchanges](drumline_schedule::step) slots, and no other
    /// rank reads them.
    pub fn is_pair(&self) -> bool {
        self.neighbours.len() == 1
    }

    #[inline]
    fn at(&self, seat: Seat) -> &Neighbour {
        &self.neighbours[seat.0]
    }

    /// A neighbour's count of posts, as in its line for `piece`.
    pub fn posted(&self, seat: Seat, piece: u64) -> u64 {
        self.at(seat).segment.posted(Parity::of(piece))
    }

    /// A neighbour's count of posts, if it is high enough and belongs to this rank's own call. Then keeps the
    /// offset of the neighbour's registered buffer.
    #[inline]
    pub fn find(&mut self, seat: Seat, awaited: Awaited) -> Option<u64> {
        let Awaited { piece, level, digest } = awaited;
        let Neighbour { segment, place, .. } = &mut self.neighbours[seat.0];
        let posted = segment.posted(Parity::of(piece));
        if posted < level {
            return None;
        }
        let announcement = segment.announcement(Parity::of(piece));
        if announcement.digest != digest {
            return None;
        }
        *place = announcement.place;
        Some(posted)
    }

    /// A neighbour's announcement of a piece. The neighbour must have posted in that piece.
    pub fn announcement(&self, seat: Seat, piece: u64) -> Announcement {
        self.at(seat).segment.announcement(Parity::of(piece))
    }

    /// Writes this rank's announcement of a piece.
    pub fn announce(&mut self, notice: &Notice<'_>) {
        let Notice { piece, call, sequence, place, digest } = *notice;
        self.parity = Parity::of(piece);
        let announcement = Announcement { digest, place };
        self.segment.announce(self.parity, announcement, &call.header(sequence, place));
    }

    /// Tells neighbours that they may read what this rank wrote.
    pub fn post(&self) {
        self.segment.post_and_wake(self.parity, self.neighbours.iter().map(|it| &it.segment));
    }

    /// Tells neighbours that this rank has failed: it completes no call from number `call` on.
    pub(crate) fn fail(&self, call: u64) {
        self.segment.fail(call);
    }

    /// A neighbour that has failed and does not complete the call with this number. Ask once this rank has posted: see [`Host::is_owed`].
    #[inline]
    pub(crate) fn failed(&self, call: u64) -> Option<Rank> {
        self.neighbours.iter().find(|it| it.segment.has_failed(call)).map(|it| it.rank)
    }

    /// Whether a post for which the machine waits is missing still, after [`Host::fail`]. Then the rank that owes it
    /// sees the failure when it has posted.
    pub(crate) fn is_owed(&self, machine: &Machine) -> bool {
        machine.watched().any(|(seat, level)| self.at(seat).segment.last_posted() < level)
    }

    /// Prepares the line of the next piece for writing. The call is complete, so neighbours have read what
    /// the line held.
    pub fn prepare_next(&self) {
        self.segment.claim(self.parity.other());
    }

    /// The description in a neighbour's announcement of a piece.
    pub fn description(&self, seat: Seat, piece: u64) -> Result<Header, Cause> {
        let &Neighbour { rank: peer, ref segment, .. } = self.at(seat);
        let problem = || "wrote something that is no announcement".to_owned();
        Header::decode(&segment.description(Parity::of(piece)))
            .ok_or_else(|| Cause::Protocol { peer, problem: problem() })
    }

    /// Keeps the offset that a neighbour announced for its registered buffer.
    pub fn set_place_of(&mut self, seat: Seat, place: u64) {
        self.neighbours[seat.0].place = place;
    }

    /// After all neighbours have left: an error if one of them has announced a call that this rank did not
    /// make.
    pub fn left_over(&self, flags: &mut Flags, history: &History) -> Result<(), Cause> {
        for (seat, neighbour) in self.neighbours.iter().enumerate() {
            flags.on_posted(Seat(seat), neighbour.segment.last_posted());
        }
        for (seat, piece, ours) in flags.left_over() {
            if ours.is_some_and(|ours| ours.digest == self.announcement(seat, piece).digest) {
                continue;
            }
            let theirs = self.description(seat, piece)?.description;
            let sequence = ours.map_or(theirs.sequence(), |ours| ours.sequence);
            return Err(Cause::mismatch(self.at(seat).rank, theirs, history.find(sequence)));
        }
        Ok(())
    }

    /// Bytes in this rank's announcement line.
    #[inline]
    pub fn own_line(&self, range: Range<usize>) -> Target<'_, u8> {
        fitting(self.segment.payload(self.parity, range))
    }

    /// Bytes in a neighbour's announcement line.
    #[inline]
    pub fn line_of(&self, seat: Seat, range: Range<usize>) -> Target<'_, u8> {
        fitting(self.at(seat).segment.payload(self.parity, range))
    }

    /// Bytes of this rank's own staging slot.
    pub fn own_slot(&self, range: Range<usize>) -> Target<'_, u8> {
        fitting(match self.are_slots_swapped() {
            false => self.segment.slot(self.parity, range),
            true => self.at(Seat(0)).segment.slot_mut(Parity::Even, range),
        })
    }

    /// Bytes of a neighbour's staging slot.
    pub fn slot_of(&self, seat: Seat, range: Range<usize>) -> Target<'_, u8> {
        fitting(match self.are_slots_swapped() {
            false => self.at(seat).segment.slot_mut(self.parity, range),
            true => self.segment.slot(Parity::Even, range),
        })
    }

    /// Whether the two ranks of a pair use each other's slots: so in every other piece.
    fn are_slots_swapped(&self) -> bool {
        self.is_pair() && self.parity == Parity::Odd
    }

    /// Bytes of a neighbour's registered buffer, which must begin at a multiple of `align` bytes.
    pub fn registered_of(
        &self,
        seat: Seat,
        range: Range<usize>,
        align: usize,
    ) -> Result<Target<'_, u8>, Cause> {
        let Neighbour { rank, ref segment, place } = *self.at(seat);
        // The segment refuses a place outside the arena. An overflow becomes such a place.
        let start = (place as usize).saturating_add(range.start);
        let target = segment.arena(start, range.len()).map_err(|error| impossible(rank, &error))?;
        // The arena begins on a page.
        match start.is_multiple_of(align) {
            true => Ok(target),
            false => Err(impossible(rank, &format_args!("its elements begin at byte {start}"))),
        }
    }

    /// Spins for a short while until a neighbour has posted `level` times.
    // A short call spends its time between this loop and its caller: as a function of its own it makes an
    // all_reduce of 8 bytes 6 per cent slower.
    #[inline(always)]
    pub fn spin(&self, machine: &Machine, seat: Seat, level: u64) {
        let (neighbour, parity) = (self.at(seat), Parity::of(machine.looks_at(seat).0));
        let is_there = || neighbour.segment.posted(parity) >= level;
        drumline_shm::spin(self.spins_max, is_there, || self.is_in_the_way(machine));
    }

    /// Tells neighbours on which core this rank runs.
    pub fn stand_here(&self) {
        self.segment.stand_here();
    }

    /// Publishes this rank's core from time to time, where ranks outnumber cores: neighbours that spin yield
    /// to a rank on their own core. With `may_move`, the last rank on a crowded core then moves to the core
    /// with the fewest ranks.
    ///
    /// A move is worth it because ranks yield to each other and hardly ever sleep. To the kernel, a core with
    /// three ranks is therefore as busy as a core with one. The kernel leaves the ranks there for 100 ms and
    /// longer, and short calls take twice as long.
    pub(crate) fn spread_out(&mut self, rank: Rank, now: Instant, may_move: bool) {
        let is_crowded = self.spins_max.yields > 0;
        if !is_crowded || self.spread_due.is_some_and(|due| now < due) {
            return;
        }
        self.spread_due = now.checked_add(SPREAD);
        let own = self.segment.stand_here();
        if !may_move || self.on(own).any(|it| it.rank > rank) {
            return;
        }
        match self.go_from(own) {
            Ok(false) => {}
            Ok(true) => {
                self.segment.stand_here();
            }
            Err(error) => tracing::debug!(%error, "cannot move to another core"),
        }
    }

    /// Moves this rank to the core with the fewest ranks, if it has fewer than `own`. Returns whether it
    /// moved.
    fn go_from(&self, own: Core) -> io::Result<bool> {
        let cores = Cores::of_this_thread()?;
        let ranks_on = |core: &Core| self.on(*core).count();
        let fewest = cores.iter().min_by_key(ranks_on);
        let Some(core) = fewest.filter(|core| ranks_on(core) < ranks_on(&own)) else {
            return Ok(false);
        };
        cores.go_to(core)?;
        Ok(true)
    }

    /// The neighbours on that core.
    fn on(&self, core: Core) -> impl Iterator<Item = &Neighbour> {
        self.neighbours.iter().filter(move |it| it.segment.stands_on(core))
    }

    /// Whether this rank runs on the core of a neighbour for whose post it waits.
    fn is_in_the_way(&self, machine: &Machine) -> bool {
        let core = self.segment.stand_here();
        machine.watched().any(|(seat, level)| {
            self.at(seat).segment.stands_on(core)
                && self.posted(seat, machine.looks_at(seat).0) < level
        })
    }

    /// Whether a neighbour has made the post for which the machine waits, or has an announcement that is not
    /// compared yet.
    pub fn has_news(&self, machine: &Machine) -> bool {
        let posted = |seat| self.posted(seat, machine.looks_at(seat).0);
        let awaited = machine.watching().is_some_and(|(seat, level)| posted(seat) >= level);
        let is_news = |seat: Seat| {
            let (_, to_compare) = machine.looks_at(seat);
            to_compare.is_some_and(|base| posted(seat) > base)
        };
        awaited || machine.neighbours().any(is_news)
    }

    /// Makes later posts of neighbours ring this rank's doorbell.
    pub fn begin_sleep(&self) {
        self.segment.begin_sleep();
    }

    pub(crate) fn end_sleep(&self) {
        self.segment.end_sleep();
    }
}

/// The least time that a rank stays on its core. A move takes about 10 us.
const SPREAD: Duration = Duration::from_millis(1);

/// Unwraps a part of a slot: plans name no part outside it.
fn fitting(slot: drumline_shm::Result<Target<'_, u8>>) -> Target<'_, u8> {
    match slot {
        Ok(target) => target,
        Err(error) => unreachable!("pieces fit the slots of all ranks: {error}"),
    }
}

#[cold]
fn impossible(peer: Rank, error: &dyn fmt::Display) -> Cause {
    Cause::Protocol { peer, problem: format!("announced a buffer that cannot be: {error}") }
}

#[cfg(test)]
mod tests {
    use drumline_shm::SegmentSize;

    use super::*;

    /// All ranks run on one core, and two of them move to the other.
    #[test]
    fn ranks_that_met_on_a_core_spread_out() {
        const RANKS: usize = 4;
        let cores = Cores::of_this_thread().unwrap();
        let pair: Vec<Core> = cores.iter().take(2).collect();
        let [first, second] = pair[..] else { return };
        let size = SegmentSize { slot_bytes: 4096, arena_bytes: 0 };
        let segments: Vec<Segment> = (0..RANKS).map(|_| Segment::create(size).unwrap()).collect();
        let map = |rank: usize| PeerSegment::map(segments[rank].handles().unwrap()).unwrap();
        let neighbours: Vec<BTreeMap<Rank, PeerSegment>> = (0..RANKS)
            .map(|rank| (0..RANKS).filter(|it| *it != rank).map(|it| (it, map(it))).collect())
            .collect();
        let hosts = segments.into_iter().zip(neighbours).map(|(segment, neighbours)| Host {
            spins_max: SpinLimit { looks: 1, yields: 1 },
            ..Host::new(segment, neighbours)
        });
        let mut hosts: Vec<Host> = hosts.collect();
        cores.go_to(first).unwrap();
        hosts.iter().for_each(Host::stand_here);
        let mut stood = vec![];
        // The last rank first, because the others wait until it has moved.
        for rank in (0..RANKS).rev() {
            cores.go_to(first).unwrap();
            hosts[rank].spread_out(rank, Instant::now(), true);
            stood.push(hosts[rank].segment.stand_here() == second);
        }
        // With more than two cores, all other cores are as empty as the second.
        let expected = [true, cores.iter().count() == 2, false, false];
        assert_eq!(stood, expected, "by rank, from the last one");
    }
}
