//! Code that asks questions and goes on with the answers.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use crate::transport::Channel;

/// The surroundings that answer the questions of a start-up.
pub trait Outside {
    /// Why a store, a socket or memory failed.
    type Error: fmt::Display;
    /// A connection to a peer of this host.
    type Stream;
}

/// A question of a rank to the store or to its process. Keys have no leading slash.
#[derive(Debug)]
pub enum Ask {
    /// Stores a value under a key. Answered by [`Answer::Done`], as is every question that names no other
    /// answer.
    Set(String, Vec<u8>),
    /// Stores the values of several keys in one step.
    SetAll(Vec<(String, Vec<u8>)>),
    /// The value of a key, once it is there. Answered by [`Answer::Words`].
    Get(String),
    /// The values of several keys, once they are there. Answered by [`Answer::Words`].
    GetAll(Vec<String>),
    /// Stores `desired` if the value is `expected`. Answered by [`Answer::Words`] with the value after that.
    CompareSet {
        /// The key.
        key: String,
        /// The value that is replaced; empty for a key without a value.
        expected: Vec<u8>,
        /// The new value.
        desired: Vec<u8>,
    },
    /// Adds to a number. Answered by [`Answer::Number`].
    Add(String, i64),
    /// Deletes a key.
    Delete(String),
    /// Whether a key is there. Answered by [`Answer::Number`], 1 or 0.
    Check(String),
    /// Waits for keys, at most for this time. Answered by [`Answer::Missing`] when the time is over.
    Wait(Vec<String>, Duration),
    /// Connects to the store of the job anew, within this time.
    Open(Duration),
    /// Joins, the first time. Then a rank that hosts the store waits until all ranks of the job have joined, at most for
    /// `limit`. Answered by [`Answer::Missing`] if they have not; the last time, that is an error.
    Assemble {
        /// How long it waits.
        limit: Duration,
        /// Whether it asks for the first time.
        first: bool,
        /// Whether it asks for the last time.
        last: bool,
    },
    /// Disconnects from the store, and waits for this time.
    Leave(Duration),
    /// The sign of this process: words that say on which host and network it is, and how it is reached there and, once
    /// it `reaches_out`, from other networks. Answered by [`Answer::Words`].
    Sign {
        /// Whether processes on other networks must reach it.
        reaches_out: bool,
    },
    /// Looks at the signs of other processes. Answered by [`Answer::Signs`], without waiting.
    Look(BTreeSet<String>),
    /// Listens on a Unix socket and returns this rank's card. Answered by [`Answer::Words`].
    Card,
    /// Listens for ranks that cannot reach this one over Unix sockets, and returns the addresses. The given
    /// ranks are on other networks. Answered by [`Answer::Words`].
    Listen(Vec<Rank>),
    /// Whether a peer is reached at its Unix socket, so that it is on this host. Answered by [`Answer::Number`], 1 or 0.
    Reach {
        /// The peer.
        peer: Rank,
        /// The name of its socket.
        name: String,
    },
    /// Calls a peer at its Unix socket. Answered by [`Answer::Dialled`].
    Dial {
        /// The peer.
        peer: Rank,
        /// The name of its socket.
        name: String,
        /// What the stream is for.
        channel: Channel,
    },
    /// Lets higher ranks in until this time. Answered by [`Answer::Came`] as soon as one has come.
    Accept(Instant),
    /// Waits for this time.
    Pause(Duration),
    /// Makes memory to share. Answered by [`Answer::Memory`].
    MakeMemory,
    /// Exchanges the memory with the peers of this host. Answered by [`Answer::Memory`].
    MapMemory,
}

/// The answer to an [`Ask`].
#[derive(Debug)]
pub enum Answer<S> {
    /// The question is carried out.
    Done,
    /// Values.
    Words(Vec<Vec<u8>>),
    /// A number.
    Number(i64),
    /// These keys were missing when the time was over.
    Missing(Vec<String>),
    /// Of some signs, those that are reached, and those that are closed or not there. Others are on their way, or out of
    /// reach.
    Signs {
        /// The processes live.
        reached: BTreeSet<String>,
        /// The processes have ended, unless they could never be reached from here.
        closed: BTreeSet<String>,
    },
    /// How a call of a peer ended.
    Dialled(Dialled<S>),
    /// Peers that have come, with the channel for which each stream is meant.
    Came(Vec<(Rank, Channel, S)>),
    /// Whether there is memory to share, or why not.
    Memory(Result<(), String>),
}

/// How a call of a peer ended.
#[derive(Debug)]
pub enum Dialled<S> {
    /// The peer has accepted this rank.
    Open(S),
    /// The peer is not the expected rank, or does not accept this rank as the one that it claims to be.
    Refused(String),
    /// The peer hung up before it answered.
    HungUp(String),
    /// Nobody listens there any more.
    Closed(String),
    /// The call failed in another way.
    Failed(String),
}

/// An answer, or the error of the side that should answer.
pub type Answered<W> = Result<Answer<<W as Outside>::Stream>, <W as Outside>::Error>;

/// Hands questions of the code out, and answers in.
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

    /// The time that is left until `deadline`.
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

/// Code that is under way. Each answer brings it to its next question, or to its end.
pub struct Steps<'c, W: Outside, T> {
    code: Pin<Box<dyn Future<Output = T> + 'c>>,
    desk: Desk<W>,
}

/// Where code has stopped.
#[derive(Debug)]
pub enum Step<T> {
    /// It asks this question.
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

    /// Runs the code up to its first question.
    pub fn begin(&mut self) -> Step<T> {
        self.go_on()
    }

    /// Answers the last question at the time `now`.
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
