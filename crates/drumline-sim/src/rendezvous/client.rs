//! A process that uses the store: a rank that starts up, another program, a stranger.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use drumline_store::store::tcp::protocol::{ASK_EXTENSIONS, EXTENSIONS, Key, MAGIC, Request};

use super::{
    phone::Phone,
    script::{Bytes, Op, Script, Shape},
    waiting::{Step, Waiting},
    world::World,
};
use crate::{
    network::Nanos,
    plan::{MS, SECOND},
};

/// How long the store may take for an answer that needs no waiting.
pub(super) const ANSWER_PATIENCE: Nanos = 5 * SECOND;

/// How often the number of those who joined is looked at.
const JOIN_POLL: Nanos = 10 * MS;

const NONCE: u32 = 0x0bad_cafe;

#[derive(Debug)]
pub(super) struct Client<'p> {
    pub(super) process: usize,
    pub(super) script: &'p Script,
    /// How many of its operations have begun.
    at: usize,
    phone: Option<Phone>,
    doing: Doing<'p>,
    /// Of each operation that is over.
    pub(super) outcomes: Vec<Outcome>,
    switch: Arc<AtomicU64>,
    pub(super) ended: bool,
}

#[derive(Debug)]
enum Doing<'p> {
    Next,
    Pausing(Nanos),
    /// The connection is new: the store must answer a number.
    Greeting {
        until: Nanos,
    },
    Asking {
        replies: VecDeque<Shape>,
        got: Vec<u8>,
        until: Nanos,
    },
    Waiting(Waiting<'p>),
    /// Asks for the number of those who joined, or will do so at a time.
    Joining {
        asks_at: Option<Nanos>,
        until: Nanos,
    },
    Lingering {
        until: Nanos,
    },
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// The time was over; these keys were missing.
    Missing(Vec<Bytes>),
    /// Fewer have joined than should.
    Alone(i64),
    /// The store gave no answer at all.
    NoAnswer,
    /// The connection is gone.
    Lost {
        line: usize,
    },
    /// There is no store to connect to.
    NoStore,
}

/// What one attempt to go on has led to.
enum Progress {
    Over(Outcome),
    /// There is more to do at once.
    More,
    /// Nothing can be done before this time, unless something arrives.
    Sleep(Nanos),
}

impl<'p> Client<'p> {
    pub(super) fn new(process: usize, script: &'p Script) -> Client<'p> {
        Client {
            process,
            script,
            at: 0,
            phone: None,
            doing: Doing::Next,
            outcomes: Vec::new(),
            switch: Arc::default(),
            ended: false,
        }
    }

    /// The line of the connection that is open.
    pub(super) fn line(&self) -> Option<usize> {
        self.phone.as_ref().map(|phone| phone.line)
    }

    /// The process ends. The kernel closes what it leaves open.
    pub(super) fn die(&mut self) {
        self.switch.store(1, Ordering::Relaxed);
        self.phone = None;
        self.ended = true;
    }

    /// Does what can be done now. Returns when there is something to do again even if nothing
    /// arrives.
    ///
    /// # Errors
    ///
    /// When it hears what it should not.
    pub(super) fn step(&mut self, world: &mut World) -> Result<Option<Nanos>, String> {
        loop {
            if self.ended {
                return Ok(None);
            }
            let broken = self.pump(world);
            let progress = match self.go_on(world)? {
                // Who uses it next will notice.
                Progress::Sleep(_) if broken && !matches!(self.doing, Doing::Pausing(_)) => {
                    Progress::Over(self.lost())
                }
                progress => progress,
            };
            match progress {
                Progress::Sleep(at) => return Ok(Some(at)),
                Progress::More => {}
                Progress::Over(outcome) => self.conclude(outcome, world),
            }
        }
    }

    fn lost(&self) -> Outcome {
        self.line().map_or(Outcome::NoStore, |line| Outcome::Lost { line })
    }

    fn conclude(&mut self, outcome: Outcome, world: &mut World) {
        world.note(|| format!("{}: {outcome:?}", self.script.name));
        if outcome != Outcome::Done && !matches!(outcome, Outcome::Missing(_)) {
            self.phone = None; // it may stand in the middle of a reply
        }
        let failed = outcome != Outcome::Done;
        self.outcomes.push(outcome);
        self.at = self.outcomes.len();
        let thinks = world.rng.u64(0..4_000).saturating_sub(2_000);
        self.doing = Doing::Pausing(world.now() + thinks);
        if (failed && !self.script.persists) || self.outcomes.len() == self.script.ops.len() {
            self.phone = None;
            self.ended = true;
        }
    }

    fn pump(&mut self, world: &mut World) -> bool {
        self.phone.as_mut().is_some_and(|phone| phone.pump(&mut world.lines[phone.line]))
    }

    fn go_on(&mut self, world: &mut World) -> Result<Progress, String> {
        let now = world.now();
        match (&mut self.doing, &mut self.phone) {
            (Doing::Next, _) => Ok(self.begin(world)),
            (Doing::Pausing(until), _) if now < *until => Ok(Progress::Sleep(*until)),
            (Doing::Pausing(_), _) => {
                self.doing = Doing::Next;
                Ok(Progress::More)
            }
            (_, None) => Ok(Progress::Over(Outcome::NoStore)),
            (Doing::Greeting { until }, Some(phone)) => match phone.take(Shape::Bytes(4)) {
                Some(answer) if answer == greeting(self.script)[1].to_le_bytes() => {
                    self.doing = Doing::Next;
                    Ok(Progress::More)
                }
                Some(answer) => Err(format!("the store answers {}", answer.escape_ascii())),
                None => Ok(until_then(now, *until)),
            },
            (Doing::Asking { replies, got, until }, Some(phone)) => {
                while let Some(shape) = replies.front() {
                    let Some(reply) = phone.take(*shape) else {
                        return Ok(until_then(now, *until));
                    };
                    got.extend(reply);
                    replies.pop_front();
                }
                phone.check_silence()?;
                let got = std::mem::take(got);
                self.end_with(&got)
            }
            (Doing::Waiting(waiting), Some(phone)) => match waiting.go_on(phone, now)? {
                Step::More => Ok(Progress::More),
                Step::Sleep(at) => Ok(Progress::Sleep(at)),
                Step::NoAnswer => Ok(Progress::Over(Outcome::NoAnswer)),
                Step::Missing(keys) => Ok(Progress::Over(Outcome::Missing(keys))),
                Step::Got(got) => self.end_with(&got),
                Step::Ask(request) => {
                    let replies = Shape::of(&request).into_iter().collect();
                    phone.say(&[request]);
                    let until = now + ANSWER_PATIENCE;
                    self.doing = Doing::Asking { replies, got: Vec::new(), until };
                    Ok(Progress::More)
                }
            },
            (Doing::Joining { asks_at, until }, Some(phone)) => {
                let Op::Join { key, all, looks, .. } = &self.script.ops[self.at - 1] else {
                    return Err("joins without being told".to_owned());
                };
                match asks_at {
                    Some(at) if now < *at => Ok(Progress::Sleep(*at)),
                    Some(_) => {
                        phone.say(&[Request::Add(Key(&key.0), 0)]);
                        *asks_at = None;
                        Ok(Progress::More)
                    }
                    None => {
                        let Some(sum) = phone.take(Shape::Bytes(8)) else {
                            return Ok(until_then(now, *until + ANSWER_PATIENCE));
                        };
                        let sum = sum.try_into().map_or(0, i64::from_le_bytes);
                        if !*looks || sum >= *all {
                            return Ok(Progress::Over(Outcome::Done));
                        }
                        if now >= *until {
                            return Ok(Progress::Over(Outcome::Alone(sum)));
                        }
                        *asks_at = Some(now + JOIN_POLL);
                        Ok(Progress::More)
                    }
                }
            }
            (Doing::Lingering { until }, Some(_)) if now < *until => Ok(Progress::Sleep(*until)),
            (Doing::Lingering { .. }, Some(_)) => {
                self.phone = None;
                Ok(Progress::Over(Outcome::Done))
            }
        }
    }

    /// Begins the next operation, on a new connection if there is none.
    fn begin(&mut self, world: &mut World) -> Progress {
        let now = world.now();
        let Some(op) = self.script.ops.get(self.at) else {
            self.phone = None;
            self.ended = true;
            return Progress::Sleep(now);
        };
        let Some(phone) = self.phone.as_mut().filter(|_| !matches!(op, Op::Pause(_))) else {
            if let Op::Pause(time) = op {
                self.at += 1;
                self.outcomes.push(Outcome::Done);
                self.doing = Doing::Pausing(now + time);
                return Progress::More;
            }
            let Some((line, stream)) = world.dial(self.process, &self.switch, self.script.quality)
            else {
                self.at += 1;
                return Progress::Over(Outcome::NoStore);
            };
            let mut phone = Phone::new(line, stream);
            self.doing = match op {
                // A stranger does not know how to begin.
                Op::Shout { .. } => Doing::Next,
                _ => {
                    let [nonce, _] = greeting(self.script);
                    phone.say(&[Request::Validate(MAGIC), Request::Ping(nonce)]);
                    Doing::Greeting { until: now + ANSWER_PATIENCE }
                }
            };
            self.phone = Some(phone);
            return Progress::More;
        };
        self.at += 1;
        self.doing = match op {
            Op::Pause(time) => Doing::Pausing(now + time),
            Op::Ask { requests, replies, patience, .. } => {
                phone.shout(&requests.0);
                let replies = replies.iter().copied().collect();
                Doing::Asking { replies, got: Vec::new(), until: now + patience }
            }
            Op::Wait { keys, wants, patience, .. } => {
                let knows_extensions = self.script.knows_extensions;
                let until = now + patience;
                Doing::Waiting(Waiting::begin(keys, *wants, knows_extensions, until, phone))
            }
            Op::Join { key, patience, .. } => {
                phone.say(&[Request::Add(Key(&key.0), 1)]);
                Doing::Joining { asks_at: None, until: now + patience }
            }
            Op::Shout { bytes, linger } => {
                phone.shout(&bytes.0);
                Doing::Lingering { until: now + linger }
            }
            Op::Die { bytes } => {
                phone.shout(&bytes.0);
                self.pump(world);
                self.die();
                return Progress::Over(Outcome::Done);
            }
        };
        Progress::More
    }

    /// The operation is over and has led to `got`.
    fn end_with(&self, got: &[u8]) -> Result<Progress, String> {
        let expected = match &self.script.ops[self.at - 1] {
            Op::Ask { expected, .. } | Op::Wait { expected, .. } => expected.as_ref(),
            _ => None,
        };
        match expected.filter(|expected| expected.0 != got) {
            None => Ok(Progress::Over(Outcome::Done)),
            Some(expected) => Err(format!("got {}, not {expected:?}", got.escape_ascii())),
        }
    }
}

/// The number that a client begins with, and the answer.
fn greeting(script: &Script) -> [u32; 2] {
    match script.knows_extensions {
        true => [ASK_EXTENSIONS, EXTENSIONS],
        false => [NONCE, NONCE],
    }
}

/// Sleeps until then; after that there is no hope.
fn until_then(now: Nanos, until: Nanos) -> Progress {
    match now < until {
        true => Progress::Sleep(until),
        false => Progress::Over(Outcome::NoAnswer),
    }
}
