//! Changes that happen once, however often they are sent.
//!
//! A request whose answer is lost is sent again, maybe to another server, and the first one may still arrive later.
//! So every change is a transaction of a writer. A writer has a key of its own, its mark, and one change under way
//! at a time. The transaction does nothing unless the mark was written last at the revision that the writer knows,
//! and writes it anew. So one arrival counts: etcd never gives a revision twice, not even after the mark was
//! removed. The mark also tells those who ask again whether the change was made.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use serde_json::Value;

use super::{
    api::{Found, Item, Span, Txn, inner, look, put, txn},
    servers::Servers,
};
use crate::{Result, auth::Nonce};

/// What a mark says: that its writer has made a change, that its last change was refused, or that there was none.
const MADE: &[u8] = b"made";
const REFUSED: &[u8] = b"refused";
const NEW: &[u8] = b"new";

/// The writers of a handle. They are as many as changes were ever under way at once.
#[derive(Debug)]
pub(super) struct Writers {
    /// What the job's keys begin with.
    root: String,
    /// A random name, which no other process has.
    name: String,
    /// How many names were made of it.
    named: AtomicU64,
    idle: Mutex<Vec<Writer>>,
}

#[derive(Debug)]
struct Writer {
    mark: String,
    /// The revision at which the mark was written last.
    revision: i64,
}

/// A change, if `compare` holds.
#[derive(Debug, Default)]
pub(super) struct Change {
    pub(super) compare: Vec<Value>,
    pub(super) then: Vec<Value>,
    /// What to look at if it does not.
    pub(super) otherwise: Vec<Value>,
}

/// What came of a transaction of a writer.
enum Outcome {
    Made,
    Refused(Vec<Found>),
    /// It was refused, and the answer was lost.
    RefusedUnheard,
    /// Somebody has removed the mark, with all keys of the job.
    Cleared,
}

impl Writers {
    /// The writers of a handle of the job whose keys begin with `root`.
    pub(super) fn new(root: &str) -> Result<Writers> {
        let Nonce(random) = Nonce::random()?;
        let name = random[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let (root, named) = (root.to_owned(), AtomicU64::new(0));
        Ok(Writers { root, name, named, idle: Mutex::default() })
    }

    /// Makes `change` once. `None`: it is made. Else: what was found where it would have looked.
    pub(super) fn make(
        &self,
        servers: &Servers,
        operation: &str,
        change: &Change,
        deadline: Instant,
    ) -> Result<Option<Vec<Found>>> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut writer = match idle {
            Some(writer) => writer,
            None => self.begin(servers, operation, deadline)?,
        };
        loop {
            // A writer that fails is never used again: its transaction may still be under way.
            let made = match writer.attempt(servers, operation, change, deadline)? {
                Outcome::Made => None,
                Outcome::Refused(found) => Some(found),
                Outcome::RefusedUnheard => continue,
                Outcome::Cleared => {
                    writer = self.begin(servers, operation, deadline)?;
                    continue;
                }
            };
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(writer);
            return Ok(made);
        }
    }

    /// Another writer. Its mark is made if it is absent: a request that arrives late changes nothing.
    fn begin(&self, servers: &Servers, operation: &str, deadline: Instant) -> Result<Writer> {
        let mark = format!("{}writer/{}", self.root, self.unique());
        let span = Span::key(mark.as_str());
        let request =
            txn(&[span.was_changed_at(0)], &[put(mark.as_bytes(), NEW)], &[look(&span.range())]);
        let answer = servers.call::<Txn>(operation, "/v3/kv/txn", &request, deadline)?;
        let made_at = answer.header.revision;
        let earlier = answer.body.found().next().and_then(Found::first);
        let revision = earlier.map_or(made_at, |item| item.mod_revision);
        Ok(Writer { mark, revision })
    }

    /// A name that no other caller gets.
    pub(super) fn unique(&self) -> String {
        format!("{}-{}", self.name, self.named.fetch_add(1, Ordering::Relaxed))
    }
}

impl Writer {
    fn attempt(
        &mut self,
        servers: &Servers,
        operation: &str,
        change: &Change,
        deadline: Instant,
    ) -> Result<Outcome> {
        let mark = Span::key(self.mark.as_str());
        let signed =
            |said: &[u8], more: &[Value]| [&[put(self.mark.as_bytes(), said)], more].concat();
        let own =
            txn(&change.compare, &signed(MADE, &change.then), &signed(REFUSED, &change.otherwise));
        let request =
            txn(&[mark.was_changed_at(self.revision)], &[inner(&own)], &[look(&mark.range())]);
        let answer = servers.call::<Txn>(operation, "/v3/kv/txn", &request, deadline)?;
        if answer.body.succeeded {
            self.revision = answer.header.revision;
            let own = answer.body.inner().unwrap_or_default();
            return Ok(match own.succeeded {
                true => Outcome::Made,
                false => Outcome::Refused(own.found().collect()),
            });
        }
        // An earlier arrival of this request has counted, and written the mark.
        let Some(Item { value, mod_revision, .. }) =
            answer.body.found().next().and_then(Found::first)
        else {
            return Ok(Outcome::Cleared);
        };
        self.revision = mod_revision;
        Ok(if value == MADE { Outcome::Made } else { Outcome::RefusedUnheard })
    }
}
