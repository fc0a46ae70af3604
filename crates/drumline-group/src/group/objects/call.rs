//! The collectives on objects.

use drumline_schedule::step::Rank;

use crate::{Error, ErrorKind, Section};

/// The functions on objects. A function's index is its code in messages.
const OPERATIONS: [&str; 5] = [
    "broadcast_object",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
];

/// The function that a rank calls, and the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) operation: &'static str,
    pub(crate) root: Rank,
}

impl Call {
    pub(super) fn code(self) -> u64 {
        OPERATIONS.iter().position(|name| *name == self.operation).unwrap_or(OPERATIONS.len())
            as u64
    }

    /// The call of another rank.
    pub(super) fn named(code: u64, root: u64) -> Call {
        let operation = usize::try_from(code).ok().and_then(|code| OPERATIONS.get(code).copied());
        Call { operation: operation.unwrap_or("something else"), root: root as Rank }
    }

    pub(super) fn error(self, rank: Rank, problem: String) -> Error {
        let text = format!("{}: rank {rank} {problem}", self.operation);
        Error::quoting(ErrorKind::Object, Section::Objects, text)
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.operation {
            "all_gather_object" => f.write_str(self.operation),
            _ => write!(f, "{}(root {})", self.operation, self.root),
        }
    }
}
