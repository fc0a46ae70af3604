//! The suite that the library's own transports pass.

use std::time::Duration;

use drumline::Config;
use drumline_conformance::{Extent, Program, Threads, run};

fn hub() -> Threads {
    hub_backend::register().unwrap();
    let timeout = Duration::from_secs(60);
    Threads::new("hub", Config::default().backend("hub").timeout(timeout))
}

#[test]
fn every_operation_type_and_operator() {
    if let Err(problem) = run(&hub(), &[1, 2, 3, 5, 8], Extent::Small) {
        panic!("{problem}");
    }
}

#[test]
fn random_programs_of_groups_calls_and_messages() {
    for seed in 0..30 {
        if let Err(problem) = Program::draw(seed).run(&hub(), false) {
            panic!("{problem}");
        }
    }
}
