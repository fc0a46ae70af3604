//! How a rank joins the job whose store it has found: it claims its rank there.

use std::time::{Duration, Instant};

use drumline_schedule::step::Rank;

use super::{
    failure::Failure,
    steps::{Answer, Ask, Desk, Outside},
    watch::{Processes, Watch},
};
use crate::{
    deadline,
    membership::{GlobalRanks, Membership},
};

/// A rank that joins a job.
#[derive(Clone, Copy, Debug)]
pub struct Joining {
    /// The rank.
    pub rank: Rank,
    /// How many ranks the job has.
    pub world_size: usize,
    /// Whether rank 0 hosts the store. Otherwise a launcher does: its store may have seen this rank before,
    /// in an earlier attempt of the job, and nobody claims anything.
    pub rank_zero_hosts: bool,
    /// How long it tries.
    pub timeout: Duration,
    /// A random number that this process writes as the owner of its rank. If the connection breaks before the
    /// store has answered, it recognises its own claim by this number.
    pub ticket: [u8; 32],
}

/// The result of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    /// No other process has the rank.
    Mine,
    /// Another process of this job has it.
    Taken,
    /// The job at this store has another number of ranks. Either it is an earlier job, or one of the two
    /// processes is wrong.
    OtherSize,
    /// All ranks have joined. Either the job is an earlier one, or this process is one too many.
    Complete {
        /// Whether no process holds this rank, or none does any more.
        without_us: bool,
    },
}

/// How long the ranks of an earlier job may take to leave. After that time a rank that is taken means that
/// two processes have one rank.
const HOST_LEAVES_MAX: Duration = Duration::from_secs(10);

const JOIN_PAUSE: Duration = Duration::from_millis(20);

/// How long a host may take to write the number of ranks. A host that runs torch never writes it.
const WORLD_SIZE_COMES_MAX: Duration = Duration::from_secs(1);

impl Joining {
    /// Joins the job, and waits for its other ranks if this one hosts the store.
    ///
    /// # Errors
    ///
    /// [`Failure::Connect`] if the job is another one, or has a process of this rank already.
    pub async fn run<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        let deadline = deadline::after(desk.now(), self.timeout);
        self.join(desk).await?;
        // Others may wait in their first group already.
        let member = Membership::new(WORLD, (self.rank, self.world_size), GlobalRanks::default());
        let keys = (0..self.world_size).map(|rank| process_key(WORLD, rank)).collect();
        let watch = Watch::new(&member, Processes { keys, join: true, stay: false });
        if self.rank_zero_hosts {
            watch.begin(desk).await?;
        }
        match self.assemble(desk, &watch, deadline).await {
            Ok(()) => watch.rest(desk).await,
            Err(failure) => {
                watch.end(desk, None).await;
                return Err(failure);
            }
        }
        if self.hosts() {
            desk.set(COMPLETE, b"").await?;
        }
        Ok(())
    }

    async fn assemble<W: Outside>(
        &self,
        desk: &Desk<W>,
        watch: &Watch,
        deadline: Instant,
    ) -> Result<(), Failure<W::Error>> {
        let mut first = true;
        loop {
            let left = desk.left_until(deadline);
            let (limit, last) = (left.min(watch.every()), left <= watch.every());
            let Answer::Missing(_) = desk.ask(Ask::Assemble { limit, first, last }).await? else {
                return Ok(());
            };
            watch.look(desk).await?;
            first = false;
        }
    }

    fn hosts(&self) -> bool {
        self.rank_zero_hosts && self.rank == 0
    }

    /// Finds the store of this job. The store of an earlier job may still be at the same address, while its
    /// host is about to leave.
    async fn join<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        let start = desk.now();
        let deadline: Instant = deadline::after(start, self.timeout);
        loop {
            desk.ask(Ask::Open(desk.left_until(deadline))).await?;
            if !self.rank_zero_hosts {
                return Ok(());
            }
            let claim = self.claim(desk).await;
            let now = desk.now();
            match claim {
                Ok(Claim::Mine) => return Ok(()),
                Ok(Claim::Taken) => return Err(Failure::Connect(TAKEN.to_owned())),
                Ok(Claim::Complete { without_us: false })
                    if now.saturating_duration_since(start) >= HOST_LEAVES_MAX =>
                {
                    return Err(Failure::Connect(TAKEN.to_owned()));
                }
                Err(error) if self.hosts() || now >= deadline => return Err(error.into()),
                Ok(Claim::Complete { .. } | Claim::OtherSize) if now >= deadline => {
                    return Err(Failure::Connect(OTHER_JOB.to_owned()));
                }
                // A host leaves once no process is connected. So this process disconnects for a moment.
                Ok(Claim::Complete { .. } | Claim::OtherSize) | Err(_) => {
                    desk.ask(Ask::Leave(JOIN_PAUSE.min(desk.left_until(deadline)))).await?;
                }
            }
        }
    }

    /// Claims this rank. Without a claim, two processes with one rank would overwrite each other's keys and
    /// hang much later.
    async fn claim<W: Outside>(&self, desk: &Desk<W>) -> Result<Claim, W::Error> {
        let key = rank_key(self.rank);
        let size = self.world_size.to_string().into_bytes();
        if self.hosts() {
            desk.set(WORLD_SIZE, &size).await?;
        } else {
            // The host may leave during the wait. A new host at this address would then not know the number
            // of ranks.
            let missing = desk.wait(vec![WORLD_SIZE.to_owned()], WORLD_SIZE_COMES_MAX).await?;
            if missing.is_empty() && desk.get(WORLD_SIZE).await? != size {
                return Ok(Claim::OtherSize);
            }
        }
        if desk.check(COMPLETE).await? {
            return Ok(Claim::Complete { without_us: !desk.check(&key).await? });
        }
        let owner = desk.compare_set(&key, b"", &self.ticket).await?;
        Ok(if owner == self.ticket { Claim::Mine } else { Claim::Taken })
    }
}

/// Proposes a secret for the job. Returns the secret that was proposed first.
///
/// # Errors
///
/// The error of the store.
pub async fn agree_on_secret<W: Outside>(
    desk: &Desk<W>,
    proposal: &[u8],
) -> Result<Vec<u8>, W::Error> {
    desk.compare_set(SECRET, b"", proposal).await
}

const TAKEN: &str = "another process has joined with this rank: give each its own RANK, and \
                     another MASTER_PORT to a job that runs beside this one";

const OTHER_JOB: &str = "the job at this place has all its ranks, or another number of ranks than \
                         this process was told; is WORLD_SIZE the same everywhere, and has an \
                         earlier job ended on rank 0?";

/// The key of the number of ranks that the host expects.
const WORLD_SIZE: &str = "drumline/world_size";

/// The key that says that all ranks have joined.
pub const COMPLETE: &str = "drumline/complete";

/// The prefix of the keys under which ranks leave their tickets.
pub const RANK_KEYS: &str = "drumline/rank/";

/// The key of the secret on which the ranks have agreed, if none of them was given one.
const SECRET: &str = "drumline/secret";

/// The group of all ranks of a job.
pub const WORLD: &str = "world";

/// The key under which a process says that it is rank `rank` of a job whose group of all ranks is `root`.
pub fn process_key(root: &str, rank: Rank) -> String {
    format!("drumline/{root}/process/{rank}")
}

/// The key under which a rank leaves its ticket.
pub fn rank_key(rank: Rank) -> String {
    format!("{RANK_KEYS}{rank}")
}
