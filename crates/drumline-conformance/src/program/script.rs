//! The actions of a program.

use drumline_schedule::step::Rank;

use crate::Case;

/// The groups and the rounds of a program.
#[derive(Clone, Debug)]
pub(super) struct Script {
    /// The groups of the program. The first one is the world.
    pub(super) groups: Vec<Group>,
    pub(super) rounds: Vec<Vec<Action>>,
}

#[derive(Clone, Debug)]
pub(super) struct Group {
    /// The members' numbers in the world, in the order of the group.
    pub(super) members: Vec<Rank>,
    /// Whether its ranks end it by `destroy`, which waits for all members; otherwise they drop it.
    pub(super) is_destroyed: bool,
}

/// An action of all ranks of a group. Ranks are numbers in the group; a group is named by its index
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

/// Messages from several ranks to one, which may be among the senders.
#[derive(Clone, Debug)]
pub(super) struct Messages {
    pub(super) from: Vec<Rank>,
    pub(super) to: Rank,
    pub(super) tag: u64,
    /// Whether the receiver receives from any rank.
    pub(super) any: bool,
    /// The contents: each sender sends its contribution to this case.
    pub(super) case: Case,
}

impl Action {
    /// The queue of the action. All ranks begin the actions of a queue in the same order: the collectives
    /// of a group, and messages with the same tag.
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
