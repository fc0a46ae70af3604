//! Finds the driver, and opens its devices.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use drumline_device::{Error, Result};
use drumline_loader::find;

use crate::device::CudaDevice;
use crate::family::Family;
use crate::loaded::{Loaded, text};
use crate::table::Functions;

/// Names of drivers, in the order in which they are tried. HIP 5 numbers kinds of memory differently.
const NAMES: [&str; 5] =
    ["libcuda.so.1", "libamdhip64.so.7", "libamdhip64.so.6", "libcuda.so", "libamdhip64.so"];

/// The library of a driver, in this process. Clones share it.
#[derive(Clone)]
pub struct Driver(Arc<Loaded>);

/// The driver that this process uses, and how it was named. A process has one.
static LOADED: Mutex<Option<(Option<PathBuf>, Driver)>> = Mutex::new(None);

impl Driver {
    /// The driver that this process has loaded, or the library `named`, or the first that this machine has. It stays
    /// loaded.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] with all that was tried; [`Error::Driver`] if the driver does not start.
    pub fn load(named: Option<&Path>) -> Result<Driver> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((by, driver)) = &*loaded
            && by.as_deref() == named
        {
            driver.0.init()?;
            return Ok(driver.clone());
        }
        let driver = Driver::open(named)?;
        *loaded = Some((named.map(Path::to_owned), driver.clone()));
        Ok(driver)
    }

    fn open(named: Option<&Path>) -> Result<Driver> {
        let found = find(named, &NAMES, |library, _| {
            let family = match library.symbol(c"hipInit") {
                Some(_) => Family::Hip,
                None => Family::Cuda,
            };
            let functions = Functions::find(library, family)
                .map_err(|missing| format!("it has no function {}", text(missing)))?;
            Ok((family, functions))
        });
        let found =
            found.map_err(|tried| Error::NotFound { library: "driver of CUDA or HIP", tried })?;
        let (family, functions) = found.made;
        let process = std::process::id();
        let mut shared = Loaded { functions, family, path: found.path, version: 0, process };
        shared.init()?;
        let mut version = 0;
        // SAFETY: the place is there to be written.
        let code = unsafe { (functions.driver_version)(&raw mut version) };
        shared.done("cuDriverGetVersion", code)?;
        shared.version = version;
        Ok(Driver(Arc::new(shared)))
    }

    /// CUDA or HIP.
    pub fn family(&self) -> Family {
        self.0.family
    }

    /// The number of devices that this process sees.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn devices(&self) -> Result<usize> {
        self.0.check_process()?;
        let mut count = 0;
        // SAFETY: the place is there to be written.
        let code = unsafe { (self.0.functions.device_count)(&raw mut count) };
        self.0.done("cuDeviceGetCount", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// A device, by the driver's number in this process.
    ///
    /// # Errors
    ///
    /// What the driver says: there is no such device, or it cannot be used.
    pub fn device(&self, ordinal: usize) -> Result<CudaDevice> {
        CudaDevice::open(self.0.clone(), ordinal)
    }

    /// The number of the device that is current on this thread, if there is one.
    pub fn current_device(&self) -> Option<usize> {
        let mut device = 0;
        // SAFETY: the place is there to be written.
        let code = unsafe { (self.0.functions.current_device)(&raw mut device) };
        (code == 0).then(|| usize::try_from(device).ok())?
    }
}

/// `cuda 12.4 (libcuda.so.1)`
impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Loaded { family, path, version, .. } = &*self.0;
        let (major, minor) = match family {
            Family::Cuda => (version / 1_000, version % 1_000 / 10),
            Family::Hip => (version / 10_000_000, version / 100_000 % 100),
        };
        write!(f, "{} {major}.{minor} ({})", family.name(), path.display())
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Driver").field(&self.to_string()).finish()
    }
}
