//! What the ranks of a program do.

use drumline_schedule::step::Rank;

use crate::Case;

/// The groups and the rounds of a program.
#[derive(Clone, Debug)]
pub(super) struct Script {
    /// The first one is the world.
    pub(super) groups: Vec<Group>,
    pub(super) rounds: Vec<Vec<Action>>,
}

#[derive(Clone, Debug)]
pub(super) struct Group {
    /// What the world calls the group's ranks, in their order.
    pub(super) members: Vec<Rank>,
    /// Whether its ranks wait for each other before it ends.
    pub(super) is_destroyed: bool,
}

/// What the ranks of a group do together. Ranks are numbers in the group; a group is named by its index
/// in [`Script::groups`].
#[derive(Clone, Debug)]
pub(super) enum Action {
    /// Some ranks make a group of their own.
    NewGroup {
        parent: usize,
        ranks: Vec<Rank>,
        keep_order: bool,
        made: usize,
    },
    /// Each rank finds its group by its colour.
    Split {
        parent: usize,
        colors: Vec<Option<u64>>,
        keys: Vec<i64>,
        made: Vec<usize>,
    },
    End {
        group: usize,
    },
    Call {
        group: usize,
        case: Case,
        registered: bool,
    },
    Messages {
        group: usize,
        messages: Messages,
    },
}

/// One rank receives from some, perhaps from itself.
#[derive(Clone, Debug)]
pub(super) struct Messages {
    pub(super) from: Vec<Rank>,
    pub(super) to: Rank,
    pub(super) tag: u64,
    /// Whether they are received as they come.
    pub(super) any: bool,
    /// Whose contributions are sent.
    pub(super) case: Case,
}

impl Action {
    /// What must be begun in the same order on all ranks: collectives of a group, and messages
    /// with the same tag.
    pub(super) fn queue(&self) -> (usize, Option<u64>) {
        match self {
            Action::NewGroup { made, .. } => (*made, None),
            Action::Split { parent: group, .. }
            | Action::End { group }
            | Action::Call { group, .. } => (*group, None),
            Action::Messages { group, messages } => (*group, Some(messages.tag)),
        }
    }

    /// The group whose ranks take part.
    pub(super) fn group(&self) -> usize {
        match self {
            Action::NewGroup { parent: group, .. }
            | Action::Split { parent: group, .. }
            | Action::End { group }
            | Action::Call { group, .. }
            | Action::Messages { group, .. } => *group,
        }
    }
}
