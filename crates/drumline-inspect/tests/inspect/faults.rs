//! The checker finds faults. Each test breaks something and names what must be found.

use std::ops::Range;

use drumline_inspect::check::{CheckError, Rule, check, check_narrow_schedules, check_schedules};
use drumline_schedule::step::{Buffer, Loc, Rank, Side, Span, Step};
use drumline_schedule::tree::Node;
use drumline_schedule::{
    ALGORITHMS, Algorithm, Collective, Cost, Counts, Error, MemoryUse, Schedule, SumOrder, Topology,
};

const DATA: Loc = Loc::data(Span::WHOLE);
const TEMP: Loc = Loc::scratch(0, Span::WHOLE);

// ---- Schedules that look right ----

/// The textbook's recursive doubling, in place. A rank combines into data that it still sends.
fn doubling_in_place(topology: &Topology, rank: Rank, _root: Rank) -> Vec<Step> {
    let mut steps = vec![];
    let mut distance = 1;
    while distance < topology.world_size {
        let peer = rank ^ distance;
        let side = if peer < rank { Side::Left } else { Side::Right };
        let finish = 2 * distance == topology.world_size;
        steps.push(Step::Send { to: peer, src: DATA });
        steps.push(Step::RecvReduce { from: peer, dst: DATA, side, finish });
        distance *= 2;
    }
    steps
}

#[test]
fn doubling_in_place_deadlocks() {
    let error = run(Collective::AllReduce, 4, 5, doubling_in_place).unwrap_err();
    let CheckError::Deadlock { waits } = error else { panic!("{error}") };
    let who: Vec<(Rank, usize, Rank)> = waits.iter().map(|w| (w.rank, w.step, w.on)).collect();
    assert_eq!(who, [(0, 1, 1), (1, 1, 0), (2, 1, 3), (3, 1, 2)]);
}

#[test]
fn doubling_in_place_without_flushes_tears() {
    let mut schedules = schedules(Collective::AllReduce, 4, doubling_in_place);
    for schedule in &mut schedules {
        schedule.steps.retain(|step| !matches!(step, Step::Flush { .. }));
    }
    assert_eq!(
        check_flat(&schedules, 5),
        Err(CheckError::TornRead {
            rank: 0,
            step: 1,
            buffer: Buffer::Data,
            element: 0,
            to: 1,
            sent_step: 0
        })
    );
}

/// Waits for all messages at the first overwrite, instead of for the messages concerned.
#[test]
fn direct_exchange_deadlocks_when_it_flushes_everything() {
    let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
    let mut schedules = direct.schedules(&Topology::flat(3), 0).unwrap();
    for schedule in &mut schedules {
        let first = schedule.steps.iter().position(|s| matches!(s, Step::Flush { .. })).unwrap();
        let all = (0..3).filter(|&to| to != schedule.rank);
        let all: Vec<Step> = all.map(|to| Step::Flush { to, upto: 2 }).collect();
        schedule.steps.splice(first..first, all);
    }
    assert!(matches!(check_flat(&schedules, 9), Err(CheckError::Deadlock { .. })));
}

/// The ring adds in another order for every block.
#[test]
fn ring_does_not_keep_the_order() {
    let ring = |topology: &Topology, rank: Rank, _root: Rank| {
        let p = topology.world_size;
        let (next, previous) = ((rank + 1) % p, (rank + p - 1) % p);
        let block = |back: usize| Loc::data(Span::block((rank + 2 * p - back) % p, p));
        let mut steps = vec![];
        for round in 0..p - 1 {
            let finish = round + 2 == p;
            steps.push(Step::Send { to: next, src: block(round) });
            let dst = block(round + 1);
            steps.push(Step::RecvReduce { from: previous, dst, side: Side::Left, finish });
        }
        for round in 0..p - 1 {
            steps.push(Step::Send { to: next, src: block(p - 1 + round) });
            steps.push(Step::Recv { from: previous, dst: block(p + round) });
        }
        steps
    };
    let error = run(Collective::AllReduce, 3, 3, ring).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("should be\n  finish(((r0[1] + r1[1]) + r2[1]))\nbut is"), "{text}");
    assert!(text.contains("finish(((r1[1] + r2[1]) + r0[1]))"), "{text}");
}

/// The textbook's reduce, in place: ranks between the leaves and the root lose their data.
#[test]
fn reduce_leaves_other_ranks_data_alone() {
    let in_place = |_: &Topology, rank, _| {
        let add = |from, finish| Step::RecvReduce { from, dst: DATA, side: Side::Right, finish };
        match rank {
            0 => vec![add(1, false), add(2, true)],
            2 => vec![add(3, false), Step::Send { to: 0, src: DATA }],
            _ => vec![Step::Send { to: rank - 1, src: DATA }],
        }
    };
    let error = run(Collective::Reduce, 4, 5, in_place);
    let (found, expected) = ("(r2[0] + r3[0])".into(), "r2[0]".into());
    assert_eq!(error, Err(CheckError::Result { rank: 2, call: 0, element: 0, found, expected }));
}

// ---- One change to a right schedule ----

/// Swap, then add: right for two ranks, and easy to break.
fn swap(rank: Rank) -> Vec<Step> {
    let side = if rank == 0 { Side::Right } else { Side::Left };
    vec![
        Step::Send { to: 1 - rank, src: DATA },
        Step::Recv { from: 1 - rank, dst: TEMP },
        Step::Reduce { dst: DATA, src: TEMP, side, finish: true },
    ]
}

#[test]
fn swap_is_right() {
    let cost = Cost { rounds: 1, messages: 1, elements: 5, combined: 5, ..Cost::default() };
    assert_eq!(run(Collective::AllReduce, 2, 5, |_, rank, _| swap(rank)), Ok(cost));
}

#[test]
fn wrong_operand_order() {
    let error = run(Collective::AllReduce, 2, 5, |_, rank, _| {
        let mut steps = swap(rank);
        if let Step::Reduce { side, .. } = &mut steps[2] {
            *side = Side::Right;
        }
        steps
    });
    assert_eq!(error, wrong(1, 0, "finish((r1[0] + r0[0]))"));
}

#[test]
fn finish_missing() {
    let error = run(Collective::AllReduce, 2, 5, |_, rank, _| {
        let mut steps = swap(rank);
        if let (1, Step::Reduce { finish, .. }) = (rank, &mut steps[2]) {
            *finish = false;
        }
        steps
    });
    assert_eq!(error, wrong(1, 0, "(r0[0] + r1[0])"));
}

#[test]
fn finish_twice() {
    let binomial = Algorithm::find(Collective::AllReduce, "binomial").unwrap();
    let mut schedules = binomial.schedules(&Topology::flat(3), 0).unwrap();
    for step in &mut schedules[0].steps {
        if let Step::RecvReduce { finish, .. } = step {
            *finish = true;
        }
    }
    let Err(CheckError::Result { found, .. }) = check_flat(&schedules, 5) else { panic!() };
    assert_eq!(found, "finish((finish((r0[0] + r1[0])) + r2[0]))");
}

#[test]
fn wrong_block() {
    let error = run(Collective::AllReduce, 2, 4, |_, rank, _| {
        let (low, high) = (Span::block(0, 2), Span::block(1, 2));
        let side = if rank == 0 { Side::Right } else { Side::Left };
        let mut steps = vec![];
        // The halves cross on the way.
        for (sent, received) in [(low, high), (high, low)] {
            steps.push(Step::Send { to: 1 - rank, src: Loc::data(sent) });
            steps.push(Step::Recv { from: 1 - rank, dst: Loc::scratch(0, received) });
        }
        steps.push(Step::Reduce { dst: DATA, src: TEMP, side, finish: true });
        steps
    });
    assert_eq!(error, wrong(0, 0, "finish((r0[0] + r1[2]))"));
}

#[test]
fn scratch_of_the_operation_before() {
    let error = run(Collective::AllReduce, 2, 5, |_, rank, _| {
        let [send, recv, reduce] = swap(rank).try_into().unwrap();
        vec![send, reduce, recv]
    });
    // The flush before the reduce is step 1, and would wait for a receive that comes later.
    assert!(matches!(error, Err(CheckError::Deadlock { .. })), "{error:?}");

    let error = run(Collective::AllReduce, 2, 5, |_, rank, _| {
        let mut steps = swap(rank);
        if rank == 0 {
            steps.rotate_right(1);
        }
        steps
    });
    assert_eq!(
        error,
        Err(CheckError::Unwritten {
            rank: 0,
            step: 0,
            owner: 0,
            buffer: Buffer::Scratch(0),
            element: 0
        })
    );
}

#[test]
fn data_that_nobody_sent() {
    let error = run(Collective::Broadcast, 2, 5, |_, _, _| vec![]);
    assert_eq!(
        error,
        Err(CheckError::Result {
            rank: 1,
            call: 0,
            element: 0,
            found: "never written".into(),
            expected: "r0[0]".into()
        })
    );
    // A rank forwards the block of rank 1 before it has received it.
    let error = run(Collective::AllGather, 2, 5, |_, rank, _| {
        vec![Step::Send { to: 1 - rank, src: Loc::data(Span::block(1 - rank, 2)) }]
    });
    assert_eq!(
        error,
        Err(CheckError::Unwritten { rank: 0, step: 0, owner: 0, buffer: Buffer::Data, element: 5 })
    );
}

#[test]
fn everyone_receives_first() {
    let error = run(Collective::AllReduce, 2, 5, |_, rank, _| {
        let [send, recv, reduce] = swap(rank).try_into().unwrap();
        vec![recv, send, reduce]
    });
    assert_eq!(
        error.unwrap_err().to_string(),
        "deadlock:\n  \
         rank 0 waits for rank 1 at step 0: recv    scratch0 <- rank 1\n  \
         rank 1 waits for rank 0 at step 0: recv    scratch0 <- rank 0"
    );
}

#[test]
fn message_that_nobody_takes() {
    // Its sender waits until the receiver takes it.
    let error = run(Collective::Broadcast, 2, 5, |_, rank, _| match rank {
        0 => vec![],
        _ => vec![Step::Send { to: 0, src: Loc::data(Span::EMPTY) }],
    });
    let text = "deadlock:\n  \
                rank 1 waits for rank 0 at step 1: flush   until rank 0 has taken message 1";
    assert_eq!(error.unwrap_err().to_string(), text);

    // It is taken, but in the next call.
    let twice = |_: &Topology, rank, _| match rank {
        0 => vec![Step::Send { to: 1, src: DATA }, Step::Send { to: 1, src: DATA }],
        _ => vec![Step::Recv { from: 0, dst: DATA }],
    };
    let error = run(Collective::Broadcast, 2, 5, twice);
    assert_eq!(error, Err(CheckError::UnmatchedSend { from: 0, step: 1, to: 1 }));

    // Nothing waits for it.
    let mut schedules = schedules(Collective::Broadcast, 2, twice);
    schedules[0].steps[2] = Step::Flush { to: 1, upto: 1 };
    assert_eq!(
        check_flat(&schedules, 5),
        Err(CheckError::NotFlushed { rank: 0, sent_step: 1, to: 1 })
    );
}

#[test]
fn message_of_the_next_operation() {
    let error = run(Collective::Broadcast, 2, 5, |_, rank, _| match rank {
        0 => vec![Step::Send { to: 1, src: DATA }],
        _ => vec![Step::Recv { from: 0, dst: DATA }, Step::Recv { from: 0, dst: TEMP }],
    });
    assert_eq!(error, Err(CheckError::UnmatchedRecv { rank: 1, step: 1, from: 0 }));
}

#[test]
fn message_of_another_length() {
    let error = run(Collective::Broadcast, 2, 5, |_, rank, _| match rank {
        0 => vec![Step::Send { to: 1, src: DATA }],
        _ => vec![Step::Recv { from: 0, dst: Loc::data(Span::block(1, 2)) }],
    });
    assert_eq!(
        error,
        Err(CheckError::MessageLengths {
            rank: 1,
            step: 0,
            expected: 3,
            from: 0,
            sent_step: 0,
            sent: 5
        })
    );
}

#[test]
fn operands_of_different_lengths() {
    const HALF: Loc = Loc::scratch(0, Span::block(0, 2));
    let error =
        run(Collective::AllReduce, 1, 5, |_, _, _| vec![Step::Copy { dst: HALF, src: DATA }]);
    assert_eq!(
        error,
        Err(CheckError::OperandLengths {
            rank: 0,
            step: 0,
            dst: Box::new(HALF),
            dst_len: 2,
            src: Box::new(DATA),
            src_len: 5
        })
    );
}

/// One round around the circle tells each rank only about the rank before it.
#[test]
fn barrier_that_is_left_too_early() {
    const NOTHING: Loc = Loc::data(Span::EMPTY);
    let error = run(Collective::Barrier, 3, 0, |_, rank, _| {
        vec![
            Step::Send { to: (rank + 1) % 3, src: NOTHING },
            Step::Recv { from: (rank + 2) % 3, dst: NOTHING },
        ]
    });
    assert!(matches!(error, Err(CheckError::EarlyExit { .. })), "{error:?}");
}

#[test]
fn formula_that_is_off_by_one() {
    for place in 0..5 {
        let [rounds, messages, elements, combined, shared_elements] =
            [0, 1, 2, 3, 4].map(|at| usize::from(at == place));
        for row in ALGORITHMS {
            for world in worlds(row) {
                let formula = (row.cost)(&world, 2, 9);
                let add = |cost: Cost| Cost {
                    rounds: cost.rounds + rounds,
                    messages: cost.messages + messages,
                    elements: cost.elements + elements,
                    combined: cost.combined + combined,
                    shared_elements: cost.shared_elements + shared_elements,
                };
                let schedules = row.schedules(&world, 2).unwrap();
                assert_eq!(check_schedules(&world, &schedules, 9), Ok(formula));
                assert_ne!(check_schedules(&world, &schedules, 9), Ok(add(formula)));
            }
        }
    }
    let free = Algorithm { cost: |_, _, _| Cost::default(), ..ALGORITHMS[0] };
    assert!(matches!(check(&free, &Topology::flat(2), 0, 4), Err(CheckError::Cost { .. })));
}

// ---- Form ----

#[test]
fn rules_of_form() {
    let whole = Span::WHOLE;
    let input = Loc::input(whole);
    let leaves = |ranks: &[Rank]| -> Vec<(Node, Loc)> {
        ranks.iter().map(|&rank| (Node::leaf(rank), Loc::scratch(rank, whole))).collect()
    };
    let tree = |srcs| Step::ReduceTree { dsts: vec![DATA], srcs, finish: true };
    let span = |first, count, of| Step::Send { to: 1, src: Loc::data(Span { first, count, of }) };
    let reduce = |src| Step::Reduce { dst: DATA, src, side: Side::Left, finish: false };

    for (rule, step) in [
        (Rule::Peer, Step::Send { to: 3, src: DATA }),
        (Rule::Peer, Step::Recv { from: 0, dst: DATA }),
        (Rule::Span, span(0, 1, 0)),
        (Rule::Span, span(2, 2, 3)),
        (Rule::Span, span(usize::MAX, 2, 3)),
        (Rule::Input, Step::Copy { dst: DATA, src: input }),
        (Rule::SameBuffer, reduce(DATA)),
        (Rule::SameBuffer, Step::Copy { dst: TEMP, src: TEMP }),
        (Rule::NotATree, tree(vec![])),
        (Rule::NotATree, tree(leaves(&[0, 2]))),
        (Rule::NotATree, tree(leaves(&[1, 0]))),
        (Rule::NotATree, tree(leaves(&[0, 1, 2, 3]))),
        (Rule::NotATree, tree(vec![(Node { lo: 1, len: usize::MAX }, TEMP)])),
        (Rule::TreeInput, tree(vec![(Node::leaf(0), Loc::data(Span::block(0, 2)))])),
        (Rule::FlushAhead, Step::Flush { to: 1, upto: 1 }),
    ] {
        let result = run_raw(Collective::AllReduce, 3, 5, &step);
        assert_eq!(result, Err(CheckError::Form { rank: 0, step: 0, rule }), "{step}");
    }
    let write_input = Step::Copy { dst: input, src: DATA };
    let result = run_raw(Collective::AllGather, 3, 5, &write_input);
    assert_eq!(result, Err(CheckError::Form { rank: 0, step: 0, rule: Rule::InputWritten }));
}

#[test]
fn receives_that_are_posted_together_are_disjoint() {
    let recv = |from, first| Step::Recv { from, dst: Loc::data(Span { first, count: 2, of: 4 }) };
    let rank_0 = |steps: Vec<Step>| {
        let mut schedules = schedules(Collective::AllReduce, 3, |_, _, _| vec![]);
        schedules[0].steps = steps;
        check_flat(&schedules, 8)
    };
    let meet = Err(CheckError::Form { rank: 0, step: 1, rule: Rule::ReceivesMeet });
    assert_eq!(rank_0(vec![recv(1, 0), recv(2, 1)]), meet);
    for steps in [
        vec![recv(1, 0), recv(2, 2)],
        vec![recv(1, 0), Step::Send { to: 1, src: DATA }, recv(2, 1)],
    ] {
        assert!(!matches!(rank_0(steps), Err(CheckError::Form { .. })), "these may follow");
    }
}

#[test]
fn schedules_of_different_worlds() {
    let doubling = Algorithm::find(Collective::AllReduce, "doubling").unwrap();
    let mut schedules = doubling.schedules(&Topology::flat(4), 0).unwrap();
    schedules.swap(1, 2);
    assert_eq!(check_flat(&schedules, 5), Err(CheckError::NotOneWorld { index: 1 }));
    assert_eq!(check_flat(&[], 5), Err(CheckError::NotOneWorld { index: 0 }));
    assert_eq!(
        check(doubling, &Topology::flat(4), 4, 5),
        Err(CheckError::Schedule(Error::RootOutOfRange { root: 4, world_size: 4 }))
    );
}

// ---- Every single change of every algorithm ----

/// So many elements that every block of 5 has some, and that no two lengths are equal by accident.
const LEN: usize = 23;

#[test]
fn every_step_is_needed() {
    for_each_step(|schedules, rank, step| {
        schedules[rank].steps.remove(step);
        true
    });
}

/// The checker finds a step that runs twice, unless it writes the same values again or waits for a past
/// event.
#[test]
fn no_step_may_be_repeated() {
    let again_is_wrong = |step: &Step| match step {
        Step::Copy { .. } | Step::Flush { .. } | Step::Wait { .. } => false,
        Step::ReduceTree { dsts, srcs, .. } => srcs.iter().any(|(_, src)| dsts.contains(src)),
        _ => true,
    };
    for_each_step_if(again_is_wrong, |schedules, rank, step| {
        let steps = &mut schedules[rank].steps;
        let again = steps[step].clone();
        steps.insert(step, again);
        true
    });
}

#[test]
fn every_operand_order_and_finish_matters() {
    for change in ["side", "finish"] {
        for_each_step(|schedules, rank, step| match &mut schedules[rank].steps[step] {
            Step::RecvReduce { side, finish, .. } | Step::Reduce { side, finish, .. } => {
                match (change, *side) {
                    ("finish", _) => *finish = !*finish,
                    (_, Side::Left) => *side = Side::Right,
                    (_, Side::Right) => *side = Side::Left,
                }
                true
            }
            Step::ReduceTree { srcs, finish, .. } => {
                match change {
                    "finish" => *finish = !*finish,
                    _ if srcs.len() < 2 => return false,
                    _ => {
                        let second = srcs[1].1;
                        srcs[1].1 = std::mem::replace(&mut srcs[0].1, second);
                    }
                }
                true
            }
            _ => false,
        });
    }
}

#[test]
fn every_peer_matters() {
    for_each_step(|schedules, rank, step| {
        let Schedule { world_size, steps, .. } = &mut schedules[rank];
        let other =
            |peer: Rank| (1..*world_size).map(|k| (peer + k) % *world_size).find(|&r| r != rank);
        match &mut steps[step] {
            Step::Send { to: peer, .. }
            | Step::Recv { from: peer, .. }
            | Step::RecvReduce { from: peer, .. }
            | Step::Wait { peer, .. } => *peer = other(*peer).unwrap(),
            Step::Copy { src: Loc { peer: Some(peer), .. }, .. } => *peer = other(*peer).unwrap(),
            Step::Copy { dst: Loc { peer: Some(peer), .. }, .. } => *peer = other(*peer).unwrap(),
            Step::ReduceTree { srcs, .. } => {
                let of_peers = srcs.iter_mut().find_map(|(_, src)| src.peer.as_mut());
                let Some(peer) = of_peers else { return false };
                *peer = other(*peer).unwrap();
            }
            _ => return false,
        }
        true
    });
}

#[test]
fn every_block_matters() {
    for_each_step(|schedules, rank, step| {
        let before = places(&schedules[rank], step);
        let loc = match &mut schedules[rank].steps[step] {
            Step::Send { src: loc, .. }
            | Step::Recv { dst: loc, .. }
            | Step::Copy { dst: loc, .. } => loc,
            Step::ReduceTree { dsts, .. } => &mut dsts[0],
            _ => return false,
        };
        let Span { first, count, of } = &mut loc.span;
        // Scratch may be longer than the data.
        let blocks = (*first + *count).max(*of);
        if *count == blocks || *count == 0 {
            return false;
        }
        *first = (*first + 1) % (blocks - *count + 1);
        places(&schedules[rank], step) != before
    });
}

#[test]
fn every_source_block_matters() {
    for_each_step(|schedules, rank, step| {
        let before = places(&schedules[rank], step);
        let loc = match &mut schedules[rank].steps[step] {
            Step::Copy { src, .. } => src,
            Step::ReduceTree { srcs, .. } => &mut srcs[0].1,
            _ => return false,
        };
        let Span { first, count, of } = &mut loc.span;
        *first = (*first + 1) % (*of - *count + 1);
        count < of && places(&schedules[rank], step) != before
    });
}

/// What a step accesses. Two blocks of a slot may lie on one shelf.
fn places(schedule: &Schedule, step: usize) -> Vec<Range<usize>> {
    let step = &schedule.steps[step];
    step.writes().chain(step.reads()).map(|loc| schedule.resolve(loc, &Counts::Even(LEN))).collect()
}

/// A wait for too few posts is a race, or an early exit from a barrier.
#[test]
fn every_count_of_posts_matters() {
    for_each_step(|schedules, rank, step| match &mut schedules[rank].steps[step] {
        Step::Wait { upto, .. } => {
            *upto -= 1;
            true
        }
        _ => false,
    });
}

/// Applies a change to each step of each rank of each algorithm in turn, and expects that the checker finds
/// it. The change says whether it concerns the step.
fn for_each_step(change: impl Fn(&mut Vec<Schedule>, Rank, usize) -> bool) {
    for_each_step_if(|_| true, change);
}

/// The same, where the change is wrong only for some steps.
fn for_each_step_if(
    is_wrong: impl Fn(&Step) -> bool,
    change: impl Fn(&mut Vec<Schedule>, Rank, usize) -> bool,
) {
    let mut changes = 0;
    for row in ALGORITHMS {
        for world in worlds(row) {
            let right = row.schedules(&world, 1).unwrap();
            assert!(check_schedules(&world, &right, LEN).is_ok());
            for rank in 0..world.world_size {
                for step in 0..right[rank].steps.len() {
                    let mut wrong = right.clone();
                    if change(&mut wrong, rank, step) {
                        changes += 1;
                        let result = check_schedules(&world, &wrong, LEN);
                        let found = result.is_err() == is_wrong(&right[rank].steps[step]);
                        assert!(found, "{result:?}\n{}{}", right[rank], wrong[rank]);
                    }
                }
            }
        }
    }
    assert!(changes > 20, "only {changes} changes");
}

/// One rank on each host, one host, and several hosts with several ranks.
fn worlds(row: &Algorithm) -> Vec<Topology> {
    let flat = [3, 4, 5].map(Topology::flat);
    let dealt = Topology::placed([0, 1, 0, 1, 0]).with_order(SumOrder::Placement);
    let shared = [&[3][..], &[5], &[2, 2], &[2, 2, 1]].map(Topology::hosts);
    let nodes = [&[0, 0, 1, 1][..], &[0, 0, 1, 1, 2, 2], &[0, 0, 0, 0, 1, 1]].map(|nodes| {
        Topology::hosts(&[nodes.len()]).with_nodes(nodes.iter().map(|&node| Some(node)))
    });
    let worlds = flat.into_iter().chain(shared).chain([dealt]).chain(nodes);
    let differ = |world: &Topology| row.memory != MemoryUse::Private || *world == flat_like(world);
    worlds.filter(|world| (row.applies)(world) && differ(world)).collect()
}

fn flat_like(world: &Topology) -> Topology {
    Topology::flat(world.world_size)
}

// ---- Helpers ----

fn check_flat(schedules: &[Schedule], elements: usize) -> Result<Cost, CheckError> {
    check_schedules(&Topology::flat(schedules.len()), schedules, elements)
}

fn schedules(
    collective: Collective,
    world_size: usize,
    generate: fn(&Topology, Rank, Rank) -> Vec<Step>,
) -> Vec<Schedule> {
    let cost = |_: &Topology, _, _| Cost::default();
    let algorithm = Algorithm { collective, name: "test", generate, cost, ..ALGORITHMS[1] };
    algorithm.schedules(&Topology::flat(world_size), 0).unwrap()
}

fn run(
    collective: Collective,
    world_size: usize,
    elements: usize,
    generate: fn(&Topology, Rank, Rank) -> Vec<Step>,
) -> Result<Cost, CheckError> {
    check_flat(&schedules(collective, world_size, generate), elements)
}

/// Rank 0 has this one step, without a flush added; the others have none.
fn run_raw(
    collective: Collective,
    world_size: usize,
    elements: usize,
    step: &Step,
) -> Result<Cost, CheckError> {
    let mut schedules = schedules(collective, world_size, |_, _, _| vec![]);
    schedules[0].steps.push(step.clone());
    check_flat(&schedules, elements)
}

fn wrong(rank: Rank, element: usize, found: &str) -> Result<Cost, CheckError> {
    Err(CheckError::Result {
        rank,
        call: 0,
        element,
        found: found.into(),
        expected: format!("finish((r0[{element}] + r1[{element}]))"),
    })
}

// ---- Elements that are narrower than their sums ----

/// Two ranks on a host, and one that is alone.
fn narrow_hierarchical() -> (Topology, Vec<Schedule>) {
    let world = Topology::hosts(&[2, 1]);
    let row = Algorithm::find(Collective::AllReduce, "hierarchical").unwrap();
    let schedules = row.narrow_schedules(&world, 0).unwrap();
    assert_eq!(check_narrow_schedules(&world, &schedules, 7).map(|_| ()), Ok(()));
    (world, schedules)
}

/// Moves every place that `rank` names in `from` to `to`.
fn moved(schedules: &mut [Schedule], rank: Rank, from: Buffer, to: Buffer) {
    let place = |loc: Loc| match loc.peer.is_none() && loc.buffer == from {
        true => Loc { buffer: to, ..loc },
        false => loc,
    };
    let steps = std::mem::take(&mut schedules[rank].steps).into_iter();
    schedules[rank].steps = steps.map(|step| step.moved(|rank| rank, place)).collect();
}

#[test]
fn a_sum_of_a_host_that_lies_in_narrow_scratch() {
    let (world, mut schedules) = narrow_hierarchical();
    moved(&mut schedules, 0, Buffer::Sum(0), Buffer::Scratch(7));
    let error = check_narrow_schedules(&world, &schedules, 7).unwrap_err();
    let place = Loc::scratch(7, Span::WHOLE);
    assert!(
        matches!(&error, CheckError::Width { rank: 0, place: it, .. } if **it == place),
        "{error}"
    );
}

/// The ends of a message disagree on its width, either way.
#[test]
fn a_message_of_another_width() {
    let (world, mut schedules) = narrow_hierarchical();
    // Rank 2 adds the sum of host 0, which rank 0 sends.
    moved(&mut schedules, 2, Buffer::Sum(2), Buffer::Scratch(7));
    let error = check_narrow_schedules(&world, &schedules, 7).unwrap_err();
    assert!(matches!(error, CheckError::Width { rank: 2, .. }), "{error}");

    let (world, mut schedules) = narrow_hierarchical();
    // Rank 0 adds what rank 2 brings.
    moved(&mut schedules, 0, Buffer::Scratch(1), Buffer::Sum(7));
    let error = check_narrow_schedules(&world, &schedules, 7).unwrap_err();
    assert!(matches!(error, CheckError::Width { rank: 0, .. }), "{error}");
}
