//! What is queued on devices, and how it moves on.
//!
//! Operations form a graph: each has those that must end before it begins. A stream is the name of its last operation,
//! an event the name of the one that it marks. Names are not used again, so "it has ended" is "nobody has this name".
//!
//! Nothing here has a thread. One [`Work::step`] moves one operation that may move, chosen at random.

use std::collections::BTreeMap;
use std::ffi::c_void;

use crate::code::Code;
use crate::memory::{Memory, POISON, Span};
use crate::random::Random;

/// The name of an operation. 0 is that of none, which has ended.
pub(crate) type OpId = u64;

pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// A part of a device that does one thing at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Engine {
    CopyOut,
    CopyIn,
    Compute,
}

/// Where a copy has its bytes from.
pub(crate) enum Source {
    Span(Span),
    /// Pageable host memory, which the driver has put aside.
    Staged(Vec<u8>),
}

pub(crate) enum Action {
    /// Ends as soon as it may begin; tells the event that it marks.
    Mark(Option<usize>),
    Copy {
        to: Span,
        from: Source,
        engine: Option<Engine>,
        done: usize,
    },
    Fill {
        to: Span,
        value: u8,
    },
    Wait {
        word: Span,
        value: u32,
        how: u32,
    },
    Write {
        word: Span,
        value: u32,
    },
    Host {
        function: HostFunction,
        data: usize,
    },
    /// An operation of another library, which ends when its peers allow.
    Foreign(Box<dyn Foreign>),
}

/// An operation of another library on a stream.
pub(crate) trait Foreign: Send {
    /// The bytes that it reads and writes.
    fn spans(&self) -> Vec<Span>;
    /// Begins when it is called first, and does what can be done now.
    fn step(&mut self, memory: &mut Memory) -> Foreigner;
}

/// What a step of a foreign operation came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Foreigner {
    Waits,
    Moved,
    Ended,
    /// It ended, as the program made a mistake.
    Failed(String),
}

/// What a step came to.
pub(crate) enum Step {
    /// No operation can move now.
    Idle,
    Moved,
    /// The event's mark was passed, at this moment of the devices' time.
    Marked {
        event: usize,
        op: OpId,
        at: u64,
    },
    /// A function of the program is to be called; then the operation has [ended](Work::end).
    Call {
        op: OpId,
        function: HostFunction,
        data: usize,
    },
    /// An operation ended, as the program made a mistake.
    Violated(String),
    /// The device touched memory that is gone.
    Broke {
        device: usize,
        code: Code,
    },
}

struct Op {
    after: Vec<OpId>,
    device: usize,
    stream: usize,
    action: Action,
    /// Its destination holds poison.
    poisoned: bool,
    /// Its host function is being called.
    called: bool,
}

impl Op {
    fn destination(&self) -> Option<Span> {
        match &self.action {
            Action::Copy { to, .. } | Action::Fill { to, .. } => Some(*to),
            _ => None,
        }
    }

    fn spans(&self) -> Vec<Span> {
        match &self.action {
            Action::Copy { to, from: Source::Span(from), .. } => vec![*to, *from],
            Action::Copy { to, .. } | Action::Fill { to, .. } => vec![*to],
            Action::Wait { word, .. } | Action::Write { word, .. } => vec![*word],
            Action::Foreign(foreign) => foreign.spans(),
            Action::Mark(_) | Action::Host { .. } => Vec::new(),
        }
    }

    /// It may end only after something that others have yet to do.
    fn is_open(&self) -> bool {
        matches!(self.action, Action::Wait { .. } | Action::Host { .. } | Action::Foreign(_))
    }

    fn engine(&self) -> Option<Engine> {
        match self.action {
            Action::Copy { engine, .. } => engine,
            Action::Fill { .. } => Some(Engine::Compute),
            _ => None,
        }
    }
}

pub(crate) struct Work {
    pending: BTreeMap<OpId, Op>,
    named: OpId,
    busy: BTreeMap<(usize, Engine), OpId>,
    random: Random,
    /// A stream that moves only if no other can, for a while.
    laggard: Option<usize>,
    /// The most steps that one call of the library makes. 0: a slow device, for which most calls make none.
    pace: usize,
    ended: u64,
}

impl Work {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let pace = [0, 0, 1, 2, 8][random.below(5)];
        Work {
            pending: BTreeMap::new(),
            named: 0,
            busy: BTreeMap::new(),
            random,
            laggard: None,
            pace,
            ended: 0,
        }
    }

    /// Begins the random choices anew.
    pub(crate) fn reseed(&mut self, seed: u64) {
        let Work { random, pace, .. } = Work::new(seed);
        (self.random, self.pace, self.laggard) = (random, pace, None);
    }

    pub(crate) fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    /// How many steps the next call makes.
    pub(crate) fn steps(&mut self) -> usize {
        match self.pace {
            0 => usize::from(self.random.below(8) == 0),
            pace => self.random.below(pace + 1),
        }
    }

    pub(crate) fn is_pending(&self, op: OpId) -> bool {
        self.pending.contains_key(&op)
    }

    /// All that is queued on a device.
    pub(crate) fn of_device(&self, device: usize) -> Vec<OpId> {
        self.pending.iter().filter(|(_, op)| op.device == device).map(|(id, _)| *id).collect()
    }

    /// Whether something queued reads or writes memory of this range.
    pub(crate) fn touches(&self, range: u64) -> bool {
        self.pending.values().any(|op| op.spans().iter().any(|span| span.range == Some(range)))
    }

    /// Queues an operation after others.
    pub(crate) fn queue(
        &mut self,
        memory: &mut Memory,
        device: usize,
        stream: usize,
        after: Vec<OpId>,
        action: Action,
    ) -> OpId {
        self.named += 1;
        let mut op = Op { after, device, stream, action, poisoned: false, called: false };
        op.after.retain(|it| self.pending.contains_key(it));
        // Its destination is poisoned at once if no program can tell this from a device that began early: nothing
        // queued uses these bytes, and nothing before it waits for what the program has yet to do.
        if let Some(to) = op.destination()
            && !self.follows_open(&op.after)
            && !self
                .pending
                .values()
                .any(|other| other.spans().iter().any(|span| span.overlaps(&to)))
        {
            poison(&mut op, memory);
        }
        self.pending.insert(self.named, op);
        self.named
    }

    /// Moves one operation. `Idle` if none can move.
    pub(crate) fn step(&mut self, memory: &mut Memory) -> Step {
        let mut ready: Vec<OpId> = Vec::new();
        let ids: Vec<OpId> = self.pending.keys().copied().collect();
        for id in ids {
            if self.may_begin(id) {
                if let Some(op) = self.pending.get_mut(&id) {
                    poison(op, memory);
                }
                if self.has_engine(id) {
                    ready.push(id);
                }
            }
        }
        if self.random.below(16) == 0 {
            self.laggard = (!ready.is_empty() && self.random.below(2) == 0).then(|| {
                let chosen = ready[self.random.below(ready.len())];
                self.pending[&chosen].stream
            });
        }
        let (mut late, mut soon): (Vec<OpId>, Vec<OpId>) =
            ready.into_iter().partition(|id| Some(self.pending[id].stream) == self.laggard);
        loop {
            let from = if soon.is_empty() { &mut late } else { &mut soon };
            if from.is_empty() {
                return Step::Idle;
            }
            let chosen = from.swap_remove(self.random.below(from.len()));
            match self.move_on(chosen, memory) {
                Step::Idle => {}
                moved => return moved,
            }
        }
    }

    /// An operation is over: those behind it may begin.
    pub(crate) fn end(&mut self, id: OpId) {
        self.pending.remove(&id);
        self.busy.retain(|_, op| *op != id);
        self.ended += 1;
    }

    /// Drops what is queued on a device that is broken.
    pub(crate) fn drop_device(&mut self, device: usize) {
        // A host function that is being called ends by itself.
        self.pending.retain(|_, op| op.device != device || op.called);
        self.busy.retain(|(of, _), _| *of != device);
    }

    fn follows_open(&self, after: &[OpId]) -> bool {
        let mut todo = after.to_vec();
        let mut seen = std::collections::BTreeSet::new();
        while let Some(id) = todo.pop() {
            let Some(op) = self.pending.get(&id).filter(|_| seen.insert(id)) else { continue };
            if op.is_open() {
                return true;
            }
            todo.extend(&op.after);
        }
        false
    }

    fn may_begin(&self, id: OpId) -> bool {
        let Some(op) = self.pending.get(&id).filter(|op| !op.called) else { return false };
        !op.after.iter().any(|before| self.pending.contains_key(before))
    }

    fn has_engine(&self, id: OpId) -> bool {
        let op = &self.pending[&id];
        op.engine()
            .is_none_or(|engine| self.busy.get(&(op.device, engine)).is_none_or(|by| *by == id))
    }

    fn move_on(&mut self, id: OpId, memory: &mut Memory) -> Step {
        let Some(op) = self.pending.get_mut(&id) else { return Step::Idle };
        let device = op.device;
        let engine = op.engine();
        match &mut op.action {
            Action::Mark(event) => {
                let event = *event;
                self.end(id);
                return match event {
                    Some(event) => Step::Marked { event, op: id, at: self.ended },
                    None => Step::Moved,
                };
            }
            Action::Copy { to, from, done, .. } => {
                // All of the rest, or some of it: whoever looks too early sees torn data.
                let rest = to.len - *done;
                let len =
                    if self.random.below(2) == 0 { rest } else { 1 + self.random.below(rest) };
                let part = to.part(*done, len);
                let copied = match from {
                    Source::Span(from) => memory.copy(&part, &from.part(*done, len)),
                    Source::Staged(bytes) => memory.write(&part, &bytes[*done..*done + len]),
                };
                if !copied {
                    // The program was blamed when it gave the memory away. What is left of the copy is poison.
                    memory.fill(&to.clone(), POISON);
                    self.end(id);
                    return Step::Moved;
                }
                *done += len;
                if *done < to.len {
                    if let Some(engine) = engine {
                        self.busy.insert((device, engine), id);
                    }
                    return Step::Moved;
                }
            }
            Action::Fill { to, value } => {
                memory.fill(&to.clone(), *value);
            }
            Action::Wait { word, value, how } => match memory.load(word) {
                None => return Step::Broke { device, code: Code::ILLEGAL_ADDRESS },
                Some(now) if !holds(now, *value, *how) => return Step::Idle,
                Some(_) => {}
            },
            Action::Write { word, value } => {
                let (word, value) = (*word, *value);
                if !memory.store(&word, value) {
                    return Step::Broke { device, code: Code::ILLEGAL_ADDRESS };
                }
            }
            Action::Host { function, data } => {
                op.called = true;
                return Step::Call { op: id, function: *function, data: *data };
            }
            Action::Foreign(foreign) => match foreign.step(memory) {
                Foreigner::Waits => return Step::Idle,
                Foreigner::Moved => return Step::Moved,
                Foreigner::Ended => {}
                Foreigner::Failed(how) => {
                    self.end(id);
                    return Step::Violated(how);
                }
            },
        }
        self.end(id);
        Step::Moved
    }
}

/// Fills the destination of an operation with poison, unless the source lies there as well.
fn poison(op: &mut Op, memory: &mut Memory) {
    if op.poisoned {
        return;
    }
    op.poisoned = true;
    let Some(to) = op.destination() else { return };
    let from = match &op.action {
        Action::Copy { from: Source::Span(from), .. } => Some(*from),
        _ => None,
    };
    if !from.is_some_and(|from| from.overlaps(&to)) {
        memory.fill(&to, POISON);
    }
}

/// The conditions of cuStreamWaitValue32.
fn holds(now: u32, value: u32, how: u32) -> bool {
    match how & 3 {
        0 => now.wrapping_sub(value) as i32 >= 0,
        1 => now == value,
        2 => now & value != 0,
        _ => !(now | value) != 0,
    }
}
