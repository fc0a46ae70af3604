use std::fmt;

use drumline_schedule::step::{Buffer, Loc, Rank, Step};
use drumline_schedule::{Cost, Error};

use super::races::Race;
use super::rule::Rule;

/// A fault of an algorithm. Steps have the numbers of the printed schedule.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// There is no such schedule.
    #[error(transparent)]
    Schedule(#[from] Error),
    /// The schedules are not those of all ranks, in order, of one call.
    #[error("schedule {index} is not that of rank {index} in the same call as the others")]
    NotOneWorld {
        /// Index of the schedule.
        index: usize,
    },
    /// A step that breaks a rule.
    #[error("rank {rank}, step {step}: {rule}")]
    Form {
        /// Rank that has the step.
        rank: Rank,
        /// Index of the step.
        step: usize,
        /// The rule.
        rule: Rule,
    },
    /// A rank posts more or less often than rank 0. Ranks count each other's posts from one call to the next,
    /// so all must post equally often.
    #[error("rank {rank} posts {posts} times, but rank 0 {posts_of_first} times")]
    UnequalPosts {
        /// Rank that differs.
        rank: Rank,
        /// How often it posts.
        posts: usize,
        /// How often rank 0 posts.
        posts_of_first: usize,
    },
    /// Two accesses to shared memory that nothing orders.
    #[error(transparent)]
    Race(Box<Race>),
    /// The operands of a local step have different lengths.
    #[error("rank {rank}, step {step}: {src} has {src_len} elements but {dst} has {dst_len}")]
    OperandLengths {
        /// Rank that runs the step.
        rank: Rank,
        /// Index of the step.
        step: usize,
        /// The place that is written.
        dst: Box<Loc>,
        /// Its elements.
        dst_len: usize,
        /// The place that is read.
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
    /// A step reads memory that this call has not written.
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
    /// A message that its receiver does not take in the same call.
    #[error("rank {from}, step {step}: sends a message that rank {to} does not receive")]
    UnmatchedSend {
        /// Sender.
        from: Rank,
        /// Index of its step.
        step: usize,
        /// Receiver.
        to: Rank,
    },
    /// A receive that takes a message of a later call.
    #[error("rank {rank}, step {step}: receives a message that rank {from} does not send")]
    UnmatchedRecv {
        /// Receiver.
        rank: Rank,
        /// Index of its step.
        step: usize,
        /// Sender.
        from: Rank,
    },
    /// No rank can continue.
    #[error("deadlock:{}", waits.iter().map(|wait| format!("\n  {wait}")).collect::<String>())]
    Deadlock {
        /// The ranks that are stuck.
        waits: Vec<Wait>,
    },
    /// A wrong result.
    #[error(
        "rank {rank}: element {element} of call {call} should be\n  {expected}\nbut is\n  \
         {found}"
    )]
    Result {
        /// Rank that has the result.
        rank: Rank,
        /// Index of the call, of those that run back to back.
        call: usize,
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
        /// Rank that it did not wait for.
        peer: Rank,
    },
    /// A partial sum travels from rank to rank, in an algorithm that says that none does.
    #[error(
        "rank {rank}, step {step}: a partial sum travels between it and rank {peer}; \
         the algorithm says that none does"
    )]
    PartialSum {
        /// Rank that sends it, or that accesses a neighbour's memory.
        rank: Rank,
        /// Index of its step.
        step: usize,
        /// Receiver, or owner of the memory.
        peer: Rank,
    },
    /// A place has another width than what a step puts there. Places for sums have that of sums that are not
    /// finished, and all other places that of elements.
    #[error(
        "rank {rank}, step {step}: {place} has another width than what is put there: sums that are not finished lie \
         in places for sums, and nothing else does"
    )]
    Width {
        /// Rank.
        rank: Rank,
        /// Index of the step.
        step: usize,
        /// The place.
        place: Box<Loc>,
    },
    /// The algorithm serves even blocks only.
    #[error("the algorithm does not say that it serves blocks of different lengths")]
    NotUneven,
    /// The formula differs from the schedules.
    #[error("measured {measured}; the formula says {formula}")]
    Cost {
        /// The cost of the schedules.
        measured: Cost,
        /// The cost by the algorithm's formula.
        formula: Cost,
    },
}

impl fmt::Debug for CheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A rank that is stuck.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The rank that waits.
    pub rank: Rank,
    /// Index of its step.
    pub step: usize,
    /// The rank that it waits for.
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
