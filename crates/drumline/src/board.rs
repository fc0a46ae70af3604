//! How the ranks of a group meet in a store, as often as they like under one name.
//!
//! ```text
//! rank r                                   rank 0
//! ticket/r = a number of its own ────────▶ waits until all have come
//! waits for admitted/NUMBER ◀───────────── a name for this life of the group
//! takes its keys back
//!      ... and all go on under keys of this life ...
//! ```
//!
//! A ticket is good for one attempt, and whoever gives up takes it back. Rank 0 writes the life onto
//! the ticket that it admits, in one step with looking at it: so nobody is admitted who has gone. So an attempt that failed
//! leaves nothing behind and shifts nothing: ranks need not have tried equally often to meet.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use crate::{
    Error, Result,
    auth::Nonce,
    membership::Membership,
    store::{PrefixStore, Store},
    trace::{Category, Inquiry, Open, Recorder, What},
};

/// What the ranks of one life of a group tell each other. Every rank has one word on each subject.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    store: Arc<dyn Store>,
    /// Of this life, unlike any other.
    prefix: String,
    /// For errors.
    member: Membership,
    deadline: Instant,
    recorder: Recorder,
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

/// How the word of a rank begins that has something to tell, and of one that has failed.
const TOLD: u8 = b'+';
const FAILED: u8 = b'-';

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
        recorder: &Recorder,
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

    /// Leaves this rank's word on `subject` for the others.
    pub(crate) fn post(&self, subject: Subject, word: &[u8]) -> Result<()> {
        self.store.set(&self.key(subject, self.member.rank), &[&[TOLD], word].concat())
    }

    /// Waits for rank `rank`'s word on `subject`.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] when that rank has failed, with its error, or tells nothing in time.
    pub(crate) fn read(&self, subject: Subject, rank: Rank) -> Result<Vec<u8>> {
        let key = self.key(subject, rank);
        let _open = record(&self.recorder, &[&key]);
        match self.store.wait(&[&key], left_until(self.deadline)) {
            Ok(()) => {}
            Err(Error::StoreTimeout { .. }) => {
                let subject = subject.name();
                let problem = format!(
                    "it has come, but did not tell its {subject} in time; is it stopped or dead?"
                );
                return Err(self.member.about(rank, &problem));
            }
            Err(error) => return Err(error),
        }
        let word = self.store.get(&key)?;
        match word.split_first() {
            Some((&TOLD, word)) => Ok(word.to_vec()),
            Some((&FAILED, error)) => {
                let error = String::from_utf8_lossy(error);
                Err(self.member.about(rank, &format!("it has failed: {error}")))
            }
            _ => Err(self.member.about(rank, "it left a word that this release cannot read")),
        }
    }

    /// Waits for the words of all `ranks` on `subject`.
    ///
    /// # Errors
    ///
    /// As [`Board::read`].
    pub(crate) fn read_all(
        &self,
        subject: Subject,
        ranks: impl IntoIterator<Item = Rank>,
    ) -> Result<BTreeMap<Rank, Vec<u8>>> {
        ranks.into_iter().map(|rank| Ok((rank, self.read(subject, rank)?))).collect()
    }

    /// Looks whether some rank has failed, without waiting for anybody.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`], with that rank's error.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.store.check(&[&self.gone_key()])? {
            return Ok(());
        }
        // One that has failed has left a word on every subject.
        for rank in 0..self.member.world_size {
            if self.store.check(&[&self.key(Subject::Host, rank)])? {
                self.read(Subject::Host, rank)?;
            }
        }
        Ok(())
    }

    /// This rank could not be connected: nobody is to wait for it.
    pub(crate) fn fail(&self, error: &Error) {
        let text: String = error.to_string().chars().take(FAILURE_CHARS_MAX).collect();
        let word = [&[FAILED], text.as_bytes()].concat();
        let own = |subject| self.key(subject, self.member.rank);
        let told = Subject::ALL.into_iter().try_for_each(|subject| {
            match self.store.check(&[&own(subject)])? {
                true => Ok(()),
                false => self.store.set(&own(subject), &word),
            }
        });
        match told {
            Ok(()) => self.leave(),
            // The others lose the store as well.
            Err(error) => tracing::debug!(%error, "cannot tell the others of a failure"),
        }
    }

    /// This rank has read all that it needs. The last one that says so wipes the board.
    pub(crate) fn leave(&self) {
        let gone = self.gone_key();
        match self.store.add(&gone, 1) {
            Ok(count) if count == self.member.world_size as i64 => {
                let ranks = 0..self.member.world_size;
                let all = ranks.flat_map(|rank| Subject::ALL.map(|it| self.key(it, rank)));
                take_back(&*self.store, all.chain([gone]));
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "cannot leave the board in the store"),
        }
    }

    /// How many ranks have left or failed.
    fn gone_key(&self) -> String {
        format!("{}/gone", self.prefix)
    }

    fn key(&self, subject: Subject, rank: Rank) -> String {
        format!("{}/{}/{rank}", self.prefix, subject.name())
    }
}

/// One rank's attempt to join.
struct Attempt<'a> {
    member: &'a Membership,
    store: &'a Arc<dyn Store>,
    ticket: String,
    deadline: Instant,
    warn_after: Duration,
    recorder: &'a Recorder,
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
        let came = self
            .store
            .set(&joining, self.member.name.as_bytes())
            .and_then(|()| self.store.set(&ticket, self.ticket.as_bytes()));
        let life = came.and_then(|()| match self.member.rank {
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
        for key in &keys[1..] {
            let ticket = match self.store.check(&[key])? {
                true => self.store.get(key)?,
                false => WITHDRAWN.to_vec(),
            };
            let life = self.ticket.as_bytes();
            if ticket == WITHDRAWN || self.store.compare_set(key, &ticket, life)? != life {
                let error = self.member.error(
                    "one of the ranks gave up just when the last one came; try again".to_owned(),
                );
                self.board(&self.ticket).fail(&error);
                return Err(error);
            }
            let admitted = self.admitted_key(&String::from_utf8_lossy(&ticket));
            self.store.set(&admitted, life)?;
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
            Err(Error::StoreTimeout { .. }) => {}
            result => return result,
        }
        let seen = self.missing();
        if let Some(missing) = &seen {
            let Membership { name, rank, .. } = self.member;
            tracing::warn!(group = name, rank, "waits to be connected: {missing}");
        }
        match self.store.wait(keys, left_until(self.deadline)) {
            Err(Error::StoreTimeout { .. }) => {
                let missing = seen.or_else(|| self.missing());
                Err(self.member.error(missing.unwrap_or_else(|| {
                    let first = self.member.global.who(0);
                    format!("{first} has not let this rank in; has it failed, or is it stopped?")
                })))
            }
            result => result,
        }
    }

    /// Who has not come, and what they do instead.
    fn missing(&self) -> Option<String> {
        let is_missing =
            |rank: &Rank| matches!(self.store.check(&[&self.ticket_key(*rank)]), Ok(false));
        let missing = (0..self.member.world_size).filter(is_missing).take(RANKS_NAMED_MAX);
        let mut told: Vec<String> = Vec::new();
        for rank in missing {
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
fn record(recorder: &Recorder, keys: &[&str]) -> Open {
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
