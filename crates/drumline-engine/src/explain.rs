//! The algorithm that a call takes, and the reason.

use std::{fmt, time::Duration};

use drumline_schedule::{
    ALGORITHMS, Algorithm, MemoryUse, Situation, eligible,
    price::{Prices, price},
};

/// The algorithm that a call takes, the reason, and the prices of the others. It prints as a table.
///
/// ```
/// use drumline::{
///     DType, ProcessGroup,
///     algorithms::{Explanation, explain},
///     backend::Collective,
/// };
///
/// let group = ProcessGroup::alone();
/// let explanation: Explanation =
///     explain(&group, Collective::AllReduce, 1000, DType::F32, false)?;
/// println!("{explanation}");
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The name of the algorithm. In a group with a backend of its own: the name of the backend.
    pub algorithm: String,
    /// The reason for the choice.
    pub why: String,
    /// All algorithms of the collective, in the order of the table. Empty where a backend chooses.
    pub candidates: Vec<Candidate>,
}

/// An algorithm of the collective, eligible or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub algorithm: &'static str,
    /// The expected time of the call over links, by their prices. It leaves out work in shared memory. `None`
    /// for an algorithm that works in the memory of one host only, and for one that is not eligible.
    pub price: Option<Duration>,
    /// Why the algorithm is not eligible. `None`: it is.
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

/// Explains why `chosen` was chosen. `named`: the settings name it.
pub(crate) fn explain(
    situation: &Situation<'_>,
    prices: &Prices,
    chosen: &Algorithm,
    named: bool,
) -> Explanation {
    let Situation { collective, topology, elements, kind, .. } = *situation;
    let one_host = topology.is_one_host();
    // Over links, one choice serves all lengths from a power of two up to the next one.
    let class = 1 << elements.max(1).ilog2();
    let price = |row: &Algorithm| {
        let over_links = row.memory == MemoryUse::Private;
        // Between hosts, each length has its own choice.
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
    let rounds = match situation.rounds_on_hosts() {
        true => {
            "; each host rounds the sum of its ranks before it travels (DRUMLINE_ROUNDING=host)"
        }
        false => "",
    };
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
    let why = why + rounds;
    Explanation { algorithm: chosen.name.to_owned(), why, candidates: candidates.collect() }
}
