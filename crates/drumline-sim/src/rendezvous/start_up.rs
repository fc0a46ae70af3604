//! What a rank asks the store when it starts up.
//!
//! It is written down here once more, because the code that asks blocks. A test compares it with what
//! real ranks ask.

#[cfg(test)]
mod tests;

use drumline_store::store::tcp::protocol::{Key, NOT_READY, Request, Value};
use fastrand::Rng;

use super::{
    plan,
    script::{Bytes, Op, Script, Want},
};
use crate::plan::{Plan, TIMEOUT};

/// What a rank does from `rendezvous` to the end of `ProcessGroup::connect`.
pub(super) fn start_up(rng: &mut Rng, job: &Plan, rank: usize) -> Script {
    let world_size = job.world_size;
    let mut ops = meet(world_size, rank, job.launched);
    // A launcher hands out the secret.
    if !job.launched {
        let proposal = [rank as u8; 32];
        let secret = Request::CompareSet(Key(b"/drumline/secret"), Value(b""), Value(&proposal));
        ops.push(Op::ask(&[secret], TIMEOUT));
    }
    let groups = if world_size > 6 { 1 } else { job.groups.len() };
    let far = (0..world_size).any(|other| !job.same_host(rank, other));
    ops.extend((0..groups).flat_map(|group| connect(world_size, rank, &group.to_string(), far)));
    plan::script(rng, format!("rank {rank}"), job, ops)
}

/// How the ranks of a group are connected, some of which may be on other hosts.
fn connect(world_size: usize, rank: usize, group: &str, far: bool) -> Vec<Op> {
    let mut ops = join(world_size, rank, group);
    let subjects = ["card", "address", "segment", "host"].into_iter();
    for subject in subjects.filter(|subject| far || *subject != "address") {
        ops.extend(all_gather(world_size, rank, group, subject));
    }
    // The last one also wipes the board.
    ops.push(ask(Request::Add(Key(life(group, "gone").as_bytes()), 1)));
    ops
}

/// How the ranks of a job find each other.
fn meet(world_size: usize, rank: usize, launched: bool) -> Vec<Op> {
    let all = world_size as i64;
    let join = |looks| Op::Join { key: Bytes(b"init/".to_vec()), all, looks, patience: TIMEOUT };
    if launched {
        return vec![join(false)];
    }
    let size = all.to_string();
    let mut ops = match rank {
        0 => vec![set("/drumline/world_size", size.as_bytes())],
        _ => wait_and_get("/drumline/world_size", size.as_bytes()),
    };
    let check = Request::Check(vec![Key(b"/drumline/complete")]);
    ops.push(ask(check).expecting(&[NOT_READY]));
    let own = format!("/drumline/rank/{rank}");
    ops.push(ask(Request::Add(Key(own.as_bytes()), 1)).expecting(&1_i64.to_le_bytes()));
    ops.push(join(rank == 0));
    if rank == 0 {
        ops.push(set("/drumline/complete", b""));
    }
    ops
}

/// How the ranks of a group meet on its board.
fn join(world_size: usize, rank: usize, group: &str) -> Vec<Op> {
    let joining = format!("/drumline/joining/{rank}");
    let key = |rank: usize| format!("/drumline/{group}/ticket/{rank}");
    let admitted = |rank: usize| format!("/drumline/{group}/admitted/{}", ticket(rank));
    let pairs = [(joining.clone(), group.to_owned()), (key(rank), ticket(rank))];
    let mut ops = vec![multi_set(&pairs)];
    if rank == 0 {
        ops.push(wait((0..world_size).map(key)));
        let swap = |rank: usize, expected: &str, desired: &str, after: &str| {
            let (key, [expected, desired]) = (key(rank), [expected, desired].map(str::as_bytes));
            ask(Request::CompareSet(Key(key.as_bytes()), Value(expected), Value(desired)))
                .expecting(&value_on_wire(after.as_bytes()))
        };
        for rank in 1..world_size {
            ops.push(swap(rank, "withdrawn", "withdrawn", &ticket(rank)));
            ops.push(swap(rank, &ticket(rank), &ticket(0), &ticket(0)));
        }
        let pairs = (1..world_size).map(|rank| (admitted(rank), ticket(0)));
        ops.push(multi_set(&pairs.collect::<Vec<_>>()));
    } else {
        ops.extend(wait_and_get(&admitted(rank), ticket(0).as_bytes()));
    }
    ops.extend([joining, key(rank), admitted(rank)].map(|key| delete(&key)));
    ops
}

/// How the ranks of a group hear each other's word on a subject.
fn all_gather(world_size: usize, rank: usize, group: &str, subject: &str) -> Vec<Op> {
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
    let get = Op::Wait {
        keys: (1..world_size).map(|rank| Bytes(key(rank).into_bytes())).collect(),
        wants: Want::Values,
        expected: Some(Bytes(words)),
        patience: TIMEOUT,
    };
    let call = Request::CompareSet(Key(all.as_bytes()), Value(b""), Value(&roll));
    vec![wait((1..world_size).map(key)), get, ask(call).expecting(&value_on_wire(&roll))]
}

/// What stands for a number that nobody else draws.
fn ticket(rank: usize) -> String {
    format!("number-of-{rank}")
}

fn life(group: &str, key: &str) -> String {
    format!("/drumline/{group}/{}/{key}", ticket(0))
}

fn ask(request: Request<'_>) -> Op {
    Op::ask(&[request], TIMEOUT)
}

fn delete(key: &str) -> Op {
    ask(Request::DeleteKey(Key(key.as_bytes())))
}

fn wait(keys: impl Iterator<Item = String>) -> Op {
    let keys = keys.map(|key| Bytes(key.into_bytes())).collect();
    Op::Wait { keys, wants: Want::Nothing, expected: None, patience: TIMEOUT }
}

fn wait_and_get(key: &str, value: &[u8]) -> Vec<Op> {
    let get = Op::Wait {
        keys: vec![Bytes(key.as_bytes().to_vec())],
        wants: Want::Values,
        expected: Some(Bytes(value_on_wire(value))),
        patience: TIMEOUT,
    };
    vec![wait(std::iter::once(key.to_owned())), get]
}

fn multi_set(pairs: &[(String, String)]) -> Op {
    let pairs = pairs.iter().map(|(key, value)| (Key(key.as_bytes()), Value(value.as_bytes())));
    tell(Request::MultiSet(pairs.collect()))
}

fn set(key: &str, value: &[u8]) -> Op {
    tell(Request::Set(Key(key.as_bytes()), Value(value)))
}

/// What has no reply: the echo behind it says that it is done.
fn tell(request: Request<'_>) -> Op {
    Op::ask(&[request, Request::Ping(7)], TIMEOUT).expecting(&7_u32.to_le_bytes())
}

fn value_on_wire(value: &[u8]) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value].concat()
}
