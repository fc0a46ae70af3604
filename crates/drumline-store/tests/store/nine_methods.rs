//! What a store with the required methods alone can do.

use std::sync::Arc;

use drumline_store::store::{PrefixStore, Store};

use drumline_testing::Least;

use crate::semantics::semantics_of_the_required;

#[test]
fn nine_methods_make_a_store() {
    semantics_of_the_required(&Least::default());
    semantics_of_the_required(&PrefixStore::new("a/b", Arc::new(Least::default())));
}

#[test]
fn what_cannot_be_made_of_them_is_an_error_that_names_the_store() {
    let store = Least::default();
    for error in [
        store.append("key", b"").unwrap_err(),
        store.list_keys().unwrap_err(),
        store.num_keys().unwrap_err(),
        store.queue_push("key", b"").unwrap_err(),
        store.queue_pop("key").unwrap_err(),
        store.queue_try_pop("key").unwrap_err(),
        store.queue_len("key").unwrap_err(),
    ] {
        assert!(error.to_string().contains("Least"), "{error}");
    }
}
