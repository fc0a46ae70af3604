//! Finds NCCL or RCCL, and says what it is.

use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use drumline_device::fabric::Work;
use drumline_device::{Error, Result};
use drumline_kernels::DType;
use drumline_loader::{Library, find};

use crate::loaded::text;
use crate::nccl::functions::{Functions, IN_PROGRESS, SUCCESS, text_at, version_of};
use crate::nccl::supports::supports;
use crate::nccl::unique_id::UniqueId;
use crate::nccl::version::{Version, same_gpu_hint};

/// Names of libraries, in the order in which they are tried.
const NAMES: [&str; 4] = ["libnccl.so.2", "librccl.so.1", "libnccl.so", "librccl.so"];

/// Where packages of Python bring one, from the directory of packages on.
const IN_PACKAGES: [&str; 2] = ["nvidia/nccl/lib", "torch/lib"];

/// Directories of packages, as the program has said.
static PREFIXES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Has [`Nccl::load`] look in a directory of Python's packages, too, after all other places. Python says where its
/// packages are.
pub fn look_in(prefix: impl Into<PathBuf>) {
    let (mut prefixes, prefix) =
        (PREFIXES.lock().unwrap_or_else(PoisonError::into_inner), prefix.into());
    if !prefixes.contains(&prefix) {
        prefixes.push(prefix);
    }
}

/// NCCL or RCCL, in this process. Clones share it.
#[derive(Clone)]
pub struct Nccl(Arc<Loaded>);

struct Loaded {
    functions: Functions,
    path: PathBuf,
    version: Version,
}

impl Nccl {
    /// What this process has loaded, or the library `named`, or the first that this machine has. It stays loaded.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] with all that was tried, and why it does not serve: it is older than 2.18, or lacks a
    /// function.
    pub fn load(named: Option<&Path>) -> Result<Nccl> {
        let packages = PREFIXES.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let places: Vec<PathBuf> = packages
            .iter()
            .flat_map(|prefix| IN_PACKAGES.map(|place| prefix.join(place)))
            .collect();
        let in_places = places.iter().flat_map(|place| NAMES.map(|name| place.join(name)));
        let names: Vec<PathBuf> =
            NAMES.iter().map(PathBuf::from).chain(in_places.filter(|file| file.exists())).collect();
        match find(named, &names, |library, _| look_at(library)) {
            Ok(found) => {
                let (functions, version) = found.made;
                Ok(Nccl(Arc::new(Loaded { functions, path: found.path, version })))
            }
            Err(mut tried) => {
                if named.is_none() {
                    let nothing = |place: &PathBuf| format!("{}: nothing else", place.display());
                    tried.extend(places.iter().map(nothing));
                }
                let library =
                    "NCCL or RCCL (they come in the packages nvidia-nccl-cu12, libnccl2 and rccl)";
                Err(Error::NotFound { library, tried })
            }
        }
    }

    /// The version's number: 21801 is 2.18.1.
    pub fn version(&self) -> i32 {
        self.0.version.0
    }

    /// A new one, for the ranks of one communicator.
    ///
    /// # Errors
    ///
    /// What NCCL says: it finds no network interface, for example.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId::from_bytes([0; UniqueId::BYTES]);
        // SAFETY: the place is there to be written.
        let code = unsafe { (self.0.functions.unique_id)(&raw mut id) };
        self.done("nccl", "ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// Whether NCCL can do this with elements of this type. If not, what it lacks.
    ///
    /// # Errors
    ///
    /// What NCCL lacks, as a sentence.
    pub fn supports(&self, dtype: DType, work: Work) -> Result<(), String> {
        supports(self.0.version, dtype, work)
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// The result of a call that this thread has just made. That NCCL is still at it is no error.
    pub(crate) fn done(&self, device: &str, call: &'static str, code: c_int) -> Result<()> {
        if matches!(code, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: NCCL's texts end with a zero. These live as long as the library.
        let meaning = unsafe { text_at((self.0.functions.error_string)(code)) };
        // SAFETY: as above. This one lives until this thread's next error. No communicator need be named.
        let last = unsafe { text_at((self.0.functions.last_error)(null_mut())) };
        let mut said = vec![meaning.unwrap_or_else(|| "nothing is known".to_owned())];
        said.extend(last.filter(|it| !it.trim().is_empty()).map(|it| it.trim().to_owned()));
        if said.iter().any(|it| it.contains("Duplicate GPU")) {
            said.push(same_gpu_hint(self.version()).to_owned());
        }
        Err(Error::Driver {
            device: device.to_owned(),
            call,
            code,
            name: name_of(code).to_owned(),
            text: said.join(": "),
        })
    }
}

/// The functions of a library that serves.
fn look_at(library: Library) -> Result<(Functions, Version), String> {
    let (version, oldest) = (version_of(library)?, Version::OLDEST);
    if version < oldest {
        return Err(format!("it is version {version}, and at least {oldest} is needed"));
    }
    let functions = Functions::find(library)
        .map_err(|missing| format!("it has no function {}", text(missing)))?;
    Ok((functions, version))
}

/// Names of `ncclResult_t`.
fn name_of(code: c_int) -> &'static str {
    const NAMES: [&str; 9] = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ];
    usize::try_from(code).ok().and_then(|at| NAMES.get(at)).unwrap_or(&"an unknown error")
}

/// `nccl 2.18.1 (libnccl.so.2)`
impl fmt::Display for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nccl {} ({})", self.0.version, self.0.path.display())
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Nccl").field(&self.to_string()).finish()
    }
}
