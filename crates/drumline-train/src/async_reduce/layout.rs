//! The place of each tensor in the fused buffer.

use std::{collections::HashMap, ops::Range};

use drumline_group::{DType, ProcessGroup, ReduceOp, backend::Collective, driving::Ask};

use super::{options::AsyncReduceOptions, pieces::Piece};
use crate::{
    Error, Result,
    ddp::{DdpOptions, ParameterSpec, plan_buckets},
};

/// Tensors begin at multiples of this many bytes, which suits vector instructions and tensor libraries.
const ALIGNMENT: usize = 64;

/// Buckets begin at multiples of this many bytes. It is a multiple of the page size on any host, so ranks on
/// different hosts have the same layout.
pub(super) const GRANULE: usize = 64 << 10;

/// Gets the result and the piece.
pub(super) type End = Box<dyn FnOnce(Result<()>, Piece) + Send>;

/// All-reduces the first bytes of a piece.
pub(super) fn reduce(
    group: &ProcessGroup,
    (piece, bytes): (Piece, usize),
    (dtype, op): (DType, ReduceOp),
    end: End,
) {
    let ask = Ask::new(Collective::AllReduce, dtype).by(op);
    ask.begin_then(group, Front { piece, bytes }, move |result, front: Front| {
        end(result, front.piece);
    });
}

/// The first bytes of a piece.
struct Front {
    piece: Piece,
    bytes: usize,
}

impl AsRef<[u8]> for Front {
    fn as_ref(&self) -> &[u8] {
        &self.piece[..self.bytes]
    }
}

impl AsMut<[u8]> for Front {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.piece[..self.bytes]
    }
}

#[derive(Debug)]
pub struct Layout {
    pub tensors: Vec<Tensor>,
    pub buckets: Vec<Bucket>,
    pub by_name: HashMap<String, usize>,
    /// The length of the fused buffer.
    pub(super) bytes: usize,
}

#[derive(Debug)]
pub struct Tensor {
    pub spec: ParameterSpec,
    pub bucket: usize,
    /// The range of bytes in the fused buffer.
    pub(super) place: Range<usize>,
}

/// Tensors of one type that lie side by side and are reduced together.
#[derive(Debug)]
pub struct Bucket {
    pub(super) dtype: DType,
    pub tensors: Vec<usize>,
    /// The range of bytes in the fused buffer, in whole pages.
    pub(super) place: Range<usize>,
    /// The end of the last tensor.
    pub(super) end: usize,
}

impl Layout {
    /// Divides the tensors, in the order of `entries`, into buckets. A tensor that is as long as a bucket
    /// gets a bucket of its own.
    pub(super) fn new(entries: Vec<ParameterSpec>, options: &AsyncReduceOptions) -> Result<Layout> {
        let limit = options.bucket_bytes;
        let (small, large): (Vec<usize>, Vec<usize>) =
            (0..entries.len()).partition(|&it| entries[it].bytes() < limit);
        let specs: Vec<ParameterSpec> =
            small.iter().map(|&tensor| entries[tensor].clone()).collect();
        let limits = DdpOptions::default().first_bucket_bytes(limit).bucket_bytes(limit);
        let mut members: Vec<Vec<usize>> = plan_buckets(&specs, 0..specs.len(), &limits)?
            .into_iter()
            .map(|bucket| bucket.parameters.into_iter().map(|it| small[it]).collect())
            .chain(large.into_iter().map(|tensor| vec![tensor]))
            .collect();
        members.sort_unstable();

        let mut places = vec![(0, 0..0); entries.len()];
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut at = 0_usize;
        for (number, tensors) in members.into_iter().enumerate() {
            let (start, mut end) = (at, at);
            for &tensor in &tensors {
                let first = end.next_multiple_of(ALIGNMENT);
                end = first.checked_add(entries[tensor].bytes()).ok_or_else(too_long)?;
                places[tensor] = (number, first..end);
            }
            // An empty bucket takes space, too, so that each bucket has a place of its own.
            let behind = end.max(start + 1).checked_next_multiple_of(GRANULE);
            at = behind.ok_or_else(too_long)?;
            let dtype = entries[tensors[0]].dtype;
            buckets.push(Bucket { dtype, tensors, place: start..at, end });
        }
        let tensors: Vec<Tensor> = entries
            .into_iter()
            .zip(places)
            .map(|(spec, (bucket, place))| Tensor { spec, bucket, place })
            .collect();
        let names = tensors.iter().enumerate();
        let by_name = names.map(|(index, tensor)| (tensor.spec.name.clone(), index)).collect();
        Ok(Layout { tensors, buckets, by_name, bytes: at })
    }

    /// The range of bytes of a run of buckets in the fused buffer, in whole pages.
    pub(super) fn place_of(&self, run: &Range<usize>) -> Range<usize> {
        self.buckets[run.start].place.start..self.buckets[run.end - 1].place.end
    }

    /// Divides a run of buckets where the type of the elements changes.
    pub(super) fn of_one_type(&self, run: Range<usize>) -> Vec<Range<usize>> {
        let mut start = run.start;
        let parts = self.buckets[run].chunk_by(|a, b| a.dtype == b.dtype);
        parts
            .map(|part| {
                let part = start..start + part.len();
                start = part.end;
                part
            })
            .collect()
    }

    /// The names of the tensors in these buckets.
    pub(super) fn names_in(&self, buckets: &[usize]) -> Vec<String> {
        let tensors = buckets.iter().flat_map(|&bucket| &self.buckets[bucket].tensors);
        tensors.map(|&tensor| self.tensors[tensor].spec.name.clone()).collect()
    }
}

fn too_long() -> Error {
    let problem = "the tensors are longer than any memory".to_owned();
    Error::argument("freeze", problem)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry((number, (bytes, is_f64)): (usize, (usize, bool))) -> ParameterSpec {
        let dtype = if is_f64 { DType::F64 } else { DType::F32 };
        ParameterSpec::new(format!("t{number}"), [bytes / dtype.size()], dtype)
    }

    proptest! {
        #[test]
        fn every_tensor_has_a_place_of_its_own_in_a_bucket_of_its_type(
            tensors in prop::collection::vec((0_usize..200_000, any::<bool>()), 1..30),
            bucket_bytes in 0_usize..300_000,
        ) {
            let entries: Vec<ParameterSpec> = tensors.into_iter().enumerate().map(entry).collect();
            let options = AsyncReduceOptions::default().bucket_bytes(bucket_bytes);
            let layout = Layout::new(entries.clone(), &options).unwrap();

            let mut at = 0;
            for (number, bucket) in layout.buckets.iter().enumerate() {
                prop_assert_eq!(bucket.place.start, at);
                at = bucket.place.end;
                prop_assert!(at.is_multiple_of(GRANULE) && bucket.end <= at);
                let mut free = bucket.place.start;
                for &tensor in &bucket.tensors {
                    let Tensor { spec, bucket: of, place } = &layout.tensors[tensor];
                    prop_assert_eq!((*of, spec.dtype), (number, bucket.dtype));
                    prop_assert!(place.start >= free && place.start.is_multiple_of(ALIGNMENT));
                    prop_assert_eq!(place.len(), spec.bytes());
                    free = place.end;
                    let is_large = spec.bytes() >= bucket_bytes;
                    prop_assert!(!is_large || bucket.tensors.len() == 1, "not alone");
                }
                prop_assert_eq!(free, bucket.end);
            }
            prop_assert_eq!(at, layout.bytes);
            let mut all: Vec<usize> = layout.buckets.iter().flat_map(|it| it.tensors.clone()).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..entries.len()).collect::<Vec<_>>());
            for (name, &tensor) in &layout.by_name {
                prop_assert_eq!(name, &layout.tensors[tensor].spec.name);
            }
            let parts = layout.of_one_type(0..layout.buckets.len());
            prop_assert_eq!(parts.iter().map(Range::len).sum::<usize>(), layout.buckets.len());
            for part in parts {
                let first = layout.buckets[part.start].dtype;
                prop_assert!(layout.buckets[part].iter().all(|bucket| bucket.dtype == first));
            }
        }
    }
}
