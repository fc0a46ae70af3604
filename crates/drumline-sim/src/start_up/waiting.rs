//! How a client waits for keys and gets their values or an item. With the store's extensions one
//! request does both.

use std::slice;

use drumline_store::store::tcp::{
    protocol::{Key, Request, STOP_WAITING},
    wait::{Next, Wait},
};

use super::{
    action::{Bytes, ReplyFormat, Want},
    connection::ClientConnection,
};
use crate::time::{Nanos, SECOND};

/// How long the store may take for an answer that needs no waiting.
pub(super) const ANSWER_PATIENCE: Nanos = 5 * SECOND;

#[derive(Debug)]
pub(super) struct Waiting<'p> {
    wait: Wait<'p>,
    /// The bytes that came with the end of the wait, once there are any.
    answer: Option<Vec<u8>>,
    keys: &'p [Bytes],
    wants: Want,
    until: Nanos,
}

/// The state after one attempt to make progress.
pub(super) enum WaitProgress<'p> {
    /// There is more to do at once.
    More,
    /// There is nothing to do until this time, unless bytes arrive.
    Sleep(Nanos),
    /// The store did not answer in time.
    NoAnswer,
    Missing(Vec<Bytes>),
    /// The keys are there, and this is what the client wants.
    Got(Vec<u8>),
    /// The keys are there, and the client must ask for what it wants.
    Ask(Request<'p>),
}

impl<'p> Waiting<'p> {
    /// Begins to wait, with the store's extensions or without.
    pub(super) fn begin(
        keys: &'p [Bytes],
        wants: Want,
        knows_extensions: bool,
        until: Nanos,
        connection: &mut ClientConnection,
    ) -> Waiting<'p> {
        let list = as_keys(keys);
        let wait = match (wants, &list[..]) {
            (Want::Values, _) if knows_extensions => Wait::by(Request::Fetch(list.clone()), list),
            (Want::Item, &[key]) if knows_extensions => Wait::by(Request::Take(key), Vec::new()),
            _ => Wait::new(list),
        };
        connection.say(slice::from_ref(wait.request()));
        Waiting { wait, answer: None, keys, wants, until }
    }

    /// Fails if the store sends what it should not.
    pub(super) fn go_on(
        &mut self,
        connection: &mut ClientConnection,
        now: Nanos,
    ) -> Result<WaitProgress<'p>, String> {
        let answered = ReplyFormat::of(self.wait.request());
        let answered = answered.filter(|_| self.wait.is_answered_by(STOP_WAITING));
        let Some(reply) = connection.take(answered.unwrap_or(ReplyFormat::Bytes(1))) else {
            return Ok(self.listen(connection, now));
        };
        if self.wait.is_answered_by(reply[0]) {
            self.answer = Some(reply[1..].to_vec());
        }
        match self.wait.on_reply(reply[0]).map_err(|error| error.to_string())? {
            Next::Listen => Ok(WaitProgress::More),
            Next::Send(requests) => {
                connection.say(&requests);
                Ok(WaitProgress::More)
            }
            Next::Over(missing) => {
                connection.check_silence()?;
                Ok(self.end(&missing))
            }
        }
    }

    fn listen(&mut self, connection: &mut ClientConnection, now: Nanos) -> WaitProgress<'p> {
        // The store owes the rest of an answer, or the end of a cancelled wait, at once.
        let must_hear = !self.wait.is_waiting() || connection.check_silence().is_err();
        let until = if must_hear { self.until + ANSWER_PATIENCE } else { self.until };
        match (now < until, must_hear) {
            (true, _) => WaitProgress::Sleep(until),
            (false, true) => WaitProgress::NoAnswer,
            (false, false) => {
                connection.say(&[self.wait.give_up()]);
                WaitProgress::More
            }
        }
    }

    fn end(&mut self, missing: &[Key<'_>]) -> WaitProgress<'p> {
        let asks = matches!(self.wait.request(), Request::Wait(_));
        let request = match (self.answer.take(), self.wants, self.keys) {
            (Some(answer), ..) if !asks => return WaitProgress::Got(answer),
            // The store does not say that an item is missing.
            (None, ..) if !asks && missing.is_empty() => {
                return WaitProgress::Missing(self.keys.to_vec());
            }
            (None, ..) if !missing.is_empty() => {
                return WaitProgress::Missing(
                    missing.iter().map(|key| Bytes(key.0.to_vec())).collect(),
                );
            }
            // The keys are there, or came while the client gave up.
            (_, Want::Values, [key]) => Request::Get(Key(&key.0)),
            (_, Want::Values, keys) => Request::MultiGet(as_keys(keys)),
            (_, Want::Item, [key, ..]) => Request::QueuePop(Key(&key.0)),
            (_, Want::Nothing, _) | (_, Want::Item, []) => return WaitProgress::Got(Vec::new()),
        };
        WaitProgress::Ask(request)
    }
}

fn as_keys(keys: &[Bytes]) -> Vec<Key<'_>> {
    keys.iter().map(|key| Key(&key.0)).collect()
}
