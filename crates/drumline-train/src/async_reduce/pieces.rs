//! The parts of the fused buffer that one owner has now.

use std::{collections::BTreeMap, ops::Range};

use drumline_shm::Registered;

/// A part of the fused buffer, in whole pages. It has one owner.
pub(super) type Piece = Registered<u8>;

/// Parts of the fused buffer, by their first byte. Adjacent parts are joined.
#[derive(Debug, Default)]
pub(super) struct Pieces(BTreeMap<usize, Piece>);

impl Pieces {
    /// Adds the piece that begins at byte `start`.
    pub(super) fn put(&mut self, start: usize, mut piece: Piece) {
        let end = start + piece.len();
        if let Some(next) = self.0.remove(&end)
            && let Err(apart) = piece.append(next)
        {
            self.0.insert(end, apart);
        }
        let before = self.0.range_mut(..start).next_back();
        let piece = match before {
            Some((&first, before)) if first + before.len() == start => before.append(piece).err(),
            _ => Some(piece),
        };
        if let Some(piece) = piece {
            self.0.insert(start, piece);
        }
    }

    /// Adds all pieces of `others`.
    pub(super) fn put_all(&mut self, others: &mut Pieces) {
        std::mem::take(&mut others.0).into_iter().for_each(|(start, piece)| self.put(start, piece));
    }

    /// Takes the bytes `range` out, if they are all here. `range` is whole pages.
    pub(super) fn take(&mut self, range: Range<usize>) -> Option<Piece> {
        let (&start, whole) = self.0.range(..=range.start).next_back()?;
        if start + whole.len() < range.end {
            return None;
        }
        let mut before = self.0.remove(&start)?;
        let wanted = before.split_off(range.start - start);
        if !before.is_empty() {
            self.0.insert(start, before);
        }
        let mut wanted = wanted?;
        if let Some(behind) = wanted.split_off(range.len())
            && !behind.is_empty()
        {
            self.0.insert(range.end, behind);
        }
        Some(wanted)
    }

    /// The bytes `range`, if they are all here.
    pub(super) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        let (start, piece) = self.0.range(..=range.start).next_back()?;
        piece.get(range.start - start..range.end - start)
    }

    /// The bytes `range`, if they are all here.
    pub(super) fn get_mut(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        let (start, piece) = self.0.range_mut(..=range.start).next_back()?;
        piece.get_mut(range.start - start..range.end - start)
    }
}

#[cfg(test)]
mod tests {
    use drumline_shm::{Segment, SegmentSize};
    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = 64 << 10;
    const PAGES: usize = 6;

    proptest! {
        /// Compared with a list of the owner of each page.
        #[test]
        fn each_byte_is_in_one_place(moves in prop::collection::vec((0..PAGES, 1..PAGES), 1..40)) {
            let size = SegmentSize { slot_bytes: 1, arena_bytes: PAGES * PAGE };
            let segment = Segment::create(size).unwrap();
            let (mut here, mut away) = (Pieces::default(), Pieces::default());
            let mut whole = segment.arena().allocate::<u8>(PAGES * PAGE).unwrap();
            let address = whole.as_ptr();
            (0..PAGES).for_each(|page| whole[page * PAGE] = page as u8);
            here.put(0, whole);
            let mut is_here = [true; PAGES];
            for (first, pages) in moves {
                let pages = first..PAGES.min(first + pages);
                let bytes = pages.start * PAGE..pages.end * PAGE;
                if is_here[pages.clone()].iter().all(|here| *here) {
                    away.put(bytes.start, here.take(bytes.clone()).unwrap());
                    is_here[pages].fill(false);
                } else if is_here[pages.clone()].iter().all(|here| !here) {
                    here.put(bytes.start, away.take(bytes.clone()).unwrap());
                    is_here[pages].fill(true);
                } else {
                    prop_assert!(here.take(bytes.clone()).is_none());
                    prop_assert!(away.take(bytes).is_none());
                }
                for (page, &is_here) in is_here.iter().enumerate() {
                    let bytes = page * PAGE..(page + 1) * PAGE;
                    let found = (here.get(bytes.clone()), away.get_mut(bytes));
                    prop_assert_eq!(found.0.is_some(), is_here);
                    prop_assert_eq!(found.1.is_some(), !is_here);
                    let byte = found.0.map(|it| it[0]).or(found.1.map(|it| it[0]));
                    prop_assert_eq!(byte, Some(page as u8));
                }
            }
            here.put_all(&mut away);
            prop_assert_eq!(here.get(0..PAGES * PAGE).unwrap().as_ptr(), address);
        }
    }
}
