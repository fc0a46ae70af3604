//! Tensors on a device, reduced by name.

use std::{fmt, mem::take, ops::Range, sync::Arc};

use drumline_device::{Device, Event, Place, Stream};
use drumline_group::{Cause, DType, ProcessGroup, driving};
use drumline_train::{
    Error, Result,
    async_reduce::{
        AsyncReduceOptions, Counts, TensorRegistry,
        background::{Background, Held},
        bitmap::Bitmap,
        layout::{Layout, Tensor},
        names,
    },
};

use crate::{
    group::DeviceGroup,
    options::{DeviceOptions, Wanted},
    slice::DeviceSlice,
    work::DeviceWork,
};

/// Reduces named tensors of a device over a group, in any order, to one fused buffer of the device.
///
/// A tensor is copied out when its stream has
/// come to where it was when the tensor was brought, and when all ranks have brought its bucket. The sums are copied to
/// the fused buffer. No call waits for the device.
///
/// A drop in the middle of a step aborts the group, and the other ranks are told.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use drumline::{
///     ProcessGroup,
///     async_reduce::{AsyncReduceOptions, TensorRegistry},
///     device::{Device, DeviceAsyncReduce, DeviceOptions, DeviceSlice, Driver, Stream},
/// };
///
/// # fn example(group: ProcessGroup, gradient: DeviceSlice) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tensors = TensorRegistry::new();
/// tensors.register::<f32>("weight", 1_000)?;
/// let device = Driver::load(None)?.device(0)?;
/// let mut fused = None;
/// let mut reduce = DeviceAsyncReduce::new(
///     tensors,
///     &group,
///     Arc::new(device.clone()),
///     &DeviceOptions::default(),
///     &AsyncReduceOptions::default(),
///     |bytes| {
///         let memory = device.allocate(bytes).map_err(|error| error.to_string())?;
///         Ok(fused.insert(memory).place())
///     },
/// )?;
/// let stream = device.stream()?;
/// reduce.async_reduce_from("weight", gradient, &stream)?; // when backward has queued it
/// reduce.synchronize(&stream)?; // what the stream does now sees the averages
/// let average: DeviceSlice = reduce.gradient("weight")?;
/// # reduce.stop()?;
/// # Ok(())
/// # }
/// ```
pub struct DeviceAsyncReduce {
    background: Arc<Background<OnDevice>>,
    on: DeviceGroup,
    fused: Arc<Fused>,
    brought: Bitmap,
    /// By bucket: how many of its tensors were not brought yet in this step.
    pending: Vec<usize>,
    /// The calls of the last step, which may have failed since.
    before: Vec<DeviceWork>,
}

/// What waits for the other ranks, and what is under way.
#[derive(Debug)]
pub(super) struct OnDevice {
    on: DeviceGroup,
    fused: Arc<Fused>,
    /// By tensor: where it lies, and what its stream must have done before.
    sources: Vec<Option<Source>>,
    works: Vec<DeviceWork>,
}

#[derive(Debug)]
struct Source {
    from: DeviceSlice,
    after: Arc<dyn Event>,
}

/// A run of buckets that leaves.
pub(super) struct Leaving {
    on: DeviceGroup,
    from: Vec<DeviceSlice>,
    to: Vec<DeviceSlice>,
    after: Vec<Arc<dyn Event>>,
}

impl Held for OnDevice {
    type Run = Leaving;

    fn take(&mut self, layout: &Layout, run: &Range<usize>) -> Leaving {
        let on = self.on.clone();
        let mut leaving = Leaving { on, from: Vec::new(), to: Vec::new(), after: Vec::new() };
        for &tensor in layout.buckets[run.clone()].iter().flat_map(|bucket| &bucket.tensors) {
            let Some(Source { from, after }) = self.sources[tensor].take() else {
                unreachable!("what is complete on all ranks is complete here");
            };
            leaving.from.push(from);
            leaving.to.push(self.fused.tensors[tensor]);
            // A stream that has brought several tensors has recorded an event for each.
            leaving.after.push(after);
        }
        leaving
    }

    fn reduce(background: &Arc<Background<OnDevice>>, _run: Range<usize>, leaving: Leaving) {
        let Leaving { on, from, to, after } = leaving;
        if from.iter().all(DeviceSlice::is_empty) {
            return background.on_reduced(Ok(()), |_| {});
        }
        match on.all_reduce_coalesced_after(after, &from, &to, background.op) {
            Ok(work) => background.on_reduced(Ok(()), |held| held.works.push(work)),
            Err(error) => background.on_reduced(Err(error), |_| {}),
        }
    }
}

impl DeviceAsyncReduce {
    /// Like [`TensorRegistry::freeze`], for tensors on a device of each rank. `allocate` gets a number of bytes, and
    /// returns memory of the device for the fused buffer, which must live as long as the engine and what it has queued.
    /// The engine has a process group and a device group of its own.
    ///
    /// # Errors
    ///
    /// As for [`TensorRegistry::freeze`], and as for [`DeviceGroup::new`].
    pub fn new(
        tensors: TensorRegistry,
        group: &ProcessGroup,
        device: Arc<dyn Device>,
        device_options: &DeviceOptions,
        options: &AsyncReduceOptions,
        allocate: impl FnOnce(usize) -> Result<Place, String>,
    ) -> Result<DeviceAsyncReduce> {
        let (group, layout) = tensors.lay_out(group, options)?;
        // Data in pieces goes through the host, so no other way need be tried.
        let on = DeviceGroup::new(&group, device, &device_options.clone().way(Wanted::Host))?;
        let fused = Arc::new(Fused::new(&on, &layout, allocate)?);
        let sources = layout.tensors.iter().map(|_| None).collect();
        let brought = Bitmap::new(layout.tensors.len());
        let pending = layout.buckets.iter().map(|bucket| bucket.tensors.len()).collect();
        let held = OnDevice { on: on.clone(), fused: fused.clone(), sources, works: Vec::new() };
        let background = Arc::new(Background::new(group, layout, options.op, held));
        Ok(DeviceAsyncReduce { background, on, fused, brought, pending, before: Vec::new() })
    }

    /// The names of the tensors, in the order in which they lie in the fused buffer.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.background.layout.tensors.iter().map(|tensor| tensor.spec.name.as_str())
    }

    /// Where the result of a tensor lies in the fused buffer. It is there for streams that have
    /// [synchronized](DeviceAsyncReduce::synchronize).
    ///
    /// # Errors
    ///
    /// [`Argument`](drumline_error::ErrorKind::Argument) where there is no such tensor.
    pub fn gradient(&self, name: &str) -> Result<DeviceSlice> {
        let tensor = self.find("gradient", name)?;
        Ok(self.fused.tensors[tensor])
    }

    /// The fused buffer: all tensors side by side, in the order of [`names`](DeviceAsyncReduce::names). Where types
    /// differ in size, there may be a gap, so that elements are aligned.
    pub fn fused(&self) -> Place {
        self.fused.place
    }

    /// The device group that carries the data.
    pub fn device_group(&self) -> &DeviceGroup {
        &self.on
    }

    /// How much this engine has done so far.
    pub fn counts(&self) -> Counts {
        self.background.counts()
    }

    /// Brings a tensor that lies at `from`, when `stream` has come to where it is now. Returns at once. Until a stream
    /// that has [synchronized](DeviceAsyncReduce::synchronize) comes there, the memory must not be written.
    ///
    /// # Errors
    ///
    /// [`Argument`](drumline_error::ErrorKind::Argument) when there is no such tensor, when it was brought in this step
    /// already, or when `from` has not its type and length, or shares memory with another part of the fused buffer;
    /// [`Device`](drumline_error::ErrorKind::Device) for memory that is none of the device. After a failure of the
    /// engine: that failure.
    pub fn async_reduce_from(
        &mut self,
        name: &str,
        from: DeviceSlice,
        stream: &Arc<dyn Stream>,
    ) -> Result<()> {
        let operation = "async_reduce_from";
        self.failure()?;
        let tensor = self.find(operation, name)?;
        self.check(operation, tensor, from)?;
        self.bring(operation, tensor, from, stream)
    }

    /// Brings a tensor that lies in its place in the fused buffer.
    ///
    /// # Errors
    ///
    /// As for [`async_reduce_from`](DeviceAsyncReduce::async_reduce_from).
    pub fn async_reduce(&mut self, name: &str, stream: &Arc<dyn Stream>) -> Result<()> {
        self.failure()?;
        let tensor = self.find("async_reduce", name)?;
        self.bring("async_reduce", tensor, self.fused.tensors[tensor], stream)
    }

    /// Has what is queued in the stream from now on see the results of all tensors. It waits until all ranks have
    /// brought all tensors, and not for any device. Then the next step begins.
    ///
    /// What fails later, the next call tells, or [`wait`](DeviceAsyncReduce::wait).
    ///
    /// # Errors
    ///
    /// [`NotBrought`](drumline_error::ErrorKind::NotBrought), on all ranks alike, when this rank or another one has not
    /// brought all tensors. Some are reduced in that case and some are not; the next step begins nevertheless. Any
    /// other failure ends the engine, and every later call returns that failure again.
    pub fn synchronize(&mut self, stream: &Arc<dyn Stream>) -> Result<()> {
        self.failure()?;
        self.background.take_over(None, Some(&self.brought), |_, _| {});
        let works = &mut self.before;
        let result = self.background.finish_step(|held| {
            *works = take(&mut held.works);
            held.sources.iter_mut().for_each(|source| *source = None);
        });
        self.brought.clear();
        let pending = self.pending.iter_mut().zip(&self.background.layout.buckets);
        pending.for_each(|(pending, bucket)| *pending = bucket.tensors.len());
        // All of them, also after one that has failed.
        let joined: Vec<_> = self.before.iter().map(|work| work.join(stream)).collect();
        let joined: Result<(), Error> = joined.into_iter().collect();
        match (result, joined) {
            (Ok(()), Err(error)) => Err(self.end_with(error)),
            (result, _) => result,
        }
    }

    /// Waits on the host until the results of the last step are there.
    ///
    /// # Errors
    ///
    /// Why they are not.
    pub fn wait(&mut self) -> Result<()> {
        let waited = self.before.iter().try_for_each(DeviceWork::wait);
        waited.map_err(|error| self.end_with(error))
    }

    /// Aborts the step and the engine. Every later call on this rank fails at once. Calls on the other ranks fail with
    /// an error that names this rank.
    pub fn abort(&self) {
        self.background.group.abort();
        self.on.abort();
    }

    /// Ends the engine in good order: waits until all ranks have called `stop`.
    ///
    /// # Errors
    ///
    /// [`Argument`](drumline_error::ErrorKind::Argument) in the middle of a step: this rank's engine is dropped, which
    /// aborts the group. Otherwise as for [`DeviceGroup::destroy`] and [`ProcessGroup::destroy`].
    pub fn stop(self) -> Result<()> {
        self.failure()?;
        if let Some(tensor) = self.first_brought() {
            let name = &self.background.layout.tensors[tensor].spec.name;
            let problem = format!(
                "tensor `{name}` was brought and not synchronized: the other ranks wait for the end of the step"
            );
            return Err(Error::argument("stop", problem));
        }
        self.on.clone().destroy()?;
        self.background.group.clone().destroy()
    }

    fn find(&self, operation: &'static str, name: &str) -> Result<usize> {
        self.background.layout.by_name.get(name).copied().ok_or_else(|| {
            Error::argument(
                operation,
                format!("no tensor `{name}` is registered; there are {}", names(self.names())),
            )
        })
    }

    fn check(&self, operation: &'static str, tensor: usize, from: DeviceSlice) -> Result<()> {
        let spec = &self.background.layout.tensors[tensor].spec;
        let invalid = |problem| Err(Error::argument(operation, problem));
        if (from.dtype, from.len()) != (spec.dtype, spec.elements()) {
            return invalid(format!(
                "tensor {spec} cannot take {} elements of {}",
                from.len(),
                from.dtype
            ));
        }
        let own = self.fused.tensors[tensor];
        if from.place.overlaps(self.fused.place) && from.place != own.place {
            return invalid(format!(
                "{} lies in the fused buffer, and not in the place of tensor `{}`",
                from.place, spec.name
            ));
        }
        self.on.check("async_reduce_from", from).map_err(|error| self.heed(error))
    }

    fn bring(
        &mut self,
        operation: &'static str,
        tensor: usize,
        from: DeviceSlice,
        stream: &Arc<dyn Stream>,
    ) -> Result<()> {
        let Tensor { spec, bucket, .. } = &self.background.layout.tensors[tensor];
        if self.brought.contains(tensor) {
            let problem = format!(
                "tensor `{}` was brought in this step before: each once, then `synchronize`",
                spec.name
            );
            return Err(Error::argument(operation, problem));
        }
        let after = self.on.event_of(operation, stream).map_err(|error| self.heed(error))?;
        self.brought.insert(tensor);
        self.pending[*bucket] -= 1;
        let hold = |held: &mut OnDevice, _: &Layout| {
            held.sources[tensor] = Some(Source { from, after });
        };
        let complete = (self.pending[*bucket] == 0).then_some(*bucket);
        let is_last = self.pending.iter().all(|pending| *pending == 0);
        self.background.take_over(complete, is_last.then_some(&self.brought), hold);
        Ok(())
    }

    /// The failure that ended this engine, or of a call of the last step.
    fn failure(&self) -> Result<()> {
        self.background.failure()?;
        let failed = self.before.iter().find_map(|work| work.error());
        failed.map_or(Ok(()), |error| Err(self.end_with(error)))
    }

    /// What a driver says about an argument. If it is the driver that has failed, so has the engine.
    fn heed(&self, error: Error) -> Error {
        match self.on.has_failed() {
            true => self.end_with(error),
            false => error,
        }
    }

    fn end_with(&self, error: Error) -> Error {
        if let Some(error) = error.detail::<drumline_device::Error>() {
            // The other ranks may wait for this one in a round.
            let cause = Cause::Device { problem: error.to_string() };
            driving::fail(&self.background.group, "async_reduce", cause);
        }
        self.background.end_with(&error);
        error
    }

    fn first_brought(&self) -> Option<usize> {
        (0..self.background.layout.tensors.len()).find(|&tensor| self.brought.contains(tensor))
    }
}

impl Drop for DeviceAsyncReduce {
    fn drop(&mut self) {
        if self.first_brought().is_some() && self.background.failure().is_ok() {
            self.abort();
        }
    }
}

impl fmt::Debug for DeviceAsyncReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceAsyncReduce")
            .field("tensors", &self.background.layout.tensors.len())
            .field("device", &self.on.identity().to_string())
            .finish_non_exhaustive()
    }
}

/// Where the results lie.
#[derive(Debug)]
struct Fused {
    place: Place,
    /// The place of each tensor.
    tensors: Vec<DeviceSlice>,
}

impl Fused {
    /// Gets the memory, and checks it.
    fn new(
        on: &DeviceGroup,
        layout: &Layout,
        allocate: impl FnOnce(usize) -> Result<Place, String>,
    ) -> Result<Fused> {
        let invalid = |problem| Err(Error::argument("DeviceAsyncReduce::new", problem));
        let mut bytes = 0_usize;
        let ranges: Vec<Range<usize>> = layout
            .tensors
            .iter()
            .map(|Tensor { spec, .. }| {
                let start = bytes.next_multiple_of(spec.dtype.size());
                bytes = start + spec.bytes();
                start..bytes
            })
            .collect();
        let place = match allocate(bytes) {
            Ok(place) => place,
            Err(problem) => {
                return invalid(format!("no fused buffer of {bytes} bytes: {problem}"));
            }
        };
        if place.bytes < bytes || !place.address.is_multiple_of(ALIGNMENT) {
            return invalid(format!(
                "the fused buffer is {place}; it takes {bytes} bytes at a multiple of {ALIGNMENT}"
            ));
        }
        on.check("DeviceAsyncReduce::new", DeviceSlice::new(place, DType::U8))?;
        let tensors = layout.tensors.iter().zip(ranges).filter_map(|(tensor, range)| {
            Some(DeviceSlice::new(place.part(range)?, tensor.spec.dtype))
        });
        Ok(Fused { place: Place { bytes, ..place }, tensors: tensors.collect() })
    }
}

/// Elements of every type are aligned there.
const ALIGNMENT: u64 = 16;
