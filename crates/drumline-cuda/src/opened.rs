//! An opened device: its context, and how a call gets there and back.

use std::ffi::{c_char, c_int};
use std::fs;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

use drumline_device::{Error, Identity, Result};

use crate::loaded::Loaded;
use crate::table::{Functions, Handle};

pub(crate) struct Opened {
    pub(crate) library: Arc<Loaded>,
    pub(crate) identity: Identity,
    /// For errors.
    pub(crate) name: String,
    /// The driver's number.
    pub(crate) number: c_int,
    pub(crate) context: Handle,
}

// SAFETY: the context is a handle that any thread may use; everything else is Send.
unsafe impl Send for Opened {}
// SAFETY: as above: the driver takes calls of any thread.
unsafe impl Sync for Opened {}

impl Opened {
    pub(crate) fn new(library: Arc<Loaded>, ordinal: usize) -> Result<Opened> {
        library.check_process()?;
        let functions = library.functions;
        let label = format!("{}:{ordinal}", library.family.name());
        let done = |call, code| library.done_on(&label, call, code);
        let mut number = 0;
        let asked = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the place is there to be written.
        done("cuDeviceGet", unsafe { (functions.device_get)(&raw mut number, asked) })?;
        let told = |call, function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
            let mut bytes = [0_u8; 256];
            // SAFETY: the driver writes at most as many bytes as it is told.
            let code = unsafe { function(bytes.as_mut_ptr().cast(), 256, number) };
            done(call, code)?;
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            Ok::<_, Error>(String::from_utf8_lossy(&bytes[..end]).into_owned())
        };
        let name = told("cuDeviceGetName", functions.device_name)?;
        let pci = told("cuDeviceGetPCIBusId", functions.device_pci)?.to_ascii_lowercase();
        let mut uuid = [0; 16];
        // SAFETY: the place is there to be written.
        done("cuDeviceGetUuid", unsafe { (functions.device_uuid)(&raw mut uuid, number) })?;
        let mut context = null_mut();
        // SAFETY: the place is there to be written. `drop` releases the context once.
        done("cuDevicePrimaryCtxRetain", unsafe {
            (functions.context_retain)(&raw mut context, number)
        })?;
        let kind = library.family.name();
        let placed = Path::new("/sys/bus/pci/devices").join(&pci).join("numa_node");
        let numa_node = fs::read_to_string(placed).ok().and_then(|it| it.trim().parse().ok());
        let identity = Identity { kind, ordinal, name, pci, uuid, numa_node };
        let name = identity.to_string();
        Ok(Opened { library, identity, name, number, context })
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.library.functions
    }

    pub(crate) fn done(&self, call: &'static str, code: c_int) -> Result<()> {
        self.library.done_on(&self.name, call, code)
    }

    /// Runs `call` in this device's context, on this thread. The caller's context is current again afterwards.
    pub(crate) fn inside<R>(&self, call: impl FnOnce(&Functions) -> R) -> Result<R> {
        self.library.check_process()?;
        let functions = self.functions();
        // SAFETY: the context is retained.
        self.done("cuCtxPushCurrent", unsafe { (functions.context_push)(self.context) })?;
        let result = call(functions);
        self.leave();
        Ok(result)
    }

    /// Makes the caller's context current again. The result of the call is worth more than an error of this: without the
    /// result, what it has made would be lost.
    fn leave(&self) {
        for _ in 0..2 {
            let mut popped = null_mut();
            // SAFETY: the place is there to be written.
            if unsafe { (self.functions().context_pop)(&raw mut popped) } == 0 {
                return;
            }
        }
    }

    /// [`Opened::inside`] for one function of the driver, which is named for errors.
    pub(crate) fn run(
        &self,
        name: &'static str,
        call: impl FnOnce(&Functions) -> c_int,
    ) -> Result<()> {
        self.done(name, self.inside(call)?)
    }

    /// Gives something back, in a destructor. Nobody could do anything about an error. At the end of the process the
    /// driver may be gone already, and in a fork nothing is this process's.
    pub(crate) fn give_back(&self, call: impl FnOnce(&Functions) -> c_int) {
        if !self.library.is_own_process() {
            return;
        }
        let functions = self.functions();
        // SAFETY: the context is retained.
        let is_inside = unsafe { (functions.context_push)(self.context) } == 0;
        call(functions);
        if is_inside {
            self.leave();
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.library.is_own_process() {
            // SAFETY: the context was retained once by this value.
            unsafe { (self.functions().context_release)(self.number) };
        }
    }
}
