//! By how much each step of a schedule lags where several windows are under way at once.

use crate::step::Step;

/// The lag of each step of a schedule, in windows. Without lags a window ends before the next one begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lags {
    /// The lag of each step. Empty: no step lags.
    pub of_steps: Vec<usize>,
    /// The number of windows that slots have room for at the same time, the same on all ranks. Window `w` lies
    /// in place `w % slot_windows`.
    pub slot_windows: usize,
}

impl Lags {
    /// No step lags.
    pub const NONE: Lags = Lags { of_steps: vec![], slot_windows: 1 };

    /// Every run of receives that follows a send begins a round, and lags one window more.
    pub(crate) fn by_rounds(steps: &[Step]) -> Lags {
        let (mut rounds, mut has_sent) = (0, false);
        let lag = |step: &Step| {
            match step {
                Step::Send { .. } => has_sent = true,
                Step::Recv { .. } | Step::RecvReduce { .. } if std::mem::take(&mut has_sent) => {
                    rounds += 1;
                }
                _ => {}
            }
            rounds
        };
        Lags::of(steps, steps.iter().map(lag).collect())
    }

    /// The same, where a host shares out what took `rounds` rounds between hosts: everything after the second
    /// post lags that much. Ranks that send nothing themselves lag so, too.
    pub(crate) fn by_rounds_between_hosts(steps: &[Step], rounds: usize) -> Lags {
        let Lags { mut of_steps, .. } = Lags::by_rounds(steps);
        let mut posts = steps.iter().enumerate().filter(|(_, step)| matches!(step, Step::Post));
        if let Some((second, _)) = posts.nth(1) {
            of_steps[second..].fill(rounds);
        }
        Lags::with_results_in_slots(steps, of_steps, rounds)
    }

    /// These lags. Two windows are in the slots of a turn: one to be summed, and one `rounds` behind it, which is a
    /// result.
    pub(crate) fn with_results_in_slots(
        steps: &[Step],
        of_steps: Vec<usize>,
        rounds: usize,
    ) -> Lags {
        let slot_windows = (2..).find(|places| !rounds.is_multiple_of(*places)).unwrap_or(1);
        Lags { slot_windows, ..Lags::of(steps, of_steps) }
    }

    /// All steps but the sends at the beginning lag one window.
    pub(crate) fn sends_ahead(steps: &[Step]) -> Lags {
        let sends = steps.iter().take_while(|step| matches!(step, Step::Send { .. })).count();
        let lag = |index| usize::from(index >= sends);
        Lags::of(steps, (0..steps.len()).map(lag).collect())
    }

    /// Receives, and everything after the last of them, lag one window.
    pub(crate) fn receives_behind(steps: &[Step]) -> Lags {
        let is_receive = |step: &Step| matches!(step, Step::Recv { .. });
        let last = steps.iter().rposition(is_receive).unwrap_or(steps.len());
        let lag = |(index, step)| usize::from(index >= last || is_receive(step));
        Lags::of(steps, steps.iter().enumerate().map(lag).collect())
    }

    /// These lags, but a flush lags as much as the step that follows it.
    fn of(steps: &[Step], mut of_steps: Vec<usize>) -> Lags {
        for (index, step) in steps.iter().enumerate().rev() {
            if let (Step::Flush { .. }, Some(&next)) = (step, of_steps.get(index + 1)) {
                of_steps[index] = next;
            }
        }
        Lags { of_steps, slot_windows: 1 }
    }
}
