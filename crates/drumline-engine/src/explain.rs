//! Which algorithm a call takes, and why.

use std::{fmt, time::Duration};

use drumline_schedule::{
    ALGORITHMS, Algorithm, MemoryUse, Situation, eligible,
    price::{Prices, price},
};

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
    /// The reason for the choice.
    pub why: String,
    /// All algorithms of the collective, in the order of the table. Empty where another backend chooses.
    pub candidates: Vec<Candidate>,
}

/// An algorithm of the collective, which may be eligible or not.
///
/// ```
/// use drumline::{Candidate, Collective, DType, ProcessGroup};
///
/// let group = ProcessGroup::alone();
/// let explanation = group.explain(Collective::AllReduce, 1000, DType::F32, false)?;
/// let taken: &Candidate =
///     explanation.candidates.iter().find(|it| it.algorithm == explanation.algorithm).unwrap();
/// assert_eq!(taken.problem, None);
/// // A hierarchy of hosts needs at least two ranks.
/// assert!(explanation.candidates.iter().any(|it| it.problem.is_some()));
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub algorithm: &'static str,
    /// The time of the call by the prices of links. Work in shared memory is left out, so an algorithm in
    /// the memory of one host has no price. Nor has one that cannot be taken.
    pub price: Option<Duration>,
    /// Why it cannot be taken. `None`: it can.
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

/// Why `chosen` was chosen. `named`: the settings name it.
pub fn explain(
    situation: &Situation<'_>,
    prices: &Prices,
    chosen: &Algorithm,
    named: bool,
) -> Explanation {
    let Situation { collective, topology, elements, kind, .. } = *situation;
    let one_host = topology.is_one_host();
    // One choice serves all lengths up to the next power of two.
    let class = 1 << elements.max(1).ilog2();
    let price = |row: &Algorithm| {
        let over_links = row.memory == MemoryUse::Private;
        // Between hosts the length itself is priced.
        let elements = if over_links { class } else { elements };
        (over_links || !one_host).then(|| {
            let price = price(row, topology, elements, kind, prices);
            Duration::from_nanos(u64::try_from(price / 1_000).unwrap_or(u64::MAX))
        })
    };
    let rows = ALGORITHMS.iter().filter(|row| row.collective == collective);
    let candidates = rows.map(|row| {
        let (price, problem) = match eligible(row, situation) {
            Ok(()) => (price(row), None),
            Err(why) => (None, Some(why.to_string())),
        };
        Candidate { algorithm: row.name, price, problem }
    });
    let why = match chosen.memory {
        _ if named => "the settings name it (DRUMLINE_ALL_REDUCE)".to_owned(),
        MemoryUse::Registered => {
            "the buffer lies in memory that the ranks of a host share".to_owned()
        }
        MemoryUse::Staged if !one_host => format!(
            "the ranks of a host share memory, which is faster than links; the lowest price between \
             hosts, for {elements} elements"
        ),
        MemoryUse::Staged => format!(
            "the ranks of a host share memory, which is faster than links; by the length, {} B",
            elements * kind.bytes
        ),
        MemoryUse::Private => format!("the lowest price over links, for {class} elements"),
    };
    Explanation { algorithm: chosen.name.to_owned(), why, candidates: candidates.collect() }
}
