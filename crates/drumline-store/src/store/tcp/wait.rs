//! Waits for keys with a deadline, on a client: a state machine without I/O and clock.

use std::fmt;

use super::protocol::{Key, READY, Request, STOP_WAITING, WAIT_CANCELED};

/// One wait. Its driver sends [`Wait::request`], passes on each byte that comes back, and says when the time
/// is over.
///
/// The server knows no deadlines. When the time is over, a client cancels its wait. Then it asks for each key
/// whether the key is missing, unless the wait has ended meanwhile.
///
/// ```
/// # use drumline_store as drumline;
/// use drumline::store::tcp::{
///     protocol::{Key, NOT_READY, READY, Request, STOP_WAITING, WAIT_CANCELED},
///     wait::{Next, UnexpectedReply, Wait},
/// };
///
/// let keys = vec![Key(b"/here"), Key(b"/missing")];
/// let mut wait = Wait::new(keys.clone());
/// assert_eq!(wait.request(), &Request::Wait(keys.clone()));
/// assert!(wait.is_waiting());
/// assert_eq!(wait.give_up(), Request::CancelWait());
/// let checks = keys.iter().map(|key| Request::Check(vec![*key])).collect();
/// assert_eq!(wait.on_reply(WAIT_CANCELED), Ok(Next::Send(checks)));
/// assert_eq!(wait.on_reply(READY), Ok(Next::Listen));
/// assert_eq!(wait.on_reply(NOT_READY), Ok(Next::Over(vec![Key(b"/missing")])));
///
/// let mut wait = Wait::by(Request::Fetch(keys.clone()), keys);
/// assert!(wait.is_answered_by(STOP_WAITING));
/// assert_eq!(wait.on_reply(WAIT_CANCELED), Err(UnexpectedReply));
/// ```
#[derive(Clone, Debug)]
pub struct Wait<'k> {
    request: Request<'k>,
    keys: Vec<Key<'k>>,
    stage: Stage<'k>,
}

#[derive(Clone, Debug)]
enum Stage<'k> {
    Waiting,
    /// `crossed`: the end of the wait and its cancellation crossed on the wire.
    Cancelling {
        crossed: bool,
    },
    Checking {
        answers: usize,
        missing: Vec<Key<'k>>,
    },
}

/// What to do after a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next<'k> {
    /// Wait for the next reply.
    Listen,
    /// Send these requests, then wait for the next reply.
    Send(Vec<Request<'k>>),
    /// The wait is over. These keys are missing.
    Over(Vec<Key<'k>>),
}

/// The error for a reply that does not fit the request.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the reply does not fit the request")]
pub struct UnexpectedReply;

impl fmt::Debug for UnexpectedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<'k> Wait<'k> {
    /// A wait for all of `keys`.
    pub fn new(keys: Vec<Key<'k>>) -> Wait<'k> {
        Wait::by(Request::Wait(keys.clone()), keys)
    }

    /// A wait by another request, whose answer follows STOP_WAITING. The driver reads that answer before it
    /// passes on the next byte. When the time is over, the wait asks which of `keys` are missing.
    pub fn by(request: Request<'k>, keys: Vec<Key<'k>>) -> Wait<'k> {
        Wait { request, keys, stage: Stage::Waiting }
    }

    /// The first request to send.
    pub fn request(&self) -> &Request<'k> {
        &self.request
    }

    /// Whether the next reply may take until the deadline of the wait. Later replies come without waiting.
    pub fn is_waiting(&self) -> bool {
        matches!(self.stage, Stage::Waiting)
    }

    /// Whether an answer follows `reply`, if the request has one.
    pub fn is_answered_by(&self, reply: u8) -> bool {
        let open = matches!(self.stage, Stage::Waiting | Stage::Cancelling { crossed: false });
        open && reply == STOP_WAITING
    }

    /// The time is over. Returns the request to send.
    pub fn give_up(&mut self) -> Request<'static> {
        self.stage = Stage::Cancelling { crossed: false };
        Request::CancelWait()
    }

    /// The server has replied `reply`.
    ///
    /// # Errors
    ///
    /// No server would reply that now.
    pub fn on_reply(&mut self, reply: u8) -> Result<Next<'k>, UnexpectedReply> {
        match (&mut self.stage, reply) {
            (Stage::Waiting, STOP_WAITING) => Ok(Next::Over(Vec::new())),
            (Stage::Cancelling { crossed: crossed @ false }, STOP_WAITING) => {
                *crossed = true;
                Ok(Next::Listen)
            }
            (Stage::Cancelling { crossed }, WAIT_CANCELED) => {
                if *crossed || self.keys.is_empty() {
                    return Ok(Next::Over(Vec::new()));
                }
                self.stage = Stage::Checking { answers: 0, missing: Vec::new() };
                let checks = self.keys.iter().map(|&key| Request::Check(vec![key]));
                Ok(Next::Send(checks.collect()))
            }
            (Stage::Checking { answers, missing }, reply) => {
                if reply != READY {
                    missing.extend(self.keys.get(*answers));
                }
                *answers += 1;
                match *answers < self.keys.len() {
                    true => Ok(Next::Listen),
                    false => Ok(Next::Over(std::mem::take(missing))),
                }
            }
            _ => Err(UnexpectedReply),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::protocol::NOT_READY, *};

    const KEYS: [Key<'static>; 2] = [Key(b"/a"), Key(b"/b")];

    fn fetch() -> Wait<'static> {
        Wait::by(Request::Fetch(KEYS.to_vec()), KEYS.to_vec())
    }

    #[test]
    fn who_gives_up_learns_which_keys_are_missing() {
        for mut wait in [Wait::new(KEYS.to_vec()), fetch()] {
            assert_eq!(wait.give_up(), Request::CancelWait());
            assert!(!wait.is_waiting());
            let checks = KEYS.map(|key| Request::Check(vec![key])).to_vec();
            assert_eq!(wait.on_reply(WAIT_CANCELED), Ok(Next::Send(checks)));
            // READY is the same byte as STOP_WAITING.
            assert!(!wait.is_answered_by(READY));
            assert_eq!(wait.on_reply(READY), Ok(Next::Listen));
            assert_eq!(wait.on_reply(NOT_READY), Ok(Next::Over(vec![KEYS[1]])));
        }
    }

    #[test]
    fn an_answer_may_cross_with_the_cancel() {
        let take = Wait::by(Request::Take(KEYS[0]), Vec::new());
        for mut wait in [Wait::new(KEYS.to_vec()), fetch(), take] {
            assert!(wait.is_answered_by(STOP_WAITING) && !wait.is_answered_by(WAIT_CANCELED));
            assert_eq!(wait.clone().on_reply(STOP_WAITING), Ok(Next::Over(Vec::new())));
            wait.give_up();
            assert!(wait.is_answered_by(STOP_WAITING) && !wait.is_answered_by(WAIT_CANCELED));
            assert_eq!(wait.on_reply(STOP_WAITING), Ok(Next::Listen));
            assert!(!wait.is_answered_by(STOP_WAITING), "nothing is answered twice");
            assert_eq!(wait.on_reply(WAIT_CANCELED), Ok(Next::Over(Vec::new())));
        }
    }

    #[test]
    fn who_gives_up_an_item_asks_for_no_keys() {
        let mut wait = Wait::by(Request::Take(KEYS[0]), Vec::new());
        assert_eq!(wait.request(), &Request::Take(KEYS[0]));
        wait.give_up();
        assert_eq!(wait.on_reply(WAIT_CANCELED), Ok(Next::Over(Vec::new())));
    }

    #[test]
    fn a_reply_that_no_server_gives_is_an_error() {
        let mut wait = Wait::new(KEYS.to_vec());
        assert_eq!(wait.on_reply(WAIT_CANCELED), Err(UnexpectedReply));
        wait.give_up();
        assert_eq!(wait.on_reply(STOP_WAITING), Ok(Next::Listen));
        assert_eq!(wait.on_reply(STOP_WAITING), Err(UnexpectedReply));
    }
}
