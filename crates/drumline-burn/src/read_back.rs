//! Reads gradients back from GPUs while backward goes on.
//!
//! A tap must not wait for the device. So it only puts a copy into the device's queue ([`read_back`]) and goes on. On
//! CUDA and HIP, the future of a copy blocks whoever polls it. So a thread waits for the copies one by one
//! ([`Reader`]), and hands each gradient to the reducer when it has come. Copies end in the order in which they began,
//! so waiting for the oldest one delays no other.

use std::{
    future::poll_fn,
    mem,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError, mpsc},
    task::{Context, Poll, Waker},
    thread::{self, JoinHandle},
};

use burn::tensor::{Bytes, DType};
use bytemuck::AnyBitPattern;
use drumline::ddp::{GradientReducer, Place, Values};

use crate::burn_version::{
    backend::read_sync,
    gpu::{CopyDescriptor, CubeTensor, ServerError, StreamId, into_contiguous_aligned},
};

/// Reads gradients for a reducer.
pub(crate) struct Reader {
    /// Copies have a stream of their own. In the stream of backward, its next kernels would wait for them.
    stream: StreamId,
    /// The thread of this backward, from its first gradient on.
    arrivals: Mutex<Option<Arrivals>>,
}

impl Reader {
    pub(crate) fn new() -> Self {
        Self { stream: StreamId::allocate(), arrivals: Mutex::default() }
    }

    /// Submits `gradient` when it has come. Does not wait for the device.
    pub(crate) fn submit(&self, reducer: &Arc<GradientReducer>, slot: usize, gradient: CubeTensor) {
        self.expect(reducer, slot, || read_back(gradient, self.stream));
    }

    fn expect(&self, reducer: &Arc<GradientReducer>, slot: usize, begin: impl FnOnce() -> Coming) {
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        if arrivals.is_none() {
            *arrivals = Arrivals::begin(reducer.clone());
        }
        // If there is no thread, the gradient stays missing, and is read after backward. If the thread has panicked,
        // so do all that were under way.
        if let Some(arrivals) = &*arrivals {
            let _ = arrivals.coming.send((slot, begin()));
        }
    }

    /// Waits until all gradients are submitted.
    pub(crate) fn finish(&self) {
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Arrivals { coming, thread }) = arrivals {
            drop(coming);
            let _ = thread.join(); // a panic leaves gradients missing, as above
        }
    }
}

/// The thread that waits for the gradients of one backward.
struct Arrivals {
    /// Parameters whose gradients are under way, oldest first.
    coming: mpsc::Sender<(usize, Coming)>,
    thread: JoinHandle<()>,
}

impl Arrivals {
    /// `None` if no thread can be started.
    fn begin(reducer: Arc<GradientReducer>) -> Option<Self> {
        let (coming, oldest) = mpsc::channel::<(usize, Coming)>();
        let submit_all = move || {
            for (slot, coming) in oldest {
                match coming.wait() {
                    Ok(gradient) => reducer.submit_to(slot, |place| gradient.pack(place)),
                    // It stays missing. So it is read once more after backward, where an error ends the step.
                    Err(problem) => tracing::warn!(slot, "a gradient could not be read: {problem}"),
                }
            }
        };
        let thread = thread::Builder::new().name("drumline reads".into()).spawn(submit_all);
        thread.ok().map(|thread| Self { coming, thread })
    }
}

/// Puts a copy of `tensor` to the memory of the host into the queue of its device.
pub(crate) fn read_back(tensor: CubeTensor, stream: StreamId) -> Coming {
    let CubeTensor { client, handle, meta, dtype, .. } = into_contiguous_aligned(tensor);
    let (shape, strides) = (meta.shape().clone(), meta.strides().clone());
    let source = CopyDescriptor::new(handle.binding(), shape, strides, dtype.size());
    let mut bytes = Box::pin(async move {
        // burn's own `into_data` would copy at the first access to the data, behind all that was computed until then.
        let copy = client.read_one_tensor_async(source);
        pause().await;
        copy.await
    });
    // Goes to the pause, so the copy is in the queue. To go on would wait for it.
    let _ = stream.executes(|| bytes.as_mut().poll(&mut Context::from_waker(Waker::noop())));
    Coming { dtype, bytes }
}

/// Is not ready once.
fn pause() -> impl Future<Output = ()> + Send {
    let mut has_paused = false;
    poll_fn(move |_| match mem::replace(&mut has_paused, true) {
        true => Poll::Ready(()),
        false => Poll::Pending,
    })
}

/// A gradient on its way to the host.
pub(crate) struct Coming {
    dtype: DType,
    bytes: Pin<Box<dyn Future<Output = Result<Bytes, ServerError>> + Send>>,
}

impl Coming {
    /// Waits for the device.
    pub(crate) fn wait(self) -> Result<Arrived, String> {
        let bytes = read_sync(self.bytes).map_err(|error| error.to_string())?;
        Ok(Arrived { dtype: self.dtype, bytes })
    }
}

/// A gradient in the memory of the host, row-major.
pub(crate) struct Arrived {
    dtype: DType,
    bytes: Bytes,
}

impl Arrived {
    /// Writes the gradient to `place`, or adds it. Returns whether type and length fit.
    pub(crate) fn pack(&self, place: Place<'_>) -> bool {
        fn of<T: AnyBitPattern>(bytes: &Bytes) -> &[T] {
            bytemuck::try_cast_slice(bytes).unwrap_or_default()
        }
        match self.dtype {
            DType::F32 => place.put(Values::F32(of(&self.bytes))),
            DType::F64 => place.put(Values::F64(of(&self.bytes))),
            DType::F16 => place.put(Values::F16(of(&self.bytes))),
            DType::BF16 => place.put(Values::Bf16(of(&self.bytes))),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::future::ready;

    use burn_cubecl::cubecl::server::IoError;
    use burn_std::backtrace::BackTrace;
    use drumline::{
        ProcessGroup,
        ddp::{DdpOptions, ParameterSpec, ValuesMut},
    };

    use super::*;

    fn reducer(parameters: usize) -> Arc<GradientReducer> {
        let spec = |at: usize| ParameterSpec::new(format!("p{at}"), [2], drumline::DType::F32);
        let specs = (0..parameters).map(spec).collect();
        Arc::new(
            GradientReducer::new(specs, &DdpOptions::default(), &ProcessGroup::alone()).unwrap(),
        )
    }

    fn arrives(values: [f32; 2]) -> Coming {
        let bytes = Bytes::from_elems(values.to_vec());
        Coming { dtype: DType::F32, bytes: Box::pin(ready(Ok(bytes))) }
    }

    fn fails() -> Coming {
        let error = IoError::UnsupportedStrides { backtrace: BackTrace::capture() };
        Coming { dtype: DType::F32, bytes: Box::pin(ready(Err(error.into()))) }
    }

    fn panics() -> Coming {
        #[allow(clippy::panic)]
        let bytes = Box::pin(async { panic!("as a driver might") });
        Coming { dtype: DType::F32, bytes }
    }

    #[test]
    fn what_has_come_is_submitted_and_what_has_failed_stays_missing() {
        let reducer = reducer(3);
        let reader = Reader::new();
        for step in 0..2 {
            for (slot, coming) in [(2, arrives([1.0, 2.0])), (0, fails()), (1, arrives([3.0, 4.0]))]
            {
                reader.expect(&reducer, slot, || coming);
            }
            reader.finish();
            assert_eq!(reducer.missing(), [0], "step {step}");
            reducer.submit(0, [5.0_f32, 6.0][..].into());
            let averaged = reducer.finish().unwrap();
            let wanted = [[5.0_f32, 6.0], [3.0, 4.0], [1.0, 2.0]];
            for (slot, wanted) in wanted.iter().enumerate() {
                assert_eq!(averaged.get::<f32>(slot), Some(&wanted[..]));
            }
        }
    }

    #[test]
    fn after_a_panic_gradients_are_missing_until_the_next_backward() {
        let reducer = reducer(2);
        let reader = Reader::new();
        reader.expect(&reducer, 1, panics);
        reader.expect(&reducer, 0, || arrives([1.0, 2.0]));
        reader.finish();
        assert_eq!(reducer.missing(), [0, 1]);
        reader.expect(&reducer, 1, || arrives([1.0, 2.0]));
        reader.finish();
        assert_eq!(reducer.missing(), [0]);
    }

    #[test]
    fn what_does_not_fit_is_not_packed() {
        let arrived = arrives([1.0, 2.0]).wait().unwrap();
        let mut place = [0.0_f32; 2];
        for (holds_sum, wanted) in [(false, [1.0, 2.0]), (true, [2.0, 4.0])] {
            assert!(arrived.pack(Place { values: ValuesMut::F32(&mut place), holds_sum }));
            assert_eq!(place, wanted);
        }
        for values in [ValuesMut::F32(&mut [0.0; 3]), ValuesMut::F64(&mut [0.0; 1])] {
            assert!(!arrived.pack(Place { values, holds_sum: false }));
        }
        assert_eq!(fails().wait().err().map(|problem| problem.is_empty()), Some(false));
    }
}
