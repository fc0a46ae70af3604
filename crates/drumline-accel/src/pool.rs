//! Memory of the driver through which staged calls pass.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline_device::{Device, Pinned, Result};

/// Keeps memory for later calls, since a driver needs long to pin it.
#[derive(Debug)]
pub(crate) struct Pool {
    device: Arc<dyn Device>,
    idle: Mutex<Vec<Pinned>>,
}

/// At most so much memory is kept.
const KEPT_BYTES_MAX: usize = 256 << 20;

/// Memory that is lent. It goes back when it is dropped.
pub(crate) struct Lent {
    /// `None`: no bytes.
    memory: Option<Pinned>,
    pool: Arc<Pool>,
}

impl Pool {
    pub(crate) fn new(device: Arc<dyn Device>) -> Arc<Pool> {
        Arc::new(Pool { device, idle: Mutex::default() })
    }

    /// At least `bytes` bytes, with any contents.
    pub(crate) fn lend(self: &Arc<Self>, bytes: usize) -> Result<Lent> {
        let wanted = bytes.next_power_of_two();
        let memory = match bytes {
            0 => None,
            _ => match self.take(wanted) {
                Some(kept) => Some(kept),
                None => Some(self.device.pinned(wanted)?),
            },
        };
        Ok(Lent { memory, pool: self.clone() })
    }

    fn take(&self, bytes: usize) -> Option<Pinned> {
        let mut idle = self.idle();
        let at = idle.iter().position(|it| it.as_ref().len() == bytes)?;
        Some(idle.swap_remove(at))
    }

    fn put(&self, memory: Pinned) {
        let mut idle = self.idle();
        let kept: usize = idle.iter().map(|it| it.as_ref().len()).sum();
        if kept + memory.as_ref().len() <= KEPT_BYTES_MAX {
            idle.push(memory);
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Pinned>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lent {
    /// Memory for no bytes.
    pub(crate) fn nothing(pool: &Arc<Pool>) -> Lent {
        Lent { memory: None, pool: pool.clone() }
    }

    /// Takes the memory out, for a copy. `None`: no bytes.
    pub(crate) fn take(mut self) -> Option<Pinned> {
        self.memory.take()
    }

    /// What [`Lent::take`] has taken out.
    pub(crate) fn again(pool: &Arc<Pool>, memory: Pinned) -> Lent {
        Lent { memory: Some(memory), pool: pool.clone() }
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], AsRef::as_ref)
    }
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], AsMut::as_mut)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(memory) = mem::take(&mut self.memory) {
            self.pool.put(memory);
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lent").field(&self.memory).finish()
    }
}
