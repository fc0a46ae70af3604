//! What the ranks of one life of a group tell each other, subject by subject.
//!
//! ```text
//! rank r                                   rank 0
//! card/r = its word ─────────────────────▶ waits for all words
//! waits for card/all ◀──────────────────── the words of all, as one value
//! takes its word back
//! ```
//!
//! Only rank 0 waits for more than one key. A rank that fails leaves its error in the place of the words of
//! all ranks, which ends the waits of the others.

use std::time::{Duration, Instant};

use drumline_schedule::step::Rank;

use super::{
    failure::Failure,
    steps::{Ask, Desk, Outside},
    store::record,
    watch::{Watch, look_every},
};
use crate::{membership::Membership, recorder::Recorder};

/// What the ranks of one life of a group tell each other. Every rank has one word on each subject.
#[derive(Clone, Debug)]
pub struct Board {
    /// The beginning of this life's keys. No other life has the same.
    prefix: String,
    /// This rank, for errors.
    member: Membership,
    deadline: Instant,
    watch: Watch,
    recorder: Recorder,
}

/// What ranks tell each other about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The host that the rank takes itself to be on.
    Card,
    /// The first rank that it reaches on this host.
    Home,
    /// The address at which the rank listens for ranks of other hosts.
    Address,
    /// Whether the rank has memory to share.
    Segment,
    /// The ranks with which the rank shares memory, and the prices by which it chooses.
    Host,
    /// The prices that rank 0 has measured.
    Prices,
}

impl Subject {
    const ALL: [Subject; 6] = [
        Subject::Card,
        Subject::Home,
        Subject::Address,
        Subject::Segment,
        Subject::Host,
        Subject::Prices,
    ];

    const LAST: Subject = Subject::Prices;

    fn name(self) -> &'static str {
        match self {
            Subject::Card => "card",
            Subject::Home => "home",
            Subject::Address => "address",
            Subject::Segment => "segment",
            Subject::Host => "host",
            Subject::Prices => "prices",
        }
    }
}

/// The first byte of a roll with the words of all ranks, and of a roll with an error instead.
const COMPLETE: u8 = b'+';
const FAILED: u8 = b'-';
/// Of a roll with the rank whose process has ended.
const ENDED: u8 = b'x';

/// How long, and with which pauses, a rank that cannot go on looks for the reason.
const SETTLE: Duration = Duration::from_millis(800);
const SETTLE_PAUSE: Duration = Duration::from_millis(50);

/// The most ranks that an error names.
pub(super) const RANKS_NAMED_MAX: usize = 32;

/// The most characters of an error that other ranks are told.
const FAILURE_CHARS_MAX: usize = 1000;

impl Board {
    /// The board of the life that is called `life`.
    pub fn new(
        member: &Membership,
        life: &str,
        deadline: Instant,
        watch: &Watch,
        recorder: &Recorder,
    ) -> Board {
        Board {
            prefix: format!("drumline/{}/{life}", member.name),
            member: member.clone(),
            deadline,
            watch: watch.clone(),
            recorder: recorder.clone(),
        }
    }

    /// What the keys of this life begin with.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The rank that looks at the board.
    pub fn member(&self) -> &Membership {
        &self.member
    }

    /// When this rank gives up.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Writes `word` on `subject`, and returns the words of all ranks on it, by rank. All ranks must call
    /// this.
    ///
    /// # Errors
    ///
    /// [`Failure::Connect`] when a rank has failed (with that rank's error), or when a rank writes nothing in
    /// time.
    pub async fn all_gather<W: Outside>(
        &self,
        desk: &Desk<W>,
        subject: Subject,
        word: &[u8],
    ) -> Result<Vec<Vec<u8>>, Failure<W::Error>> {
        match self.gather(desk, subject, word).await {
            Ok(words) => Ok(words),
            Err(failure) => Err(self.watch.explain(desk, failure).await),
        }
    }

    async fn gather<W: Outside>(
        &self,
        desk: &Desk<W>,
        subject: Subject,
        word: &[u8],
    ) -> Result<Vec<Vec<u8>>, Failure<W::Error>> {
        let Membership { rank, world_size, .. } = self.member;
        if world_size == 1 {
            return Ok(vec![word.to_vec()]);
        }
        if rank == 0 {
            return self.call_roll(desk, subject, word).await;
        }
        let own = self.word_key(subject, rank);
        desk.set(&own, word).await?;
        let all = self.hear_roll(desk, subject).await?;
        // Rank 0 has seen it.
        desk.take_back([own]).await;
        Ok(all)
    }

    /// Rank 0 waits for the words of all others.
    async fn call_roll<W: Outside>(
        &self,
        desk: &Desk<W>,
        subject: Subject,
        own: &[u8],
    ) -> Result<Vec<Vec<u8>>, Failure<W::Error>> {
        let keys: Vec<String> =
            (1..self.member.world_size).map(|rank| self.word_key(subject, rank)).collect();
        let open = record(&self.recorder, &[self.roll_key(subject)]);
        loop {
            let left = desk.left_until(self.deadline);
            let every = look_every(self.member.world_size);
            let missing = desk.wait(keys.clone(), left.min(every)).await?;
            if missing.is_empty() {
                break;
            }
            // A rank that has failed writes no more words.
            match left > every {
                true => self.check(desk).await?,
                false => return Err(self.name_the_silent(desk, subject).await),
            }
        }
        drop(open);
        let words = desk.get_all(keys).await?;
        let all: Vec<Vec<u8>> = [own.to_vec()].into_iter().chain(words).collect();
        let roll = desk.compare_set(&self.roll_key(subject), b"", &encode(&all)).await?;
        self.decode(&roll)
    }

    async fn hear_roll<W: Outside>(
        &self,
        desk: &Desk<W>,
        subject: Subject,
    ) -> Result<Vec<Vec<u8>>, Failure<W::Error>> {
        let key = self.roll_key(subject);
        let _open = record(&self.recorder, std::slice::from_ref(&key));
        let left = desk.left_until(self.deadline);
        match self.watch.wait(desk, std::slice::from_ref(&key), left).await?.is_empty() {
            true => self.decode(&desk.get(&key).await?),
            false => Err(self.name_the_silent(desk, subject).await),
        }
    }

    /// Looks whether any rank has failed, or its process has ended, without waiting.
    ///
    /// # Errors
    ///
    /// [`Failure::Connect`], with that rank's error, and [`Failure::Ended`].
    pub async fn check<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        match self.check_once(desk).await {
            Ok(()) => Ok(()),
            Err(failure) => Err(self.watch.explain(desk, failure).await),
        }
    }

    async fn check_once<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        // A rank that fails leaves its error on every subject, so one subject is enough.
        let key = self.roll_key(Subject::LAST);
        match desk.check(&key).await? {
            true => self.decode(&desk.get(&key).await?).map(drop),
            false => self.watch.look(desk).await,
        }
    }

    /// Looks for some time whether another rank has failed, which may be why this one cannot go on. A rank that fails closes
    /// its sockets first, and says why then.
    pub(super) async fn settle<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        let until = desk.now() + SETTLE;
        loop {
            self.check(desk).await?;
            if desk.now() >= until.min(self.deadline) {
                return Ok(());
            }
            desk.ask(Ask::Pause(SETTLE_PAUSE)).await?;
        }
    }

    /// This rank could not be connected, because of `error`. Writes the error for all ranks, so that none
    /// waits for this rank.
    /// `culprit` is the rank whose process has ended, if that is why.
    pub async fn fail<W: Outside>(&self, desk: &Desk<W>, error: &str, culprit: Option<Rank>) {
        self.fail_for(desk, 1, error, culprit).await;
    }

    /// The same, on behalf of `ranks` ranks.
    pub(super) async fn fail_for<W: Outside>(
        &self,
        desk: &Desk<W>,
        ranks: usize,
        error: &str,
        culprit: Option<Rank>,
    ) {
        let text: String = error.chars().take(FAILURE_CHARS_MAX).collect();
        let (kind, rank) = culprit.map_or((FAILED, self.member.rank), |rank| (ENDED, rank));
        let roll = [&[kind], &(rank as u32).to_le_bytes()[..], text.as_bytes()].concat();
        for subject in Subject::ALL {
            if let Err(error) = desk.compare_set(&self.roll_key(subject), b"", &roll).await {
                // If this rank has lost the store, so have the others.
                tracing::debug!(%error, "cannot tell the others of a failure");
                return;
            }
        }
        self.leave_for(desk, ranks).await;
    }

    /// Says that this rank has read all that it needs. The last rank that says so deletes the board.
    pub async fn leave<W: Outside>(&self, desk: &Desk<W>) {
        self.watch.end(desk, Some(&self.prefix)).await;
        self.leave_for(desk, 1).await;
    }

    async fn leave_for<W: Outside>(&self, desk: &Desk<W>, ranks: usize) {
        self.watch.end(desk, None).await;
        let gone = self.gone_key();
        match desk.add(&gone, ranks as i64).await {
            Ok(count) if count == self.member.world_size as i64 => {
                // If a rank has failed, some words were never read.
                let failed = self.check(desk).await.is_err();
                let ranks = if failed { 1..self.member.world_size } else { 0..0 };
                let words = |subject| ranks.clone().map(move |rank| self.word_key(subject, rank));
                let rolls = Subject::ALL.into_iter().map(|subject| self.roll_key(subject));
                let words = Subject::ALL.into_iter().flat_map(words);
                let keys = words.chain(rolls).chain([gone]).chain(self.watch.keys());
                desk.take_back(keys).await;
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "cannot leave the board in the store"),
        }
    }

    /// The error when there is no roll: some ranks have written nothing, or rank 0 has not made the roll.
    async fn name_the_silent<W: Outside>(
        &self,
        desk: &Desk<W>,
        subject: Subject,
    ) -> Failure<W::Error> {
        let Membership { rank, world_size, .. } = self.member;
        let keys: Vec<String> = (1..world_size)
            .filter(|other| *other != rank)
            .map(|rank| self.word_key(subject, rank))
            .collect();
        let silent = match desk.wait(keys, Duration::ZERO).await {
            Ok(keys) if !keys.is_empty() => {
                let rank = |key: &String| key.rsplit('/').next()?.parse().ok();
                keys.iter().filter_map(rank).take(RANKS_NAMED_MAX).collect()
            }
            _ => vec![0],
        };
        let silent: Vec<String> =
            silent.into_iter().map(|rank| self.member.global.who(rank)).collect();
        Failure::Connect(format!(
            "{}: came, but told no {} in time; stopped or dead?",
            silent.join(", "),
            subject.name()
        ))
    }

    /// The words in a roll.
    ///
    /// # Errors
    ///
    /// [`Failure::Connect`] when the roll has an error instead of words, or cannot be read.
    pub fn decode<E>(&self, roll: &[u8]) -> Result<Vec<Vec<u8>>, Failure<E>> {
        let words = match roll.split_first() {
            Some((&COMPLETE, words)) => split(words),
            Some((&FAILED, failure)) => match failure.split_first_chunk() {
                Some((rank, text)) => {
                    let text = String::from_utf8_lossy(text);
                    let rank = u32::from_le_bytes(*rank) as Rank;
                    return Err(Failure::by(&self.member, rank, &format!("it has failed: {text}")));
                }
                None => None,
            },
            Some((&ENDED, failure)) => match failure.first_chunk() {
                Some(rank) => return Err(Failure::Ended(u32::from_le_bytes(*rank) as Rank)),
                None => None,
            },
            _ => None,
        };
        words.filter(|words| words.len() == self.member.world_size).ok_or_else(|| {
            Failure::by(
                &self.member,
                0,
                "it left what this release cannot read; do all ranks run one?",
            )
        })
    }

    /// The key that counts the ranks that have left or failed.
    fn gone_key(&self) -> String {
        format!("{}/gone", self.prefix)
    }

    fn word_key(&self, subject: Subject, rank: Rank) -> String {
        format!("{}/{}/{rank}", self.prefix, subject.name())
    }

    /// The key of the roll: the words of all ranks, or an error, whichever is written first.
    fn roll_key(&self, subject: Subject) -> String {
        format!("{}/{}/all", self.prefix, subject.name())
    }
}

/// Encodes a roll: each word after its length.
pub fn encode(words: &[Vec<u8>]) -> Vec<u8> {
    let mut roll = vec![COMPLETE];
    for word in words {
        roll.extend((word.len() as u32).to_le_bytes());
        roll.extend(word);
    }
    roll
}

/// The words that [`encode`] has put together. `roll` lacks the first byte.
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
