//! A process that uses the store: a rank that starts up, another program or a stranger.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use drumline_store::store::tcp::protocol::{ASK_EXTENSIONS, EXTENSIONS, Key, MAGIC, Request};

use super::{
    action::{Action, Bytes, ReplyFormat},
    connection::ClientConnection,
    rank::{Ended, Kept, Outcome, RankPlan, RunningRank},
    script::{Program, Script},
    shared_state::SharedState,
    waiting::{ANSWER_PATIENCE, WaitProgress, Waiting},
};
use crate::time::{MS, Nanos};

/// Time between two questions for the number of ranks that have joined.
const JOIN_POLL: Nanos = 10 * MS;

/// The first byte of a request to set a key.
const SET: u8 = 1;

const NONCE: u32 = 0x0bad_cafe;

#[derive(Debug)]
pub(super) struct Client<'p> {
    pub(super) process: usize,
    pub(super) script: &'p Script,
    upcoming: Upcoming<'p>,
    /// The action that is next, or under way.
    action: Option<&'p Action>,
    /// Whether it has begun.
    has_begun: bool,
    connection: Option<ClientConnection>,
    activity: ClientActivity<'p>,
    /// The actions that have ended, and how.
    pub(super) outcomes: Vec<(&'p Action, ActionOutcome)>,
    /// What the action has brought so far.
    got: Ended,
    switch: Arc<AtomicU64>,
    pub(super) ended: bool,
    /// When it has ended.
    pub(super) ended_at: Nanos,
}

/// The source of the next action.
#[derive(Debug)]
enum Upcoming<'p> {
    Actions(std::slice::Iter<'p, Action>),
    Rank(RunningRank<'p>),
    /// A rank that has not begun.
    Later(&'p RankPlan, &'p Kept),
}

#[derive(Debug)]
enum ClientActivity<'p> {
    Next,
    Pausing(Nanos),
    /// On a new connection, the store must answer a number.
    Greeting {
        until: Nanos,
    },
    Asking {
        replies: VecDeque<ReplyFormat>,
        got: Vec<u8>,
        until: Nanos,
    },
    Waiting(Waiting<'p>),
    /// Waits for the number of ranks that have joined, or will ask for it at a time.
    Joining {
        asks_at: Option<Nanos>,
        until: Nanos,
    },
    Lingering {
        until: Nanos,
    },
    Dialling {
        until: Nanos,
    },
    Accepting {
        until: Nanos,
    },
}

/// How an action ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ActionOutcome {
    Done,
    /// These keys were missing when the time was over.
    Missing(Vec<Bytes>),
    /// The time was over before all ranks had joined. This number had: the store counts in `i64`.
    Alone(i64),
    /// The store did not answer in time.
    NoAnswer,
    /// The connection broke.
    Lost {
        transcript: usize,
    },
    /// No store took the connection.
    NoStore,
}

/// The state after one attempt to make progress.
enum ClientProgress {
    Over(ActionOutcome),
    /// There is more to do at once.
    More,
    /// There is nothing to do until this time, unless bytes arrive.
    Sleep(Nanos),
}

impl<'p> Client<'p> {
    pub(super) fn new(process: usize, script: &'p Script) -> Client<'p> {
        Client {
            process,
            script,
            upcoming: Upcoming::new(&script.program),
            action: None,
            has_begun: false,
            connection: None,
            activity: ClientActivity::Next,
            outcomes: Vec::new(),
            got: Ended::Got(Vec::new()),
            switch: Arc::default(),
            ended: false,
            ended_at: 0,
        }
    }

    /// The transcript of the open connection.
    pub(super) fn transcript(&self) -> Option<usize> {
        self.connection.as_ref().map(|connection| connection.transcript)
    }

    /// Ends the process. As the kernel does, this closes what the process leaves open.
    pub(super) fn die(&mut self, shared: &mut SharedState) {
        if let Program::Rank(plan, _) = &self.script.program {
            shared.sockets.end(plan.rank);
        }
        self.switch.store(1, Ordering::Relaxed);
        self.end(shared);
    }

    /// Does what can be done now. Returns when the next step is due even if nothing arrives until
    /// then. Fails if the store sends what it should not.
    pub(super) fn step(&mut self, shared: &mut SharedState) -> Result<Option<Nanos>, String> {
        loop {
            if self.ended {
                return Ok(None);
            }
            let broken = self.pump(shared);
            let progress = match self.go_on(shared)? {
                // A client in a pause notices with its next action.
                ClientProgress::Sleep(_) if broken && !self.is_apart() => {
                    ClientProgress::Over(self.lost())
                }
                progress => progress,
            };
            match progress {
                ClientProgress::Sleep(at) => return Ok(Some(at)),
                ClientProgress::More => {}
                ClientProgress::Over(outcome) => self.conclude(outcome, shared),
            }
        }
    }

    /// Whether its activity needs no store.
    fn is_apart(&self) -> bool {
        use ClientActivity::{Accepting, Dialling, Pausing};
        matches!(self.activity, Pausing(_) | Dialling { .. } | Accepting { .. })
    }

    /// How the start-up of a rank ended.
    pub(super) fn result(&self) -> Option<&Outcome> {
        match &self.upcoming {
            Upcoming::Rank(rank) => rank.result.as_ref(),
            Upcoming::Actions(_) | Upcoming::Later(..) => None,
        }
    }

    /// Whether it has written that it is there.
    pub(super) fn has_shown_itself(&self) -> bool {
        let shows = |action: &Action| match action {
            Action::Ask { requests, .. } => {
                let Bytes(bytes) = requests;
                let is_set = bytes.first() == Some(&SET);
                is_set && bytes.windows(9).any(|part| part == b"/process/")
            }
            _ => false,
        };
        self.outcomes
            .iter()
            .any(|(action, outcome)| *outcome == ActionOutcome::Done && shows(action))
    }

    fn lost(&self) -> ActionOutcome {
        self.transcript()
            .map_or(ActionOutcome::NoStore, |transcript| ActionOutcome::Lost { transcript })
    }

    fn conclude(&mut self, outcome: ActionOutcome, shared: &mut SharedState) {
        shared.note(|| format!("{}: {outcome:?}", self.script.name));
        if outcome != ActionOutcome::Done && !matches!(outcome, ActionOutcome::Missing(_)) {
            self.connection = None; // it may stand in the middle of a reply
        }
        let failed = outcome != ActionOutcome::Done;
        let ended = match (&outcome, std::mem::replace(&mut self.got, Ended::Got(Vec::new()))) {
            (ActionOutcome::Done, got) => got,
            (ActionOutcome::Missing(keys), _) => Ended::Missing(keys.clone()),
            (lost, _) => Ended::Lost(format!("{lost:?}")),
        };
        self.outcomes.extend(self.action.map(|action| (action, outcome)));
        let thinks = shared.rng.u64(0..4_000).saturating_sub(2_000);
        self.activity = ClientActivity::Pausing(shared.now() + thinks);
        self.has_begun = false;
        let network = shared.network.clone();
        self.action = match &mut self.upcoming {
            Upcoming::Actions(_) if failed && !self.script.persists => None,
            Upcoming::Actions(actions) => actions.next(),
            Upcoming::Rank(rank) => rank.next(ended, network.instant(), &|at| network.nanos(at)),
            Upcoming::Later(..) => None,
        };
        if self.action.is_none() {
            self.end(shared);
        }
    }

    fn end(&mut self, shared: &mut SharedState) {
        self.connection = None;
        (self.ended, self.ended_at) = (true, shared.now());
        if let Program::Rank(plan, _) = &self.script.program {
            if let Some(Err(failure)) = self.result() {
                shared.note(|| format!("{}: {failure:?}", self.script.name));
                shared.sockets.end(plan.rank);
            }
            shared.sockets.close(plan.rank, shared.network.now());
        }
    }

    fn pump(&mut self, shared: &mut SharedState) -> bool {
        self.connection.as_mut().is_some_and(|connection| {
            connection.pump(&mut shared.transcripts[connection.transcript])
        })
    }

    fn go_on(&mut self, shared: &mut SharedState) -> Result<ClientProgress, String> {
        let now = shared.now();
        match (&mut self.activity, &mut self.connection) {
            (ClientActivity::Next, _) => Ok(self.begin(shared)),
            (ClientActivity::Pausing(until), _) if now < *until => {
                Ok(ClientProgress::Sleep(*until))
            }
            (ClientActivity::Pausing(_), _) if self.has_begun => {
                Ok(ClientProgress::Over(ActionOutcome::Done))
            }
            (ClientActivity::Pausing(_), _) => {
                self.activity = ClientActivity::Next;
                Ok(ClientProgress::More)
            }
            (ClientActivity::Dialling { until }, _) => {
                let Some(Action::Dial { from, to, .. }) = self.action else {
                    return Err("calls a rank without being told".to_owned());
                };
                match shared.sockets.dialled(*from, *to) {
                    None if now < *until => return Ok(ClientProgress::Sleep(*until)),
                    ended => self.got = Ended::Dialled(ended == Some(true)),
                }
                Ok(ClientProgress::Over(ActionOutcome::Done))
            }
            (ClientActivity::Accepting { until }, _) => {
                let Some(Action::Accept { rank, .. }) = self.action else {
                    return Err("lets ranks in without being told".to_owned());
                };
                let came = shared.sockets.admit(*rank, now);
                if came.is_empty() && now < *until {
                    return Ok(ClientProgress::Sleep(*until));
                }
                self.got = Ended::Came(came);
                Ok(ClientProgress::Over(ActionOutcome::Done))
            }
            (_, None) => Ok(ClientProgress::Over(ActionOutcome::NoStore)),
            (ClientActivity::Greeting { until }, Some(connection)) => {
                match connection.take(ReplyFormat::Bytes(4)) {
                    Some(answer) if answer == greeting(self.script)[1].to_le_bytes() => {
                        self.activity = ClientActivity::Next;
                        Ok(ClientProgress::More)
                    }
                    Some(answer) => Err(format!("the store answers {}", answer.escape_ascii())),
                    None => Ok(until_then(now, *until)),
                }
            }
            (ClientActivity::Asking { replies, got, until }, Some(connection)) => {
                while let Some(shape) = replies.front() {
                    let Some(reply) = connection.take(*shape) else {
                        return Ok(until_then(now, *until));
                    };
                    got.extend(reply);
                    replies.pop_front();
                }
                connection.check_silence()?;
                let got = std::mem::take(got);
                Ok(self.end_with(got))
            }
            (ClientActivity::Waiting(waiting), Some(connection)) => {
                match waiting.go_on(connection, now)? {
                    WaitProgress::More => Ok(ClientProgress::More),
                    WaitProgress::Sleep(at) => Ok(ClientProgress::Sleep(at)),
                    WaitProgress::NoAnswer => Ok(ClientProgress::Over(ActionOutcome::NoAnswer)),
                    WaitProgress::Missing(keys) => {
                        Ok(ClientProgress::Over(ActionOutcome::Missing(keys)))
                    }
                    WaitProgress::Got(got) => Ok(self.end_with(got)),
                    WaitProgress::Ask(request) => {
                        let replies = ReplyFormat::of(&request).into_iter().collect();
                        connection.say(&[request]);
                        let until = now + ANSWER_PATIENCE;
                        self.activity = ClientActivity::Asking { replies, got: Vec::new(), until };
                        Ok(ClientProgress::More)
                    }
                }
            }
            (ClientActivity::Joining { asks_at, until }, Some(connection)) => {
                let Some(Action::Join { key, all, looks, must, .. }) = self.action else {
                    return Err("joins without being told".to_owned());
                };
                match asks_at {
                    Some(at) if now < *at => Ok(ClientProgress::Sleep(*at)),
                    Some(_) => {
                        connection.say(&[Request::Add(Key(&key.0), 0)]);
                        *asks_at = None;
                        Ok(ClientProgress::More)
                    }
                    None => {
                        let Some(sum) = connection.take(ReplyFormat::Bytes(8)) else {
                            return Ok(until_then(now, *until + ANSWER_PATIENCE));
                        };
                        let sum = sum.try_into().map_or(0, i64::from_le_bytes);
                        if !*looks || sum >= *all {
                            return Ok(ClientProgress::Over(ActionOutcome::Done));
                        }
                        if now >= *until && !*must {
                            self.got = Ended::Missing(Vec::new());
                            return Ok(ClientProgress::Over(ActionOutcome::Done));
                        }
                        if now >= *until {
                            return Ok(ClientProgress::Over(ActionOutcome::Alone(sum)));
                        }
                        *asks_at = Some(now + JOIN_POLL);
                        Ok(ClientProgress::More)
                    }
                }
            }
            (ClientActivity::Lingering { until }, Some(_)) if now < *until => {
                Ok(ClientProgress::Sleep(*until))
            }
            (ClientActivity::Lingering { .. }, Some(_)) => {
                self.connection = None;
                Ok(ClientProgress::Over(ActionOutcome::Done))
            }
        }
    }

    /// Begins the next action, on a new connection if there is none.
    fn begin(&mut self, shared: &mut SharedState) -> ClientProgress {
        let now = shared.now();
        if let Upcoming::Later(plan, kept) = self.upcoming {
            let network = shared.network.clone();
            let mut rank = RunningRank::new(plan, kept, network.instant());
            self.action = rank.begin(network.instant(), &|at| network.nanos(at));
            self.upcoming = Upcoming::Rank(rank);
        } else if self.outcomes.is_empty()
            && let Upcoming::Actions(actions) = &mut self.upcoming
            && self.action.is_none()
        {
            self.action = actions.next();
        }
        let Some(action) = self.action else {
            self.end(shared);
            return ClientProgress::Sleep(now);
        };
        if let (Action::Look(signs), Program::Rank(plan, _)) = (action, &self.script.program) {
            let [reached, closed] = shared.sockets.look(signs, |rank| plan.sees(rank));
            self.got = Ended::Signs { reached, closed };
            return ClientProgress::Over(ActionOutcome::Done);
        }
        let apart = match action {
            Action::Pause(time) => Some(ClientActivity::Pausing(now + time)),
            Action::Dial { from, to, channel, patience } => {
                let at = now + shared.rng.u64(1_000..50_000);
                shared.sockets.dial(*from, *to, *channel, at);
                Some(ClientActivity::Dialling { until: now + patience })
            }
            Action::Accept { until, .. } => Some(ClientActivity::Accepting { until: *until }),
            _ => None,
        };
        if let Some(activity) = apart {
            self.has_begun = true;
            self.activity = activity;
            return ClientProgress::More;
        }
        let Some(connection) = self.connection.as_mut() else {
            let Some((transcript, stream)) =
                shared.dial(self.process, &self.switch, self.script.quality)
            else {
                return ClientProgress::Over(ActionOutcome::NoStore);
            };
            let mut connection = ClientConnection::new(transcript, stream);
            self.activity = match action {
                // A stranger does not begin as clients do.
                Action::Shout { .. } => ClientActivity::Next,
                _ => {
                    let [nonce, _] = greeting(self.script);
                    connection.say(&[Request::Validate(MAGIC), Request::Ping(nonce)]);
                    ClientActivity::Greeting { until: now + ANSWER_PATIENCE }
                }
            };
            self.connection = Some(connection);
            return ClientProgress::More;
        };
        self.has_begun = true;
        self.activity = match action {
            Action::Pause(_) | Action::Dial { .. } | Action::Accept { .. } | Action::Look(_) => {
                unreachable!("it has begun")
            }
            Action::Ask { requests, replies, patience, .. } => {
                connection.shout(&requests.0);
                let replies = replies.iter().copied().collect();
                ClientActivity::Asking { replies, got: Vec::new(), until: now + patience }
            }
            Action::Wait { keys, wants, patience, .. } => {
                let knows_extensions = self.script.knows_extensions;
                let until = now + patience;
                ClientActivity::Waiting(Waiting::begin(
                    keys,
                    *wants,
                    knows_extensions,
                    until,
                    connection,
                ))
            }
            Action::Join { key, adds, patience, .. } => {
                connection.say(&[Request::Add(Key(&key.0), *adds)]);
                ClientActivity::Joining { asks_at: None, until: now + patience }
            }
            Action::Shout { bytes, linger } => {
                connection.shout(&bytes.0);
                ClientActivity::Lingering { until: now + linger }
            }
            Action::Die { bytes } => {
                connection.shout(&bytes.0);
                self.pump(shared);
                self.die(shared);
                return ClientProgress::Over(ActionOutcome::Done);
            }
        };
        ClientProgress::More
    }

    /// Ends the action with the bytes that it has got.
    fn end_with(&mut self, got: Vec<u8>) -> ClientProgress {
        self.got = Ended::Got(got);
        ClientProgress::Over(ActionOutcome::Done)
    }
}

impl<'p> Upcoming<'p> {
    fn new(program: &'p Program) -> Upcoming<'p> {
        match program {
            Program::Actions(actions) => Upcoming::Actions(actions.iter()),
            Program::Rank(plan, kept) => Upcoming::Later(plan, kept),
        }
    }
}

/// The number that a client sends first, and the store's answer.
fn greeting(script: &Script) -> [u32; 2] {
    match script.knows_extensions {
        true => [ASK_EXTENSIONS, EXTENSIONS],
        false => [NONCE, NONCE],
    }
}

/// Sleeps until the time `until`. After that the store counts as silent.
fn until_then(now: Nanos, until: Nanos) -> ClientProgress {
    match now < until {
        true => ClientProgress::Sleep(until),
        false => ClientProgress::Over(ActionOutcome::NoAnswer),
    }
}
