//! Objects of any type that serde knows, instead of elements.
//!
//! Objects travel in [postcard](https://docs.rs/postcard)'s format, which writes numbers and texts one after
//! the other, without types. An `i32` that is read as a `u32` would be another number. So all ranks must use
//! one type, and a digest of its name travels along. Objects that cannot be read from that format
//! (`serde_json::Value`, an `untagged` enum, skipped fields) travel in CBOR, which describes the structure,
//! too. Reading either format never executes anything.

mod agreement;
pub(crate) mod call;
pub(crate) mod description;
mod limited;
mod messages;

use drumline_engine::transport::{Content, Direction, PointCall};
use drumline_schedule::step::Rank;
use serde::{Serialize, de::DeserializeOwned};

use self::{
    agreement::check_length,
    call::Call,
    description::{decode, encode, encode_for_anyone, type_digest},
    messages::Bytes,
};
use super::ProcessGroup;
use crate::{Result, Work};

/// Calls and messages with objects. A [`ProcessGroup`] has them where this trait is in scope.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Objects, ProcessGroup};
///
/// let group = ProcessGroup::alone();
/// assert_eq!(group.all_gather_object(&"a word".to_owned())?, ["a word"]);
/// # Ok::<_, drumline::Error>(())
/// ```
pub trait Objects: sealed::Sealed {
    /// Copies the object of rank `root` to every rank, in place.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when there is no rank `root`.
    /// [`Object`](crate::ErrorKind::Object) on every rank when ranks call different functions, use types
    /// of different names ([`type_name`](std::any::type_name)), or the object is longer than
    /// [`Config::object_bytes_max`](crate::Config::object_bytes_max); and on each rank that cannot read the
    /// object. Otherwise as for [`ProcessGroup::broadcast`].
    fn broadcast_object<T>(&self, object: &mut T, root: Rank) -> Result<()>
    where
        T: Serialize + DeserializeOwned;

    /// [`Objects::broadcast_object`] of several objects at once. All ranks pass the same number.
    ///
    /// # Errors
    ///
    /// As for [`Objects::broadcast_object`]; [`Object`](crate::ErrorKind::Object) when the numbers differ.
    fn broadcast_object_list<T>(&self, objects: &mut [T], root: Rank) -> Result<()>
    where
        T: Serialize + DeserializeOwned;

    /// Collects the objects of all ranks on every rank, in order of rank.
    ///
    /// # Errors
    ///
    /// As for [`Objects::broadcast_object`].
    fn all_gather_object<T>(&self, object: &T) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned;

    /// Collects the objects of all ranks at rank `root`, in order of rank. The other ranks get `None`.
    ///
    /// # Errors
    ///
    /// As for [`Objects::broadcast_object`].
    fn gather_object<T>(&self, object: &T, root: Rank) -> Result<Option<Vec<T>>>
    where
        T: Serialize + DeserializeOwned;

    /// Gives each rank one of the objects of rank `root`: rank `r` gets object `r`. The other ranks pass `None`.
    ///
    /// # Errors
    ///
    /// As for [`Objects::broadcast_object`]; [`Object`](crate::ErrorKind::Object) on every rank when
    /// the root does not pass one object for each rank.
    fn scatter_object_list<T>(&self, objects: Option<&[T]>, root: Rank) -> Result<T>
    where
        T: Serialize + DeserializeOwned;

    /// Sends an object to rank `to`, which must receive it with [`Objects::recv_object`] as the same
    /// type. A `str` inside it is received as a `String`, and a slice as a `Vec`. An `Option` that holds
    /// `None` or `()` is received as `None`, because it travels in CBOR, which cannot tell these apart. The
    /// call blocks and keeps the order as [`ProcessGroup::send`] does.
    ///
    /// # Errors
    ///
    /// [`Object`](crate::ErrorKind::Object) when the object cannot be described or is too long; otherwise
    /// as for [`ProcessGroup::send`].
    fn send_object<T>(&self, object: &T, to: Rank, tag: u64) -> Result<()>
    where
        T: Serialize + ?Sized;

    /// Receives an object that rank `from` sends with the same `tag`.
    ///
    /// # Errors
    ///
    /// [`Object`](crate::ErrorKind::Object) when the object that arrives is no `T`; the group can go on.
    /// As for [`ProcessGroup::recv`] when the message holds no object, or is longer than
    /// [`Config::object_bytes_max`](crate::Config::object_bytes_max); then nothing is allocated.
    fn recv_object<T: DeserializeOwned>(&self, from: Rank, tag: u64) -> Result<T>;

    /// Receives an object from the rank that first sends one with this `tag`, and returns that rank, too: see
    /// [`ProcessGroup::recv_any_async`] and [`Objects::send_object`].
    ///
    /// # Errors
    ///
    /// As for [`Objects::recv_object`].
    fn recv_object_any<T: DeserializeOwned>(&self, tag: u64) -> Result<(T, Rank)>;
}

mod sealed {
    /// Only groups have objects: methods may be added.
    pub trait Sealed {}

    impl Sealed for crate::ProcessGroup {}
}

impl Objects for ProcessGroup {
    fn broadcast_object<T>(&self, object: &mut T, root: Rank) -> Result<()>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "broadcast_object", root };
        if let Some(received) = self.broadcast_one::<T, T>(call, || encode::<T, T>(object))? {
            *object = received;
        }
        Ok(())
    }

    fn broadcast_object_list<T>(&self, objects: &mut [T], root: Rank) -> Result<()>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "broadcast_object_list", root };
        let Some(received) =
            self.broadcast_one::<T, Vec<T>>(call, || encode::<[T], Vec<T>>(objects))?
        else {
            return Ok(());
        };
        if received.len() != objects.len() {
            let (theirs, ours) = (received.len(), objects.len());
            return Err(call.error(root, format!("sends {theirs} objects, this rank takes {ours}")));
        }
        objects.iter_mut().zip(received).for_each(|(place, object)| *place = object);
        Ok(())
    }

    fn all_gather_object<T>(&self, object: &T) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "all_gather_object", root: 0 };
        let own = encode::<T, T>(object);
        let lengths = self.agree::<T>(call, &own)?;
        let mut all = vec![0; lengths.iter().sum()];
        self.in_blocks(&lengths).all_gather(&own.unwrap_or_default(), &mut all)?;
        decode_all(call, &all, &lengths)
    }

    fn gather_object<T>(&self, object: &T, root: Rank) -> Result<Option<Vec<T>>>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "gather_object", root };
        self.check_rank(call.operation, root)?;
        let own = encode::<T, T>(object);
        let lengths = self.agree::<T>(call, &own)?;
        let is_root = self.rank() == root;
        let mut all = vec![0; if is_root { lengths.iter().sum() } else { 0 }];
        self.in_blocks(&lengths).gather(&own.unwrap_or_default(), &mut all, root)?;
        is_root.then(|| decode_all(call, &all, &lengths)).transpose()
    }

    fn scatter_object_list<T>(&self, objects: Option<&[T]>, root: Rank) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        let call = Call { operation: "scatter_object_list", root };
        self.check_rank(call.operation, root)?;
        let described = match self.rank() == root {
            true => self.describe_parts(objects.unwrap_or_default()),
            false => Ok(Vec::new()),
        };
        // The limit of every rank is compared with the longest part.
        let longest = described.as_ref().map(|parts| parts.iter().map(Vec::len).max());
        let longest = longest.map(Option::unwrap_or_default).map_err(String::clone);
        self.agree_on_length::<T>(call, &longest)?;
        let parts = described.unwrap_or_default();
        let mut lengths: Vec<u64> = parts.iter().map(|part| part.len() as u64).collect();
        lengths.resize(self.world_size(), 0);
        self.broadcast(&mut lengths, root)?;
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        let mut own = vec![0; lengths[self.rank()]];
        self.in_blocks(&lengths).scatter(&parts.concat(), &mut own, root)?;
        decode(call, root, &own)
    }

    fn send_object<T>(&self, object: &T, to: Rank, tag: u64) -> Result<()>
    where
        T: Serialize + ?Sized,
    {
        self.check_rank("send_object", to)?;
        let call = Call { operation: "send_object", root: self.rank() };
        let bytes =
            encode_for_anyone(object).map_err(|problem| call.error(self.rank(), problem))?;
        check_length(call, self.rank(), bytes.len() as u64, self.object_bytes_max())?;
        let bytes = [&type_digest::<T>().to_le_bytes(), &bytes[..]].concat();
        let content = Content::Object { bytes: bytes.len() };
        let (promise, work) = Work::of(&self.inner, false);
        let call = PointCall { direction: Direction::Send, peer: Some(to), tag, content };
        self.post_message(call, Box::new(Bytes { bytes, promise }));
        work.wait()?;
        Ok(())
    }

    fn recv_object<T: DeserializeOwned>(&self, from: Rank, tag: u64) -> Result<T> {
        self.check_rank("recv_object", from)?;
        self.receive_object(Some(from), tag).map(|(object, _)| object)
    }

    fn recv_object_any<T: DeserializeOwned>(&self, tag: u64) -> Result<(T, Rank)> {
        self.receive_object(None, tag)
    }
}

impl ProcessGroup {
    /// On ranks other than the root: receives the object that the root describes.
    fn broadcast_one<T, D: DeserializeOwned>(
        &self,
        call: Call,
        describe: impl FnOnce() -> Result<Vec<u8>, String>,
    ) -> Result<Option<D>> {
        self.check_rank(call.operation, call.root)?;
        let is_root = self.rank() == call.root;
        let own = if is_root { describe() } else { Ok(Vec::new()) };
        let lengths = self.agree::<T>(call, &own)?;
        let mut bytes = own.unwrap_or_default();
        bytes.resize(lengths[call.root], 0);
        self.broadcast(&mut bytes, call.root)?;
        if is_root { Ok(None) } else { decode(call, call.root, &bytes).map(Some) }
    }

    /// Describes one object for each rank.
    fn describe_parts<T>(&self, objects: &[T]) -> Result<Vec<Vec<u8>>, String>
    where
        T: Serialize + DeserializeOwned,
    {
        if objects.len() != self.world_size() {
            let (given, wanted) = (objects.len(), self.world_size());
            return Err(format!("passes {given} objects for {wanted} ranks"));
        }
        objects.iter().map(encode::<T, T>).collect()
    }
}

/// The objects of all ranks. Their descriptions follow each other in `all`.
fn decode_all<T: DeserializeOwned>(call: Call, all: &[u8], lengths: &[usize]) -> Result<Vec<T>> {
    let mut rest = all;
    let decode_next = |(rank, &length): (Rank, &usize)| {
        let (bytes, behind) = rest.split_at(length);
        rest = behind;
        decode(call, rank, bytes)
    };
    lengths.iter().enumerate().map(decode_next).collect()
}
