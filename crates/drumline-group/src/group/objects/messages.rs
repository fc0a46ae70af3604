//! Objects that travel from rank to rank.
//!
//! A message is a digest of the type (8 bytes, little-endian), followed by the description.

use std::any::type_name;

use drumline_engine::transport::{Content, Direction, Message, PointCall};
use drumline_schedule::step::Rank;
use serde::de::DeserializeOwned;

use super::{
    call::Call,
    description::{decode, type_digest},
};
use crate::{ProcessGroup, Result, Work, WorkError, work::Promise};

impl ProcessGroup {
    pub(super) fn receive_object<T: DeserializeOwned>(
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
pub(super) struct Bytes {
    pub(super) bytes: Vec<u8>,
    pub(super) promise: Promise<(Vec<u8>, Rank)>,
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
