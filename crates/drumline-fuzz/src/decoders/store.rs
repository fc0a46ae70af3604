//! Stores: what clients ask, what servers answer, what lies in a file.

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

/// A stream of requests, as the server reads them. Each comes back byte by byte, and however many bytes
/// of it are there, the decoder never asks for more than it has.
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

/// The first byte says what is asked, and whether the server knows the extensions; the rest is what it
/// says. Replies have no encoder on this side.
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

/// A file that others have written. One that is no store's stays as it is; any other is whole after it
/// was opened, and says the same to the next one who opens it.
pub(super) fn file(bytes: &[u8]) -> Verdict {
    let Ok(scratch) = Scratch::new() else { return Verdict::Refused };
    let Ok(path) = scratch.file(bytes) else { return Verdict::Refused };
    let open = || FileStore::with_limit(&path, 0, LIMIT);
    let contents = |store: &FileStore| -> Option<BTreeMap<String, Option<Vec<u8>>>> {
        store.set_timeout(Duration::ZERO);
        let keys = store.list_keys().ok()?;
        // A key that is no text is shown in another way, and has no value under that name.
        Some(keys.into_iter().map(|key| (key.clone(), store.get(&key).ok())).collect())
    };
    let store = match open() {
        Ok(store) => store,
        Err(error) => {
            // One that begins as a store's is repaired before its number of handles is looked at.
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
