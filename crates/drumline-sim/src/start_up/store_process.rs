//! The process of the store: the real server with its model beside it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{ErrorKind, Read as _, Write as _},
};

use drumline_store::store::tcp::{
    protocol::{MAGIC, Request},
    server::{ConnectionId, Server},
};

use crate::member::Connection as _;

use super::{model::Model, shared_state::SharedState};
use crate::{network::SimStream, time::Nanos};

/// The most bytes that are read from one connection before the next one has its turn.
const READ_BYTES: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct StoreProcess {
    server: Server,
    model: Model,
    /// The connections, each with its transcript.
    streams: BTreeMap<ConnectionId, (usize, SimStream)>,
    /// Dials: when each arrives, its transcript and its stream.
    pub(super) callers: Vec<(Nanos, usize, SimStream)>,
    pub(super) stopped_until: Nanos,
    /// Until this time the process computes and notices nothing.
    pub(super) busy_until: Nanos,
    /// The connections to which it owes bytes.
    owes: BTreeSet<ConnectionId>,
    /// Number of requests carried out, not counting those that only ask whether the store is there.
    pub(super) requests: u64,
    pub(super) ended: bool,
}

impl StoreProcess {
    /// Does what can be done now, as the thread of a real server does. Returns whether there is
    /// more to do. Fails if the server does anything wrong.
    pub(super) fn step(&mut self, shared: &mut SharedState) -> Result<bool, String> {
        let now = shared.now();
        let ready = self.streams.iter().filter(|(_, (_, stream))| stream.is_readable());
        let ready: Vec<_> = ready.map(|(id, _)| *id).collect();
        for id in ready {
            self.read(id, shared)?;
        }
        let callers = std::mem::take(&mut self.callers);
        let (here, underway) = callers.into_iter().partition(|(at, ..)| *at <= now);
        self.callers = underway;
        for (_, transcript, stream) in here {
            let id = self.server.connect();
            self.model.connect(id);
            self.streams.insert(id, (transcript, stream));
        }
        self.write(shared)?;
        self.model.check(&self.server)?;
        Ok(self.streams.values().any(|(_, stream)| stream.is_readable()))
    }

    fn read(&mut self, id: ConnectionId, shared: &mut SharedState) -> Result<(), String> {
        let Some((transcript, stream)) = self.streams.get_mut(&id) else { return Ok(()) };
        let transcript = *transcript;
        let mut bytes = [0; READ_BYTES];
        match stream.read(&mut bytes) {
            Ok(0) => self.close(id),
            Ok(count) => {
                let bytes = &bytes[..count];
                self.server.receive(id, bytes);
                let requests = &mut self.requests;
                self.model.receive(id, bytes, &mut |request| {
                    let asks = !matches!(request, Request::Validate(_) | Request::Ping(_));
                    *requests += u64::from(asks);
                    request.encode(&mut shared.transcripts[transcript].carried_out);
                    shared.note(|| {
                        format!("store: {} asks {}", shared.whose(transcript), told(request))
                    });
                });
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => self.close(id),
        }
        self.hear_of_refusals(shared)
    }

    /// Closes the connections that the server has refused.
    fn hear_of_refusals(&mut self, shared: &mut SharedState) -> Result<(), String> {
        for (id, refusal) in self.server.take_refused() {
            let Some((transcript, _)) = self.streams.remove(&id) else { continue };
            shared.note(|| format!("store: refuses {}: {refusal}", shared.whose(transcript)));
            shared.transcripts[transcript].doomed = true;
            let refused = self.model.refused(id);
            refused.map_err(|bad| format!("{}: {bad}: {refusal}", shared.whose(transcript)))?;
        }
        Ok(())
    }

    fn write(&mut self, shared: &mut SharedState) -> Result<(), String> {
        let mut broken = Vec::new();
        self.owes.extend(self.server.take_answered());
        for id in std::mem::take(&mut self.owes) {
            let Some((transcript, stream)) = self.streams.get_mut(&id) else { continue };
            loop {
                let output = self.server.output(id);
                if output.is_empty() != (self.model.owed(id) == 0) {
                    return Err(format!(
                        "{}: the store owes it a reply",
                        shared.whose(*transcript)
                    ));
                }
                if output.is_empty() {
                    break;
                }
                match stream.write(output) {
                    Ok(count) => {
                        let right = self.model.written(id, &output[..count]);
                        right.map_err(|bad| format!("{}: {bad}", shared.whose(*transcript)))?;
                        shared.transcripts[*transcript].replied.extend_from_slice(&output[..count]);
                        self.server.written(id, count);
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        self.owes.insert(id);
                        break;
                    }
                    Err(_) => {
                        broken.push(id);
                        break;
                    }
                }
            }
        }
        broken.into_iter().for_each(|id| self.close(id));
        Ok(())
    }

    fn close(&mut self, id: ConnectionId) {
        self.server.disconnect(id);
        self.model.disconnect(id);
        self.streams.remove(&id);
    }

    /// Ends the process. As the kernel does, this closes what the process leaves open.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.streams.clear();
        self.callers.clear();
    }

    /// Checks, once all clients have left, that the server keeps nothing of them and that every key
    /// and queue is right.
    pub(super) fn check_at_end(&mut self, shared: &mut SharedState) -> Result<(), String> {
        if let Some((transcript, _)) = self.streams.values().next() {
            return Err(format!("the store keeps the connection of {}", shared.whose(*transcript)));
        }
        let mut bytes = Vec::new();
        Request::Validate(MAGIC).encode(&mut bytes);
        self.model.inventory().iter().for_each(|request| request.encode(&mut bytes));
        let id = self.server.connect();
        self.model.connect(id);
        self.server.receive(id, &bytes);
        self.model.receive(id, &bytes, &mut |_| {});
        self.model.check(&self.server)?;
        while !self.server.output(id).is_empty() {
            let count = self.server.output(id).len();
            self.model.written(id, self.server.output(id))?;
            self.server.written(id, count);
        }
        self.close(id);
        self.model.check(&self.server)
    }
}

/// The text of a request in the trace.
fn told(request: &Request<'_>) -> String {
    let name = format!("{request:?}");
    let name = name.split('(').next().unwrap_or_default();
    let keys: Vec<&[u8]> = match request {
        Request::Set(key, _)
        | Request::CompareSet(key, ..)
        | Request::Get(key)
        | Request::Add(key, _)
        | Request::DeleteKey(key)
        | Request::Append(key, _)
        | Request::QueuePush(key, _)
        | Request::QueuePop(key)
        | Request::QueueLen(key)
        | Request::Barrier(key, _)
        | Request::Take(key) => vec![key.0],
        Request::Check(keys)
        | Request::Wait(keys)
        | Request::MultiGet(keys)
        | Request::Fetch(keys) => keys.iter().map(|key| key.0).collect(),
        Request::MultiSet(pairs) => pairs.iter().map(|(key, _)| key.0).collect(),
        Request::Validate(_)
        | Request::GetNumKeys()
        | Request::CancelWait()
        | Request::Ping(_)
        | Request::ListKeys() => vec![],
    };
    let keys = keys.iter().map(|key| format!(" {}", key.escape_ascii()));
    keys.fold(name.to_owned(), |text, key| text + &key)
}
