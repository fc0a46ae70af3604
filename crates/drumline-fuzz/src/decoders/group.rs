//! What ranks tell each other through the store, and objects.

use std::collections::BTreeMap;

use drumline_group::decoders;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Verdict;

/// The first byte says of how many ranks. Comes back byte by byte.
pub(super) fn roll(bytes: &[u8]) -> Verdict {
    let Some((&ranks, roll)) = bytes.split_first() else { return Verdict::Refused };
    let read = decoders::roll(roll, usize::from(ranks));
    match &read {
        Ok(again) => assert_eq!(again, roll),
        Err(error) => drop(error.to_string()),
    }
    read.into()
}

/// Not canonical (`+1` is a number, too): what was read is written and read again.
pub(super) fn card(text: &[u8]) -> Verdict {
    let card = decoders::card(text);
    if let Some(card) = &card {
        assert_eq!(decoders::card(card.as_bytes()).as_ref(), Some(card));
    }
    card.into()
}

/// The first byte says how many connections this rank makes of its data. As with cards.
pub(super) fn addresses(bytes: &[u8]) -> Verdict {
    let Some((&streams, text)) = bytes.split_first() else { return Verdict::Refused };
    let again = |text: &[u8]| decoders::addresses(text, usize::from(streams));
    match again(text) {
        Ok(told) => assert_eq!(again(told.as_bytes()).ok(), Some(told)),
        Err(error) => {
            let told = error.to_string();
            assert!(told.len() < 2000, "an error of {} bytes", told.len());
            return Verdict::Refused;
        }
    }
    Verdict::Taken
}

/// As with cards.
pub(super) fn clock(text: &[u8]) -> Verdict {
    let clock = decoders::clock(text);
    if let Some(clock) = &clock {
        assert_eq!(decoders::clock(clock.as_bytes()).as_ref(), Some(clock));
    }
    clock.into()
}

/// The first byte says what type is asked for. Not canonical (the order in a map, long forms of
/// numbers): what was read is written and read again.
pub(super) fn object(bytes: &[u8]) -> Verdict {
    let Some((&form, object)) = bytes.split_first() else { return Verdict::Refused };
    match form {
        0 => same::<(u32, String)>(object),
        1 => same::<Vec<Option<Vec<u8>>>>(object),
        2 => same::<BTreeMap<String, Vec<i64>>>(object),
        3 => same::<Settings>(object),
        4 => same::<Tree>(object),
        5 => same::<Vec<()>>(object),
        _ => Verdict::Refused,
    }
}

fn same<T: Serialize + DeserializeOwned + PartialEq>(bytes: &[u8]) -> Verdict {
    let read = decoders::object::<T>(bytes);
    match read {
        Err(error) => {
            let _ = error.to_string();
            Verdict::Refused
        }
        Ok((object, again)) => {
            let again = again.and_then(|again| decoders::object::<T>(&again).ok());
            assert!(again.is_some_and(|(again, _)| again == object), "it comes back as another");
            Verdict::Taken
        }
    }
}

/// What a program might send.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) name: String,
    pub(crate) steps: u64,
    pub(crate) warm_up: Option<u32>,
    pub(crate) plan: Plan,
}

/// One of its parts.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Plan {
    /// Without anything.
    Constant,
    /// With a number.
    Steps(i16),
    /// With names.
    Cosine { from: u8, to: [bool; 2] },
}

/// A type that holds itself.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tree {
    pub(crate) name: String,
    pub(crate) children: Vec<Tree>,
}
