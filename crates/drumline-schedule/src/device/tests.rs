//! All interleavings of several ranks, whose actors take any time that they like.

use std::collections::{HashSet, VecDeque};

use super::*;
use Action::{CopyIn, CopyOut, Reduce};

/// The ranks of one host, each with its pipeline.
type World = Vec<Pipeline>;

/// Explores all that can happen to `ranks` ranks with `windows` windows each. Returns what goes wrong first.
fn explore(pipeline: &Pipeline, ranks: usize, windows: u64) -> Result<usize, String> {
    let mut first = pipeline.clone();
    first.add(windows);
    let start: World = vec![first; ranks];
    let mut seen = HashSet::from([start.clone()]);
    let mut queue = VecDeque::from([start]);
    while let Some(world) = queue.pop_front() {
        let next = successors(&world)?;
        if next.is_empty() && !world.iter().all(Pipeline::is_idle) {
            return Err(format!("nobody can go on: {world:?}"));
        }
        queue.extend(next.into_iter().filter(|world| seen.insert(world.clone())));
    }
    Ok(seen.len())
}

fn successors(world: &World) -> Result<Vec<World>, String> {
    let mut all = Vec::new();
    for (rank, pipeline) in world.iter().enumerate() {
        for action in Action::ALL {
            let mut next = world.clone();
            if let Some(window) = next[rank].begin(action) {
                check(world, rank, action, window)?;
                all.push(next);
            }
            let at = action as usize;
            let window = pipeline.ended[at];
            let may_end = pipeline.begun[at] > window
                && (action != Reduce || world.iter().all(|it| it.begun[at] > window));
            if may_end {
                let mut next = world.clone();
                next[rank].end(action);
                all.push(next);
            }
        }
    }
    Ok(all)
}

/// What must hold when an action begins, whatever the rules say.
fn check(world: &World, rank: usize, action: Action, window: u64) -> Result<(), String> {
    let own = &world[rank];
    let has_ended =
        |pipeline: &Pipeline, action: Action, window: u64| pipeline.ended[action as usize] > window;
    let is_right = match action {
        // Whatever the slot held before, every rank has read it.
        CopyOut => {
            let before = window.checked_sub(own.slots);
            before.is_none_or(|before| world.iter().all(|it| has_ended(it, CopyIn, before)))
        }
        // Neighbours read the slot as soon as all have called.
        Reduce => has_ended(own, CopyOut, window),
        // Neighbours have summed their slices.
        CopyIn => has_ended(own, Reduce, window),
    };
    match is_right {
        true => Ok(()),
        false => {
            Err(format!("rank {rank} begins {action:?} of window {window} too early: {world:?}"))
        }
    }
}

#[test]
fn no_interleaving_reads_early_writes_early_or_stops() {
    for (slots, lag) in [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3)] {
        let states = explore(&Pipeline::new(slots, lag), 2, 2 * slots as u64 + 1).unwrap();
        assert!(states > 100, "{states}");
    }
    explore(&Pipeline::new(3, 1), 3, 5).unwrap();
    explore(&Pipeline::new(4, 2), 1, 20).unwrap();
}

/// What the check is for: an error in any rule is found.
#[test]
fn every_error_in_a_rule_is_found() {
    let (slots, lag) = (4, 2);
    let found = |rules: [Rule; 4]| explore(&Pipeline::with(rules, slots), 2, 9).is_err();
    let right = Pipeline::rules(slots, lag);
    assert!(!found(right));
    let mut planted = 0;
    for at in 0..right.len() {
        // A rule that is forgotten: it waits for a window that was over long ago. And rules that look at the
        // window before, or at the one before that. One that looks further ahead than it must waits for itself.
        for distance in [-1_000, right[at].distance - 1, right[at].distance - 2] {
            let mut wrong = right;
            wrong[at].distance = distance;
            assert!(found(wrong), "{:?} for {:?}", wrong[at], right[at]);
            planted += 1;
        }
    }
    let mut waits_for_itself = right;
    waits_for_itself[3] = Rule { action: CopyIn, after: Reduce, distance: lag as i64 };
    assert!(found(waits_for_itself));
    assert_eq!(planted, 12);
}
