//! Decoders of objects, and of what ranks tell each other through the store.

use std::collections::BTreeMap;

use drumline_group::decoders;
use drumline_trace::Offset;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Verdict;

/// A roll. The first byte is the number of ranks. The roll must encode to the same bytes.
pub(super) fn roll(bytes: &[u8]) -> Verdict {
    let Some((&ranks, roll)) = bytes.split_first() else { return Verdict::Refused };
    let read = decoders::roll(roll, usize::from(ranks));
    match &read {
        Ok(again) => assert_eq!(again, roll),
        Err(error) => drop(error.to_string()),
    }
    read.into()
}

/// A card. Its encoding may differ from the input (`+1` is a number, too), but must decode to the same card.
pub(super) fn card(text: &[u8]) -> Verdict {
    let card = decoders::card(text);
    if let Some(card) = &card {
        assert_eq!(decoders::card(card.as_bytes()).as_ref(), Some(card));
    }
    card.into()
}

/// Addresses. The first byte is the number of data streams of this rank. The encoding must decode to the same
/// addresses.
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

/// A clock. Its encoding must decode to the same clock.
pub(super) fn clock(text: &[u8]) -> Verdict {
    let clock = Offset::parse(text);
    if let Some(clock) = &clock {
        assert_eq!(Offset::parse(clock.to_string().as_bytes()).as_ref(), Some(clock));
    }
    clock.into()
}

/// An object. The first byte chooses the type. The encoding may differ from the input (in the order of a map,
/// in long forms of numbers), but must decode to the same object.
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

/// An object as a program might send it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) name: String,
    pub(crate) steps: u64,
    pub(crate) warm_up: Option<u32>,
    pub(crate) plan: Plan,
}

/// A part of [`Settings`], with a variant of each form.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Plan {
    Constant,
    Steps(i16),
    Cosine { from: u8, to: [bool; 2] },
}

/// A recursive type.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tree {
    pub(crate) name: String,
    pub(crate) children: Vec<Tree>,
}
