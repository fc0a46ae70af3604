use std::fmt;

use drumline_schedule::step::{Buffer, Loc, Rank, Step};
use drumline_schedule::{Cost, Error};

use super::races::Race;
use super::rule::Rule;

/// What is wrong with an algorithm. Steps are counted as the printed schedule counts them.
///
/// ```
/// use drumline_inspect::check::{CheckError, check};
/// use drumline_schedule::{Algorithm, Collective, Cost, Topology};
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
/// use drumline_inspect::check::{CheckError, Wait, check_schedules};
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
