//! Whether a job that has failed starts again, and when: a state machine without a clock.
//!
//! | what happened | what follows |
//! |---|---|
//! | a worker failed, and restarts are left | a pause, then all workers start again |
//! | exit code 2, 126 or 127 | no restart: the command line or the program is wrong, and stays so |
//! | three worlds in a row ended before their first step | no restart: the next one would end there, too. A world whose ranks could not be started does not count: what it lacked may be there again |
//! | ten worlds in a row lost a host within 30 s, and before their first step | the job ends: its hosts do not stay together |
//! | a worker hung in the kernel | no restart: what it waits for is as broken then |
//! | a world ran for [`Restarts::reset_after`], if that is set | all restarts are there again, and the pause is the shortest |
//!
//! The first step is the first call of `drumline::step`. A program that never calls it counts as past its first
//! step after 10 s.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Ending;

/// How often a job may start again, and how long it waits before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarts {
    /// How often the job may start again, from its beginning to its end.
    pub max: u32,
    /// The pause before the first restart. Every further pause is twice as long.
    pub delay_min: Duration,
    /// The longest pause.
    pub delay_max: Duration,
    /// A world that ran this long gives all restarts back: a job that runs for weeks then ends only if it fails
    /// often in a short time. `None`: nothing gives them back.
    pub reset_after: Option<Duration>,
}

impl Default for Restarts {
    fn default() -> Self {
        Restarts {
            max: 0,
            delay_min: Duration::from_secs(1),
            delay_max: Duration::from_secs(60),
            reset_after: None,
        }
    }
}

/// How the workers of all hosts ended that ran at the same time.
#[derive(Clone, Copy, Debug)]
pub struct EndedWorld {
    /// How the worker ended that failed first.
    pub ending: Ending,
    /// How long the world ran; no time if its ranks could not be started.
    pub lived: Duration,
    /// Whether one of its ranks said that it made a step.
    pub stepped: bool,
}

impl EndedWorld {
    /// One whose ranks could not be started: the launcher's error has this exit code.
    pub(crate) fn never_ran(exit_code: u8) -> EndedWorld {
        let ending = Ending::Code(exit_code.into());
        EndedWorld { ending, lived: Duration::ZERO, stepped: false }
    }
}

/// What follows a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// All workers start again after this pause.
    Restart(Duration),
    /// The job ends.
    End(NoRestart),
}

/// Why a job ends instead of starting again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NoRestart {
    /// No restarts are left. The job had this many.
    UsedUp(u32),
    /// The worker exited with this code, which another start would not change.
    Code(i32),
    /// This many worlds in a row ended before their first step.
    NoStep(u32),
    /// This many worlds in a row lost a host before their first step.
    HostsLost(u32),
}

/// The restarts that are left.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartBudget {
    restarts: Restarts,
    used: u32,
    /// Worlds in a row that ended before their first step.
    stillborn: u32,
    /// Worlds in a row that lost a host before their first step.
    lost: u32,
}

/// So many worlds in a row may lose a host before their first step. Hosts that come and go may well do that a few times
/// while a program starts.
const LOST_MAX: u32 = 10;

/// A world that ran so long has not lost its host because its hosts do not reach each other.
const TOGETHER_AFTER: Duration = Duration::from_secs(30);

/// So many worlds in a row may end before their first step.
const STILLBORN_MAX: u32 = 3;

/// A program that never says that it made a step has made one after this time.
const STEPPED_AFTER: Duration = Duration::from_secs(10);

/// Exit codes of a wrong command line, of a program without permission, and of one that does not exist.
const FUTILE: [i32; 3] = [2, 126, 127];

impl RestartBudget {
    /// All restarts are left.
    pub fn new(restarts: Restarts) -> RestartBudget {
        RestartBudget { restarts, ..RestartBudget::default() }
    }

    /// How many restarts are used, since [`Restarts::reset_after`] has given them back.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Whether another world may follow one that has lost a host, which costs no restart. Of that world it takes how long
    /// it ran, and whether it made a step.
    ///
    /// # Errors
    ///
    /// Why none may follow.
    pub fn after_loss(&mut self, lived: Duration, stepped: bool) -> Result<(), NoRestart> {
        self.lost = if stepped || lived >= TOGETHER_AFTER { 0 } else { self.lost + 1 };
        if self.lost < LOST_MAX { Ok(()) } else { Err(NoRestart::HostsLost(self.lost)) }
    }

    /// Decides what follows this failure.
    pub fn after(&mut self, world: EndedWorld) -> Next {
        if self.restarts.reset_after.is_some_and(|calm| world.lived >= calm) {
            self.used = 0;
        }
        if world.stepped || world.lived >= TOGETHER_AFTER {
            self.lost = 0;
        }
        let has_stepped = world.stepped || world.lived >= STEPPED_AFTER;
        self.stillborn = match has_stepped {
            true => 0,
            false => self.stillborn + u32::from(!world.lived.is_zero()),
        };
        if self.restarts.max == 0 || self.used >= self.restarts.max {
            return Next::End(NoRestart::UsedUp(self.restarts.max));
        }
        match world.ending {
            Ending::Code(code) if FUTILE.contains(&code) => {
                return Next::End(NoRestart::Code(code));
            }
            _ => {}
        }
        if self.stillborn >= STILLBORN_MAX {
            return Next::End(NoRestart::NoStep(self.stillborn));
        }
        let doubled = 2_u32.saturating_pow(self.used);
        let pause = self.restarts.delay_min.saturating_mul(doubled).min(self.restarts.delay_max);
        self.used += 1;
        Next::Restart(pause)
    }
}

#[cfg(test)]
mod tests;
