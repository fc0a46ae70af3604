//! How a client waits for keys and gets what it wants: at once with the store's extensions, else
//! with another question.

use std::slice;

use drumline_store::store::tcp::{
    protocol::{Key, Request, STOP_WAITING},
    wait::{Next, Wait},
};

use super::{
    client::ANSWER_PATIENCE,
    phone::Phone,
    script::{Bytes, Shape, Want},
};
use crate::network::Nanos;

#[derive(Debug)]
pub(super) struct Waiting<'p> {
    wait: Wait<'p>,
    /// What came with its end, once that has come.
    answer: Option<Vec<u8>>,
    keys: &'p [Bytes],
    wants: Want,
    until: Nanos,
}

/// What one attempt to go on has led to.
pub(super) enum Step<'p> {
    /// There is more to do at once.
    More,
    /// Nothing can be done before this time, unless something arrives.
    Sleep(Nanos),
    /// The store says nothing at all.
    NoAnswer,
    Missing(Vec<Bytes>),
    /// The keys are there. This is what it wants.
    Got(Vec<u8>),
    /// The keys are there. It must ask for what it wants.
    Ask(Request<'p>),
}

impl<'p> Waiting<'p> {
    /// Begins to wait as a client does that knows the store's extensions, or does not.
    pub(super) fn begin(
        keys: &'p [Bytes],
        wants: Want,
        knows_extensions: bool,
        until: Nanos,
        phone: &mut Phone,
    ) -> Waiting<'p> {
        let list = as_keys(keys);
        let wait = match (wants, &list[..]) {
            (Want::Values, _) if knows_extensions => Wait::by(Request::Fetch(list.clone()), list),
            (Want::Item, &[key]) if knows_extensions => Wait::by(Request::Take(key), Vec::new()),
            _ => Wait::new(list),
        };
        phone.say(slice::from_ref(wait.request()));
        Waiting { wait, answer: None, keys, wants, until }
    }

    /// # Errors
    ///
    /// When it hears what it should not.
    pub(super) fn go_on(&mut self, phone: &mut Phone, now: Nanos) -> Result<Step<'p>, String> {
        let answered = Shape::of(self.wait.request());
        let answered = answered.filter(|_| self.wait.is_answered_by(STOP_WAITING));
        let Some(reply) = phone.take(answered.unwrap_or(Shape::Bytes(1))) else {
            return Ok(self.listen(phone, now));
        };
        if self.wait.is_answered_by(reply[0]) {
            self.answer = Some(reply[1..].to_vec());
        }
        match self.wait.on_reply(reply[0]).map_err(|error| error.to_string())? {
            Next::Listen => Ok(Step::More),
            Next::Send(requests) => {
                phone.say(&requests);
                Ok(Step::More)
            }
            Next::Over(missing) => {
                phone.check_silence()?;
                Ok(self.end(&missing))
            }
        }
    }

    fn listen(&mut self, phone: &mut Phone, now: Nanos) -> Step<'p> {
        // Neither the rest of an answer nor the end of a cancelled wait takes waiting.
        let must_hear = !self.wait.is_waiting() || phone.check_silence().is_err();
        let until = if must_hear { self.until + ANSWER_PATIENCE } else { self.until };
        match (now < until, must_hear) {
            (true, _) => Step::Sleep(until),
            (false, true) => Step::NoAnswer,
            (false, false) => {
                phone.say(&[self.wait.give_up()]);
                Step::More
            }
        }
    }

    fn end(&mut self, missing: &[Key<'_>]) -> Step<'p> {
        let asks = matches!(self.wait.request(), Request::Wait(_));
        let request = match (self.answer.take(), self.wants, self.keys) {
            (Some(answer), ..) if !asks => return Step::Got(answer),
            // Of an item nobody is told that it is missing.
            (None, ..) if !asks && missing.is_empty() => return Step::Missing(self.keys.to_vec()),
            (None, ..) if !missing.is_empty() => {
                return Step::Missing(missing.iter().map(|key| Bytes(key.0.to_vec())).collect());
            }
            // They are there, or came while it gave up.
            (_, Want::Values, [key]) => Request::Get(Key(&key.0)),
            (_, Want::Values, keys) => Request::MultiGet(as_keys(keys)),
            (_, Want::Item, [key, ..]) => Request::QueuePop(Key(&key.0)),
            (_, Want::Nothing, _) | (_, Want::Item, []) => return Step::Got(Vec::new()),
        };
        Step::Ask(request)
    }
}

fn as_keys(keys: &[Bytes]) -> Vec<Key<'_>> {
    keys.iter().map(|key| Key(&key.0)).collect()
}
