use drumline_schedule::step::{Buffer, Loc, Span, Step};
use drumline_schedule::{Blocks, Pipeline, Schedule};

/// A schedule without windows that does the same as `schedule` in a pipeline of `windows` windows. The data
/// must be divisible into this number of equal parts. The checker uses it to prove pipelines.
///
/// ```
/// use drumline_inspect::{check, unrolled};
/// use drumline_schedule::{Algorithm, Collective, Topology};
///
/// let world = Topology::flat(3);
/// let direct = Algorithm::find(Collective::AllReduce, "direct")?;
/// let schedules = direct.schedules(&world, 0)?;
/// let unrolled: Vec<_> = schedules.iter().map(|schedule| unrolled(schedule, 4)).collect();
/// // Windows do not get in each other's way.
/// check::check_schedules(&world, &unrolled, 24).unwrap();
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
pub fn unrolled(schedule: &Schedule, windows: usize) -> Schedule {
    let pipeline = Pipeline::of(schedule);
    unroll(schedule, &pipeline, pipeline.scratch_copies(), windows)
}

fn unroll(schedule: &Schedule, pipeline: &Pipeline, copies: usize, windows: usize) -> Schedule {
    let steps = (0..pipeline.turns(windows)).flat_map(|turn| {
        schedule.steps.iter().enumerate().filter_map(move |(index, step)| {
            let window = turn.checked_sub(pipeline.lag(index)).filter(|it| *it < windows)?;
            Some(match *step {
                Step::Flush { to, upto } => {
                    let upto = pipeline.posted(schedule, to, upto, window, windows);
                    Step::Flush { to, upto }
                }
                _ => {
                    let place = |loc| within(schedule, copies, loc, window, windows);
                    step.clone().moved(|rank| rank, place)
                }
            })
        })
    });
    // The new steps name parts of blocks.
    Schedule { steps: steps.collect(), uneven: false, ..schedule.clone() }
}

/// A place in one window, as a place in the whole. Windows take turns in using the copies of scratch.
fn within(schedule: &Schedule, copies: usize, loc: Loc, window: usize, windows: usize) -> Loc {
    let Span { first, count, of } = loc.span;
    let first = match (loc.buffer, schedule.blocks(loc)) {
        (Buffer::Scratch(_) | Buffer::Sum(_), _) => first,
        // A window of every block.
        (_, Blocks::All) => first * windows + window,
        (_, Blocks::One | Blocks::None) => window * of + first,
    };
    let buffer = match loc.buffer {
        Buffer::Scratch(slot) => Buffer::Scratch(slot * copies + window % copies),
        Buffer::Sum(slot) => Buffer::Sum(slot * copies + window % copies),
        other => other,
    };
    Loc { buffer, span: Span { first, count, of: of * windows }, ..loc }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{ALGORITHMS, Algorithm, Collective, Topology};

    use super::*;
    use crate::check::check_schedules;

    #[test]
    fn pipelines_are_right() {
        let pipelined = || ALGORITHMS.iter().filter(|row| row.pipelined);
        assert!(pipelined().count() > 1);
        for row in pipelined() {
            for world_size in 1..=9 {
                let schedules = row.schedules(&Topology::flat(world_size), 0).unwrap();
                for windows in 1..=7 {
                    let unrolled: Vec<Schedule> =
                        schedules.iter().map(|schedule| unrolled(schedule, windows)).collect();
                    for elements in [0, 1, 3].map(|part| part * windows * world_size) {
                        check_schedules(&Topology::flat(world_size), &unrolled, elements)
                            .unwrap_or_else(|error| {
                                panic!("{row:?}, {world_size} ranks, {windows} windows: {error}")
                            });
                    }
                }
            }
        }
    }

    /// The checker finds two windows that use the same scratch at once.
    #[test]
    fn windows_under_way_need_scratch_of_their_own() {
        let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
        let topology = Topology::flat(3);
        let schedules = direct.schedules(&topology, 0).unwrap();
        let check = |copies: usize| {
            let unrolled = schedules.iter().map(|schedule| {
                let pipeline = Pipeline::of(schedule);
                // What has come in is summed one turn later.
                let is_sum = |step: &Step| matches!(step, Step::ReduceTree { .. });
                let sum = schedule.steps.iter().position(is_sum).unwrap();
                let lag = |index| pipeline.lag(index) + usize::from(index >= sum);
                let lags = (0..schedule.steps.len()).map(lag).collect();
                let later = Pipeline::of_lags(schedule, lags);
                assert_eq!((pipeline.scratch_copies(), later.scratch_copies()), (1, 2));
                unroll(schedule, &later, copies, 5)
            });
            check_schedules(&topology, &unrolled.collect::<Vec<_>>(), 30)
        };
        check(1).unwrap_err();
        check(2).unwrap();
    }
}
