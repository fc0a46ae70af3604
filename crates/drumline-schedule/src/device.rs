//! The order in which the windows of an all-reduce of device memory go through the memory of the host.
//!
//! A device's memory is one more place, and its copy engines are two more actors. Between them stands a collective,
//! `reduce_slices`. Each rank orders the three for itself.

/// What a rank does with a window of data. Each action has an actor of its own, which works on one window after
/// another: the engine that copies out, the host with its neighbours, and the engine that copies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Copy the window from the device to this rank's slot.
    CopyOut,
    /// Sum the window with all ranks. Every rank leaves a slice of the sum in its slot.
    Reduce,
    /// Copy all slices of the sum from the slots of this host's ranks to the device.
    CopyIn,
}

/// `action` on window `w` begins only when this rank's `after` on window `w + distance` has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// What waits.
    pub action: Action,
    /// What it waits for.
    pub after: Action,
    /// On which window, counted from its own.
    pub distance: i64,
}

/// How far the windows of one rank have come. Windows are numbered on from one all-reduce to the next, and window
/// `w` uses slot `w mod slots` on every rank.
///
/// ```text
///   copy out   0   1   2   3       4    5
///   reduce         0   1   2       3    4    5
///   copy in            0   1       2    3    4    5
///                                  ^ slot 0 again: all ranks are in `reduce 2`, so all have copied window 0 in
/// use drumline_schedule::device::{Action::*, Pipeline};
///
/// let mut pipeline = Pipeline::new(4, 2);
/// pipeline.add(1); // one window
/// assert_eq!(pipeline.begin(CopyOut), Some(0));
/// assert_eq!(pipeline.begin(Reduce), None); // the copy is under way
/// pipeline.end(CopyOut);
/// assert_eq!(pipeline.begin(Reduce), Some(0));
/// pipeline.end(Reduce);
/// assert_eq!(pipeline.begin(CopyIn), Some(0));
/// pipeline.end(CopyIn);
/// assert!(pipeline.is_idle());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pipeline {
    rules: [Rule; 4],
    slots: u64,
    /// The number of windows that are to be done, or were.
    windows: u64,
    /// By action: how many windows have begun, and how many have ended.
    begun: [u64; 3],
    ended: [u64; 3],
}

impl Action {
    /// All actions, in the order in which a window meets them.
    pub const ALL: [Action; 3] = [Action::CopyOut, Action::Reduce, Action::CopyIn];
}

impl Pipeline {
    /// Nothing is to be done yet. `slots` is the number of slots of each rank. A rank copies at most `slots - lag`
    /// windows ahead of the last one that was summed; `lag` windows may be between sum and copy in. Both are the same
    /// on all ranks.
    ///
    /// # Panics
    ///
    /// If not `0 < lag < slots`: then no window could ever begin.
    pub fn new(slots: usize, lag: usize) -> Pipeline {
        assert!(0 < lag && lag < slots, "a lag of {lag} windows does not fit {slots} slots");
        Pipeline::with(Pipeline::rules(slots, lag), slots)
    }

    /// A pipeline of other rules: for tests that plant errors.
    #[doc(hidden)]
    pub fn with(rules: [Rule; 4], slots: usize) -> Pipeline {
        Pipeline { rules, slots: slots as u64, windows: 0, begun: [0; 3], ended: [0; 3] }
    }

    /// What each action waits for. This is all of the algorithm.
    pub fn rules(slots: usize, lag: usize) -> [Rule; 4] {
        use Action::{CopyIn, CopyOut, Reduce};
        let [slots, lag] = [slots as i64, lag as i64];
        [
            Rule { action: CopyOut, after: Reduce, distance: lag - slots },
            Rule { action: Reduce, after: CopyOut, distance: 0 },
            Rule { action: Reduce, after: CopyIn, distance: -lag },
            Rule { action: CopyIn, after: Reduce, distance: 0 },
        ]
    }

    /// `count` more windows are to be done.
    pub fn add(&mut self, count: u64) {
        self.windows += count;
    }

    /// The next window of an action, if it may begin. It counts as begun then.
    pub fn begin(&mut self, action: Action) -> Option<u64> {
        let window = self.begun[action as usize];
        let may = window < self.windows
            && self.rules.iter().filter(|rule| rule.action == action).all(|rule| {
                // Windows end in order, so window `w` has ended when more than `w` have.
                self.ended[rule.after as usize] as i64 > window as i64 + rule.distance
            });
        may.then(|| {
            self.begun[action as usize] += 1;
            window
        })
    }

    /// The oldest window of an action that has begun has ended.
    pub fn end(&mut self, action: Action) {
        self.ended[action as usize] += 1;
        debug_assert!(self.ended[action as usize] <= self.begun[action as usize]);
    }

    /// The slot of a window.
    pub fn slot(&self, window: u64) -> usize {
        (window % self.slots) as usize
    }

    /// How many windows have begun an action: the number of the next one.
    pub fn begun(&self, action: Action) -> u64 {
        self.begun[action as usize]
    }

    /// How many windows have ended an action.
    pub fn ended(&self, action: Action) -> u64 {
        self.ended[action as usize]
    }

    /// Whether all windows are done.
    pub fn is_idle(&self) -> bool {
        self.ended[Action::CopyIn as usize] == self.windows
    }
}

#[cfg(test)]
mod tests;
