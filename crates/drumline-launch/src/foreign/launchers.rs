//! Which launcher started this process, and as which rank: variables in, a place out.

use std::{collections::BTreeMap, fmt};

use crate::{Error, Result};

/// The variables of a process.
pub(super) type Variables = BTreeMap<String, String>;

/// A launcher that this command understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Launcher {
    OpenMpi,
    Slurm,
    /// MPICH, Intel MPI, and what else serves PMI-1.
    Hydra,
    /// `drumline run`, torchrun.
    Torchrun,
}

/// What a launcher says about this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) launcher: Launcher,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// This rank among those of its host.
    pub(super) local: Option<Part>,
    /// This host among those of the job.
    pub(super) host: Option<Part>,
}

/// One of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) number: usize,
    pub(super) of: usize,
}

impl Place {
    /// Whether all ranks run on this host.
    pub(super) fn is_on_one_host(&self) -> bool {
        self.local.is_some_and(|local| local.of == self.size)
    }
}

/// The variables of one launcher.
struct Row {
    launcher: Launcher,
    /// The launcher counts only if this is set, too.
    sign: Option<&'static str>,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    /// How many ranks this host has; or, as Slurm says it, how many each host has.
    local_size: &'static str,
    host: Option<[&'static str; 2]>,
}

/// If launchers agree, the first one of them counts. Slurm stands in front of hydra because it sets variables of PMI, too.
const ROWS: [Row; 4] = [
    Row {
        launcher: Launcher::OpenMpi,
        sign: None,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        host: None,
    },
    Row {
        launcher: Launcher::Slurm,
        // A batch script has SLURM_PROCID=0, too, and is no task of a step.
        sign: Some("SLURM_STEP_ID"),
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_STEP_TASKS_PER_NODE",
        host: Some(["SLURM_NODEID", "SLURM_STEP_NUM_NODES"]),
    },
    Row {
        launcher: Launcher::Hydra,
        sign: None,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        host: None,
    },
    Row {
        launcher: Launcher::Torchrun,
        sign: Some("TORCHELASTIC_RUN_ID"),
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        host: Some(["GROUP_RANK", "GROUP_WORLD_SIZE"]),
    },
];

impl Row {
    fn is_in(&self, variables: &Variables) -> bool {
        [Some(self.rank), self.sign].into_iter().flatten().all(|name| variables.contains_key(name))
    }

    fn place(&self, variables: &Variables) -> Result<Place> {
        let [rank, size] = [self.rank, self.size].map(|name| number(variables, name));
        let missing = |name| Error::foreign(format!("{} is set, and {name} is not", self.rank));
        let (rank, size) = (rank?.unwrap_or_default(), size?.ok_or_else(|| missing(self.size))?);
        if rank >= size {
            let (named, sized) = (self.rank, self.size);
            return Err(Error::foreign(format!(
                "{named}={rank} with {sized}={size}: ranks count from 0"
            )));
        }
        let host = self.host.map(|names| names.map(|name| number(variables, name)));
        let host = match host {
            Some([host, hosts]) => part(host?, hosts?),
            None => None,
        };
        let list = variables.get(self.local_size);
        let sizes = list.map(|list| {
            let why = || {
                Error::foreign(format!(
                    "{}={list}: not how many ranks are on a host",
                    self.local_size
                ))
            };
            per_host(list, host.map_or(0, |host| host.number)).ok_or_else(why)
        });
        let local = part(number(variables, self.local_rank)?, sizes.transpose()?);
        if let Some(local) = local
            && (local.number >= local.of || local.of > size)
        {
            return Err(Error::foreign(format!(
                "{}={} with {}={} and {}={size} cannot be",
                self.local_rank, local.number, self.local_size, local.of, self.size
            )));
        }
        Ok(Place { launcher: self.launcher, rank, size, local, host })
    }
}

fn part(number: Option<usize>, of: Option<usize>) -> Option<Part> {
    number.zip(of).map(|(number, of)| Part { number, of })
}

fn number(variables: &Variables, name: &str) -> Result<Option<usize>> {
    let Some(text) = variables.get(name) else { return Ok(None) };
    let number = text.parse().ok().filter(|&number| number <= RANKS_MAX);
    number.map(Some).ok_or_else(|| Error::foreign(format!("{name}={text}: not a number of ranks")))
}

/// Far above the size of any job.
const RANKS_MAX: usize = 1 << 20;

/// How many ranks the host with this number has, by a list like `4(x2),3`.
fn per_host(list: &str, host: usize) -> Option<usize> {
    let mut first = 0;
    for item in list.split(',') {
        let (ranks, hosts) = match item.split_once("(x") {
            Some((ranks, times)) => (ranks, times.strip_suffix(')')?.parse::<usize>().ok()?),
            None => (item, 1),
        };
        let ranks = ranks.parse().ok()?;
        first += hosts;
        if host < first {
            return Some(ranks);
        }
    }
    None
}

/// The place that the innermost launcher has given to this process. `above` has the variables of its parent, of the
/// parent of that, and so on, as far as they are known.
///
/// The variables of an outer launcher stay set in all that it starts, so they are also those of the inner launcher's own
/// process.
pub(super) fn place(own: &Variables, above: impl FnOnce() -> Vec<Variables>) -> Result<Place> {
    let found: Vec<&Row> = ROWS.iter().filter(|row| row.is_in(own)).collect();
    let candidates = match found[..] {
        [] => return Err(none(own)),
        [_] => found,
        _ => {
            let above = above();
            let distance = |row: &Row| {
                let is_same = |outer: &&Variables| {
                    [row.rank, row.size].iter().all(|name| outer.get(*name) == own.get(*name))
                };
                above.iter().take_while(is_same).count()
            };
            let nearest = found.iter().map(|row| distance(row)).min();
            found.into_iter().filter(|row| Some(distance(row)) == nearest).collect()
        }
    };
    let places = candidates.iter().map(|row| row.place(own)).collect::<Result<Vec<_>>>()?;
    let first = places[0];
    let is_other = |place: &Place| (place.rank, place.size) != (first.rank, first.size);
    match candidates.iter().zip(&places).find(|(_, place)| is_other(place)) {
        None => Ok(first),
        Some((row, other)) => Err(Error::foreign(format!(
            "{first} and {other} both claim this process, and it cannot be seen which of them started it: unset the \
             variables of the other one ({} or {})",
            candidates[0].rank, row.rank
        ))),
    }
}

fn none(own: &Variables) -> Error {
    let names = ROWS.iter().map(|row| match row.sign {
        Some(sign) => format!("{} with {sign} ({})", row.rank, row.launcher),
        None => format!("{} ({})", row.rank, row.launcher),
    });
    let names = names.collect::<Vec<_>>().join(", ");
    let remedy = match own.contains_key("SLURM_JOB_ID") {
        true => "this is a job of Slurm, but no task of a step: put srun in front",
        false => {
            "on one host, `drumline run --nproc-per-node N -- PROGRAM` starts ranks without a launcher"
        }
    };
    Error::foreign(format!(
        "no launcher has started this process: none of these is set: {names}; {remedy}"
    ))
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::OpenMpi => "Open MPI",
            Launcher::Slurm => "Slurm",
            Launcher::Hydra => "hydra of MPICH or Intel MPI",
            Launcher::Torchrun => "drumline run or torchrun",
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {} of {})", self.launcher, self.rank, self.size)
    }
}

#[cfg(test)]
mod tests;
