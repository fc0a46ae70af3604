//! The steps of a schedule, as one rank carries them out.

use drumline_schedule::{
    Pipeline, Schedule,
    step::{Loc, Rank, Side, Step},
};

use super::{
    flags::Seat,
    local::{Local, Operand},
    scratch::staging,
};

/// The steps of a rank, worked out as far as the call's shape allows: neighbours are seats, and steps in
/// memory have their operands.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    list: Vec<Task>,
    locals: Vec<Local>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    /// The number of windows by which this step lags behind the first. `None`: it belongs to no window, and is taken in
    /// every turn.
    lag: Option<usize>,
    pub(crate) verb: Verb,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Send {
        to: Rank,
        src: Loc,
    },
    Receive {
        from: Rank,
        dst: Loc,
    },
    /// Carry out a step in memory.
    Compute(Index),
    /// Wait until this number of the schedule's messages to `to` has left.
    Flush {
        to: Rank,
        upto: usize,
    },
    Post,
    /// Wait until a neighbour has posted this number of times in this piece.
    Wait {
        seat: Seat,
        upto: u64,
    },
}

impl Task {
    /// The window on which the task works in that turn. `None`: it has nothing to do.
    #[inline]
    pub(crate) fn window(&self, turn: usize, windows: usize) -> Option<usize> {
        match self.lag {
            Some(lag) => turn.checked_sub(lag).filter(|window| *window < windows),
            None => Some(0),
        }
    }
}

/// The index of a [`Local`] in its list.
#[derive(Clone, Copy, Debug)]
pub struct Index(usize);

impl Tasks {
    /// The tasks of a schedule. `operand` finds the memory of a place, `seat` the seat of a neighbour.
    pub(crate) fn of(
        schedule: &Schedule,
        pipeline: &Pipeline,
        operand: impl Fn(Loc) -> Operand,
        seat: impl Fn(Rank) -> Seat,
    ) -> Tasks {
        let mut tasks = Tasks::default();
        let finish = |last: bool| last.then_some(schedule.world_size);
        let pair = |dst: Loc, src: Loc, side: Side, last: bool| {
            let srcs = match side {
                Side::Left => [src, dst],
                Side::Right => [dst, src],
            };
            Local::pair(operand(dst), srcs.map(&operand), finish(last))
        };
        for (index, step) in schedule.steps.iter().enumerate() {
            let verb = match *step {
                Step::Send { to, src } => Verb::Send { to, src },
                Step::Recv { from, dst } => Verb::Receive { from, dst },
                Step::RecvReduce { from, dst, side, finish } => {
                    let verb = Verb::Receive { from, dst: staging(dst) };
                    tasks.list.push(Task { lag: Some(pipeline.lag(index)), verb });
                    tasks.keep(pair(dst, staging(dst), side, finish))
                }
                Step::Reduce { dst, src, side, finish } => tasks.keep(pair(dst, src, side, finish)),
                Step::ReduceTree { ref dsts, ref srcs, finish: last } => {
                    tasks.keep(Local::tree(dsts, srcs, finish(last), &operand))
                }
                Step::Copy { dst, src } => {
                    tasks.keep(Local::Copy { dst: operand(dst), src: operand(src) })
                }
                Step::Flush { to, upto } => Verb::Flush { to, upto },
                Step::Post => Verb::Post,
                Step::Wait { peer, upto } => Verb::Wait { seat: seat(peer), upto: upto as u64 },
            };
            let lag = match verb {
                Verb::Post | Verb::Wait { .. } => None,
                _ => Some(pipeline.lag(index)),
            };
            tasks.list.push(Task { lag, verb });
        }
        tasks
    }

    fn keep(&mut self, local: Local) -> Verb {
        self.locals.push(local);
        Verb::Compute(Index(self.locals.len() - 1))
    }

    /// All tasks, in order.
    pub(crate) fn list(&self) -> &[Task] {
        &self.list
    }

    pub(crate) fn local(&self, Index(index): Index) -> &Local {
        &self.locals[index]
    }
}
