//! Random calls, and plain maps that answer as a store should.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use drumline_error::ErrorKind;
use drumline_store::{Error, store::Store};
use proptest::prelude::*;

#[derive(Clone, Debug)]
pub(super) enum Operation {
    Set(u8, String),
    Get(u8),
    Add(u8, i8),
    CompareSet(u8, String, String),
    Check(Vec<u8>),
    Wait(Vec<u8>),
    Delete(u8),
    Append(u8, String),
    MultiSet(Vec<(u8, String)>),
    MultiGet(Vec<u8>),
    Push(u8, String),
    Pop(u8),
    Len(u8),
    List,
    /// From now on calls go to a clone.
    Clone,
}

pub(super) fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    let key = 0..4_u8;
    let keys = prop::collection::vec(key.clone(), 0..4);
    let value = prop_oneof![Just(String::new()), "[0-2]", "[a-b]{1,2}"];
    let pairs = prop::collection::vec((key.clone(), value.clone()), 0..4);
    prop_oneof![
        (key.clone(), value.clone()).prop_map(|(k, v)| Set(k, v)),
        key.clone().prop_map(Get),
        (key.clone(), any::<i8>()).prop_map(|(k, n)| Add(k, n)),
        (key.clone(), value.clone(), value.clone()).prop_map(|(k, e, d)| CompareSet(k, e, d)),
        keys.clone().prop_map(Check),
        keys.clone().prop_map(Wait),
        key.clone().prop_map(Delete),
        (key.clone(), value.clone()).prop_map(|(k, v)| Append(k, v)),
        pairs.prop_map(MultiSet),
        keys.prop_map(MultiGet),
        (key.clone(), value).prop_map(|(k, v)| Push(k, v)),
        key.clone().prop_map(Pop),
        key.prop_map(Len),
        Just(List),
        Just(Clone),
    ]
}

/// What a call answers, as text. `None` stands for a refusal, or for waiting in vain.
pub(super) type Answer = Option<String>;

pub(super) fn on_store(store: &dyn Store, operation: &Operation) -> Answer {
    let name = |key: &u8| key.to_string();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let with = |keys: &[u8], call: &dyn Fn(&[&str]) -> Answer| {
        let keys: Vec<_> = keys.iter().map(name).collect();
        call(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    };
    // A store that fails in another way than by refusing must not pass for one that does.
    let in_time = |result: Result<Answer, Error>| match result {
        Ok(answer) => answer,
        Err(error) if error.kind() == ErrorKind::StoreTimeout => None,
        Err(error) => panic!("{error}"),
    };
    let done = |result: Result<(), Error>| result.map(|()| Some(String::new())).unwrap();
    match operation {
        Operation::Set(key, value) => done(store.set(&name(key), value.as_bytes())),
        Operation::Get(key) => in_time(store.get(&name(key)).map(|value| Some(text(value)))),
        Operation::Add(key, amount) => match store.add(&name(key), (*amount).into()) {
            Ok(sum) => Some(sum.to_string()),
            Err(error) => {
                assert!(error.to_string().contains("not a decimal number"), "{error}");
                None
            }
        },
        Operation::CompareSet(key, expected, desired) => {
            let (expected, desired) = (expected.as_bytes(), desired.as_bytes());
            Some(text(store.compare_set(&name(key), expected, desired).unwrap()))
        }
        Operation::Check(keys) => with(keys, &|keys| Some(store.check(keys).unwrap().to_string())),
        Operation::Wait(keys) => with(keys, &|keys| {
            in_time(store.wait(keys, Duration::ZERO).map(|()| Some(String::new())))
        }),
        Operation::Delete(key) => Some(store.delete_key(&name(key)).unwrap().to_string()),
        Operation::Append(key, value) => done(store.append(&name(key), value.as_bytes())),
        Operation::MultiSet(pairs) => {
            let keys: Vec<_> = pairs.iter().map(|(key, _)| name(key)).collect();
            let values = pairs.iter().map(|(_, value)| value.as_bytes());
            done(store.multi_set(&keys.iter().map(String::as_str).zip(values).collect::<Vec<_>>()))
        }
        Operation::MultiGet(keys) => with(keys, &|keys| {
            in_time(
                store
                    .multi_get(keys)
                    .map(|values| Some(values.into_iter().map(text).collect::<Vec<_>>().join(","))),
            )
        }),
        Operation::Push(key, value) => done(store.queue_push(&name(key), value.as_bytes())),
        Operation::Pop(key) => {
            // The two ways to take one are the same where nobody has to wait.
            if store.queue_len(&name(key)).unwrap() % 2 == 1 {
                in_time(store.queue_pop(&name(key)).map(|item| Some(text(item))))
            } else {
                store.queue_try_pop(&name(key)).unwrap().map(text)
            }
        }
        Operation::Len(key) => Some(store.queue_len(&name(key)).unwrap().to_string()),
        Operation::List => {
            let keys = store.list_keys().unwrap();
            assert_eq!(keys.len(), store.num_keys().unwrap());
            Some(keys.join(","))
        }
        Operation::Clone => None,
    }
}

#[derive(Default)]
pub(super) struct Model {
    values: BTreeMap<u8, String>,
    queues: BTreeMap<u8, VecDeque<String>>,
}

impl Model {
    fn has(&self, key: &u8) -> bool {
        self.values.contains_key(key) || self.queues.get(key).is_some_and(|queue| !queue.is_empty())
    }

    pub(super) fn answer(&mut self, operation: &Operation) -> Answer {
        Some(match operation {
            Operation::Set(key, value) => {
                self.values.insert(*key, value.clone());
                String::new()
            }
            Operation::Get(key) => return self.values.get(key).cloned(),
            Operation::Add(key, amount) => {
                let present: i64 = self.values.get(key).map_or(Some(0), |v| v.parse().ok())?;
                let sum = (present + i64::from(*amount)).to_string();
                self.values.insert(*key, sum.clone());
                sum
            }
            Operation::CompareSet(key, expected, desired) => {
                match self.values.get(key).cloned() {
                    None if expected.is_empty() => {}
                    None => return Some(expected.clone()),
                    Some(present) if present == *expected => {}
                    Some(present) => return Some(present),
                }
                self.values.insert(*key, desired.clone());
                desired.clone()
            }
            Operation::Check(keys) => keys.iter().all(|key| self.has(key)).to_string(),
            Operation::Wait(keys) => {
                return keys.iter().all(|key| self.has(key)).then(String::new);
            }
            Operation::Delete(key) => self.values.remove(key).is_some().to_string(),
            Operation::Append(key, value) => {
                self.values.entry(*key).or_default().push_str(value);
                String::new()
            }
            Operation::MultiSet(pairs) => {
                self.values.extend(pairs.iter().cloned());
                String::new()
            }
            Operation::MultiGet(keys) => {
                let values: Option<Vec<_>> =
                    keys.iter().map(|key| self.values.get(key).cloned()).collect();
                values?.join(",")
            }
            Operation::Push(key, value) => {
                self.queues.entry(*key).or_default().push_back(value.clone());
                String::new()
            }
            Operation::Pop(key) => return self.queues.get_mut(key)?.pop_front(),
            Operation::Len(key) => self.queues.get(key).map_or(0, VecDeque::len).to_string(),
            Operation::List => self.values.keys().map(u8::to_string).collect::<Vec<_>>().join(","),
            Operation::Clone => return None,
        })
    }
}
