//! Objects that travel from rank to rank.
//!
//! A message is a digest of the type (8 bytes, little-endian), followed by the description.

use std::any::type_name;

use drumline_engine::transport::{Content, Direction, Message, PointCall};
use drumline_schedule::step::Rank;
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Call,
    agreement::check_length,
    description::{decode, encode_for_anyone, type_digest},
};
use crate::{ProcessGroup, Result, Work, WorkError, work::Promise};

impl ProcessGroup {
    /// Sends an object to rank `to`, which must receive it with [`ProcessGroup::recv_object`] as the same
    /// type. A `str` inside it is received as a `String`, and a slice as a `Vec`. An `Option` that holds
    /// `None` or `()` is received as `None`, because it travels in CBOR, which cannot tell these apart. The
    /// call blocks and keeps the order as [`ProcessGroup::send`] does.
    ///
    /// # Errors
    ///
    /// [`Object`](crate::ErrorKind::Object) when the object cannot be described or is too long; otherwise
    /// as for [`ProcessGroup::send`].
    pub fn send_object<T>(&self, object: &T, to: Rank, tag: u64) -> Result<()>
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

    /// Receives an object that rank `from` sends with the same `tag`.
    ///
    /// # Errors
    ///
    /// [`Object`](crate::ErrorKind::Object) when the object that arrives is no `T`; the group can go on.
    /// As for [`ProcessGroup::recv`] when the message holds no object, or is longer than
    /// [`Config::object_bytes_max`](crate::Config::object_bytes_max); then nothing is allocated.
    pub fn recv_object<T: DeserializeOwned>(&self, from: Rank, tag: u64) -> Result<T> {
        self.check_rank("recv_object", from)?;
        self.receive_object(Some(from), tag).map(|(object, _)| object)
    }

    /// Receives an object from the rank that first sends one with this `tag`, and returns that rank, too: see
    /// [`ProcessGroup::recv_any`] and [`ProcessGroup::send_object`].
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::recv_object`].
    pub fn recv_object_any<T: DeserializeOwned>(&self, tag: u64) -> Result<(T, Rank)> {
        self.receive_object(None, tag)
    }

    fn receive_object<T: DeserializeOwned>(
        &self,
        peer: Option<Rank>,
        tag: u64,
    ) -> Result<(T, Rank)> {
        let content =
            Content::Object { bytes: self.object_bytes_max().saturating_add(DIGEST_BYTES) };
        let (promise, work) = Work::of(&self.inner, false);
        let call = PointCall { direction: Direction::Receive, peer, tag, content };
        self.post_message(call, Box::new(Bytes { bytes: Vec::new(), promise }));
        let (bytes, from) = work.wait()?;
        let call = Call { operation: "recv_object", root: from };
        match bytes.split_first_chunk::<DIGEST_BYTES>() {
            Some((digest, bytes)) if u64::from_le_bytes(*digest) == type_digest::<T>() => {
                Ok((decode(call, from, bytes)?, from))
            }
            _ => {
                let ours = type_name::<T>();
                Err(call.error(from, format!("sent another type than {ours}; both must use one")))
            }
        }
    }
}

const DIGEST_BYTES: usize = size_of::<u64>();

/// A message that holds an object.
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

    fn complete(self: Box<Self>, result: drumline_engine::Result<Rank>) {
        let Bytes { bytes, promise } = *self;
        let result = result.map(|peer| (bytes, peer));
        promise.complete(result.map_err(WorkError::without_buffer));
    }
}
