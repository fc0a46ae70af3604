//! How the ranks of a group meet in a store. They can do so any number of times under one name.
//!
//! ```text
//! rank r                                   rank 0
//! ticket/r = a number of its own ────────▶ waits until all have come
//! waits for admitted/NUMBER ◀───────────── a name for this life of the group
//! takes its keys back
//!      ... and all go on on the board of this life ...
//! ```
//!
//! A ticket is good for one attempt. A rank that gives up withdraws its ticket. Rank 0 admits a ticket by
//! writing the life onto it, and this step fails if the ticket has been withdrawn: so rank 0 never admits a
//! rank that has gone. A failed attempt leaves nothing behind, so ranks may meet although some have tried
//! more often than others.

use std::time::{Duration, Instant};

use drumline_schedule::step::Rank;

use super::{
    board::{Board, RANKS_NAMED_MAX},
    failure::{Failure, told},
    steps::{Desk, Outside},
    store::record,
    watch::Watch,
};
use crate::{membership::Membership, recorder::Recorder};

/// One rank's attempt to join.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// The rank.
    pub member: &'a Membership,
    /// A random text. On rank 0 it becomes the name of the life.
    pub ticket: &'a str,
    /// When it gives up.
    pub deadline: Instant,
    /// After this time it warns of ranks that have not come.
    pub warn_after: Duration,
    /// Notices when the process of a rank has ended.
    pub watch: &'a Watch,
    /// Records this rank's waits.
    pub recorder: &'a Recorder,
}

/// What a rank writes on its ticket when it gives up.
const WITHDRAWN: &[u8] = b"withdrawn";

impl Attempt<'_> {
    /// Meets the other ranks of the group, which is told apart from others by its name.
    ///
    /// # Errors
    ///
    /// [`Failure::Connect`] names the ranks that have not come before the deadline.
    pub async fn run<W: Outside>(&self, desk: &Desk<W>) -> Result<Board, Failure<W::Error>> {
        let met = match self.watch.begin(desk).await {
            Ok(()) => self.meet(desk).await,
            Err(failure) => Err(failure),
        };
        match met {
            Ok(board) => Ok(board),
            Err(failure) => {
                let failure = self.watch.explain(desk, failure).await;
                self.watch.end(desk, None).await;
                Err(failure)
            }
        }
    }

    async fn meet<W: Outside>(&self, desk: &Desk<W>) -> Result<Board, Failure<W::Error>> {
        let (joining, ticket) =
            (self.joining_key(self.member.rank), self.ticket_key(self.member.rank));
        let admitted = self.admitted_key(self.ticket);
        let name = self.member.name.clone().into_bytes();
        let own = self.ticket.to_owned().into_bytes();
        let came = desk.set_all(vec![(joining.clone(), name), (ticket.clone(), own)]).await;
        let life = match (came, self.member.rank) {
            (Err(error), _) => Err(error.into()),
            (Ok(()), 0) => self.admit_all(desk).await,
            (Ok(()), _) => self.be_admitted(desk, &admitted).await,
        };
        // The tickets are removed before this rank writes on the board. So once all ranks have written there,
        // no ticket is left.
        desk.take_back([joining, ticket, admitted]).await;
        Ok(self.board(&life?))
    }

    async fn admit_all<W: Outside>(&self, desk: &Desk<W>) -> Result<String, Failure<W::Error>> {
        let keys: Vec<String> =
            (0..self.member.world_size).map(|rank| self.ticket_key(rank)).collect();
        self.wait(desk, &keys).await?;
        let life = self.ticket.as_bytes();
        let mut admitted = Vec::new();
        for key in &keys[1..] {
            // No ticket has this value, so the comparison fails and returns the ticket. If the ticket has
            // gone, it returns this value.
            let ticket = desk.compare_set(key, WITHDRAWN, WITHDRAWN).await?;
            if ticket == WITHDRAWN || desk.compare_set(key, &ticket, life).await? != life {
                break;
            }
            admitted.push(self.admitted_key(&String::from_utf8_lossy(&ticket)));
        }
        let gone = keys.len() - admitted.len();
        desk.set_all(admitted.into_iter().map(|key| (key, life.to_vec())).collect()).await?;
        if gone > 1 {
            let problem = "one of the ranks gave up just when the last one came; try again";
            let ended = self.watch.settle(desk).await.err();
            let failure = ended.unwrap_or_else(|| Failure::Connect(problem.to_owned()));
            // The other ranks never hear of this life.
            let board = self.board(self.ticket);
            let text = told(self.member, &failure.text(self.member));
            board.fail_for(desk, gone, &text, failure.culprit()).await;
            return Err(failure);
        }
        Ok(self.ticket.to_owned())
    }

    fn board(&self, life: &str) -> Board {
        Board::new(self.member, life, self.deadline, self.watch, self.recorder)
    }

    async fn be_admitted<W: Outside>(
        &self,
        desk: &Desk<W>,
        admitted: &str,
    ) -> Result<String, Failure<W::Error>> {
        let life = match self.wait(desk, &[admitted.to_owned()]).await {
            Ok(()) => desk.get(admitted).await?,
            Err(error) => {
                let (key, ticket) = (self.ticket_key(self.member.rank), self.ticket.as_bytes());
                match desk.compare_set(&key, ticket, WITHDRAWN).await? {
                    word if word == WITHDRAWN => return Err(error),
                    // Rank 0 admitted this rank at the last moment, and the others count on it.
                    life if desk.check(admitted).await? => life,
                    // Rank 0 has written on this rank's ticket, and stopped before it told this rank.
                    life => {
                        let failure = match error {
                            Failure::Connect(_) => Failure::Connect(self.not_let_in()),
                            why => why,
                        };
                        let board = self.board(&String::from_utf8_lossy(&life));
                        let text = told(self.member, &failure.text(self.member));
                        board.fail(desk, &text, failure.culprit()).await;
                        return Err(failure);
                    }
                }
            }
        };
        Ok(String::from_utf8_lossy(&life).into_owned())
    }

    /// Waits for `keys`. After a while, and when the time is over, says which ranks are missing.
    async fn wait<W: Outside>(
        &self,
        desk: &Desk<W>,
        keys: &[String],
    ) -> Result<(), Failure<W::Error>> {
        let _open = record(self.recorder, keys);
        let left = desk.left_until(self.deadline);
        // The warning comes well before the deadline: ranks that wait for this one may give up at the same
        // time as it does.
        let patience = self.warn_after.min(left.mul_f64(0.75));
        if self.watch.wait(desk, keys, patience).await?.is_empty() {
            return Ok(());
        }
        let seen = self.missing(desk).await;
        if let Some(missing) = &seen {
            let Membership { name, rank, .. } = self.member;
            tracing::warn!(group = name, rank, "waits to be connected: {missing}");
        }
        if self.watch.wait(desk, keys, desk.left_until(self.deadline)).await?.is_empty() {
            return Ok(());
        }
        let missing = match seen {
            Some(missing) => Some(missing),
            None if self.member.rank == 0 => self.missing(desk).await,
            // All ranks had come. The ranks that are missing now have waited for rank 0 without success, and
            // have given up.
            None => None,
        };
        Err(Failure::Connect(missing.unwrap_or_else(|| self.not_let_in())))
    }

    /// The error when all ranks have come, but rank 0 has not admitted this one.
    fn not_let_in(&self) -> String {
        let first = self.member.global.who(0);
        format!("{first} has not let this rank in; has it failed, or is it stopped?")
    }

    /// The ranks that have not come, and what they do instead.
    async fn missing<W: Outside>(&self, desk: &Desk<W>) -> Option<String> {
        let keys: Vec<String> =
            (0..self.member.world_size).map(|rank| self.ticket_key(rank)).collect();
        let missing = desk.wait(keys, Duration::ZERO).await.unwrap_or_default();
        let missing = missing.iter().filter_map(|key| key.rsplit('/').next()?.parse().ok());
        let missing = missing.take(RANKS_NAMED_MAX);
        let mut told: Vec<String> = Vec::new();
        for rank in missing {
            let rank: Rank = rank;
            let key = self.joining_key(rank);
            let elsewhere = match desk.check(&key).await {
                Ok(true) => desk.get(&key).await.ok(),
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

    /// The key that says for which group a rank waits. It has the rank's number in the job.
    fn joining_key(&self, rank: Rank) -> String {
        format!("drumline/joining/{}", self.member.global.of(rank))
    }
}
