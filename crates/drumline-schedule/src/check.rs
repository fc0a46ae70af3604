//! The symbolic checker: proves an algorithm right for one world size, root and length.
//!
//! All ranks run against each other on expressions instead of numbers. Element 7 of rank 2 is
//! the symbol `r2[7]`, and adding it to what rank 3 has gives the expression `r2[7] + r3[7]`, which
//! differs from `r3[7] + r2[7]` and from `r2[7] + r3[8]`. So a result is right when it is the
//! expected expression, for every number that could have been there.
//!
//! What [`check`] makes sure of:
//!
//! - **Result.** A sum is the canonical [`tree`](crate::tree) over all ranks (of a scan, over those
//!   up to the own), finished once at its root; a broadcast is the root's data; block `i` of an
//!   all-gather is what rank `i` gave; data that gets no result stays as it was; no rank leaves a
//!   barrier that another has not entered.
//! - **Messages.** Each send meets a receive of the same length in the same operation.
//! - **No deadlock**, on transports where a message leaves its source only when the receiver
//!   takes it. The error lists who waits for whom.
//! - **No torn read.** A source is left alone from its `Send` to a `Flush` that covers it.
//! - **No race.** Two accesses to an element of shared memory, one of them a write, are ordered by
//!   steps, messages, posts and waits, or the rule of entry (see [`step`](crate::step)). The user
//!   counts: it writes registered data before each operation and reads it after. Every rank keeps a
//!   vector clock for this, so a race is found whether or not it changes the result.
//! - **No stale memory.** The operation runs three times back to back on fresh symbols. Before
//!   each, the users overwrite their buffers, and scratch holds nothing that may be read. Slots
//!   are used in turn, and between two ranks of a host exchanged.
//! - **Cost.** Rounds, messages and elements (sent, combined, shared) equal the algorithm's own
//!   formula.
//! - **Leaves and results only** go from rank to rank, where the algorithm says that no partial sum
//!   does.
//! - **Form.** What an executor relies on; see [`Rule`].
//!
//! One run suffices, since no step depends on timing: receives name their sender, messages
//! from one rank arrive in the order in which they were sent, and posts are only counted.
//!
//! ```
//! use drumline_schedule::step::{Loc, Side, Span, Step};
//! use drumline_schedule::{Algorithm, Collective, Cost, MemoryUse, Topology, algorithm, check};
//!
//! // Swap and add. Correct, until the peer reads what has been added to already.
//! let hasty = Algorithm {
//!     collective: Collective::AllReduce,
//!     name: "hasty",
//!     memory: MemoryUse::Private,
//!     generate: |_, rank, _| {
//!         let (peer, data) = (1 - rank, Loc::data(Span::WHOLE));
//!         let side = if peer < rank { Side::Left } else { Side::Right };
//!         vec![
//!             Step::Send { to: peer, src: data },
//!             Step::RecvReduce { from: peer, dst: data, side, finish: true },
//!         ]
//!     },
//!     cost: |_, _, n| Cost { rounds: 1, messages: 1, elements: n, combined: n, ..Cost::default() },
//!     applies: |topology| topology.world_size == 2,
//!     needs: "2 ranks",
//!     partial_sums_travel: false,
//!     uneven: false,
//! };
//! let error = check::check(&hasty, &Topology::flat(2), 0, 10).unwrap_err();
//! assert_eq!(error.to_string(), "\
//! deadlock:
//!   rank 0 waits for rank 1 at step 1: flush   until rank 1 has taken message 1
//!   rank 1 waits for rank 0 at step 1: flush   until rank 0 has taken message 1");
//! ```

mod expressions;
mod form;
mod races;
mod symbols;

use std::fmt;

use crate::algorithm::{Algorithm, Cost, MemoryUse};
use crate::error::Error;
use crate::extent::Counts;
use crate::schedule::Schedule;
use crate::step::{Buffer, Loc, Rank, Step};
use crate::topology::Topology;
use crate::walk::walk;

use symbols::Symbols;

pub use form::Rule;
pub use races::{Access, Race};

/// Operations run back to back: the second may trip over what the first left behind, the third
/// over what the second did to that.
const OPERATIONS: usize = 3;

/// Checks an algorithm when every block has so many elements, and returns what it costs.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, check};
///
/// let doubling = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let cost = check::check(doubling, &Topology::flat(5), 0, 10).unwrap();
/// assert!(cost.rounds >= 3); // 5 ranks hear of each other
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
///
/// # Errors
///
/// The first fault found; [`Error`] when the root is not in the topology.
pub fn check(
    algorithm: &Algorithm,
    topology: &Topology,
    root: Rank,
    elements: usize,
) -> Result<Cost, CheckError> {
    let schedules = algorithm.schedules(topology, root)?;
    let counts = even(&schedules, elements);
    let measured = run_all(topology, &schedules, &counts, algorithm.partial_sums_travel)?;
    let formula = (algorithm.cost)(topology, root, elements);
    match measured == formula {
        true => Ok(measured),
        false => Err(CheckError::Cost { measured, formula }),
    }
}

/// Checks an algorithm on blocks of different lengths, and returns what it costs: `counts` says how
/// each rank, in order, knows them.
///
/// ```
/// use drumline_schedule::{Algorithm, Borders, Collective, Counts, Topology, check};
///
/// let direct = Algorithm::find(Collective::AllGather, "direct")?;
/// let counts = vec![Counts::ByRank(Borders::new(&[2, 0, 5]).unwrap()); 3];
/// let cost = check::check_uneven(direct, &Topology::flat(3), 0, &counts).unwrap();
/// assert_eq!(cost.elements, 10); // rank 2 sends its five to both others
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
///
/// # Errors
///
/// The first fault found; [`CheckError::NotUneven`] where the algorithm does not serve such blocks.
pub fn check_uneven(
    algorithm: &Algorithm,
    topology: &Topology,
    root: Rank,
    counts: &[Counts],
) -> Result<Cost, CheckError> {
    let schedules = algorithm.schedules(topology, root)?;
    match algorithm.uneven {
        true => run_all(topology, &schedules, counts, algorithm.partial_sums_travel),
        false => Err(CheckError::NotUneven),
    }
}

/// Checks schedules, one for each rank in order, and returns what they cost when every block has
/// so many elements. The formula is not looked at.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, check};
///
/// let world = Topology::flat(3);
/// let mut schedules = Algorithm::find(Collective::Broadcast, "binomial")?.schedules(&world, 0)?;
/// assert!(check::check_schedules(&world, &schedules, 10).is_ok());
/// schedules[2].steps.clear(); // rank 2 does not listen
/// assert!(check::check_schedules(&world, &schedules, 10).is_err());
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
///
/// # Errors
///
/// The first fault found.
pub fn check_schedules(
    topology: &Topology,
    schedules: &[Schedule],
    elements: usize,
) -> Result<Cost, CheckError> {
    run_all(topology, schedules, &even(schedules, elements), true)
}

/// Which of its staging slots a rank uses in an operation.
#[derive(Clone, Copy, Debug)]
enum Slots {
    /// It has so many; operations take turns in using them.
    InTurn(usize),
    /// Of two ranks on a host each has one, and they swap them from one operation to the next.
    /// Others have two, in turn.
    Exchanged,
}

/// With slots in turn, and, where two ranks may exchange them, in that way, too.
fn run_all(
    topology: &Topology,
    schedules: &[Schedule],
    counts: &[Counts],
    partial_sums_travel: bool,
) -> Result<Cost, CheckError> {
    let cost = run(topology, schedules, counts, Slots::InTurn(2), partial_sums_travel)?;
    let stages = schedules.iter().any(|schedule| schedule.memory == MemoryUse::Staged);
    if stages && topology.ranks_by_host().iter().any(|ranks| ranks.len() == 2) {
        run(topology, schedules, counts, Slots::Exchanged, partial_sums_travel)?;
    }
    Ok(cost)
}

fn even(schedules: &[Schedule], elements: usize) -> Vec<Counts> {
    vec![Counts::Even(elements); schedules.len()]
}

fn run(
    topology: &Topology,
    schedules: &[Schedule],
    counts: &[Counts],
    slots: Slots,
    partial_sums_travel: bool,
) -> Result<Cost, CheckError> {
    let first = check_form(topology, schedules)?;
    if counts.len() != schedules.len() {
        return Err(CheckError::NotOneWorld { index: counts.len().min(schedules.len()) });
    }
    let mut symbols = Symbols::new(topology, first, schedules, counts, slots, partial_sums_travel);
    walk(topology, schedules, OPERATIONS, &mut symbols)?;
    Ok(symbols.cost())
}

/// Checks what can be seen without running anything, and returns the first schedule.
pub(crate) fn check_form<'a>(
    topology: &Topology,
    schedules: &'a [Schedule],
) -> Result<&'a Schedule, CheckError> {
    let first = schedules.first().ok_or(CheckError::NotOneWorld { index: 0 })?;
    let operation =
        |s: &Schedule| (s.collective, s.algorithm, s.world_size, s.root, s.memory, s.uneven);
    if schedules.len() != topology.world_size {
        return Err(CheckError::NotOneWorld { index: schedules.len().min(topology.world_size) });
    }
    for (index, schedule) in schedules.iter().enumerate() {
        if operation(schedule) != operation(first)
            || schedule.rank != index
            || schedule.world_size != schedules.len()
        {
            return Err(CheckError::NotOneWorld { index });
        }
        form::check(topology, schedule)?;
    }
    let posts = first.posts();
    match schedules.iter().find(|schedule| schedule.posts() != posts) {
        None => Ok(first),
        Some(other) => Err(CheckError::UnequalPosts {
            rank: other.rank,
            posts: other.posts(),
            posts_of_first: posts,
        }),
    }
}

/// What is wrong with an algorithm. Steps are counted as the printed schedule counts them.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Cost, Topology, check::{CheckError, check}};
///
/// let boastful = Algorithm {
///     cost: |_, _, _| Cost::default(), // "it costs nothing"
///     ..*Algorithm::find(Collective::AllReduce, "doubling")?
/// };
/// let error = check(&boastful, &Topology::flat(2), 0, 10).unwrap_err();
/// assert!(matches!(error, CheckError::Cost { measured, .. } if measured.elements == 10));
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// There is no such schedule.
    #[error(transparent)]
    Schedule(#[from] Error),
    /// The schedules are not those of all ranks, in order, of one operation.
    #[error("schedule {index} is not that of rank {index} in the same operation as the others")]
    NotOneWorld {
        /// Which of the schedules.
        index: usize,
    },
    /// A step that no executor has to run.
    #[error("rank {rank}, step {step}: {rule}")]
    Form {
        /// Rank that has the step.
        rank: Rank,
        /// Index of the step.
        step: usize,
        /// What it breaks.
        rule: Rule,
    },
    /// Ranks count each other's posts from one operation to the next.
    #[error("rank {rank} posts {posts} times, but rank 0 {posts_of_first} times")]
    UnequalPosts {
        /// Rank that differs.
        rank: Rank,
        /// How often it posts.
        posts: usize,
        /// How often rank 0 posts.
        posts_of_first: usize,
    },
    /// Two accesses to shared memory of which nothing says which comes first.
    #[error(transparent)]
    Race(Box<Race>),
    /// The operands of a local step have different lengths.
    #[error("rank {rank}, step {step}: {src} has {src_len} elements but {dst} has {dst_len}")]
    OperandLengths {
        /// Rank that runs the step.
        rank: Rank,
        /// Index of the step.
        step: usize,
        /// What is written.
        dst: Box<Loc>,
        /// Its elements.
        dst_len: usize,
        /// What is read.
        src: Box<Loc>,
        /// Its elements.
        src_len: usize,
    },
    /// A message is longer or shorter than its receiver expects.
    #[error(
        "rank {rank}, step {step}: expects {expected} elements from rank {from}, whose step \
         {sent_step} sends {sent}"
    )]
    MessageLengths {
        /// Receiver.
        rank: Rank,
        /// Index of its step.
        step: usize,
        /// Elements that it makes room for.
        expected: usize,
        /// Sender.
        from: Rank,
        /// Index of its step.
        sent_step: usize,
        /// Elements that it sends.
        sent: usize,
    },
    /// A step reads memory that this operation has not written.
    #[error(
        "rank {rank}, step {step}: reads element {element} of {buffer:?} of rank {owner}, never \
         written"
    )]
    Unwritten {
        /// Rank that runs the step.
        rank: Rank,
        /// Index of the step.
        step: usize,
        /// Rank whose memory it is.
        owner: Rank,
        /// Buffer that is read.
        buffer: Buffer,
        /// Index in that buffer.
        element: usize,
    },
    /// A step overwrites a message that may still be read.
    #[error(
        "rank {rank}, step {step}: overwrites element {element} of {buffer:?}, which step \
         {sent_step} sends to rank {to}, without a flush between the two"
    )]
    TornRead {
        /// Rank that runs the steps.
        rank: Rank,
        /// Index of the step that writes.
        step: usize,
        /// Buffer that is written.
        buffer: Buffer,
        /// First such index in that buffer.
        element: usize,
        /// Receiver of the message.
        to: Rank,
        /// Index of the step that sends.
        sent_step: usize,
    },
    /// A rank gives the memory back while a message may still be read.
    #[error("rank {rank}: nothing flushes what step {sent_step} sends to rank {to}")]
    NotFlushed {
        /// Sender.
        rank: Rank,
        /// Index of the step that sends.
        sent_step: usize,
        /// Receiver.
        to: Rank,
    },
    /// A message that nobody takes in the same operation.
    #[error("rank {from}, step {step}: sends a message that rank {to} does not receive")]
    UnmatchedSend {
        /// Sender.
        from: Rank,
        /// Index of its step.
        step: usize,
        /// Receiver.
        to: Rank,
    },
    /// A receive that takes a message of a later operation.
    #[error("rank {rank}, step {step}: receives a message that rank {from} does not send")]
    UnmatchedRecv {
        /// Receiver.
        rank: Rank,
        /// Index of its step.
        step: usize,
        /// Sender.
        from: Rank,
    },
    /// Nobody can go on.
    #[error("deadlock:{}", waits.iter().map(|wait| format!("\n  {wait}")).collect::<String>())]
    Deadlock {
        /// The ranks that are stuck.
        waits: Vec<Wait>,
    },
    /// A wrong result.
    #[error(
        "rank {rank}: element {element} of operation {operation} should be\n  {expected}\nbut is\n  \
         {found}"
    )]
    Result {
        /// Rank that has the result.
        rank: Rank,
        /// Which of the operations that were run back to back.
        operation: usize,
        /// Index in the data.
        element: usize,
        /// The expression found.
        found: String,
        /// The expression that should be there.
        expected: String,
    },
    /// A rank leaves a barrier too early.
    #[error("rank {rank} leaves the barrier without knowing that rank {peer} has entered it")]
    EarlyExit {
        /// Rank that leaves.
        rank: Rank,
        /// Rank that it should have waited for.
        peer: Rank,
    },
    /// A sum that is not finished goes from rank to rank, in an algorithm that says it would not.
    #[error(
        "rank {rank}, step {step}: a partial sum travels between it and rank {peer}; \
         the algorithm says that none does"
    )]
    PartialSum {
        /// Who sends it, or accesses a peer's memory.
        rank: Rank,
        /// Index of its step.
        step: usize,
        /// Receiver, or whose memory that is.
        peer: Rank,
    },
    /// Only even blocks are served.
    #[error("the algorithm does not say that it serves blocks of different lengths")]
    NotUneven,
    /// The formula does not say what the schedules do.
    #[error("measured {measured}; the formula says {formula}")]
    Cost {
        /// What the schedules do.
        measured: Cost,
        /// What the algorithm's cost function returns.
        formula: Cost,
    },
}

/// A rank that is stuck.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology};
/// use drumline_schedule::check::{CheckError, Wait, check_schedules};
///
/// let world = Topology::flat(2);
/// let mut schedules = Algorithm::find(Collective::Broadcast, "binomial")?.schedules(&world, 0)?;
/// schedules[0].steps.clear(); // the root says nothing
/// let error = check_schedules(&world, &schedules, 10).unwrap_err();
/// let CheckError::Deadlock { waits } = error else { panic!("{error}") };
/// let Wait { rank, on, .. } = waits[0];
/// assert_eq!((rank, on), (1, 0));
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Who waits.
    pub rank: Rank,
    /// At which step.
    pub step: usize,
    /// For whom.
    pub on: Rank,
    /// The step itself.
    pub verb: Step,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wait { rank, step, on, verb } = self;
        write!(f, "rank {rank} waits for rank {on} at step {step}: {verb}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Collective;

    /// With one slot instead of two used in turn, a rank that is an operation ahead writes to what
    /// its peers still read.
    #[test]
    fn a_single_slot_is_not_enough() {
        let world = Topology::hosts(&[3]);
        for (collective, name) in [
            (Collective::AllReduce, "shm-oneshot"),
            (Collective::AllReduce, "hierarchical"),
            (Collective::Broadcast, "shm"),
            (Collective::Reduce, "shm"),
            (Collective::AllGather, "shm"),
            (Collective::ReduceScatter, "shm"),
            (Collective::Gather, "shm"),
            (Collective::Scatter, "shm"),
            (Collective::AllToAll, "shm"),
            (Collective::Scan, "shm"),
            (Collective::ExclusiveScan, "shm"),
        ] {
            let algorithm = Algorithm::find(collective, name).unwrap();
            let schedules = algorithm.schedules(&world, 0).unwrap();
            let counts = even(&schedules, 9);
            assert!(run(&world, &schedules, &counts, Slots::InTurn(2), true).is_ok());
            let one = run(&world, &schedules, &counts, Slots::InTurn(1), true);
            let Err(CheckError::Race(race)) = one else {
                unreachable!("{collective} {name} needs no second slot")
            };
            assert_eq!(race.buffer, Buffer::Slot);
            assert_eq!(race.late.operation.abs_diff(race.early.operation), 1, "{race}");
        }
    }
}
