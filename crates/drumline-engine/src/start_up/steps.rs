//! Code that asks and is answered, step by step.

use std::{
    cell::{Cell, RefCell},
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use crate::transport::Channel;

/// What performs the questions of a start-up.
pub trait Outside {
    /// Why a store, a socket or memory failed.
    type Error: fmt::Display;
    /// A connection with a peer of this host.
    type Stream;
}

/// What a rank asks of the store and of its process. A key has no leading slash.
#[derive(Debug)]
pub enum Ask {
    /// Stores a value under a key. Answered by [`Answer::Done`], as are all that name no other answer.
    Set(String, Vec<u8>),
    /// The same for several keys, in one step.
    SetAll(Vec<(String, Vec<u8>)>),
    /// The value of a key, once it is there. Answered by [`Answer::Words`].
    Get(String),
    /// The values of several keys. Answered by [`Answer::Words`].
    GetAll(Vec<String>),
    /// Stores `desired` if the value is `expected`. Answered by the value after that.
    CompareSet {
        /// The key.
        key: String,
        /// What the value must be; nothing stands for a key without a value.
        expected: Vec<u8>,
        /// What it becomes.
        desired: Vec<u8>,
    },
    /// Adds to a number. Answered by [`Answer::Number`].
    Add(String, i64),
    /// Deletes a key.
    Delete(String),
    /// Whether a key is there. Answered by 1 or 0.
    Check(String),
    /// Waits for keys, for this time. Answered by [`Answer::Missing`] when the time is over.
    Wait(Vec<String>, Duration),
    /// Opens the store of the job anew, for which there is this time.
    Open(Duration),
    /// Waits until all ranks of the job have joined, for this time. Only a rank that hosts the store waits.
    Assemble(Duration),
    /// Closes the store, and does nothing for a while.
    Leave(Duration),
    /// Listens on a Unix socket, and says this rank's card. Answered by [`Answer::Words`].
    Card,
    /// Listens for ranks outside this process's reach over Unix sockets, and says where. These of them are on
    /// other networks. Answered by [`Answer::Words`].
    Listen(Vec<Rank>),
    /// Calls a peer at its Unix socket. Answered by [`Answer::Dialled`].
    Dial {
        /// The peer.
        peer: Rank,
        /// The name of its socket.
        name: String,
        /// What the stream is for.
        channel: Channel,
    },
    /// Lets higher ranks in until this time. Answered by [`Answer::Came`], as soon as somebody has come.
    Accept(Instant),
    /// Does nothing for a while.
    Pause(Duration),
    /// Makes memory to share. Answered by [`Answer::Memory`].
    MakeMemory,
    /// Exchanges the memory with the peers of this host. Answered by [`Answer::Memory`].
    MapMemory,
}

/// The answer to an [`Ask`].
#[derive(Debug)]
pub enum Answer<S> {
    /// It is done.
    Done,
    /// Values.
    Words(Vec<Vec<u8>>),
    /// A number.
    Number(i64),
    /// These keys were missing when the time was over.
    Missing(Vec<String>),
    /// How a call of a peer ended.
    Dialled(Dialled<S>),
    /// Peers that have come, and for what.
    Came(Vec<(Rank, Channel, S)>),
    /// Whether there is memory to share, or why not.
    Memory(Result<(), String>),
}

/// How a call of a peer ended.
#[derive(Debug)]
pub enum Dialled<S> {
    /// The peer has let this rank in.
    Open(S),
    /// The peer is not who it should be, or does not take this rank for what it is.
    Refused(String),
    /// It hung up before it had answered.
    HungUp(String),
    /// The call failed.
    Failed(String),
}

/// An answer, or why there is none.
pub type Answered<W> = Result<Answer<<W as Outside>::Stream>, <W as Outside>::Error>;

/// Where code asks, and finds the answers.
pub struct Desk<W: Outside>(Rc<Shared<W>>);

struct Shared<W: Outside> {
    slot: RefCell<Slot<W>>,
    now: Cell<Instant>,
}

enum Slot<W: Outside> {
    Empty,
    Asked(Ask),
    Answered(Answered<W>),
}

impl<W: Outside> Desk<W> {
    /// The time of the last answer.
    pub fn now(&self) -> Instant {
        self.0.now.get()
    }

    /// How much of the time until `deadline` is left.
    pub(super) fn left_until(&self, deadline: Instant) -> Duration {
        deadline.saturating_duration_since(self.now())
    }

    pub(super) async fn ask(&self, question: Ask) -> Answered<W> {
        self.0.slot.replace(Slot::Asked(question));
        poll_fn(|_| match self.0.slot.replace(Slot::Empty) {
            Slot::Answered(answer) => Poll::Ready(answer),
            other => {
                self.0.slot.replace(other);
                Poll::Pending
            }
        })
        .await
    }
}

/// Code that is under way: each answer brings it to its next question, or to its end.
pub struct Steps<'c, W: Outside, T> {
    code: Pin<Box<dyn Future<Output = T> + 'c>>,
    desk: Desk<W>,
}

/// How far code has come.
#[derive(Debug)]
pub enum Step<T> {
    /// It asks this.
    Ask(Ask),
    /// It has ended.
    Over(T),
}

impl<'c, W: Outside, T> Steps<'c, W, T> {
    /// Prepares code. It runs up to its first question in [`Steps::begin`].
    pub fn new<F: Future<Output = T> + 'c>(
        now: Instant,
        code: impl FnOnce(Desk<W>) -> F,
    ) -> Steps<'c, W, T> {
        let shared = Rc::new(Shared { slot: RefCell::new(Slot::Empty), now: Cell::new(now) });
        let code = Box::pin(code(Desk(shared.clone())));
        Steps { code, desk: Desk(shared) }
    }

    /// Runs up to the first question.
    pub fn begin(&mut self) -> Step<T> {
        self.go_on()
    }

    /// Answers the question that was asked last, at the time `now`.
    pub fn answer(&mut self, answer: Answered<W>, now: Instant) -> Step<T> {
        self.desk.0.now.set(now);
        self.desk.0.slot.replace(Slot::Answered(answer));
        self.go_on()
    }

    fn go_on(&mut self) -> Step<T> {
        match self.code.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => Step::Over(result),
            Poll::Pending => match self.desk.0.slot.replace(Slot::Empty) {
                Slot::Asked(question) => Step::Ask(question),
                _ => unreachable!("code waits for nothing but the answer to its question"),
            },
        }
    }
}

impl<W: Outside> fmt::Debug for Desk<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl<W: Outside, T> fmt::Debug for Steps<'_, W, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Steps").field("desk", &self.desk).finish_non_exhaustive()
    }
}
