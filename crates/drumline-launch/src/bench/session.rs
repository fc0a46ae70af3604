//! The groups, and the order in which everything takes turns.

use std::{fs, thread};

use drumline::{Config, DType, GroupOptions, ProcessGroup, ReduceOp, init_process_group};

use super::{
    bound::{Bound, Line},
    explain,
    measure::{Bill, Meter, Pace, Turn},
    operation::{Operation, Place},
    options::{Calls, Options, Transport},
    plot, probe,
    row::{Row, quantile},
    table::Heading,
    trial::{Call, Trial},
};
use crate::{Error, Result, print};

/// How often the bound is measured in each round, if that takes no longer than a turn.
const BOUND_SAMPLES: usize = 5;

/// Measures as one of the ranks. Rank 0 prints, and writes files.
pub(super) fn measure(options: &Options) -> Result<u8> {
    let config = Config::from_env().map_err(Error::Measure)?;
    let control = init_process_group("env://", &config).map_err(Error::Measure)?;
    options.check(control.world_size())?;
    // With the addresses that it has found for this rank.
    let config = control.config().clone();
    let is_first = control.rank() == 0;
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

/// Which ranks are on one host: by rank, the number of the host.
struct Hosts(Vec<u64>);

impl Hosts {
    /// As the launcher says.
    fn find(control: &ProcessGroup) -> Result<Hosts> {
        let own = std::env::var("GROUP_RANK").ok().and_then(|text| text.parse().ok());
        let mut all = vec![0_u64; control.world_size()];
        control.all_gather(&[own.unwrap_or(0)], &mut all).map_err(Error::Measure)?;
        Ok(Hosts(all))
    }

    fn count(&self) -> usize {
        let mut hosts = self.0.clone();
        hosts.sort_unstable();
        hosts.dedup();
        hosts.len()
    }

    /// The rank at the other end of a link from rank 0, if there is any.
    fn other_end(&self) -> Option<usize> {
        let elsewhere = self.0.iter().position(|host| *host != self.0[0]);
        elsewhere.or((self.0.len() > 1).then_some(1))
    }
}

/// A group over one transport, and what it is measured against.
struct Way {
    transport: String,
    group: ProcessGroup,
    bound: Bound,
}

impl Way {
    fn all(
        options: &Options,
        control: &ProcessGroup,
        hosts: &Hosts,
        config: &Config,
    ) -> Result<Vec<Way>> {
        let new = |&transport| Way::new(transport, control, hosts, config);
        options.transport.items.iter().map(new).collect()
    }

    fn new(
        transport: Transport,
        control: &ProcessGroup,
        hosts: &Hosts,
        config: &Config,
    ) -> Result<Way> {
        let (shared_memory, unix_sockets) = match transport {
            Transport::Auto => (config.shared_memory, config.unix_sockets),
            Transport::Shm => (true, true),
            Transport::Unix => (false, true),
            Transport::Tcp => (false, false),
        };
        let config = Config { shared_memory, unix_sockets, ..config.clone() };
        let all: Vec<usize> = (0..control.world_size()).collect();
        let settings = GroupOptions::default().name(transport.to_string()).config(config.clone());
        let group = control.new_group(&all, &settings).map_err(Error::Measure)?;

        let carrier = match transport {
            Transport::Auto if group.shares_memory() => Transport::Shm,
            Transport::Auto if unix_sockets => Transport::Unix,
            Transport::Auto => Transport::Tcp,
            named => named,
        };
        if carrier == Transport::Shm && !group.shares_memory() && hosts.0.len() > 1 {
            return Err(Error::Bench(
                "--transport shm: ranks of this host share no memory; \
                 RUST_LOG=drumline=warn says why"
                    .to_owned(),
            ));
        }
        let is_one_host = hosts.count() == 1;
        let bound = match hosts.other_end() {
            Some(other) if !is_one_host => {
                Bound::Line(Line::open(control, other, Transport::Tcp, &config)?)
            }
            Some(other) if carrier != Transport::Shm => {
                Bound::Line(Line::open(control, other, carrier, &config)?)
            }
            _ => Bound::copy(),
        };
        let transport = match (carrier, is_one_host) {
            (carrier, true) | (carrier @ Transport::Tcp, false) => carrier.to_string(),
            (carrier, false) => format!("{carrier}+tcp"),
        };
        Ok(Way { transport, group, bound })
    }
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
                algorithm: None,
            };
            let bill = meter.bill(&mut *trial, row.time_us()).map_err(Error::Measure)?;
            let algorithm = match options.explain {
                true => explain::algorithm(&mut *trial).map_err(Error::Measure)?,
                false => None,
            };
            rows.push(Row { bill, algorithm, ..row });
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
