//! Bytes that the code of 0705b25 wrote, from before the crates were divided: connections without
//! protection and files have the same bytes today.

use std::fs;

use drumline_store::{
    auth::{Channel, Expected, Handshake, Hello, Nonce, Secret},
    store::{FileStore, Store as _},
};

const RECORDED: &str = include_str!("recorded.txt");

#[test]
fn handshakes_have_the_bytes_that_were_recorded() {
    let hello = |channel, rank| Hello { channel, rank, world_size: 4, group: 7 };
    let ranks = || Expected { ranks: 0..4, world_size: 4, group: 7 };
    let secret = || Secret::new([b's'; 32]).unwrap();
    let mut said = Vec::new();
    for (name, caller, answerer, expected) in [
        ("data", hello(Channel::Data(3), 2), hello(Channel::Data(3), 1), ranks()),
        ("control", hello(Channel::Control, 2), hello(Channel::Control, 1), ranks()),
        ("store", Hello::STORE, Hello::STORE, Expected::STORE),
    ] {
        for (with, secret) in [("open", None), ("secret", Some(secret()))] {
            let (ours, theirs) = (Nonce([7; 32]), Nonce([9; 32]));
            let mut call = Handshake::call(caller, expected.clone(), secret.clone(), ours);
            let mut answer = Handshake::answer(answerer, expected.clone(), secret, theirs);
            while !(call.is_done() && answer.is_done()) {
                let bytes = call.take_output();
                answer.receive(&bytes).unwrap();
                said.push((format!("{name} {with} caller"), bytes));
                let bytes = answer.take_output();
                call.receive(&bytes).unwrap();
                said.push((format!("{name} {with} answerer"), bytes));
            }
        }
    }
    let said = said.iter().filter(|(_, bytes)| !bytes.is_empty());
    let said: Vec<String> = said.map(|(who, bytes)| format!("{who} {}", hex(bytes))).collect();
    let recorded: Vec<&str> = RECORDED.lines().filter(|line| !line.starts_with("file")).collect();
    assert_eq!(said, recorded);
}

#[test]
fn a_file_store_writes_the_bytes_that_were_recorded() {
    let path = std::env::temp_dir().join(format!("drumline-recorded-{}", std::process::id()));
    let store = FileStore::open(&path, 1).unwrap();
    store.set("key", b"value").unwrap();
    store.add("count", 3).unwrap();
    store.add("count", -1).unwrap();
    store.append("key", b" and more").unwrap();
    store.compare_set("key", b"value and more", b"other").unwrap();
    store.delete_key("key").unwrap();
    let written = format!("file {}", hex(&fs::read(&path).unwrap()));
    drop(store);
    let recorded = RECORDED.lines().find(|line| line.starts_with("file"));
    assert_eq!(Some(&written[..]), recorded);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
