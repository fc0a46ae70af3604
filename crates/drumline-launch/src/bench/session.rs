//! What is called, and the order in which everything takes turns.

use std::{fs, thread};

use drumline::{Config, DType, ReduceOp, init_process_group};

use super::{
    bound::Bound,
    choice::Calls,
    create_files,
    explain::explain,
    measure::{Bill, Meter, Pace, Turn},
    operation::{Operation, Place},
    options::Options,
    plot, probe,
    row::{Row, quantile},
    table::Heading,
    trial::{Call, Trial},
    way::{Hosts, Way},
};
use crate::{Error, Result, print};

/// How often the bound is measured in each round, if that takes no longer than a turn.
const BOUND_SAMPLES: usize = 5;

/// Measures as one of the ranks. Rank 0 prints, and writes files.
pub(super) fn measure(options: &Options) -> Result<u8> {
    let mut config = Config::from_env().map_err(Error::Measure)?;
    // For what is measured, and not for the figures that ranks tell each other.
    let all_reduce = config.all_reduce.take();
    let control = init_process_group("env://", &config).map_err(Error::Measure)?;
    options.check(control.world_size())?;
    // With the addresses that it has found for this rank.
    let config = Config { all_reduce, ..control.config().clone() };
    let is_first = control.rank() == 0;
    if is_first {
        create_files(options)?;
    }
    let hosts = Hosts::find(&control)?;
    let mut ways = Way::all(options, &control, &hosts, &config)?;

    let heading = Heading {
        ranks: control.world_size(),
        hosts: hosts.count(),
        cores: thread::available_parallelism().map_or(1, usize::from),
        untouched: options.untouched,
        rounds: options.rounds,
    };
    let tell = |text: &str| if is_first { print(text) } else { Ok(()) };
    tell(&heading.text())?;
    let session = Session { meter: Meter { control: &control, options }, options, hosts: &hosts };
    let mut rows = Vec::new();
    for &operation in &options.operations.items {
        for bytes in options.sizes() {
            let calls = session.calls(operation, bytes, &ways);
            let measured = session.size(bytes, &calls, &mut ways)?;
            measured.iter().try_for_each(|row| tell(&row.text()))?;
            rows.extend(measured);
            if operation == Operation::Barrier {
                break;
            }
        }
    }
    if rows.is_empty() {
        return Err(Error::Bench(
            "nothing to measure: no operation has elements of that size, in that place, of that \
             kind; try a larger --max-bytes, or --place, --buffers and --calls with `all`"
                .to_owned(),
        ));
    }
    tell(&Heading::summary(&rows))?;
    if is_first {
        keep(options, &heading, &rows)?;
    }
    for way in ways {
        way.group.destroy().map_err(Error::Measure)?;
    }
    control.destroy().map_err(Error::Measure)?;
    Ok(rows.iter().any(|row| row.wrong > 0).into())
}

fn keep(options: &Options, heading: &Heading, rows: &[Row]) -> Result<()> {
    let write = |path: &std::path::Path, text: String| {
        let problem = |error| Error::Bench(format!("cannot write {}: {error}", path.display()));
        fs::write(path, text).map_err(problem)
    };
    if let Some(path) = &options.json {
        write(path, format!("{:#}\n", heading.json(rows)))?;
    }
    if let Some(path) = &options.svg {
        let title = format!("drumline bench, {} ranks on {} hosts", heading.ranks, heading.hosts);
        write(path, plot::svg(&title, rows))?;
    }
    Ok(())
}

/// How what is called is carried out.
struct Planned {
    call: Call,
    /// Which of the ways.
    way: usize,
}

struct Session<'a> {
    meter: Meter<'a>,
    options: &'a Options,
    hosts: &'a Hosts,
}

impl Session<'_> {
    /// Everything that is called with that operation and size.
    fn calls(&self, operation: Operation, bytes: usize, ways: &[Way]) -> Vec<Planned> {
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
        let mut calls = Vec::new();
        for (op, dtype) in pairs {
            let block = operation.block(bytes / dtype.size(), ranks);
            if block == 0 && operation != Operation::Barrier {
                continue;
            }
            for (way, carrier) in ways.iter().enumerate() {
                for &buffers in &options.buffers.items {
                    // Without shared memory both kinds are one.
                    let is_first = options.buffers.items.first() == Some(&buffers);
                    if !is_first && (!carrier.group.shares_memory() || block == 0) {
                        continue;
                    }
                    for &how in &options.calls.items {
                        for &place in operation.places() {
                            let is_there = how == Calls::Blocking
                                || (operation, place) != (Operation::Reduce, Place::Out);
                            if is_there && options.place.items.contains(&place) {
                                let root = options.root;
                                let call = Call {
                                    operation,
                                    place,
                                    dtype,
                                    op,
                                    root,
                                    block,
                                    buffers,
                                    calls: how,
                                };
                                calls.push(Planned { call, way });
                            }
                        }
                    }
                }
            }
        }
        calls
    }

    /// All rounds of one size.
    fn size(&self, bytes: usize, calls: &[Planned], ways: &mut [Way]) -> Result<Vec<Row>> {
        let Session { meter, options, hosts } = self;
        // Groups are shared, bounds are not.
        let (groups, mut bounds): (Vec<_>, Vec<_>) =
            ways.iter_mut().map(|way| ((&way.group, &way.transport), &mut way.bound)).unzip();
        let mut running: Vec<Running<'_>> = calls
            .iter()
            .map(|planned| {
                let mut trial = planned.call.trial(groups[planned.way].0)?;
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
            }
            for (bound, times) in bounds.iter_mut().zip(&mut bound_us) {
                let mut spent_us = 0.0;
                for _ in 0..BOUND_SAMPLES {
                    times.push(self.bound_us(bound, bytes)?);
                    spent_us += times[times.len() - 1];
                    // All ranks have the same figures, and stop together.
                    if spent_us > options.time.as_secs_f64() * 1e6 {
                        break;
                    }
                }
            }
            hand_over_ns.push(look()?);
        }

        let ranks = hosts.0.len();
        let mut rows = Vec::new();
        for (planned, Running { mut trial, turns, .. }) in calls.iter().zip(running) {
            let call = planned.call;
            let operation = call.operation;
            let rounds_us: Vec<Vec<f64>> =
                turns[1..].iter().map(|turn| turn.samples_us.clone()).collect();
            let row = Row {
                operation,
                bytes: operation.longest(call.block, ranks) * call.dtype.size(),
                count: call.block,
                dtype: call.dtype,
                op: operation.reduces().then_some(call.op),
                root: operation.has_root().then_some(call.root),
                transport: groups[planned.way].1.clone(),
                buffers: call.buffers,
                calls: call.calls,
                place: call.place,
                ranks,
                rounds_us,
                wrong: turns.iter().map(|turn| turn.wrong).sum(),
                bill: Bill::default(),
                bound_us: quantile(&bound_us[planned.way], 0.5),
                bound: bounds[planned.way].name(),
                bound_factor: bounds[planned.way].factor(operation, &hosts.0),
                hand_over_ns: hand_over_ns.iter().copied().flatten().collect(),
                explanation: None,
            };
            let bill = meter.bill(&mut *trial, row.time_us()).map_err(Error::Measure)?;
            let explanation = match options.explain {
                true => explain(groups[planned.way].0, &call).map_err(Error::Measure)?,
                false => None,
            };
            rows.push(Row { bill, explanation, ..row });
        }
        Ok(rows)
    }

    /// How long the slowest rank takes to move as many bytes without an operation.
    fn bound_us(&self, bound: &mut Bound, bytes: usize) -> Result<f64> {
        self.meter.control.barrier().map_err(Error::Measure)?;
        let time = bound.move_bytes(bytes).map_err(Error::system("move bytes for comparison"))?;
        let slowest = self.meter.all(time.as_secs_f64(), ReduceOp::Max).map_err(Error::Measure)?;
        Ok(slowest * 1e6)
    }
}

/// A call in the middle of its rounds.
struct Running<'a> {
    trial: Box<dyn Trial + 'a>,
    pace: Pace,
    /// The first one is the warm-up, of which only wrong elements count.
    turns: Vec<Turn>,
}
