//! Clients of the store that are no ranks: programs with calls of any kind, and strangers.

use drumline_store::store::tcp::protocol::{Key, MAGIC, Request, Value};
use fastrand::Rng;

use super::{
    action::{Action, Bytes, Want},
    script::{Script, moment},
};
use crate::{network::LinkQuality, scenario::Scenario, time::TIMEOUT};

/// A program that makes any calls. It may die in the middle of one.
pub(super) fn user(rng: &mut Rng, number: usize, job: &Scenario) -> Script {
    let mut actions: Vec<_> = (0..rng.usize(2..16)).map(|_| call(rng)).collect();
    if rng.u8(0..4) == 0 {
        actions.push(die(rng));
    }
    let mut script = Script::new(rng, format!("user {number}"), job, actions);
    script.persists = rng.u8(0..4) > 0;
    script
}

/// A stranger, which sends bytes that no client sends.
pub(super) fn stranger(rng: &mut Rng, number: usize, job: &Scenario) -> Script {
    let actions = vec![Action::Shout { bytes: Bytes(noise(rng)), linger: moment(rng) }];
    Script::new(rng, format!("stranger {number}"), job, actions)
}

/// Workers, which wait for the items of one queue, and the foreman that pushes the items.
pub(super) fn workers(rng: &mut Rng, job: &Scenario) -> Vec<Script> {
    let tasks = Key(b"/tasks");
    let patience = moment(rng);
    let take = Action::Wait {
        keys: vec![Bytes(tasks.0.to_vec())],
        wants: Want::Item,
        // With the shorter one, items arrive just when workers give up.
        patience: if rng.bool() { patience } else { 10 * patience },
    };
    let items = rng.usize(1..4);
    let names = (0..rng.usize(2..4)).map(|number| format!("worker {number}"));
    let names: Vec<_> = names.collect();
    let mut scripts: Vec<_> = names
        .into_iter()
        .map(|name| Script::new(rng, name, job, vec![take.clone(); items]))
        .collect();
    let hand_out = (0..items).flat_map(|item| {
        let push = Request::QueuePush(tasks, Value(&[item as u8]));
        [Action::Pause(patience), Action::ask(&[push, Request::QueueLen(tasks)], TIMEOUT)]
    });
    scripts.push(Script::new(rng, "foreman".to_owned(), job, hand_out.collect()));
    scripts
}

/// A program that asks for longer replies than the store keeps for a connection.
pub(super) fn glutton(rng: &mut Rng, job: &Scenario) -> Script {
    let value = vec![rng.u8(..); 1 << 20];
    let key = Key(b"/large");
    let much = [Request::Set(key, Value(&value)), Request::MultiGet(vec![key; 33])];
    let mut actions = vec![Action::ask(&much, TIMEOUT)];
    actions.push(Action::ask(&[Request::DeleteKey(key), Request::Check(vec![key])], TIMEOUT));
    let mut script = Script::new(rng, "glutton".to_owned(), job, actions);
    script.quality =
        LinkQuality { capacity: 1 << 20, ns_per_byte: 0, stalls_percent: 0, ..job.near };
    script.persists = true;
    script
}

/// Few keys, so that programs use the same ones.
const KEYS: [&[u8]; 4] = [b"/a", b"/b", b"/c", b""];

fn key(rng: &mut Rng) -> Key<'static> {
    Key(KEYS[rng.usize(0..KEYS.len())])
}

fn keys(rng: &mut Rng) -> Vec<Key<'static>> {
    (0..rng.usize(0..4)).map(|_| key(rng)).collect()
}

/// A value, which often is a number.
fn bytes(rng: &mut Rng) -> Vec<u8> {
    match rng.u8(0..16) {
        0 => Vec::new(),
        1 => vec![rng.u8(..); rng.usize(0..2000)],
        2 => i64::MAX.to_string().into_bytes(),
        3..=8 => rng.i64(-9..99).to_string().into_bytes(),
        _ => (0..rng.usize(1..12)).map(|_| rng.u8(..)).collect(),
    }
}

/// One call of a program that makes any.
fn call(rng: &mut Rng) -> Action {
    let patience = moment(rng);
    match rng.u8(0..13) {
        0 => Action::Pause(patience / 4),
        1..=3 => {
            let keys: Vec<_> = keys(rng).iter().map(|key| Bytes(key.0.to_vec())).collect();
            let wants = match (rng.u8(0..4), keys.len()) {
                (0, _) | (_, 0) => Want::Nothing,
                (1, 1) => Want::Item,
                _ => Want::Values,
            };
            Action::Wait { keys, wants, patience }
        }
        4 => Action::ask(&[wait(rng)], patience),
        5 => Action::ask(&[wait(rng), Request::CancelWait()], TIMEOUT),
        6 => {
            // A client that waits for both values never sees them together.
            let [passing, staying] = [key(rng), key(rng)];
            let set = |key| Request::Set(key, Value(b"1"));
            Action::ask(&[set(passing), Request::DeleteKey(passing), set(staying)], TIMEOUT)
        }
        _ => {
            let values: Vec<_> = (0..12).map(|_| bytes(rng)).collect();
            let count = if rng.u8(0..4) == 0 { rng.usize(2..6) } else { 1 };
            let several: Vec<_> = (0..count)
                .flat_map(|at| {
                    let request = request(rng, [&values[2 * at], &values[2 * at + 1]]);
                    [request, Request::Ping(rng.u32(..))]
                })
                .collect();
            Action::ask(&several, TIMEOUT)
        }
    }
}

fn barrier(rng: &mut Rng) -> Key<'static> {
    match rng.u8(0..8) {
        0 => key(rng),
        _ => Key(b"/barrier"),
    }
}

/// A request that is answered when something happens.
fn wait(rng: &mut Rng) -> Request<'static> {
    match rng.u8(0..4) {
        0 => Request::Wait(keys(rng)),
        1 => Request::Fetch(keys(rng)),
        2 => Request::Take(key(rng)),
        _ => Request::Barrier(barrier(rng), rng.i64(0..4)),
    }
}

/// A request that is answered at once.
fn request<'v>(rng: &mut Rng, values: [&'v [u8]; 2]) -> Request<'v> {
    let key = key(rng);
    let [one, other] = values.map(Value);
    match rng.u8(0..16) {
        0 => Request::Set(key, one),
        1 => Request::CompareSet(key, one, other),
        2 => Request::CompareSet(key, Value(b""), other),
        3 => Request::Get(key),
        // Adding to a text costs the connection, so it must be rare.
        4 if rng.u8(0..4) == 0 => Request::Add(key, rng.i64(-3..9)),
        4 | 5 => Request::Add(Key(b"/number"), rng.i64(-3..9)),
        6 => Request::Check(keys(rng)),
        7 => Request::GetNumKeys(),
        8 => Request::DeleteKey(key),
        9 => Request::Append(key, one),
        10 => Request::MultiGet(keys(rng)),
        11 => Request::MultiSet(keys(rng).into_iter().map(|key| (key, one)).collect()),
        12 | 13 => Request::QueuePush(key, one),
        14 => Request::QueuePop(key),
        _ if rng.bool() => Request::ListKeys(),
        _ => Request::QueueLen(key),
    }
}

/// Dying in the middle of a request, or while waiting.
fn die(rng: &mut Rng) -> Action {
    let mut bytes = Vec::new();
    wait(rng).encode(&mut bytes);
    if rng.bool() {
        bytes.truncate(rng.usize(0..bytes.len()));
    }
    Action::Die { bytes: Bytes(bytes) }
}

/// Bytes that no client of a store sends.
fn noise(rng: &mut Rng) -> Vec<u8> {
    let mut bytes = Vec::new();
    let valid = Request::Validate(MAGIC);
    match rng.u8(0..8) {
        0 => return (0..rng.usize(0..300)).map(|_| rng.u8(..)).collect(),
        1 => return b"GET / HTTP/1.1\r\nHost: store\r\n\r\n".to_vec(),
        2 => Request::Validate(rng.u32(..)).encode(&mut bytes),
        3 => {
            valid.encode(&mut bytes);
            bytes.truncate(rng.usize(0..bytes.len()));
        }
        4 => {
            valid.encode(&mut bytes);
            bytes.extend((0..rng.usize(1..300)).map(|_| rng.u8(..)));
        }
        5 => {
            // The largest length there is.
            valid.encode(&mut bytes);
            bytes.push(if rng.bool() { rng.u8(1..19) } else { rng.u8(208..210) });
            bytes.extend(u64::MAX.to_le_bytes());
        }
        6 => {
            let never = vec![Key(b"/never"), key(rng)];
            let waits = [Request::Wait(never.clone()), Request::Fetch(never), wait(rng)];
            valid.encode(&mut bytes);
            (0..2).for_each(|_| waits[rng.usize(0..3)].encode(&mut bytes));
        }
        _ => {
            let requests = [
                valid,
                Request::Set(Key(b"/text"), Value(b"no number")),
                Request::QueuePush(key(rng), Value(b"from a stranger")),
                Request::Add(Key(b"/text"), 1),
                Request::DeleteKey(Key(b"/drumline/secret")),
            ];
            requests.iter().for_each(|request| request.encode(&mut bytes));
        }
    }
    bytes
}
