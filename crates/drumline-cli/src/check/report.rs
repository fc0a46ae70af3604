//! The report, as text and as JSON.

use std::{
    fmt::{self, Display},
    time::Duration,
};

use drumline::{backend, cores::MemoryNode};
use serde_json::{Map, Value, json};

use super::{operations::OPERATIONS, system::System};

pub(super) const RANKS: usize = 2;

/// On one host, two ranks need only milliseconds.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

pub(super) const CPU: &str = "cpu";

/// Who carries calls between GPUs, where it can.
pub(super) const NCCL: &str = "nccl";

/// The results of `drumline check`.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) system: System,
    pub(super) columns: Vec<Column>,
}

/// The results over one transport or backend.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) backend: String,
    pub(super) transport: &'static str,
    pub(super) device: &'static str,
    /// Why nothing could be tried.
    pub(super) absent: Option<String>,
    /// For each operation, in order: why it failed, or `None` if it works.
    pub(super) tried: Vec<Option<String>>,
}

/// The mark for a transport or a device that cannot be tried here.
const ABSENT: &str = "-";

impl Column {
    /// The column of a kind of GPU: what was tried, or why nothing could be. `carrier`: who carries the calls.
    pub(super) fn on_device(
        carrier: &str,
        kind: &'static str,
        tried: Result<Vec<Option<String>>, String>,
    ) -> Column {
        let (tried, absent) = match tried {
            Ok(tried) => (tried, None),
            Err(why) => (Vec::new(), Some(why)),
        };
        Column { backend: carrier.to_owned(), transport: "", device: kind, absent, tried }
    }

    /// `drumline/shm`, or `drumline/cuda`.
    fn title(&self) -> String {
        match (self.transport, self.device) {
            ("", CPU) => self.backend.clone(),
            ("", device) => format!("{}/{device}", self.backend),
            (transport, _) => format!("{}/{transport}", self.backend),
        }
    }

    fn cell(&self, operation: usize) -> &'static str {
        match self.tried.get(operation) {
            None => ABSENT,
            Some(None) => "yes",
            // The library that carries the calls lacks it.
            Some(Some(problem)) if problem.contains(" has no ") => "no",
            Some(Some(_)) => "FAILED",
        }
    }

    /// The lines below the table.
    fn notes(&self) -> impl Iterator<Item = String> {
        let absent = self.absent.iter().map(|why| format!("{}: {why}", self.title()));
        let failed = self.tried.iter().zip(OPERATIONS).filter_map(|(tried, (operation, _))| {
            let problem = tried.as_ref()?;
            Some(format!("{}: {operation}: {problem}", self.title()))
        });
        absent.chain(failed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let system = &self.system;
        let mut line = |name: &str, value: &dyn Display| writeln!(f, "{name:<13}{value}");
        line("drumline", &env!("CARGO_PKG_VERSION"))?;
        line("system", &or_unknown(system.kernel.as_ref()))?;
        line("host", &format!("{}, {} usable cores", system.architecture, system.cores))?;
        line("NUMA nodes", &or_unknown(system.numa_nodes()))?;
        for node in system.nodes.iter().filter(|node| !is_plain(node) || system.nodes.len() > 1) {
            let name =
                node.number.map_or("elsewhere".to_owned(), |number| format!("  node {number}"));
            line(&name, &near(node))?;
        }
        line("memory", &or_unknown(system.memory_bytes.map(gib)))?;
        line("instructions", &list(system.instructions.iter(), "those of every processor"))?;
        line("ranks share", if self.shares_memory() { &"memory" } else { &"no memory" })?;
        line("interfaces", &list(system.interfaces.iter(), "none"))?;
        line("reached at", &system.reached_at)?;
        match &system.mpi {
            Ok(library) => line("MPI", library)?,
            Err(problem) => line("MPI", &format!("none: {problem}"))?,
        }
        let mut backends: Vec<&str> = self
            .columns
            .iter()
            .filter(|it| it.device == CPU)
            .map(|it| it.backend.as_str())
            .collect();
        backends.dedup();
        line("backends", &list(backends.iter(), ""))?;
        line("auto", &backend::BUILT_IN)?;

        writeln!(f, "\nTried with {RANKS} ranks, each call within {} s:\n", TIMEOUT.as_secs())?;
        let titles: Vec<String> = self.columns.iter().map(Column::title).collect();
        let row = |f: &mut fmt::Formatter<'_>, name: &str, cells: Vec<&str>| {
            let cells = cells.iter().zip(&titles).map(|(cell, title)| {
                let width = title.len().max(6);
                format!("  {cell:<width$}")
            });
            let line = format!("{name:<18}{}", cells.collect::<String>());
            writeln!(f, "{}", line.trim_end())
        };
        row(f, "", titles.iter().map(String::as_str).collect())?;
        row(f, "device", self.columns.iter().map(|column| column.device).collect())?;
        for (at, (operation, _)) in OPERATIONS.iter().enumerate() {
            row(f, operation, self.columns.iter().map(|column| column.cell(at)).collect())?;
        }
        let notes: Vec<String> = self.columns.iter().flat_map(Column::notes).collect();
        if !notes.is_empty() {
            writeln!(f)?;
        }
        notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

/// Whether it has memory and nothing else.
fn is_plain(node: &MemoryNode) -> bool {
    node.gpus.is_empty() && node.lines.is_empty()
}

/// `64.0 GiB, GPUs 0000:41:00.0, lines eth0 25 Gb/s`
fn near(node: &MemoryNode) -> String {
    let listed = |what: &str, all: &[String]| {
        (!all.is_empty()).then(|| format!("{what} {}", all.join(" and ")))
    };
    let parts =
        [node.memory_bytes.map(gib), listed("GPUs", &node.gpus), listed("lines", &node.lines)];
    list(parts.into_iter().flatten(), "nothing")
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / 2_f64.powi(30))
}

fn or_unknown(value: Option<impl Display>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

fn list(items: impl Iterator<Item = impl Display>, none: &str) -> String {
    let items: Vec<String> = items.map(|item| item.to_string()).collect();
    if items.is_empty() { none.to_owned() } else { items.join(", ") }
}

impl Report {
    /// Whether ranks of this host share memory.
    fn shares_memory(&self) -> bool {
        self.columns.iter().any(|column| column.transport == "shm" && column.absent.is_none())
    }

    /// Whether a part of the library itself does not work. A host without shared memory is no failure.
    pub(super) fn failed(&self) -> bool {
        let own = |column: &&Column| column.backend == backend::BUILT_IN && column.device == CPU;
        self.columns.iter().filter(own).any(|column| {
            let broken = column.tried.iter().any(Option::is_some);
            broken || (column.absent.is_some() && column.transport != "shm")
        })
    }

    pub(super) fn json(&self) -> Value {
        let system = &self.system;
        let columns = self.columns.iter().map(|column| {
            let operations = OPERATIONS.iter().zip(&column.tried).map(|((name, _), problem)| {
                (name.to_string(), json!({ "works": problem.is_none(), "problem": problem }))
            });
            json!({
                "backend": column.backend,
                "transport": column.transport,
                "device": column.device,
                "absent": column.absent,
                "operations": operations.collect::<Map<_, _>>(),
            })
        });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "works": !self.failed(),
            "host": {
                "architecture": system.architecture,
                "kernel": system.kernel,
                "shares_memory": self.shares_memory(),
                "cores": system.cores,
                "numa_nodes": system.numa_nodes(),
                "memory_nodes": system.nodes.iter().map(|node| json!({
                    "number": node.number,
                    "memory_bytes": node.memory_bytes,
                    "gpus": node.gpus,
                    "lines": node.lines,
                })).collect::<Vec<_>>(),
                "memory_bytes": system.memory_bytes,
                "instructions": system.instructions,
                "interfaces": system.interfaces,
                "reached_at": system.reached_at,
                "mpi": system.mpi.as_ref().ok(),
            },
            "available": {
                "mpi": system.mpi.is_ok(),
                "nccl": self.columns.iter().any(|it| it.backend == NCCL && it.absent.is_none()),
            },
            "backends": columns.collect::<Vec<_>>(),
        })
    }
}
