//! Objects as bytes.

use std::any::type_name;

use drumline_schedule::step::Rank;
use serde::{Serialize, de::DeserializeOwned};
use xxhash_rust::xxh3::xxh3_64;

use super::Call;
use crate::Result;

/// Tells types apart, by the name that the compiler gives them: another version of it may give
/// other names, so all ranks should run one binary.
///
/// What is borrowed counts as what is received in its place: `str` as `String`, `[T]` as `Vec<T>`,
/// `&T` as `T`.
pub(super) fn type_digest<T: ?Sized>() -> u64 {
    let name = type_name::<T>().trim_start_matches('&');
    let slice = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    match (name, slice) {
        ("str", _) => xxh3_64(type_name::<String>().as_bytes()),
        // An array has its length behind the last semicolon.
        (_, Some(element)) if !is_array(element) => {
            xxh3_64(type_name::<Vec<()>>().replace("()", element).as_bytes())
        }
        _ => xxh3_64(name.as_bytes()),
    }
}

fn is_array(inside: &str) -> bool {
    inside.rsplit_once("; ").is_some_and(|(_, len)| len.bytes().all(|byte| byte.is_ascii_digit()))
}

pub(super) fn encode<T: Serialize + ?Sized>(object: &T) -> Result<Vec<u8>, String> {
    postcard::to_allocvec(object)
        .map_err(|error| format!("cannot describe its {}: {error}", type_name::<T>()))
}

pub(super) fn decode<T: DeserializeOwned>(call: Call, from: Rank, bytes: &[u8]) -> Result<T> {
    let wanted = type_name::<T>();
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

#[cfg(test)]
mod tests {
    use super::type_digest;

    #[test]
    fn types_differ_but_for_the_way_they_are_held() {
        assert_ne!(type_digest::<i32>(), type_digest::<u32>());
        assert_ne!(type_digest::<[u8; 3]>(), type_digest::<Vec<u8>>());
        assert_ne!(type_digest::<Vec<i8>>(), type_digest::<[u8]>());
        assert_eq!(type_digest::<str>(), type_digest::<String>());
        assert_eq!(type_digest::<&&str>(), type_digest::<String>());
        assert_eq!(type_digest::<[(u8, String)]>(), type_digest::<Vec<(u8, String)>>());
        assert_eq!(type_digest::<[[u8; 3]]>(), type_digest::<Vec<[u8; 3]>>());
    }
}
