//! Which algorithm a call takes, and why.

use std::{fmt, time::Duration};

use drumline_schedule::{
    ALGORITHMS, Algorithm, Collective, MemoryUse, Topology,
    price::{Prices, price},
};

use crate::call::Call;

/// Which algorithm a call takes, and why. Printed, it is a table.
///
/// ```
/// use drumline::{Candidate, Collective, DType, Explanation, ProcessGroup};
///
/// let group = ProcessGroup::alone();
/// let explanation: Explanation = group.explain(Collective::AllReduce, 1000, DType::F32, false)?;
/// for Candidate { .. } in &explanation.candidates {}
/// println!("{explanation}");
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The name of the algorithm, or of the backend that carries the group.
    pub algorithm: String,
    /// Why it is taken.
    pub why: String,
    /// All algorithms of the collective, in the order of the table; none where a backend chooses.
    pub candidates: Vec<Candidate>,
}

/// An algorithm that might have been taken.
///
/// ```
/// use drumline::{Candidate, Collective, DType, ProcessGroup};
///
/// let group = ProcessGroup::alone();
/// let explanation = group.explain(Collective::AllReduce, 1000, DType::F32, false)?;
/// let taken: &Candidate =
///     explanation.candidates.iter().find(|it| it.algorithm == explanation.algorithm).unwrap();
/// assert_eq!(taken.problem, None);
/// // Two ranks at least make a hierarchy of hosts.
/// assert!(explanation.candidates.iter().any(|it| it.problem.is_some()));
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub algorithm: &'static str,
    /// What the call would take by the prices of links, work in shared memory left out; nothing on one
    /// host that shares memory, and where it does not serve these ranks.
    pub price: Option<Duration>,
    /// Why it cannot be taken; nothing where it can.
    pub problem: Option<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.algorithm, self.why)?;
        for Candidate { algorithm, price, problem } in &self.candidates {
            let mark = if self.algorithm == *algorithm { '*' } else { ' ' };
            write!(f, "{mark} {algorithm:<26}")?;
            match (price, problem) {
                (_, Some(problem)) => writeln!(f, "no: {problem}")?,
                (Some(price), None) => writeln!(f, "{:.1} us", price.as_secs_f64() * 1e6)?,
                (None, None) => writeln!(f, "through shared memory")?,
            }
        }
        Ok(())
    }
}

/// What a choice depends on, beside the call.
pub struct Situation<'a> {
    pub topology: &'a Topology,
    pub prices: &'a Prices,
    pub shares_memory: bool,
    pub registered: bool,
    /// Whether the settings name an algorithm for all-reduces.
    pub asked_for: bool,
}

impl Situation<'_> {
    /// Why `chosen` was chosen for `call`.
    pub fn explain(&self, call: &Call, chosen: &Algorithm) -> Explanation {
        let collective = call.operation.collective();
        let (elements, kind) = (call.counts.longest(), call.element_kind());
        // Lengths up to the next power of two are chosen for alike.
        let class = 1 << elements.max(1).ilog2();
        let price = |row: &Algorithm| {
            // Over links alone the class is priced.
            let elements = if row.memory == MemoryUse::Private { class } else { elements };
            let sends = row.memory == MemoryUse::Private || !self.topology.is_one_host();
            (sends && (row.applies)(self.topology)).then(|| {
                let price = price(row, self.topology, elements, kind, self.prices);
                Duration::from_nanos(u64::try_from(price / 1_000).unwrap_or(u64::MAX))
            })
        };
        let rows = ALGORITHMS.iter().filter(|row| row.collective == collective);
        let candidates = rows.map(|row| Candidate {
            algorithm: row.name,
            price: price(row),
            problem: self.problem(row),
        });
        let why = match chosen.memory {
            _ if self.asked_for && collective == Collective::AllReduce => {
                "the settings name it (DRUMLINE_ALL_REDUCE)".to_owned()
            }
            MemoryUse::Registered => {
                "the buffer lies in memory that the ranks of a host share".to_owned()
            }
            MemoryUse::Staged if !self.topology.is_one_host() => format!(
                "the ranks of a host share memory, which is faster than links; the lowest price \
                 between hosts, for {elements} elements"
            ),
            MemoryUse::Staged => format!(
                "the ranks of a host share memory, which is faster than links; by the length, {} B",
                elements * kind.bytes
            ),
            MemoryUse::Private => format!("the lowest price over links, for {class} elements"),
        };
        Explanation { algorithm: chosen.name.to_owned(), why, candidates: candidates.collect() }
    }

    fn problem(&self, row: &Algorithm) -> Option<String> {
        match row.memory {
            _ if !(row.applies)(self.topology) => Some(format!("it needs {}", row.needs)),
            MemoryUse::Staged | MemoryUse::Registered if !self.shares_memory => {
                Some("these ranks share no memory".to_owned())
            }
            MemoryUse::Registered if !self.registered => {
                Some("the buffer is not registered".to_owned())
            }
            _ => None,
        }
    }
}
