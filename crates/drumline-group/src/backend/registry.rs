//! The backends that are known in this process.

use std::{
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use drumline_engine::{
    membership::Membership,
    panics::panic_text,
    start_up::{board::Subject, card::Card},
};
use drumline_store::store::PrefixStore;

use super::{
    guard::Guards,
    interface::{Backend, BackendOptions},
    mpi::{self, MPI},
};
use crate::{
    Config, Error, Result,
    available::is_mpi_available,
    board::Board,
    error::{not_connected, not_connected_to},
    trace::GroupTrace,
    trace::Inquiry,
};

/// The name of the library's own transports.
pub const BUILT_IN: &str = "drumline";

/// Stands for the best backend for the memory of the buffers. For memory of the CPU there is one.
const AUTO: &str = "auto";

/// The names that a program cannot register.
const RESERVED: [&str; 4] = ["", BUILT_IN, AUTO, MPI];

type Make = dyn Fn(&BackendOptions) -> Result<Arc<dyn Backend>> + Send + Sync;

/// A registered backend: its name, and the function that makes it.
#[derive(Clone)]
pub(crate) struct Factory {
    pub(crate) name: Arc<str>,
    pub(crate) make: Arc<Make>,
}

impl fmt::Debug for Factory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Factory").field(&self.name).finish()
    }
}

impl Factory {
    /// Connects the ranks that have met on `board`.
    pub(crate) fn join(
        &self,
        board: &Board,
        member: &Membership,
        config: &Config,
        deadline: Instant,
        guards: Arc<dyn Guards>,
        (mut recorder, inquiry): (GroupTrace, Inquiry),
    ) -> Result<(Arc<dyn Backend>, GroupTrace)> {
        let phase = recorder.phase("connect");
        let own = Card::of_backend(&self.name);
        for (rank, card) in board.all_gather(Subject::Card, own.as_bytes())?.iter().enumerate() {
            Card::check_backend(card, &self.name)
                .map_err(|problem| not_connected_to(member, rank, &problem))?;
        }
        let store = PrefixStore::new("backend", Arc::new(board.store_of_life()));
        let options = BackendOptions {
            store: Arc::new(store),
            name: member.name.clone(),
            rank: member.rank,
            world_size: member.world_size,
            deadline,
            config: config.clone(),
            guards,
        };
        let made = catch_unwind(AssertUnwindSafe(|| (self.make)(&options)));
        let backend = made.unwrap_or_else(|panic| {
            let text = panic_text(&*panic);
            Err(not_connected(member, &format!("backend {:?} has panicked: {text}", self.name)))
        })?;
        drop(phase);
        recorder.align(&board.store_of_life(), inquiry)?;
        recorder.join(member);
        Ok((backend, recorder))
    }
}

static REGISTRY: Mutex<BTreeMap<String, Factory>> = Mutex::new(BTreeMap::new());

fn registry() -> MutexGuard<'static, BTreeMap<String, Factory>> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a backend under `name`, for [`Config::backend`](crate::Config::backend) and `DRUMLINE_BACKEND`.
/// Upper and lower case are the same. A later registration under the same name replaces an earlier one.
///
/// `factory` is called on every rank of every group that has this backend, once all ranks have met. It
/// connects the ranks. On all ranks it returns a backend, or an error that says what went wrong.
///
/// See the [module](super) for an example.
///
/// # Errors
///
/// [`Argument`](crate::ErrorKind::Argument) for a name that is empty or that the library uses itself.
pub fn register_backend(
    name: &str,
    factory: impl Fn(&BackendOptions) -> Result<Arc<dyn Backend>> + Send + Sync + 'static,
) -> Result<()> {
    let name = name.trim().to_lowercase();
    if RESERVED.contains(&&*name) {
        return Err(Error::argument(
            "register_backend",
            format!("{name:?} cannot be registered: choose another name"),
        ));
    }
    let factory = Factory { name: name.as_str().into(), make: Arc::new(factory) };
    registry().insert(name, factory);
    Ok(())
}

/// The names of all backends that this process knows. The library's own transports come first, then `mpi`,
/// whether or not the machine has an MPI library.
pub fn backends() -> Vec<String> {
    let own = [BUILT_IN, MPI].map(str::to_owned);
    own.into_iter().chain(registry().keys().cloned()).collect()
}

/// Whether groups can use a backend of that name, in upper or lower case. `mpi` is there if
/// an MPI library is found. torch's other names (`gloo`, `nccl`) count only if they are registered here.
pub fn is_backend_available(name: &str) -> bool {
    let name = name.trim().to_lowercase();
    match &*name {
        MPI => is_mpi_available(),
        _ => backends().contains(&name),
    }
}

/// The backend that a setting names. `None`: the library's own transports.
///
/// # Errors
///
/// [`Setting`](crate::ErrorKind::Setting) lists the known names.
pub(crate) fn find(setting: Option<&str>) -> Result<Option<Factory>> {
    let name = setting.unwrap_or(BUILT_IN).trim().to_lowercase();
    if [BUILT_IN, AUTO].contains(&&*name) {
        return Ok(None);
    }
    if name == MPI {
        return Ok(Some(Factory { name: MPI.into(), make: Arc::new(mpi::connect) }));
    }
    let found = registry().get(&name).cloned();
    found.map(Some).ok_or_else(|| {
        Error::setting(
            "backend (DRUMLINE_BACKEND)",
            format!(
                "{name:?} is not registered; there is {}, and {AUTO} for the best of them; \
             register_backend adds others",
                backends().join(", ")
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_up_in_any_case_and_the_last_one_counts() {
        let refusing = |text: &'static str| {
            move |options: &BackendOptions| Err(options.error(text.to_owned()))
        };
        register_backend("Registry-Test", refusing("first")).unwrap();
        register_backend("registry-test", refusing("second")).unwrap();
        let count = backends().iter().filter(|name| *name == "registry-test").count();
        assert_eq!(count, 1);
        assert!(is_backend_available("REGISTRY-test"));
        let config = crate::Config { backend: Some("Registry-TEST".into()), ..Default::default() };
        let error = crate::rendezvous::local_world_with(1, &config).unwrap_err().to_string();
        assert!(error.contains("second"), "{error}");
    }

    #[test]
    fn unknown_names_come_with_those_that_are_known() {
        let error = find(Some("nccl")).unwrap_err().to_string();
        assert!(error.contains("nccl") && error.contains("drumline"), "{error}");
        assert!(find(None).unwrap().is_none() && find(Some("AUTO")).unwrap().is_none());
        for name in ["", " ", "Drumline", "auto"] {
            let refused = register_backend(name, |options| Err(options.error(String::new())));
            assert!(refused.is_err(), "{name}");
        }
    }
}
