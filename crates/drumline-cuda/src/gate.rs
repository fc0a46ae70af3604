//! Gates: a word of the host for which streams wait.
//!
//! A stream may reach its gate long after everybody has forgotten it. So a word that is dropped is kept aside until
//! every stream has passed.

use std::any::Any;
use std::fmt;
use std::mem::forget;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use drumline_device::{Error, Event, Gate, Result};

use crate::event::CudaEvent;
use crate::loaded::NOT_SUPPORTED;
use crate::memory::HostMemory;
use crate::opened::Opened;
use crate::table::Handle;

pub(crate) struct CudaGate {
    device: Arc<Opened>,
    /// `None` once it is dropped.
    word: Option<HostMemory>,
    /// The word's address on the device.
    address: u64,
    /// Each comes when a stream has passed. `None`: nobody can tell of one stream.
    passed: Mutex<Option<Vec<CudaEvent>>>,
}

const OPEN: u32 = 1;

/// Words that are dropped, and what comes when streams have passed.
static ASIDE: Mutex<Vec<(HostMemory, Vec<CudaEvent>)>> = Mutex::new(Vec::new());

impl CudaGate {
    pub(crate) fn new(device: Arc<Opened>) -> Result<CudaGate> {
        clear_aside();
        let word = HostMemory::new(device.clone(), size_of::<AtomicU32>())?;
        let address = word.on_device()?;
        Ok(CudaGate { device, word: Some(word), address, passed: Mutex::new(Some(Vec::new())) })
    }

    /// Has a stream of this driver wait.
    pub(crate) fn hold(&self, device: &Arc<Opened>, stream: Handle) -> Result<()> {
        let unsupported = || Error::Unsupported {
            device: self.device.name.clone(),
            what: "let streams wait for the host",
        };
        let wait = device.functions().wait_value.ok_or_else(unsupported)?;
        let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the stream lives, as the caller holds it. The word lives until the event below has come.
        let code = device.inside(|_| unsafe { wait.call(stream, self.address, OPEN) })?;
        if code == NOT_SUPPORTED {
            return Err(unsupported());
        }
        device.done("cuStreamWaitValue32", code)?;
        match CudaEvent::record(device, stream) {
            Ok(event) => {
                if let Some(passed) = passed.as_mut() {
                    passed.push(event);
                }
                Ok(())
            }
            Err(error) => {
                *passed = None;
                Err(error)
            }
        }
    }
}

/// Frees the words that all streams have passed. If the driver does not say so of a stream, the word is kept, and asked
/// for again next time: a stream that goes on would look at freed memory. So the words of a device that has failed stay
/// allocated until the process ends.
pub(crate) fn clear_aside() {
    let has_passed = |event: &CudaEvent| matches!(event.has_come(), Ok(true));
    let mut aside = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    let done =
        aside.extract_if(.., |(_, passed)| passed.iter().all(has_passed)).collect::<Vec<_>>();
    drop(aside);
    drop(done);
}

impl Gate for CudaGate {
    fn open(&self) {
        if let Some(word) = &self.word {
            // SAFETY: the memory has room for a word and is aligned to pages. It is accessed as an atomic only, here
            // and by devices.
            let word = unsafe { AtomicU32::from_ptr(word.start().as_ptr().cast()) };
            word.store(OPEN, Ordering::Release);
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaGate {
    fn drop(&mut self) {
        // No stream may wait for what nobody can open.
        self.open();
        let passed = self.passed.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        match (self.word.take(), passed) {
            (Some(word), Some(passed)) => {
                ASIDE.lock().unwrap_or_else(PoisonError::into_inner).push((word, passed));
            }
            // A stream may look at it at any time.
            (word, None) => forget(word),
            (None, _) => {}
        }
        clear_aside();
    }
}

impl fmt::Debug for CudaGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaGate").field("address", &self.address).finish()
    }
}
