use drumline_schedule::step::Rank;
use drumline_schedule::{Algorithm, Cost, Counts, MemoryUse, Schedule, Topology};

use super::error::CheckError;
use super::expressions::CALLS;
use super::form::check_form;
use super::symbols::{Slots, Sums, Symbols};
use crate::walk::walk;

/// Checks an algorithm on blocks of `elements` elements, and returns its cost.
///
/// ```
/// use drumline_inspect::check;
/// use drumline_schedule::{Algorithm, Collective, Topology};
///
/// let doubling = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let cost = check::check(doubling, &Topology::flat(5), 0, 10).unwrap();
/// assert!(cost.rounds >= 3); // 5 ranks hear of each other
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
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
/// ```
/// use drumline_inspect::check;
/// use drumline_schedule::{Algorithm, Borders, Collective, Counts, Topology};
///
/// let direct = Algorithm::find(Collective::AllGather, "direct")?;
/// let counts = vec![Counts::ByRank(Borders::new(&[2, 0, 5]).unwrap()); 3];
/// let cost = check::check_uneven(direct, &Topology::flat(3), 0, &counts).unwrap();
/// assert_eq!(cost.elements, 10); // rank 2 sends its five to both others
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
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
/// ```
/// use drumline_inspect::check;
/// use drumline_schedule::{Algorithm, Collective, Topology};
///
/// let world = Topology::flat(3);
/// let mut schedules = Algorithm::find(Collective::Broadcast, "binomial")?.schedules(&world, 0)?;
/// assert!(check::check_schedules(&world, &schedules, 10).is_ok());
/// schedules[2].steps.clear(); // rank 2 does not receive
/// assert!(check::check_schedules(&world, &schedules, 10).is_err());
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
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
/// ```
/// use drumline_inspect::check;
/// use drumline_schedule::{Algorithm, Collective, Topology};
///
/// let world = Topology::hosts(&[2, 2]);
/// let row = Algorithm::find(Collective::AllReduce, "hierarchical")?;
/// assert!(check::check_narrow_schedules(&world, &row.narrow_schedules(&world, 0)?, 10).is_ok());
/// // The sum of a host would be rounded in the data.
/// assert!(check::check_narrow_schedules(&world, &row.schedules(&world, 0)?, 10).is_err());
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
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

/// Checks with slots in turn and, where two ranks may exchange slots, also with exchanged slots.
fn run_all(
    topology: &Topology,
    schedules: &[Schedule],
    counts: &[Counts],
    sums: Sums,
) -> Result<Cost, CheckError> {
    let cost = run(topology, schedules, counts, Slots::InTurn(2), sums)?;
    let stages = schedules.iter().any(|schedule| schedule.memory == MemoryUse::Staged);
    if stages && topology.ranks_by_host().iter().any(|ranks| ranks.len() == 2) {
        run(topology, schedules, counts, Slots::Exchanged, sums)?;
    }
    Ok(cost)
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
    use drumline_schedule::Collective;
    use drumline_schedule::step::Buffer;

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
            (Collective::Scan, "shm"),
            (Collective::ExclusiveScan, "shm"),
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
}
