//! Memory of buckets that is lent out, and comes back.

use std::{
    mem,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use super::{memory::Memory, values::Values};

/// Where the memory of the buckets of one plan comes back to: one place for each bucket.
#[derive(Debug)]
pub(super) struct Home(Mutex<Vec<Option<Memory>>>);

impl Home {
    pub(super) fn new(buckets: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new((0..buckets).map(|_| None).collect())))
    }

    /// Memory of a bucket that has come back.
    pub(super) fn take(&self, bucket: usize) -> Option<Memory> {
        self.lock()[bucket].take()
    }

    /// Lends memory of a bucket out. It comes back when the last part of it is dropped, unless it was replaced by then.
    pub(super) fn lend(self: &Arc<Self>, bucket: usize, memory: Memory) -> Arc<Lent> {
        Arc::new(Lent { memory: Some(memory), bucket, home: Arc::downgrade(self) })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Memory>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner) // no code panics while it holds the lock
    }
}

/// The memory of a bucket that is lent out.
#[derive(Debug)]
pub(super) struct Lent {
    /// Is there until this is dropped.
    memory: Option<Memory>,
    bucket: usize,
    /// Gone if the buckets were planned anew.
    home: Weak<Home>,
}

impl Lent {
    pub(super) fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            let mut places = home.lock();
            let replaced = mem::replace(&mut places[self.bucket], self.memory.take());
            drop(places);
            drop(replaced);
        }
    }
}

/// The average of a gradient, in the memory of its bucket. It owns its share of that memory, so it may be handed to a
/// framework without a copy. The bucket is used again when the last of its gradients was dropped; until then, steps use
/// other memory.
///
/// ```
/// # use drumline::{DType, ProcessGroup, ddp::{DdpOptions, GradientReducer, ParameterSpec}};
/// # let group = ProcessGroup::alone();
/// # let parameters = vec![ParameterSpec::new("bias", [1], DType::F32)];
/// # let reducer = GradientReducer::new(parameters, &DdpOptions::default(), &group)?;
/// use drumline::ddp::{SharedGradient, Values};
///
/// reducer.submit(0, [1.0_f32][..].into());
/// let averaged = reducer.finish()?;
/// let bias: SharedGradient = averaged.share(0).expect("it was used");
/// drop(averaged);
/// drop(reducer);
/// assert_eq!(bias.values(), Values::F32(&[1.0]));
/// assert_eq!(bias.as_ref(), 1.0_f32.to_ne_bytes()); // as bytes
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SharedGradient {
    bucket: Arc<Lent>,
    range: Range<usize>,
}

impl SharedGradient {
    pub(super) fn new(bucket: Arc<Lent>, range: Range<usize>) -> Self {
        Self { bucket, range }
    }

    /// Its elements, row-major.
    pub fn values(&self) -> Values<'_> {
        match self.bucket.memory() {
            Some(memory) => memory.slice(self.range.clone()),
            None => unreachable!("memory leaves when it is dropped"),
        }
    }
}

impl AsRef<[u8]> for SharedGradient {
    /// Its elements as native-endian bytes.
    fn as_ref(&self) -> &[u8] {
        self.values().as_bytes()
    }
}
