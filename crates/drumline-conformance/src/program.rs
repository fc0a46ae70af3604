//! Random programs: groups are made of groups, used side by side and ended, and each rank begins
//! and awaits what is under way in an order of its own.

mod draft;
mod messages;
mod rank;

use drumline_schedule::step::Rank;
use fastrand::Rng;

use self::{draft::Draft, rank::Performer};
use crate::{Case, World};

/// What all ranks of a job do, drawn from a seed.
///
/// A program is made of rounds. The first action of a round may block: making a group, ending
/// one, or what some ranks call in its blocking form. All others of the round are under way beside
/// it. A rank begins the actions of a round in any order that keeps those of one group's
/// collectives, and messages with one tag, as they are; it awaits each of them at the end of the
/// round or at any time later. So no rank ever waits for what another one has not begun because it
/// waits itself, and what an implementation makes of it must come to an end.
#[derive(Clone, Debug)]
pub struct Program {
    seed: u64,
    /// The first one is the world.
    groups: Vec<Group>,
    rounds: Vec<Vec<Action>>,
}

#[derive(Clone, Debug)]
struct Group {
    /// What the world calls the group's ranks, in their order.
    members: Vec<Rank>,
    /// Whether its ranks wait for each other before it ends.
    is_destroyed: bool,
}

/// Something that ranks of a group do together. Ranks are the group's, groups stand for their
/// place in the program's list.
#[derive(Clone, Debug)]
enum Action {
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
struct Messages {
    from: Vec<Rank>,
    to: Rank,
    tag: u64,
    /// Whether they are received as they come.
    any: bool,
    /// Whose contributions are sent.
    case: Case,
}

impl Program {
    /// Everything follows from the seed.
    pub fn draw(seed: u64) -> Program {
        Draft::new(Rng::with_seed(seed)).program(seed)
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.groups[0].members.len()
    }

    /// Runs the program and compares every result with the oracle's. With `trace`, tells on
    /// stderr what the program is and what each rank does.
    ///
    /// # Errors
    ///
    /// What the ranks that fail say.
    pub fn run(&self, world: &dyn World, trace: bool) -> Result<(), String> {
        if trace {
            self.tell();
        }
        let rank = |group: &drumline::ProcessGroup| Performer::new(self, group, trace).perform();
        world
            .run(self.world_size(), &rank)
            .map_err(|problem| format!("program {}, {}: {problem}", self.seed, world.name()))
    }

    #[expect(clippy::print_stderr, reason = "the trace is for people")]
    fn tell(&self) {
        for (number, group) in self.groups.iter().enumerate() {
            eprintln!("group {number}: {group:?}");
        }
        for (number, round) in self.rounds.iter().enumerate() {
            for action in round {
                eprintln!("round {number}: {action:?}");
            }
        }
    }
}

impl Action {
    /// What must be begun in the same order on all ranks: collectives of a group, and messages
    /// with the same tag.
    fn queue(&self) -> (usize, Option<u64>) {
        match self {
            Action::NewGroup { made, .. } => (*made, None),
            Action::Split { parent: group, .. }
            | Action::End { group }
            | Action::Call { group, .. } => (*group, None),
            Action::Messages { group, messages } => (*group, Some(messages.tag)),
        }
    }

    /// The group whose ranks take part.
    fn group(&self) -> usize {
        match self {
            Action::NewGroup { parent: group, .. }
            | Action::Split { parent: group, .. }
            | Action::End { group }
            | Action::Call { group, .. }
            | Action::Messages { group, .. } => *group,
        }
    }
}
