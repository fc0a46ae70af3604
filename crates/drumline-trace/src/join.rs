//! Brings the records of one collective together from all of its ranks.

use std::collections::{HashMap, VecDeque};

use drumline_schedule::step::Rank;

use crate::read::{Event, Run};

/// The record of a collective on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    pub(crate) rank: Rank,
    pub(crate) track: u64,
    pub(crate) start_ns: i64,
    pub(crate) end_ns: i64,
}

/// Identifies a collective: the digest of its group and its number.
type Key = (String, u64);

/// Collects the records of each collective from all ranks.
#[derive(Debug, Default)]
pub(crate) struct Join {
    waiting: HashMap<Key, Vec<Arrival>>,
    /// The keys of `waiting`, oldest first. Some may have been removed from `waiting` already.
    order: VecDeque<Key>,
}

/// The most collectives that may lack records at a time. Living ranks are hardly ever more than two
/// collectives apart. Collectives that a dead rank, or a rank with a full file, did not record are dropped
/// here.
const WAITING_MAX: usize = 1 << 14;

impl Join {
    /// Takes in an event of a rank. If it completes a collective, returns the records of all ranks, in the
    /// order in which they began.
    pub(crate) fn add(&mut self, run: &Run, event: &Event) -> Option<Vec<Arrival>> {
        if event.text("cat") != "collective" {
            return None;
        }
        let track = event.number("tid")?;
        let file = run.files.binary_search_by_key(&event.rank, |file| file.rank).ok()?;
        let group = run.files[file].groups.get(&track)?;
        let key = (group.digest.clone(), event.argument("sequence")?.as_u64()?);
        let (start_ns, end_ns) = (event.start_ns?, event.end_ns());
        let arrival = Arrival { rank: event.rank, track, start_ns, end_ns };
        let arrivals = self.waiting.entry(key.clone()).or_default();
        arrivals.push(arrival);
        if arrivals.len() == 1 && group.world_size > 1 {
            self.order.push_back(key.clone());
            if self.order.len() > WAITING_MAX {
                let oldest = self.order.pop_front()?;
                self.waiting.remove(&oldest);
            }
        } else if arrivals.len() >= group.world_size {
            let mut arrivals = self.waiting.remove(&key)?;
            arrivals.sort_by_key(|it| (it.start_ns, it.rank));
            return Some(arrivals);
        }
        None
    }
}
