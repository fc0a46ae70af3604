//! The board of a group, in a real store. [`drumline_engine::start_up`] decides what happens there.

use std::{sync::Arc, time::Instant};

use drumline_engine::{
    membership::{GlobalRanks, Membership},
    start_up::{
        Answered, Ask, Desk, Failure,
        board::{Board as Rules, Subject, encode},
        meet::Attempt,
        watch::{Processes, Watch},
    },
};
use drumline_store::{
    auth::Nonce,
    store::{PrefixStore, Store},
};

use crate::{
    Error, Result,
    error::not_connected,
    start_up::{Outlook, Process, run},
    trace::{GroupTrace, Inquiry},
};

/// What the ranks of one life of a group tell each other. Every rank has one word on each subject.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    store: Arc<dyn Store>,
    outlook: Arc<Outlook>,
    rules: Rules,
}

impl Board {
    /// Meets the other ranks of `member`'s group. Also returns an inquiry about the clock of rank 0's host.
    ///
    /// # Errors
    ///
    /// [`Connect`](crate::ErrorKind::Connect) names the ranks that have not come before `deadline`.
    pub(crate) fn meet(
        member: &Membership,
        store: &Arc<dyn Store>,
        processes: Processes,
        deadline: Instant,
        outlook: Outlook,
        recorder: &GroupTrace,
    ) -> Result<(Board, Inquiry)> {
        let ticket = Nonce::name()?;
        let (watch, warn_after) = (&Watch::new(member, processes), outlook.config.warn_after);
        let attempt = Attempt { member, ticket: &ticket, deadline, warn_after, watch, recorder };
        let outlook = Arc::new(outlook);
        let on = |rules| Board { store: store.clone(), outlook: outlook.clone(), rules };
        // Rank 0 offers its time before it lets the other ranks in. The name of the life is the name of rank
        // 0's ticket.
        let offer = match member.rank {
            0 => {
                let board = on(Rules::new(member, &ticket, deadline, watch, recorder));
                Some(recorder.ask_time(&board.store_of_life())?)
            }
            _ => None,
        };
        let met = run(async |desk| attempt.run(&desk).await, |it| outlook.ask(&**store, it));
        let board = on(met.map_err(|failure| outlook.explain(failed(member, failure)))?);
        let inquiry = match offer {
            Some(inquiry) => inquiry,
            None => recorder.ask_time(&board.store_of_life())?,
        };
        Ok((board, inquiry))
    }

    /// A part of the store that only the ranks of this life know.
    pub(crate) fn store_of_life(&self) -> PrefixStore {
        PrefixStore::new(self.rules.prefix().to_owned(), self.store.clone())
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// What the keys of this life begin with.
    pub(crate) fn prefix(&self) -> &str {
        self.rules.prefix()
    }

    /// A text that only the ranks of this life know, and no process that is left over from an earlier life.
    pub(crate) fn token(&self) -> &[u8] {
        self.rules.prefix().as_bytes()
    }

    /// Runs code on this board. `perform` answers its questions.
    pub(crate) fn run<T>(
        &self,
        code: impl AsyncFnOnce(&Desk<Process>, &Rules) -> Result<T, Failure<Error>>,
        perform: impl FnMut(Ask) -> Answered<Process>,
    ) -> Result<T> {
        let done = run(async |desk| code(&desk, &self.rules).await, perform);
        done.map_err(|failure| self.outlook.explain(failed(self.rules.member(), failure)))
    }

    /// Answers a question to the store.
    pub(crate) fn ask(&self, question: Ask) -> Answered<Process> {
        self.outlook.ask(&*self.store, question)
    }

    /// Writes `word` on `subject`, and returns the words of all ranks on it, by rank. All ranks must call this.
    ///
    /// # Errors
    ///
    /// [`Connect`](crate::ErrorKind::Connect) when a rank has failed (with that rank's error), or when a rank writes
    /// nothing in time.
    pub(crate) fn all_gather(&self, subject: Subject, word: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.run(async |desk, rules| rules.all_gather(desk, subject, word).await, |it| self.ask(it))
    }

    /// This rank could not be connected. Tells all ranks, so that none waits for it.
    pub(crate) fn fail(&self, error: &Error) {
        let member = self.rules.member();
        let position = |rank| member.global.position(rank, member.world_size);
        let culprit = error.culprit().and_then(position);
        let error = error.to_string();
        run(async |desk| self.rules.fail(&desk, &error, culprit).await, |it| self.ask(it));
    }

    /// Says that this rank has read all that it needs. The last rank that says so deletes the board.
    pub(crate) fn leave(&self) {
        run(async |desk| self.rules.leave(&desk).await, |it| self.ask(it));
    }
}

/// Turns a failure of start-up into an error.
pub(crate) fn failed(member: &Membership, failure: Failure<Error>) -> Error {
    match failure {
        Failure::Outside(error) => error,
        failure => {
            let culprit = failure.culprit().map(|rank| member.global.of(rank));
            not_connected(member, &failure.text(member)).blaming(culprit)
        }
    }
}

/// Reads a roll as rank 1 of `world_size` and encodes it again, for `drumline-fuzz`.
pub(crate) fn roll_again(roll: &[u8], world_size: usize) -> Result<Vec<u8>> {
    let member = Membership::new("fuzz", (1, world_size), GlobalRanks::default());
    let recorder = GroupTrace::of(&member.name, member.rank);
    let processes = Processes { keys: Vec::new(), join: false, stay: false };
    let watch = Watch::new(&member, processes);
    let rules = Rules::new(&member, "life", Instant::now(), &watch, &recorder);
    let words = rules.decode(roll).map_err(|failure| failed(&member, failure))?;
    Ok(encode(&words))
}
