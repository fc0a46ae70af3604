//! A backend that notices nothing itself, as MPI does: it carries bytes over sockets and waits for ever, also
//! for a peer that has died. All that it knows of its peers it knows from its guard.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
    time::Instant,
};

use drumline_group::{
    Cause, CollectiveError, Error, Result,
    backend::{
        Arrived, Backend, BackendOptions, Collective, Guard, Label, Outgoing, Request, Wanted,
        register_backend,
    },
};

/// What happens on one rank before it sends anything in a collective, in place of it, or after it has sent half.
pub type Fault = fn(rank: usize, stage: Stage, sequence: u64);

/// How far a collective is on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It has sent nothing.
    Begun,
    /// It has sent half.
    HalfSent,
}

#[derive(Debug)]
struct Tacit {
    guard: Option<Guard>,
    rank: usize,
    fault: Fault,
    /// By rank: the connections for collectives and for messages. A rank has none to itself.
    calls: BTreeMap<usize, Mutex<Link>>,
    letters: BTreeMap<usize, Mutex<Link>>,
    /// Messages that no receive has taken.
    post: Mutex<VecDeque<(u64, Arrived)>>,
}

/// A stream of frames.
#[derive(Debug)]
struct Link {
    stream: TcpStream,
    arrived: Vec<u8>,
    unsent: VecDeque<u8>,
}

impl Link {
    fn new(stream: TcpStream) -> Mutex<Link> {
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        Mutex::new(Link { stream, arrived: Vec::new(), unsent: VecDeque::new() })
    }

    /// Moves bytes. That the peer is gone is nothing to speak of.
    fn turn(&mut self) {
        let (unsent, _) = self.unsent.as_slices();
        if !unsent.is_empty()
            && let Ok(bytes) = self.stream.write(unsent)
        {
            self.unsent.drain(..bytes);
        }
        let mut chunk = [0; 65536];
        match self.stream.read(&mut chunk) {
            Ok(bytes) => self.arrived.extend_from_slice(&chunk[..bytes]),
            Err(error) => {
                let known = [ErrorKind::WouldBlock, ErrorKind::ConnectionReset];
                assert!(known.contains(&error.kind()), "{error}");
            }
        }
    }

    fn push(&mut self, frame: &[u8]) {
        self.unsent.extend((frame.len() as u32).to_le_bytes());
        self.unsent.extend(frame);
    }

    fn pop(&mut self) -> Option<Vec<u8>> {
        let len = u32::from_le_bytes(*self.arrived.first_chunk()?) as usize;
        let frame = self.arrived.get(4..4 + len)?.to_vec();
        self.arrived.drain(..4 + len);
        Some(frame)
    }
}

/// Registers the backend under `name`, with a guard or without.
pub fn register(name: &str, is_guarded: bool, fault: Fault) {
    register_backend(name, move |options| {
        let tacit = Tacit::connect(options, is_guarded, fault)?;
        Ok(Arc::new(tacit) as Arc<dyn Backend>)
    })
    .unwrap();
}

/// Nothing happens.
pub fn no_fault(_: usize, _: Stage, _: u64) {}

impl Tacit {
    fn connect(options: &BackendOptions, is_guarded: bool, fault: Fault) -> Result<Tacit> {
        let own = options.rank;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        options.store.set(&format!("address/{own}"), address.as_bytes())?;
        let mut links = [BTreeMap::new(), BTreeMap::new()];
        for peer in 0..own {
            let address = options.store.get(&format!("address/{peer}"))?;
            for (kind, links) in links.iter_mut().enumerate() {
                let mut stream = TcpStream::connect(str::from_utf8(&address).unwrap()).unwrap();
                stream.write_all(&[own as u8, kind as u8]).unwrap();
                links.insert(peer, Link::new(stream));
            }
        }
        for _ in 0..2 * (options.world_size - own - 1) {
            let (mut stream, _) = listener.accept().unwrap();
            let mut hello = [0; 2];
            stream.read_exact(&mut hello).unwrap();
            links[usize::from(hello[1])].insert(hello[0].into(), Link::new(stream));
        }
        let guard = is_guarded.then(|| options.guard()).transpose()?;
        let [calls, letters] = links;
        Ok(Tacit { guard, rank: own, fault, calls, letters, post: Mutex::default() })
    }

    /// Tries until there is a result, or until the guard says that there will be none.
    fn wait<T>(&self, mut attempt: impl FnMut() -> Option<T>) -> Result<T, Cause> {
        loop {
            if let Some(result) = attempt() {
                return Ok(result);
            }
            if let Some(guard) = &self.guard {
                guard.check()?;
            }
            thread::yield_now();
        }
    }

    /// Sends `own` to all ranks, and returns what each has sent.
    fn exchange(&self, own: &[u8], half_sent: impl Fn()) -> Result<Vec<Vec<u8>>, Cause> {
        let links = self.calls.values();
        for (number, link) in links.clone().enumerate() {
            if number == self.calls.len() / 2 {
                half_sent();
            }
            let mut link = link.lock().unwrap();
            link.push(own);
            link.turn();
        }
        let mut frames: BTreeMap<usize, Vec<u8>> = BTreeMap::from([(self.rank, own.to_vec())]);
        self.wait(|| {
            for (peer, link) in &self.calls {
                let mut link = link.lock().unwrap();
                link.turn();
                if !frames.contains_key(peer)
                    && let Some(frame) = link.pop()
                {
                    frames.insert(*peer, frame);
                }
            }
            let all_sent = || links.clone().all(|link| link.lock().unwrap().unsent.is_empty());
            (frames.len() > self.calls.len() && all_sent()).then_some(())
        })?;
        Ok(frames.into_values().collect())
    }
}

impl Backend for Tacit {
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
        let call = request.call;
        (self.fault)(self.rank, Stage::Begun, call.sequence());
        let own = if request.input.is_empty() { &*request.data } else { request.input };
        let half_sent = || (self.fault)(self.rank, Stage::HalfSent, call.sequence());
        let all = self.exchange(own, half_sent)?;
        let fits = |bytes: &[u8]| match bytes.len() == request.data.len() {
            true => Ok(()),
            false => Err(Cause::Backend { problem: "lengths differ".to_owned() }),
        };
        match call.collective() {
            Collective::AllReduce => {
                let inputs: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
                call.reduce(&inputs, request.data)?;
            }
            Collective::Broadcast => {
                let root = &all[call.root().unwrap()];
                fits(root)?;
                request.data.copy_from_slice(root);
            }
            Collective::AllGather => {
                let whole = all.concat();
                fits(&whole)?;
                request.data.copy_from_slice(&whole);
            }
            Collective::Barrier => {}
            other => panic!("{} is not needed here", other.name()),
        }
        Ok(())
    }

    fn has_messages(&self) -> bool {
        true
    }

    fn send(&self, message: &Outgoing<'_>) -> Result<(), Cause> {
        let frame = [&message.tag.to_le_bytes()[..], &message.label.0, message.bytes].concat();
        let link = &self.letters[&message.to];
        link.lock().unwrap().push(&frame);
        self.wait(|| {
            let mut link = link.lock().unwrap();
            link.turn();
            link.unsent.is_empty().then_some(())
        })
    }

    fn recv(&self, wanted: &Wanted) -> Result<Arrived, Cause> {
        self.wait(|| {
            for (from, link) in &self.letters {
                let mut link = link.lock().unwrap();
                link.turn();
                while let Some(frame) = link.pop() {
                    let (tag, rest) = frame.split_first_chunk().unwrap();
                    let (label, bytes) = rest.split_first_chunk().unwrap();
                    let letter =
                        Arrived { from: *from, label: Label(*label), bytes: bytes.to_vec() };
                    self.post.lock().unwrap().push_back((u64::from_le_bytes(*tag), letter));
                }
            }
            let mut post = self.post.lock().unwrap();
            let is_wanted = |(tag, letter): &(u64, Arrived)| {
                *tag == wanted.tag && wanted.from.is_none_or(|from| from == letter.from)
            };
            let at = post.iter().position(is_wanted)?;
            post.remove(at).map(|(_, letter)| letter)
        })
    }

    fn abort(&self, _: &CollectiveError) {}

    fn shutdown(&self, _: Instant) -> Result<(), Cause> {
        self.exchange(&[], || {}).map(drop)
    }
}

/// The cause of a failed call.
pub fn cause_of(error: impl Into<Error>) -> Cause {
    super::failure(error).cause
}
