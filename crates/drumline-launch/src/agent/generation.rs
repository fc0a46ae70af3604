//! Tells the jobs apart that have run with one name in one file or one etcd.
//!
//! A job that is over leaves its plan there, so that a host that was cut off hears how it ended. A launcher that comes
//! for the first time and finds such a plan begins the next generation, with keys of its own.

use drumline::Result;

use super::{
    keys::{BEAT, COUNT, HOST, PLAN, REPORT, WORLD, key},
    signed::Signed,
};
use crate::membership::{Phase, Plan, Value as _};

const GENERATION: &str = "generation";

/// From now on all keys are those of this generation.
pub(super) fn enter(store: &mut Signed, generation: u64) {
    store.enter(format!("{generation}/"));
}

/// The generation of the job that runs, or that is to run: the next one, if the last one is over.
pub(super) fn current(store: &mut Signed) -> Result<u64> {
    loop {
        store.enter(String::new());
        let text = store.read(&[GENERATION.to_owned()])?.pop().flatten();
        let number = |text: &Vec<u8>| std::str::from_utf8(text).ok()?.parse::<u64>().ok();
        let generation = text.as_ref().and_then(number).unwrap_or(0);
        enter(store, generation);
        let plan = store.read(&[PLAN.to_owned()])?.pop().flatten();
        // A plan that cannot be read is told where it is followed.
        let plan = plan.and_then(|plan| Plan::decode(PLAN, &plan).ok());
        if !plan.is_some_and(|plan| matches!(plan.phase, Phase::Over(_))) {
            return Ok(generation);
        }
        store.enter(String::new());
        let next = (generation + 1).to_string();
        if store.replace(GENERATION, text.as_deref(), next.as_bytes())? {
            // Hosts of the last one may still read how it ended; none reads the one before.
            if let Some(old) = generation.checked_sub(1) {
                enter(store, old);
                remove(store)?;
            }
            return Ok(generation + 1);
        }
    }
}

/// Removes all values of the generation that was entered.
fn remove(store: &Signed) -> Result<()> {
    let plan = store.read(&[PLAN.to_owned()])?.pop().flatten();
    let plan = plan.and_then(|plan| Plan::decode(PLAN, &plan).ok());
    let worlds = plan.map_or(0, |plan| plan.world);
    for host in 1..=u64::try_from(store.add(COUNT, 0)?).unwrap_or(0) {
        for kind in [HOST, REPORT, BEAT] {
            store.remove(&key(kind, host))?;
        }
    }
    for world in 1..=worlds {
        store.remove(&key(WORLD, world))?;
    }
    store.remove(COUNT)?;
    store.remove(PLAN)
}

#[cfg(test)]
mod tests {
    use drumline::{
        auth::Secret,
        store::{HashStore, Store as _},
    };

    use super::*;
    use crate::membership::Verdict;

    #[test]
    fn a_job_that_is_over_makes_room_for_the_next_one_of_its_name() {
        let keys = HashStore::new();
        let secret = Secret::random().unwrap();
        let open = || Signed::over(keys.try_clone().unwrap(), secret.clone(), "job/".into());
        let plan = |phase| Plan { version: 1, leader: 1, world: 1, phase, ..Plan::default() };
        let mut store = open();
        for generation in 0..4 {
            for _ in 0..2 {
                assert_eq!(current(&mut open()).unwrap(), generation);
            }
            enter(&mut store, generation);
            store.add(COUNT, 1).unwrap();
            store.set("host/1", b"who").unwrap();
            store.set(PLAN, &plan(Phase::Running).encode()).unwrap();
            assert_eq!(current(&mut open()).unwrap(), generation, "it still runs");
            store.set(PLAN, &plan(Phase::Over(Verdict::Finished)).encode()).unwrap();
        }
        // Of all but the last two, nothing is left.
        assert_eq!(current(&mut open()).unwrap(), 4);
        let left = keys.list_keys().unwrap();
        assert!(
            left.iter().all(|key| key.starts_with("job/3/") || key == "job/generation"),
            "{left:?}"
        );
    }
}
