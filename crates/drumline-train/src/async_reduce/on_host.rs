//! Buckets that lie in one buffer of the host.

use std::{ops::Range, sync::Arc, time::Instant};

use drumline_engine::recorder::{Category, What};
use drumline_group::driving;

use super::{
    background::{Background, Held},
    layout::{Layout, reduce},
    pieces::{Piece, Pieces},
};

/// The parts of the fused buffer that the caller may not touch.
#[derive(Debug, Default)]
pub(super) struct OnHost {
    /// The buckets that are complete here and not being reduced.
    pub(super) complete: Pieces,
    /// The buckets that are reduced.
    pub(super) reduced: Pieces,
}

impl Held for OnHost {
    type Run = Piece;

    fn take(&mut self, layout: &Layout, run: &Range<usize>) -> Piece {
        match self.complete.take(layout.place_of(run)) {
            Some(piece) => piece,
            None => unreachable!("what is complete on all ranks is complete here"),
        }
    }

    fn reduce(background: &Arc<Background<OnHost>>, run: Range<usize>, piece: Piece) {
        let layout = &background.layout;
        let last = &layout.buckets[run.end - 1];
        let start = layout.place_of(&run).start;
        let bytes = last.end - start;
        let open = driving::recorder(&background.group).begin(|| What {
            category: Category::Bucket,
            name: "bucket",
            bucket: Some(run.start),
            bytes: Some(bytes as u64),
            ..What::default()
        });
        let this = background.clone();
        let end = Box::new(move |result, piece| {
            open.end_at(Instant::now());
            this.on_reduced(result, |held| held.reduced.put(start, piece));
        });
        reduce(&background.group, (piece, bytes), (last.dtype, background.op), end);
    }
}
