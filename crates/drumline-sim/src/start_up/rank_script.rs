//! The requests of a rank that starts up.
//!
//! They are written down here once more, because the code that sends them blocks. A test compares
//! them with the requests of real ranks.

#[cfg(test)]
mod tests;

use drumline_store::store::tcp::protocol::{Key, NOT_READY, Request, Value};
use fastrand::Rng;

use super::script::{Action, Bytes, Script, Want};
use crate::{scenario::Scenario, time::TIMEOUT};

/// What a rank asks from `rendezvous` to the end of `ProcessGroup::connect`.
pub(super) fn rank_script(rng: &mut Rng, job: &Scenario, rank: usize) -> Script {
    let world_size = job.world_size;
    let mut actions = meet(world_size, rank, job.launched);
    // With a launcher, ranks have the secret already.
    if !job.launched {
        let proposal = [rank as u8; 32];
        let secret = Request::CompareSet(Key(b"/drumline/secret"), Value(b""), Value(&proposal));
        actions.push(Action::ask(&[secret], TIMEOUT));
    }
    let groups = if world_size > 6 { 1 } else { job.groups.len() };
    let far = (0..world_size).any(|other| !job.same_host(rank, other));
    actions
        .extend((0..groups).flat_map(|group| connect(world_size, rank, &group.to_string(), far)));
    Script::new(rng, format!("rank {rank}"), job, actions)
}

/// How the ranks of a group are connected. With `far`, some are on other hosts.
fn connect(world_size: usize, rank: usize, group: &str, far: bool) -> Vec<Action> {
    let mut actions = join(world_size, rank, group);
    let subjects = ["card", "address", "segment", "host"].into_iter();
    for subject in subjects.filter(|subject| far || *subject != "address") {
        actions.extend(all_gather(world_size, rank, group, subject));
    }
    // The last rank to leave also deletes the board's keys, which is left out here.
    actions.push(ask(Request::Add(Key(life(group, "gone").as_bytes()), 1)));
    actions
}

/// How the ranks of a job find each other.
fn meet(world_size: usize, rank: usize, launched: bool) -> Vec<Action> {
    let all = world_size as i64;
    let join =
        |looks| Action::Join { key: Bytes(b"init/".to_vec()), all, looks, patience: TIMEOUT };
    if launched {
        return vec![join(false)];
    }
    let size = all.to_string();
    let mut actions = match rank {
        0 => vec![set("/drumline/world_size", size.as_bytes())],
        _ => wait_and_get("/drumline/world_size", size.as_bytes()),
    };
    let check = Request::Check(vec![Key(b"/drumline/complete")]);
    actions.push(ask(check).expecting(&[NOT_READY]));
    let own = format!("/drumline/rank/{rank}");
    actions.push(ask(Request::Add(Key(own.as_bytes()), 1)).expecting(&1_i64.to_le_bytes()));
    actions.push(join(rank == 0));
    if rank == 0 {
        actions.push(set("/drumline/complete", b""));
    }
    actions
}

/// How the ranks of a group meet on its board.
fn join(world_size: usize, rank: usize, group: &str) -> Vec<Action> {
    let joining = format!("/drumline/joining/{rank}");
    let key = |rank: usize| format!("/drumline/{group}/ticket/{rank}");
    let admitted = |rank: usize| format!("/drumline/{group}/admitted/{}", ticket(rank));
    let pairs = [(joining.clone(), group.to_owned()), (key(rank), ticket(rank))];
    let mut actions = vec![multi_set(&pairs)];
    if rank == 0 {
        actions.push(wait((0..world_size).map(key)));
        let swap = |rank: usize, expected: &str, desired: &str, after: &str| {
            let (key, [expected, desired]) = (key(rank), [expected, desired].map(str::as_bytes));
            ask(Request::CompareSet(Key(key.as_bytes()), Value(expected), Value(desired)))
                .expecting(&value_on_wire(after.as_bytes()))
        };
        for rank in 1..world_size {
            actions.push(swap(rank, "withdrawn", "withdrawn", &ticket(rank)));
            actions.push(swap(rank, &ticket(rank), &ticket(0), &ticket(0)));
        }
        let pairs = (1..world_size).map(|rank| (admitted(rank), ticket(0)));
        actions.push(multi_set(&pairs.collect::<Vec<_>>()));
    } else {
        actions.extend(wait_and_get(&admitted(rank), ticket(0).as_bytes()));
    }
    actions.extend([joining, key(rank), admitted(rank)].map(|key| delete(&key)));
    actions
}

/// How the ranks of a group exchange their words on a subject.
fn all_gather(world_size: usize, rank: usize, group: &str, subject: &str) -> Vec<Action> {
    if world_size == 1 {
        return Vec::new();
    }
    let key = |rank: usize| life(group, &format!("{subject}/{rank}"));
    let word = |rank: usize| format!("{subject} {rank}").into_bytes();
    let all = life(group, &format!("{subject}/all"));
    let roll = (0..world_size).flat_map(|rank| {
        let word = word(rank);
        [&(word.len() as u32).to_le_bytes(), &word[..]].concat()
    });
    let roll: Vec<u8> = std::iter::once(b'+').chain(roll).collect();
    if rank > 0 {
        let hear = wait_and_get(&all, &roll);
        return [vec![set(&key(rank), &word(rank))], hear, vec![delete(&key(rank))]].concat();
    }
    let words: Vec<u8> = (1..world_size).flat_map(|rank| value_on_wire(&word(rank))).collect();
    let get = Action::Wait {
        keys: (1..world_size).map(|rank| Bytes(key(rank).into_bytes())).collect(),
        wants: Want::Values,
        expected: Some(Bytes(words)),
        patience: TIMEOUT,
    };
    let call = Request::CompareSet(Key(all.as_bytes()), Value(b""), Value(&roll));
    vec![wait((1..world_size).map(key)), get, ask(call).expecting(&value_on_wire(&roll))]
}

/// Stands for the random number that a rank draws.
fn ticket(rank: usize) -> String {
    format!("number-of-{rank}")
}

fn life(group: &str, key: &str) -> String {
    format!("/drumline/{group}/{}/{key}", ticket(0))
}

fn ask(request: Request<'_>) -> Action {
    Action::ask(&[request], TIMEOUT)
}

fn delete(key: &str) -> Action {
    ask(Request::DeleteKey(Key(key.as_bytes())))
}

fn wait(keys: impl Iterator<Item = String>) -> Action {
    let keys = keys.map(|key| Bytes(key.into_bytes())).collect();
    Action::Wait { keys, wants: Want::Nothing, expected: None, patience: TIMEOUT }
}

fn wait_and_get(key: &str, value: &[u8]) -> Vec<Action> {
    let get = Action::Wait {
        keys: vec![Bytes(key.as_bytes().to_vec())],
        wants: Want::Values,
        expected: Some(Bytes(value_on_wire(value))),
        patience: TIMEOUT,
    };
    vec![wait(std::iter::once(key.to_owned())), get]
}

fn multi_set(pairs: &[(String, String)]) -> Action {
    let pairs = pairs.iter().map(|(key, value)| (Key(key.as_bytes()), Value(value.as_bytes())));
    tell(Request::MultiSet(pairs.collect()))
}

fn set(key: &str, value: &[u8]) -> Action {
    tell(Request::Set(Key(key.as_bytes()), Value(value)))
}

/// A request without a reply. The answer to the ping behind it shows that it was carried out.
fn tell(request: Request<'_>) -> Action {
    Action::ask(&[request, Request::Ping(7)], TIMEOUT).expecting(&7_u32.to_le_bytes())
}

fn value_on_wire(value: &[u8]) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value].concat()
}
