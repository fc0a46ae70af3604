//! The same collective on all of its ranks.

use std::collections::{HashMap, VecDeque};

use drumline_schedule::step::Rank;

use super::read::{Event, Run};

/// A collective of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) rank: Rank,
    pub(super) track: u64,
    pub(super) start_ns: i64,
    pub(super) end_ns: i64,
}

/// Which collective it is: its group's digest and its number.
type Key = (String, u64);

/// Brings together what the ranks of a group did for one call.
#[derive(Debug, Default)]
pub(super) struct Join {
    waiting: HashMap<Key, Vec<Arrival>>,
    /// The keys of `waiting`, oldest first, and some that are not there any more.
    order: VecDeque<Key>,
}

/// How many collectives may lack ranks at a time. Ranks that are alive are hardly ever more than
/// two apart; those of a rank that has died, or whose file is full, are given up here.
const WAITING_MAX: usize = 1 << 14;

impl Join {
    /// Takes in an event of a rank. When it is the last one of a collective, all of them come
    /// back, in the order in which they began.
    pub(super) fn add(&mut self, run: &Run, event: &Event) -> Option<Vec<Arrival>> {
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
