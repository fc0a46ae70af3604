//! Answers the questions of [`drumline_engine::start_up`], with a real store and sockets, on the caller's thread.

use std::{
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drumline_engine::start_up::{Answer, Answered, Ask, Desk, Outside, Step, Steps};
use drumline_store::{
    net::sign::{look, own},
    store::{MissingKeys, Store},
};

use crate::{
    Config, Error, ErrorKind, addresses::listen_for_others, transport::stream::PeerStream,
};

/// This process with its store and its sockets.
#[derive(Debug)]
pub(crate) struct Process;

impl Outside for Process {
    type Error = Error;
    type Stream = PeerStream;
}

/// Runs code to its end. `perform` answers its questions.
pub(crate) fn run<T, F: Future<Output = T>>(
    code: impl FnOnce(Desk<Process>) -> F,
    mut perform: impl FnMut(Ask) -> Answered<Process>,
) -> T {
    let mut steps = Steps::new(Instant::now(), code);
    let mut step = steps.begin();
    loop {
        match step {
            Step::Ask(question) => step = steps.answer(perform(question), Instant::now()),
            Step::Over(result) => return result,
        }
    }
}

/// How long the host of the store waits until the other ranks have read in it why start-up fails.
pub(crate) const WHY_COMES: Duration = Duration::from_secs(1);

/// The group from which another one is made.
pub(crate) trait Origin: fmt::Debug + Send + Sync {
    /// Fails if the group has failed. The start-up of the other one began at `began`.
    fn check(&self, began: Instant) -> Result<(), Error>;
}

/// How a rank that starts up sees which processes live.
#[derive(Debug)]
pub(crate) struct Outlook {
    pub(crate) config: Config,
    /// If that group fails, members of this one may never come: they may have failed with it.
    origin: Option<Arc<dyn Origin>>,
    began: Instant,
}

impl Outlook {
    pub(crate) fn new(config: &Config, origin: Option<Arc<dyn Origin>>) -> Outlook {
        Outlook { config: config.clone(), origin, began: Instant::now() }
    }

    fn check(&self) -> Result<(), Error> {
        self.origin.as_ref().map_or(Ok(()), |origin| origin.check(self.began))
    }

    /// Why start-up has failed: that may follow from a failure of the group from which this one is made.
    pub(crate) fn explain(&self, error: Error) -> Error {
        match (error.kind(), error.culprit()) {
            (ErrorKind::Connect, None) | (ErrorKind::Store | ErrorKind::StoreTimeout, _) => {
                self.check().err().unwrap_or(error)
            }
            _ => error,
        }
    }

    /// Answers a question about signs, or to the store, or pauses.
    pub(crate) fn ask(&self, store: &dyn Store, question: Ask) -> Answered<Process> {
        let failed = |error| Error::io("tell this host from others", error);
        match question {
            Ask::Sign { reaches_out } => {
                let listen = || listen_for_others(&self.config);
                let listen: Option<&dyn Fn() -> Option<_>> =
                    if reaches_out { Some(&listen) } else { None };
                Ok(Answer::Words(vec![own(listen).map_err(failed)?.into_bytes()]))
            }
            Ask::Look(signs) => {
                let [reached, closed] = look(&signs).map_err(failed)?;
                Ok(Answer::Signs { reached, closed })
            }
            question => {
                let has_waited = matches!(&question, Ask::Wait(_, limit) if !limit.is_zero());
                let answer = ask_store(store, question)?;
                if let Answer::Missing(_) = answer
                    && has_waited
                {
                    self.check()?;
                }
                Ok(answer)
            }
        }
    }
}

/// Answers a question to the store, or pauses.
pub(crate) fn ask_store(store: &dyn Store, question: Ask) -> Answered<Process> {
    match question {
        Ask::Set(key, value) => store.set(&key, &value)?,
        Ask::SetAll(pairs) => {
            let pairs: Vec<(&str, &[u8])> =
                pairs.iter().map(|(key, value)| (key.as_str(), value.as_slice())).collect();
            store.multi_set(&pairs)?;
        }
        Ask::Get(key) => return Ok(Answer::Words(vec![store.get(&key)?])),
        Ask::GetAll(keys) => return Ok(Answer::Words(store.multi_get(&as_str(&keys))?)),
        Ask::CompareSet { key, expected, desired } => {
            return Ok(Answer::Words(vec![store.compare_set(&key, &expected, &desired)?]));
        }
        Ask::Add(key, amount) => return Ok(Answer::Number(store.add(&key, amount)?)),
        Ask::Delete(key) => drop(store.delete_key(&key)?),
        Ask::Check(key) => return Ok(Answer::Number(store.check(&[&key])?.into())),
        Ask::Wait(keys, limit) => return wait(store, keys, limit),
        Ask::Pause(time) => thread::sleep(time),
        other => unreachable!("only the code of another part of start-up asks for {other:?}"),
    }
    Ok(Answer::Done)
}

fn wait(store: &dyn Store, keys: Vec<String>, limit: Duration) -> Answered<Process> {
    let Err(error) = store.wait(&as_str(&keys), limit) else { return Ok(Answer::Done) };
    match (error.kind(), error.detail::<MissingKeys>()) {
        (ErrorKind::StoreTimeout, Some(missing)) if !missing.keys.is_empty() => {
            Ok(Answer::Missing(missing.keys.clone()))
        }
        // A store may not know which keys are missing.
        (ErrorKind::StoreTimeout, _) => Ok(Answer::Missing(keys)),
        _ => Err(error),
    }
}

fn as_str(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}
