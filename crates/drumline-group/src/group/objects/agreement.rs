//! Before objects travel, the ranks tell each other which function they call, with which type, and how long
//! their objects are. So a mistake of one rank is an error on all ranks, and the group can go on.

use drumline_schedule::step::Rank;

use super::{call::Call, description::type_digest};
use crate::{ProcessGroup, Result};

impl ProcessGroup {
    /// Compares the calls of all ranks and their types `T`. Returns the lengths of the descriptions, which
    /// are within the limits of all ranks.
    pub(super) fn agree<T>(&self, call: Call, own: &Result<Vec<u8>, String>) -> Result<Vec<usize>> {
        self.agree_on_length::<T>(call, &own.as_ref().map(Vec::len).map_err(String::clone))
    }

    /// The same for a description of `length` bytes.
    pub(super) fn agree_on_length<T>(
        &self,
        call: Call,
        own: &Result<usize, String>,
    ) -> Result<Vec<usize>> {
        let length = own.as_ref().map_or(FAILED, |bytes| *bytes as u64);
        let (limit, kind) = (self.object_bytes_max() as u64, type_digest::<T>());
        let ours = [call.code(), call.root as u64, kind, length, limit];
        let mut all = vec![0; ours.len() * self.world_size()];
        self.all_gather(&ours, &mut all)?;
        if let Err(problem) = own {
            return Err(call.error(self.rank(), problem.clone()));
        }
        let all: Vec<[u64; 5]> = all.as_chunks().0.to_vec();
        for (rank, theirs) in all.iter().enumerate() {
            if theirs[..2] != ours[..2] {
                let theirs = Call::named(theirs[0], theirs[1]);
                let problem = format!("called {theirs} where this rank called {call}");
                return Err(call.error(rank, problem));
            }
            if theirs[2] != kind {
                let ours = std::any::type_name::<T>();
                let problem = format!(
                    "called it with another type than the {ours} of this rank; all ranks must use \
                     one"
                );
                return Err(call.error(rank, problem));
            }
        }
        let limit = all.iter().map(|it| it[4]).min().unwrap_or_default() as usize;
        for (rank, theirs) in all.iter().enumerate() {
            check_length(call, rank, theirs[3], limit)?;
        }
        Ok(all.into_iter().map(|it| it[3] as usize).collect())
    }

    /// [`Config::object_bytes_max`](crate::Config::object_bytes_max).
    pub(super) fn object_bytes_max(&self) -> usize {
        self.inner.config.object_bytes_max
    }
}

/// Sent in place of a length when the object could not be described.
const FAILED: u64 = u64::MAX;

/// Checks that an object of rank `rank` may travel.
pub(super) fn check_length(call: Call, rank: Rank, length: u64, limit: usize) -> Result<()> {
    if length == FAILED {
        let problem = "could not describe its object; its own error says why";
        return Err(call.error(rank, problem.to_owned()));
    }
    if length <= limit as u64 {
        return Ok(());
    }
    Err(call.error(
        rank,
        format!(
            "passes an object of {length} bytes, and at most {limit} are allowed \
             (DRUMLINE_OBJECT_BYTES_MAX, the least of all ranks); tensors travel better in the \
             collectives for elements"
        ),
    ))
}
