//! Collectives in forms that only serve torch's spelling.
//!
//! A form ending in `_list` takes a buffer for every rank; one in `_coalesced` takes the buffers of several
//! calls; in one in `_multi`, a rank has several members. Each form copies the data and makes one call. A
//! program that is not translated from torch keeps its data in one buffer and needs none of these forms.

mod coalesced;
mod lists;
mod members;
mod multi;

use drumline_engine::call::Call;

use super::{super::ProcessGroup, call, call_of, usable};
use crate::Result;

/// A call, its buffer and its input, if the arguments can be used.
type Prepared<T> = Result<(Call, Vec<T>, Vec<T>)>;

/// The collectives of a group in forms that only serve torch's spelling. Made by [`ProcessGroup::torch_spelling`].
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::ProcessGroup;
///
/// let group = ProcessGroup::alone();
/// let mut from_each_rank = vec![vec![0_u8; 3]; group.world_size()];
/// let mut outputs: Vec<&mut [u8]> = from_each_rank.iter_mut().map(Vec::as_mut_slice).collect();
/// group.torch_spelling().all_gather_list(&[1, 2, 3], &mut outputs)?;
/// assert_eq!(from_each_rank, [[1, 2, 3]]);
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TorchSpelling<'a> {
    group: &'a ProcessGroup,
}

impl ProcessGroup {
    /// The collectives that take lists of buffers, as torch spells them.
    pub fn torch_spelling(&self) -> TorchSpelling<'_> {
        TorchSpelling { group: self }
    }
}
