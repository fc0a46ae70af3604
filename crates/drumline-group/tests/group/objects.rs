//! Objects that travel between ranks.

use std::collections::BTreeMap;

use crate::common::{everywhere, failure, world_with};
use drumline_group::{Config, ErrorKind, Objects, ProcessGroup, ReduceOp};
use serde::{Deserialize, Serialize, Serializer, de::DeserializeOwned};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Note {
    Empty,
    Text(String),
    Numbers { by_name: BTreeMap<String, Vec<f64>>, best: Option<i128> },
}

fn note(rank: usize) -> Note {
    match rank % 3 {
        0 => Note::Empty,
        1 => Note::Text("ü".repeat(rank * 1000)),
        _ => Note::Numbers {
            by_name: (0..rank)
                .map(|number| (format!("layer {number}"), vec![0.1; number]))
                .collect(),
            best: Some(-(rank as i128)),
        },
    }
}

#[test]
fn objects_of_all_kinds_arrive_everywhere() {
    everywhere(|config| {
        for world_size in [1, 2, 5] {
            world_with(world_size, config, |group| {
                let me = group.rank();
                let notes: Vec<Note> = (0..world_size).map(note).collect();
                assert_eq!(group.all_gather_object(&note(me)).unwrap(), notes);
                for root in 0..world_size {
                    let gathered = group.gather_object(&note(me), root).unwrap();
                    assert_eq!(gathered, (me == root).then(|| notes.clone()));

                    let mut received = if me == root { note(4) } else { Note::Empty };
                    group.broadcast_object(&mut received, root).unwrap();
                    assert_eq!(received, note(4));

                    let mut list = if me == root { [note(1), note(2)] } else { [note(0), note(0)] };
                    group.broadcast_object_list(&mut list, root).unwrap();
                    assert_eq!(list, [note(1), note(2)]);

                    let parts = (me == root).then_some(&notes[..]);
                    assert_eq!(group.scatter_object_list(parts, root).unwrap(), note(me));
                }
                group.destroy().unwrap();
            });
        }
    });
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Settings {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rate: Option<f32>,
    steps: u32,
    #[serde(default)]
    note: Option<String>,
    #[serde(flatten)]
    rest: BTreeMap<String, Choice>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Choice {
    Number(i64),
    Text(String),
    List(Vec<Choice>),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind")]
enum Schedule {
    Constant,
    Steps { every: u32, factor: f64 },
}

/// What can only be read with what is read to tell its type; and what other formats lose.
#[test]
fn objects_of_any_type_of_serdes_travel() {
    fn check<T>(group: &ProcessGroup, objects: [T; 2])
    where
        T: Clone + std::fmt::Debug + PartialEq + Sync + Serialize + DeserializeOwned,
    {
        let [own, other] = [group.rank(), 1 - group.rank()].map(|rank| objects[rank].clone());
        assert_eq!(group.all_gather_object(&own).unwrap(), objects);
        let mut list = if group.rank() == 1 { objects.clone() } else { [own.clone(), own.clone()] };
        group.broadcast_object_list(&mut list, 1).unwrap();
        assert_eq!(list, objects);
        let parts = (group.rank() == 0).then_some(&objects[..]);
        assert_eq!(group.scatter_object_list(parts, 0).unwrap(), own);
        std::thread::scope(|threads| {
            threads.spawn(|| group.send_object(&own, 1 - group.rank(), 3).unwrap());
            assert_eq!(group.recv_object::<T>(1 - group.rank(), 3).unwrap(), other);
        });
    }
    everywhere(|config| {
        world_with(2, config, |group| {
            let number = |number: f64| serde_json::json!({ "a": [number, null, "x"], "b": true });
            check(&group, [number(1.0), number(-2.5)]);
            let choices = [Choice::Text("x".into()), Choice::Number(-3)];
            let rest = [("list".to_owned(), Choice::List(choices.to_vec()))].into();
            let settings = Settings { rate: None, steps: 0, note: None, rest };
            check(&group, [settings.clone(), Settings { rate: Some(0.5), ..settings }]);
            check(&group, choices);
            check(&group, [Schedule::Constant, Schedule::Steps { every: 3, factor: 0.5 }]);
            check(&group, [("é".to_owned(), 'x', u128::MAX), (String::new(), '\0', 1)]);
            // Each in an order of its own.
            let map = |from: u32| (from..from + 100).map(|it| (it, f64::from(it))).collect();
            check::<std::collections::HashMap<u32, f64>>(&group, [map(0), map(7)]);
            let nested = [Some(None), Some(Some(()))];
            assert_eq!(group.all_gather_object(&nested[group.rank()]).unwrap(), nested);
        });
    });
}

#[test]
fn objects_go_from_rank_to_rank() {
    everywhere(|config| {
        world_with(3, config, |group| {
            if group.rank() > 0 {
                for number in 0..10 {
                    group.send_object(&(group.rank(), note(number)), 0, 1).unwrap();
                }
                return group.send_object("the last", 0, 2).unwrap();
            }
            for number in 0..10 {
                assert_eq!(
                    group.recv_object(2, 1).map(|it: (usize, Note)| it.1).unwrap(),
                    note(number)
                );
            }
            for number in 0..10 {
                let ((told, received), from) = group.recv_object_any::<(usize, Note)>(1).unwrap();
                assert_eq!((told, from, received), (1, 1, note(number)));
            }
            for peer in 1..3 {
                assert_eq!(group.recv_object::<String>(peer, 2).unwrap(), "the last");
            }
        });
    });
}

/// Cannot be described on rank 1.
struct Moody(usize);

impl Serialize for Moody {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            1 => Err(serde::ser::Error::custom("not today")),
            _ => serializer.serialize_u64(7),
        }
    }
}

impl<'de> Deserialize<'de> for Moody {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Moody, D::Error> {
        u64::deserialize(from).map(|_| Moody(0))
    }
}

/// Is not read as it is written.
struct Lopsided;

impl Serialize for Lopsided {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (1_u8, 2_u8).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Lopsided {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Lopsided, D::Error> {
        u8::deserialize(from).map(|_| Lopsided)
    }
}

/// `error` is about `rank`, and says so.
#[track_caller]
fn check<T>(result: drumline_group::Result<T>, culprit: usize, parts: &[&str]) {
    let error = result.map(drop).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Object, "{text}");
    assert!(text.contains(&format!(": rank {culprit} ")), "{text}");
    assert!(parts.iter().all(|part| text.contains(part)), "{text}: {parts:?}");
}

#[test]
fn what_goes_wrong_on_one_rank_is_told_on_all_and_the_group_goes_on() {
    let config = Config::default().object_bytes_max(1000);
    world_with(3, &config, |group| {
        let me = group.rank();
        let reason = if me == 1 { "cannot describe its" } else { "could not describe" };
        check(group.all_gather_object(&Moody(me)), 1, &["all_gather_object: rank 1", reason]);

        let long = "x".repeat(if me == 2 { 999 } else { 3 });
        check(group.gather_object(&long, 0), 2, &["1002 bytes", "1000", "OBJECT_BYTES_MAX"]);
        assert_eq!(group.all_gather_object(&"x".repeat(997)).unwrap()[2].len(), 997);

        let parts = (me == 1).then_some(&[1_u8, 2][..]);
        let reason = if me == 1 { "2 objects for 3 ranks" } else { "could not describe" };
        check(group.scatter_object_list(parts, 1), 1, &[reason]);

        match me {
            1 => check(group.gather_object(&0_u8, 2), 0, &["broadcast_object(root 0)"]),
            _ => check(group.broadcast_object(&mut 0_u8, 0), 1, &["gather_object(root 2)"]),
        }
        let reason = "called it with another type than the";
        match me {
            0 => check(group.broadcast_object(&mut 7_i32, 0), 1, &[reason, "i32 of this rank"]),
            _ => check(group.broadcast_object(&mut 7_u32, 0), 0, &[reason, "u32 of this rank"]),
        }
        match group.broadcast_object(&mut Lopsided, 0) {
            Ok(()) => assert_eq!(me, 0),
            result => check(result, 0, &["sent 4 bytes", "Lopsided", "do all ranks use one type?"]),
        }
        let mut list = vec![0_u8; if me == 0 { 2 } else { 3 }];
        match group.broadcast_object_list(&mut list, 0) {
            Ok(()) => assert_eq!(me, 0),
            result => check(result, 0, &["sends 2 objects, this rank takes 3"]),
        }
        let mut sum = [1_i32];
        group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [3]);
    });
}

#[test]
fn no_rank_allocates_more_than_it_wants_to() {
    let worlds = drumline_group::rendezvous::local_world(2).unwrap();
    crate::common::on_threads(worlds, |world| {
        let bytes_max = if world.rank() == 0 { 100 } else { 1 << 20 };
        let config = Config::default().object_bytes_max(bytes_max);
        let group = world
            .new_group(&[0, 1], &drumline_group::GroupOptions::default().config(config))
            .unwrap();
        // All know of the least limit ...
        check(group.broadcast_object(&mut "y".repeat(100), 1), 1, &["102 bytes", "at most 100"]);
        // ... but for a message: what is too long never travels.
        let result = match group.rank() {
            0 => group.recv_object::<String>(1, 0).map(drop),
            _ => group.send_object(&"y".repeat(100), 0, 0),
        };
        let text = failure(result.unwrap_err()).to_string();
        assert!(text.contains("send_object(tag 0) of 111 bytes"), "{text}");
        assert!(text.contains("recv_object(from 1, tag 0) of at most 108 bytes"), "{text}");
    });
}

#[test]
fn a_message_of_another_type_is_told_and_the_group_goes_on() {
    world_with(2, &Config::default(), |group| match group.rank() {
        0 => {
            check(group.recv_object::<u32>(1, 0), 1, &["sent another type than u32"]);
            assert_eq!(group.recv_object::<i32>(1, 0).unwrap(), -1);
            assert_eq!(group.recv_object::<Vec<i32>>(1, 0).unwrap(), [1, 2]);
        }
        _ => {
            group.send_object(&-1_i32, 0, 0).unwrap();
            group.send_object(&-1_i32, 0, 0).unwrap();
            group.send_object(&[1, 2][..], 0, 0).unwrap();
        }
    });
}

#[test]
fn an_object_is_not_taken_for_elements() {
    world_with(2, &Config::default(), |group| {
        let result = match group.rank() {
            0 => group.recv(&mut [0_u8; 3], 1, 4),
            _ => group.send_object(&[1_u8, 2, 3], 0, 4),
        };
        let text = failure(result.unwrap_err()).to_string();
        assert!(text.contains("send_object(tag 4) of 13 bytes"), "{text}");
        assert!(text.contains("recv(from 1, tag 4) of 3 u8"), "{text}");
    });
}
