//! How the ranks of a group meet in a store, as often as they like under one name.
//!
//! ```text
//! rank r                                   rank 0
//! ticket/r = a number of its own ────────▶ waits until all have come
//! waits for admitted/NUMBER ◀───────────── a name for this life of the group
//! takes its keys back
//!      ... and all go on on the board of this life ...
//! ```
//!
//! A ticket is good for one attempt, and a rank that gives up takes it back. Rank 0 writes the life
//! onto the ticket that it admits, in one step with looking at it. So no rank is admitted that has
//! gone. An attempt that failed leaves nothing behind and shifts nothing: ranks need not have tried
//! equally often to meet.

use std::time::{Duration, Instant};

use drumline_schedule::step::Rank;

use super::{
    board::{Board, RANKS_NAMED_MAX},
    failure::{Failure, told},
    steps::{Desk, Outside},
    store::record,
};
use crate::{membership::Membership, recorder::Recorder};

/// One rank's attempt to join.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// The rank.
    pub member: &'a Membership,
    /// A number that it has drawn. On rank 0 it becomes the name of the life.
    pub ticket: &'a str,
    /// When it gives up.
    pub deadline: Instant,
    /// After this time it warns of ranks that have not come.
    pub warn_after: Duration,
    /// Records its waits.
    pub recorder: &'a Recorder,
}

/// What a ticket says whose owner has given up.
const WITHDRAWN: &[u8] = b"withdrawn";

impl Attempt<'_> {
    /// Meets the other ranks of the group, which is told apart from others by its name.
    ///
    /// # Errors
    ///
    /// [`Failure::Connect`] names those that have not come before the deadline.
    pub async fn run<W: Outside>(&self, desk: &Desk<W>) -> Result<Board, Failure<W::Error>> {
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
        // Before this rank says anything on the board: when all have, no ticket is left over.
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
            // What no ticket says, so nothing is replaced: what it says, or this if it has gone.
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
            // The others never hear of this life.
            let board = self.board(self.ticket);
            board.fail_for(desk, gone, &told(self.member, problem)).await;
            return Err(Failure::Connect(problem.to_owned()));
        }
        Ok(self.ticket.to_owned())
    }

    fn board(&self, life: &str) -> Board {
        Board::new(self.member, life, self.deadline, self.recorder)
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
                    // Admitted at the last moment: the others count on this rank.
                    life if desk.check(admitted).await? => life,
                    // Rank 0 has written on this ticket, and stopped before it told the rank.
                    life => {
                        let problem = self.not_let_in();
                        let board = self.board(&String::from_utf8_lossy(&life));
                        board.fail(desk, &told(self.member, &problem)).await;
                        return Err(Failure::Connect(problem));
                    }
                }
            }
        };
        Ok(String::from_utf8_lossy(&life).into_owned())
    }

    /// Waits for `keys`. Says who is missing when that takes long, and when the time is over.
    async fn wait<W: Outside>(
        &self,
        desk: &Desk<W>,
        keys: &[String],
    ) -> Result<(), Failure<W::Error>> {
        let _open = record(self.recorder, keys);
        let left = desk.left_until(self.deadline);
        // Well before the end: others that wait in vain may give up at the same time as this rank.
        let patience = self.warn_after.min(left.mul_f64(0.75));
        if desk.wait(keys.to_vec(), patience).await?.is_empty() {
            return Ok(());
        }
        let seen = self.missing(desk).await;
        if let Some(missing) = &seen {
            let Membership { name, rank, .. } = self.member;
            tracing::warn!(group = name, rank, "waits to be connected: {missing}");
        }
        if desk.wait(keys.to_vec(), desk.left_until(self.deadline)).await?.is_empty() {
            return Ok(());
        }
        let missing = match seen {
            Some(missing) => Some(missing),
            None if self.member.rank == 0 => self.missing(desk).await,
            // All had come. Those that are missing now have waited for rank 0 in vain, too, and given up.
            None => None,
        };
        Err(Failure::Connect(missing.unwrap_or_else(|| self.not_let_in())))
    }

    /// What is wrong when all have come.
    fn not_let_in(&self) -> String {
        let first = self.member.global.who(0);
        format!("{first} has not let this rank in; has it failed, or is it stopped?")
    }

    /// Who has not come, and what they do instead.
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

    /// Which group a rank of the job is waiting for, whatever its number there.
    fn joining_key(&self, rank: Rank) -> String {
        format!("drumline/joining/{}", self.member.global.of(rank))
    }
}
