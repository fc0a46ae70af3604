//! Decoders of stores: requests of clients, replies of servers, files.

use std::{collections::BTreeMap, fs, time::Duration};

use drumline_store::store::{
    FileStore, Store,
    tcp::{
        protocol::{Decoded, decode},
        replies,
    },
};

use super::scratch::Scratch;
use crate::Verdict;

/// A stream of requests, as the server reads them. Each request must encode to the same bytes. Of
/// the beginning of a request, the decoder must say that it needs more bytes, but never more than the request has.
pub(super) fn request(bytes: &[u8]) -> Verdict {
    let (mut rest, mut verdict) = (bytes, Verdict::Refused);
    loop {
        match decode(rest) {
            Err(error) => {
                let _ = error.to_string();
                return Verdict::Refused;
            }
            Ok(Decoded::NeedsBytes(needed)) => {
                assert!(needed > rest.len());
                return verdict;
            }
            Ok(Decoded::Request(request, length)) => {
                let mut again = Vec::with_capacity(length);
                request.encode(&mut again);
                assert_eq!(again, rest[..length]);
                for cut in 0..length.min(64) {
                    match decode(&rest[..cut]) {
                        Ok(Decoded::NeedsBytes(needed)) => {
                            assert!((cut + 1..=length).contains(&needed))
                        }
                        other => unreachable!("{cut} of {length} bytes are {other:?}"),
                    }
                }
                (rest, verdict) = (&rest[length..], Verdict::Taken);
            }
        }
    }
}

/// The reply of a server. The first byte chooses the request, and whether the server knows the extensions.
/// The client has no encoder of replies to compare with.
pub(super) fn reply(bytes: &[u8]) -> Verdict {
    let Some((&form, said)) = bytes.split_first() else { return Verdict::Refused };
    let Ok((store, _server)) = replies::client(said, form & 128 != 0) else {
        return Verdict::Refused;
    };
    store.set_timeout(Duration::ZERO);
    match form & 15 {
        0 => store.get("key").into(),
        1 => store.multi_get(&["one", "two", "three"]).into(),
        2 => store.add("key", 1).into(),
        3 => store.compare_set("key", b"", b"value").into(),
        4 => store.wait(&["one", "two"], Duration::ZERO).into(),
        5 => store.check(&["key"]).into(),
        6 => store.num_keys().into(),
        7 => store.delete_key("key").into(),
        8 => store.list_keys().into(),
        9 => store.queue_pop("queue").into(),
        10 => store.queue_try_pop("queue").into(),
        11 => store.queue_len("queue").into(),
        12 => store.barrier("key", 2, Duration::ZERO).into(),
        _ => store.set("key", b"value").into(),
    }
}

/// A file that anyone may have written. If it is no store's file, opening must leave it as it is. Otherwise
/// opening repairs it, and a second handle must read the same contents as the first.
pub(super) fn file(bytes: &[u8]) -> Verdict {
    let Ok(scratch) = Scratch::new() else { return Verdict::Refused };
    let Ok(path) = scratch.file(bytes) else { return Verdict::Refused };
    let open = || FileStore::with_limit(&path, 0, LIMIT);
    let contents = |store: &FileStore| -> Option<BTreeMap<String, Option<Vec<u8>>>> {
        store.set_timeout(Duration::ZERO);
        let keys = store.list_keys().ok()?;
        // The list shows a key that is no text in an escaped form. That form is another key, which has no
        // value.
        Some(keys.into_iter().map(|key| (key.clone(), store.get(&key).ok())).collect())
    };
    let store = match open() {
        Ok(store) => store,
        Err(error) => {
            // Other files that are refused may have been repaired: their number of handles is checked after
            // the repair.
            if error.to_string().contains("is no store's") {
                let kept = fs::read(&path).ok();
                assert_eq!(kept.as_deref(), Some(bytes), "a file that was refused is changed");
            }
            return Verdict::Refused;
        }
    };
    let first = contents(&store);
    drop(store);
    let second = open();
    assert!(second.is_ok(), "a second handle is refused: {second:?}");
    if let Ok(second) = second {
        assert_eq!(contents(&second), first);
    }
    first.into()
}

const LIMIT: usize = 1 << 20;
