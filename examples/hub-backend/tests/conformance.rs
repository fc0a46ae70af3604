//! The suite that the library's own transports pass.

#![allow(clippy::unwrap_used, clippy::panic)]

use drumline::Config;
use drumline_conformance::{Extent, Threads, run};

#[test]
fn every_operation_type_and_operator() {
    hub_backend::register().unwrap();
    let config = Config { backend: Some("hub".into()), ..Config::default() };
    if let Err(problem) = run(&Threads::new("hub", config), &[1, 2, 3, 5, 8], Extent::Small) {
        panic!("{problem}");
    }
}
