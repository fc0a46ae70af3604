//! Decoders that are otherwise private, for `drumline-fuzz`; not part of the API.
//!
//! Each decodes what another rank may have written. If there is an encoder, the function returns the result
//! encoded again.

use std::fmt::Display;

use drumline_engine::{
    membership::{GlobalRanks, Membership},
    start_up::{card::Card, mesh},
};
#[cfg(feature = "objects")]
use serde::{Serialize, de::DeserializeOwned};

#[cfg(feature = "objects")]
use crate::group::objects::{
    call::Call,
    description::{decode, encode, encode_for_anyone},
};
use crate::{Config, board, rendezvous::file};

/// Decodes the card of a rank and encodes it again.
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

/// The path, the rank and the world size of a `file://` URL.
///
/// # Errors
///
/// The errors of a rendezvous at that URL.
pub fn file_url(url: &str) -> crate::Result<(String, usize, usize)> {
    file::parse(url)
}

/// All settings but the secret, from these variables.
///
/// # Errors
///
/// As for [`Config::from_env`].
pub fn settings(variable: impl Fn(&str) -> Option<String>) -> crate::Result<Config> {
    Config::from_variables(variable)
}

/// An object of another rank, and its description as encoded here.
#[cfg(feature = "objects")]
pub fn object<T: Serialize + DeserializeOwned>(
    bytes: &[u8],
) -> crate::Result<(T, Option<Vec<u8>>)> {
    let call = Call { operation: "broadcast_object", root: 0 };
    let object = decode::<T>(call, 0, bytes)?;
    let again = encode::<T, T>(&object).ok();
    Ok((object, again))
}

/// Encodes an object for a reader that knows its type.
///
/// # Errors
///
/// The object cannot be described.
#[cfg(feature = "objects")]
pub fn describe<T: Serialize + DeserializeOwned>(object: &T) -> Result<Vec<u8>, String> {
    encode::<T, T>(object)
}

/// Encodes an object with its structure, for a reader that does not know its type.
///
/// # Errors
///
/// The object cannot be described.
#[cfg(feature = "objects")]
pub fn describe_for_anyone<T: Serialize>(object: &T) -> Result<Vec<u8>, String> {
    encode_for_anyone(object)
}
