//! The report as text, and as JSON.

use std::fmt::{self, Display};

use drumline::backend;
use serde_json::{Map, Value, json};

use super::{CPU, Column, OPERATIONS, Report, TIMEOUT};

/// In the column of a device that nothing is built in for, and of what cannot be tried here.
const NO: &str = "no";
const ABSENT: &str = "-";

impl Column {
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
            None if self.device != CPU => NO,
            None => ABSENT,
            Some(None) => "yes",
            Some(Some(_)) => "FAILED",
        }
    }

    /// What is to be said of it beside the table.
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
        let host = &self.host;
        let mut line = |name: &str, value: &dyn Display| writeln!(f, "{name:<13}{value}");
        line("drumline", &env!("CARGO_PKG_VERSION"))?;
        line("system", &or_unknown(host.kernel.as_ref()))?;
        line("host", &format!("{}, {} usable cores", host.architecture, host.cores))?;
        line("NUMA nodes", &or_unknown(host.numa_nodes))?;
        let gib =
            host.memory_bytes.map(|bytes| format!("{:.1} GiB", bytes as f64 / 2_f64.powi(30)));
        line("memory", &or_unknown(gib))?;
        line("instructions", &list(host.instructions.iter(), "those of every processor"))?;
        line("ranks share", if self.shares_memory() { &"memory" } else { &"no memory" })?;
        line("interfaces", &list(host.interfaces.iter(), "none"))?;
        line("reached at", &host.reached_at)?;
        let mut backends: Vec<&str> =
            self.columns.iter().map(|column| column.backend.as_str()).collect();
        backends.dedup();
        line("backends", &list(backends.iter(), ""))?;
        line("auto", &backend::BUILT_IN)?;
        let (there, absent): (Vec<_>, Vec<_>) = self.available.iter().partition(|(_, is)| **is);
        line("not there", &list(absent.iter().map(|(name, _)| name), "nothing"))?;
        if !there.is_empty() {
            line("there", &list(there.iter().map(|(name, _)| name), ""))?;
        }

        writeln!(f, "\nTried with 2 ranks, each call within {} s:\n", TIMEOUT.as_secs())?;
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

fn or_unknown(value: Option<impl Display>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

fn list(items: impl Iterator<Item = impl Display>, none: &str) -> String {
    let items: Vec<String> = items.map(|item| item.to_string()).collect();
    if items.is_empty() { none.to_owned() } else { items.join(", ") }
}

impl Report {
    pub(super) fn json(&self) -> Value {
        let host = &self.host;
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
                "architecture": host.architecture,
                "kernel": host.kernel,
                "shares_memory": self.shares_memory(),
                "cores": host.cores,
                "numa_nodes": host.numa_nodes,
                "memory_bytes": host.memory_bytes,
                "instructions": host.instructions,
                "interfaces": host.interfaces,
                "reached_at": host.reached_at,
            },
            "available": self.available,
            "backends": columns.collect::<Vec<_>>(),
        })
    }
}
