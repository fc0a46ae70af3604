//! Queues of sends, receives and offers, by tag.

use std::collections::{HashMap, VecDeque};

use super::point::Point;

/// Queues by tag. A tag without entries takes no memory.
#[derive(Debug)]
pub(crate) struct ByTag<V> {
    queues: HashMap<u64, VecDeque<V>>,
    len: usize,
}

impl<V> Default for ByTag<V> {
    fn default() -> ByTag<V> {
        ByTag { queues: HashMap::new(), len: 0 }
    }
}

impl<V> ByTag<V> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn first(&self, tag: u64) -> Option<&V> {
        self.queues.get(&tag)?.front()
    }

    pub(crate) fn push(&mut self, tag: u64, value: V) {
        self.queues.entry(tag).or_default().push_back(value);
        self.len += 1;
    }

    pub(crate) fn pop(&mut self, tag: u64) -> Option<V> {
        let queue = self.queues.get_mut(&tag)?;
        let value = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&tag);
        }
        self.len -= usize::from(value.is_some());
        value
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.queues.values_mut().flatten()
    }

    pub(crate) fn into_values(self) -> impl Iterator<Item = V> {
        self.queues.into_values().flatten()
    }
}

/// Takes the oldest receive with this tag: from a given rank (`named`) or from any rank.
pub(crate) fn pop_first(
    named: &mut ByTag<Point>,
    any: &mut ByTag<Point>,
    tag: u64,
) -> Option<Point> {
    match (named.first(tag), any.first(tag)) {
        (Some(named), Some(first)) if named.number < first.number => {}
        (_, Some(_)) => return any.pop(tag),
        _ => {}
    }
    named.pop(tag)
}
