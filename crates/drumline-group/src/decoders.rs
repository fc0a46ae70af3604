//! Decoders that are private otherwise: for `drumline-fuzz`, and no part of the API.
//!
//! Each reads what another rank may have written. Where there is an encoder, the result is what that
//! makes of what was read.

use std::fmt::Display;

use drumline_engine::{
    membership::{GlobalRanks, Membership},
    start_up::{card::Card, mesh},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Config, board,
    group::objects::{
        call::Call,
        description::{decode, encode, encode_for_anyone},
    },
    rendezvous::file,
    trace::clock::Offset,
};

/// What a rank says of its host.
pub fn card(text: &[u8]) -> Option<String> {
    Card::parse(text).ok().as_ref().map(Card::to_string)
}

/// Where a rank listens.
pub fn addresses(text: &[u8], streams: usize) -> crate::Result<String> {
    let member = Membership::new("fuzz", (0, 2), GlobalRanks::default());
    let addresses = mesh::parse_addresses(&member, 1, text, streams)
        .map_err(|failure| board::failed(&member, failure))?;
    let texts = addresses.iter().map(|address| address as &dyn Display);
    Ok([&streams as &dyn Display]
        .into_iter()
        .chain(texts)
        .map(|it| it.to_string())
        .collect::<Vec<_>>()
        .join(" "))
}

/// The words of all ranks, as rank 1 of `world_size` reads them.
pub fn roll(bytes: &[u8], world_size: usize) -> crate::Result<Vec<u8>> {
    board::roll_again(bytes, world_size)
}

/// How far the clock of a host is from another one's.
pub fn clock(text: &[u8]) -> Option<String> {
    Offset::parse(text).as_ref().map(Offset::to_string)
}

/// The path, the rank and the world size of `file://`.
///
/// # Errors
///
/// As of a rendezvous there.
pub fn file_url(url: &str) -> crate::Result<(String, usize, usize)> {
    file::parse(url)
}

/// All settings but the secret, from these variables.
///
/// # Errors
///
/// As [`Config::from_env`].
pub fn settings(variable: impl Fn(&str) -> Option<String>) -> crate::Result<Config> {
    Config::from_variables(variable)
}

/// An object of another rank, and the bytes that describe it here.
pub fn object<T: Serialize + DeserializeOwned>(
    bytes: &[u8],
) -> crate::Result<(T, Option<Vec<u8>>)> {
    let call = Call { operation: "broadcast_object", root: 0 };
    let object = decode::<T>(call, 0, bytes)?;
    let again = encode::<T, T>(&object).ok();
    Ok((object, again))
}

/// The bytes of an object whose type is known to be read.
///
/// # Errors
///
/// When it cannot be described.
pub fn describe<T: Serialize + DeserializeOwned>(object: &T) -> Result<Vec<u8>, String> {
    encode::<T, T>(object)
}

/// The bytes of an object that tell what everything is.
///
/// # Errors
///
/// When it cannot be described.
pub fn describe_for_anyone<T: Serialize>(object: &T) -> Result<Vec<u8>, String> {
    encode_for_anyone(object)
}
