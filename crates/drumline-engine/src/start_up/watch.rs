//! How ranks that wait for each other notice that a process has ended.
//!
//! Each process has a *sign*: sockets that listen, and that the kernel closes when the process ends, however it
//! ends. Whoever is connected to a sign sees that. A stopped process keeps its sign.
//!
//! ```text
//! process/R = the sign of rank R         the first thing that a rank writes; it stays while R is in the job
//! watch/C   = rank and sign of one       the watcher of circle C: its first rank that has come; it writes a new number at
//!                                        each look
//! failed    = rank that has ended        written by a watcher, and read by all ranks
//! ```
//!
//! Each 16 ranks, by their numbers, are a circle. Its watcher is connected to the signs of its ranks, and every other
//! rank of the circle to the sign of the watcher. All of them look several times a second. A rank that sees the watcher end,
//! or write no new number, takes its place. So only a watcher blames a rank, and the number of connections and of questions
//! grows with the number of ranks. The watcher looks at the first rank of the next circle, too: if a whole circle ends,
//! another one notices.
//!
//! A sign that was reached, has closed and lets nobody connect again is proof. One that was never reached is none: it may be left over from an earlier
//! job, or be out of reach, as on a copy of this host or behind a firewall. So the watcher first writes down whom it
//! suspects. A rank that reads that it is suspected writes its sign anew, and nobody suspects it again.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use super::{
    failure::Failure,
    steps::{Answer, Ask, Desk, Outside},
    store::word,
};
use crate::{deadline, membership::Membership};

/// The ranks of a group whose ends are noticed while it starts up.
#[derive(Clone, Debug)]
pub struct Watch(Arc<Watched>);

#[derive(Debug)]
struct Watched {
    member: Membership,
    processes: Processes,
    /// What this rank has seen. `None` before it has begun, and while it looks.
    seen: Mutex<Option<Seen>>,
}

/// The processes of the members of a group.
#[derive(Clone, Debug)]
pub struct Processes {
    /// For each member, the key under which its process writes its sign.
    pub keys: Vec<String>,
    /// Whether the members join the job, and do not make a group from one that they are in.
    pub join: bool,
    /// Whether members that have been in a group of the whole job with this rank are the only ones that can come: their
    /// launcher starts no others at this place.
    pub stay: bool,
}

#[derive(Debug)]
struct Seen {
    /// What this rank has written of itself.
    own: Note,
    /// What stands under `watch`, and since when.
    entry: Vec<u8>,
    entry_since: Instant,
    /// Whether this rank has written it.
    is_watcher: bool,
    /// What this rank has written there last, as the watcher.
    beat: u64,
    /// The failure that others had written before this rank came.
    failed_before: Vec<u8>,
    others: BTreeMap<Rank, Other>,
    next_look: Instant,
}

/// What is known of the process of another rank.
#[derive(Debug)]
struct Other {
    note: Note,
    /// Whether it was alive at an earlier look.
    lived: bool,
    /// How long its sign has not been reached, while it could have said that it lives.
    silent: Option<Duration>,
    /// It lives although its sign is not reached.
    is_elsewhere: bool,
}

/// What a process writes of itself, a line for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Note {
    sign: String,
    /// The group of all ranks in which it is or was last.
    world: String,
    state: State,
    /// How often it had to object to a suspicion.
    objections: u32,
}

impl Note {
    fn parse(text: &[u8]) -> Option<Note> {
        let text = String::from_utf8_lossy(text);
        let mut lines = text.split('\n');
        let (sign, world) = (lines.next()?.to_owned(), lines.next()?.to_owned());
        let state = lines.next()?;
        let state = State::ALL.into_iter().find(|known| known.name() == state)?;
        Some(Note { sign, world, state, objections: lines.next()?.parse().ok()? })
    }

    fn text(&self) -> Vec<u8> {
        let Note { sign, world, state, objections } = self;
        format!("{sign}\n{world}\n{}\n{objections}", state.name()).into_bytes()
    }
}

/// What a process does in its job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// It is about to join it.
    #[default]
    Joins,
    /// It has joined it, and may have left it.
    In,
    /// It has tried to join, and given up.
    Failed,
}

impl State {
    const ALL: [State; 3] = [State::Joins, State::In, State::Failed];

    fn name(self) -> &'static str {
        match self {
            State::Joins => "joins",
            State::In => "in",
            State::Failed => "failed",
        }
    }
}

/// How often a rank of a world of this size looks. All of them together ask the store a bounded number of times a second.
pub(super) fn look_every(world_size: usize) -> Duration {
    Duration::from_millis(10 * world_size as u64).max(Duration::from_millis(150))
}

/// A watcher that writes no new number in so many looks is busy or stopped, and another rank takes its place.
const BEATS_WITHIN: u32 = 5;

/// How many looks a rank may take to object to a suspicion.
const OBJECTS_WITHIN: u32 = 3;

/// The ranks of a circle. Each one that takes the watcher's place asks about all others, so the number of questions grows
/// with the square of this.
const CIRCLE: usize = 16;

/// The largest world whose ranks watch each other. With 100 simulated ranks, each asked the store 85 times during start-up;
/// without this it asks 40 times at most. So in larger worlds the time limit decides.
const WATCHED_MAX: usize = 64;

/// What stands for a key without a value.
const ABSENT: &[u8] = b"-";

impl Watch {
    /// Watches the processes of a group.
    pub fn new(member: &Membership, processes: Processes) -> Watch {
        let seen = Mutex::new(None);
        Watch(Arc::new(Watched { member: member.clone(), processes, seen }))
    }

    /// How often this rank looks.
    pub(super) fn every(&self) -> Duration {
        look_every(self.0.member.world_size)
    }

    /// Writes this rank's sign, for all who wait for it, and looks for the first time.
    ///
    /// # Errors
    ///
    /// The error of the store.
    pub async fn begin<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        if !(2..=WATCHED_MAX).contains(&self.0.member.world_size) {
            return Ok(());
        }
        let sign = text(word(desk.ask(Ask::Sign { reaches_out: false }).await?));
        let before = Note::parse(&self.peek(desk, self.process(self.0.member.rank)).await?);
        let mut own = before.filter(|it| it.sign == sign).unwrap_or_default();
        let Processes { join, stay, .. } = self.0.processes;
        if join && !stay {
            own.world.clear();
        }
        own.sign = sign;
        own.state = if join { State::Joins } else { State::In };
        let seen = Seen {
            own,
            entry: Vec::new(),
            entry_since: desk.now(),
            is_watcher: false,
            beat: 0,
            failed_before: self.peek(desk, &self.failed_key()).await?,
            others: BTreeMap::new(),
            next_look: desk.now(),
        };
        if join {
            self.write_own(desk, &seen).await?;
        }
        self.keep(seen);
        self.look(desk).await
    }

    /// Waits for `keys`, at most for `limit`, and looks meanwhile. Returns the keys that were missing when the time was over.
    ///
    /// # Errors
    ///
    /// [`Failure::Ended`] when the process of a rank has ended, and the error of the store.
    pub async fn wait<W: Outside>(
        &self,
        desk: &Desk<W>,
        keys: &[String],
        limit: Duration,
    ) -> Result<Vec<String>, Failure<W::Error>> {
        let until = deadline::after(desk.now(), limit);
        loop {
            let left = desk.left_until(until);
            let missing = desk.wait(keys.to_vec(), left.min(self.every())).await?;
            if missing.is_empty() || left <= self.every() {
                return Ok(missing);
            }
            self.look(desk).await?;
        }
    }

    /// Looks whether the process of a rank has ended, if it is time again.
    ///
    /// # Errors
    ///
    /// [`Failure::Ended`] names the rank; or the error of the store.
    pub async fn look<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        let Some(mut seen) = self.take() else { return Ok(()) };
        let looked = match desk.now() < seen.next_look {
            true => Ok(()),
            false => {
                let looked = self.look_now(desk, &mut seen).await;
                seen.next_look = desk.now() + self.every();
                looked
            }
        };
        self.keep(seen);
        looked
    }

    /// Looks for some time, because another rank has given up: its reason may be the end of a process.
    ///
    /// # Errors
    ///
    /// As for [`Watch::look`].
    pub async fn settle<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        let until = desk.now() + self.every() * SETTLE_LOOKS;
        while desk.now() < until {
            self.look(desk).await?;
            desk.ask(Ask::Pause(SETTLE_PAUSE)).await?;
        }
        Ok(())
    }

    async fn look_now<W: Outside>(
        &self,
        desk: &Desk<W>,
        seen: &mut Seen,
    ) -> Result<(), Failure<W::Error>> {
        let own = self.0.member.rank;
        let failed = self.peek(desk, &self.failed_key()).await?;
        if failed != seen.failed_before {
            if let Some(rank) = self.named(&failed) {
                return Err(Failure::Ended(rank));
            }
            // The ranks that had failed before have taken it back.
            seen.failed_before = failed;
        }
        // The watcher's entry if this rank is or becomes the watcher, else what stands there.
        let mine = entry(own, seen.beat + 1, &seen.suspects(), &seen.own.sign);
        let expected = if seen.is_watcher { &seen.entry[..] } else { b"" };
        let mut found = desk.compare_set(&self.watch_key(), expected, &mine).await?;
        if found != mine && !self.is_to_be_replaced(desk, seen, &found).await? {
            return Ok(());
        }
        if found != mine {
            let expected = found;
            found = desk.compare_set(&self.watch_key(), &expected, &mine).await?;
        }
        if found != mine {
            // Another rank was faster.
            return Ok(());
        }
        (seen.entry, seen.is_watcher, seen.beat) = (mine, true, seen.beat + 1);
        self.watch(desk, seen).await
    }

    /// Whether the watcher, whose entry is `found`, has ended, or is stopped or busy.
    async fn is_to_be_replaced<W: Outside>(
        &self,
        desk: &Desk<W>,
        seen: &mut Seen,
        found: &[u8],
    ) -> Result<bool, Failure<W::Error>> {
        let own = self.0.member.rank;
        if seen.is_watcher || found != seen.entry {
            (seen.entry, seen.entry_since) = (found.to_vec(), desk.now());
        }
        seen.is_watcher = false;
        // Whom this rank suspected may not have read it.
        seen.others.values_mut().for_each(|other| other.silent = None);
        let Some(Entry { rank, suspects, sign }) = Entry::parse(found) else { return Ok(true) };
        if suspects.contains(&own) {
            seen.own.objections += 1;
            self.write_own(desk, seen).await?;
        }
        if rank == own || !self.circle().contains(&rank) {
            return Ok(true);
        }
        let note = Note { sign, ..Note::default() };
        if seen.others.get(&rank).is_none_or(|it| it.note.sign != note.sign) {
            seen.others.insert(rank, Other::new(note));
        }
        if let Some(host) = self.host().filter(|host| *host != own) {
            self.hear_of(desk, seen, &[host]).await?;
        }
        self.reach_out(desk, seen).await?;
        let is_closed = self.closed(desk, seen).await?.contains(&rank);
        let is_elsewhere = seen.others.get(&rank).is_some_and(|it| it.is_elsewhere);
        let is_late =
            desk.now().saturating_duration_since(seen.entry_since) >= self.every() * BEATS_WITHIN;
        Ok((is_closed && !is_elsewhere) || is_late)
    }

    /// Looks at all members.
    async fn watch<W: Outside>(
        &self,
        desk: &Desk<W>,
        seen: &mut Seen,
    ) -> Result<(), Failure<W::Error>> {
        let (own, every) = (self.0.member.rank, self.every());
        let circle = self.circle();
        let next = circle.end % self.0.member.world_size;
        let watched: BTreeSet<Rank> = circle.clone().chain([next]).collect();
        let is_unknown = |rank: &Rank| *rank != own && !seen.others.contains_key(rank);
        let unknown: Vec<Rank> = watched.into_iter().filter(is_unknown).collect();
        self.hear_of(desk, seen, &unknown).await?;
        self.reach_out(desk, seen).await?;
        for rank in self.closed(desk, seen).await? {
            let note = Note::parse(&self.peek(desk, self.process(rank)).await?);
            let Some(other) = seen.others.get_mut(&rank) else { continue };
            let Some(note) = note else {
                // It has left the job.
                seen.others.remove(&rank);
                continue;
            };
            if note.sign != other.note.sign {
                *other = Other::new(note);
                continue;
            }
            let objects = other.silent.is_some() && note.objections > other.note.objections;
            other.is_elsewhere |= objects;
            other.note = note;
            // Who has left a group in which this rank was not need not come again, and who has given up has said why.
            let is_awaited = match other.note.state {
                State::Joins => true,
                State::In => !seen.own.world.is_empty() && other.note.world == seen.own.world,
                State::Failed => false,
            };
            if other.is_elsewhere || !is_awaited {
                continue;
            }
            // However long a look takes, it counts as one: if the store is slow, the suspect hears of it late.
            let looked = (desk.now() + every).saturating_duration_since(seen.next_look);
            let silent = other.silent.map_or(Duration::ZERO, |it| it + looked.min(every));
            other.silent = Some(silent);
            // A rank of the next circle does not read that it is suspected.
            let may_object = circle.contains(&rank);
            if other.lived || (may_object && silent >= every * OBJECTS_WITHIN) {
                return self.blame(desk, seen, rank).await;
            }
        }
        // Whom it suspects reads that at its next look.
        let entry = entry(own, seen.beat, &seen.suspects(), &seen.own.sign);
        if entry != seen.entry
            && desk.compare_set(&self.watch_key(), &seen.entry, &entry).await? == entry
        {
            seen.entry = entry;
        }
        Ok(())
    }

    /// Tells all that the process of `rank` has ended.
    async fn blame<W: Outside>(
        &self,
        desk: &Desk<W>,
        seen: &mut Seen,
        rank: Rank,
    ) -> Result<(), Failure<W::Error>> {
        let text = text(seen.failed_before.clone());
        let number = text.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or(0_u64);
        let failed = format!("{} {rank}", number + 1);
        desk.set(&self.failed_key(), failed.as_bytes()).await?;
        Err(Failure::Ended(rank))
    }

    /// Reads the signs of those of `ranks` that have come.
    async fn hear_of<W: Outside>(
        &self,
        desk: &Desk<W>,
        seen: &mut Seen,
        ranks: &[Rank],
    ) -> Result<(), Failure<W::Error>> {
        let unknown: Vec<Rank> =
            ranks.iter().copied().filter(|rank| !seen.others.contains_key(rank)).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let keys = unknown.iter().map(|rank| self.process(*rank).to_owned()).collect();
        let missing: BTreeSet<String> =
            desk.wait(keys, Duration::ZERO).await?.into_iter().collect();
        for rank in unknown {
            let key = self.process(rank);
            if !missing.contains(key)
                && let Some(note) = Note::parse(&self.peek(desk, key).await?)
            {
                seen.others.insert(rank, Other::new(note));
            }
        }
        Ok(())
    }

    /// If a rank that this one must reach, or that must reach it, is on another network, extends this rank's sign to there,
    /// and reads how far the signs of such ranks extend.
    async fn reach_out<W: Outside>(
        &self,
        desk: &Desk<W>,
        seen: &mut Seen,
    ) -> Result<(), Failure<W::Error>> {
        let far: Vec<Rank> = seen
            .others
            .iter()
            .filter(|(_, it)| network_of(&it.note.sign) != network_of(&seen.own.sign))
            .map(|(rank, _)| *rank)
            .collect();
        if far.is_empty() {
            return Ok(());
        }
        let sign = text(word(desk.ask(Ask::Sign { reaches_out: true }).await?));
        if sign != seen.own.sign {
            seen.own.sign = sign;
            self.write_own(desk, seen).await?;
        }
        for rank in far {
            if let Some(other) = seen.others.get_mut(&rank)
                && !extends(&other.note.sign)
                && let Some(note) = Note::parse(&self.peek(desk, self.process(rank)).await?)
                && note.sign != other.note.sign
            {
                *other = Other::new(note);
            }
        }
        Ok(())
    }

    async fn write_own<W: Outside>(
        &self,
        desk: &Desk<W>,
        seen: &Seen,
    ) -> Result<(), Failure<W::Error>> {
        Ok(desk.set(self.process(self.0.member.rank), &seen.own.text()).await?)
    }

    /// The ranks whose signs are closed. Notes which are reached.
    async fn closed<W: Outside>(
        &self,
        desk: &Desk<W>,
        seen: &mut Seen,
    ) -> Result<Vec<Rank>, Failure<W::Error>> {
        let signs: BTreeSet<String> = seen.others.values().map(|it| it.note.sign.clone()).collect();
        let Answer::Signs { reached, closed } = desk.ask(Ask::Look(signs)).await? else {
            unreachable!("a look at signs ends with those that are seen")
        };
        for other in seen.others.values_mut().filter(|it| reached.contains(&it.note.sign)) {
            (other.silent, other.lived) = (None, true);
        }
        let closed = seen.others.iter().filter(|(_, it)| closed.contains(&it.note.sign));
        Ok(closed.map(|(rank, _)| *rank).collect())
    }

    /// The rank that may host the store: if the store is lost, the end of its process says why. No launcher hosts it.
    fn host(&self) -> Option<Rank> {
        let Processes { keys, stay, .. } = &self.0.processes;
        keys.iter().position(|key| !*stay && key.ends_with("/process/0"))
    }

    /// The same failure, or the end of a process if that is behind it: a rank may have failed because of that, or the process
    /// may have hosted the store.
    pub(super) async fn explain<W: Outside>(
        &self,
        desk: &Desk<W>,
        failure: Failure<W::Error>,
    ) -> Failure<W::Error> {
        match failure {
            Failure::Ended(_) => failure,
            Failure::Connect(_) | Failure::Refused(..) => {
                let Some(seen) = self.take() else { return failure };
                let failed = self.peek(desk, &self.failed_key()).await;
                let ended = failed.ok().filter(|failed| *failed != seen.failed_before);
                self.keep(seen);
                ended.and_then(|failed| self.named(&failed)).map_or(failure, Failure::Ended)
            }
            Failure::Outside(_) => self.explain_loss(desk, failure).await,
        }
    }

    async fn explain_loss<W: Outside>(
        &self,
        desk: &Desk<W>,
        failure: Failure<W::Error>,
    ) -> Failure<W::Error> {
        let (Some(host), Some(mut seen)) = (self.host(), self.take()) else { return failure };
        let mut has_ended = false;
        if seen.others.get(&host).is_some_and(|it| it.lived) {
            // The kernel closes the sockets of a process one after another.
            for _ in 0..SETTLES {
                let closed = self.closed(desk, &mut seen).await.unwrap_or_default();
                has_ended = closed.contains(&host);
                if has_ended {
                    break;
                }
                let _ = desk.ask(Ask::Pause(SETTLE_PAUSE)).await;
            }
        }
        self.keep(seen);
        if has_ended { Failure::Ended(host) } else { failure }
    }

    /// This rank no longer looks. If it has joined the job, it is in the group `world` of all ranks from now on, or, without
    /// one, has failed. Then it leaves nothing behind, unless it was in a group of all ranks before.
    pub(super) async fn end<W: Outside>(&self, desk: &Desk<W>, world: Option<&str>) {
        let Some(mut seen) = self.take() else { return };
        if seen.own.state == State::Joins && world.is_none() && seen.own.world.is_empty() {
            desk.take_back([self.process(self.0.member.rank).to_owned()]).await;
        } else if seen.own.state == State::Joins {
            seen.own.state = world.map_or(State::Failed, |_| State::In);
            seen.own.world = world.unwrap_or(&seen.own.world).to_owned();
            // If this rank has lost the store, so have the others.
            let _ = self.write_own(desk, &seen).await;
        }
        self.keep(seen);
        self.rest(desk).await;
    }

    /// This rank no longer looks, and another one takes its place.
    pub(super) async fn rest<W: Outside>(&self, desk: &Desk<W>) {
        let Some(seen) = self.take() else { return };
        if seen.is_watcher
            && desk
                .compare_set(&self.watch_key(), &seen.entry, b"")
                .await
                .is_ok_and(|it| it.is_empty())
        {
            desk.take_back([self.watch_key()]).await;
        }
    }

    /// The keys that only this group uses.
    pub(super) fn keys(&self) -> impl Iterator<Item = String> {
        let circles = 0..self.0.member.world_size.div_ceil(CIRCLE);
        circles.map(|circle| self.watch_key_of(circle)).chain([self.failed_key()])
    }

    /// The ranks of this rank's circle.
    fn circle(&self) -> Range<Rank> {
        let first = self.0.member.rank / CIRCLE * CIRCLE;
        first..(first + CIRCLE).min(self.0.member.world_size)
    }

    fn take(&self) -> Option<Seen> {
        self.0.seen.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn keep(&self, seen: Seen) {
        *self.0.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(seen);
    }

    /// The value of a key, or [`ABSENT`]. No key has this value.
    async fn peek<W: Outside>(&self, desk: &Desk<W>, key: &str) -> Result<Vec<u8>, W::Error> {
        desk.compare_set(key, ABSENT, ABSENT).await
    }

    fn named(&self, failed: &[u8]) -> Option<Rank> {
        let rank = text(failed.to_vec()).split(' ').nth(1)?.parse().ok()?;
        (rank < self.0.member.world_size).then_some(rank)
    }

    fn process(&self, rank: Rank) -> &str {
        self.0.processes.keys.get(rank).map_or("", String::as_str)
    }

    fn watch_key(&self) -> String {
        self.watch_key_of(self.0.member.rank / CIRCLE)
    }

    fn watch_key_of(&self, circle: usize) -> String {
        format!("drumline/{}/watch/{circle}", self.0.member.name)
    }

    fn failed_key(&self) -> String {
        format!("drumline/{}/failed", self.0.member.name)
    }
}

/// How many looks a rank takes to find the reason why another has given up: until it has taken the place of the watcher,
/// suspected a rank, and heard no objection.
const SETTLE_LOOKS: u32 = 6;
const SETTLE_PAUSE: Duration = Duration::from_millis(20);

/// How often a rank that has lost the store looks whether the process of its host has ended.
const SETTLES: u32 = 5;

impl Other {
    fn new(note: Note) -> Other {
        Other { note, lived: false, silent: None, is_elsewhere: false }
    }
}

impl Seen {
    /// The ranks that this rank suspects.
    fn suspects(&self) -> BTreeSet<Rank> {
        let others = self.others.iter().filter(|(_, other)| other.silent.is_some());
        others.map(|(rank, _)| *rank).collect()
    }
}

/// What the watcher writes: `RANK NUMBER SUSPECTS SIGN`, with suspects as `3,5` or `-`.
fn entry(rank: Rank, beat: u64, suspects: &BTreeSet<Rank>, sign: &str) -> Vec<u8> {
    let suspects: Vec<String> = suspects.iter().map(ToString::to_string).collect();
    let suspects = if suspects.is_empty() { "-".to_owned() } else { suspects.join(",") };
    format!("{rank} {beat} {suspects} {sign}").into_bytes()
}

struct Entry {
    rank: Rank,
    suspects: BTreeSet<Rank>,
    sign: String,
}

impl Entry {
    fn parse(entry: &[u8]) -> Option<Entry> {
        let text = String::from_utf8_lossy(entry);
        let mut words = text.splitn(4, ' ');
        let rank = words.next()?.parse().ok()?;
        words.next()?.parse::<u64>().ok()?;
        let suspects = words.next()?.split(',').filter_map(|it| it.parse().ok()).collect();
        Some(Entry { rank, suspects, sign: words.next()?.to_owned() })
    }
}

/// The part of a sign that is the same for all processes of a host and its network: the first two words.
fn network_of(sign: &str) -> String {
    sign.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// Whether a sign is reached from other networks: it has more than three words.
fn extends(sign: &str) -> bool {
    sign.split(' ').nth(3).is_some()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        membership::GlobalRanks,
        start_up::{Answered, Step, Steps},
    };

    struct Nobody;

    impl Outside for Nobody {
        type Error = String;
        type Stream = ();
    }

    type Keys = BTreeMap<String, Vec<u8>>;

    /// Answers from `keys`. All other processes have ended, and each wait takes its whole time.
    fn answer(question: Ask, keys: &mut Keys, now: &mut Instant) -> Answered<Nobody> {
        Ok(match question {
            Ask::Sign { .. } => Answer::Words(vec![b"host net own".to_vec()]),
            Ask::Look(signs) => Answer::Signs { reached: BTreeSet::new(), closed: signs },
            Ask::Set(key, value) => {
                keys.insert(key, value);
                Answer::Done
            }
            Ask::CompareSet { key, expected, desired } => {
                if keys.get(&key).map_or(&b""[..], Vec::as_slice) == expected {
                    keys.insert(key.clone(), desired);
                }
                Answer::Words(vec![keys.get(&key).cloned().unwrap_or(expected)])
            }
            Ask::Wait(wanted, limit) => {
                *now += limit;
                Answer::Missing(wanted.into_iter().filter(|key| !keys.contains_key(key)).collect())
            }
            other => unreachable!("{other:?}"),
        })
    }

    #[test]
    fn a_rank_looks_on_when_an_earlier_failure_is_taken_back() {
        let member = Membership::new("world", (1, 2), GlobalRanks::default());
        let processes = Processes {
            keys: vec!["process/0".to_owned(), "process/1".to_owned()],
            join: true,
            stay: true,
        };
        let watch = Watch::new(&member, processes);
        let dead = Note { sign: "host net dead".to_owned(), ..Note::default() };
        let mut keys = Keys::from([
            (watch.failed_key(), b"1 0".to_vec()),
            ("process/0".to_owned(), dead.text()),
        ]);
        let mut now = Instant::now();
        let mut steps = Steps::<Nobody, _>::new(now, async |desk| {
            watch.begin(&desk).await?;
            watch.wait(&desk, &["more".to_owned()], Duration::from_secs(60)).await
        });
        let mut step = steps.begin();
        let ended = loop {
            match step {
                Step::Ask(question) => {
                    if matches!(&question, Ask::Wait(awaited, _) if awaited[0] == "more") {
                        keys.remove(&watch.failed_key());
                    }
                    step = steps.answer(answer(question, &mut keys, &mut now), now);
                }
                Step::Over(ended) => break ended,
            }
        };
        assert_eq!(ended, Err(Failure::Ended(0)));
    }
}
