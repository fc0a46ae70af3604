//! Random programs over the library's own transports.

use std::time::Duration;

use drumline_conformance::{Part, Program, Threads};

/// The seed of one program, to run it alone and see what it does.
const SEED: &str = "DRUMLINE_PROGRAM";

const PROGRAMS: u64 = if cfg!(feature = "nightly") { 5_000 } else { 60 };

fn run(seeds: impl Iterator<Item = u64>, trace: bool) {
    for seed in seeds {
        let program = Program::draw(seed);
        for world in Threads::everywhere() {
            // Who waits for ever is an error soon.
            let world = world.with(|config| config.timeout = Duration::from_secs(60));
            if let Err(problem) = program.run(&world, trace) {
                let test = "cargo test -p drumline-conformance programs -- --nocapture";
                panic!("{problem}\nreplay: {SEED}={seed} {test}");
            }
        }
    }
}

#[test]
fn programs_of_groups_calls_and_messages_give_what_the_oracle_gives() {
    match std::env::var(SEED).map(|seed| seed.parse()) {
        Ok(Ok(seed)) => run([seed].into_iter(), true),
        Ok(Err(error)) => panic!("{SEED} is the number of a program: {error}"),
        Err(_) => {
            let part = Part::from_env().unwrap_or_else(|problem| panic!("{problem}"));
            run(part.of((0..PROGRAMS).collect()).into_iter(), false);
        }
    }
}
