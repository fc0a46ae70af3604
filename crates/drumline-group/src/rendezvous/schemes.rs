//! Schemes of URLs that a program registers.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};

use super::{file, place::Rendezvous, settings::invalid};
#[cfg(not(feature = "mpi"))]
use crate::backend::mpi;
use crate::{Config, Result};

type Handler = Arc<dyn Fn(&str, &Config) -> Result<Rendezvous> + Send + Sync>;

static HANDLERS: RwLock<BTreeMap<String, Handler>> = RwLock::new(BTreeMap::new());

/// The schemes of the library.
const BUILT_IN: [&str; 4] = ["env", "tcp", "file", "mpi"];

/// Registers URLs that begin with `scheme://` in this process, for [`rendezvous`](super::rendezvous) and
/// [`init_process_group`](crate::init_process_group).
///
/// `handler` gets the whole URL and the settings. If the settings have no secret, they get the environment's,
/// if there is one. `handler` usually ends in [`Rendezvous::with_store`].
///
/// ```
/// # use drumline_group as drumline;
/// use std::sync::Arc;
///
/// use drumline::{
///     Config, init_process_group,
///     rendezvous::{Rendezvous, register_rendezvous_handler},
///     store::HashStore,
/// };
///
/// register_rendezvous_handler("solo", |_url, config| {
///     Rendezvous::with_store(Arc::new(HashStore::new()), 0, 1, config)
/// })?;
/// let group = init_process_group("solo://", &Config::default())?;
/// assert_eq!(group.world_size(), 1);
/// # Ok::<(), drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Setting`](crate::ErrorKind::Setting) when the scheme is registered already, or has
/// other characters than letters and digits.
pub fn register_rendezvous_handler<H>(scheme: &str, handler: H) -> Result<()>
where
    H: Fn(&str, &Config) -> Result<Rendezvous> + Send + Sync + 'static,
{
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-.".contains(c);
    if scheme.is_empty() || !scheme.chars().all(allowed) {
        let problem = "a scheme is made of small letters and digits".to_owned();
        return Err(invalid(&format!("scheme {scheme:?}"), problem));
    }
    let mut handlers = HANDLERS.write().unwrap_or_else(PoisonError::into_inner);
    if BUILT_IN.contains(&scheme) || handlers.contains_key(scheme) {
        let problem = "there is a way to meet of this name already".to_owned();
        return Err(invalid(&format!("scheme {scheme:?}"), problem));
    }
    handlers.insert(scheme.to_owned(), Arc::new(handler));
    Ok(())
}

/// The handler for the scheme of `url`. `None`: it needs a [`Plan`](super::Plan).
pub(super) fn handler_of(url: &str) -> Option<Handler> {
    let (scheme, _) = url.split_once("://")?;
    match scheme {
        "file" => return Some(Arc::new(file::meet)),
        #[cfg(feature = "mpi")]
        "mpi" => return Some(Arc::new(super::mpi::meet)),
        #[cfg(not(feature = "mpi"))]
        "mpi" => return Some(Arc::new(|url, _| Err(invalid(url, mpi::NOT_BUILT.to_owned())))),
        _ => {}
    }
    HANDLERS.read().unwrap_or_else(PoisonError::into_inner).get(scheme).cloned()
}
