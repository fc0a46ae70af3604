//! Makes the first inputs of each decoder: real bytes, written by the encoders.

use std::{fs, sync::Arc, thread};

use anyhow::{Context as _, Result};
use drumline_engine::{
    DType, Reason,
    executor::{Description, Header},
    membership::SeenFailure,
    transport::{Control, Waits},
};
use drumline_group::{Config, ReduceOp, algorithms::PriceList, trace::Trace};
use drumline_schedule::Collective;
use drumline_shm::{PeerSegment, Segment, SegmentSize};
use drumline_store::{
    auth::{Channel, Expected, Handshake, Hello, Level, Nonce, Secret},
    store::{
        FileStore, HashStore, Store,
        tcp::protocol::{Key, Request, Value},
    },
};
use drumline_train::{
    checkpoint::{Checkpoint, Tensor},
    error_file::Failure,
    sampler::DistributedSampler,
};

use crate::{
    Decoder, corpus,
    decoders::{Plan, Settings, Tree, handshake_of_ranks},
};

/// Encodes sample values for a decoder and writes each result into a file of the decoder's corpus folder.
///
/// # Errors
///
/// An encoder fails, or a file cannot be written.
pub fn record(decoder: &Decoder) -> Result<()> {
    let folder = corpus::folder(decoder);
    fs::create_dir_all(&folder)?;
    let recordings = recordings(decoder.name)?;
    for (number, bytes) in recordings.iter().enumerate() {
        fs::write(folder.join(format!("{}{number:02}", corpus::RECORDED)), bytes)?;
    }
    Ok(())
}

fn recordings(name: &str) -> Result<Vec<Vec<u8>>> {
    Ok(match name {
        "greeting" => greetings(),
        "handshake" => handshakes()?,
        "store-request" => requests(),
        "store-reply" => replies(),
        "store-file" => store_files()?,
        "control" => control(),
        "header" => vec![header().encode().to_vec()],
        "frame" => frames(),
        "messages" => messages(),
        "roll" => rolls(),
        "card" => texts(&["3 1b4e28ba-2fa1 net:[4026531840] 1000 drumline-mesh-1f-0", "3 b n 0 -"]),
        "address" => texts(&["\u{1}1 192.0.2.1:4000", "\u{2}2 192.0.2.1:4000 [2001:db8::1]:4001"]),
        "clock" => texts(&["-5000000123 41", "0 0"]),
        "segment" => segments()?,
        "announcement" => announcements(),
        "object" => objects()?,
        "checkpoint" => checkpoints()?,
        "sampler" => {
            vec![DistributedSampler::builder(10, 2, 0).build()?.state().to_string().into()]
        }
        "trace" => traces()?,
        "error-file" => texts(&[
            &Failure::now("no data", "thread 'main' panicked at src/main.rs:2:5:\nno data")
                .to_json(),
            r#"{"message": {"message": "ValueError: x", "errorCode": -9, "extraInfo": {"timestamp": "1764055200"}}}"#,
            r#"{"message": "boom", "timestamp": 1764055200}"#,
        ]),
        "prices" => {
            vec![PriceList::default().to_string().into(), b"# none\nnic_byte_fs = 1_000".into()]
        }
        "url" => texts(&[
            "tcp://node-0:4000?rank=1&world_size=2",
            "tcp://[::1]:4000?rank=0&world_size=1",
            "env://\nRANK=1\nWORLD_SIZE=4\nMASTER_ADDR=10.0.0.1\nMASTER_PORT=29500",
            "env://\nRANK=0\nWORLD_SIZE=2\nDRUMLINE_STORE=unix:@drumline-run-1",
            "env://\nRANK=0\nWORLD_SIZE=2\nMASTER_ADDR=h\nMASTER_PORT=1\nTORCHELASTIC_USE_AGENT_STORE=True",
            "file:///tmp/meet?rank=0&world_size=2",
        ]),
        "endpoint" => {
            texts(&["tcp://node-0.example:29500", "tcp://[fd00::1]:1", "unix:@drumline-1"])
        }
        "settings" => {
            vec![VARIABLES.into(), b"DRUMLINE_PRICES=measure\nGLOO_SOCKET_IFNAME=lo".into()]
        }
        "secret" => {
            texts(&["\0sixteen bytes or more", "\u{1}a line of a file, without its end\r\n"])
        }
        other => anyhow::bail!("nobody has said how {other} is recorded"),
    })
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

const VARIABLES: &str = "DRUMLINE_TIMEOUT_S=60.5
DRUMLINE_WARN_AFTER_S=2
DRUMLINE_BACKEND=drumline
DRUMLINE_ALL_REDUCE=halving
DRUMLINE_PRICES=default
DRUMLINE_BIND_ADDRESS=192.0.2.1, ::1
DRUMLINE_SOCKET_IFNAME=^docker,lo
DRUMLINE_PORT_RANGE=40000-40100
DRUMLINE_STREAMS=4
DRUMLINE_TRACE=runs/trace
DRUMLINE_TRACE_BYTES_MAX=1000000
DRUMLINE_MEMORY_NODE=1
DRUMLINE_WINDOW_BYTES=65536
DRUMLINE_REGISTERED_BYTES_MAX=1073741824
DRUMLINE_OBJECT_BYTES_MAX=1000
DRUMLINE_STORE_BYTES_MAX=1000000
DRUMLINE_SUM_ORDER=placement
DRUMLINE_ROUNDING=host
DRUMLINE_UNIX_SOCKETS=0
DRUMLINE_SPREAD_OVER_CORES=1
DRUMLINE_SHARED_MEMORY=1
DRUMLINE_TRUST_STORE=1
";

fn greetings() -> Vec<Vec<u8>> {
    let ranks = Hello { channel: Channel::Data(3), rank: 3, world_size: 8, group: 7 };
    let nonce = Nonce([9; 32]);
    let proven = ranks.encode(Some(Level::Auth), &nonce);
    vec![proven.to_vec(), Hello::STORE.encode(None, &nonce).to_vec()]
}

/// The bytes that each end receives, for every form of the handshake in [`decoders`](crate::decoders).
fn handshakes() -> Result<Vec<Vec<u8>>> {
    let mut heard = Vec::new();
    for form in 0..8 {
        let secret = (form & 2 != 0).then(|| Secret::new([b's'; 32])).transpose()?;
        let (ours, expected) = match form & 4 {
            0 => handshake_of_ranks(),
            _ => (Hello::STORE, Expected::STORE),
        };
        let theirs = if form & 4 == 0 { Hello { rank: 2, ..ours } } else { ours };
        let (our_nonce, their_nonce) = (Nonce([7; 32]), Nonce([9; 32]));
        let call = |hello, nonce| Handshake::call(hello, expected.clone(), secret.clone(), nonce);
        let answer =
            |hello, nonce| Handshake::answer(hello, expected.clone(), secret.clone(), nonce);
        let (mut we, mut they) = match form & 1 {
            0 => (call(ours, our_nonce), answer(theirs, their_nonce)),
            _ => (answer(ours, our_nonce), call(theirs, their_nonce)),
        };
        let mut said = vec![form];
        while !(we.is_done() && they.is_done()) {
            they.receive(&we.take_output())?;
            let bytes = they.take_output();
            we.receive(&bytes)?;
            said.extend(bytes);
        }
        heard.push(said);
    }
    Ok(heard)
}

fn requests() -> Vec<Vec<u8>> {
    let (key, value) = (Key(b"/k"), Value(b"value"));
    let all = [
        Request::Validate(drumline_store::store::tcp::protocol::MAGIC),
        Request::Set(key, value),
        Request::CompareSet(key, Value(b""), value),
        Request::Get(key),
        Request::Add(key, -1),
        Request::Check(vec![key, Key(b"/other")]),
        Request::Wait(vec![key]),
        Request::GetNumKeys(),
        Request::DeleteKey(key),
        Request::Append(key, value),
        Request::MultiGet(vec![key, key]),
        Request::MultiSet(vec![(key, value), (Key(b"/other"), Value(b""))]),
        Request::CancelWait(),
        Request::Ping(7),
        Request::QueuePush(key, value),
        Request::QueuePop(key),
        Request::QueueLen(key),
        Request::ListKeys(),
        Request::Barrier(key, 2),
        Request::Fetch(vec![key]),
        Request::Take(key),
    ];
    let one = |request: &Request<'_>| {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        bytes
    };
    let mut recorded: Vec<_> = all.iter().map(one).collect();
    recorded.push(recorded.concat());
    recorded
}

/// Replies of a server, each after the number of its request.
fn replies() -> Vec<Vec<u8>> {
    let number = |number: i64| number.to_le_bytes().to_vec();
    let value = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes(), bytes].concat();
    let extended = |form: u8, said: &[&[u8]]| [&[form | 128], &said.concat()[..]].concat();
    let plain = |form: u8, said: &[&[u8]]| [&[form], &said.concat()[..]].concat();
    let over: &[u8] = &[0];
    vec![
        extended(0, &[over, &value(b"value")]),
        plain(0, &[over, &value(b"value")]),
        extended(1, &[over, &value(b"a"), &value(b""), &value(b"c")]),
        plain(2, &[&number(3)]),
        plain(3, &[&value(b"desired")]),
        plain(4, &[over]),
        plain(5, &[over]),
        plain(6, &[&number(2), over]),
        plain(7, &[&number(1)]),
        plain(8, &[&number(2), &value(b"/a"), &value(b"init/")]),
        extended(9, &[over, &value(b"item")]),
        plain(9, &[&number(1), &value(b"item")]),
        plain(10, &[&number(0)]),
        plain(11, &[&number(4)]),
        plain(12, &[over]),
        plain(13, &[&[0; 4]]),
    ]
}

fn store_files() -> Result<Vec<Vec<u8>>> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("store");
    let store = FileStore::open(&path, 0)?;
    store.set("key", b"value")?;
    store.add("count", 3)?;
    store.queue_push("queue", b"first")?;
    store.queue_push("queue", b"second")?;
    store.queue_pop("queue")?;
    store.set("gone", &[7; 100])?;
    store.delete_key("gone")?;
    let whole = fs::read(&path)?;
    // A record that does not fit into a page is written under a cover.
    store.set("long", &[7; 5000])?;
    let long = fs::read(&path)?;
    let torn = whole[..whole.len() - 5].to_vec();
    let behind = [&whole[..whole.len() - 3], &whole[whole.len() - 15..]].concat();
    Ok(vec![whole, long, torn, behind, Vec::new()])
}

fn header() -> Header {
    let call = Description::new(7, 3, Collective::AllReduce, DType::F32, 10, "doubling");
    Header { description: call, part: 1, payload: 40 }
}

fn abort(culprit: Option<usize>, reason: Reason, text: &str) -> Control {
    Control::Abort { culprit, reason, text: text.to_owned() }
}

fn control() -> Vec<Vec<u8>> {
    let mut waits = Control::Waits(Waits { call: None, messages: vec![2, 70_000] }).encode();
    // A message of a rank that waits in a call: number of ranks, header of the call, ranks.
    let mut call = header();
    (call.part, call.payload) = (0, 0);
    let body =
        [&2_u32.to_le_bytes()[..], &call.encode(), &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]].concat();
    waits.extend([&[4, 0, 0, 0][..], &(body.len() as u32).to_le_bytes(), &body].concat());
    let messages = [
        abort(Some(2), Reason::Timeout, "rank 2 stumbled"),
        abort(None, Reason::Other, ""),
        Control::Beat,
        Control::Goodbye(None),
        Control::Goodbye(Some(SeenFailure {
            culprit: Some(1),
            text: "rank 1 has ended".to_owned(),
        })),
    ];
    vec![messages.iter().flat_map(Control::encode).collect(), waits]
}

/// A frame of a message from rank to rank: kind, type, then number, tag, count and bytes.
fn frame(kind: u8, dtype: u8, numbers: [u64; 4]) -> Vec<u8> {
    let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
    [kind, dtype, 0, 0, 0, 0, 0, 0].into_iter().chain(numbers).collect()
}

/// The bytes of a peer that receives what it is sent, and sends numbers and an object.
fn messages() -> Vec<Vec<u8>> {
    let float = DType::F32 as u8;
    let said = [
        frame(2, 0, [0, 0, 0, 0]),
        frame(1, float, [0, 1, 4, 16]),
        frame(1, u8::MAX, [1, 3, 100, 100]),
        frame(1, float, [2, 4, 4, 16]),
        frame(1, float, [3, 9, 4, 16]),
        frame(3, 0, [0, 0, 0, 16]),
        vec![1; 16],
        frame(3, 0, [1, 0, 0, 60]),
        vec![2; 60],
        frame(3, 0, [2, 0, 0, 16]),
        vec![3; 16],
        frame(3, 0, [1, 0, 0, 40]),
        vec![2; 40],
    ];
    [7, 0].map(|piece| [&[piece], &said.concat()[..]].concat()).into()
}

fn frames() -> Vec<Vec<u8>> {
    vec![
        frame(1, DType::F32 as u8, [0, 7, 4, 16]),
        frame(1, u8::MAX, [1, 7, 100, 100]),
        frame(2, 0, [0, 0, 0, 0]),
        frame(3, 0, [0, 0, 0, 16]),
    ]
}

fn rolls() -> Vec<Vec<u8>> {
    let words = |words: &[&str]| {
        let word = |word: &&str| [&(word.len() as u32).to_le_bytes(), word.as_bytes()].concat();
        let words: Vec<u8> = words.iter().flat_map(word).collect();
        [&[2, b'+'], &words[..]].concat()
    };
    vec![words(&["3 b n 0 -", "3 b n 0 drumline-mesh-1"]), words(&["", "ready"])]
}

fn segments() -> Result<Vec<Vec<u8>>> {
    let own = Segment::create(SegmentSize { slot_bytes: 1000, arena_bytes: 1 << 20 })?;
    let handles = own.handles()?;
    let mut line = vec![0; 64];
    let memory = fs::File::from(handles.memory.try_clone()?);
    std::os::unix::fs::FileExt::read_exact_at(&memory, &mut line, 0)?;
    let size = memory.metadata()?.len();
    PeerSegment::map(handles)?;
    Ok(vec![[&size.to_le_bytes()[..], &line].concat()])
}

fn announcements() -> Vec<Vec<u8>> {
    let one = |place: u64, length: u64| {
        let numbers = [7, place, length].map(u64::to_le_bytes).concat();
        [&numbers[..], &header().encode()].concat()
    };
    vec![one(0, 16), one(4096, 100)]
}

fn objects() -> Result<Vec<Vec<u8>>> {
    let plan = Plan::Cosine { from: 3, to: [true, false] };
    let settings = Settings { name: "run".to_owned(), steps: 300, warm_up: Some(7), plan };
    let tree = |name: &str, children| Tree { name: name.to_owned(), children };
    let tree = tree("root", vec![tree("left", vec![]), tree("right", vec![tree("leaf", vec![])])]);
    let described = [
        described(0, &(7_u32, "seven".to_owned()))?,
        described(1, &vec![Some(vec![1_u8, 2]), None])?,
        described(2, &std::collections::BTreeMap::from([("a".to_owned(), vec![-1_i64, 300])]))?,
        described(3, &settings)?,
        described(3, &Settings { plan: Plan::Constant, warm_up: None, ..settings })?,
        described(4, &tree)?,
        described(5, &vec![(), ()])?,
    ];
    Ok(described.concat())
}

/// The encodings of an object in both formats, each after the number of its type.
fn described<T>(form: u8, object: &T) -> Result<Vec<Vec<u8>>>
where
    T: serde::Serialize + serde::de::DeserializeOwned,
{
    let compact = drumline_group::decoders::describe(object).map_err(anyhow::Error::msg)?;
    let anyone =
        drumline_group::decoders::describe_for_anyone(object).map_err(anyhow::Error::msg)?;
    Ok([compact, anyone].map(|bytes| [&[form], &bytes[..]].concat()).into())
}

fn checkpoints() -> Result<Vec<Vec<u8>>> {
    let mut checkpoint = Checkpoint::default();
    let empty = checkpoint.to_bytes().map_err(anyhow::Error::msg)?;
    checkpoint.insert(Tensor::from_values("model.bias", [2], &[0.5_f32, -1.0])?);
    checkpoint.insert(Tensor::from_words("random", [1, 3], &[1, 2, 3])?);
    checkpoint.insert(Tensor::from_values("none", [0, 4], &[] as &[f64])?);
    checkpoint.metadata.insert("epoch".to_owned(), "3".to_owned());
    Ok(vec![empty, checkpoint.to_bytes().map_err(anyhow::Error::msg)?])
}

/// The trace files of two ranks, with a zero byte between them. The names of this host are replaced.
fn traces() -> Result<Vec<Vec<u8>>> {
    let directory = tempfile::tempdir()?;
    let config = Config::default().trace(Trace::to(directory.path()));
    let store = Arc::new(HashStore::new());
    let run = |rank: usize| -> drumline_group::Result<()> {
        let group = drumline_group::rendezvous::connect("world", store.clone(), rank, 2, &config)?;
        group.all_reduce(&mut [1.0_f32; 100], ReduceOp::Sum)?;
        match rank {
            0 => group.send(&[1_u8], 1, 7)?,
            _ => group.recv(&mut [0_u8], 0, 7)?,
        }
        group.destroy()
    };
    thread::scope(|threads| {
        let ranks = [0, 1].map(|rank| threads.spawn(move || run(rank)));
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap_or(Ok(())))
    })?;
    let file = |rank: usize| -> Result<String> {
        let text = fs::read_to_string(directory.path().join(format!("rank-{rank}.json")))?;
        let mut text = anonymous(&text, "\"host\":\"", "host-a").context("no host")?;
        text = anonymous(&text, "\"clock\":\"", "boot time:[1]").context("no clock")?;
        text = anonymous(&text, "\"name\":\"rank ", &format!("{rank}")).context("no label")?;
        Ok(text.replace(&format!("\"process\":{}", std::process::id()), "\"process\":1"))
    };
    let (one, two) = (file(0)?, file(1)?);
    Ok(vec![one.clone().into(), format!("{one}\0{two}").into()])
}

/// Replaces the text between `front` and the next quotation mark by `other`, wherever it occurs.
fn anonymous(text: &str, front: &str, other: &str) -> Option<String> {
    let start = text.find(front)? + front.len();
    let end = start + text[start..].find('"')?;
    let own = &text[start..end];
    Some(text.replace(own, other)).filter(|_| !own.is_empty())
}
