//! Random programs: groups are made from groups, used side by side and ended. Each rank begins and awaits
//! calls in its own order.

mod draft;
mod messages;
mod rank;
mod script;

use fastrand::Rng;

use self::{draft::Draft, rank::Performer, script::Script};
use crate::World;

/// The actions of all ranks of a job, drawn from a seed.
///
/// A program consists of rounds. The first action of a round may block: it makes or ends a group, or is a
/// call in its blocking form. The other actions of the round run in the background beside it. A rank
/// begins the actions of a round in any order that keeps the order of the collectives of one group, and
/// of messages with one tag. It awaits each action at the end of the round or at any later time. So ranks
/// never wait for each other in a circle, and a correct implementation comes to an end.
#[derive(Clone, Debug)]
pub struct Program {
    seed: u64,
    script: Script,
}

impl Program {
    /// The program of a seed, the same every time.
    pub fn draw(seed: u64) -> Program {
        Program { seed, script: Draft::new(Rng::with_seed(seed)).script() }
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.script.groups[0].members.len()
    }

    /// Runs the program and compares every result with the oracle's. With `trace`, prints the program and
    /// the actions of each rank on stderr.
    ///
    /// # Errors
    ///
    /// The errors of the ranks that fail.
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
