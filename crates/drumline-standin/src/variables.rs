//! Variables of the environment, which a test may override without touching the environment.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

static OVERRIDES: Mutex<BTreeMap<String, Option<String>>> = Mutex::new(BTreeMap::new());

/// What a variable is: the test's word, or the environment's.
pub(crate) fn variable(name: &str) -> Option<String> {
    let overrides = OVERRIDES.lock().unwrap_or_else(PoisonError::into_inner);
    overrides.get(name).cloned().unwrap_or_else(|| std::env::var(name).ok())
}

/// None: as if it were not set.
pub(crate) fn override_variable(name: &str, value: Option<String>) {
    OVERRIDES.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), value);
}

pub(crate) fn forget_overrides() {
    OVERRIDES.lock().unwrap_or_else(PoisonError::into_inner).clear();
}
