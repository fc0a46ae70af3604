//! Random programs: groups are made of groups, used side by side and ended, and each rank begins
//! and awaits what is under way in an order of its own.

mod draft;
mod messages;
mod rank;
mod script;

use fastrand::Rng;

use self::{draft::Draft, rank::Performer, script::Script};
use crate::World;

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
    script: Script,
}

impl Program {
    /// Everything follows from the seed.
    pub fn draw(seed: u64) -> Program {
        Program { seed, script: Draft::new(Rng::with_seed(seed)).script() }
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.script.groups[0].members.len()
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
        let rank = |group: &drumline::ProcessGroup| {
            Performer::new(&self.script, self.seed, group, trace).perform()
        };
        world
            .run(self.world_size(), &rank)
            .map_err(|problem| format!("program {}, {}: {problem}", self.seed, world.name()))
    }

    #[expect(clippy::print_stderr, reason = "the trace is for people")]
    fn tell(&self) {
        for (number, group) in self.script.groups.iter().enumerate() {
            eprintln!("group {number}: {group:?}");
        }
        for (number, round) in self.script.rounds.iter().enumerate() {
            for action in round {
                eprintln!("round {number}: {action:?}");
            }
        }
    }
}
