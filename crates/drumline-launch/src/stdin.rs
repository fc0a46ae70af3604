//! Which worker gets the stdin of the launcher.

/// Which worker of this host gets the stdin of the launcher. The stdin of the others is empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stdin {
    /// The first one, if stdin is a terminal, or if it is the only worker of the job.
    #[default]
    First,
    /// None.
    Nobody,
    /// The one with this local rank.
    Worker(usize),
}

/// The stdin of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    Empty,
    /// What the launcher has: a pipe or a file.
    Launchers,
    /// The terminal of the launcher. The kernel lets only the processes of one group read from a terminal, so the
    /// worker is in the group of the launcher. What is typed to interrupt, such as Ctrl-C, reaches both.
    Terminal,
}

impl Stdin {
    /// The stdin of the worker with this local rank, if that of the launcher is a terminal or not.
    pub(crate) fn of(self, local_rank: usize, is_terminal: bool, is_alone: bool) -> Input {
        let owner = match self {
            Stdin::First => (is_terminal || is_alone).then_some(0),
            Stdin::Nobody => None,
            Stdin::Worker(owner) => Some(owner),
        };
        match owner == Some(local_rank) {
            false => Input::Empty,
            true if is_terminal => Input::Terminal,
            true => Input::Launchers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_worker_gets_a_terminal_and_a_worker_that_is_alone_gets_anything() {
        use Input::{Empty, Launchers, Terminal};
        for (stdin, is_terminal, is_alone, wanted) in [
            (Stdin::First, true, true, [Terminal, Empty]),
            (Stdin::First, true, false, [Terminal, Empty]),
            (Stdin::First, false, true, [Launchers, Empty]),
            (Stdin::First, false, false, [Empty, Empty]),
            (Stdin::Nobody, true, true, [Empty, Empty]),
            (Stdin::Worker(1), true, false, [Empty, Terminal]),
            (Stdin::Worker(1), false, false, [Empty, Launchers]),
        ] {
            assert_eq!([0, 1].map(|rank| stdin.of(rank, is_terminal, is_alone)), wanted);
        }
    }
}
