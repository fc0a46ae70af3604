//! What a seed stands for: who is where, who calls what when, and what goes wrong.

use std::time::Duration;

use drumline_engine::{DType, ReduceOp, Settings};
use drumline_schedule::SumOrder;

use crate::member::Side;
use drumline_conformance::{Case, Kind, on_group::Form};
use drumline_schedule::{ALGORITHMS, Algorithm, Collective, MemoryUse, Topology};
use fastrand::Rng;

use crate::{
    call::Call,
    message::{self, Messages},
    network::{Nanos, Quality},
};

pub(crate) const MS: Nanos = 1_000_000;
pub(crate) const SECOND: Nanos = 1_000 * MS;

/// The time limit of every call, and when late ranks are warned of.
pub(crate) const TIMEOUT: Nanos = 5 * SECOND;
pub(crate) const WARN_AFTER: Nanos = SECOND;

/// A whole job.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) world_size: usize,
    /// By rank.
    pub(crate) host_of: Vec<usize>,
    pub(crate) groups: Vec<Group>,
    pub(crate) calls: Vec<Call>,
    pub(crate) messages: Vec<Messages>,
    /// By rank.
    pub(crate) scripts: Vec<Vec<Instruction>>,
    pub(crate) fault: Option<Fault>,
    /// Whether launchers watch the processes.
    pub(crate) launched: bool,
    /// Whether a process goes on with its other calls after an error, or ends.
    pub(crate) goes_on: bool,
    pub(crate) near: Quality,
    pub(crate) far: Quality,
}

/// A process group of all ranks.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
    pub(crate) sum_order: SumOrder,
    /// How many streams carry the data of two ranks.
    pub(crate) streams: usize,
    /// Bytes that a stream carries before it is the next one's turn, where two ranks have several.
    pub(crate) block_bytes: usize,
    /// Bytes of the staging slots that are used, where ranks share memory.
    pub(crate) slot_bytes: Option<usize>,
    /// Bytes that each rank has for registered buffers. They are kept to the end of the job, to see
    /// whether somebody still writes to them.
    pub(crate) arena_bytes: usize,
}

/// What a process does next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Instruction {
    Compute(Nanos),
    /// A call, by its index in the plan.
    Call {
        call: usize,
        blocking: bool,
    },
    /// Send a rank's message, or receive the one of this rank, of those with that index.
    Post {
        messages: usize,
        side: Side,
    },
    /// Wait for all asynchronous calls and messages of a group.
    Wait {
        group: usize,
    },
    Close {
        group: usize,
    },
}

/// What goes wrong, when its victim has made so many steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) victim: usize,
    pub(crate) after_steps: u32,
    pub(crate) kind: FaultKind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum FaultKind {
    /// The process ends without a word.
    Crash,
    /// The victim's host is cut off. Keep-alives notice after so long.
    SilentHost(Nanos),
    /// The connection to a peer breaks in one group.
    LostConnection { peer: usize, group: usize, control: bool, data: bool, reset: bool },
    /// The process is stopped for so long.
    Slow(Nanos),
    /// It makes another call than the others, or none (`with`: an index in the plan).
    Mismatch { call: usize, with: Option<usize> },
    /// It aborts a group.
    Abort { group: usize },
}

impl Plan {
    /// Everything follows from the seed.
    pub(crate) fn new(rng: &mut Rng) -> Plan {
        let world_size = match rng.u32(0..100) {
            0 => 1,
            1..=79 => rng.usize(2..=6),
            80..=96 => rng.usize(7..=16),
            97..=98 => rng.usize(17..=32),
            _ => rng.usize(33..=64),
        };
        let host_of = place(rng, world_size);
        let groups: Vec<_> =
            (0..[1, 1, 1, 2, 3][rng.usize(0..5)]).map(|_| group(rng, &host_of)).collect();
        let calls_max = if world_size > 16 { 3 } else { 10 };
        let mut calls: Vec<_> =
            (0..rng.usize(1..=calls_max)).map(|_| call(rng, world_size, &groups)).collect();
        let (fault, altered) = match rng.bool() && world_size > 1 {
            true => fault(rng, &host_of, &groups, &mut calls),
            false => (None, None),
        };
        let planned = calls.len() - usize::from(altered.is_some_and(|(_, _, with)| with.is_some()));
        // Drawn aside, so that jobs without messages are as they are without this.
        let mut aside = Rng::with_seed(rng.clone().u64(..));
        let messages = message::draw(&mut aside, world_size, groups.len(), planned);
        let scripts = (0..world_size)
            .map(|rank| {
                let altered = altered.filter(|(victim, ..)| *victim == rank);
                let mut posts = |at| message::posts(&mut aside, &messages, rank, at);
                script(rng, planned, &calls, groups.len(), altered, &mut posts)
            })
            .collect();
        let slow_net = rng.bool();
        let latency = |rng: &mut Rng, max| rng.u64(1_000..max);
        let near = Quality {
            latency_ns: latency(rng, 50_000),
            jitter_ns: latency(rng, 50_000),
            ns_per_byte: rng.u64(0..10),
            capacity: rng.usize(32..=4096),
            stalls_percent: rng.u32(0..=20),
        };
        let far = Quality {
            latency_ns: latency(rng, if slow_net { 5 * MS } else { 100_000 }),
            jitter_ns: latency(rng, MS),
            ns_per_byte: rng.u64(0..if slow_net { 300 } else { 10 }),
            capacity: rng.usize(32..=16_384),
            stalls_percent: rng.u32(0..=20),
        };
        Plan {
            world_size,
            host_of,
            groups,
            calls,
            messages,
            scripts,
            fault,
            launched: rng.bool(),
            goes_on: rng.bool(),
            near,
            far,
        }
    }

    pub(crate) fn same_host(&self, a: usize, b: usize) -> bool {
        self.host_of[a] == self.host_of[b]
    }
}

/// At most 8 ranks share a host of a large world: mappings and descriptors are limited.
fn place(rng: &mut Rng, world_size: usize) -> Vec<usize> {
    let hosts = match rng.u8(0..4) {
        0 if world_size <= 16 => 1,
        1 => world_size,
        _ => rng.usize(1..=world_size),
    };
    let hosts = hosts.max(world_size.div_ceil(8).min(if world_size > 16 { 64 } else { 1 }));
    let mut host_of: Vec<usize> = match rng.bool() {
        true => (0..world_size).map(|rank| rank * hosts / world_size).collect(),
        false => (0..world_size).map(|rank| rank % hosts).collect(),
    };
    if rng.u8(0..4) == 0 {
        rng.shuffle(&mut host_of);
    }
    host_of
}

fn group(rng: &mut Rng, host_of: &[usize]) -> Group {
    let world_size = host_of.len();
    let shares = rng.u8(0..8) > 0;
    let order = if rng.u8(0..3) == 0 { SumOrder::Placement } else { SumOrder::Rank };
    let topology = match shares {
        true => Topology::placed(host_of.to_vec()),
        false => Topology::flat(world_size),
    };
    let ranks_of_a_node = 1 << rng.usize(0..4);
    let nodes = (0..world_size).map(|rank| Some(rank / ranks_of_a_node));
    let topology = topology.with_nodes(nodes).with_order(order);
    let shares = topology.ranks_by_host().iter().any(|ranks| ranks.len() > 1);
    let rows = ALGORITHMS.iter().filter(|row| {
        row.collective == Collective::AllReduce
            && (row.applies)(&topology)
            && (shares || row.memory == MemoryUse::Private)
            && (row.memory != MemoryUse::Private || topology.sums_by_rank())
    });
    let names: Vec<_> = rows.map(|row| row.name.to_owned()).collect();
    let forced = rng.bool().then(|| names[rng.usize(0..names.len())].clone());
    let settings = Settings {
        timeout: Duration::from_nanos(TIMEOUT),
        warn_after: Duration::from_nanos(WARN_AFTER),
        all_reduce: forced,
        // Data are short: a few elements to a window, or all.
        window_bytes: 8 * rng.usize(1..=200),
        ..Settings::default()
    };
    let streams = rng.usize(1..=3);
    // Every rank's block of the largest elements must fit a slot.
    let slot_bytes = shares.then(|| world_size * 8 * rng.usize(1..=40));
    // Headers and short messages are cut, too.
    let block_bytes = rng.usize(1..=500);
    Group {
        topology,
        settings,
        sum_order: order,
        streams,
        block_bytes,
        slot_bytes,
        arena_bytes: 4 << 20,
    }
}

impl Group {
    /// Whether every all-reduce must be on registered buffers.
    fn needs_registered(&self) -> bool {
        self.settings.all_reduce.as_ref().is_some_and(|name| {
            Algorithm::find(Collective::AllReduce, name)
                .is_ok_and(|row| row.memory == MemoryUse::Registered)
        })
    }

    fn has(&self, collective: Collective) -> bool {
        ALGORITHMS.iter().any(|row| {
            row.collective == collective
                && (row.applies)(&self.topology)
                && (self.slot_bytes.is_some() || row.memory == MemoryUse::Private)
        })
    }
}

fn call(rng: &mut Rng, world_size: usize, groups: &[Group]) -> Call {
    let index = rng.usize(0..groups.len());
    let group = &groups[index];
    let dtype = match group.needs_registered() {
        // Sums of narrow floats cannot travel between hosts from registered memory.
        true => [DType::F32, DType::F64, DType::I32, DType::Complex64][rng.usize(0..4)],
        false => DType::ALL[rng.usize(0..DType::ALL.len())],
    };
    let ops: Vec<_> = ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)).collect();
    let op = ops[rng.usize(0..ops.len())];
    let root = rng.usize(0..world_size);
    let kind = match rng.u8(0..20) {
        0..=5 => Kind::AllReduce(op),
        6 | 7 if group.has(Collective::ReduceScatter) => Kind::ReduceScatter(op),
        8 if group.has(Collective::Reduce) => Kind::Reduce(op, root),
        6..=9 => Kind::Broadcast(root),
        10 | 11 => Kind::AllGather,
        12 => Kind::Barrier,
        13 | 14 => Kind::Gather(root),
        15 => Kind::Scatter(root),
        16 | 17 => Kind::AllToAll,
        18 => Kind::Scan(op),
        _ => Kind::ExclusiveScan(op),
    };
    let uneven = kind.has_blocks() && rng.bool();
    let most = if world_size > 16 { 80 } else { 400 };
    let elements = match (kind, rng.u8(0..4)) {
        (Kind::Barrier, _) => 0,
        (_, 0) => rng.usize(0..=3),
        _ => rng.usize(0..=most),
    };
    let reduces = matches!(kind, Kind::AllReduce(_));
    let registered = match group.needs_registered() && reduces {
        true => true,
        false => group.slot_bytes.is_some() && rng.u8(0..4) == 0,
    };
    let dtype = match kind {
        Kind::Barrier => DType::U8,
        _ => dtype,
    };
    let case = Case { kind, dtype, elements, uneven, seed: rng.u64(..) };
    Call { group: index, case, form: if registered { Form::Registered } else { Form::Blocking } }
}

type Altered = (usize, usize, Option<usize>);

fn fault(
    rng: &mut Rng,
    host_of: &[usize],
    groups: &[Group],
    calls: &mut Vec<Call>,
) -> (Option<Fault>, Option<Altered>) {
    let world_size = host_of.len();
    let victim = rng.usize(0..world_size);
    let group = rng.usize(0..groups.len());
    let mut altered = None;
    let kind = match rng.u8(0..12) {
        0..=2 => FaultKind::Crash,
        3 if host_of.iter().any(|host| *host != host_of[0]) => {
            FaultKind::SilentHost(rng.u64(SECOND..3 * SECOND))
        }
        3 | 4 => {
            let peer = (victim + rng.usize(1..world_size)) % world_size;
            let (control, data) = [(true, true), (true, false), (false, true)][rng.usize(0..3)];
            FaultKind::LostConnection { peer, group, control, data, reset: rng.bool() }
        }
        5 => FaultKind::Slow(rng.u64(MS..WARN_AFTER)),
        6 => FaultKind::Slow(rng.u64(WARN_AFTER..TIMEOUT - SECOND)),
        7 => FaultKind::Slow(rng.u64(TIMEOUT + SECOND..2 * TIMEOUT)),
        8 => FaultKind::Abort { group },
        _ => {
            let call = rng.usize(0..calls.len());
            let with = another(rng, calls[call], world_size).map(|other| {
                calls.push(other);
                calls.len() - 1
            });
            altered = Some((victim, call, with));
            FaultKind::Mismatch { call, with }
        }
    };
    let most = rng.u32(2..120);
    let after_steps = rng.u32(1..=most);
    (Some(Fault { victim, after_steps, kind }), altered)
}

/// A call that differs in one thing; `None`: no call at all.
fn another(rng: &mut Rng, call: Call, world_size: usize) -> Option<Call> {
    let case = call.case;
    let has_operator = |dtype| case.kind.reduce_op().is_none_or(|op| op.supports(dtype));
    let others = DType::ALL.into_iter().filter(|it| *it != case.dtype && has_operator(*it));
    let others: Vec<_> = others.collect();
    let dtype = others[rng.usize(0..others.len())];
    // Every type has these two.
    let other_op = |op: ReduceOp| match op {
        ReduceOp::Sum => ReduceOp::Product,
        _ => ReduceOp::Sum,
    };
    let next = |root| (root + 1) % world_size;
    let is = |kind| Case { kind, ..case };
    let other = match (rng.u8(0..6), case.kind) {
        (0, _) => return None,
        (1, Kind::AllReduce(op)) => is(Kind::AllReduce(other_op(op))),
        (1, Kind::ReduceScatter(op)) => is(Kind::ReduceScatter(other_op(op))),
        (1, Kind::Scan(op)) => is(Kind::Scan(other_op(op))),
        (2, Kind::Scan(op)) => is(Kind::ExclusiveScan(op)),
        (1, Kind::Reduce(op, root)) => is(Kind::Reduce(other_op(op), root)),
        (2, Kind::Reduce(op, root)) => is(Kind::Reduce(op, next(root))),
        (1, Kind::Gather(root)) => is(Kind::Gather(next(root))),
        (2, Kind::Gather(root)) => is(Kind::Scatter(root)),
        (1 | 2, Kind::Broadcast(root)) => is(Kind::Broadcast(next(root))),
        (5, Kind::AllToAll | Kind::AllGather) => Case { uneven: !case.uneven, ..case },
        (3, Kind::AllReduce(_)) => {
            let barrier = Case { dtype: DType::U8, elements: 0, ..is(Kind::Barrier) };
            return Some(Call { case: barrier, form: Form::Blocking, ..call });
        }
        (_, Kind::Barrier) => Case { elements: 3, ..is(Kind::Broadcast(0)) },
        (4, _) if dtype.size() > 2 => Case { dtype, ..case },
        // Other lengths might be the same by chance.
        _ if case.uneven => Case { uneven: false, ..case },
        _ => Case { elements: case.elements + 1, ..case },
    };
    Some(Call { case: other, ..call })
}

fn script(
    rng: &mut Rng,
    planned: usize,
    calls: &[Call],
    groups: usize,
    altered: Option<Altered>,
    posts: &mut dyn FnMut(usize) -> Vec<Instruction>,
) -> Vec<Instruction> {
    let asynchronous = rng.u8(0..3);
    let mut script = Vec::new();
    for (index, planned) in calls.iter().enumerate().take(planned) {
        script.extend(posts(index));
        if rng.bool() {
            script.push(Instruction::Compute(rng.u64(0..2 * MS)));
        }
        let call = match altered {
            Some((_, at, with)) if at == index => with,
            _ => Some(index),
        };
        let blocking = rng.u8(0..2) >= asynchronous;
        script.extend(call.map(|call| Instruction::Call { call, blocking }));
        if rng.u8(0..4) == 0 {
            script.push(Instruction::Wait { group: planned.group });
        }
    }
    script.extend(posts(planned));
    for group in 0..groups {
        script.push(Instruction::Wait { group });
        script.push(Instruction::Close { group });
    }
    script
}
