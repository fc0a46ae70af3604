//! Connects to peers on other hosts. This rank calls a peer when it first needs it, and accepts peers
//! whenever they call.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write as _},
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause,
    membership::Membership,
    transport::{Bundle, Channel, Control, Duplex, Opening, is_silence},
};
use drumline_schedule::step::Rank;
use drumline_store::{
    auth::{Handshake, Level, Nonce, Secret},
    net::{
        call::CallError,
        dial::Dial,
        gate::Gate,
        poll::{self, Deadline},
        stream::Stream,
    },
    store::Store,
};
use rustix::{event::epoll, io::Errno};

use super::{
    greeting::{expect, hello, stream_of},
    stream::PeerStream,
};
use crate::{Config, Error, Result, board::Board, progress_thread::Linger};

/// Calls peers on other hosts, and lets in peers that call. It never blocks.
#[derive(Debug)]
pub(crate) struct Far {
    member: Membership,
    secret: Option<Secret>,
    level: Level,
    /// The addresses at which the peers listen.
    addresses: BTreeMap<Rank, Vec<SocketAddr>>,
    gates: Vec<Gate>,
    /// Readable when [`Far::progress`] has something to do.
    epoll: Arc<OwnedFd>,
    calls: BTreeMap<Rank, Call>,
    /// The streams of peers that have called and have not opened all of their streams.
    arriving: BTreeMap<Rank, Opening<PeerStream>>,
    /// How many streams carry the messages of collectives to each peer.
    data_streams: usize,
    /// How long a call may go on without success.
    patience: Duration,
    /// The store in which the ranks have met, while the group uses it, and what the keys of this life begin with. Ranks that
    /// lose each other say there that they live.
    place: (Weak<dyn Store>, String),
    /// Whether peers whose connections broke have said so, and until when they may.
    lives: BTreeMap<Rank, (Instant, Arc<AtomicBool>)>,
}

/// How a call ended, or which peer has called.
#[derive(Debug)]
pub(super) enum Met {
    /// This rank has called the peer, which has answered.
    Called(Rank, Bundle<PeerStream>),
    /// The peer has called this rank.
    Came(Rank, Bundle<PeerStream>),
    /// If `refused`, the peer's host says that nothing listens there.
    Unreachable { rank: Rank, cause: Cause, refused: bool },
    /// Its host says that nothing listens there, and the peer says elsewhere that it lives.
    Lives(Rank),
}

/// A peer that is being called.
#[derive(Debug)]
struct Call {
    give_up: Instant,
    /// Whether the peer must also prove itself until then: it is called because its connection broke.
    again: bool,
    lines: Vec<(Channel, Line)>,
    opening: Opening<PeerStream>,
    /// How the peer last hung up.
    hung_up: Option<CallError>,
}

#[derive(Debug)]
enum Line {
    Dialling(Box<Dial>),
    Open,
    /// To be dialled at this time. If the peer has hung up before, strangers may have crowded it.
    Again {
        at: Instant,
    },
}

/// The longest that a call may go on: time for the kernel to repeat a lost packet three times.
const PATIENCE_MAX: Duration = Duration::from_secs(10);

/// The same for a peer whose connection broke: time to repeat one lost packet.
const LOOK_MAX: Duration = Duration::from_secs(2);

/// How long a peer whose connection broke, and whose host says that nothing listens, may take to say that it lives.
const LIVES_WITHIN: Duration = Duration::from_millis(300);

/// How long to wait before a peer that has hung up is dialled again.
const PAUSE: Duration = Duration::from_millis(10);

/// The keys of gates in the set count down from this one. The key of a call is its rank.
const LAST_GATE: u64 = u64::MAX;

/// Events that are looked at in one turn. The next turn sees the others.
const EVENTS_MAX: usize = 64;

impl Far {
    /// Listens for calls of peers.
    ///
    /// # Errors
    ///
    /// The process has no descriptor left.
    pub(super) fn new(
        member: &Membership,
        config: &Config,
        addresses: BTreeMap<Rank, Vec<SocketAddr>>,
        gates: Vec<Gate>,
        board: &Board,
    ) -> Result<Far> {
        let failed = |error: Errno| Error::io("cannot wait for peers", error);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        for (gate, key) in gates.iter().zip((0..=LAST_GATE).rev()) {
            let key = epoll::EventData::new_u64(key);
            epoll::add(&epoll, gate, key, epoll::EventFlags::IN).map_err(failed)?;
        }
        Ok(Far {
            member: member.clone(),
            secret: config.secret.clone(),
            level: config.security,
            addresses,
            gates,
            epoll: Arc::new(epoll),
            calls: BTreeMap::new(),
            arriving: BTreeMap::new(),
            data_streams: config.streams,
            patience: PATIENCE_MAX.min(config.timeout / 2),
            place: (Arc::downgrade(board.store()), board.prefix().to_owned()),
            lives: BTreeMap::new(),
        })
    }

    /// Readable when [`Far::progress`] has something to do. Call that at [`Far::deadline`], too.
    pub(super) fn readiness(&self) -> Arc<OwnedFd> {
        self.epoll.clone()
    }

    /// Whether calls are under way.
    pub(super) fn is_calling(&self) -> bool {
        !self.calls.is_empty()
    }

    /// When [`Far::progress`] has something to do even if nothing arrives.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let gates = self.gates.iter().filter_map(Gate::deadline);
        let calls = self.calls.values().filter_map(Call::deadline);
        gates.chain(calls).min()
    }

    /// Begins to call a peer, if `again` only to learn whether it lives. The result comes from [`Far::progress`].
    pub(super) fn call(&mut self, rank: Rank, again: bool, now: Instant) {
        let patience = if again { self.patience.min(LOOK_MAX) } else { self.patience };
        if again {
            self.ask_elsewhere(rank, now);
        }
        let channels = Opening::<PeerStream>::channels(self.data_streams);
        let lines = channels.map(|channel| (channel, Line::Again { at: now })).collect();
        let opening = Opening::new(self.data_streams);
        let give_up = now + patience;
        self.calls.insert(rank, Call { give_up, again, lines, opening, hung_up: None });
    }

    /// Says where the ranks have met that this one lives, and asks whether `rank` says so: a firewall may refuse connections
    /// in the name of its host.
    fn ask_elsewhere(&mut self, rank: Rank, now: Instant) {
        if self.lives.contains_key(&rank) {
            return;
        }
        let (own, lives) = (self.member.rank, Arc::<AtomicBool>::default());
        self.lives.insert(rank, (now + LIVES_WITHIN, lives.clone()));
        let (store, prefix) = self.place.clone();
        // The store may be slow, or gone.
        let ask = move || {
            let Some(store) = store.upgrade() else { return };
            let key = |of, lost| format!("{prefix}/lives/{of}/{lost}");
            let said = store.set(&key(own, rank), b"");
            let heard = said.and_then(|()| store.wait(&[&key(rank, own)], LIVES_WITHIN));
            lives.store(heard.is_ok(), Ordering::Relaxed);
        };
        let asking = thread::Builder::new().name("drumline-lives".to_owned()).spawn(ask);
        drop(
            asking.inspect_err(
                |error| tracing::debug!(%error, "nobody asks whether rank {rank} lives"),
            ),
        );
    }

    /// Whether a peer whose connection broke has said that it lives. `None`: it still may.
    fn lives(&self, rank: Rank, now: Instant) -> Option<bool> {
        let (until, lives) = self.lives.get(&rank)?;
        let lives = lives.load(Ordering::Relaxed);
        (lives || now >= *until).then_some(lives)
    }

    /// Accepts peers and goes on with calls. Ends calls to ranks for which `is_calling` is false.
    pub(super) fn progress(&mut self, is_calling: impl Fn(Rank) -> bool, now: Instant) -> Vec<Met> {
        let mut met = Vec::new();
        let touched = self.hear(&mut met, now);
        self.calls.retain(|rank, _| is_calling(*rank));
        let is_due = |rank: &Rank, call: &Call| {
            touched.contains(rank) || call.deadline().is_some_and(|due| now >= due)
        };
        let due = self.calls.iter().filter(|(rank, call)| is_due(rank, call));
        for rank in due.map(|(rank, _)| *rank).collect::<Vec<_>>() {
            let Some(mut call) = self.calls.remove(&rank) else { continue };
            match self.go_on(rank, &mut call, now) {
                Ok(()) => match call.opening.take() {
                    Some(streams) => met.push(Met::Called(rank, streams)),
                    None => drop(self.calls.insert(rank, call)),
                },
                Err(unreachable) => met.push(unreachable),
            }
        }
        met
    }

    /// Accepts peers, and returns the ranks whose calls can go on.
    fn hear(&mut self, met: &mut Vec<Met>, now: Instant) -> BTreeSet<Rank> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        if let Err(error) = poll::wait_events(&*self.epoll, &mut events, Deadline::Now) {
            tracing::warn!(%error, "cannot wait for peers of other hosts");
        }
        let mut arrivals = Vec::new();
        for gate in &mut self.gates {
            match gate.admit(now) {
                Ok(more) => arrivals.extend(more),
                Err(error) => tracing::warn!(%error, "cannot accept connections of peers"),
            }
        }
        for arrival in arrivals {
            let Some(hello) = arrival.hello else { continue };
            let (rank, channel) = (hello.rank, hello.channel);
            let mut opening = self.addresses.contains_key(&rank).then(|| {
                let arriving = self.arriving.entry(rank);
                arriving.or_insert_with(|| Opening::new(self.data_streams))
            });
            let place = opening.as_mut().and_then(|it| it.place(stream_of(channel)?));
            let Some(place) = place else {
                tracing::warn!(rank, ?channel, "turned a connection away that is not expected");
                continue;
            };
            *place = Some(PeerStream(arrival.stream));
            if let Some(streams) = opening.and_then(|opening| opening.take()) {
                self.arriving.remove(&rank);
                watch(rank, &streams.control);
                met.push(Met::Came(rank, streams));
            }
        }
        events.iter().map(|event| event.data.u64() as Rank).collect()
    }

    fn go_on(&self, rank: Rank, call: &mut Call, now: Instant) -> Result<(), Met> {
        let addresses = self.addresses.get(&rank).map_or(&[][..], Vec::as_slice);
        // Spread the streams over the peer's addresses. Each rank begins with another address.
        let addresses = addresses.iter().cycle().skip(self.member.rank % addresses.len().max(1));
        let Call { give_up, again, .. } = *call;
        for ((channel, line), address) in call.lines.iter_mut().zip(addresses) {
            let before = call.hung_up.as_ref();
            let failed = |error: CallError| unreachable(rank, *address, &error, before);
            if let Line::Again { at } = line
                && now >= *at
            {
                let dial = self.dial(rank, *address, *channel).map_err(failed)?;
                *line = Line::Dialling(Box::new(dial));
            }
            let Line::Dialling(dial) = line else { continue };
            let wrote = dial.writes();
            match dial.progress() {
                Ok(true) => {
                    // The stream moves from this set to that of the transport.
                    let _ = epoll::delete(&self.epoll, &**dial);
                    if let Line::Dialling(dial) = std::mem::replace(line, Line::Again { at: now }) {
                        let stream = dial.into_stream().map_err(|error| failed(error.into()))?;
                        if *channel == Channel::Control {
                            watch(rank, &stream);
                        }
                        if let Some(place) = call.opening.place(*channel) {
                            *place = Some(PeerStream(stream));
                        }
                        *line = Line::Open;
                    }
                }
                Ok(false) if (again || dial.is_connecting()) && now >= give_up => {
                    return Err(failed(io::Error::from(io::ErrorKind::TimedOut).into()));
                }
                Ok(false) if wrote != dial.writes() => {
                    let (writes, key) = (dial.writes(), epoll::EventData::new_u64(rank as u64));
                    let flags = if writes { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
                    epoll::modify(&self.epoll, &**dial, key, flags)
                        .map_err(|error| failed(io::Error::from(error).into()))?;
                }
                Ok(false) => {}
                Err(error @ CallError::HungUp(_)) if now < give_up => {
                    call.hung_up = Some(error);
                    *line = Line::Again { at: now + PAUSE };
                }
                Err(error) => {
                    let met = failed(error);
                    if !again || !matches!(met, Met::Unreachable { refused: true, .. }) {
                        return Err(met);
                    }
                    match self.lives(rank, now) {
                        Some(true) => return Err(Met::Lives(rank)),
                        Some(false) => return Err(met),
                        None => *line = Line::Again { at: now + PAUSE },
                    }
                }
            }
        }
        Ok(())
    }

    fn dial(&self, rank: Rank, address: SocketAddr, channel: Channel) -> Result<Dial, CallError> {
        let nonce = Nonce::random().map_err(|error| io::Error::other(error.to_string()))?;
        let (hello, expected) =
            (hello(&self.member, channel), expect(&self.member, rank..rank + 1));
        let handshake = Handshake::call(hello, expected, self.secret.clone(), nonce).at(self.level);
        let dial = Dial::begin(address, handshake, self.secret.is_some())?;
        let key = epoll::EventData::new_u64(rank as u64);
        epoll::add(&self.epoll, &dial, key, epoll::EventFlags::OUT).map_err(io::Error::from)?;
        Ok(dial)
    }
}

impl AsFd for Far {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Call {
    /// When to go on with the call even if nothing arrives.
    fn deadline(&self) -> Option<Instant> {
        let lines = self.lines.iter().filter_map(|(_, line)| match line {
            Line::Dialling(dial) if self.again || dial.is_connecting() => Some(self.give_up),
            Line::Again { at } => Some(*at),
            Line::Dialling(_) | Line::Open => None,
        });
        lines.min()
    }
}

/// Makes the kernel end the connection when the peer's host no longer answers.
fn watch(rank: Rank, control: &Stream) {
    if let Err(error) = control.watch_host() {
        tracing::warn!(rank, %error, "it will not be noticed if its host falls silent");
    }
}

fn unreachable(
    rank: Rank,
    address: SocketAddr,
    error: &CallError,
    before: Option<&CallError>,
) -> Met {
    let refused =
        matches!(error, CallError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused);
    let advice = match error {
        CallError::Refused(_) => "",
        CallError::Io(error) if is_silence(error) => {
            "; is the host down, or does a firewall stand between?"
        }
        CallError::Io(_) | CallError::HungUp(_) => {
            "; its process has probably ended: look at what it printed last"
        }
    };
    let before = before.map_or_else(String::new, |error| format!(" (before that, {error})"));
    let problem = format!("at {address}: {error}{before}{advice}");
    Met::Unreachable { rank, cause: Cause::Unreachable { peer: rank, problem }, refused }
}

/// What is left of a group that this rank has dropped. For a while it tells callers why the group has gone.
#[derive(Debug)]
pub(crate) struct Lingering {
    far: Far,
    word: Control,
    /// The streams of peers that were told. Closing them at once could lose the message.
    told: Vec<Bundle<PeerStream>>,
    until: Instant,
}

/// How long callers are told.
const LINGER: Duration = Duration::from_secs(5);

impl Lingering {
    pub(super) fn new(far: Far, word: Control) -> Lingering {
        Lingering { far, word, told: Vec::new(), until: Instant::now() + LINGER }
    }
}

impl Linger for Lingering {
    fn progress(&mut self, now: Instant) -> bool {
        for met in self.far.progress(|_| true, now) {
            // A peer that this rank was just calling may wait for it already.
            if let Met::Came(rank, mut streams) | Met::Called(rank, mut streams) = met {
                let ended = [streams.data.end(), streams.points.end()];
                let told = streams.control.write_all(&self.word.encode());
                if let Some(error) = ended.into_iter().chain([told]).find_map(Result::err) {
                    tracing::debug!(rank, %error, "called and did not wait for the answer");
                }
                self.told.push(streams);
            }
        }
        now < self.until
    }

    fn news(&self) -> (Instant, Arc<OwnedFd>) {
        let far = self.far.deadline().map_or(self.until, |at| at.min(self.until));
        (far, self.far.readiness())
    }
}
