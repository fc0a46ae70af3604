//! The TCP store's bytes and its server, without sockets.

use std::collections::BTreeMap;

use drumline_store::store::tcp::{
    protocol::{
        ASK_EXTENSIONS, Decoded, EXTENSIONS, KEY_BYTES_MAX, Key, MAGIC, ProtocolError, Request,
        VALUE_BYTES_MAX, Value, decode,
    },
    server::{ConnectionId, OUTPUT_BYTES_MAX, Refusal, Server},
};
use proptest::prelude::*;

/// Every opcode, derived by hand from the description of the format.
fn fixtures() -> Vec<(Request<'static>, &'static str)> {
    let k = Key(b"/k");
    let (v, w) = (Value(b"v"), Value(b"xyz"));
    const K: &str = "0200000000000000 2f6b";
    const V: &str = "0100000000000000 76";
    const W: &str = "0300000000000000 78797a";
    let bytes = |parts: &[&str]| -> &'static str { parts.concat().leak() };
    vec![
        (Request::Validate(MAGIC), "00 cef7853c"),
        (Request::Set(k, v), bytes(&["01", K, V])),
        (Request::CompareSet(k, v, w), bytes(&["02", K, V, W])),
        (Request::Get(k), bytes(&["03", K])),
        (Request::Add(k, 5), bytes(&["04", K, "0500000000000000"])),
        (Request::Add(k, -1), bytes(&["04", K, "ffffffffffffffff"])),
        (Request::Check(vec![k, k]), bytes(&["05", "0200000000000000", K, K])),
        (Request::Wait(vec![k]), bytes(&["06", "0100000000000000", K])),
        (Request::Wait(vec![]), "06 0000000000000000"),
        (Request::GetNumKeys(), "07"),
        (Request::DeleteKey(k), bytes(&["08", K])),
        (Request::Append(k, w), bytes(&["09", K, W])),
        (Request::MultiGet(vec![k, k]), bytes(&["0a", "0200000000000000", K, K])),
        (Request::MultiSet(vec![(k, v), (k, w)]), bytes(&["0b", "0200000000000000", K, V, K, W])),
        (Request::CancelWait(), "0c"),
        (Request::Ping(0x0102_0304), "0d 04030201"),
        (Request::QueuePush(k, v), bytes(&["0e", K, V])),
        (Request::QueuePop(k), bytes(&["0f", K])),
        (Request::QueueLen(k), bytes(&["10", K])),
        (Request::ListKeys(), "11"),
        (Request::Barrier(k, 2), bytes(&["12", K, "0200000000000000"])),
        (Request::Fetch(vec![k, k]), bytes(&["d0", "0200000000000000", K, K])),
        (Request::Take(k), bytes(&["d1", K])),
    ]
}

#[test]
fn every_request_has_its_bytes_and_can_be_split_anywhere() {
    for (request, text) in fixtures() {
        let bytes = unhex(text);
        assert_eq!(encoded(std::slice::from_ref(&request)), bytes, "{request:?}");
        for end in 0..bytes.len() {
            let Decoded::NeedsBytes(needed) = decode(&bytes[..end]).unwrap() else {
                panic!("{request:?} is complete after {end} bytes")
            };
            assert!(end < needed && needed <= bytes.len(), "{request:?}: {end} {needed}");
        }
        let mut more = bytes.clone();
        more.push(7);
        assert_eq!(decode(&more), Ok(Decoded::Request(request, bytes.len())));
    }
}

/// One connection or several, as a driver sees them.
#[derive(Default)]
struct Clients {
    server: Server,
    ids: BTreeMap<char, ConnectionId>,
}

impl Clients {
    fn new(names: &str) -> Clients {
        let mut clients = Clients::default();
        for name in names.chars() {
            clients.connect(name);
            clients.send(name, &[Request::Validate(MAGIC)]);
        }
        clients
    }

    fn connect(&mut self, name: char) {
        let id = self.server.connect();
        self.ids.insert(name, id);
    }

    fn send(&mut self, name: char, requests: &[Request<'_>]) {
        self.server.receive(self.ids[&name], &encoded(requests));
    }

    /// What the server has written to a connection since the last call.
    fn replies(&mut self, name: char) -> Vec<u8> {
        let id = self.ids[&name];
        let mut replies = Vec::new();
        while !self.server.output(id).is_empty() {
            let bytes = self.server.output(id).to_vec();
            self.server.written(id, bytes.len());
            replies.extend(bytes);
        }
        replies
    }

    fn ask(&mut self, name: char, request: Request<'_>) -> Vec<u8> {
        self.send(name, &[request]);
        self.replies(name)
    }

    fn refusal(&mut self, name: char) -> Option<Refusal> {
        let refused = self.server.take_refused();
        refused.into_iter().find(|(id, _)| *id == self.ids[&name]).map(|(_, refusal)| refusal)
    }
}

/// What torch's server answered to torch's client and to ours is what this server answers, however
/// the bytes are cut.
#[test]
fn recorded_conversations_come_out_the_same() {
    for (name, record) in [
        ("torch_client", include_str!("../fixtures/tcpstore/torch_client.txt")),
        ("drumline_client", include_str!("../fixtures/tcpstore/drumline_client.txt")),
    ] {
        for piece in [1, 2, 3, 5, 8, 1 << 20] {
            let mut clients = Clients::default();
            let mut expected = BTreeMap::<char, Vec<u8>>::new();
            let mut answered = BTreeMap::<char, Vec<u8>>::new();
            let mut lines = 0;
            for line in record.lines().filter(|line| !line.starts_with('#')) {
                let (label, bytes) = line.split_once(' ').unwrap();
                let connection = label.chars().next().unwrap();
                let bytes = unhex(bytes);
                if label.ends_with('>') {
                    if !clients.ids.contains_key(&connection) {
                        clients.connect(connection);
                    }
                    for piece in bytes.chunks(piece) {
                        clients.server.receive(clients.ids[&connection], piece);
                    }
                } else {
                    // Only a server of ours says that it is one.
                    let asked = bytes == ASK_EXTENSIONS.to_le_bytes();
                    let bytes = if asked { EXTENSIONS.to_le_bytes().to_vec() } else { bytes };
                    expected.entry(connection).or_default().extend(bytes);
                }
                for &connection in clients.ids.clone().keys() {
                    let replies = clients.replies(connection);
                    answered.entry(connection).or_default().extend(replies);
                }
                lines += 1;
            }
            assert!(lines > 50);
            assert_eq!(answered, expected, "{name} in pieces of {piece}");
        }
    }
}

/// The recorded bytes of both clients are what our own encoder makes of the same requests.
#[test]
fn recorded_requests_are_encoded_the_same() {
    for record in [
        include_str!("../fixtures/tcpstore/torch_client.txt"),
        include_str!("../fixtures/tcpstore/drumline_client.txt"),
    ] {
        for line in record.lines().filter(|line| line.contains('>')) {
            let bytes = unhex(line.split_once(' ').unwrap().1);
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let Decoded::Request(request, length) = decode(rest).unwrap() else {
                    panic!("{line} is incomplete")
                };
                assert_eq!(encoded(&[request]), rest[..length]);
                rest = &rest[length..];
            }
        }
    }
}

#[test]
fn a_stranger_is_refused_before_its_request_is_looked_at() {
    let secret = [Request::Set(Key(b"/k"), Value(b"v"))];
    for first in [
        encoded(&secret),
        encoded(&[Request::Ping(1)]),
        encoded(&[Request::Validate(MAGIC + 1)]),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        b"\xff".to_vec(),
    ] {
        let mut clients = Clients::new("a");
        clients.connect('s');
        let stranger = clients.ids[&'s'];
        let first = [first, encoded(&secret)].concat();
        clients.server.receive(stranger, &first);
        assert_eq!(clients.refusal('s'), Some(Refusal::NotAClient));
        // Its socket may still deliver what was on the way.
        clients.server.receive(stranger, &encoded(&[Request::Validate(MAGIC)]));
        clients.server.receive(stranger, &encoded(&secret));
        assert!(clients.replies('s').is_empty());
        assert_eq!(clients.server.clients(), 1);
        assert_eq!(clients.ask('a', Request::Check(vec![Key(b"/k")])), [1]);
    }
}

#[test]
fn a_broken_rule_costs_its_own_connection_only() {
    let long = vec![b'k'; KEY_BYTES_MAX + 1];
    let cases: [(Vec<u8>, Refusal); 6] = [
        (vec![19], ProtocolError::UnknownOpcode(19).into()),
        (
            encoded(&[Request::Get(Key(&long))]),
            ProtocolError::KeyTooLong(KEY_BYTES_MAX as u64 + 1).into(),
        ),
        (
            encoded(&[Request::Add(Key(b"/text"), 1)]),
            Refusal::Add {
                key: "/text".into(),
                problem: "the present value \"abc\" is not a decimal number".into(),
            },
        ),
        (
            encoded(&[Request::Wait(vec![Key(b"/x")]), Request::Wait(vec![Key(b"/y")])]),
            Refusal::WaitsTwice,
        ),
        (
            encoded(&[Request::Barrier(Key(b"/b"), 3), Request::Wait(vec![Key(b"/y")])]),
            Refusal::WaitsTwice,
        ),
        (
            [
                encoded(&[Request::Append(Key(b"/a"), Value(&vec![0; VALUE_BYTES_MAX]))]),
                encoded(&[Request::Append(Key(b"/a"), Value(b"1"))]),
            ]
            .concat(),
            Refusal::AppendedTooMuch("/a".into()),
        ),
    ];
    for (bytes, refusal) in cases {
        let mut clients = Clients::new("ab");
        clients.ask('a', Request::Set(Key(b"/text"), Value(b"abc")));
        clients.server.receive(clients.ids[&'b'], &bytes);
        assert_eq!(clients.refusal('b'), Some(refusal));
        assert_eq!(clients.server.clients(), 1);
        assert_eq!(clients.ask('a', Request::Get(Key(b"/text"))), b"\x03\0\0\0\0\0\0\0abc");
    }
}

#[test]
fn a_client_that_does_not_read_is_refused() {
    let mut clients = Clients::new("ab");
    let value = vec![1; VALUE_BYTES_MAX];
    clients.ask('a', Request::Set(Key(b"/big"), Value(&value)));
    clients.ask('a', Request::Set(Key(b"/key"), Value(b"")));
    // One at a time and read each time: as many as it likes.
    for _ in 0..2 * OUTPUT_BYTES_MAX / VALUE_BYTES_MAX {
        assert_eq!(clients.ask('a', Request::Get(Key(b"/big"))).len(), 8 + VALUE_BYTES_MAX);
    }
    let too_many = OUTPUT_BYTES_MAX / VALUE_BYTES_MAX;
    clients.send('a', &vec![Request::Get(Key(b"/big")); too_many]);
    assert_eq!(clients.refusal('a'), Some(Refusal::SlowReader));
    // In one request it is the same.
    clients.send('b', &[Request::MultiGet(vec![Key(b"/big"); too_many])]);
    assert_eq!(clients.refusal('b'), Some(Refusal::SlowReader));
    assert_eq!(clients.server.clients(), 0);
}

#[test]
fn a_wait_ends_when_its_last_key_appears() {
    let mut clients = Clients::new("abc");
    let [x, y, z] = [Key(b"/x"), Key(b"/y"), Key(b"/z")];
    clients.ask('a', Request::Set(x, Value(b"")));
    assert!(clients.ask('b', Request::Wait(vec![x, y, z, y])).is_empty());
    assert!(clients.ask('c', Request::Wait(vec![z])).is_empty());
    clients.ask('a', Request::Add(y, 1));
    assert!(clients.replies('b').is_empty());
    // Refused, so the key is still absent.
    clients.ask('a', Request::CompareSet(z, Value(b"1"), Value(b"2")));
    assert!(clients.replies('c').is_empty());
    clients.ask('a', Request::CompareSet(z, Value(b""), Value(b"2")));
    assert_eq!(clients.replies('b'), [0]);
    assert_eq!(clients.replies('c'), [0]);
    for request in [
        Request::Set(Key(b"/1"), Value(b"")),
        Request::Append(Key(b"/2"), Value(b"")),
        Request::MultiSet(vec![(Key(b"/3"), Value(b""))]),
        Request::QueuePush(Key(b"/4"), Value(b"")),
        Request::Barrier(Key(b"/5"), 1),
    ] {
        let key = match &request {
            Request::Set(key, _) | Request::Append(key, _) | Request::QueuePush(key, _) => *key,
            Request::MultiSet(pairs) => pairs[0].0,
            Request::Barrier(key, _) => *key,
            _ => unreachable!(),
        };
        assert!(clients.ask('b', Request::Wait(vec![key])).is_empty());
        clients.ask('a', request);
        assert_eq!(clients.replies('b'), [0], "{key:?}");
    }
}

#[test]
fn a_cancelled_wait_leaves_nothing_behind() {
    let mut clients = Clients::new("ab");
    let x = Key(b"/x");
    assert_eq!(clients.ask('a', Request::CancelWait()), [1]);
    clients.ask('a', Request::Wait(vec![x]));
    assert_eq!(clients.ask('a', Request::CancelWait()), [1]);
    clients.ask('b', Request::Set(x, Value(b"")));
    assert!(clients.replies('a').is_empty());
    // The wait's end and the cancellation cross.
    assert_eq!(clients.ask('a', Request::Wait(vec![x])), [0]);
    assert_eq!(clients.ask('a', Request::CancelWait()), [1]);
    // Whoever goes while waiting is not told.
    clients.ask('a', Request::Wait(vec![Key(b"/y")]));
    clients.server.disconnect(clients.ids[&'a']);
    clients.ask('b', Request::Set(Key(b"/y"), Value(b"")));
    assert_eq!(clients.ask('b', Request::Ping(9)), [9, 0, 0, 0]);
}

#[test]
fn an_item_in_a_queue_ends_one_wait_and_no_other() {
    let mut clients = Clients::new("abc");
    let (queue, other) = (Key(b"/q"), Key(b"/other"));
    clients.ask('a', Request::Wait(vec![queue]));
    clients.ask('b', Request::Wait(vec![queue]));
    clients.ask('c', Request::QueuePush(queue, Value(b"1")));
    assert_eq!((clients.replies('a'), clients.replies('b')), (vec![0], vec![]));
    // torch would keep a's old interest in the queue, and end this wait with the next item.
    assert!(clients.ask('a', Request::Wait(vec![other])).is_empty());
    clients.ask('c', Request::QueuePush(queue, Value(b"2")));
    assert_eq!((clients.replies('a'), clients.replies('b')), (vec![], vec![0]));
    // torch would wait for the queue, which is there, for ever.
    assert!(clients.ask('b', Request::Wait(vec![queue, Key(b"/late")])).is_empty());
    clients.ask('c', Request::Set(Key(b"/late"), Value(b"")));
    assert_eq!(clients.replies('b'), [0]);
    // Queues are neither keys nor deleted.
    assert_eq!(clients.ask('c', Request::GetNumKeys()), 1_i64.to_le_bytes());
    assert_eq!(clients.ask('c', Request::DeleteKey(queue)), 0_i64.to_le_bytes());
    assert_eq!(clients.ask('c', Request::QueueLen(queue)), 2_i64.to_le_bytes());
}

#[test]
fn a_barrier_opens_once_and_for_all() {
    let mut clients = Clients::new("abcd");
    let barrier = || Request::Barrier(Key(b"/b"), 3);
    assert!(clients.ask('a', barrier()).is_empty());
    assert!(clients.ask('b', barrier()).is_empty());
    assert_eq!(clients.ask('c', barrier()), [0]);
    assert_eq!((clients.replies('a'), clients.replies('b')), (vec![0], vec![0]));
    assert_eq!(clients.ask('d', barrier()), [0]);
    assert_eq!(clients.ask('a', Request::Get(Key(b"/b"))), b"\x01\0\0\0\0\0\0\x004");
}

/// A value as the server sends it.
fn value(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

#[test]
fn values_are_fetched_when_all_are_there() {
    let mut clients = Clients::new("abc");
    let [x, y] = [Key(b"/x"), Key(b"/y")];
    clients.ask('a', Request::Set(x, Value(b"1")));
    assert_eq!(clients.ask('b', Request::Fetch(vec![x])), [vec![0], value(b"1")].concat());
    assert_eq!(clients.ask('b', Request::Fetch(vec![])), [0]);
    assert!(clients.ask('b', Request::Fetch(vec![y, x])).is_empty());
    assert!(clients.ask('c', Request::Fetch(vec![y])).is_empty());
    // An item of a queue is no value.
    clients.ask('a', Request::QueuePush(y, Value(b"item")));
    assert!(clients.replies('b').is_empty());
    // One that was there is there no longer when the last one comes.
    clients.ask('a', Request::DeleteKey(x));
    clients.ask('a', Request::Set(y, Value(b"2")));
    assert_eq!(clients.replies('c'), [vec![0], value(b"2")].concat());
    assert!(clients.replies('b').is_empty());
    clients.ask('a', Request::Set(x, Value(b"3")));
    assert_eq!(clients.replies('b'), [vec![0], value(b"2"), value(b"3")].concat());
    // Cancelled, it leaves nothing behind.
    assert!(clients.ask('b', Request::Fetch(vec![Key(b"/z")])).is_empty());
    assert_eq!(clients.ask('b', Request::CancelWait()), [1]);
    clients.ask('a', Request::Set(Key(b"/z"), Value(b"")));
    assert!(clients.replies('b').is_empty());
}

#[test]
fn an_item_is_taken_once_and_by_the_first_who_asked() {
    let mut clients = Clients::new("abcd");
    let queue = Key(b"/q");
    assert!(clients.ask('b', Request::Take(queue)).is_empty());
    assert!(clients.ask('c', Request::Take(queue)).is_empty());
    // A value is no item.
    clients.ask('a', Request::Set(queue, Value(b"value")));
    assert!(clients.replies('b').is_empty());
    clients.ask('a', Request::QueuePush(queue, Value(b"1")));
    assert_eq!(clients.replies('b'), [vec![0], value(b"1")].concat());
    assert!(clients.replies('c').is_empty());
    // Whoever goes takes nothing along.
    clients.server.disconnect(clients.ids[&'c']);
    clients.ask('a', Request::QueuePush(queue, Value(b"2")));
    assert_eq!(clients.ask('d', Request::Take(queue)), [vec![0], value(b"2")].concat());
    assert_eq!(clients.ask('a', Request::QueueLen(queue)), 0_i64.to_le_bytes());
    // It is not shown to those who only wait for it, either.
    clients.ask('a', Request::DeleteKey(queue));
    assert!(clients.ask('b', Request::Wait(vec![queue])).is_empty());
    assert!(clients.ask('d', Request::Take(queue)).is_empty());
    clients.ask('a', Request::QueuePush(queue, Value(b"3")));
    assert_eq!(clients.replies('d'), [vec![0], value(b"3")].concat());
    assert!(clients.replies('b').is_empty());
    clients.ask('a', Request::QueuePush(queue, Value(b"4")));
    assert_eq!(clients.replies('b'), [0]);
}

#[test]
fn a_server_of_ours_says_so_when_asked() {
    let mut clients = Clients::new("a");
    assert_eq!(clients.ask('a', Request::Ping(ASK_EXTENSIONS)), EXTENSIONS.to_le_bytes());
    assert_eq!(clients.ask('a', Request::Ping(EXTENSIONS)), EXTENSIONS.to_le_bytes());
}

#[test]
fn what_all_store_together_is_bounded() {
    for request in [
        Request::Set(Key(b"/new"), Value(&[0; 100])),
        Request::Append(Key(b"/new"), Value(&[0; 100])),
        Request::MultiSet(vec![(Key(b"/new"), Value(&[0; 100]))]),
        Request::CompareSet(Key(b"/new"), Value(b""), Value(&[0; 100])),
        Request::QueuePush(Key(b"/new"), Value(&[0; 100])),
        Request::Add(Key(b"/new"), 1),
        Request::Barrier(Key(b"/new"), 2),
    ] {
        let mut clients = Clients { server: Server::with_limit(1000), ..Clients::default() };
        for name in ['a', 'b'] {
            clients.connect(name);
            clients.send(name, &[Request::Validate(MAGIC)]);
        }
        clients.ask('a', Request::Set(Key(b"/old"), Value(&[0; 880])));
        clients.ask('b', request.clone());
        let refusal = clients.refusal('b').unwrap().to_string();
        assert!(refusal.contains("/new") && refusal.contains("1000 bytes"), "{refusal}");
        assert_eq!(clients.ask('a', Request::Check(vec![Key(b"/new")])), [1], "{request:?}");
        // There is room again when something goes.
        clients.ask('a', Request::DeleteKey(Key(b"/old")));
        clients.ask('a', request);
        assert_eq!(clients.refusal('a'), None);
    }
}

#[test]
fn list_keys_lists_all() {
    let mut clients = Clients::new("a");
    clients.ask('a', Request::Set(Key(b"/k"), Value(b"")));
    let expected = [1_i64.to_le_bytes().to_vec(), unhex("0200000000000000 2f6b")].concat();
    assert_eq!(clients.ask('a', Request::ListKeys()), expected);
}

proptest! {
    /// Whatever strangers and clients send, in whatever pieces, the others are served.
    #[test]
    fn garbage_harms_nobody_else(
        chunks in prop::collection::vec((0..3_usize, chunk()), 1..40),
    ) {
        let mut clients = Clients::new("xab");
        clients.connect('s');
        for (sender, bytes) in chunks {
            let name = ['a', 'b', 's'][sender];
            clients.server.receive(clients.ids[&name], &bytes);
        }
        prop_assert_eq!(clients.ask('x', Request::Ping(5)), 5_u32.to_le_bytes());
        clients.ask('x', Request::Set(Key(b"/mine"), Value(b"")));
        prop_assert_eq!(clients.ask('x', Request::Wait(vec![Key(b"/mine")])), [0]);
    }

    /// The place of the cuts makes no difference.
    #[test]
    fn cuts_make_no_difference(
        chunks in prop::collection::vec(chunk(), 1..20),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let bytes = chunks.concat();
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let mut whole = Clients::new("a");
        whole.server.receive(whole.ids[&'a'], &bytes);
        let mut pieces = Clients::new("a");
        for cut in cuts.windows(2) {
            pieces.server.receive(pieces.ids[&'a'], &bytes[cut[0]..cut[1]]);
        }
        let refusal = whole.refusal('a');
        if refusal.is_some() {
            // A flaw inside an incomplete list may show only when more of the list has come.
            pieces.server.receive(pieces.ids[&'a'], &vec![0; 4 << 20]);
        } else {
            prop_assert_eq!(whole.replies('a'), pieces.replies('a'));
        }
        prop_assert_eq!(refusal, pieces.refusal('a'));
    }
}

/// Requests, some of them damaged, and noise.
fn chunk() -> impl Strategy<Value = Vec<u8>> {
    let request = (0..fixtures().len()).prop_map(|index| unhex(fixtures()[index].1));
    prop_oneof![
        6 => request.clone(),
        1 => (request.clone(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(mut bytes, index, byte)| {
            let index = index.index(bytes.len());
            bytes[index] = byte;
            bytes
        }),
        1 => (request, any::<prop::sample::Index>()).prop_map(|(mut bytes, index)| {
            bytes.truncate(index.index(bytes.len()));
            bytes
        }),
        1 => prop::collection::vec(any::<u8>(), 0..40),
    ]
}

fn encoded(requests: &[Request<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    requests.iter().for_each(|request| request.encode(&mut bytes));
    bytes
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}
