//! Which elements a schedule's symbolic places stand for.

use std::ops::Range;

use drumline_schedule::{
    Collective,
    step::{Buffer, Loc},
};

/// The lengths of one call's buffers, and the window of them that is worked on.
///
/// Staging slots are small, so a long operation through shared memory is done piece by piece: the
/// schedule runs once for every window. Where a buffer is made of one block for each rank
/// (the output of all-gather, the input of reduce-scatter), a window is a window of every block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    collective: Collective,
    world_size: usize,
    /// Elements of one block: what one rank contributes to all-gather, or gets from
    /// reduce-scatter, or the whole buffer of everything else.
    block: usize,
    /// The elements of each block that are worked on now.
    window: Range<usize>,
    /// The longest window.
    piece: usize,
}

impl Layout {
    /// Every rank contributes (or, in reduce-scatter, gets) `elements`; a staging slot has room
    /// for `slot` of them. `None` is for operations that stage nothing.
    pub(crate) fn new(
        collective: Collective,
        world_size: usize,
        elements: usize,
        slot: Option<usize>,
    ) -> Layout {
        let mut layout =
            Layout { collective, world_size, block: elements, window: 0..0, piece: elements };
        if let Some(slot) = slot {
            let room = slot / layout.blocks_of(Buffer::Slot);
            layout.piece = elements.min(room.max(1));
        }
        layout.window = 0..layout.piece;
        layout
    }

    /// Goes on to the next window, if there is one.
    pub(crate) fn advance(&mut self) -> bool {
        let start = self.window.end;
        let more = start < self.block;
        if more {
            self.window = start..self.block.min(start + self.piece);
        }
        more
    }

    /// The same with its last window, which may be shorter than the others.
    pub(crate) fn last(&self) -> Layout {
        let start = self.block.saturating_sub(1) / self.piece.max(1) * self.piece;
        Layout { window: start..self.block, ..self.clone() }
    }

    /// How many blocks, one for each rank, a buffer is made of.
    fn blocks_of(&self, buffer: Buffer) -> usize {
        let many = matches!(
            (self.collective, buffer),
            (Collective::AllGather, Buffer::Data | Buffer::Scratch(_) | Buffer::Slot)
                | (Collective::ReduceScatter, Buffer::Input | Buffer::Slot)
        );
        if many { self.world_size } else { 1 }
    }

    /// Elements in `buffer` as far as the window shows it.
    fn shown(&self, buffer: Buffer) -> usize {
        self.blocks_of(buffer) * self.window.len()
    }

    /// The elements of its buffer that `loc` stands for. Scratch and slots hold one window.
    pub(crate) fn resolve(&self, loc: Loc) -> Range<usize> {
        let shown = loc.span.resolve(self.shown(loc.buffer));
        match loc.buffer {
            Buffer::Scratch(_) | Buffer::Slot => shown,
            Buffer::Data | Buffer::Input if self.window.len() == self.block => shown,
            Buffer::Data | Buffer::Input => {
                // Staged algorithms name whole blocks, or lie in a buffer of one block.
                let block = shown.start.checked_div(self.window.len()).unwrap_or(0);
                let block = if self.blocks_of(loc.buffer) == 1 { 0 } else { block };
                let moved = block * (self.block - self.window.len()) + self.window.start;
                shown.start + moved..shown.end + moved
            }
        }
    }

    /// How many elements `loc` stands for.
    pub(crate) fn len(&self, loc: Loc) -> usize {
        loc.span.resolve(self.shown(loc.buffer)).len()
    }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::step::Span;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The windows of a block tile what the block is as a whole.
        #[test]
        fn pieces_tile_the_buffers(
            world_size in 1_usize..6, elements in 0_usize..200, slot in 1_usize..64,
            gathers: bool,
        ) {
            let collective = if gathers { Collective::AllGather } else { Collective::AllReduce };
            let whole = Layout::new(collective, world_size, elements, None);
            let blocks = if gathers { world_size } else { 1 };
            for block in 0..blocks {
                let loc = Loc::data(Span::block(block, blocks));
                let mut layout = Layout::new(collective, world_size, elements, Some(slot));
                let mut seen = Vec::new();
                loop {
                    let fits = layout.len(Loc::slot(Span::WHOLE)) <= slot.max(blocks);
                    prop_assert!(fits, "a piece is longer than the slot");
                    prop_assert_eq!(layout.resolve(loc).len(), layout.len(loc));
                    seen.extend(layout.resolve(loc));
                    if !layout.advance() {
                        break;
                    }
                }
                prop_assert_eq!(seen, whole.resolve(loc).collect::<Vec<_>>());
            }
        }
    }
}
