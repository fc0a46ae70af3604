use bytemuck::cast_slice;
use drumline_group::{Element, ProcessGroup};

use crate::{Error, Result};

/// Copies many tensors from rank 0 to all ranks, packed into chunks of bounded memory.
///
/// Rank 0 puts its tensors in, one after the other. The other ranks take them out in the same order and with
/// the same sizes; [`verify_model`](super::verify_model) checks that these agree. A tensor may be cut at the
/// end of a chunk, so the memory that a broadcast takes does not depend on the model. In an adapter, rank 0
/// visits the tensors of its model, and the other ranks replace the tensors of theirs.
///
/// ```
/// use drumline::{ProcessGroup, ddp::Broadcast};
///
/// fn sync(group: &ProcessGroup, weight: &mut [f32], steps: &mut [i64]) -> drumline::Result<()> {
///     let mut broadcast = Broadcast::new(group, size_of_val(weight) + size_of_val(steps));
///     broadcast.tensor(weight)?; // reads on rank 0, writes on the others
///     broadcast.tensor(steps)?;
///     broadcast.finish()
/// }
/// # sync(&ProcessGroup::alone(), &mut [1.0], &mut [1])?;
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "`finish` sends the last chunk"]
pub struct Broadcast<'g> {
    group: &'g ProcessGroup,
    /// The rank whose values all ranks get.
    source: usize,
    /// The source: the bytes that are not sent yet. Other ranks: the chunk that was received last.
    chunk: Vec<u8>,
    /// Other ranks: how many bytes of the chunk were taken.
    taken: usize,
    /// The source: bytes that were not put in yet. Other ranks: bytes that were not received yet.
    remaining_bytes: usize,
    chunk_bytes: usize,
}

impl<'g> Broadcast<'g> {
    /// Large enough to hide the cost of a collective, small compared with any model.
    const CHUNK_BYTES: usize = 4 << 20;

    /// A broadcast of tensors that take `total_bytes` together.
    pub fn new(group: &'g ProcessGroup, total_bytes: usize) -> Self {
        Self::from_rank(0, group, total_bytes)
    }

    /// [`Broadcast::new`] with another source than rank 0. It must be the same on all ranks.
    pub fn from_rank(source: usize, group: &'g ProcessGroup, total_bytes: usize) -> Self {
        Self { source, ..Self::with_chunks(group, total_bytes, Self::CHUNK_BYTES) }
    }

    fn with_chunks(group: &'g ProcessGroup, total_bytes: usize, chunk_bytes: usize) -> Self {
        // A group of one rank sends nothing.
        let total_bytes = if group.world_size() == 1 { 0 } else { total_bytes };
        let (chunk, remaining_bytes) = (Vec::new(), total_bytes);
        Self { group, source: 0, chunk, taken: 0, remaining_bytes, chunk_bytes }
    }

    /// Whether this rank's values are the ones that all ranks get: true on rank 0, unless another rank was named.
    pub fn is_source(&self) -> bool {
        self.group.rank() == self.source
    }

    /// Calls [`Broadcast::put`] on the source and [`Broadcast::take`] on the others: for frameworks whose tensors
    /// are changed in place.
    pub fn tensor<T: Element>(&mut self, values: &mut [T]) -> Result<()> {
        if self.is_source() { self.put(values) } else { self.take(values) }
    }

    /// On the source: adds the next tensor. Sends each chunk that is full.
    pub fn put<T: Element>(&mut self, values: &[T]) -> Result<()> {
        if self.group.world_size() == 1 {
            return Ok(());
        }
        let mut bytes: &[u8] = cast_slice(values);
        if bytes.len() > self.remaining_bytes {
            return Err(Self::wrong_total(bytes.len(), self.remaining_bytes));
        }
        self.remaining_bytes -= bytes.len();
        while !bytes.is_empty() {
            let (head, tail) = bytes.split_at(bytes.len().min(self.chunk_bytes - self.chunk.len()));
            self.chunk.extend_from_slice(head);
            bytes = tail;
            if self.chunk.len() == self.chunk_bytes {
                self.send()?;
            }
        }
        Ok(())
    }

    /// On all other ranks: fills `values` with the next tensor. Receives chunks as needed.
    pub fn take<T: Element>(&mut self, values: &mut [T]) -> Result<()> {
        let mut bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        let left = self.chunk.len() - self.taken + self.remaining_bytes;
        if bytes.len() > left {
            return Err(Self::wrong_total(bytes.len(), left));
        }
        while !bytes.is_empty() {
            if self.taken == self.chunk.len() {
                self.receive()?;
            }
            let ready = &self.chunk[self.taken..];
            let (head, tail) = bytes.split_at_mut(bytes.len().min(ready.len()));
            head.copy_from_slice(&ready[..head.len()]);
            self.taken += head.len();
            bytes = tail;
        }
        Ok(())
    }

    /// Checks that the tensors have `total_bytes` bytes together. The source then sends the last chunk.
    ///
    /// # Errors
    ///
    /// Fewer than `total_bytes` bytes were put in or taken out, or a collective failed.
    pub fn finish(mut self) -> Result<()> {
        let left =
            self.remaining_bytes + if self.is_source() { 0 } else { self.chunk.len() - self.taken };
        if left != 0 {
            return Err(Self::wrong_total(0, left));
        }
        if self.is_source() && !self.chunk.is_empty() { self.send() } else { Ok(()) }
    }

    fn send(&mut self) -> Result<()> {
        self.group.broadcast(&mut self.chunk, self.source)?;
        self.chunk.clear();
        Ok(())
    }

    fn receive(&mut self) -> Result<()> {
        let bytes = self.remaining_bytes.min(self.chunk_bytes);
        self.chunk.resize(bytes, 0);
        self.group.broadcast(&mut self.chunk, self.source)?;
        self.remaining_bytes -= bytes;
        self.taken = 0;
        Ok(())
    }

    fn wrong_total(tensor_bytes: usize, left_bytes: usize) -> Error {
        Error::argument(
            "ddp broadcast",
            format!(
                "a tensor of {tensor_bytes} bytes where {left_bytes} bytes are left; \
                 `total_bytes` must be the sum of all tensors"
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Any tensors, any chunk size: all ranks end with rank 0's values, whichever of the
        /// two ways they use.
        #[test]
        fn all_ranks_end_with_the_values_of_rank_0(
            lengths in prop::collection::vec(0usize..40, 0..6), chunk_bytes in 1usize..100,
        ) {
            let tensor = |rank: usize, length: usize| vec![rank as f64 - 0.5; length];
            let total = lengths.iter().sum::<usize>() * 8 + 3;
            let ranks: Vec<_> = drumline_group::rendezvous::local_world(3).unwrap().into_iter().map(|group| {
                let lengths = lengths.clone();
                std::thread::spawn(move || {
                    let mut broadcast = Broadcast::with_chunks(&group, total, chunk_bytes);
                    let mut odd = [group.rank() as u8; 3];
                    broadcast.tensor(&mut odd).unwrap();
                    let mut all = vec![odd[0] as f64];
                    for length in lengths {
                        let mut values = tensor(group.rank(), length);
                        match group.rank() {
                            0 => broadcast.put(&values).unwrap(),
                            1 => broadcast.take(&mut values).unwrap(),
                            _ => broadcast.tensor(&mut values).unwrap(),
                        }
                        all.extend(values);
                    }
                    broadcast.finish().unwrap();
                    all
                })
            }).collect();
            let mut wanted = vec![0.0];
            wanted.extend(lengths.iter().flat_map(|&length| tensor(0, length)));
            for rank in ranks {
                prop_assert_eq!(&rank.join().unwrap(), &wanted);
            }
        }
    }

    #[test]
    fn a_wrong_total_is_an_error_before_anything_is_sent() {
        let groups = drumline_group::rendezvous::local_world(2).unwrap();
        for group in &groups {
            let mut broadcast = Broadcast::new(group, 8);
            let error = broadcast.tensor(&mut [0.0_f32; 3]).unwrap_err();
            assert!(error.to_string().contains("12 bytes where 8 bytes are left"), "{error}");
            assert!(Broadcast::new(group, 8).finish().is_err());
        }
    }

    #[test]
    fn a_world_of_one_keeps_its_values() {
        let group = ProcessGroup::alone();
        let mut broadcast = Broadcast::new(&group, 4);
        let mut values = [7.0_f32];
        broadcast.tensor(&mut values).unwrap();
        broadcast.finish().unwrap();
        assert_eq!(values, [7.0]);
    }
}
