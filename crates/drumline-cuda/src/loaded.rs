//! A driver's library: its functions, and its errors.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::ptr::null;

use drumline_device::{Error, Result};

use crate::family::Family;
use crate::table::Functions;

pub(crate) struct Loaded {
    pub(crate) functions: Functions,
    pub(crate) family: Family,
    pub(crate) path: PathBuf,
    pub(crate) version: i32,
    pub(crate) process: u32,
}

pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const NOT_FOUND: c_int = 500;
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const ALREADY_REGISTERED: c_int = 712;
pub(crate) const NOT_SUPPORTED: c_int = 801;

impl Loaded {
    /// Starts the driver, unless it has started.
    pub(crate) fn init(&self) -> Result<()> {
        self.check_process()?;
        // SAFETY: it may be called at any time, and often.
        self.done("cuInit", unsafe { (self.functions.init)(0) })
    }

    /// The result of a call that concerns no device.
    pub(crate) fn done(&self, call: &'static str, code: c_int) -> Result<()> {
        self.done_on(self.family.name(), call, code)
    }

    /// The result of a call on a device.
    pub(crate) fn done_on(&self, device: &str, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let say = |function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut said = null();
            // SAFETY: the place is there to be written.
            let code = unsafe { function(code, &raw mut said) };
            // SAFETY: the driver gives a text that ends with a zero and lives as long as the library.
            (code == 0 && !said.is_null()).then(|| text(unsafe { CStr::from_ptr(said) }))
        };
        Err(Error::Driver {
            device: device.to_owned(),
            call,
            code,
            name: say(self.functions.error_name).unwrap_or_else(|| "an unknown error".to_owned()),
            text: say(self.functions.error_string).unwrap_or_else(|| "nothing is known".to_owned()),
        })
    }

    /// A driver serves the process that has started it, and none that is forked from it.
    pub(crate) fn check_process(&self) -> Result<()> {
        if std::process::id() == self.process {
            return Ok(());
        }
        let problem = format!(
            "the driver was started by process {}, and this process is forked from it: start ranks by spawn or exec",
            self.process
        );
        Err(Error::Argument { problem })
    }

    pub(crate) fn is_own_process(&self) -> bool {
        std::process::id() == self.process
    }
}

pub(crate) fn text(text: &CStr) -> String {
    text.to_string_lossy().into_owned()
}
