//! Draws a history: everything follows from the seed.

use std::{num::NonZeroUsize, time::Duration};

use drumline_launch::{
    Ending, Hosts, Joining, Restarts,
    membership::{Host, Terms, Timing},
};
use fastrand::Rng;

use super::{clock::Clock, network::Network};
use crate::time::{MS, Nanos, SECOND};

/// What happens in a history, and when.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) terms: Terms,
    pub(super) timing: Timing,
    pub(super) machines: Vec<Machine>,
    pub(super) network: Network,
    pub(super) faults: Vec<(Nanos, Fault)>,
    /// From here on nothing goes wrong any more.
    pub(super) quiet_at: Nanos,
    /// By now all launchers must have ended.
    pub(super) deadline: Nanos,
    pub(super) program: Program,
    /// How many of the keepers of each host do something. All of them, but in a test.
    pub(super) keepers: usize,
}

/// How many keepers stand between a launcher and its ranks. The last of them is the parent of the ranks.
pub(super) const KEEPERS: usize = 3;

/// Some processes of a machine.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Who {
    pub(super) launcher: bool,
    pub(super) keepers: [bool; KEEPERS],
    pub(super) ranks: bool,
}

impl Who {
    const ALL: Who = Who { launcher: true, keepers: [true; KEEPERS], ranks: true };

    /// One process or several, but not all that guard the ranks, or all of the machine.
    fn draw(rng: &mut Rng) -> Who {
        if rng.u8(0..4) == 0 {
            return Who::ALL;
        }
        let spared = rng.usize(0..=KEEPERS);
        let mut keepers = [false; KEEPERS];
        for (at, keeper) in keepers.iter_mut().enumerate() {
            *keeper = at != spared && rng.bool();
        }
        Who { launcher: spared != KEEPERS && rng.bool(), keepers, ranks: rng.u8(0..4) == 0 }
    }
}

/// A machine, and the launcher that is started on it.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) host: Host,
    pub(super) clock: Clock,
    pub(super) starts_at: Nanos,
}

/// What the workers do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Program {
    /// How long a world takes from the moment when all its workers run.
    pub(super) lasts: Nanos,
    /// Whether it calls `step`.
    pub(super) steps: bool,
    /// In how many of 100 cases a worker fails when it loses a peer.
    pub(super) reacts_percent: u32,
    /// Workers go on when others die, while so many are left.
    pub(super) regroups: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The machine loses its power. A launcher starts anew after this time.
    Crash { machine: usize, again: Option<Nanos> },
    /// Some processes of the machine stop for a while.
    Stop { machine: usize, lasts: Nanos, who: Who },
    /// Some of its keepers are killed at once, or its launcher, or both. A launcher starts anew after this time.
    Kill { machine: usize, who: Who, again: Option<Nanos> },
    /// The machine does not reach the store for a while.
    Cut { machine: usize, lasts: Nanos },
    /// Nobody reaches the store for a while.
    CutAll { lasts: Nanos },
    /// The launcher gets a signal.
    Leave { machine: usize, signal: i32 },
    /// A worker fails, if one runs.
    Fail { machine: usize, ending: Ending },
}

pub(super) fn draw(rng: &mut Rng) -> Scenario {
    let count = match rng.u32(0..100) {
        0..=9 => 1,
        10..=79 => rng.usize(2..=4),
        80..=96 => rng.usize(5..=8),
        _ => rng.usize(9..=16),
    };
    let min = rng.usize(1..=count);
    let max = if rng.bool() { min } else { rng.usize(min..=count + 1) };
    let terms = Terms {
        version: "0.1.0".into(),
        run_id: "job".into(),
        backend: "etcd".into(),
        hosts: Hosts { min: at_least_one(min), max: at_least_one(max) },
        restarts: Restarts {
            max: [0, 1, 3][rng.usize(0..3)],
            delay_min: Duration::from_millis(rng.u64(0..=2_000)),
            delay_max: Duration::from_secs(4),
            reset_after: None,
        },
    };
    let joining = Joining {
        last_call: Duration::from_millis(rng.u64(0..5_000)),
        join_timeout: Duration::from_secs(rng.u64(8..30)),
        ..Joining::default()
    };
    let quiet_at = rng.u64(2..20) * SECOND;
    let machines = machines(rng, &terms, count, quiet_at);
    let faults = faults(rng, &machines, quiet_at);
    let timing = Timing::of(&joining);
    // Killing takes no time here, so that little time must be left between a lease and silence.
    let lease = if rng.bool() { timing.lease } else { timing.silent * 94 / 100 };
    let timing = Timing { lease, ..timing };
    let program = Program {
        lasts: rng.u64(1_000..12_000) * MS,
        steps: rng.bool(),
        reacts_percent: [0, 50, 100][rng.usize(0..3)],
        regroups: rng.bool().then(|| rng.usize(1..=8)),
    };
    // Every launcher that comes may stop the world once more.
    let worlds = 3 + machines.len() as u64;
    let waits = (timing.join_timeout + timing.last_call).as_nanos() as Nanos;
    let most = machines.iter().map(|it| it.host.ranks as Nanos).max().unwrap_or(0);
    let deadline = quiet_at + waits + worlds * (program.lasts + 15 * SECOND + most * 3 * MS);
    let network = Network::draw(rng);
    let keepers = KEEPERS;
    Scenario { terms, timing, machines, network, faults, quiet_at, deadline, program, keepers }
}

fn at_least_one(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap_or(NonZeroUsize::MIN)
}

fn machines(rng: &mut Rng, terms: &Terms, count: usize, quiet_at: Nanos) -> Vec<Machine> {
    let has_node_ranks = rng.u8(0..4) == 0;
    let keeps_store = rng.u8(0..4) == 0;
    let together = rng.bool();
    let machine = |at: usize| {
        let mut terms = terms.clone();
        if at > 0 && rng.u8(0..40) == 0 {
            terms.run_id = "another".into();
        }
        let host = Host {
            terms,
            node_rank: has_node_ranks.then_some(at),
            ranks: if rng.u8(0..8) == 0 { rng.usize(500..=4_096) } else { rng.usize(1..=8) },
            name: format!("machine-{at}"),
            address: format!("10.0.0.{at}"),
            keeps_store: keeps_store && at == 0,
        };
        let starts_at = match (together, at, rng.u8(0..3)) {
            (true, _, _) => rng.u64(0..500) * MS,
            (false, 0, _) => 0,
            (false, _, 0) => rng.u64(0..quiet_at / MS) * MS,
            _ => rng.u64(0..3_000) * MS,
        };
        Machine { host, clock: Clock::draw(rng), starts_at }
    };
    (0..count).map(machine).collect()
}

fn faults(rng: &mut Rng, machines: &[Machine], quiet_at: Nanos) -> Vec<(Nanos, Fault)> {
    if rng.u8(0..8) == 0 {
        return Vec::new();
    }
    // One kind alone, or all of them.
    let only = if rng.bool() { Some(rng.u8(0..7)) } else { None };
    let mut fault = |_| {
        let machine = rng.usize(0..machines.len());
        // Those about as long as a lease are the most interesting.
        let longest = if rng.bool() { 6_000 } else { 3_500 };
        let lasts = rng.u64(100..longest) * MS;
        let fault = match only.unwrap_or_else(|| rng.u8(0..7)) {
            0 => Fault::Crash { machine, again: rng.bool().then(|| rng.u64(0..5_000) * MS) },
            1 => Fault::Stop { machine, lasts, who: Who::draw(rng) },
            2 => Fault::Cut { machine, lasts },
            3 => Fault::CutAll { lasts },
            4 => Fault::Leave { machine, signal: if rng.bool() { 2 } else { 15 } },
            5 => {
                let again = rng.bool().then(|| rng.u64(0..5_000) * MS);
                Fault::Kill { machine, who: Who::draw(rng), again }
            }
            _ => Fault::Fail { machine, ending: ending(rng) },
        };
        (rng.u64(0..quiet_at / MS) * MS, fault)
    };
    (0..=machines.len()).map(&mut fault).collect()
}

fn ending(rng: &mut Rng) -> Ending {
    match rng.u8(0..4) {
        0 => Ending::Code(1),
        1 => Ending::Code(2),
        2 => Ending::Signal { number: 6, core_dumped: false },
        _ => Ending::Signal { number: 11, core_dumped: true },
    }
}
