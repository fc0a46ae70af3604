//! What a job takes from the host on which it starts. Tests make up hosts of their own.

use std::{
    env,
    ffi::OsString,
    fmt::{self, Debug, Formatter},
    num::NonZeroUsize,
    path::Path,
    thread,
};

/// A host: its environment, its devices, its cores.
pub(crate) struct Host<'a> {
    /// Looks up a variable.
    pub(super) environment: &'a dyn Fn(&str) -> Option<OsString>,
    /// The directory `/`.
    pub(super) root: &'a Path,
    /// How many cores this process may use.
    pub(super) cores: Option<NonZeroUsize>,
}

impl Host<'_> {
    pub(crate) fn this() -> Host<'static> {
        Host {
            environment: &|name| env::var_os(name),
            root: Path::new("/"),
            cores: thread::available_parallelism().ok(),
        }
    }

    /// A variable that is set and not empty.
    pub(super) fn variable(&self, name: &str) -> Option<OsString> {
        (self.environment)(name).filter(|value| !value.is_empty())
    }

    /// The value of a variable as `parse` understands it. Its error names the variable.
    pub(super) fn parsed<T>(
        &self,
        name: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.variable(name) else { return Ok(None) };
        let text = value.to_str().ok_or_else(|| format!("{name} is not UTF-8"))?;
        parse(text).map(Some).map_err(|why| format!("{name}={text}: {why}"))
    }
}

impl Debug for Host<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Host { root, cores, .. } = self;
        f.debug_struct("Host").field("root", root).field("cores", cores).finish_non_exhaustive()
    }
}
