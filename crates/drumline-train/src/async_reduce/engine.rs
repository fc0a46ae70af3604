//! The handle to which hooks bring their tensors.

use std::{fmt, ops::Range, sync::Arc, time::Duration};

use drumline_group::{DType, Element, driving};
use drumline_shm::{Arena, Segment, SegmentSize};

use super::{
    background::{Background, Counts},
    bitmap::Bitmap,
    layout::{GRANULE, Tensor},
    missing::names,
    on_host::OnHost,
    pieces::Pieces,
};
use crate::{Error, Result};

/// Reduces named tensors over a group, in any order. See the [module's documentation](super).
///
/// Made by [`TensorRegistry::freeze`](super::TensorRegistry::freeze). One thread at a time uses it; hooks on
/// several threads share it behind a lock. Bringing a tensor never waits.
///
/// A drop in the middle of a step aborts the group, and the other ranks are told. A drop between steps leaves
/// the group at once. [`AsyncReduce::stop`] leaves the group, too, and waits until the other ranks do.
pub struct AsyncReduce {
    background: Arc<Background<OnHost>>,
    /// The buckets that are not complete: the parts of the fused buffer that the caller may write to.
    pieces: Pieces,
    /// The tensors that were brought in this step.
    brought: Bitmap,
    /// By bucket: how many of its tensors were not brought yet in this step.
    pending: Vec<usize>,
    /// How many tensors were not brought yet in this step.
    left: usize,
    /// The address where the fused buffer begins.
    address: usize,
    /// Keeps the fused buffer mapped, also after its pieces are dropped.
    _arena: Arena,
}

/// Where a tensor lies in the fused buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// The bytes of the tensor, counted from the beginning of the buffer.
    pub bytes: Range<usize>,
    /// The number of elements.
    pub len: usize,
    /// The type of the elements.
    pub dtype: DType,
}

impl AsyncReduce {
    pub(super) fn new(background: Arc<Background<OnHost>>) -> Result<AsyncReduce> {
        let layout = &background.layout;
        let memory = |error: drumline_shm::Error| no_memory(error.to_string());
        let arena = match driving::arena(&background.group) {
            Some(arena) => arena.clone(),
            // A segment that no neighbour maps.
            None => {
                let size = SegmentSize { slot_bytes: 1, arena_bytes: layout.bytes };
                Segment::create(size).map_err(memory)?.arena().clone()
            }
        };
        if !GRANULE.is_multiple_of(arena.page_bytes()) {
            let problem = format!("pages of {} bytes are too long", arena.page_bytes());
            return Err(no_memory(problem));
        }
        let mut whole = arena.allocate::<u8>(layout.bytes).map_err(memory)?;
        let address = whole.as_mut_ptr().expose_provenance();
        let mut pieces = Pieces::default();
        pieces.put(0, whole);
        Ok(AsyncReduce {
            pieces,
            brought: Bitmap::new(layout.tensors.len()),
            pending: layout.buckets.iter().map(|bucket| bucket.tensors.len()).collect(),
            left: layout.tensors.len(),
            address,
            _arena: arena,
            background,
        })
    }

    /// The names of the tensors, in the order in which they lie in memory.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.background.layout.tensors.iter().map(|tensor| tensor.spec.name.as_str())
    }

    /// The elements of a tensor: this rank's own values until the tensor is brought, the result after
    /// [`synchronize`](AsyncReduce::synchronize).
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no such tensor, its elements are not of type `T`, or it
    /// is being reduced.
    pub fn gradient<T: Element>(&self, name: &str) -> Result<&[T]> {
        let operation = "gradient";
        let (_, place) = self.place_here::<T>(operation, name)?;
        Ok(bytemuck::cast_slice(here(self.pieces.get(place))))
    }

    /// The place of a tensor, for writing. Its contents are kept from step to step.
    ///
    /// # Errors
    ///
    /// As for [`AsyncReduce::gradient`].
    pub fn gradient_mut<T: Element>(&mut self, name: &str) -> Result<&mut [T]> {
        let operation = "gradient_mut";
        let (_, place) = self.place_here::<T>(operation, name)?;
        Ok(bytemuck::cast_slice_mut(here(self.pieces.get_mut(place))))
    }

    /// Brings the tensor with the values that lie in its place. Returns at once.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no such tensor, or it was already brought in this step.
    /// After a failure of the engine: that failure.
    pub fn async_reduce(&mut self, name: &str) -> Result<()> {
        let tensor = self.find("async_reduce", name)?;
        self.bring("async_reduce", tensor)
    }

    /// Copies `gradient` to its tensor's place and brings it. Returns at once.
    ///
    /// # Errors
    ///
    /// As for [`AsyncReduce::async_reduce`], and when `gradient` has not the type or the length of the
    /// tensor.
    pub fn async_reduce_from<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<()> {
        let operation = "async_reduce_from";
        let (tensor, place) = self.place_here::<T>(operation, name)?;
        let spec = &self.background.layout.tensors[tensor].spec;
        if gradient.len() != spec.elements() {
            let problem = format!("tensor {spec} cannot take {} elements", gradient.len());
            return Err(Error::argument(operation, problem));
        }
        here(self.pieces.get_mut(place)).copy_from_slice(bytemuck::cast_slice(gradient));
        self.bring(operation, tensor)
    }

    /// Waits until all tensors are reduced. Then every place holds its result, and the next step begins.
    ///
    /// # Errors
    ///
    /// [`NotBrought`](crate::ErrorKind::NotBrought), on all ranks alike, when this rank or another one has not brought
    /// all tensors. Some tensors are reduced in that case and some are not; the next step begins nevertheless.
    ///
    /// Any other failure ends the engine, and every later call returns that failure again:
    /// [`Collective`](crate::ErrorKind::Collective) says which rank did what;
    /// [`NotBrought`](crate::ErrorKind::NotBrought) says which tensors were missing from ranks that no longer answer.
    pub fn synchronize(&mut self) -> Result<()> {
        self.background.failure()?;
        if self.left > 0 {
            self.background.take_over(None, Some(&self.brought), |_, _| {});
        }
        let pieces = &mut self.pieces;
        let result = self.background.finish_step(|held| {
            pieces.put_all(&mut held.complete);
            pieces.put_all(&mut held.reduced);
        });
        let layout = &self.background.layout;
        self.brought.clear();
        self.left = layout.tensors.len();
        let pending = self.pending.iter_mut().zip(&layout.buckets);
        pending.for_each(|(pending, bucket)| *pending = bucket.tensors.len());
        result
    }

    /// Brings all tensors that were not brought in this step, with the values in their places, and
    /// [synchronizes](AsyncReduce::synchronize).
    ///
    /// # Errors
    ///
    /// As for [`AsyncReduce::synchronize`].
    pub fn sync_grad(&mut self) -> Result<()> {
        let count = self.background.layout.tensors.len();
        for tensor in self.brought.missing(0..count) {
            self.bring("sync_grad", tensor)?;
        }
        self.synchronize()
    }

    /// The whole fused buffer, if all tensors have one type: for optimizers that work on all tensors at once.
    /// To be called between steps. There may be zeros between tensors; [`AsyncReduce::place`] says where each
    /// tensor lies.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when a tensor has another type or is being reduced.
    pub fn fused<T: Element>(&mut self) -> Result<&mut [T]> {
        let operation = "fused";
        self.background.failure()?;
        let layout = &self.background.layout;
        let other = layout.tensors.iter().find(|tensor| tensor.spec.dtype != T::DTYPE);
        if let Some(Tensor { spec, .. }) = other {
            let problem = format!("tensor {spec} is not of {}", T::DTYPE);
            return Err(Error::argument(operation, problem));
        }
        if let Some(tensor) = self.first_brought() {
            return Err(self.under_way(operation, tensor));
        }
        Ok(bytemuck::cast_slice_mut(here(self.pieces.get_mut(0..layout.bytes))))
    }

    /// Where a tensor lies in the fused buffer.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) where there is no such tensor.
    pub fn place(&self, name: &str) -> Result<Place> {
        let Tensor { spec, place, .. } =
            &self.background.layout.tensors[self.find("place", name)?];
        Ok(Place { bytes: place.clone(), len: spec.elements(), dtype: spec.dtype })
    }

    /// The address where the fused buffer begins, for bindings that make tensors of another language from it.
    /// The buffer stays mapped there while this engine lives, also after a failure. Do not touch a tensor
    /// while [`gradient_mut`](AsyncReduce::gradient_mut) would refuse it, nor while a slice of it that was
    /// lent out is in use.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address)
    }

    /// How much this engine has done so far.
    pub fn counts(&self) -> Counts {
        self.background.counts()
    }

    /// Aborts the step and the engine. Every later call on this rank fails at once. Calls on the other ranks
    /// fail with an error that names this rank. The tensors stay where they are.
    pub fn abort(&self) {
        self.background.group.abort();
    }

    /// Leaves the group like [`AsyncReduce::stop`], but keeps the tensors, and waits at most `patience` for
    /// the other ranks to leave. For bindings whose tensors live on. In the middle of a step it
    /// [aborts](AsyncReduce::abort) the engine first.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::leave`](drumline_group::ProcessGroup::leave).
    pub fn leave(&mut self, patience: Duration) -> Result<()> {
        self.background.failure()?;
        if self.first_brought().is_some() {
            self.abort();
        }
        self.background.group.clone().leave(patience)
    }

    /// Ends the engine in good order: waits until all ranks have called `stop`.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) in the middle of a step: this rank's engine is dropped, which aborts
    /// the group. Otherwise as for [`ProcessGroup::destroy`](drumline_group::ProcessGroup::destroy).
    pub fn stop(self) -> Result<()> {
        self.background.failure()?;
        if let Some(tensor) = self.first_brought() {
            let name = &self.background.layout.tensors[tensor].spec.name;
            let problem = format!(
                "tensor `{name}` was brought and not synchronized: the other ranks wait for the \
                 end of the step"
            );
            return Err(Error::argument("stop", problem));
        }
        self.background.group.clone().destroy()
    }

    fn first_brought(&self) -> Option<usize> {
        (0..self.background.layout.tensors.len()).find(|&tensor| self.brought.contains(tensor))
    }

    fn bring(&mut self, operation: &'static str, tensor: usize) -> Result<()> {
        self.background.failure()?;
        let layout = &self.background.layout;
        let Tensor { spec, bucket, .. } = &layout.tensors[tensor];
        if self.brought.contains(tensor) {
            let problem = format!(
                "tensor `{}` was brought in this step before: each once, then `synchronize`",
                spec.name
            );
            return Err(Error::argument(operation, problem));
        }
        self.brought.insert(tensor);
        self.left -= 1;
        self.pending[*bucket] -= 1;
        if self.pending[*bucket] == 0 {
            let place = layout.buckets[*bucket].place.clone();
            let piece = here(self.pieces.take(place.clone()));
            let closing = (self.left == 0).then_some(&self.brought);
            self.background.take_over(Some(*bucket), closing, |held, _| {
                held.complete.put(place.start, piece);
            });
        }
        Ok(())
    }

    fn find(&self, operation: &'static str, name: &str) -> Result<usize> {
        self.background.layout.by_name.get(name).copied().ok_or_else(|| {
            Error::argument(
                operation,
                format!("no tensor `{name}` is registered; there are {}", names(self.names())),
            )
        })
    }

    /// The tensor and its place, if the caller may touch it now.
    fn place_here<T: Element>(
        &self,
        operation: &'static str,
        name: &str,
    ) -> Result<(usize, Range<usize>)> {
        self.background.failure()?;
        let tensor = self.find(operation, name)?;
        let Tensor { spec, place, .. } = &self.background.layout.tensors[tensor];
        if spec.dtype != T::DTYPE {
            let problem = format!("tensor {spec} is not of {}", T::DTYPE);
            return Err(Error::argument(operation, problem));
        }
        match self.brought.contains(tensor) {
            true => Err(self.under_way(operation, tensor)),
            false => Ok((tensor, place.clone())),
        }
    }

    fn under_way(&self, operation: &'static str, tensor: usize) -> Error {
        let name = &self.background.layout.tensors[tensor].spec.name;
        let problem = format!(
            "tensor `{name}` was brought in this step and is being reduced: `synchronize` gives it \
             back"
        );
        Error::argument(operation, problem)
    }
}

impl Drop for AsyncReduce {
    fn drop(&mut self) {
        let is_amid = self.left < self.background.layout.tensors.len();
        if is_amid && self.background.failure().is_ok() {
            self.background.group.abort();
        }
    }
}

impl fmt::Debug for AsyncReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncReduce")
            .field("tensors", &self.background.layout.tensors.len())
            .field("not_brought", &self.left)
            .finish_non_exhaustive()
    }
}

/// The bytes of tensors that the caller holds.
fn here<T>(bytes: Option<T>) -> T {
    let Some(bytes) = bytes else {
        unreachable!("what was not brought is here, unless the engine has failed");
    };
    bytes
}

fn no_memory(problem: String) -> Error {
    Error::memory(problem)
}
