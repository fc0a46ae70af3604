//! Messages that wait for a receive.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
};

use drumline_schedule::step::Rank;

use crate::backend::Arrived;

/// Messages that have come before a receive has asked for them, by sender and tag; and those to this rank itself.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    arrived: Mutex<BTreeMap<(Rank, u64), VecDeque<Arrived>>>,
    /// Held by a receive on a shared tag, so that messages that go to the inbox keep their order.
    pub(super) shared: Mutex<()>,
    /// How many long messages this rank has sent.
    pub(super) long: AtomicU64,
}

impl Inbox {
    pub(super) fn put(&self, tag: u64, arrived: Arrived) {
        self.lock().entry((arrived.from, tag)).or_default().push_back(arrived);
    }

    pub(super) fn take(&self, from: Option<Rank>, tag: u64) -> Option<Arrived> {
        let mut arrived = self.lock();
        let key = match from {
            Some(from) => (from, tag),
            None => arrived.keys().copied().find(|(_, its_tag)| *its_tag == tag)?,
        };
        let queue = arrived.get_mut(&key)?;
        let message = queue.pop_front();
        if queue.is_empty() {
            arrived.remove(&key);
        }
        message
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(Rank, u64), VecDeque<Arrived>>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Label;

    #[test]
    fn the_inbox_keeps_the_order_of_each_sender_and_tag() {
        let inbox = Inbox::default();
        let message =
            |from, byte| Arrived { from, label: Label([0; Label::BYTES]), bytes: vec![byte] };
        for (from, tag, byte) in [(1, 7, 1), (1, 8, 2), (1, 7, 3), (2, 7, 4)] {
            inbox.put(tag, message(from, byte));
        }
        let take = |from, tag| inbox.take(from, tag).map(|it| it.bytes[0]);
        assert_eq!(
            [take(Some(1), 7), take(Some(1), 7), take(Some(1), 7)],
            [Some(1), Some(3), None]
        );
        assert_eq!([take(None, 7), take(None, 7), take(None, 8)], [Some(4), None, Some(2)]);
    }
}
