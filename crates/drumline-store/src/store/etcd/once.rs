//! Changes that happen once, however often they are sent.
//!
//! A request whose answer is lost is sent again, maybe to another server, and the first one may still arrive later.
//! So every change is a transaction of a writer. A writer has a key of its own, its mark, and one change under way
//! at a time. The transaction does nothing unless the mark has the version that the writer knows, and raises it.
//! So one arrival counts. The mark also tells those who ask again whether the change was made.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use serde_json::Value;

use super::{
    api::{Found, Span, Txn, inner, look, put, txn},
    servers::Servers,
};
use crate::{Result, auth::Nonce};

/// What marks say of the last transaction.
const MADE: &[u8] = b"made";
const REFUSED: &[u8] = b"refused";

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
    /// How often the mark was written.
    version: i64,
}

/// A change, if `compare` holds.
#[derive(Debug, Default)]
pub(super) struct Change {
    pub(super) compare: Vec<Value>,
    pub(super) then: Vec<Value>,
    /// What to look at if it does not.
    pub(super) otherwise: Vec<Value>,
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
        // One that has failed is never used again: its last transaction may still be under way.
        let mut writer = self.take();
        loop {
            let mark = Span::key(writer.mark.as_str());
            let signed =
                |said: &[u8], more: &[Value]| [&[put(writer.mark.as_bytes(), said)], more].concat();
            let own = inner(&txn(
                &change.compare,
                &signed(MADE, &change.then),
                &signed(REFUSED, &change.otherwise),
            ));
            let request = txn(&[mark.has_version(writer.version)], &[own], &[look(&mark.range())]);
            let answer = servers.call::<Txn>(operation, "/v3/kv/txn", &request, deadline)?.body;
            writer.version += 1;
            if answer.succeeded {
                let own = answer.inner().unwrap_or_default();
                let refused = (!own.succeeded).then(|| own.found().collect());
                self.give_back(writer);
                return Ok(refused);
            }
            // An earlier arrival of this request has counted.
            let present = answer.found().next().and_then(|found| found.kvs.into_iter().next());
            match present {
                Some(it) if it.version == writer.version && it.value == MADE => {
                    self.give_back(writer);
                    return Ok(None);
                }
                // It was refused, and the answer was lost.
                Some(it) if it.version == writer.version => {}
                // Somebody has cleared the job, and the mark with it.
                _ => writer = self.another(),
            }
        }
    }

    fn take(&self) -> Writer {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.unwrap_or_else(|| self.another())
    }

    fn another(&self) -> Writer {
        Writer { mark: format!("{}writer/{}", self.root, self.unique()), version: 0 }
    }

    fn give_back(&self, writer: Writer) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(writer);
    }

    /// A name that no other caller gets.
    pub(super) fn unique(&self) -> String {
        format!("{}-{}", self.name, self.named.fetch_add(1, Ordering::Relaxed))
    }
}
