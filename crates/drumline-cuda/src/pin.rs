//! Host memory that the driver has pinned in place.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drumline_device::Result;

use crate::loaded::ALREADY_REGISTERED;
use crate::opened::Opened;

/// Pages that the driver keeps in place, until this is released or dropped.
pub(crate) struct Pin {
    device: Arc<Opened>,
    address: usize,
    /// Whether the driver has pinned them for this value, and not yet unpinned them.
    is_held: AtomicBool,
}

/// For all contexts of the process.
const PORTABLE: u32 = 1;

impl Pin {
    /// Pins mapped memory. The caller keeps it mapped for as long as the pin lives.
    pub(crate) fn new(device: Arc<Opened>, start: *const u8, bytes: usize) -> Result<Pin> {
        let mut is_held = bytes > 0;
        if is_held {
            let code = device.inside(|functions| {
                // SAFETY: the driver checks the range. It changes no byte, and whoever made the pin keeps the pages
                // mapped.
                unsafe { (functions.host_register)(start.cast_mut().cast(), bytes, PORTABLE) }
            })?;
            match code {
                // For another device of this process, say. Whoever has pinned them unpins them.
                ALREADY_REGISTERED => is_held = false,
                code => device.done("cuMemHostRegister", code)?,
            }
        }
        Ok(Pin { device, address: start.addr(), is_held: AtomicBool::new(is_held) })
    }

    /// Unpins the pages, once.
    pub(crate) fn release(&self) {
        if self.is_held.swap(false, Ordering::SeqCst) {
            self.device.give_back(|functions| {
                // SAFETY: the range was registered, and is not yet unregistered.
                unsafe { (functions.host_unregister)(self.address as *mut c_void) }
            });
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.release();
    }
}
