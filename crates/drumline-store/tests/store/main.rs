//! One suite of store semantics, over every store, and beside torch.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod doors;
#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod handshake;
mod kinds;
mod model;
mod nine_methods;
mod protocol;
mod recorded;
mod relay;
mod secured;
mod semantics;
mod tcp;
mod torch;

use std::{sync::Arc, time::Duration};

use drumline_store::store::{HashStore, PrefixStore, Store};
use proptest::prelude::*;

use self::{
    kinds::{Subject, stores},
    model::{Model, Operation, on_store, operation},
    semantics::semantics,
};

/// No test here takes that long unless something hangs.
const HANG: Duration = Duration::from_secs(60);

/// Shorter than anybody's patience, for waits that are to end in vain.
const SOON: Duration = Duration::from_millis(30);

#[test]
fn every_store_means_the_same() {
    for Subject { name, store, _keeper } in stores() {
        println!("{name}");
        semantics(&*store);
    }
}

#[test]
fn prefixes_nest_and_keep_apart() {
    let whole = Arc::new(HashStore::new());
    let outer: Arc<dyn Store> = Arc::new(PrefixStore::new("outer", whole.clone()));
    let inner = PrefixStore::new("inner", Arc::clone(&outer));
    inner.set("key", b"1").unwrap();
    assert_eq!(whole.get("outer/inner/key").unwrap(), b"1");
    assert!(!outer.check(&["key"]).unwrap());
    inner.set_timeout(SOON);
    assert_eq!(whole.timeout(), SOON);
}

#[test]
fn a_sum_past_64_bits_is_refused() {
    for Subject { store, _keeper, .. } in stores() {
        store.add("n", i64::MAX).unwrap();
        let error = store.add("n", 1).unwrap_err().to_string();
        assert!(error.contains("64 bits"), "{error}");
        assert_eq!(store.add("n", 0).unwrap(), i64::MAX);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every store answers as plain maps would.
    #[test]
    fn stores_equal_a_model(operations in prop::collection::vec(operation(), 1..60)) {
        for Subject { name, store: original, _keeper } in stores() {
            original.set_timeout(Duration::ZERO);
            let mut store = Arc::clone(&original);
            let mut model = Model::default();
            for operation in &operations {
                if let Operation::Clone = operation {
                    store = Arc::from(store.try_clone().unwrap());
                    continue;
                }
                let answer = on_store(&*store, operation);
                let expected = model.answer(operation);
                prop_assert_eq!(answer, expected, "{}: {:?}", name, operation);
            }
        }
    }
}
