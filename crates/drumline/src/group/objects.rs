//! Objects of any type that serde knows, instead of elements.
//!
//! They travel in [postcard](https://docs.rs/postcard)'s format: numbers and texts, one behind the
//! other. Nothing in it is ever executed. It carries no types: all ranks must use the same type, for
//! an `i32` that is read as a `u32` is another number. A collective first tells every rank what all of them
//! call, and how long their objects are; so a mistake of one rank is an error on all of them, and
//! the group can go on.

use drumline_schedule::step::Rank;
use serde::{Serialize, de::DeserializeOwned};

use super::ProcessGroup;
use crate::{
    Error, Result, Work,
    transport::{Content, Direction, Message, PointCall},
    work::Promise,
};

impl ProcessGroup {
    /// Gives every rank the object of rank `root`, in place.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    ///
    /// use drumline::ProcessGroup;
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(3)? {
    ///         threads.spawn(move || {
    ///             let mut settings = BTreeMap::new();
    ///             if group.rank() == 1 {
    ///                 settings.insert("rate".to_owned(), 0.1);
    ///             }
    ///             group.broadcast_object(&mut settings, 1).unwrap();
    ///             assert_eq!(settings["rate"], 0.1);
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a root that is no rank. [`Error::Object`] on every rank when
    /// ranks call different things or the object is longer than
    /// [`Config::object_bytes_max`](crate::Config::object_bytes_max), and on the ranks that cannot
    /// read it. Otherwise as [`ProcessGroup::broadcast`].
    pub fn broadcast_object<T>(&self, object: &mut T, root: Rank) -> Result<()>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "broadcast_object", root };
        if let Some(received) = self.broadcast_one(call, || encode(object))? {
            *object = received;
        }
        Ok(())
    }

    /// [`ProcessGroup::broadcast_object`] of several objects at once, the same number on all ranks.
    ///
    /// ```
    /// let group = drumline::ProcessGroup::alone();
    /// let mut words = ["one".to_owned(), "two".to_owned()];
    /// group.broadcast_object_list(&mut words, 0)?;
    /// assert_eq!(words, ["one", "two"]);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast_object`]; [`Error::Object`] where the number differs.
    pub fn broadcast_object_list<T>(&self, objects: &mut [T], root: Rank) -> Result<()>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "broadcast_object_list", root };
        let Some(received) = self.broadcast_one::<Vec<T>>(call, || encode(&*objects))? else {
            return Ok(());
        };
        if received.len() != objects.len() {
            let (theirs, ours) = (received.len(), objects.len());
            return Err(call.error(root, format!("sends {theirs} objects, this rank takes {ours}")));
        }
        objects.iter_mut().zip(received).for_each(|(place, object)| *place = object);
        Ok(())
    }

    /// Gives every rank the objects of all ranks, in order of rank.
    ///
    /// ```
    /// use drumline::ProcessGroup;
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(3)? {
    ///         threads.spawn(move || {
    ///             let names = group.all_gather_object(&"x".repeat(group.rank())).unwrap();
    ///             assert_eq!(names, ["", "x", "xx"]);
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast_object`].
    pub fn all_gather_object<T>(&self, object: &T) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "all_gather_object", root: 0 };
        let all = self.gather_bytes(call, encode(object))?;
        all.iter().enumerate().map(|(rank, bytes)| decode(call, rank, bytes)).collect()
    }

    /// Gives rank `root` the objects of all ranks, in order of rank; the others get nothing.
    ///
    /// ```
    /// use drumline::ProcessGroup;
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(2)? {
    ///         threads.spawn(move || {
    ///             let loss = (group.rank() == 1).then_some(0.25);
    ///             let losses = group.gather_object(&loss, 0).unwrap();
    ///             assert_eq!(losses, [Some(vec![None, Some(0.25)]), None][group.rank()]);
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast_object`].
    pub fn gather_object<T>(&self, object: &T, root: Rank) -> Result<Option<Vec<T>>>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "gather_object", root };
        self.check_rank(call.operation, root)?;
        let all = self.gather_bytes(call, encode(object))?;
        if self.rank() != root {
            return Ok(None);
        }
        let objects = all.iter().enumerate().map(|(rank, bytes)| decode(call, rank, bytes));
        objects.collect::<Result<_>>().map(Some)
    }

    /// Gives every rank one of the objects of rank `root`: to rank r the r-th. The others pass
    /// nothing.
    ///
    /// ```
    /// use drumline::ProcessGroup;
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(2)? {
    ///         threads.spawn(move || {
    ///             let parts = ["train".to_owned(), "test".to_owned()];
    ///             let parts = (group.rank() == 0).then_some(&parts[..]);
    ///             let part: String = group.scatter_object_list(parts, 0).unwrap();
    ///             assert_eq!(part, ["train", "test"][group.rank()]);
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::broadcast_object`]; [`Error::Object`] on every rank when the root does
    /// not pass an object for each.
    pub fn scatter_object_list<T>(&self, objects: Option<&[T]>, root: Rank) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "scatter_object_list", root };
        let parts: Option<Vec<Vec<u8>>> = self.broadcast_one(call, || {
            let objects = objects.unwrap_or_default();
            if objects.len() != self.world_size() {
                let (given, wanted) = (objects.len(), self.world_size());
                return Err(format!("passes {given} objects for {wanted} ranks"));
            }
            let parts = objects.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
            encode(&parts)
        })?;
        let own = match (parts, objects) {
            (Some(mut parts), _) if self.rank() < parts.len() => parts.swap_remove(self.rank()),
            // On the root itself.
            (None, Some(objects)) => encode(&objects[root]).map_err(|it| call.error(root, it))?,
            _ => return Err(call.error(root, "has sent no object for this rank".to_owned())),
        };
        decode(call, root, &own)
    }

    /// Sends an object to rank `to`, which must receive it with [`ProcessGroup::recv_object`].
    /// Blocks and keeps the order as [`ProcessGroup::send`] does.
    ///
    /// ```
    /// use drumline::ProcessGroup;
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(2)? {
    ///         threads.spawn(move || match group.rank() {
    ///             0 => group.send_object("to be continued", 1, 7).unwrap(),
    ///             _ => {
    ///                 let (text, from): (String, _) = group.recv_object_any(7).unwrap();
    ///                 assert_eq!((&*text, from), ("to be continued", 0));
    ///             }
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Object`] when it cannot be described or is too long; otherwise as
    /// [`ProcessGroup::send`].
    pub fn send_object<T>(&self, object: &T, to: Rank, tag: u64) -> Result<()>
    where
        T: Serialize + ?Sized,
    {
        let call = Call { operation: "send_object", root: self.rank() };
        let bytes = encode(object).map_err(|problem| call.error(self.rank(), problem))?;
        check_length(call, self.rank(), bytes.len() as u64, self.object_bytes_max())?;
        let content = Content::Object { bytes: bytes.len() };
        let (promise, work) = Work::of(&self.inner);
        let call = PointCall { direction: Direction::Send, peer: Some(to), tag, content };
        self.post_message(call, Box::new(Bytes { bytes, promise }))?;
        work.wait().map(drop)
    }

    /// Receives an object that rank `from` sends with the same `tag`.
    ///
    /// ```
    /// let group = drumline::ProcessGroup::alone();
    /// std::thread::scope(|threads| {
    ///     threads.spawn(|| group.send_object(&(1_u32, "one"), 0, 3));
    ///     let received: (u32, String) = group.recv_object(0, 3)?;
    ///     assert_eq!(received, (1, "one".to_owned()));
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Object`] when what arrives is no `T`. As [`ProcessGroup::recv`] when it is no
    /// object at all, or longer than
    /// [`Config::object_bytes_max`](crate::Config::object_bytes_max): nothing is allocated then.
    pub fn recv_object<T: DeserializeOwned>(&self, from: Rank, tag: u64) -> Result<T> {
        self.receive_object(Some(from), tag).map(|(object, _)| object)
    }

    /// Receives an object from whichever rank sends first with this `tag`, and tells which one
    /// that was: see [`ProcessGroup::recv_any`] and [`ProcessGroup::send_object`].
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::recv_object`].
    pub fn recv_object_any<T: DeserializeOwned>(&self, tag: u64) -> Result<(T, Rank)> {
        self.receive_object(None, tag)
    }

    fn receive_object<T: DeserializeOwned>(
        &self,
        peer: Option<Rank>,
        tag: u64,
    ) -> Result<(T, Rank)> {
        let content = Content::Object { bytes: self.object_bytes_max() };
        let (promise, work) = Work::of(&self.inner);
        let call = PointCall { direction: Direction::Receive, peer, tag, content };
        self.post_message(call, Box::new(Bytes { bytes: Vec::new(), promise }))?;
        let (bytes, from) = work.wait()?;
        let call = Call { operation: "recv_object", root: from };
        Ok((decode(call, from, &bytes)?, from))
    }

    /// What the root describes, on the other ranks.
    fn broadcast_one<T: DeserializeOwned>(
        &self,
        call: Call,
        describe: impl FnOnce() -> Result<Vec<u8>, String>,
    ) -> Result<Option<T>> {
        self.check_rank(call.operation, call.root)?;
        let is_root = self.rank() == call.root;
        let own = if is_root { describe() } else { Ok(Vec::new()) };
        let lengths = self.agree(call, &own)?;
        let mut bytes = own.unwrap_or_default();
        bytes.resize(lengths[call.root], 0);
        self.broadcast(&mut bytes, call.root)?;
        if is_root { Ok(None) } else { decode(call, call.root, &bytes).map(Some) }
    }

    /// The descriptions of all ranks' objects.
    fn gather_bytes(&self, call: Call, own: Result<Vec<u8>, String>) -> Result<Vec<Vec<u8>>> {
        let lengths = self.agree(call, &own)?;
        let longest = lengths.iter().copied().max().unwrap_or_default();
        let mut own = own.unwrap_or_default();
        own.resize(longest, 0);
        let mut all = vec![0; longest * lengths.len()];
        self.all_gather(&own, &mut all)?;
        let cut = |(rank, &len): (Rank, &usize)| all[rank * longest..][..len].to_vec();
        Ok(lengths.iter().enumerate().map(cut).collect())
    }

    /// Lets all ranks know what all of them call. The lengths of their objects, which are all
    /// within everybody's limit.
    fn agree(&self, call: Call, own: &Result<Vec<u8>, String>) -> Result<Vec<usize>> {
        let length = own.as_ref().map_or(FAILED, |bytes| bytes.len() as u64);
        let ours = [call.code(), call.root as u64, length, self.object_bytes_max() as u64];
        let mut all = vec![0; ours.len() * self.world_size()];
        self.all_gather(&ours, &mut all)?;
        if let Err(problem) = own {
            return Err(call.error(self.rank(), problem.clone()));
        }
        let all: Vec<[u64; 4]> = all.as_chunks().0.to_vec();
        for (rank, theirs) in all.iter().enumerate() {
            if theirs[..2] != ours[..2] {
                let theirs = Call::named(theirs[0], theirs[1]);
                let problem = format!("called {theirs} where this rank called {call}");
                return Err(call.error(rank, problem));
            }
        }
        let limit = all.iter().map(|it| it[3]).min().unwrap_or_default() as usize;
        for (rank, theirs) in all.iter().enumerate() {
            check_length(call, rank, theirs[2], limit)?;
        }
        Ok(all.into_iter().map(|it| it[2] as usize).collect())
    }

    fn object_bytes_max(&self) -> usize {
        self.inner.config.object_bytes_max
    }
}

/// Stands for the length of an object that could not be described.
const FAILED: u64 = u64::MAX;

/// The collectives, by the number that tells them apart.
const OPERATIONS: [&str; 5] = [
    "broadcast_object",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    operation: &'static str,
    root: Rank,
}

impl Call {
    fn code(self) -> u64 {
        OPERATIONS.iter().position(|name| *name == self.operation).unwrap_or(OPERATIONS.len())
            as u64
    }

    /// What another rank has called.
    fn named(code: u64, root: u64) -> Call {
        let operation = usize::try_from(code).ok().and_then(|code| OPERATIONS.get(code).copied());
        Call { operation: operation.unwrap_or("something else"), root: root as Rank }
    }

    fn error(self, rank: Rank, problem: String) -> Error {
        Error::Object { operation: self.operation, rank, problem }
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.operation {
            "all_gather_object" => f.write_str(self.operation),
            _ => write!(f, "{}(root {})", self.operation, self.root),
        }
    }
}

fn check_length(call: Call, rank: Rank, length: u64, limit: usize) -> Result<()> {
    if length == FAILED {
        let problem = "could not describe its object; its own error says why";
        return Err(call.error(rank, problem.to_owned()));
    }
    if length <= limit as u64 {
        return Ok(());
    }
    Err(call.error(
        rank,
        format!(
            "passes an object of {length} bytes, and at most {limit} are allowed \
             (DRUMLINE_OBJECT_BYTES_MAX, the least of all ranks); tensors travel better in the \
             collectives for elements"
        ),
    ))
}

fn encode<T: Serialize + ?Sized>(object: &T) -> Result<Vec<u8>, String> {
    postcard::to_allocvec(object)
        .map_err(|error| format!("cannot describe its {}: {error}", std::any::type_name::<T>()))
}

fn decode<T: DeserializeOwned>(call: Call, from: Rank, bytes: &[u8]) -> Result<T> {
    let wanted = std::any::type_name::<T>();
    let problem = match postcard::take_from_bytes(bytes) {
        Ok((object, [])) => return Ok(object),
        Ok((_, rest)) => format!("{} bytes are left over", rest.len()),
        Err(error) => error.to_string(),
    };
    Err(call.error(
        from,
        format!(
            "sent {} bytes that are no {wanted}: {problem}; do all ranks use one type?",
            bytes.len()
        ),
    ))
}

/// The message of an object.
struct Bytes {
    bytes: Vec<u8>,
    promise: Promise<(Vec<u8>, Rank)>,
}

impl Message for Bytes {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn make_room(&mut self, bytes: usize) {
        self.bytes.resize(bytes, 0);
    }

    fn complete(self: Box<Self>, result: Result<Rank>) {
        let Bytes { bytes, promise } = *self;
        promise.complete(result.map(|peer| (bytes, peer)));
    }
}
