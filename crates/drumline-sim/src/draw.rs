//! Draws a scenario: everything follows from the seed.

use std::time::Duration;

use drumline_engine::{DType, ReduceOp, Settings};
use drumline_schedule::{ALGORITHMS, Collective, MemoryUse, SumOrder, Topology};

use crate::member::posting::Side;
use drumline_conformance::{Case, Kind, on_group::Form};
use fastrand::Rng;

use crate::{
    call::PlannedCall,
    messages::Messages,
    network::LinkQuality,
    scenario::{Fault, FaultKind, GroupSetup, Instruction, Scenario},
    time::{MS, SECOND, TIMEOUT, WARN_AFTER},
};

/// Draws the job of a seed.
pub(crate) fn draw(rng: &mut Rng) -> Scenario {
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
    // A generator of its own: drawing messages must not change the rest of the job.
    let mut aside = Rng::with_seed(rng.clone().u64(..));
    let messages = draw_messages(&mut aside, world_size, groups.len(), planned);
    let programs = (0..world_size)
        .map(|rank| {
            let altered = altered.filter(|(victim, ..)| *victim == rank);
            let mut posts = |at| posts(&mut aside, &messages, rank, at);
            program(rng, planned, &calls, groups.len(), altered, &mut posts)
        })
        .collect();
    let slow_net = rng.bool();
    let latency = |rng: &mut Rng, max| rng.u64(1_000..max);
    let near = LinkQuality {
        latency_ns: latency(rng, 50_000),
        jitter_ns: latency(rng, 50_000),
        ns_per_byte: rng.u64(0..10),
        capacity: rng.usize(32..=4096),
        stalls_percent: rng.u32(0..=20),
    };
    let far = LinkQuality {
        latency_ns: latency(rng, if slow_net { 5 * MS } else { 100_000 }),
        jitter_ns: latency(rng, MS),
        ns_per_byte: rng.u64(0..if slow_net { 300 } else { 10 }),
        capacity: rng.usize(32..=16_384),
        stalls_percent: rng.u32(0..=20),
    };
    Scenario {
        world_size,
        host_of,
        groups,
        calls,
        messages,
        programs,
        fault,
        launched: rng.bool(),
        goes_on: rng.bool(),
        near,
        far,
    }
}

/// Puts ranks on hosts. In a large world at most 8 ranks share a host, because the system limits
/// mappings and descriptors.
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

fn group(rng: &mut Rng, host_of: &[usize]) -> GroupSetup {
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
        // Buffers are short, so windows hold a few elements or the whole buffer.
        window_bytes: 8 * rng.usize(1..=200),
        ..Settings::default()
    };
    let streams = rng.usize(1..=3);
    // A slot must hold one of the largest elements for every rank.
    let slot_bytes = shares.then(|| world_size * 8 * rng.usize(1..=40));
    // Short enough to cut headers and short messages, too.
    let block_bytes = rng.usize(1..=500);
    GroupSetup {
        topology,
        settings,
        sum_order: order,
        streams,
        block_bytes,
        slot_bytes,
        arena_bytes: 4 << 20,
    }
}

fn call(rng: &mut Rng, world_size: usize, groups: &[GroupSetup]) -> PlannedCall {
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
    let kind = match rng.u8(0..18) {
        0..=5 => Kind::AllReduce(op),
        6 | 7 if group.has(Collective::ReduceScatter) => Kind::ReduceScatter(op),
        8 if group.has(Collective::Reduce) => Kind::Reduce(op, root),
        6..=9 => Kind::Broadcast(root),
        10 | 11 => Kind::AllGather,
        12 => Kind::Barrier,
        13 | 14 => Kind::Gather(root),
        15 => Kind::Scatter(root),
        _ => Kind::AllToAll,
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
    let seed = rng.u64(..);
    let kind = match kind {
        // Devices fetch such sums in slices. No draw of its own: the other jobs stay what they are.
        Kind::AllReduce(op)
            if registered && seed.is_multiple_of(2) && group.leaves_slices(dtype) =>
        {
            Kind::ReduceSlices(op)
        }
        kind => kind,
    };
    let case = Case { kind, dtype, elements, uneven, seed };
    PlannedCall {
        group: index,
        case,
        form: if registered { Form::Registered } else { Form::Blocking },
    }
}

type Altered = (usize, usize, Option<usize>);

fn fault(
    rng: &mut Rng,
    host_of: &[usize],
    groups: &[GroupSetup],
    calls: &mut Vec<PlannedCall>,
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

/// A call that differs from `call` in one thing; `None` stands for no call.
fn another(rng: &mut Rng, call: PlannedCall, world_size: usize) -> Option<PlannedCall> {
    let case = call.case;
    let has_operator = |dtype| case.kind.reduce_op().is_none_or(|op| op.supports(dtype));
    let others = DType::ALL.into_iter().filter(|it| *it != case.dtype && has_operator(*it));
    let others: Vec<_> = others.collect();
    let dtype = others[rng.usize(0..others.len())];
    // Every type supports sum and product.
    let other_op = |op: ReduceOp| match op {
        ReduceOp::Sum => ReduceOp::Product,
        _ => ReduceOp::Sum,
    };
    let next = |root| (root + 1) % world_size;
    let is = |kind| Case { kind, ..case };
    let other = match (rng.u8(0..6), case.kind) {
        (0, _) => return None,
        (1, Kind::AllReduce(op)) => is(Kind::AllReduce(other_op(op))),
        (1, Kind::ReduceSlices(op)) => is(Kind::ReduceSlices(other_op(op))),
        (2, Kind::ReduceSlices(op)) => is(Kind::AllReduce(op)),
        (1, Kind::ReduceScatter(op)) => is(Kind::ReduceScatter(other_op(op))),
        (1, Kind::Reduce(op, root)) => is(Kind::Reduce(other_op(op), root)),
        (2, Kind::Reduce(op, root)) => is(Kind::Reduce(op, next(root))),
        (1, Kind::Gather(root)) => is(Kind::Gather(next(root))),
        (2, Kind::Gather(root)) => is(Kind::Scatter(root)),
        (1 | 2, Kind::Broadcast(root)) => is(Kind::Broadcast(next(root))),
        (5, Kind::AllToAll | Kind::AllGather) => Case { uneven: !case.uneven, ..case },
        (3, Kind::AllReduce(_)) => {
            let barrier = Case { dtype: DType::U8, elements: 0, ..is(Kind::Barrier) };
            return Some(PlannedCall { case: barrier, form: Form::Blocking, ..call });
        }
        (_, Kind::Barrier) => Case { elements: 3, ..is(Kind::Broadcast(0)) },
        (4, _) if dtype.size() > 2 => Case { dtype, ..case },
        // Drawing other lengths could give the same ones.
        _ if case.uneven => Case { uneven: false, ..case },
        _ => Case { elements: case.elements + 1, ..case },
    };
    Some(PlannedCall { case: other, ..call })
}

fn program(
    rng: &mut Rng,
    planned: usize,
    calls: &[PlannedCall],
    groups: usize,
    altered: Option<Altered>,
    posts: &mut dyn FnMut(usize) -> Vec<Instruction>,
) -> Vec<Instruction> {
    let asynchronous = rng.u8(0..3);
    let mut program = Vec::new();
    for (index, planned) in calls.iter().enumerate().take(planned) {
        program.extend(posts(index));
        if rng.bool() {
            program.push(Instruction::Compute(rng.u64(0..2 * MS)));
        }
        let call = match altered {
            Some((_, at, with)) if at == index => with,
            _ => Some(index),
        };
        let blocking = rng.u8(0..2) >= asynchronous;
        program.extend(call.map(|call| Instruction::Call { call, blocking }));
        if rng.u8(0..4) == 0 {
            program.push(Instruction::Wait { group: planned.group });
        }
    }
    program.extend(posts(planned));
    for group in 0..groups {
        program.push(Instruction::Wait { group });
        program.push(Instruction::Close { group });
    }
    program
}

/// First tag of messages that are received from any rank. Each draw of them has its own tag,
/// because such a receive takes every message with its tag.
const ANY_TAGS: u64 = 100;

/// Half of the jobs have messages.
fn draw_messages(rng: &mut Rng, world_size: usize, groups: usize, calls: usize) -> Vec<Messages> {
    let most = if world_size > 16 { 4 } else { 12 };
    let count = if rng.bool() { rng.usize(1..=most) } else { 0 };
    let one = |number| {
        let any = rng.u8(0..3) == 0;
        let mut from: Vec<usize> = (0..world_size).collect();
        rng.shuffle(&mut from);
        from.truncate(if any { rng.usize(1..=world_size.min(8)) } else { 1 });
        let dtype = DType::ALL[rng.usize(0..DType::ALL.len())];
        let elements = if rng.u8(0..4) == 0 { rng.usize(0..=2) } else { rng.usize(0..=400) };
        let kind = Kind::Broadcast(from[0]);
        Messages {
            group: rng.usize(0..groups),
            from,
            to: rng.usize(0..world_size),
            tag: if any { ANY_TAGS + number } else { rng.u64(0..3) },
            any,
            case: Case { kind, dtype, elements, uneven: false, seed: rng.u64(..) },
            before: rng.usize(0..=calls),
        }
    };
    (0..count as u64).map(one).collect()
}

/// The messages of `rank` before the call with index `call`. All ranks go through messages and
/// calls in the same order, so waiting after any of them is safe. The exception is a wait between
/// sending and receiving a message to itself.
fn posts(rng: &mut Rng, all: &[Messages], rank: usize, call: usize) -> Vec<Instruction> {
    let mut posts = Vec::new();
    for (messages, it) in all.iter().enumerate().filter(|(_, it)| it.before == call) {
        let to = it.from.iter().filter(|from| **from == rank).map(|_| Side::SendTo(it.to));
        let receive = |from: &usize| match it.any {
            true => Side::ReceiveFromAny,
            false => Side::ReceiveFrom(*from),
        };
        let from = it.from.iter().filter(|_| it.to == rank).map(receive);
        let mut sides: Vec<Side> = to.chain(from).collect();
        // Before it receives from any rank, a rank sends to itself: when all others have left,
        // nobody else can send.
        if !it.any && rng.bool() {
            sides.reverse();
        }
        let takes_part = !sides.is_empty();
        posts.extend(sides.into_iter().map(|side| Instruction::Post { messages, side }));
        if takes_part && rng.u8(0..3) == 0 {
            posts.push(Instruction::Wait { group: it.group });
        }
    }
    posts
}
