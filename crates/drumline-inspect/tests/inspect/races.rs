//! The checker finds what goes wrong in shared memory. Each test breaks something and names what
//! must be found.

use drumline_inspect::check::{self, Access, CheckError, Race, Rule, check_schedules};
use drumline_schedule::step::{Buffer, Loc, Rank, Side, Span, Step};
use drumline_schedule::tree::Node;
use drumline_schedule::{Algorithm, Collective, Cost, MemoryUse, Schedule, Topology};

const DATA: Loc = Loc::data(Span::WHOLE);
const SLOT: Loc = Loc::slot(Span::WHOLE);
const LEN: usize = 9;

// ---- One change to all ranks of a right algorithm ----

/// Ranks read sums while the owners still compute them.
#[test]
fn two_shot_without_its_last_round_of_posts() {
    let race = race(check_all(Collective::AllReduce, "shm-twoshot", without_last_round));
    assert_eq!((race.buffer, race.late.step, race.late.writes), (Buffer::Slot, Some(5), false));
    assert_eq!((race.early.step, race.early.writes), (Some(4), true));
}

/// The data goes back to its user while peers still write to it.
#[test]
fn push_without_its_last_round_of_posts() {
    let race = race(check_all(Collective::AllReduce, "shm-push", without_last_round));
    assert_eq!(race.buffer, Buffer::Data);
    let user_reads = Access { rank: 0, call: 0, step: None, writes: false };
    assert!([race.late, race.early].contains(&user_reads), "{race}");
}

/// The user of a peer may be filling its data.
#[test]
fn push_before_the_peers_have_entered() {
    let race = race(check_all(Collective::AllReduce, "shm-push", |steps| {
        steps.retain(|step| !matches!(step, Step::Wait { upto: 1, .. }));
    }));
    assert!(race.early.step.is_none() || race.late.step.is_none(), "{race}");
    assert_eq!(race.buffer, Buffer::Data);
    assert_ne!(race.early.rank, race.late.rank);
}

#[test]
fn slot_is_read_before_the_wait() {
    let race = race(check_all(Collective::Broadcast, "shm", |steps| {
        if let [_, wait @ Step::Wait { .. }, copy] = &mut steps[..] {
            std::mem::swap(wait, copy);
        }
    }));
    // Rank 0 writes first here, but nothing orders that.
    assert_eq!((race.early.rank, race.early.step, race.early.writes), (0, Some(0), true));
    assert_eq!((race.late.rank, race.late.step, race.late.writes), (1, Some(1), false));
    assert_eq!(
        race.to_string(),
        "race for element 0 of Slot of rank 0:\n  rank 1 reads it at step 1 of call 0\n  \
         rank 0 writes it at step 0 of call 0\nand nothing says which comes first"
    );
}

#[test]
fn post_comes_before_what_it_announces() {
    for (collective, name) in
        [(Collective::Broadcast, "shm"), (Collective::AllReduce, "shm-oneshot")]
    {
        let race = race(check_all(collective, name, |steps| {
            if let [copy @ Step::Copy { .. }, post @ Step::Post, ..] = &mut steps[..] {
                std::mem::swap(copy, post);
            }
        }));
        assert_eq!(race.buffer, Buffer::Slot);
    }
}

#[test]
fn posts_that_are_not_equally_many() {
    let mut schedules = schedules(Collective::Broadcast, "shm");
    schedules[2].steps.remove(0);
    let error = CheckError::UnequalPosts { rank: 2, posts: 0, posts_of_first: 1 };
    assert_eq!(check(&schedules), Err(error));
}

#[test]
fn waits_for_posts_that_never_come() {
    let mut schedules = schedules(Collective::AllReduce, "shm-oneshot");
    schedules[1].steps[2] = Step::Wait { peer: 2, upto: 2 };
    // The others continue without rank 1 as far as the rules allow: they have posted.
    let error = check(&schedules).unwrap_err().to_string();
    assert!(error.contains("rank 1 waits for rank 2 at step 2: wait    for post 2"), "{error}");
}

#[test]
fn each_waits_for_the_other_to_go_first() {
    let error = run(MemoryUse::Staged, Collective::Barrier, 2, |rank| {
        vec![Step::Wait { peer: 1 - rank, upto: 1 }, Step::Post]
    });
    assert_eq!(
        error.unwrap_err().to_string(),
        "deadlock:\n  rank 0 waits for rank 1 at step 0: wait    for post 1 of rank 1\n  \
         rank 1 waits for rank 0 at step 0: wait    for post 1 of rank 0"
    );
}

// ---- Schedules that look right ----

/// The user of the root writes its buffer while others still read it.
#[test]
fn broadcast_whose_root_runs_ahead() {
    let broadcast = |rank, root_waits| match rank {
        0 if root_waits => {
            vec![Step::Post, Step::Wait { peer: 1, upto: 1 }, Step::Wait { peer: 2, upto: 1 }]
        }
        0 => vec![Step::Post],
        _ => vec![
            Step::Wait { peer: 0, upto: 1 },
            Step::Copy { dst: DATA, src: DATA.of(0) },
            Step::Post,
        ],
    };
    let run = |root_waits| {
        run(MemoryUse::Registered, Collective::Broadcast, 3, move |rank| {
            broadcast(rank, root_waits)
        })
    };
    assert!(run(true).is_ok());
    let race = race(run(false));
    let user_writes = Access { rank: 0, call: 1, step: None, writes: true };
    assert!([race.late, race.early].contains(&user_writes), "{race}");
}

/// Two halves go through the same place one after the other, and no reader says that it has finished.
#[test]
fn slot_is_used_twice_in_one_operation() {
    let half = |index| Span::block(index, 2);
    let place = Loc::slot(half(0));
    let race = race(check_lengths(8, MemoryUse::Staged, Collective::Broadcast, 2, |rank| {
        (0..2)
            .flat_map(|index| match rank {
                0 => [
                    Step::Copy { dst: place, src: Loc::data(half(index)) },
                    Step::Post,
                    Step::Wait { peer: 1, upto: 1 },
                ],
                _ => [
                    Step::Post,
                    Step::Wait { peer: 0, upto: index + 1 },
                    Step::Copy { dst: Loc::data(half(index)), src: place.of(0) },
                ],
            })
            .collect()
    }));
    assert_eq!((race.owner, race.buffer), (0, Buffer::Slot));
}

/// A neighbour writes to the data of rank 1 while rank 1 sends it to another host.
#[test]
fn peer_writes_to_what_is_being_sent() {
    let hosts = Topology::hosts(&[2, 1]);
    let schedules: Vec<Schedule> = [
        vec![
            Step::Post,
            Step::Wait { peer: 1, upto: 2 },
            Step::Copy { dst: DATA.of(1), src: Loc::scratch(0, Span::WHOLE) },
        ],
        vec![
            Step::Post,
            Step::Send { to: 2, src: DATA },
            Step::Post,
            Step::Flush { to: 2, upto: 1 },
        ],
        vec![Step::Post, Step::Post, Step::Recv { from: 1, dst: Loc::scratch(0, Span::WHOLE) }],
    ]
    .into_iter()
    .enumerate()
    .map(|(rank, mut steps)| {
        if rank == 0 {
            steps.insert(0, Step::Copy { dst: Loc::scratch(0, Span::WHOLE), src: DATA });
            steps.push(Step::Post);
        }
        schedule(MemoryUse::Registered, Collective::Reduce, 3, rank, steps)
    })
    .collect();
    let race = race(check_schedules(&hosts, &schedules, LEN));
    let sends = Access { rank: 1, call: 0, step: Some(1), writes: false };
    assert_eq!((race.owner, race.early, race.late.rank), (1, sends, 0));
}

// ---- Form ----

/// Sums also travel from rank to rank through shared memory.
#[test]
fn partial_sums_that_travel_through_slots() {
    fn sum_of_two(dst: Loc) -> Step {
        let srcs = vec![(Node::leaf(0), SLOT.of(0)), (Node::leaf(1), DATA)];
        Step::ReduceTree { dsts: vec![dst], srcs, finish: false }
    }
    fn steps(rank: Rank, sum: Loc) -> Vec<Step> {
        match rank {
            0 => vec![Step::Copy { dst: SLOT, src: DATA }, Step::Post],
            1 => vec![Step::Wait { peer: 0, upto: 1 }, sum_of_two(sum), Step::Post],
            _ => vec![
                Step::Post,
                Step::Wait { peer: 1, upto: 1 },
                Step::Copy { dst: Loc::scratch(0, Span::WHOLE), src: SLOT.of(1) },
            ],
        }
    }
    let row = Algorithm::find(Collective::Reduce, "shm").unwrap();
    let check = |generate| {
        let algorithm = Algorithm { generate, ..*row };
        check::check(&algorithm, &Topology::hosts(&[3]), 2, LEN)
    };
    let fetched = check(|_, rank, _| steps(rank, SLOT));
    assert_eq!(fetched, Err(CheckError::PartialSum { rank: 2, step: 2, peer: 1 }));
    let handed_out = check(|_, rank, _| steps(rank, SLOT.of(2)));
    assert_eq!(handed_out, Err(CheckError::PartialSum { rank: 1, step: 1, peer: 2 }));
}

#[test]
fn rules_of_form() {
    let tree = |dsts: Vec<Loc>, srcs: Vec<Loc>| Step::ReduceTree {
        dsts,
        srcs: srcs.into_iter().enumerate().map(|(rank, loc)| (Node::leaf(rank), loc)).collect(),
        finish: true,
    };
    let input = Loc::input(Span::WHOLE);
    let scratch = Loc::scratch(0, Span::WHOLE);
    let half = Loc::data(Span::block(0, 2));
    let copy = |src| Step::Copy { dst: DATA, src };
    use MemoryUse::{Private, Registered, Staged};

    for (rule, memory, step) in [
        (Rule::Peer, Staged, copy(SLOT.of(0))),
        (Rule::Peer, Staged, copy(SLOT.of(3))),
        (Rule::Peer, Staged, Step::Wait { peer: 0, upto: 1 }),
        (Rule::OtherHost, Staged, copy(SLOT.of(2))),
        (Rule::OtherHost, Staged, Step::Wait { peer: 2, upto: 1 }),
        (Rule::Undeclared, Private, copy(SLOT)),
        (Rule::Undeclared, Private, Step::Post),
        (Rule::Undeclared, Private, Step::Wait { peer: 1, upto: 1 }),
        (Rule::NotShared, Private, copy(DATA.of(1))),
        (Rule::NotShared, Staged, Step::Copy { dst: SLOT, src: DATA.of(1) }),
        (Rule::NotShared, Registered, copy(scratch.of(1))),
        (Rule::NotShared, Registered, copy(input.of(1))),
        (Rule::PeerOperand, Registered, Step::Send { to: 1, src: DATA.of(1) }),
        (Rule::PeerOperand, Registered, Step::Recv { from: 1, dst: SLOT.of(1) }),
        (
            Rule::PeerOperand,
            Staged,
            Step::Reduce { dst: DATA, src: SLOT.of(1), side: Side::Left, finish: true },
        ),
        (Rule::SameBuffer, Staged, Step::Copy { dst: SLOT.of(1), src: SLOT.of(1) }),
        (Rule::ManyBlocks, Staged, copy(input)),
        (Rule::TreeOutputs, Staged, tree(vec![], vec![SLOT])),
        (Rule::TreeOutputs, Staged, tree(vec![half, DATA], vec![SLOT])),
        (Rule::TreeInput, Registered, tree(vec![scratch, DATA.of(1)], vec![DATA, half.of(1)])),
    ] {
        let collective = if format!("{step}").contains("input") {
            Collective::AllGather
        } else {
            Collective::AllReduce
        };
        let mut schedules: Vec<Schedule> =
            (0..3).map(|rank| schedule(memory, collective, 3, rank, vec![])).collect();
        schedules[0].steps.push(step.clone());
        let result = check_schedules(&Topology::hosts(&[2, 1]), &schedules, LEN);
        assert_eq!(result, Err(CheckError::Form { rank: 0, step: 0, rule }), "{step}");
    }
}

// ---- Helpers ----

fn schedules(collective: Collective, name: &str) -> Vec<Schedule> {
    let algorithm = Algorithm::find(collective, name).unwrap();
    algorithm.schedules(&Topology::hosts(&[3]), 0).unwrap()
}

/// Changes the steps of every rank of three.
fn check_all(
    collective: Collective,
    name: &str,
    change: impl Fn(&mut Vec<Step>),
) -> Result<Cost, CheckError> {
    let mut schedules = schedules(collective, name);
    assert!(check(&schedules).is_ok());
    schedules.iter_mut().for_each(|schedule| change(&mut schedule.steps));
    check(&schedules)
}

fn without_last_round(steps: &mut Vec<Step>) {
    let last = steps.iter().rposition(|step| *step == Step::Post).unwrap();
    steps.remove(last);
    steps.retain(|step| !matches!(step, Step::Wait { upto: 2, .. }));
}

fn check(schedules: &[Schedule]) -> Result<Cost, CheckError> {
    check_schedules(&Topology::hosts(&[schedules.len()]), schedules, LEN)
}

fn run(
    memory: MemoryUse,
    collective: Collective,
    world_size: usize,
    steps: impl Fn(Rank) -> Vec<Step>,
) -> Result<Cost, CheckError> {
    check_lengths(LEN, memory, collective, world_size, steps)
}

fn check_lengths(
    elements: usize,
    memory: MemoryUse,
    collective: Collective,
    world_size: usize,
    steps: impl Fn(Rank) -> Vec<Step>,
) -> Result<Cost, CheckError> {
    let schedules: Vec<Schedule> = (0..world_size)
        .map(|rank| schedule(memory, collective, world_size, rank, steps(rank)))
        .collect();
    check_schedules(&Topology::hosts(&[world_size]), &schedules, elements)
}

fn schedule(
    memory: MemoryUse,
    collective: Collective,
    world_size: usize,
    rank: Rank,
    steps: Vec<Step>,
) -> Schedule {
    let nothing = Algorithm::new(collective, "test", |_, _, _| vec![], |_, _, _| Cost::default())
        .in_memory(memory);
    let schedule = nothing.schedule(&Topology::flat(world_size), rank, 0).unwrap();
    Schedule { steps, ..schedule }
}

fn race(result: Result<Cost, CheckError>) -> Race {
    match result {
        Err(CheckError::Race(race)) => *race,
        other => panic!("no race: {other:?}"),
    }
}
