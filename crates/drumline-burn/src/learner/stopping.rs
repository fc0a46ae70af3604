//! How the ranks agree to stop after the same step.

use std::time::Duration;

use drumline::{Begun, Objects, ProcessGroup, ReduceOp, Work};

use crate::Result;

/// What a rank tells the others in a step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mark {
    /// The epoch ends with this step.
    pub(super) ends: bool,
    /// The rank wants to stop after this step.
    pub(super) stops: bool,
    /// The rank lacks a part of the step's data, so the step is not to be applied.
    pub(super) is_incomplete: bool,
}

/// The marks of all ranks, counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Marks {
    pub(super) ends: usize,
    pub(super) stops: usize,
    pub(super) incomplete: usize,
}

/// Marks under way.
pub(super) struct Sent(Begun<Vec<u32>>);

impl Mark {
    /// Sends the mark ahead of the step's gradients, so nothing waits for it.
    pub(super) fn send(self, group: &ProcessGroup) -> Sent {
        let mark = [self.ends, self.stops, self.is_incomplete].map(u32::from);
        Sent(group.all_reduce_async(mark.to_vec(), ReduceOp::Sum))
    }
}

impl Sent {
    pub(super) fn wait(self) -> Result<Marks> {
        let marks = self.0.and_then(Work::wait).map_err(drumline::Error::from)?;
        let count = |at: usize| marks.get(at).map_or(0, |&count| count as usize);
        Ok(Marks { ends: count(0), stops: count(1), incomplete: count(2) })
    }
}

/// Why a rank wants to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Training does not improve.
    StopEarly,
    /// It was asked to. The text is the reason, if there is one.
    Stop(Option<String>),
    /// It has failed.
    Fail(String),
}

/// A wish as it travels: its kind, and its text.
type Told = Option<(u8, Option<String>)>;

/// The wishes of all ranks, by rank. Waits without a deadline for ranks that live.
pub(super) fn exchange(wish: Option<Wish>, group: &ProcessGroup) -> Result<Vec<Option<Wish>>> {
    let told: Told = wish.map(|wish| match wish {
        Wish::StopEarly => (0, None),
        Wish::Stop(reason) => (1, reason),
        Wish::Fail(problem) => (2, Some(problem)),
    });
    let all = group.within(Duration::MAX).all_gather_object(&told)?;
    let heard = |(kind, text)| match kind {
        0 => Wish::StopEarly,
        1 => Wish::Stop(text),
        _ => Wish::Fail(text.unwrap_or_default()),
    };
    Ok(all.into_iter().map(|told: Told| told.map(heard)).collect())
}
