//! The plans of calls that a group has made.

use std::sync::Arc;

use drumline_schedule::step::Rank;

use crate::{call::Call, executor::Plan};

/// A small table of plans. Training makes the same few calls again and again. If two of them fall into one
/// place, the later one is kept.
#[derive(Debug)]
pub(crate) struct Plans {
    kept: Vec<Option<Kept>>,
    /// The place of the last call.
    last: usize,
}

#[derive(Debug)]
struct Kept {
    call: Call,
    registered: bool,
    plan: Arc<Plan>,
}

/// The number of places, a power of two.
const PLACES: usize = 64;

impl Plans {
    pub(crate) fn new() -> Plans {
        Plans { kept: (0..PLACES).map(|_| None).collect(), last: 0 }
    }

    /// The place of the plan of a call like this one, if there is a plan. `registered`: the call's buffer is
    /// registered.
    pub(crate) fn find(&mut self, call: &Call, registered: bool) -> Option<Index> {
        if !self.is_at(self.last, call, registered) {
            let place = place_of(call);
            if !self.is_at(place, call, registered) {
                return None;
            }
            self.last = place;
        }
        Some(Index(self.last))
    }

    #[inline]
    fn is_at(&self, place: usize, call: &Call, registered: bool) -> bool {
        self.kept[place]
            .as_ref()
            .is_some_and(|it| it.registered == registered && it.call.is_like(call))
    }

    pub(crate) fn keep(&mut self, call: Call, registered: bool, plan: Plan) -> Index {
        self.last = place_of(&call);
        self.kept[self.last] = Some(Kept { call, registered, plan: Arc::new(plan) });
        Index(self.last)
    }

    /// The plan at a place that was just found or filled.
    pub(crate) fn at(&self, Index(place): Index) -> &Arc<Plan> {
        let Some(kept) = &self.kept[place] else {
            unreachable!("what was kept is replaced and not removed");
        };
        &kept.plan
    }
}

/// A place in the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Index(usize);

/// The place in the table for a call's plan. It depends on only some properties of the call. Calls that
/// differ only in other properties share a place, and replace each other's plans.
fn place_of(call: &Call) -> usize {
    let root: Rank = call.root.unwrap_or(0);
    let parts = [call.collective as usize, call.dtype as usize, call.counts.longest(), root];
    let mix = |hash: usize, part: usize| (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // The high bits depend on all properties that were mixed in.
    parts.into_iter().fold(0, mix) >> (usize::BITS - PLACES.ilog2())
}
