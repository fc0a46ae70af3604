//! Who uses the store of a start-up, and what goes wrong with it.

use drumline::store::tcp::protocol::{Key, Request, STOP_WAITING, Value};
use fastrand::Rng;

use super::{
    programs,
    script::{Bytes, Op, Script, Want},
};
use crate::{
    network::{Nanos, Quality},
    plan::{self, MS, SECOND, TIMEOUT},
};

/// A start-up.
#[derive(Debug)]
pub(super) struct Plan {
    /// Those of the ranks first.
    pub(super) scripts: Vec<Script>,
    pub(super) ranks: usize,
    /// What keeps the job from beginning.
    pub(super) fault: Option<(Nanos, Fault)>,
    /// When the connections of others break.
    pub(super) cuts: Vec<(Nanos, usize)>,
    /// When the host of the store is stopped, and for how long.
    pub(super) host_stops: Option<(Nanos, Nanos)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    HostCrash,
    /// The host of the store is cut off. Keep-alives notice after so long.
    HostSilent(Nanos),
    RankCrash(usize),
    RankCut(usize),
}

impl Plan {
    /// The start-up of `job`. In one of eight something is wrong that the job cannot survive.
    pub(super) fn new(rng: &mut Rng, job: &plan::Plan) -> Plan {
        let ranks = match job.world_size {
            // Everybody reads a card of everybody: many ranks cost much.
            7..=16 if rng.u8(0..4) > 0 => 0,
            17.. if rng.u8(0..16) > 0 => 0,
            ranks => ranks,
        };
        let mut scripts: Vec<_> = (0..ranks).map(|rank| start_up(rng, job, rank)).collect();
        let mut cuts = Vec::new();
        for number in 0..rng.usize(0..=3) {
            if rng.u8(0..5) == 0 {
                cuts.push((moment(rng), scripts.len()));
            }
            scripts.push(programs::user(rng, number, job));
        }
        if rng.u8(0..4) == 0 {
            scripts.extend(programs::workers(rng, job));
        }
        for number in 0..rng.usize(0..=2) {
            scripts.push(programs::stranger(rng, number, job));
        }
        if rng.u8(..) == 0 {
            scripts.push(programs::glutton(rng, job));
        }
        let fault = (ranks > 0 && rng.u8(0..8) == 0).then(|| {
            let fault = match rng.u8(0..4) {
                0 => Fault::HostCrash,
                1 => Fault::HostSilent(rng.u64(SECOND..3 * SECOND)),
                2 => Fault::RankCrash(rng.usize(0..ranks)),
                _ => Fault::RankCut(rng.usize(0..ranks)),
            };
            (moment(rng), fault)
        });
        let host_stops = (rng.u8(0..6) == 0).then(|| (moment(rng), rng.u64(MS..SECOND)));
        Plan { scripts, ranks, fault, cuts, host_stops }
    }
}

/// Early or late: of any magnitude.
pub(super) fn moment(rng: &mut Rng) -> Nanos {
    let most = 20_000 << rng.u32(0..12);
    rng.u64(1_000..most)
}

pub(super) fn script(rng: &mut Rng, name: String, job: &plan::Plan, ops: Vec<Op>) -> Script {
    let wire = if rng.bool() { job.near } else { job.far };
    // A window of 32 bytes over a slow wire would take longer than anybody waits.
    let quality = Quality { capacity: wire.capacity.max(256), ..wire };
    let knows_extensions = rng.u8(0..4) > 0;
    Script { name, quality, starts_at: rng.u64(0..MS), ops, knows_extensions, persists: false }
}

/// What a rank does from `rendezvous` to the end of `ProcessGroup::connect`.
fn start_up(rng: &mut Rng, job: &plan::Plan, rank: usize) -> Script {
    let world_size = job.world_size;
    let one = 1_i64.to_le_bytes();
    let add = |key: String| Op::ask(&[Request::Add(Key(key.as_bytes()), 1)], TIMEOUT);
    let mut ops = Vec::new();
    if !job.launched {
        ops.push(add(format!("/drumline/rank/{rank}")).expecting(&one));
    }
    let all = world_size as i64;
    let (key, patience) = (Bytes(b"init/".to_vec()), TIMEOUT);
    ops.push(Op::Join { key, all, looks: rank == 0 && !job.launched, patience });
    let proposal = [rank as u8; 32];
    let secret = Request::CompareSet(Key(b"/drumline/secret"), Value(b""), Value(&proposal));
    ops.push(Op::ask(&[secret], TIMEOUT));
    let groups = if world_size > 6 { 1 } else { job.groups.len() };
    for group in 0..groups {
        ops.push(add(format!("/drumline/{group}/joins/{rank}")).expecting(&one));
        let life = |key: &str| format!("/drumline/{group}/1/{key}");
        let set = |name: &str, value: &str| set(&life(name), value.as_bytes());
        let get = |name: &str, value: &str| Op::Wait {
            keys: vec![Bytes(life(name).into_bytes())],
            wants: Want::Values,
            expected: Some(Bytes(value_on_wire(value.as_bytes()))),
            patience: TIMEOUT,
        };
        let token = format!("token of {group}");
        let of = |kind: &str, rank: usize| (format!("{kind}/{rank}"), format!("{kind} of {rank}"));
        let tell = |kind: &str| {
            let (name, value) = of(kind, rank);
            set(&name, &value)
        };
        let hear = |kind: &str, rank: usize| {
            let (name, value) = of(kind, rank);
            get(&name, &value)
        };
        ops.push(if rank == 0 { set("token", &token) } else { get("token", &token) });
        if world_size > 1 {
            ops.push(tell("card"));
            let near = |other: usize| other != rank && job.same_host(rank, other);
            let far = |other: usize| !job.same_host(rank, other);
            let others = || (0..world_size).filter(move |other| *other != rank);
            ops.extend(others().map(|other| hear("card", other)));
            if (rank + 1..world_size).any(far) {
                ops.push(tell("address"));
            }
            ops.extend((0..rank).filter(|other| far(*other)).map(|other| hear("address", other)));
            ops.push(tell("segment"));
            ops.extend(others().filter(|other| near(*other)).map(|other| hear("segment", other)));
            // The host of a rank is the first rank on it.
            let host = |rank: usize| {
                (0..world_size).find(|other| job.same_host(rank, *other)).unwrap_or(rank)
            };
            ops.push(set(&format!("host/{rank}"), &host(rank).to_string()));
            ops.extend((0..world_size).map(|it| get(&format!("host/{it}"), &host(it).to_string())));
        }
    }
    let leave = Request::Barrier(Key(b"/drumline/leave"), all);
    ops.push(Op::ask(&[leave], TIMEOUT).expecting(&[STOP_WAITING]));
    script(rng, format!("rank {rank}"), job, ops)
}

/// SET has no reply: the echo behind it tells that it is done.
fn set(key: &str, value: &[u8]) -> Op {
    let set = Request::Set(Key(key.as_bytes()), Value(value));
    Op::ask(&[set, Request::Ping(7)], TIMEOUT).expecting(&7_u32.to_le_bytes())
}

fn value_on_wire(value: &[u8]) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value].concat()
}
