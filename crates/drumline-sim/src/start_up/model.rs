//! A sequential model of the store: the oracle of its server.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use drumline_store::store::tcp::{
    protocol::{
        ASK_EXTENSIONS, Decoded, EXTENSIONS, Key, MAGIC, NOT_READY, READY, Request, STOP_WAITING,
        Value, WAIT_CANCELED, decode,
    },
    server::{ConnectionId, Load, OUTPUT_BYTES_MAX, Server},
};

/// A map, queues and waits. The model gets the bytes that the server gets, in the same order, and
/// keeps the bytes that the server owes to each connection.
#[derive(Debug, Default)]
pub(super) struct Model {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    queues: BTreeMap<Vec<u8>, VecDeque<Vec<u8>>>,
    /// The waits in the order in which they began. Each lacks something.
    waits: Vec<PendingWait>,
    connections: BTreeMap<ConnectionId, ModelConnection>,
    /// The server must refuse these connections now.
    expelled: BTreeSet<ConnectionId>,
}

/// A request that is answered once it lacks nothing any more.
#[derive(Debug)]
struct PendingWait {
    id: ConnectionId,
    lacks: BTreeSet<Awaited>,
    wanted: Wanted,
}

/// What must happen to a key.
type Awaited = (Happening, Vec<u8>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// The key gets a value or an item.
    Appears,
    GetsValue,
    GetsItem,
    /// All ranks have come to the barrier under the key.
    Completes,
}

/// What the answer to a wait contains.
#[derive(Debug)]
enum Wanted {
    Nothing,
    Values(Vec<Vec<u8>>),
    Item(Vec<u8>),
}

#[derive(Debug, Default)]
struct ModelConnection {
    validated: bool,
    /// The bytes that it sends are no request. The server may notice this later.
    garbled: bool,
    heard: Vec<u8>,
    owed: VecDeque<u8>,
}

impl Model {
    pub(super) fn connect(&mut self, id: ConnectionId) {
        self.connections.insert(id, ModelConnection::default());
    }

    pub(super) fn disconnect(&mut self, id: ConnectionId) {
        self.connections.remove(&id);
        self.waits.retain(|wait| wait.id != id);
    }

    /// Requests whose replies contain everything that is stored.
    pub(super) fn inventory(&self) -> Vec<Request<'_>> {
        let values = self.values.keys().map(|key| Key(key)).collect();
        let pops = self.queues.iter().flat_map(|(key, items)| {
            std::iter::repeat_n(Request::QueuePop(Key(key)), items.len() + 1)
        });
        [Request::ListKeys(), Request::MultiGet(values)].into_iter().chain(pops).collect()
    }

    /// The bytes that the server still owes to a connection.
    pub(super) fn owed(&self, id: ConnectionId) -> usize {
        self.connections.get(&id).map_or(0, |connection| connection.owed.len())
    }

    /// Tells the model that the server has written `bytes`.
    pub(super) fn written(&mut self, id: ConnectionId, bytes: &[u8]) -> Result<(), String> {
        let Some(connection) = self.connections.get_mut(&id) else {
            return Err("the store writes to a connection that is gone".to_owned());
        };
        let owed: Vec<u8> =
            connection.owed.drain(..bytes.len().min(connection.owed.len())).collect();
        match owed == bytes {
            true => Ok(()),
            false => Err(format!(
                "the store writes {}, not {}",
                bytes.escape_ascii(),
                owed.escape_ascii()
            )),
        }
    }

    /// Tells the model that the server has refused a connection.
    pub(super) fn refused(&mut self, id: ConnectionId) -> Result<(), String> {
        if self.expelled.remove(&id) {
            return Ok(());
        }
        match self.connections.get(&id) {
            Some(connection) if connection.garbled => {
                self.disconnect(id);
                Ok(())
            }
            _ => Err("the store refuses a connection that broke no rule".to_owned()),
        }
    }

    /// Checks that the server holds what the model holds, and no more.
    pub(super) fn check(&self, server: &Server) -> Result<(), String> {
        if !self.expelled.is_empty() {
            return Err("the store puts up with a connection that broke a rule".to_owned());
        }
        let expected = Load {
            connections: self.connections.len(),
            waits: self.waits.iter().map(|wait| wait.lacks.len()).sum(),
            input_bytes: self.connections.values().map(|connection| connection.heard.len()).sum(),
            output_bytes: self.connections.values().map(|connection| connection.owed.len()).sum(),
        };
        match server.load() == expected {
            true => Ok(()),
            false => Err(format!("the store holds {:?}, not {expected:?}", server.load())),
        }
    }

    /// Tells the model that `bytes` have arrived. Hands each complete request to `heard`.
    pub(super) fn receive(
        &mut self,
        id: ConnectionId,
        bytes: &[u8],
        heard: &mut dyn FnMut(&Request<'_>),
    ) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.heard.extend_from_slice(bytes);
        let input = std::mem::take(&mut connection.heard);
        let mut used = 0;
        while let Some(connection) = self.connections.get_mut(&id) {
            let rest = &input[used..];
            if !connection.validated && rest.first().is_some_and(|opcode| *opcode != 0) {
                return self.expel(id);
            }
            match decode(rest) {
                Ok(Decoded::Request(request, length)) => {
                    used += length;
                    heard(&request);
                    if self.serve(id, &request).is_none() {
                        return self.expel(id);
                    }
                }
                unfinished => {
                    connection.garbled = unfinished.is_err();
                    connection.heard = rest.to_vec();
                    return;
                }
            }
        }
    }

    /// Carries out a request. `None` if the request breaks a rule.
    fn serve(&mut self, id: ConnectionId, request: &Request<'_>) -> Option<()> {
        match request {
            Request::Validate(magic) => {
                self.connections.get_mut(&id)?.validated = true;
                return (*magic == MAGIC).then_some(());
            }
            Request::Set(key, value) => self.set(key, value.0.to_vec()),
            Request::MultiSet(pairs) => {
                pairs.iter().for_each(|(key, value)| self.set(key, value.0.to_vec()));
            }
            Request::Append(key, value) => {
                let whole = [self.values.get(key.0).map_or(&[][..], |it| it), value.0].concat();
                self.set(key, whole);
            }
            Request::CompareSet(key, expected, desired) => {
                let present = self.values.get(key.0).cloned();
                let swap = present.as_deref().unwrap_or_default() == expected.0;
                let present = present.filter(|_| !swap);
                let after = if swap { Some(desired.0.to_vec()) } else { present };
                self.tell(id, &value(after.as_deref().unwrap_or(expected.0)));
                if let Some(after) = after {
                    self.set(key, after);
                }
            }
            Request::Get(key) => self.tell_value(id, key),
            Request::MultiGet(keys) => keys.iter().for_each(|key| self.tell_value(id, key)),
            Request::Add(key, amount) => {
                let sum = self.add(key, *amount)?;
                self.tell(id, &sum.to_le_bytes());
            }
            Request::Check(keys) => {
                let ready = keys.iter().all(|key| self.is_present(key));
                self.tell(id, &[if ready { READY } else { NOT_READY }]);
            }
            Request::GetNumKeys() => self.tell(id, &(self.values.len() as i64).to_le_bytes()),
            Request::DeleteKey(key) => {
                let count = i64::from(self.values.remove(key.0).is_some());
                self.tell(id, &count.to_le_bytes());
            }
            Request::ListKeys() => {
                let keys: Vec<u8> = self.values.keys().flat_map(|key| value(key)).collect();
                let count = (self.values.len() as i64).to_le_bytes();
                self.tell(id, &[&count[..], &keys].concat());
            }
            Request::Ping(ASK_EXTENSIONS) => self.tell(id, &EXTENSIONS.to_le_bytes()),
            Request::Ping(nonce) => self.tell(id, &nonce.to_le_bytes()),
            Request::QueuePush(key, Value(item)) => {
                self.queues.entry(key.0.to_vec()).or_default().push_back(item.to_vec());
                // One wait ends: a wait that takes the item comes before one for the key.
                if self.wake(Happening::GetsItem, key.0, 1) == 0 {
                    self.wake(Happening::Appears, key.0, 1);
                }
            }
            Request::QueuePop(key) => {
                let queue = self.queues.entry(key.0.to_vec()).or_default();
                let length = (queue.len() as i64).to_le_bytes();
                let item = queue.pop_front().map(|item| value(&item));
                self.tell(id, &[&length[..], &item.unwrap_or_default()].concat());
            }
            Request::QueueLen(key) => {
                let length = self.queues.get(key.0).map_or(0, VecDeque::len) as i64;
                self.tell(id, &length.to_le_bytes());
            }
            Request::Wait(keys) => {
                let absent = keys.iter().filter(|key| !self.is_present(key));
                let lacks = absent.map(|key| (Happening::Appears, key.0.to_vec())).collect();
                return self.wait(PendingWait { id, lacks, wanted: Wanted::Nothing });
            }
            Request::Fetch(keys) => {
                let keys: Vec<_> = keys.iter().map(|key| key.0.to_vec()).collect();
                let lacks = self.without_value(&keys);
                return self.wait(PendingWait { id, lacks, wanted: Wanted::Values(keys) });
            }
            Request::Take(Key(key)) => {
                let item = Some((Happening::GetsItem, key.to_vec()));
                let lacks = item.filter(|_| !self.has_item(key)).into_iter().collect();
                return self.wait(PendingWait { id, lacks, wanted: Wanted::Item(key.to_vec()) });
            }
            Request::Barrier(key, world_size) => {
                if self.add(key, 1)? < *world_size {
                    let lacks = BTreeSet::from([(Happening::Completes, key.0.to_vec())]);
                    return self.wait(PendingWait { id, lacks, wanted: Wanted::Nothing });
                }
                self.wake(Happening::Completes, key.0, usize::MAX);
                self.tell(id, &[STOP_WAITING]);
            }
            Request::CancelWait() => {
                self.waits.retain(|wait| wait.id != id);
                self.tell(id, &[WAIT_CANCELED]);
            }
        }
        Some(())
    }

    fn is_present(&self, key: &Key<'_>) -> bool {
        self.has_item(key.0) || self.values.contains_key(key.0)
    }

    fn has_item(&self, key: &[u8]) -> bool {
        self.queues.get(key).is_some_and(|queue| !queue.is_empty())
    }

    fn without_value(&self, keys: &[Vec<u8>]) -> BTreeSet<Awaited> {
        let absent = keys.iter().filter(|key| !self.values.contains_key(*key));
        absent.map(|key| (Happening::GetsValue, key.clone())).collect()
    }

    fn set(&mut self, key: &Key<'_>, value: Vec<u8>) {
        self.values.insert(key.0.to_vec(), value);
        self.wake(Happening::Appears, key.0, usize::MAX);
        self.wake(Happening::GetsValue, key.0, usize::MAX);
    }

    fn add(&mut self, key: &Key<'_>, amount: i64) -> Option<i64> {
        let present = match self.values.get(key.0) {
            Some(text) => std::str::from_utf8(text).ok()?.parse::<i64>().ok()?,
            None => 0,
        };
        let sum = present.checked_add(amount)?;
        self.set(key, sum.to_string().into_bytes());
        Some(sum)
    }

    fn wait(&mut self, wait: PendingWait) -> Option<()> {
        if self.waits.iter().any(|other| other.id == wait.id) {
            return None;
        }
        match wait.lacks.is_empty() {
            true => self.end_wait(wait),
            false => self.waits.push(wait),
        }
        Some(())
    }

    /// Tells the first `count` waits for it that `happening` has happened to `key`, and ends the waits that
    /// lack nothing any more. Returns how many waits were told.
    fn wake(&mut self, happening: Happening, key: &[u8], count: usize) -> usize {
        let awaited = (happening, key.to_vec());
        let mut told = 0;
        for wait in &mut self.waits {
            told += usize::from(told < count && wait.lacks.remove(&awaited));
        }
        let over;
        (over, self.waits) = std::mem::take(&mut self.waits)
            .into_iter()
            .partition::<Vec<_>, _>(|wait| wait.lacks.is_empty());
        over.into_iter().for_each(|wait| self.end_wait(wait));
        told
    }

    /// Ends a wait that lacks nothing. A wait for several values goes on if one of the values has
    /// been deleted meanwhile.
    fn end_wait(&mut self, wait: PendingWait) {
        let mut reply = vec![STOP_WAITING];
        match &wait.wanted {
            Wanted::Nothing => {}
            Wanted::Values(keys) => {
                let lacks = self.without_value(keys);
                if !lacks.is_empty() {
                    return self.waits.push(PendingWait { lacks, ..wait });
                }
                reply.extend(
                    keys.iter().filter_map(|key| self.values.get(key)).flat_map(|it| value(it)),
                );
            }
            Wanted::Item(key) => {
                let item = self.queues.get_mut(key).and_then(VecDeque::pop_front);
                reply.extend(item.iter().flat_map(|it| value(it)));
            }
        }
        self.tell(wait.id, &reply);
    }

    fn tell_value(&mut self, id: ConnectionId, key: &Key<'_>) {
        let reply = value(self.values.get(key.0).map_or(&[], |it| it));
        self.tell(id, &reply);
    }

    fn tell(&mut self, id: ConnectionId, reply: &[u8]) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match connection.owed.len() + reply.len() > OUTPUT_BYTES_MAX {
            true => self.expel(id),
            false => connection.owed.extend(reply),
        }
    }

    fn expel(&mut self, id: ConnectionId) {
        self.disconnect(id);
        self.expelled.insert(id);
    }
}

/// A value or a key on the wire.
fn value(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}
