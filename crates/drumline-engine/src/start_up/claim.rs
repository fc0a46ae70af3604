//! How a rank joins the job whose store it has found: it claims its number there.

use std::time::{Duration, Instant};

use drumline_schedule::step::Rank;

use super::{
    failure::Failure,
    steps::{Ask, Desk, Outside},
};
use crate::deadline;

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
    /// A random number of this process's. It leaves this as its name: so it knows its own claim again if the
    /// connection breaks before the store has answered.
    pub ticket: [u8; 32],
}

/// What comes of asking for a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    /// Nobody else has it.
    Mine,
    /// Another process of this job has it.
    Taken,
    /// The job here has another number of ranks: it is an earlier one, or one of the two is wrong.
    OtherSize,
    /// All ranks have joined. Either the job is an earlier one, or this process is one too many.
    Complete {
        /// Whether nobody, or nobody any more, has this rank.
        without_us: bool,
    },
}

/// How long the ranks of an earlier job may take to leave, until a rank that is taken counts as
/// taken twice.
const HOST_LEAVES_MAX: Duration = Duration::from_secs(10);

const JOIN_PAUSE: Duration = Duration::from_millis(20);

/// How long a host may take to say how many ranks there are. One that runs torch never does.
const WORLD_SIZE_COMES_MAX: Duration = Duration::from_secs(1);

impl Joining {
    /// Joins the job, and waits for its other ranks if this one hosts the store.
    ///
    /// # Errors
    ///
    /// [`Failure::Connect`] if the job is another one, or has a process of this rank already.
    pub async fn run<W: Outside>(&self, desk: &Desk<W>) -> Result<(), Failure<W::Error>> {
        let start = desk.now();
        self.join(desk).await?;
        let limit = self.timeout.saturating_sub(desk.now().saturating_duration_since(start));
        desk.ask(Ask::Assemble(limit)).await?;
        if self.hosts() {
            desk.set(COMPLETE, b"").await?;
        }
        Ok(())
    }

    fn hosts(&self) -> bool {
        self.rank_zero_hosts && self.rank == 0
    }

    /// Finds the store of this job. At the same place there may still be that of the job before,
    /// whose host is just about to leave.
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
                // A host that leaves waits for a moment in which nobody is connected.
                Ok(Claim::Complete { .. } | Claim::OtherSize) | Err(_) => {
                    desk.ask(Ask::Leave(JOIN_PAUSE.min(desk.left_until(deadline)))).await?;
                }
            }
        }
    }

    /// Two processes with one rank would overwrite each other's keys and hang much later.
    async fn claim<W: Outside>(&self, desk: &Desk<W>) -> Result<Claim, W::Error> {
        let key = rank_key(self.rank);
        let size = self.world_size.to_string().into_bytes();
        if self.hosts() {
            desk.set(WORLD_SIZE, &size).await?;
        } else {
            // The host may leave meanwhile. The next host there has not been asked for its size.
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

/// Proposes a secret, and returns the one that was proposed first.
///
/// # Errors
///
/// What the store says.
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

/// How many ranks the host has been told of.
const WORLD_SIZE: &str = "drumline/world_size";

/// Says that all ranks have joined.
pub const COMPLETE: &str = "drumline/complete";

/// Where each rank of ours leaves its name.
pub const RANK_KEYS: &str = "drumline/rank/";

/// Where the ranks leave the secret that they have agreed on, if nobody gave them one.
const SECRET: &str = "drumline/secret";

/// Where a rank leaves its name.
pub fn rank_key(rank: Rank) -> String {
    format!("{RANK_KEYS}{rank}")
}
