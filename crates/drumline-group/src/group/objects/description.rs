//! Objects as bytes.

use std::any::type_name;

use drumline_schedule::step::Rank;
use serde::{Serialize, de::DeserializeOwned};
use xxhash_rust::xxh3::xxh3_64;

use super::{call::Call, limited};
use crate::Result;

/// A digest of a type's name, to compare the types of ranks. Another version of the compiler may give other
/// names, so all ranks should run one binary.
///
/// A borrowed type has the digest of the type that is received for it: `&T` that of `T`, `str` that of
/// `String`, `[T]` that of `Vec<T>`.
pub(super) fn type_digest<T: ?Sized>() -> u64 {
    xxh3_64(as_borrowed(type_name::<T>()).as_bytes())
}

/// Gives `(u32, Vec<String>)` and `(u32, &[&str])` the same name: `(u32, [str])`.
fn as_borrowed(name: &str) -> String {
    const VEC: &str = "alloc::vec::Vec<";
    let mut name = name.replace("&mut ", "").replace('&', "");
    name = name.replace("alloc::string::String", "str");
    while let Some(start) = name.find(VEC) {
        let inside = start + VEC.len();
        let mut depth = 1;
        let is_end = |c| {
            match c {
                '<' => depth += 1,
                '>' => depth -= 1,
                _ => {}
            }
            depth == 0
        };
        let Some(end) = name[inside..].find(is_end) else { break };
        name.replace_range(inside + end..=inside + end, "]");
        name.replace_range(start..inside, "[");
    }
    name
}

/// The first byte of a description: its format.
const COMPACT: u8 = 0;
const SELF_DESCRIBING: u8 = 1;

/// Describes an object that will be read as a `D`. Uses postcard's format if a `D` that is read from it is
/// described in the same way. Otherwise, for example when fields are skipped or the type depends on what is
/// read, uses CBOR, which describes the structure, too.
pub(crate) fn encode<T, D>(object: &T) -> Result<Vec<u8>, String>
where
    T: Serialize + ?Sized,
    D: Serialize + DeserializeOwned,
{
    match postcard::to_extend(object, vec![COMPACT]) {
        Ok(bytes) if is_exact::<D>(&bytes[1..]) => Ok(bytes),
        _ => encode_for_anyone(object),
    }
}

/// Describes an object with its structure, for a reader that does not know its type.
pub(crate) fn encode_for_anyone<T: Serialize + ?Sized>(object: &T) -> Result<Vec<u8>, String> {
    let mut bytes = vec![SELF_DESCRIBING];
    ciborium::into_writer(object, &mut bytes)
        .map_err(|error| format!("cannot describe its {}: {error}", type_name::<T>()))?;
    Ok(bytes)
}

/// Whether reading `bytes` as a `D` loses nothing. The order of entries in maps does not matter.
fn is_exact<D: Serialize + DeserializeOwned>(bytes: &[u8]) -> bool {
    let census = |bytes: &[u8]| {
        bytes.iter().fold([0_usize; 256], |mut counts, byte| {
            counts[usize::from(*byte)] += 1;
            counts
        })
    };
    match limited::from_bytes::<D>(bytes) {
        Ok((object, [])) => {
            postcard::to_allocvec(&object).is_ok_and(|again| census(&again) == census(bytes))
        }
        _ => false,
    }
}

pub(crate) fn decode<T: DeserializeOwned>(call: Call, from: Rank, description: &[u8]) -> Result<T> {
    let wanted = type_name::<T>();
    let read = match description.split_first() {
        Some((&COMPACT, bytes)) => limited::from_bytes(bytes).map_err(|error| error.to_string()),
        Some((&SELF_DESCRIBING, mut bytes)) => ciborium::from_reader(&mut bytes)
            .map(|object| (object, bytes))
            .map_err(|error| error.to_string()),
        _ => Err("they have no known format".to_owned()),
    };
    let problem = match read {
        Ok((object, [])) => return Ok(object),
        Ok((_, rest)) => format!("{} bytes are left over", rest.len()),
        Err(problem) => problem,
    };
    Err(call.error(
        from,
        format!(
            "sent {} bytes that are no {wanted}: {problem}; do all ranks use one type?",
            description.len()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_differ_but_for_the_way_they_are_held() {
        assert_ne!(type_digest::<i32>(), type_digest::<u32>());
        assert_ne!(type_digest::<[u8; 3]>(), type_digest::<Vec<u8>>());
        assert_ne!(type_digest::<Vec<i8>>(), type_digest::<[u8]>());
        assert_eq!(type_digest::<str>(), type_digest::<String>());
        assert_eq!(type_digest::<&&str>(), type_digest::<String>());
        assert_eq!(type_digest::<[(u8, String)]>(), type_digest::<Vec<(u8, String)>>());
        assert_eq!(type_digest::<[[u8; 3]]>(), type_digest::<Vec<[u8; 3]>>());
        assert_eq!(
            as_borrowed(type_name::<(u32, Vec<Option<Vec<String>>>, bool)>()),
            "(u32, [core::option::Option<[str]>], bool)",
        );
        assert_eq!(
            type_digest::<(&[Option<&[&str]>], &mut u8)>(),
            type_digest::<(Vec<Option<Vec<String>>>, u8)>(),
        );
    }
}
