//! How the ranks of a group meet in a store, as often as they like under one name.
//!
//! ```text
//! rank r                                   rank 0
//! ticket/r = a number of its own ────────▶ waits until all have come
//! waits for admitted/NUMBER ◀───────────── a name for this life of the group
//! takes its keys back
//!      ... and all go on under keys of this life, subject by subject ...
//! card/r = its word ─────────────────────▶ waits for all words
//! waits for card/all ◀──────────────────── the words of all, as one value
//! takes its word back
//! ```
//!
//! A ticket is good for one attempt, and whoever gives up takes it back. Rank 0 writes the life onto
//! the ticket that it admits, in one step with looking at it: so nobody is admitted who has gone. So an
//! attempt that failed leaves nothing behind and shifts nothing: ranks need not have tried equally
//! often to meet.
//!
//! So a rank asks the store some 30 times to be connected, rank 0 twice more for every rank, however
//! many there are; nobody but rank 0 waits for more than one key.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use drumline_engine::{
    membership::{GlobalRanks, Membership},
    recorder::{Category, Open, What},
};
use drumline_schedule::step::Rank;
use drumline_store::{
    Error as StoreError,
    auth::Nonce,
    store::{HashStore, PrefixStore, Store},
};

use crate::{Error, Result, trace::GroupTrace, trace::Inquiry};

/// What the ranks of one life of a group tell each other. Every rank has one word on each subject.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    store: Arc<dyn Store>,
    /// Of this life, unlike any other.
    prefix: String,
    /// For errors.
    member: Membership,
    deadline: Instant,
    recorder: GroupTrace,
}

/// What ranks tell each other about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Which host it is on.
    Card,
    /// Where it listens for ranks of other hosts.
    Address,
    /// Whether it has memory to share.
    Segment,
    /// With whom it shares memory, and by which prices it chooses.
    Host,
    /// What rank 0 has measured.
    Prices,
}

impl Subject {
    const ALL: [Subject; 5] =
        [Subject::Card, Subject::Address, Subject::Segment, Subject::Host, Subject::Prices];

    const LAST: Subject = Subject::Prices;

    fn name(self) -> &'static str {
        match self {
            Subject::Card => "card",
            Subject::Address => "address",
            Subject::Segment => "segment",
            Subject::Host => "host",
            Subject::Prices => "prices",
        }
    }
}

/// How a roll begins that has the words of all, and one that has an error in their place.
const COMPLETE: u8 = b'+';
const FAILED: u8 = b'-';

/// How often rank 0 looks whether one of those has failed for whom it waits.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How much of an error is told to others.
const FAILURE_CHARS_MAX: usize = 1000;

impl Board {
    /// Meets the other ranks of `member`'s group, which is told apart from others by its name. Also
    /// returns what is to be asked for the time.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] names those that have not come before `deadline`.
    pub(crate) fn meet(
        member: &Membership,
        store: &Arc<dyn Store>,
        deadline: Instant,
        warn_after: Duration,
        recorder: &GroupTrace,
    ) -> Result<(Board, Inquiry)> {
        let ticket = fresh_name()?;
        let attempt = Attempt { member, store, ticket, deadline, warn_after, recorder };
        // Rank 0 says what time it is before it lets the others in.
        let offer = match member.rank {
            0 => Some(recorder.ask_time(&attempt.board(&attempt.ticket).store_of_life())?),
            _ => None,
        };
        let board = attempt.board(&attempt.run()?);
        let inquiry = match offer {
            Some(inquiry) => inquiry,
            None => recorder.ask_time(&board.store_of_life())?,
        };
        Ok((board, inquiry))
    }

    /// The part of the store that only the ranks of this life know of.
    pub(crate) fn store_of_life(&self) -> PrefixStore {
        PrefixStore::new(self.prefix.clone(), self.store.clone())
    }

    /// What only the ranks of this life know of, and no process that an earlier one has left.
    pub(crate) fn token(&self) -> &[u8] {
        self.prefix.as_bytes()
    }

    /// Says `word` on `subject`, and returns what all ranks say, by rank. All must come to it.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] when a rank has failed, with its error, or tells nothing in time.
    pub(crate) fn all_gather(&self, subject: Subject, word: &[u8]) -> Result<Vec<Vec<u8>>> {
        let Membership { rank, world_size, .. } = self.member;
        if world_size == 1 {
            return Ok(vec![word.to_vec()]);
        }
        if rank == 0 {
            return self.call_roll(subject, word);
        }
        let own = self.word_key(subject, rank);
        self.store.set(&own, word)?;
        let all = self.hear_roll(subject)?;
        // Rank 0 has seen it.
        take_back(&*self.store, [own].into_iter());
        Ok(all)
    }

    /// Rank 0 waits for the words of all others.
    fn call_roll(&self, subject: Subject, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> =
            (1..self.member.world_size).map(|rank| self.word_key(subject, rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let open = record(&self.recorder, &[&self.roll_key(subject)]);
        loop {
            let left = left_until(self.deadline);
            match self.store.wait(&keys, left.min(LOOK_EVERY)) {
                Ok(()) => break,
                // Whoever has failed says nothing any more.
                Err(StoreError::StoreTimeout { .. }) if left > LOOK_EVERY => self.check()?,
                Err(StoreError::StoreTimeout { .. }) => return Err(self.name_the_silent(subject)),
                Err(error) => return Err(error.into()),
            }
        }
        drop(open);
        let words = self.store.multi_get(&keys)?;
        let all: Vec<Vec<u8>> = [own.to_vec()].into_iter().chain(words).collect();
        let roll = self.store.compare_set(&self.roll_key(subject), b"", &encode(&all))?;
        self.decode(&roll)
    }

    fn hear_roll(&self, subject: Subject) -> Result<Vec<Vec<u8>>> {
        let key = self.roll_key(subject);
        let _open = record(&self.recorder, &[&key]);
        match self.store.wait(&[&key], left_until(self.deadline)) {
            Ok(()) => self.decode(&self.store.get(&key)?),
            Err(StoreError::StoreTimeout { .. }) => Err(self.name_the_silent(subject)),
            Err(error) => Err(error.into()),
        }
    }

    /// Looks whether some rank has failed, without waiting for anybody.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`], with that rank's error.
    pub(crate) fn check(&self) -> Result<()> {
        // One that has failed has left its error on every subject.
        let key = self.roll_key(Subject::LAST);
        match self.store.check(&[&key])? {
            true => self.decode(&self.store.get(&key)?).map(drop),
            false => Ok(()),
        }
    }

    /// This rank could not be connected: nobody is to wait for it.
    pub(crate) fn fail(&self, error: &Error) {
        self.fail_for(1, error);
    }

    /// The same, for so many ranks.
    fn fail_for(&self, ranks: usize, error: &Error) {
        let rank = (self.member.rank as u32).to_le_bytes();
        let text: String = error.to_string().chars().take(FAILURE_CHARS_MAX).collect();
        let roll = [&[FAILED], &rank[..], text.as_bytes()].concat();
        let told = Subject::ALL.into_iter().try_for_each(|subject| {
            self.store.compare_set(&self.roll_key(subject), b"", &roll).map(drop)
        });
        match told {
            Ok(()) => self.leave_for(ranks),
            // The others lose the store as well.
            Err(error) => tracing::debug!(%error, "cannot tell the others of a failure"),
        }
    }

    /// This rank has read all that it needs. The last one that says so wipes the board.
    pub(crate) fn leave(&self) {
        self.leave_for(1);
    }

    fn leave_for(&self, ranks: usize) {
        let gone = self.gone_key();
        match self.store.add(&gone, ranks as i64) {
            Ok(count) if count == self.member.world_size as i64 => {
                // Where somebody has failed, words are left that nobody has seen.
                let ranks = if self.check().is_err() { 1..self.member.world_size } else { 0..0 };
                let words = |subject| ranks.clone().map(move |rank| self.word_key(subject, rank));
                let rolls = Subject::ALL.into_iter().map(|subject| self.roll_key(subject));
                let words = Subject::ALL.into_iter().flat_map(words);
                take_back(&*self.store, words.chain(rolls).chain([gone]));
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "cannot leave the board in the store"),
        }
    }

    /// Why there is no roll: some have said nothing, or rank 0 has called none.
    fn name_the_silent(&self, subject: Subject) -> Error {
        let Membership { rank, world_size, .. } = self.member;
        let keys: Vec<String> = (1..world_size)
            .filter(|other| *other != rank)
            .map(|rank| self.word_key(subject, rank))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let silent = match self.store.wait(&keys, Duration::ZERO) {
            Err(StoreError::StoreTimeout { keys, .. }) => {
                let rank = |key: &String| key.rsplit('/').next()?.parse().ok();
                keys.iter().filter_map(rank).take(RANKS_NAMED_MAX).collect()
            }
            _ => vec![0],
        };
        let silent: Vec<String> =
            silent.into_iter().map(|rank| self.member.global.who(rank)).collect();
        Error::connect(
            &self.member,
            format!(
                "{}: came, but told no {} in time; stopped or dead?",
                silent.join(", "),
                subject.name()
            ),
        )
    }

    /// The words of a roll.
    fn decode(&self, roll: &[u8]) -> Result<Vec<Vec<u8>>> {
        let words = match roll.split_first() {
            Some((&COMPLETE, words)) => split(words),
            Some((&FAILED, failure)) => match failure.split_first_chunk() {
                Some((rank, text)) => {
                    let text = String::from_utf8_lossy(text);
                    let rank = u32::from_le_bytes(*rank) as Rank;
                    return Err(Error::connect_to(
                        &self.member,
                        rank,
                        &format!("it has failed: {text}"),
                    ));
                }
                None => None,
            },
            _ => None,
        };
        words.filter(|words| words.len() == self.member.world_size).ok_or_else(|| {
            Error::connect_to(
                &self.member,
                0,
                "it left what this release cannot read; do all ranks run one?",
            )
        })
    }

    /// How many ranks have left or failed.
    fn gone_key(&self) -> String {
        format!("{}/gone", self.prefix)
    }

    fn word_key(&self, subject: Subject, rank: Rank) -> String {
        format!("{}/{}/{rank}", self.prefix, subject.name())
    }

    /// Where all words are, or an error: whichever is there first.
    fn roll_key(&self, subject: Subject) -> String {
        format!("{}/{}/all", self.prefix, subject.name())
    }
}

/// Each word behind its length.
fn encode(words: &[Vec<u8>]) -> Vec<u8> {
    let mut roll = vec![COMPLETE];
    for word in words {
        roll.extend((word.len() as u32).to_le_bytes());
        roll.extend(word);
    }
    roll
}

/// What [`encode`] has put together, without its first byte.
fn split(mut roll: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut words = Vec::new();
    while !roll.is_empty() {
        let (length, rest) = roll.split_first_chunk()?;
        let (word, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        words.push(word.to_vec());
        roll = rest;
    }
    Some(words)
}

/// What rank 1 of so many reads from a roll, as bytes again: for `drumline-fuzz`.
pub(crate) fn roll_again(roll: &[u8], world_size: usize) -> Result<Vec<u8>> {
    let member = Membership::new("fuzz", (1, world_size), GlobalRanks::default());
    let recorder = GroupTrace::of(&member.name, member.rank);
    let (store, prefix) = (Arc::new(HashStore::new()), "life".to_owned());
    let board = Board { store, prefix, member, deadline: Instant::now(), recorder };
    board.decode(roll).map(|words| encode(&words))
}

/// One rank's attempt to join.
struct Attempt<'a> {
    member: &'a Membership,
    store: &'a Arc<dyn Store>,
    ticket: String,
    deadline: Instant,
    warn_after: Duration,
    recorder: &'a GroupTrace,
}

/// What a ticket says whose owner has given up.
const WITHDRAWN: &[u8] = b"withdrawn";

/// The most ranks that an error names.
const RANKS_NAMED_MAX: usize = 32;

impl Attempt<'_> {
    /// The name of the life that this rank is part of.
    fn run(&self) -> Result<String> {
        let (joining, ticket) =
            (self.joining_key(self.member.rank), self.ticket_key(self.member.rank));
        let admitted = self.admitted_key(&self.ticket);
        let name = self.member.name.as_bytes();
        let came = self.store.multi_set(&[(&joining, name), (&ticket, self.ticket.as_bytes())]);
        let life = came.map_err(Error::from).and_then(|()| match self.member.rank {
            0 => self.admit_all(),
            _ => self.be_admitted(&admitted),
        });
        // Before this rank says anything on the board: when all have, no ticket is left over.
        take_back(&**self.store, [joining, ticket, admitted].into_iter());
        life
    }

    fn admit_all(&self) -> Result<String> {
        let keys: Vec<String> =
            (0..self.member.world_size).map(|rank| self.ticket_key(rank)).collect();
        self.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>())?;
        let life = self.ticket.as_bytes();
        let mut admitted = Vec::new();
        for key in &keys[1..] {
            // What no ticket says, so nothing is replaced: what it says, or this if it has gone.
            let ticket = self.store.compare_set(key, WITHDRAWN, WITHDRAWN)?;
            if ticket == WITHDRAWN || self.store.compare_set(key, &ticket, life)? != life {
                break;
            }
            admitted.push(self.admitted_key(&String::from_utf8_lossy(&ticket)));
        }
        let pairs: Vec<(&str, &[u8])> = admitted.iter().map(|key| (key.as_str(), life)).collect();
        self.store.multi_set(&pairs)?;
        if admitted.len() < keys.len() - 1 {
            let error = Error::connect(
                self.member,
                "one of the ranks gave up just when the last one came; try again".to_owned(),
            );
            // The others never hear of this life.
            self.board(&self.ticket).fail_for(keys.len() - admitted.len(), &error);
            return Err(error);
        }
        Ok(self.ticket.clone())
    }

    fn board(&self, life: &str) -> Board {
        Board {
            store: self.store.clone(),
            prefix: format!("drumline/{}/{life}", self.member.name),
            member: self.member.clone(),
            deadline: self.deadline,
            recorder: self.recorder.clone(),
        }
    }

    fn be_admitted(&self, admitted: &str) -> Result<String> {
        let life = match self.wait(&[admitted]) {
            Ok(()) => self.store.get(admitted)?,
            Err(error) => {
                let (key, ticket) = (self.ticket_key(self.member.rank), self.ticket.as_bytes());
                match self.store.compare_set(&key, ticket, WITHDRAWN)? {
                    word if word == WITHDRAWN => return Err(error),
                    // Admitted at the last moment: the others count on this rank.
                    life => life,
                }
            }
        };
        Ok(String::from_utf8_lossy(&life).into_owned())
    }

    /// Waits for `keys`. Says who is missing when that takes long, and when the time is over.
    fn wait(&self, keys: &[&str]) -> Result<()> {
        let _open = record(self.recorder, keys);
        let left = left_until(self.deadline);
        // Well before the end: others that wait in vain may give up at the same time as this rank.
        let patience = self.warn_after.min(left.mul_f64(0.75));
        match self.store.wait(keys, patience) {
            Err(StoreError::StoreTimeout { .. }) => {}
            result => return Ok(result?),
        }
        let seen = self.missing();
        if let Some(missing) = &seen {
            let Membership { name, rank, .. } = self.member;
            tracing::warn!(group = name, rank, "waits to be connected: {missing}");
        }
        match self.store.wait(keys, left_until(self.deadline)) {
            Err(StoreError::StoreTimeout { .. }) => {
                let missing = seen.or_else(|| self.missing());
                Err(Error::connect(
                    self.member,
                    missing.unwrap_or_else(|| {
                        let first = self.member.global.who(0);
                        format!(
                            "{first} has not let this rank in; has it failed, or is it stopped?"
                        )
                    }),
                ))
            }
            result => Ok(result?),
        }
    }

    /// Who has not come, and what they do instead.
    fn missing(&self) -> Option<String> {
        let keys: Vec<String> =
            (0..self.member.world_size).map(|rank| self.ticket_key(rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let missing = match self.store.wait(&keys, Duration::ZERO) {
            Err(StoreError::StoreTimeout { keys, .. }) => keys,
            _ => Vec::new(),
        };
        let missing = missing.iter().filter_map(|key| key.rsplit('/').next()?.parse().ok());
        let missing = missing.take(RANKS_NAMED_MAX);
        let mut told: Vec<String> = Vec::new();
        for rank in missing {
            let rank: Rank = rank;
            let key = self.joining_key(rank);
            let elsewhere = match self.store.check(&[&key]) {
                Ok(true) => self.store.get(&key).ok(),
                _ => None,
            };
            let elsewhere = elsewhere.map(|name| String::from_utf8_lossy(&name).into_owned());
            told.push(match elsewhere.filter(|name| *name != self.member.name) {
                Some(name) => {
                    format!("{} waits in group {name:?} instead", self.member.global.who(rank))
                }
                None => format!("{} has not come", self.member.global.who(rank)),
            });
        }
        let told = (!told.is_empty()).then(|| told.join(", "))?;
        Some(format!(
            "{told}; all members must name the same ranks, and one that joins several groups must \
             join them in the same order as the others, or on threads of their own"
        ))
    }

    fn ticket_key(&self, rank: Rank) -> String {
        format!("drumline/{}/ticket/{rank}", self.member.name)
    }

    fn admitted_key(&self, ticket: &str) -> String {
        format!("drumline/{}/admitted/{ticket}", self.member.name)
    }

    /// Which group a rank of the job is waiting for, whatever its number there.
    fn joining_key(&self, rank: Rank) -> String {
        format!("drumline/joining/{}", self.member.global.of(rank))
    }
}

/// A wait for the store.
fn record(recorder: &GroupTrace, keys: &[&str]) -> Open {
    recorder.begin(|| What {
        category: Category::Store,
        name: "wait",
        key: Some(keys.join(", ").into()),
        ..What::default()
    })
}

fn take_back(store: &dyn Store, keys: impl Iterator<Item = String>) {
    for key in keys {
        if let Err(error) = store.delete_key(&key) {
            // The store has gone, and the key with it.
            tracing::debug!(key, %error, "cannot take a key back");
            return;
        }
    }
}

fn left_until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

fn fresh_name() -> Result<String> {
    let Nonce(random) = Nonce::random()?;
    Ok(random[..12].iter().map(|byte| format!("{byte:02x}")).collect())
}
