//! Sums that stay in slices, fetched as a device fetches them.

use std::sync::mpsc;

use bytemuck::Pod;
use drumline::{Element, ReduceOp, Result};
use drumline_group::driving::{arena, reduce_slices_then, slice_holders, window_of};
use drumline_group::{Error, ProcessGroup, RegisteredBuffer};

/// Sums, and fetches every slice from the rank of this host that holds it. Where no rank holds slices, nobody makes
/// this call; the result is that of an all-reduce.
pub(crate) fn gathered<T: Element + Pod>(
    group: &ProcessGroup,
    mut buffer: RegisteredBuffer<T>,
    op: ReduceOp,
) -> Result<Vec<T>> {
    let len = buffer.len();
    let held = slice_holders(group, T::DTYPE)?.zip(arena(group));
    let Some((holders, arena)) = held else {
        group.all_reduce(&mut buffer, op)?;
        return Ok(buffer.to_vec());
    };
    // An empty buffer lies nowhere.
    let offset = arena.offset_of(&buffer).unwrap_or(0);
    let mut offsets = vec![0; group.world_size()];
    group.all_gather(&[offset as u64], &mut offsets)?;

    let (told, hears) = mpsc::channel();
    reduce_slices_then::<T, _>(group, buffer, op, move |result, buffer| {
        // Nobody listens any more if this rank has failed.
        let _ = told.send(result.map(|()| buffer));
    });
    let Ok(summed) = hears.recv() else { unreachable!("a call has an end") };
    let summed = summed?;

    let mut found = Vec::with_capacity(len);
    for (slice, &holder) in holders.iter().enumerate() {
        let border = |slice: usize| len * slice / holders.len();
        let range = border(slice)..border(slice + 1);
        if holder == group.rank() {
            found.extend_from_slice(&summed[range]);
        } else {
            let size = size_of::<T>();
            let window = window_of(group, holder, offsets[holder] as usize, len * size);
            let bytes = window?.to_vec(range.start * size..range.end * size);
            let bytes = bytes.map_err(Error::memory)?;
            found.extend(bytes.chunks_exact(size).map(bytemuck::pod_read_unaligned::<T>));
        }
    }
    // Nobody frees what others read.
    group.barrier()?;
    Ok(found)
}
