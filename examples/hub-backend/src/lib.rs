//! A small backend as a starting point for your own: every rank has one TCP connection to a hub in the
//! process of rank 0. All data between ranks passes through the hub.
//!
//! ```
//! use drumline::{Config, ReduceOp};
//!
//! hub_backend::register()?;
//! let config = Config::default().backend("hub");
//! drumline::train::local_with(3, &config, |group| {
//!     let mut data = [group.rank() as f32, 1.0];
//!     group.all_reduce(&mut data, ReduceOp::Sum)?;
//!     assert_eq!(data, [3.0, 3.0]);
//!     group.destroy()?;
//!     Ok(())
//! })?;
//! # Ok::<_, drumline::Error>(())
//! ```
//!
//! `hub` is the switch, `wire` has its frames, and this file is a rank's end: a thread sorts frames from
//! the hub into the inbox, where calls wait for them.

#![forbid(unsafe_code)]

mod hub;
mod wire;

use std::{
    collections::{BTreeSet, VecDeque},
    fs::File,
    io::{self, ErrorKind, Read},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Cause, CollectiveError, Reason, Result,
    backend::{
        Arrived, Backend, BackendOptions, Collective, Label, Outgoing, Request, Signature, Wanted,
        register_backend,
    },
};
use hub::TOKEN_BYTES;
use wire::{BODY_BYTES_MAX, Frame, Kind, NOBODY, join, number, split};

/// Makes the backend known as `hub`.
///
/// # Errors
///
/// None that can happen: see [`register_backend`].
pub fn register() -> Result<()> {
    register_backend("hub", |options| Ok(Arc::new(Rank::connect(options)?)))
}

/// One rank's end of a hub.
#[derive(Debug)]
struct Rank {
    rank: usize,
    world_size: usize,
    line: TcpStream,
    /// Held while a frame is written.
    writing: Mutex<()>,
    inbox: Arc<Inbox>,
}

#[derive(Debug, Default)]
struct Inbox {
    contents: Mutex<Contents>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Contents {
    /// The present call of this rank.
    call: Option<Signature>,
    answer: Option<Frame>,
    messages: VecDeque<Frame>,
    left: BTreeSet<usize>,
    fault: Option<Cause>,
}

/// The most messages in the inbox that no receive has asked for.
const WAITING_MAX: usize = 65_536;

/// After the time limit of a call: time for the hub to name the late ranks.
const GRACE: Duration = Duration::from_secs(2);

/// Time limit for a frame that makes no progress.
const PATIENCE: Duration = Duration::from_secs(30);

impl Rank {
    fn connect(options: &BackendOptions) -> Result<Rank> {
        let &BackendOptions { rank, world_size, deadline, .. } = options;
        let left =
            || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let failed = |error: io::Error| options.error(format!("the hub: {error}"));
        let opening = match rank {
            0 => {
                let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
                let address = options.config.bind_addresses.first().copied().unwrap_or(loopback);
                let listener = TcpListener::bind((address, 0)).map_err(failed)?;
                let mut token = [0; TOKEN_BYTES];
                File::open("/dev/urandom")
                    .and_then(|mut random| random.read_exact(&mut token))
                    .map_err(failed)?;
                let address = listener.local_addr().map_err(failed)?.to_string();
                options.store.set("hub", &[&token, address.as_bytes()].concat())?;
                Some(thread::spawn(move || hub::open(listener, token, world_size, deadline)))
            }
            _ => None,
        };
        options.store.wait(&["hub"], left())?;
        let place = options.store.get("hub")?;
        let (token, address) = place.split_at_checked(TOKEN_BYTES).unwrap_or_default();
        let address: SocketAddr = String::from_utf8_lossy(address)
            .parse()
            .map_err(|_| options.error("rank 0 left no address of a hub".to_owned()))?;
        let line = TcpStream::connect_timeout(&address, left())
            .and_then(|line| {
                line.set_nodelay(true)?;
                line.set_write_timeout(Some(PATIENCE))?;
                line.set_read_timeout(Some(left() + GRACE))?;
                Frame::new(Kind::Hello, rank, token).write(&line)?;
                Ok(line)
            })
            .map_err(failed)?;
        // The hub names the missing ranks.
        if let Some(Ok(opened)) = opening.map(thread::JoinHandle::join) {
            opened.map_err(failed)?;
        }
        let all_here = Frame::read(&line, 0).and_then(|_| line.set_read_timeout(None));
        all_here.map_err(failed)?;
        let inbox = Arc::new(Inbox::default());
        let (reader, sorted) = (line.try_clone().map_err(failed)?, inbox.clone());
        thread::spawn(move || sorted.sort(&reader, world_size));
        Ok(Rank { rank, world_size, line, writing: Mutex::default(), inbox })
    }

    fn send(&self, frame: &Frame) -> Result<(), Cause> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let Err(error) = frame.write(&self.line) else { return Ok(()) };
        // The thread that reads from the line will soon know why it ended.
        if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) {
            self.inbox.wait(Instant::now() + GRACE, |_| None::<()>)?;
        }
        Err(Cause::Disconnected { peer: 0, problem: error.to_string() })
    }

    /// Gives every rank its part; returns the part from every rank.
    fn exchange(&self, request: &Request<'_>, parts: &[&[u8]]) -> Result<Frame, Cause> {
        let (signature, deadline) = (request.call.signature(), request.call.deadline());
        self.inbox.lock().call = Some(signature);
        let body = [&signature.to_bytes()[..], &join(parts.iter().copied())].concat();
        self.send(&Frame::new(Kind::Call, self.rank, body))?;
        let answer = |state: &mut Contents| state.answer.take();
        if let Some(answer) = self.inbox.wait(deadline, answer)? {
            return Ok(answer);
        }
        self.send(&Frame::new(Kind::Late, self.rank, []))?;
        let answer = self.inbox.wait(deadline + GRACE, answer)?;
        answer.ok_or(Cause::Timeout { waiting_for: vec![0] })
    }
}

impl Backend for Rank {
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
        let (call, ranks) = (request.call, 0..self.world_size);
        let root = call.root().unwrap_or(0);
        let own = request.contribution();
        let parts: Vec<&[u8]> = match call.collective() {
            Collective::Reduce | Collective::Gather => {
                ranks.clone().map(|to| if to == root { own } else { &[] }).collect()
            }
            Collective::ReduceScatter | Collective::Scatter | Collective::AllToAll => {
                ranks.clone().map(|to| &own[call.input_block(to)]).collect()
            }
            // The same for all.
            _ => vec![own],
        };
        let answer = self.exchange(request, &parts)?;
        let parts = split(&answer.body);
        if parts.len() != self.world_size {
            let problem = "sent an answer that is cut short".to_owned();
            return Err(Cause::Protocol { peer: 0, problem });
        }
        match call.collective() {
            Collective::AllReduce | Collective::ReduceScatter => call.reduce(&parts, request.data),
            Collective::Reduce if call.is_root() => call.reduce(&parts, request.data),
            Collective::Broadcast | Collective::Scatter => {
                request.data.copy_from_slice(parts[root]);
                Ok(())
            }
            Collective::AllGather | Collective::Gather | Collective::AllToAll => {
                for (from, part) in ranks.zip(parts) {
                    let place = &mut request.data[call.data_block(from)];
                    if place.len() != part.len() {
                        let says = |bytes: usize| format!("{} of {bytes} bytes", call.signature());
                        let (theirs, ours) = (says(part.len()), says(place.len()));
                        return Err(Cause::Mismatch { peer: from, theirs, ours });
                    }
                    place.copy_from_slice(part);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn has_messages(&self) -> bool {
        true
    }

    fn send(&self, message: &Outgoing<'_>) -> Result<(), Cause> {
        let body = [&message.label.0, message.bytes].concat();
        let frame = Frame { number: message.tag, ..Frame::new(Kind::Message, message.to, body) };
        match message.to == self.rank {
            // Through the hub it might arrive after all other ranks have left.
            true => self.inbox.change(|state| state.take_in(frame)),
            false => self.send(&frame)?,
        }
        Ok(())
    }

    fn recv(&self, wanted: &Wanted) -> Result<Arrived, Cause> {
        let others: BTreeSet<usize> = match wanted.from {
            Some(from) => [from].into(),
            None => (0..self.world_size).filter(|rank| *rank != self.rank).collect(),
        };
        let is_here = |state: &mut Contents| {
            let fits = |frame: &Frame| {
                frame.number == wanted.tag && wanted.from.is_none_or(|from| from == frame.rank)
            };
            state.messages.remove(state.messages.iter().position(fits)?)
        };
        let all_gone = |state: &Contents| !others.is_empty() && state.left.is_superset(&others);
        let mut found = self.inbox.wait(wanted.deadline, |state| {
            let message = is_here(state);
            (message.is_some() || all_gone(state)).then_some(message)
        })?;
        if let (Some(None), None) = (&found, wanted.from) {
            // This rank may be about to send to itself.
            let until = wanted.deadline.min(Instant::now() + GRACE);
            found = Some(self.inbox.wait(until, is_here)?);
        }
        let ranks = others.into_iter().collect();
        let frame = match (found, wanted.from) {
            (Some(Some(frame)), _) => frame,
            (Some(None), Some(peer)) => return Err(Cause::PeerLeft { peer }),
            (Some(None), None) => {
                return Err(Cause::NobodyLeft { left: ranks, unreachable: Vec::new() });
            }
            (None, _) => return Err(Cause::Timeout { waiting_for: ranks }),
        };
        let Some((label, bytes)) = frame.body.split_first_chunk::<{ Label::BYTES }>() else {
            let problem = "sent a message without a label".to_owned();
            return Err(Cause::Protocol { peer: frame.rank, problem });
        };
        Ok(Arrived { from: frame.rank, label: Label(*label), bytes: bytes.to_vec() })
    }

    fn abort(&self, failure: &CollectiveError) {
        let (culprit, reason) = (failure.culprit(), failure.cause.reason());
        let text = failure.to_string();
        let frame = Frame::failed(self.rank, culprit, reason, &text);
        let fault = Cause::Reported { by: self.rank, culprit, reason, text };
        self.inbox.change(|state| {
            state.fault.get_or_insert(fault);
        });
        // If the hub is gone, the other ranks know of the failure.
        let _ = self.send(&frame);
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), Cause> {
        self.send(&Frame::new(Kind::Left, self.rank, []))?;
        let all = |state: &mut Contents| (state.left.len() == self.world_size).then_some(());
        match self.inbox.wait(deadline, all)? {
            Some(()) => Ok(()),
            None => {
                let left = &self.inbox.lock().left;
                let waiting_for = (0..self.world_size).filter(|rank| !left.contains(rank));
                Err(Cause::Timeout { waiting_for: waiting_for.collect() })
            }
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // A rank that panics does not leave in good order, so that its peers see it as dead.
        if !thread::panicking() && !self.inbox.lock().left.contains(&self.rank) {
            let _ = self.send(&Frame::new(Kind::Left, self.rank, []));
        }
        let _ = self.line.shutdown(Shutdown::Both);
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Contents)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `look` finds something, or the group has failed. `None`: not before `deadline`.
    fn wait<R>(
        &self,
        deadline: Instant,
        mut look: impl FnMut(&mut Contents) -> Option<R>,
    ) -> Result<Option<R>, Cause> {
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Ok(Some(found));
            }
            if let Some(fault) = &state.fault {
                return Err(fault.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sorts what comes from the hub, until nothing does any more.
    fn sort(&self, line: &TcpStream, world_size: usize) {
        while let Ok(frame) = Frame::read(line, BODY_BYTES_MAX) {
            self.change(|state| state.take_in(frame));
        }
        self.change(|state| {
            if state.left.len() < world_size {
                state.fault.get_or_insert(Cause::PeerExited { peer: 0 });
            }
        });
    }
}

impl Contents {
    fn take_in(&mut self, frame: Frame) {
        let peer = frame.rank;
        let fault = match frame.kind {
            Kind::Answer => return self.answer = Some(frame),
            Kind::Message if self.messages.len() < WAITING_MAX => {
                return self.messages.push_back(frame);
            }
            Kind::Left => {
                self.left.insert(peer);
                return;
            }
            Kind::Needed => Cause::PeerLeft { peer },
            Kind::Exited => Cause::PeerExited { peer },
            Kind::Missing => {
                let ranks = frame.body.chunks(4).map(|mut rank| number(&mut rank, 4) as usize);
                Cause::Timeout { waiting_for: ranks.collect() }
            }
            Kind::Mismatch => {
                let theirs = frame.body.first_chunk().and_then(Signature::from_bytes);
                let says = |it: Option<Signature>| it.map(|it| it.to_string()).unwrap_or_default();
                Cause::Mismatch { peer, theirs: says(theirs), ours: says(self.call) }
            }
            Kind::Failed => {
                let culprit = Some(frame.number).filter(|rank| *rank != NOBODY);
                let (reason, text) = frame.body.split_at_checked(1).unwrap_or_default();
                Cause::Reported {
                    by: peer,
                    culprit: culprit.map(|rank| rank as usize),
                    reason: Reason::from_code(reason.first().copied().unwrap_or(0)),
                    text: String::from_utf8_lossy(text).into_owned(),
                }
            }
            Kind::Message | Kind::Hello | Kind::Call | Kind::Late => {
                Cause::Protocol { peer: 0, problem: format!("sent a {:?} too many", frame.kind) }
            }
        };
        self.fault.get_or_insert(fault);
    }
}
