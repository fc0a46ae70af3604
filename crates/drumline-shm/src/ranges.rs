//! Sets of byte offsets, as ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of numbers, as disjoint ranges that do not touch each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(BTreeMap<usize, usize>); // from start to end

impl Ranges {
    /// Takes the first `len` consecutive numbers out of the set.
    pub(crate) fn take(&mut self, len: usize) -> Option<Range<usize>> {
        let (&start, &end) = self.0.iter().find(|(start, end)| *end - *start >= len)?;
        self.0.remove(&start);
        self.insert(start + len..end);
        Some(start..start + len)
    }

    /// Adds `range`, and joins it with the ranges that it overlaps or touches.
    pub(crate) fn insert(&mut self, range: Range<usize>) {
        let Range { mut start, mut end } = range;
        if start >= end {
            return;
        }
        // These ranges begin at `end` at the latest. The last one comes first.
        while let Some((&other_start, &other_end)) = self.0.range(..=end).next_back()
            && other_end >= start
        {
            self.0.remove(&other_start);
            start = start.min(other_start);
            end = end.max(other_end);
        }
        self.0.insert(start, end);
    }

    /// The parts of `range` that are in the set, in order.
    pub(crate) fn within(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        self.0
            .range(..range.end)
            .rev()
            .take_while(|(_, end)| **end > range.start)
            .map(|(start, end)| (*start).max(range.start)..(*end).min(range.end))
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect()
    }

    /// The parts of `range` that are not in the set, in order.
    pub(crate) fn gaps(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let mut at = range.start;
        let mut gaps = Vec::new();
        for part in self.within(range) {
            gaps.push(at..part.start);
            at = part.end;
        }
        gaps.push(at..range.end);
        gaps.retain(|gap| !gap.is_empty());
        gaps
    }

    /// The size of the set, and the length of its longest range.
    pub(crate) fn total_and_longest(&self) -> (usize, usize) {
        self.0.iter().fold((0, 0), |(total, longest), (start, end)| {
            (total + (end - start), longest.max(end - start))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const SIZE: usize = 64;

    /// The numbers of the set, one by one.
    fn numbers(ranges: &Ranges) -> BTreeSet<usize> {
        ranges.0.iter().flat_map(|(start, end)| *start..*end).collect()
    }

    fn assert_normal(ranges: &Ranges) {
        let list: Vec<_> = ranges.0.iter().collect();
        assert!(list.iter().all(|(start, end)| start < end), "empty range in {ranges:?}");
        assert!(list.windows(2).all(|two| two[0].1 < two[1].0), "ranges touch in {ranges:?}");
    }

    fn range() -> impl Strategy<Value = Range<usize>> {
        (0..SIZE, 0..SIZE / 4).prop_map(|(start, len)| start..SIZE.min(start + len))
    }

    proptest! {
        #[test]
        fn inserting_is_the_union(list in prop::collection::vec(range(), 0..20)) {
            let (mut ranges, mut model) = (Ranges::default(), BTreeSet::new());
            for range in list {
                ranges.insert(range.clone());
                model.extend(range);
                assert_normal(&ranges);
                prop_assert_eq!(&numbers(&ranges), &model);
            }
        }

        #[test]
        fn parts_and_gaps_make_up_a_range(
            list in prop::collection::vec(range(), 0..8),
            window in range(),
        ) {
            let mut ranges = Ranges::default();
            list.into_iter().for_each(|range| ranges.insert(range));
            let model = numbers(&ranges);
            let inside: Vec<_> = ranges.within(&window).into_iter().flatten().collect();
            let outside: Vec<_> = ranges.gaps(&window).into_iter().flatten().collect();
            let expected: (Vec<_>, Vec<_>) = window.partition(|number| model.contains(number));
            prop_assert_eq!((inside, outside), expected);
        }

        /// Uses the set as an allocator: no range is taken twice, and none is lost.
        #[test]
        fn taken_ranges_never_overlap_and_coalesce_when_given_back(
            script in prop::collection::vec(
                (any::<bool>(), 1..SIZE / 3, any::<prop::sample::Index>()),
                0..60,
            ),
        ) {
            let mut free = Ranges::default();
            free.insert(0..SIZE);
            let mut taken: Vec<Range<usize>> = Vec::new();
            for (give_back, len, which) in script {
                if give_back && !taken.is_empty() {
                    free.insert(taken.swap_remove(which.index(taken.len())));
                } else if let Some(range) = free.take(len) {
                    prop_assert_eq!(range.len(), len);
                    taken.push(range);
                } else {
                    prop_assert!(free.total_and_longest().1 < len);
                }
                assert_normal(&free);
                let mut all: Vec<usize> = taken.iter().cloned().flatten().collect();
                all.extend(numbers(&free));
                all.sort_unstable();
                prop_assert_eq!(all, (0..SIZE).collect::<Vec<_>>());
            }
            taken.into_iter().for_each(|range| free.insert(range));
            prop_assert_eq!(free.take(SIZE), Some(0..SIZE));
        }
    }
}
