use drumline_schedule::step::Rank;
use drumline_schedule::{Algorithm, Cost, Counts, MemoryUse, Pipeline, Schedule, Topology};

use super::error::CheckError;
use super::expressions::CALLS;
use super::form::check_form;
use super::symbols::{Slots, Sums, Symbols};
use crate::unroll::{SlotUse, Unrolling};
use crate::walk::walk;

/// Checks an algorithm on blocks of `elements` elements, and returns its cost.
///
/// # Errors
///
/// The first fault found; [`CheckError::Schedule`] when the root is not in the topology.
pub fn check(
    algorithm: &Algorithm,
    topology: &Topology,
    root: Rank,
    elements: usize,
) -> Result<Cost, CheckError> {
    let counts = vec![Counts::Even(elements); topology.world_size];
    let measured = run_both(algorithm, topology, root, &counts)?;
    let formula = (algorithm.cost)(topology, root, elements);
    match measured == formula {
        true => Ok(measured),
        false => Err(CheckError::Cost { measured, formula }),
    }
}

/// Checks an algorithm on blocks of different lengths, and returns its cost. `counts` has the lengths as each
/// rank, in order, knows them.
///
/// # Errors
///
/// The first fault found; [`CheckError::NotUneven`] where the algorithm does not serve such blocks.
pub fn check_uneven(
    algorithm: &Algorithm,
    topology: &Topology,
    root: Rank,
    counts: &[Counts],
) -> Result<Cost, CheckError> {
    match algorithm.uneven {
        true => run_both(algorithm, topology, root, counts),
        false => Err(CheckError::NotUneven),
    }
}

/// Checks the schedules of an algorithm, and those for elements that are narrower than their sums if they differ. Both
/// have the same cost, in elements.
fn run_both(
    algorithm: &Algorithm,
    topology: &Topology,
    root: Rank,
    counts: &[Counts],
) -> Result<Cost, CheckError> {
    let sums = if algorithm.partial_sums_travel { Sums::Travel } else { Sums::Stay };
    let cost = run_all(topology, &algorithm.schedules(topology, root)?, counts, sums)?;
    if !algorithm.sums_apart {
        return Ok(cost);
    }
    let apart = algorithm.narrow_schedules(topology, root)?;
    match run_all(topology, &apart, counts, Sums::Apart)? {
        measured if measured == cost => Ok(cost),
        measured => Err(CheckError::Cost { measured, formula: cost }),
    }
}

/// Checks schedules, one for each rank in order, on blocks of `elements` elements, and returns their cost. It
/// compares the cost with no formula.
///
/// # Errors
///
/// The first fault found.
pub fn check_schedules(
    topology: &Topology,
    schedules: &[Schedule],
    elements: usize,
) -> Result<Cost, CheckError> {
    run_all(topology, schedules, &even(schedules, elements), Sums::Travel)
}

/// The same for schedules of elements that are narrower than their sums: sums that are not finished lie in
/// [places for sums](drumline_schedule::step::Buffer::Sum), and nothing else does.
///
/// # Errors
///
/// The first fault found.
pub fn check_narrow_schedules(
    topology: &Topology,
    schedules: &[Schedule],
    elements: usize,
) -> Result<Cost, CheckError> {
    run_all(topology, schedules, &even(schedules, elements), Sums::Apart)
}

/// Checks an algorithm where `windows` windows of long data are under way, on blocks of `elements` elements, which
/// must be divisible into that number of windows, and these into the algorithm's parts. Both slots of a rank must have
/// room among the windows.
///
/// # Errors
///
/// The first fault found.
pub fn check_pipeline(
    algorithm: &Algorithm,
    topology: &Topology,
    root: Rank,
    windows: usize,
    elements: usize,
) -> Result<(), CheckError> {
    check_unrolled(
        topology,
        &algorithm.schedules(topology, root)?,
        windows,
        elements,
        Sums::Travel,
    )?;
    match algorithm.sums_apart {
        true => {
            let apart = algorithm.narrow_schedules(topology, root)?;
            check_unrolled(topology, &apart, windows, elements, Sums::Apart)
        }
        false => Ok(()),
    }
}

fn check_unrolled(
    topology: &Topology,
    schedules: &[Schedule],
    windows: usize,
    elements: usize,
    sums: Sums,
) -> Result<(), CheckError> {
    let first = check_form(topology, schedules)?;
    let exchange = may_exchange(topology, schedules).then_some(SlotUse::Exchanged);
    for slots in [SlotUse::InTurn].into_iter().chain(exchange) {
        let unroll = |schedule| {
            let pipeline = &Pipeline::of(schedule);
            let copies = pipeline.scratch_copies();
            Unrolling { topology, schedule, pipeline, copies, slots, windows }.schedule()
        };
        let unrolled: Vec<Schedule> = schedules.iter().map(unroll).collect();
        let posts = unrolled[0].posts();
        if let Some(other) = unrolled.iter().find(|schedule| schedule.posts() != posts) {
            let (rank, posts_of_first) = (other.rank, posts);
            return Err(CheckError::UnequalPosts { rank, posts: other.posts(), posts_of_first });
        }
        let counts = even(&unrolled, elements);
        let slots = Slots::InTurn(2);
        let mut symbols = Symbols::new(topology, first, &unrolled, &counts, slots, sums);
        walk(topology, &unrolled, CALLS, &mut symbols)?;
    }
    Ok(())
}

/// Checks with slots in turn and, where two ranks may exchange slots, also with exchanged slots.
fn run_all(
    topology: &Topology,
    schedules: &[Schedule],
    counts: &[Counts],
    sums: Sums,
) -> Result<Cost, CheckError> {
    let cost = run(topology, schedules, counts, Slots::InTurn(2), sums)?;
    if may_exchange(topology, schedules) {
        run(topology, schedules, counts, Slots::Exchanged, sums)?;
    }
    Ok(cost)
}

/// Whether some ranks may exchange slots.
fn may_exchange(topology: &Topology, schedules: &[Schedule]) -> bool {
    schedules.iter().any(|schedule| schedule.memory == MemoryUse::Staged)
        && topology.ranks_by_host().iter().any(|ranks| ranks.len() == 2)
}

fn even(schedules: &[Schedule], elements: usize) -> Vec<Counts> {
    vec![Counts::Even(elements); schedules.len()]
}

fn run(
    topology: &Topology,
    schedules: &[Schedule],
    counts: &[Counts],
    slots: Slots,
    sums: Sums,
) -> Result<Cost, CheckError> {
    let first = check_form(topology, schedules)?;
    if counts.len() != schedules.len() {
        return Err(CheckError::NotOneWorld { index: counts.len().min(schedules.len()) });
    }
    let mut symbols = Symbols::new(topology, first, schedules, counts, slots, sums);
    walk(topology, schedules, CALLS, &mut symbols)?;
    Ok(symbols.cost())
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_schedule::step::{Buffer, Step};
    use drumline_schedule::{ALGORITHMS, Collective, Lags};

    /// With one slot instead of two, a rank that is a call ahead writes to a slot that its neighbours still
    /// read.
    #[test]
    fn a_single_slot_is_not_enough() {
        let world = Topology::hosts(&[3]);
        for (collective, name) in [
            (Collective::AllReduce, "shm-oneshot"),
            (Collective::AllReduce, "hierarchical"),
            (Collective::Broadcast, "shm"),
            (Collective::Reduce, "shm"),
            (Collective::AllGather, "shm"),
            (Collective::ReduceScatter, "shm"),
            (Collective::Gather, "shm"),
            (Collective::Scatter, "shm"),
            (Collective::AllToAll, "shm"),
        ] {
            let algorithm = Algorithm::find(collective, name).unwrap();
            let schedules = algorithm.schedules(&world, 0).unwrap();
            let counts = even(&schedules, 9);
            assert!(run(&world, &schedules, &counts, Slots::InTurn(2), Sums::Travel).is_ok());
            let one = run(&world, &schedules, &counts, Slots::InTurn(1), Sums::Travel);
            let Err(CheckError::Race(race)) = one else {
                unreachable!("{collective} {name} needs no second slot")
            };
            assert_eq!(race.buffer, Buffer::Slot);
            assert_eq!(race.late.call.abs_diff(race.early.call), 1, "{race}");
        }
    }

    const WORLDS: &[&[usize]] = &[
        &[1, 1],
        &[2, 1],
        &[1, 2],
        &[2, 2],
        &[3, 2],
        &[1, 1, 1],
        &[2, 1, 3],
        &[2, 2, 2],
        &[3, 2, 2, 1],
    ];

    #[test]
    fn pipelines_are_right() {
        let (mut over_links, mut over_hosts) = (0, 0);
        for row in ALGORITHMS {
            let flat = (1..=9).map(Topology::flat);
            let worlds = WORLDS.iter().map(|hosts| Topology::hosts(hosts));
            let both = worlds.flat_map(|world| {
                [world.clone(), world.with_order(drumline_schedule::SumOrder::Placement)]
            });
            for world in flat.chain(both).filter(|world| (row.applies)(world)) {
                let schedule = row.schedule(&world, 0, 0).unwrap();
                if !schedule.is_pipelined() {
                    continue;
                }
                let shares = row.memory != MemoryUse::Private;
                *(if shares { &mut over_hosts } else { &mut over_links }) += 1;
                // A host's slots need room for the windows of two turns.
                let fewest = if shares { 2 * schedule.lags.slot_windows } else { 1 };
                for windows in fewest..fewest + 6 {
                    // The parts of a window in a world of these hosts.
                    let parts = world.world_size * world.ranks_by_host().len() * 2;
                    for elements in [0, parts * windows] {
                        check_pipeline(row, &world, 0, windows, elements).unwrap_or_else(|error| {
                            panic!(
                                "{} {}, {world:?}, {windows} windows: {error}",
                                row.collective, row.name
                            )
                        });
                    }
                }
            }
        }
        assert!(over_links > 10 && over_hosts > 50, "{over_links}, {over_hosts}");
    }

    /// The checker finds two windows that use the same scratch at once.
    #[test]
    fn windows_under_way_need_scratch_of_their_own() {
        let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
        let topology = Topology::flat(3);
        let schedules = direct.schedules(&topology, 0).unwrap();
        let check = |copies: usize| {
            let unrolled = schedules.iter().map(|schedule| {
                // What has come in is summed one turn later.
                let is_sum = |step: &Step| matches!(step, Step::ReduceTree { .. });
                let sum = schedule.steps.iter().position(is_sum).unwrap();
                let lag = |(index, lag)| lag + usize::from(index >= sum);
                let lags = schedule.lags.of_steps.iter().copied().enumerate().map(lag).collect();
                let lags = Lags { of_steps: lags, ..schedule.lags.clone() };
                let later = Schedule { lags, ..schedule.clone() };
                let copies_of = |schedule| Pipeline::of(schedule).scratch_copies();
                assert_eq!((copies_of(schedule), copies_of(&later)), (1, 2));
                let pipeline = &Pipeline::of(&later);
                let slots = SlotUse::InTurn;
                let (topology, schedule, windows) = (&topology, &later, 5);
                Unrolling { topology, schedule, pipeline, copies, slots, windows }.schedule()
            });
            check_schedules(&topology, &unrolled.collect::<Vec<_>>(), 30)
        };
        check(1).unwrap_err();
        check(2).unwrap();
    }

    /// A slot of one turn is not that of the next.
    #[test]
    fn what_is_in_a_slot_is_read_in_the_same_turn() {
        let row = Algorithm::find(Collective::AllReduce, "hierarchical").unwrap();
        let late = Algorithm {
            lags: |topology, rank, steps| {
                let row = Algorithm::find(Collective::AllReduce, "hierarchical").unwrap();
                let mut lags = (row.lags)(topology, rank, steps);
                let is_fetch =
                    |step: &Step| matches!(step, Step::Copy { src, .. } if src.peer.is_some());
                let last = steps.iter().rposition(is_fetch).unwrap();
                lags.of_steps[last] += 1;
                lags
            },
            ..*row
        };
        let world = Topology::hosts(&[4, 4]);
        check_pipeline(row, &world, 0, 6, 6 * 8).unwrap();
        check_pipeline(&late, &world, 0, 6, 6 * 8).unwrap_err();
    }
}
