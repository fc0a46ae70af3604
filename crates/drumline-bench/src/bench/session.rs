//! All cases, and the order in which they take turns.

use std::{
    io::Write,
    path::{Path, PathBuf},
    thread,
};

use drumline::{Config, DType, ReduceOp, files, init_process_group};

use super::{
    bound::Bound,
    carrier::{Carrier, Hosts, is_over_mpi},
    explain::explain,
    measure::{Bill, Meter, Pace, Turn},
    operation::{Operation, Place},
    options::Options,
    plot, probe,
    row::{Row, quantile},
    table::Heading,
    trial::{Case, Trial},
};
use crate::{Error, Result, progress::Progress};

/// How often the bound is measured in each round; less often if that takes longer than a turn.
const BOUND_SAMPLES: usize = 5;

/// Measures what `options` ask for, as one of the ranks of a job. Rank 0 prints to `out` and writes
/// files. Returns the exit code: 1 if a result was wrong, else 0.
///
/// # Errors
///
/// [`Error::Usage`] says what cannot be measured, or which file cannot be written.
pub fn measure(options: &Options, out: &mut dyn Write) -> Result<u8> {
    let mut config = Config::from_env().map_err(Error::Measure)?;
    // The algorithm is for the operations that are measured, not for the exchange of figures.
    let all_reduce = config.all_reduce.take();
    let url = if is_over_mpi() { "mpi://" } else { "env://" };
    let control = init_process_group(url, &config).map_err(Error::Measure)?;
    options.check(control.world_size())?;
    // This configuration has the addresses that the control group has found for this rank.
    let mut config = control.config().clone();
    config.all_reduce = all_reduce;
    let is_first = control.rank() == 0;
    if is_first {
        options.check_files()?;
    }
    let hosts = Hosts::find(&control)?;
    let mut carriers = Carrier::for_each_transport(options, &control, &hosts, &config)?;

    let heading = Heading {
        ranks: control.world_size(),
        hosts: hosts.count(),
        cores: thread::available_parallelism().map_or(1, usize::from),
        untouched: options.untouched,
        rounds: options.rounds,
    };
    let mut tell = |text: &str| match is_first {
        true => out.write_all(text.as_bytes()).map_err(Error::system("write the figures")),
        false => Ok(()),
    };
    tell(&heading.text())?;
    let session = Session { meter: Meter { control: &control, options }, options, hosts: &hosts };
    let turns = session.turns(&carriers);
    let mut progress = Progress::new("measuring", turns, is_first);
    let mut rows = Vec::new();
    for &operation in &options.operations.items {
        for bytes in options.sizes() {
            let cases = session.cases(operation, bytes, &carriers);
            let measured = session.size(bytes, &cases, &mut carriers, &mut progress)?;
            progress.clear();
            measured.iter().try_for_each(|row| tell(&row.text()))?;
            rows.extend(measured);
            if operation == Operation::Barrier {
                break;
            }
        }
    }
    if rows.is_empty() {
        return Err(Error::Usage(
            "nothing to measure: no operation has elements of that size, in that place, of that \
             kind; try a larger --max-bytes, or --place, --buffers and --calls with `all`"
                .to_owned(),
        ));
    }
    tell(&Heading::summary(&rows))?;
    if is_first {
        for path in write_files(options, &heading, &rows)? {
            tell(&format!("# wrote {}\n", path.display()))?;
        }
    }
    for carrier in carriers {
        carrier.group.destroy().map_err(Error::Measure)?;
    }
    control.destroy().map_err(Error::Measure)?;
    Ok(rows.iter().any(|row| row.wrong > 0).into())
}

/// Returns the files that it has written.
fn write_files<'a>(options: &'a Options, heading: &Heading, rows: &[Row]) -> Result<Vec<&'a Path>> {
    let write = |path: &Path, text: String| {
        let problem = |error| Error::Usage(format!("cannot write {}: {error}", path.display()));
        files::write(path, text.as_bytes()).map_err(problem)
    };
    if let Some(path) = &options.json {
        write(path, format!("{:#}\n", heading.json(rows)))?;
    }
    if let Some(path) = &options.svg {
        let title = format!("drumline bench, {} ranks on {} hosts", heading.ranks, heading.hosts);
        write(path, plot::svg(title, rows)?)?;
    }
    Ok(options.json.iter().chain(&options.svg).map(PathBuf::as_path).collect())
}

/// A case, and the index of its carrier.
struct Planned {
    case: Case,
    carrier: usize,
}

struct Session<'a> {
    meter: Meter<'a>,
    options: &'a Options,
    hosts: &'a Hosts,
}

impl Session<'_> {
    /// All cases of that operation and size.
    fn cases(&self, operation: Operation, bytes: usize, carriers: &[Carrier]) -> Vec<Planned> {
        let options = self.options;
        let ranks = self.hosts.0.len();
        if operation == Operation::SendRecv && ranks == 1 {
            return Vec::new();
        }
        let mut pairs: Vec<(ReduceOp, DType)> = match operation.reduces() {
            true => options.operators().collect(),
            false => options.datatype.items.iter().map(|&dtype| (ReduceOp::Sum, dtype)).collect(),
        };
        if operation == Operation::Barrier {
            pairs.truncate(1);
        }
        let mut cases = Vec::new();
        for (op, dtype) in pairs {
            let block = operation.block(bytes / dtype.size(), ranks);
            if block == 0 && operation != Operation::Barrier {
                continue;
            }
            for (carrier, Carrier { group, .. }) in carriers.iter().enumerate() {
                // Without shared memory, buffers of either kind are the same.
                let kinds = if drumline::algorithms::shares_memory(group) && block > 0 {
                    usize::MAX
                } else {
                    1
                };
                for &buffers in options.buffers.items.iter().take(kinds) {
                    for &style in &options.calls.items {
                        let wanted = |place: &&Place| options.place.items.contains(place);
                        for &place in operation.places().iter().filter(wanted) {
                            let root = options.root;
                            let case =
                                Case { operation, place, dtype, op, root, block, buffers, style };
                            cases.push(Planned { case, carrier });
                        }
                    }
                }
            }
        }
        cases
    }

    /// How many turns all cases of all operations and sizes take.
    fn turns(&self, carriers: &[Carrier]) -> usize {
        let cases = |operation, bytes| self.cases(operation, bytes, carriers).len();
        let of = |operation: &Operation| -> usize {
            let sizes = if *operation == Operation::Barrier { 1 } else { usize::MAX };
            self.options.sizes().into_iter().take(sizes).map(|bytes| cases(*operation, bytes)).sum()
        };
        self.options.operations.items.iter().map(of).sum::<usize>() * self.options.rounds
    }

    /// All rounds of one size.
    fn size(
        &self,
        bytes: usize,
        cases: &[Planned],
        carriers: &mut [Carrier],
        progress: &mut Progress,
    ) -> Result<Vec<Row>> {
        let Session { meter, options, hosts } = self;
        // The trials of a carrier share its group. Its bound is changed in every round.
        let (groups, mut bounds): (Vec<_>, Vec<_>) =
            carriers.iter_mut().map(|it| ((&it.group, &it.transport), &mut it.bound)).unzip();
        let mut running: Vec<Running<'_>> = cases
            .iter()
            .map(|planned| {
                let mut trial = planned.case.trial(groups[planned.carrier].0)?;
                let mut turns = vec![Turn::default()];
                let pace = meter.warm_up(&mut *trial, &mut turns[0])?;
                Ok(Running { trial, pace, turns })
            })
            .collect::<drumline::Result<_>>()
            .map_err(Error::Measure)?;

        let look = || probe::hand_over(meter.control, &hosts.0).map_err(Error::Measure);
        let mut hand_over_ns = vec![look()?];
        let mut bound_us: Vec<Vec<f64>> = vec![Vec::new(); bounds.len()];
        for round in 0..options.rounds {
            for running in &mut running {
                let turn = meter.turn(&mut *running.trial, running.pace, round);
                running.turns.push(turn.map_err(Error::Measure)?);
                progress.step();
            }
            for (bound, times) in bounds.iter_mut().zip(&mut bound_us) {
                let mut spent_us = 0.0;
                for _ in 0..BOUND_SAMPLES {
                    times.push(self.bound_us(bound, bytes)?);
                    spent_us += times[times.len() - 1];
                    // All ranks have the same times, so they stop together.
                    if spent_us > options.time.as_secs_f64() * 1e6 {
                        break;
                    }
                }
            }
            hand_over_ns.push(look()?);
        }

        let ranks = hosts.0.len();
        let mut rows = Vec::new();
        for (planned, Running { mut trial, turns, .. }) in cases.iter().zip(running) {
            let &Planned { case, carrier } = planned;
            let operation = case.operation;
            let rounds_us: Vec<Vec<f64>> =
                turns[1..].iter().map(|turn| turn.samples_us.clone()).collect();
            let row = Row {
                operation,
                bytes: operation.longest(case.block, ranks) * case.dtype.size(),
                count: case.block,
                dtype: case.dtype,
                op: operation.reduces().then_some(case.op),
                root: operation.has_root().then_some(case.root),
                transport: groups[carrier].1.clone(),
                buffers: case.buffers,
                style: case.style,
                place: case.place,
                ranks,
                rounds_us,
                wrong: turns.iter().map(|turn| turn.wrong).sum(),
                bill: Bill::default(),
                bound_us: quantile(&bound_us[carrier], 0.5),
                bound: bounds[carrier].name(),
                bound_factor: bounds[carrier].factor(operation, &hosts.0),
                hand_over_ns: hand_over_ns.iter().copied().flatten().collect(),
                explanation: None,
            };
            let bill = meter.bill(&mut *trial, row.time_us()).map_err(Error::Measure)?;
            let explanation = match options.explain {
                true => explain(groups[carrier].0, &case).map_err(Error::Measure)?,
                false => None,
            };
            rows.push(Row { bill, explanation, ..row });
        }
        Ok(rows)
    }

    /// How long the slowest rank takes to move `bytes` by the bound's means.
    fn bound_us(&self, bound: &mut Bound, bytes: usize) -> Result<f64> {
        self.meter.control.barrier().map_err(Error::Measure)?;
        let time = bound.move_bytes(bytes).map_err(Error::system("move bytes for comparison"))?;
        let slowest = self.meter.all(time.as_secs_f64(), ReduceOp::Max).map_err(Error::Measure)?;
        Ok(slowest * 1e6)
    }
}

/// A case between its rounds.
struct Running<'a> {
    trial: Box<dyn Trial + 'a>,
    pace: Pace,
    /// The first turn is the warm-up: only its wrong elements count.
    turns: Vec<Turn>,
}
