//! Host memory that the driver has pinned in place.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use drumline_device::Result;

use crate::loaded::ALREADY_REGISTERED;
use crate::opened::Opened;

/// Pages that the driver keeps in place, until this is released or dropped. A driver pins a range once for all devices of
/// the process, so pins of the same range share that: the last of them unpins.
///
/// A range that overlaps another one in part, or lies within it, is refused as pinned already: the other would unpin
/// bytes that this one still needs. So is what others in this process have pinned, as they unpin it when they like.
pub(crate) struct Pin {
    device: Arc<Opened>,
    range: Range,
    /// Whether it still counts among the pins of its range. A pin of no bytes never does.
    is_held: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Range {
    /// The address of the driver's function: each driver pins for itself.
    driver: usize,
    start: usize,
    bytes: usize,
}

impl Range {
    fn overlaps(&self, other: &Range) -> bool {
        self.driver == other.driver
            && self.start < other.start + other.bytes
            && other.start < self.start + self.bytes
    }
}

/// What drivers have pinned.
static PINNED: Mutex<BTreeMap<Range, Shared>> = Mutex::new(BTreeMap::new());

struct Shared {
    /// Who has asked the driver for it.
    by: Arc<Opened>,
    pins: usize,
}

/// For all contexts of the process.
const PORTABLE: u32 = 1;

impl Pin {
    /// Pins mapped memory. The caller keeps it mapped for as long as the pin lives.
    pub(crate) fn new(device: Arc<Opened>, start: *const u8, bytes: usize) -> Result<Pin> {
        let driver = device.functions().host_register as usize;
        let range = Range { driver, start: start.addr(), bytes };
        if bytes > 0 {
            Pin::hold(&device, start, range)?;
        }
        Ok(Pin { device, range, is_held: AtomicBool::new(bytes > 0) })
    }

    /// Adds a pin.
    fn hold(device: &Arc<Opened>, start: *const u8, range: Range) -> Result<()> {
        let mut all = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = all.get_mut(&range) {
            shared.pins += 1;
            return Ok(());
        }
        // Not every driver refuses these.
        let code = match all.keys().any(|it| it.overlaps(&range)) {
            true => ALREADY_REGISTERED,
            false => device.inside(|functions| {
                // SAFETY: the driver checks the range. It changes no byte, and whoever made the pin keeps the pages
                // mapped.
                unsafe { (functions.host_register)(start.cast_mut().cast(), range.bytes, PORTABLE) }
            })?,
        };
        device.done("cuMemHostRegister", code)?;
        all.insert(range, Shared { by: device.clone(), pins: 1 });
        Ok(())
    }

    /// Gives the pin up, once. The last pin of the pages unpins them.
    pub(crate) fn release(&self) {
        if !self.is_held.swap(false, Ordering::SeqCst) || !self.device.library.is_own_process() {
            return;
        }
        let mut all = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(shared) = all.get_mut(&self.range) else { return };
        shared.pins -= 1;
        if shared.pins == 0 {
            // Nobody pins them anew before they are unpinned.
            shared.by.give_back(|functions| {
                // SAFETY: the range was registered, and is not yet unregistered.
                unsafe { (functions.host_unregister)(self.range.start as *mut c_void) }
            });
            // What may be the last of a device is dropped when others can pin again.
            let unpinned = all.remove(&self.range);
            drop(all);
            drop(unpinned);
        }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.release();
    }
}
