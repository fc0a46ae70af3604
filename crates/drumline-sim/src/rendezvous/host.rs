//! The process that hosts the store: the real server, and its oracle beside it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{ErrorKind, Read as _, Write as _},
};

use drumline_store::store::tcp::{
    protocol::{MAGIC, Request},
    server::{ConnectionId, Server},
};

use crate::member::Connection as _;

use super::{model::Model, world::World};
use crate::network::{Nanos, Stream};

/// How many bytes are taken from one connection before the others have their turn.
const READ_BYTES: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Host {
    server: Server,
    model: Model,
    /// With the line that it is the end of.
    streams: BTreeMap<ConnectionId, (usize, Stream)>,
    /// Those who call, and when their call arrives.
    pub(super) callers: Vec<(Nanos, usize, Stream)>,
    pub(super) stopped_until: Nanos,
    /// It works until then and looks at nothing.
    pub(super) busy_until: Nanos,
    /// To whom it owes bytes.
    owes: BTreeSet<ConnectionId>,
    /// How many requests it has carried out, beside those that only ask whether it is there.
    pub(super) requests: u64,
    pub(super) ended: bool,
}

impl Host {
    /// Does what can be done now, as the thread of a real server does. Whether there is more.
    ///
    /// # Errors
    ///
    /// What the server does wrong.
    pub(super) fn step(&mut self, world: &mut World) -> Result<bool, String> {
        let now = world.now();
        let ready = self.streams.iter().filter(|(_, (_, stream))| stream.is_readable());
        let ready: Vec<_> = ready.map(|(id, _)| *id).collect();
        for id in ready {
            self.read(id, world)?;
        }
        let callers = std::mem::take(&mut self.callers);
        let (here, underway) = callers.into_iter().partition(|(at, ..)| *at <= now);
        self.callers = underway;
        for (_, line, stream) in here {
            let id = self.server.connect();
            self.model.connect(id);
            self.streams.insert(id, (line, stream));
        }
        self.write(world)?;
        self.model.check(&self.server)?;
        Ok(self.streams.values().any(|(_, stream)| stream.is_readable()))
    }

    fn read(&mut self, id: ConnectionId, world: &mut World) -> Result<(), String> {
        let Some((line, stream)) = self.streams.get_mut(&id) else { return Ok(()) };
        let line = *line;
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
                    request.encode(&mut world.lines[line].carried_out);
                    world.note(|| format!("store: {} asks {}", world.whose(line), told(request)));
                });
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => self.close(id),
        }
        self.hear_of_refusals(world)
    }

    /// What the server has given up on is closed at once, or a moment later.
    fn hear_of_refusals(&mut self, world: &mut World) -> Result<(), String> {
        for (id, refusal) in self.server.take_refused() {
            let Some((line, _)) = self.streams.remove(&id) else { continue };
            world.note(|| format!("store: refuses {}: {refusal}", world.whose(line)));
            world.lines[line].doomed = true;
            let refused = self.model.refused(id);
            refused.map_err(|bad| format!("{}: {bad}: {refusal}", world.whose(line)))?;
        }
        Ok(())
    }

    fn write(&mut self, world: &mut World) -> Result<(), String> {
        let mut broken = Vec::new();
        self.owes.extend(self.server.take_answered());
        for id in std::mem::take(&mut self.owes) {
            let Some((line, stream)) = self.streams.get_mut(&id) else { continue };
            loop {
                let output = self.server.output(id);
                if output.is_empty() != (self.model.owed(id) == 0) {
                    return Err(format!("{}: the store owes it a reply", world.whose(*line)));
                }
                if output.is_empty() {
                    break;
                }
                match stream.write(output) {
                    Ok(count) => {
                        let right = self.model.written(id, &output[..count]);
                        right.map_err(|bad| format!("{}: {bad}", world.whose(*line)))?;
                        world.lines[*line].replied.extend_from_slice(&output[..count]);
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

    /// The process ends. The kernel closes what it leaves open.
    pub(super) fn end(&mut self) {
        self.ended = true;
        self.streams.clear();
        self.callers.clear();
    }

    /// When everybody has left: whether nothing is kept of them, and every key and queue is right.
    pub(super) fn check_at_end(&mut self, world: &mut World) -> Result<(), String> {
        if let Some((line, _)) = self.streams.values().next() {
            return Err(format!("the store keeps the connection of {}", world.whose(*line)));
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

/// A request for people.
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
