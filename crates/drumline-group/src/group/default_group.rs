//! The groups that `init_process_group` has made in this process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{Inner, ProcessGroup};
use crate::{Error, Result};

/// Weak references, so that a group ends with its last handle.
static WORLDS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// The group that [`init_process_group`](crate::init_process_group) or
/// [`init_with_store`](crate::init_with_store) has made in this process, for code that is not given a group.
/// It keeps no group alive; the program that made the group must do so.
///
/// # Errors
///
/// [`Argument`](crate::ErrorKind::Argument) when this process has no such group, or several. It may have several if
/// ranks are threads of one process, and then the caller's group is unknown.
pub fn default_group() -> Result<ProcessGroup> {
    let problem = match &living(&mut worlds())[..] {
        [one] => return Ok(ProcessGroup::whole(one.clone())),
        [] => "call init_process_group first, and keep the group that it returns".to_owned(),
        several => format!(
            "init_process_group has made {} groups in this process; hand on the one that you mean",
            several.len()
        ),
    };
    Err(Error::argument("default_group", problem))
}

/// Whether this process has a group made by [`init_process_group`](crate::init_process_group) that is not
/// destroyed. See [`default_group`].
pub fn is_initialized() -> bool {
    !living(&mut worlds()).is_empty()
}

/// Makes `group` available to [`default_group`].
pub(super) fn remember(group: &ProcessGroup) {
    let mut worlds = worlds();
    living(&mut worlds);
    worlds.push(Arc::downgrade(&group.inner));
}

fn worlds() -> MutexGuard<'static, Vec<Weak<Inner>>> {
    WORLDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The groups that live and are not destroyed. Forgets the others.
fn living(worlds: &mut Vec<Weak<Inner>>) -> Vec<Arc<Inner>> {
    let there = |world: &Weak<Inner>| world.upgrade().filter(|group| group.family().is_some());
    let living: Vec<Arc<Inner>> = worlds.iter().filter_map(there).collect();
    *worlds = living.iter().map(Arc::downgrade).collect();
    living
}
