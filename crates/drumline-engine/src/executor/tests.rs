//! The executor without sockets or clock: all ranks in one thread, every interleaving that a
//! seed can choose. A payload is read from the sender's memory at the latest moment allowed.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use drumline_schedule::{
    ALGORITHMS, Algorithm, Blocks, Collective, Counts, MemoryUse, Topology,
    step::{Buffer, Rank},
};
use proptest::prelude::*;

use super::{
    drive::*, flags::*, history::*, layout::*, machine::*, memory::*, message::*, now::*,
    plan::Shape,
};
use crate::{Cause, transport::Transport};
use crate::{
    DType, ReduceOp,
    error::CollectiveError,
    membership::SeenFailure,
    operator::{AnyOperator, OperatorKind},
};

/// Messages between ranks, moved one small piece at a time in an order that `random` chooses.
#[derive(Debug, Default)]
struct Network {
    random: u64,
    /// Messages that have left their source and not arrived, by sender and receiver.
    wires: HashMap<(Rank, Rank), Wire>,
}

type Wire = VecDeque<(Header, Vec<u8>)>;

impl Network {
    fn next(&mut self, below: usize) -> usize {
        // Knuth's linear congruential generator; its high bits are good enough for choices.
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) as usize % below
    }
}

/// One rank's end of the network.
#[derive(Debug)]
struct Port {
    rank: Rank,
    network: Arc<Mutex<Network>>,
    posted: VecDeque<(Rank, Header, Stretch)>,
    places: HashMap<Rank, VecDeque<Stretch>>,
    /// Peers whose next header the machine knows.
    announced: Vec<Rank>,
}

impl Port {
    fn new(rank: Rank, network: &Arc<Mutex<Network>>) -> Port {
        Port {
            rank,
            network: network.clone(),
            posted: VecDeque::new(),
            places: HashMap::new(),
            announced: Vec::new(),
        }
    }

    fn peers(&self, network: &Network) -> Vec<Rank> {
        let mut peers: Vec<Rank> = network
            .wires
            .iter()
            .filter(|((_, to), wire)| *to == self.rank && !wire.is_empty())
            .map(|((from, _), _)| *from)
            .collect();
        peers.sort_unstable();
        peers
    }
}

impl Transport for Port {
    fn begin(&mut self, _machine: &mut Machine) -> Result<(), Cause> {
        Ok(())
    }

    fn send(&mut self, to: Rank, header: Header, src: Stretch) {
        self.posted.push_back((to, header, src));
    }

    fn receive(&mut self, from: Rank, dst: Stretch) {
        self.places.entry(from).or_default().push_back(dst);
    }

    /// Moves one thing, or nothing.
    fn progress(
        &mut self,
        machine: &mut Machine,
        memory: &mut Memory<'_>,
        _now: Instant,
    ) -> Result<bool, Cause> {
        let network = self.network.clone();
        let mut network = network.lock().unwrap();
        match network.next(4) {
            0 => {}
            1 => {
                if self.posted.is_empty() {
                    return Ok(false);
                }
                // Messages to different peers overtake each other; to one peer they do not.
                let to = self.posted[network.next(self.posted.len())].0;
                let oldest = self.posted.iter().position(|posted| posted.0 == to).unwrap();
                let (to, header, src) = self.posted.remove(oldest).unwrap();
                let payload = memory.bytes(src).to_vec();
                network.wires.entry((self.rank, to)).or_default().push_back((header, payload));
                machine.on_sent(to);
            }
            _ => {
                let peers = self.peers(&network);
                if peers.is_empty() {
                    return Ok(false);
                }
                let from = peers[network.next(peers.len())];
                let wire = network.wires.get_mut(&(from, self.rank)).unwrap();
                if !self.announced.contains(&from) {
                    self.announced.push(from);
                    machine.on_header(from, wire[0].0)?;
                } else if machine.admits(from)? {
                    let (_, payload) = wire.pop_front().unwrap();
                    let dst = self.places.get_mut(&from).unwrap().pop_front().unwrap();
                    memory.bytes_mut(dst).copy_from_slice(&payload);
                    self.announced.retain(|rank| *rank != from);
                    machine.on_received(from);
                }
            }
        }
        Ok(true)
    }

    fn abort(&mut self, _failure: &CollectiveError) {}

    fn take_leave(&mut self, _: Option<SeenFailure>) {}

    fn still_present(&mut self, _history: &History) -> Result<Vec<Rank>, Cause> {
        Ok(Vec::new())
    }

    fn wait(&mut self, _until: Instant, _now: Instant) {}

    fn arm(&mut self) {}
}

/// One operation of a test, the same on all ranks.
#[derive(Clone, Copy, Debug)]
struct Plan {
    algorithm: &'static Algorithm,
    root: Rank,
    len: usize,
    /// Elements of a window, where there may be several.
    window: usize,
}

/// The elements of a buffer.
fn len(plan: &Plan, buffer: Buffer, rank: Rank, world_size: usize) -> usize {
    match plan.algorithm.collective.blocks(buffer, rank, plan.root) {
        Blocks::None => 0,
        Blocks::One => plan.len,
        Blocks::All => world_size * plan.len,
    }
}

fn contribution(plan: usize, rank: Rank, index: usize) -> i64 {
    plan as i64 * 1_000_000 + rank as i64 * 1000 + index as i64
}

/// Runs `plans` one after another on every rank, in one thread. The seed decides which rank moves next, so
/// ranks run ahead of each other. Returns what each rank holds after each operation.
fn run(world_size: usize, plans: &[Plan], seed: u64) -> Result<Vec<Vec<Vec<i64>>>, Box<Cause>> {
    let network = Arc::new(Mutex::new(Network { random: seed, ..Network::default() }));

    let own = |rank| {
        plans.iter().enumerate().map(move |(at, plan)| {
            let collective = plan.algorithm.collective;
            let source = if collective.has_input() { Buffer::Input } else { Buffer::Data };
            (0..len(plan, source, rank, world_size))
                .map(|index| contribution(at, rank, index))
                .collect::<Vec<i64>>()
        })
    };
    let inputs: Vec<Vec<Vec<i64>>> = (0..world_size).map(|rank| own(rank).collect()).collect();
    let mut data = inputs.clone();
    for (rank, data) in data.iter_mut().enumerate() {
        for (data, plan) in data.iter_mut().zip(plans) {
            if plan.algorithm.collective.has_input() {
                *data = vec![-1; len(plan, Buffer::Data, rank, world_size)];
            }
        }
    }

    let mut ranks: Vec<_> = data
        .iter_mut()
        .zip(&inputs)
        .enumerate()
        .map(|(rank, (data, inputs))| {
            let operations = data.iter_mut().zip(inputs).zip(plans).enumerate();
            let operations: VecDeque<_> = operations
                .map(|(at, ((data, input), plan))| {
                    let topology = Topology::flat(world_size);
                    let schedule = plan.algorithm.schedule(&topology, rank, plan.root).unwrap();
                    let has_input = plan.algorithm.collective.has_input();
                    let input: &[i64] = if has_input { input } else { &[] };
                    let layout = Layout::new(&schedule, Counts::Even(plan.len), None);
                    let layout = match schedule.is_pipelined() {
                        true => layout.in_windows_of(plan.window),
                        false => layout,
                    };
                    let (data, input) =
                        (bytemuck::cast_slice_mut(data), bytemuck::cast_slice(input));
                    let op = AnyOperator::Builtin(ReduceOp::Sum);
                    let mut memory = Memory::new(Some(op), Buffers::Lent { data, input });
                    let description = Description::new(
                        1,
                        at as u64,
                        Collective::AllReduce,
                        DType::I64,
                        plan.len,
                        plan.algorithm.name,
                    );
                    let laid = super::Plan::new(Shape {
                        schedule: Arc::new(schedule),
                        seats: &Seats::default(),
                        description,
                        layout,
                        kernels: DType::I64.kernels(),
                        sum_bytes: size_of::<i64>(),
                        wide: false,
                        cache_bytes: None,
                    });
                    let laid = Arc::new(laid);
                    memory.lay_out(&laid, &mut Pool::default());
                    (laid, memory)
                })
                .collect();
            (Port::new(rank, &network), Machine::new(Flags::default()), operations)
        })
        .collect();

    let now = Now::at(Instant::now());
    let mut begun = vec![None; world_size];
    let mut turns = 0;
    loop {
        let busy: Vec<Rank> = (0..world_size).filter(|&rank| !ranks[rank].2.is_empty()).collect();
        if busy.is_empty() {
            break;
        }
        let rank = busy[network.lock().unwrap().next(busy.len())];
        let (port, machine, operations) = &mut ranks[rank];
        let at = plans.len() - operations.len();
        let (laid, memory) = &mut operations[0];
        if begun[rank].replace(at) != Some(at) {
            machine.begin(laid, at as u64, None, Duration::from_secs(3600), now.known());
        }
        if drive(machine, port, None, memory, &now, Spin::No)? == Progress::Done {
            machine.end();
            operations.pop_front();
            port.announced.clear();
        }
        turns += 1;
        assert!(turns < 1_000_000, "ranks {busy:?} wait for ever");
    }
    let network = network.lock().unwrap();
    assert!(network.wires.values().all(Wire::is_empty), "messages are left over");
    drop(ranks);
    Ok(data)
}

/// What `rank` must hold after `plan`.
fn expected(world_size: usize, at: usize, plan: &Plan, rank: Rank) -> Vec<i64> {
    let own = |index| contribution(at, rank, index);
    let sum = |ranks: std::ops::Range<Rank>, index| {
        ranks.map(|rank| contribution(at, rank, index)).sum::<i64>()
    };
    let (all, len) = (0..world_size, plan.len);
    let each = |of: &dyn Fn(usize) -> i64| (0..len).map(of).collect::<Vec<i64>>();
    let blocks = |of: &dyn Fn(Rank, usize) -> i64| {
        all.clone().flat_map(|peer| each(&|index| of(peer, index))).collect()
    };
    match plan.algorithm.collective {
        Collective::AllReduce | Collective::ReduceSlices => each(&|index| sum(all.clone(), index)),
        Collective::Reduce if rank == plan.root => each(&|index| sum(all.clone(), index)),
        Collective::Reduce => each(&own),
        Collective::Broadcast => each(&|index| contribution(at, plan.root, index)),
        Collective::Gather if rank != plan.root => vec![],
        Collective::AllGather | Collective::Gather => {
            blocks(&|peer, index| contribution(at, peer, index))
        }
        Collective::ReduceScatter => each(&|index| sum(all.clone(), rank * len + index)),
        Collective::Scatter => each(&|index| contribution(at, plan.root, rank * len + index)),
        Collective::AllToAll => blocks(&|peer, index| contribution(at, peer, rank * len + index)),
        Collective::Barrier | Collective::MonitoredBarrier => vec![],
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_interleaving_gives_the_same_result(
        world_size in 1_usize..9,
        picks in prop::collection::vec(
            (0_usize..64, 0_usize..64, 0_usize..40, 0_usize..40), 1..5),
        seed: u64,
    ) {
        let over_links = |row: &&Algorithm| row.memory == MemoryUse::Private;
        let links: Vec<_> = ALGORITHMS.iter().filter(over_links).collect();
        let plan = |&(row, root, len, window): &(usize, usize, usize, usize)| {
            let algorithm = links[row % links.len()];
            let len = if algorithm.collective.is_barrier() { 0 } else { len };
            Plan { algorithm, root: root % world_size, len, window }
        };
        let plans: Vec<Plan> = picks.iter().map(plan).collect();
        let results = run(world_size, &plans, seed).unwrap();
        for (rank, results) in results.iter().enumerate() {
            for (at, plan) in plans.iter().enumerate() {
                let expected = expected(world_size, at, plan, rank);
                prop_assert_eq!(&results[at], &expected, "rank {} after {:?}", rank, plan);
            }
        }
    }
}

/// An all-reduce of rank 0 of two, over links.
fn doubling(description: Description, len: usize) -> Arc<super::Plan> {
    let doubling = Algorithm::find(Collective::AllReduce, "doubling").unwrap();
    let schedule = Arc::new(doubling.schedule(&Topology::flat(2), 0, 0).unwrap());
    Arc::new(super::Plan::new(Shape {
        seats: &Seats::default(),
        description,
        layout: Layout::new(&schedule, Counts::Even(len), None),
        schedule,
        kernels: DType::F32.kernels(),
        sum_bytes: 4,
        wide: false,
        cache_bytes: None,
    }))
}

/// A machine of rank 0 of two that has posted an all-reduce of four elements, call number 5.
fn waiting_machine(before: Option<Description>) -> (Machine, Header) {
    let mut machine = Machine::new(Flags::default());
    let limit = Duration::from_secs(60);
    if let Some(before) = before {
        machine.begin(&doubling(before, 0), before.sequence(), None, limit, None);
        machine.end();
    }
    machine.begin(&doubling(description(0, 4), 4), 5, None, limit, Some(Instant::now()));
    while !matches!(machine.poll(), Action::Wait) {}
    (machine, Header { description: description(5, 4), part: 0, payload: 16 })
}

fn description(sequence: u64, count: usize) -> Description {
    Description::new(1, sequence, Collective::AllReduce, DType::F32, count, "doubling")
        .with_operator(OperatorKind::Builtin(ReduceOp::Sum))
}

#[test]
fn only_the_message_that_belongs_here_is_admitted() {
    let (mut machine, header) = waiting_machine(None);
    assert_eq!(machine.admits(1), Ok(false), "nothing has arrived yet");
    machine.on_header(1, header).unwrap();
    assert_eq!(machine.admits(1), Ok(true));

    for (part, payload) in [(1, 16), (0, 12), (0, u64::MAX)] {
        let (mut machine, header) = waiting_machine(None);
        machine.on_header(1, Header { part, payload, ..header }).unwrap();
        assert!(matches!(machine.admits(1), Err(Cause::Protocol { peer: 1, .. })));
    }
}

#[test]
fn a_peer_that_is_elsewhere_is_found_out_by_its_header() {
    let (mut machine, header) = waiting_machine(Some(description(4, 7)));

    let other = Header { description: description(5, 3), ..header };
    let told = machine.on_header(1, other).unwrap_err().to_string();
    assert!(told.contains("#5 all_reduce(sum) of 3") && told.contains("of 4"), "{told}");

    let late = Header { description: description(4, 3), ..header };
    let told = machine.on_header(1, late).unwrap_err().to_string();
    assert!(told.contains("#4 all_reduce(sum) of 3") && told.contains("#4 all_reduce(sum) of 7"));

    // Ahead of us: an error only because its message of this call is missing.
    machine.on_header(1, Header { description: description(6, 3), ..header }).unwrap();
    let told = machine.admits(1).unwrap_err().to_string();
    assert!(told.contains("rank 1 called #6"), "{told}");
}

#[test]
fn an_announcement_seen_in_a_call_without_posts_is_compared_with_the_next_call() {
    let plan = doubling(description(0, 4), 4);
    let mut machine = Machine::new(Flags::new([1]));
    let limit = Duration::from_secs(60);
    machine.begin(&plan, 5, None, limit, None);
    assert_eq!(machine.looks_at(Seat(0)), (0, Some(0)));
    let ahead = Header { description: description(6, 3), part: 0, payload: 0 };
    machine.on_announced(Seat(0), 0, ahead).unwrap();
    assert_eq!(machine.looks_at(Seat(0)), (0, None), "once is enough in one call");
    machine.end();
    machine.begin(&plan, 6, None, limit, None);
    assert_eq!(machine.looks_at(Seat(0)), (0, Some(0)));
    let told = machine.on_announced(Seat(0), 0, ahead).unwrap_err().to_string();
    assert!(told.contains("#6 all_reduce(sum) of 3") && told.contains("of 4"), "{told}");
}

#[test]
fn time_is_handed_in() {
    let (mut machine, _) = waiting_machine(None);
    let deadline = machine.known_deadline().unwrap();
    assert_eq!(machine.on_stuck(deadline - Duration::from_nanos(1)), Ok(()));
    let late = machine.on_stuck(deadline).unwrap_err();
    assert_eq!(late, Cause::Timeout { waiting_for: vec![1] });
}
