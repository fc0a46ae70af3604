//! How a group is made: who is who, how peers are reached, and which neighbours share memory.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Instant,
};

use drumline_engine::{
    choice, deadline,
    host::Host,
    lane::Lane,
    membership::{GlobalRanks, Membership},
    start_up::{
        Answer, Ask,
        board::Subject,
        claim,
        memory::{self, Alike, Offer},
        watch::Processes,
    },
};
use drumline_schedule::{Collective, Topology, price::PriceList, step::Rank};
use drumline_shm::{Cores, PeerSegment, PidFd, Segment, SegmentSize, handover};
use drumline_store::{
    net::stream::Stream,
    store::{HashStore, PrefixStore, Store},
};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    at_exit,
    drive::Driven,
    family::{Family, FamilyCell},
    foreign::{Carried, Foreign},
    guard::Wardens,
    process_group::{Carrier, Inner, ProcessGroup},
};
use crate::{
    Config, Error, Result,
    algorithms::{PriceSource, SumOrder},
    backend,
    board::Board,
    error::not_connected_to,
    prices::probe,
    start_up::{Origin, Outlook, WHY_COMES},
    trace::{GroupTrace, Inquiry},
    transport::{
        Sockets,
        mesh::{self, Mesh, Near},
    },
};

/// All ranks of a group in this process, for tests and examples. Use each of them on its own thread.
///
/// # Errors
///
/// [`Argument`](crate::ErrorKind::Argument) for a world of no ranks; [`Io`](crate::ErrorKind::Io) or
/// [`Connect`](crate::ErrorKind::Connect) when sockets are not available.
pub fn local_world(world_size: usize) -> Result<Vec<ProcessGroup>> {
    local_world_with(world_size, &Config::default())
}

/// Like [`local_world`], with settings.
///
/// # Errors
///
/// As for [`local_world`].
pub fn local_world_with(world_size: usize, config: &Config) -> Result<Vec<ProcessGroup>> {
    if world_size == 0 {
        return Err(Error::argument("local_world", "a world needs at least one rank"));
    }
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    std::thread::scope(|threads| {
        let connecting: Vec<_> = (0..world_size)
            .map(|rank| {
                let store = store.clone();
                threads.spawn(move || connect("local", store, rank, world_size, config))
            })
            .collect();
        let connected = connecting.into_iter().map(|thread| match thread.join() {
            Ok(group) => group,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        connected.collect()
    })
}

/// Connects the ranks that share `store` to a group.
///
/// Blocks until all `world_size` ranks have called it with the same `name`. All ranks may destroy the group and
/// connect again under the same name, also after a failure. Connections and shared memory are new each time.
///
/// # Errors
///
/// [`Argument`](crate::ErrorKind::Argument) when `rank` is not below `world_size`; otherwise the error of the store
/// or of the sockets. The time limit is [`Config::timeout`].
pub fn connect(
    name: &str,
    store: Arc<dyn Store>,
    rank: Rank,
    world_size: usize,
    config: &Config,
) -> Result<ProcessGroup> {
    if rank >= world_size {
        return Err(Error::argument(
            "connect",
            format!("rank {rank} does not exist in a world of {world_size}; ranks count from 0"),
        ));
    }
    let family = Arc::new(Family::new(name, store));
    let place = (rank, world_size);
    ProcessGroup::join_first(family, name, place, GlobalRanks::default(), config)
}

impl ProcessGroup {
    /// A group of one rank. Every collective completes at once. So the same program runs with and without a launcher.
    pub fn alone() -> ProcessGroup {
        let name = "alone";
        let family = Arc::new(Family::new(name, Arc::new(HashStore::new())));
        let member = Membership::new(name, (0, 1), GlobalRanks::default());
        let sockets = Sockets::new(&member, Vec::new(), None);
        let recorder = GroupTrace::of(&member.name, 0);
        let (topology, config) = (Topology::flat(1), Config::default());
        let group = sockets.and_then(|sockets| {
            ProcessGroup::new(member, topology, sockets, None, family, &config, recorder)
        });
        match group {
            Ok(group) => group,
            Err(error) => unreachable!("a world of one needs two descriptors: {error}"),
        }
    }

    /// Connects the ranks of the first group of a family.
    pub(super) fn join_first(
        family: Arc<Family>,
        name: &str,
        place: (Rank, usize),
        global: GlobalRanks,
        config: &Config,
    ) -> Result<ProcessGroup> {
        ProcessGroup::join(family.clone(), name, place, global, config, None).inspect_err(|error| {
            family.note(error);
            family.leave(WHY_COMES);
        })
    }

    /// Connects the ranks of one group of a family. It may be made from the group `origin`.
    pub(super) fn join(
        family: Arc<Family>,
        name: &str,
        place: (Rank, usize),
        global: GlobalRanks,
        config: &Config,
        origin: Option<Arc<dyn Origin>>,
    ) -> Result<ProcessGroup> {
        if let Some(name) = &config.all_reduce {
            choice::find(Collective::AllReduce, name)?; // refused before anything starts
        }
        let prices = config.prices.load()?;
        let foreign = backend::find(config.backend.as_deref())?;
        if foreign.is_none() && config.sum_order == SumOrder::Backend {
            return Err(Error::setting(
                "sum_order (DRUMLINE_SUM_ORDER)",
                "`backend` leaves sums to a foreign backend, and this group has none: name one \
                          (DRUMLINE_BACKEND=mpi), or write rank or placement"
                    .to_owned(),
            ));
        }
        let deadline = deadline::after(Instant::now(), config.timeout);
        let seen = family.seen.clone();
        let failure = seen.newest();
        let mut member = Membership { seen: seen.clone(), ..Membership::new(name, place, global) };
        // Groups made from this one write to the same trace file.
        let own = member.global.of(member.rank);
        let trace = config.trace.clone().map(|trace| trace.of_rank(own));
        let config = &Config { trace, ..config.clone() };
        let recorder = GroupTrace::start(config.trace.as_ref(), name, member.rank)?;
        let processes = family.processes(&member);
        let phase = recorder.phase("join");
        let outlook = Outlook::new(config, origin);
        let (board, inquiry) =
            Board::meet(&member, &family.store, processes, deadline, outlook, &recorder)?;
        drop(phase);
        // Ranks on a foreign backend do not compare their settings.
        let order = if foreign.is_some() { config.sum_order as u8 } else { 0 };
        let size = member.world_size.to_le_bytes();
        member.digest = xxh3_64(&[board.token(), &size, &[order]].concat());
        let told = (recorder, inquiry);
        if member.name == family.root {
            family.have_met(board.prefix());
        }
        let slots = segment_size(config);
        let joined = match foreign {
            None => {
                let word = config.prices.word(&prices);
                let connected =
                    ProcessGroup::join_on(&board, member, config, slots, &word, deadline, told);
                connected.and_then(|(member, topology, sockets, host, recorder)| {
                    // Groups made from this one choose by the same prices.
                    let given = PriceSource::Given(Box::new(prices.clone()));
                    let settled = &Config { prices: given, ..config.clone() };
                    let links = topology.clone();
                    let group = ProcessGroup::new(
                        member, topology, sockets, host, family, settled, recorder,
                    )?;
                    match config.prices {
                        PriceSource::Measure => group.measure(&links, &board, &prices),
                        _ => Ok(group),
                    }
                })
            }
            Some(factory) => {
                let wardens = wardens(&board, &member, config, deadline);
                let joined = factory.join(&board, &member, config, deadline, wardens.clone(), told);
                joined.map(|(backend, recorder)| {
                    let carried = Carried { backend, name: &factory.name, guard: wardens.made() };
                    ProcessGroup::on_backend(carried, member, family, config, recorder)
                })
            }
        };
        match &joined {
            Ok(_) => board.leave(),
            Err(error) => board.fail(error),
        }
        if joined.is_ok() && failure > 0 {
            seen.go_on(failure);
        }
        joined
    }

    /// Connects the ranks that have met on `board`.
    fn join_on(
        board: &Board,
        member: Membership,
        config: &Config,
        size: SegmentSize,
        prices: &str,
        deadline: Instant,
        (mut recorder, inquiry): (GroupTrace, Inquiry),
    ) -> Result<(Membership, Topology, Sockets, Option<Host>, GroupTrace)> {
        let phase = recorder.phase("connect");
        let Mesh { near, far } = mesh::connect(&member, board, config, deadline)?;
        drop(phase);
        let phase = recorder.phase("share memory");
        let (segments, topology) = share_memory(board, &near, config, size, prices, deadline)?;
        drop(phase);
        // All ranks have come, and each has said on which host it is.
        recorder.align(&board.store_of_life(), inquiry)?;
        recorder.join(&member);
        let near = near.into_iter().map(|peer| {
            let process = process_of(&peer);
            (peer, process)
        });
        let mut sockets = Sockets::new(&member, near.collect(), far)?;
        let segments = match segments {
            // The rank is alone on its host, but ranks of other hosts share memory. It needs a segment of its
            // own to take part in their schedules.
            None if topology.ranks_by_host().len() < member.world_size => {
                let own = Segment::create(size).map_err(Error::memory)?;
                Some((own, BTreeMap::new()))
            }
            segments => segments,
        };
        let host = match segments {
            Some((own, neighbours)) => {
                sockets.add_doorbell(own.doorbell())?;
                Some(Host::new(own, neighbours))
            }
            None => None,
        };
        Ok((member, topology, sockets, host, recorder))
    }

    fn new(
        member: Membership,
        topology: Topology,
        sockets: Sockets,
        host: Option<Host>,
        family: Arc<Family>,
        config: &Config,
        recorder: GroupTrace,
    ) -> Result<ProcessGroup> {
        tracing::info!(
            group = member.name,
            rank = member.rank,
            world_size = member.world_size,
            hosts = topology.ranks_by_host().len(),
            memory_nodes = topology.ranks_by_node().len(),
            "group is connected"
        );
        let arena = host.as_ref().map(|host| host.arena().clone());
        let family = Arc::new(Mutex::new(Some(family)));
        let links = (topology, sockets, host);
        let driven = put_on_lane(&member, links, family.clone(), config, &recorder)?;
        Ok(ProcessGroup::whole(Arc::new(Inner {
            member,
            config: config.clone(),
            family,
            carrier: Carrier::Lane(driven),
            arena,
            recorder,
        })))
    }

    /// Rank 0 measures how fast connections are, and all ranks choose algorithms by that result. If all ranks
    /// share memory, no algorithm uses connections, and nothing is measured.
    fn measure(
        mut self,
        topology: &Topology,
        board: &Board,
        prices: &PriceList,
    ) -> Result<ProcessGroup> {
        let Some(peer) = probe::peer(topology) else { return Ok(self) };
        let mut measured = String::new();
        if self.rank() == 0 {
            measured = probe::ask(&self, peer, prices)?.to_string();
        } else if self.rank() == peer {
            probe::answer(&self, 0)?;
        }
        let told = board.all_gather(Subject::Prices, measured.as_bytes())?;
        let told: PriceList = String::from_utf8_lossy(&told[0]).parse().map_err(|error| {
            not_connected_to(
                &self.inner.member,
                0,
                &format!("it has measured what is no price: {error}"),
            )
        })?;
        if let Carrier::Lane(driven) = &self.inner.carrier {
            driven.set_prices(told.links(topology))?;
        }
        tracing::info!(group = self.name(), links = ?told.links(topology), "measured its links");
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.config.prices = PriceSource::Given(Box::new(told));
        }
        Ok(self)
    }

    /// The same, on a foreign backend.
    fn on_backend(
        carried: Carried<'_>,
        member: Membership,
        family: Arc<Family>,
        config: &Config,
        recorder: GroupTrace,
    ) -> ProcessGroup {
        let family = Arc::new(Mutex::new(Some(family)));
        let foreign =
            Foreign::new(carried, member.clone(), config.timeout, recorder.clone(), family.clone());
        ProcessGroup::whole(Arc::new(Inner {
            member,
            config: config.clone(),
            family,
            carrier: Carrier::Backend(foreign),
            arena: None,
            recorder,
        }))
    }
}

/// Puts a lane on the connections of a group.
fn put_on_lane(
    member: &Membership,
    (topology, sockets, host): (Topology, Sockets, Option<Host>),
    family: FamilyCell,
    config: &Config,
    recorder: &GroupTrace,
) -> Result<Arc<Driven>> {
    let aborted = Arc::new(AtomicBool::new(false));
    let wake = (sockets.waker(), sockets.readiness());
    let door = sockets.door();
    let transport = Box::new(sockets);
    let prices = config.prices.load()?.links(&topology);
    let settings = config.lane_settings();
    let lane = Lane::new(member.clone(), topology, &settings, transport, host, aborted.clone())
        .priced_by(prices)
        .recorded_by(recorder.recorder().clone());
    let limits = (member.clone(), settings.timeout);
    let driven = Driven::new(lane, wake, aborted, family, limits);
    if let Some(door) = door {
        driven.let_callers_in(door)?;
    }
    at_exit::remember(&driven);
    Ok(driven)
}

/// What connects the guard of a foreign group whose ranks have met on `board`.
fn wardens(board: &Board, member: &Membership, config: &Config, deadline: Instant) -> Arc<Wardens> {
    let store: Arc<dyn Store> =
        Arc::new(PrefixStore::new("guard", Arc::new(board.store_of_life())));
    // Its calls are short, and users know nothing of it.
    let config = Config {
        all_reduce: None,
        prices: PriceSource::Default,
        streams: 1,
        spread_over_cores: false,
        sum_order: SumOrder::Rank,
        trace: None,
        ..config.clone()
    };
    let own = member.clone();
    Arc::new(Wardens::new(member.clone(), deadline, move || {
        let recorder = GroupTrace::of(&format!("guard of {}", own.name), own.rank);
        let keys = (0..own.world_size).map(|rank| claim::process_key("guard", rank)).collect();
        let processes = Processes { keys, join: true, stay: false };
        let outlook = Outlook::new(&config, None);
        let (board, inquiry) = Board::meet(&own, &store, processes, deadline, outlook, &recorder)?;
        let member = Membership { digest: xxh3_64(board.token()), ..own.clone() };
        let size = SegmentSize { slot_bytes: 1, arena_bytes: 0 };
        let (word, told) = (config.prices.word(&PriceList::default()), (recorder, inquiry));
        let joined = ProcessGroup::join_on(&board, member, &config, size, &word, deadline, told);
        let driven = joined.and_then(|(member, topology, sockets, host, recorder)| {
            // The group itself keeps the store.
            let nobody = FamilyCell::default();
            put_on_lane(&member, (topology, sockets, host), nobody, &config, &recorder)
        });
        match &driven {
            Ok(_) => board.leave(),
            Err(error) => board.fail(error),
        }
        driven
    }))
}

/// A handle of the process of a peer on this host. It shows at once when the process ends.
fn process_of(peer: &Near) -> Option<PidFd> {
    let Stream::Unix(stream) = &*peer.streams.control else { return None };
    match PidFd::of_peer(stream) {
        Ok(process) => Some(process),
        Err(error) => {
            tracing::warn!(peer = peer.rank, %error, "its end is noticed by its connections only");
            None
        }
    }
}

type Segments = (Segment, BTreeMap<Rank, PeerSegment>);

/// Shares memory with all ranks of this host, or with none: then they use sockets. Also returns the topology, in which
/// a rank that shares no memory counts as a host of its own. All ranks must choose by the same `prices`.
fn share_memory(
    board: &Board,
    near: &[Near],
    config: &Config,
    size: SegmentSize,
    prices: &str,
    deadline: Instant,
) -> Result<(Option<Segments>, Topology)> {
    let near: Vec<(Rank, &_)> = near
        .iter()
        .filter_map(|peer| match &*peer.streams.control {
            Stream::Unix(stream) => Some((peer.rank, &**stream)),
            Stream::Tcp(_) | Stream::Secured(_) => None,
        })
        .collect();
    let ranks: Vec<Rank> = near.iter().map(|(rank, _)| *rank).collect();
    let wanted = config.shared_memory && !near.is_empty();
    // A rank that shares no memory needs no memory node.
    let of_this_thread = || Cores::of_this_thread().ok()?.memory_node();
    let node = wanted.then(|| config.memory_node.or_else(of_this_thread)).flatten();
    let alike = [
        ("security level", "DRUMLINE_SECURITY", config.security.to_string()),
        ("rounding", "DRUMLINE_ROUNDING", config.rounding.to_string()),
        ("order of sums", "DRUMLINE_SUM_ORDER", config.sum_order.name().to_owned()),
        ("window", "DRUMLINE_WINDOW_BYTES", config.window_bytes.to_string()),
    ];
    let alike = alike.map(|(what, variable, value)| Alike { what, variable, value });
    let offer = Offer { near: &ranks, wanted, node, alike: &alike, prices };
    let (mut made, mut mapped) = (None, None);
    let code = async |desk: &_, rules: &_| memory::share(desk, rules, offer).await;
    let (shared, topology) = board.run(code, |question| match question {
        Ask::MakeMemory => {
            let result = Segment::create(size).map(|own| made = Some(own));
            Ok(Answer::Memory(result.map_err(|error| error.to_string())))
        }
        Ask::MapMemory => {
            let Some(own) = &made else { unreachable!("only a rank with a segment maps others") };
            let result = exchange(own, &near, deadline).map(|peers| mapped = Some(peers));
            Ok(Answer::Memory(result.map_err(|error| error.to_string())))
        }
        question => board.ask(question),
    })?;
    let segments = shared.is_ok().then(|| made.zip(mapped)).flatten();
    Ok((segments, topology.with_rounding(config.rounding).with_order(config.sum_order)))
}

fn segment_size(config: &Config) -> SegmentSize {
    let size = SegmentSize::of_host();
    match config.registered_bytes_max {
        Some(bytes) => SegmentSize { arena_bytes: bytes, ..size },
        None => size,
    }
}

/// With more neighbours than this, their slots are mapped when they are first used. The kernel needs 0.2 ms for the
/// slots of one: with 256 ranks on a host, that would be 13 s of its processors.
const POPULATED_MAX: usize = 8;

/// Gives every neighbour this rank's segment, and maps theirs. After a failure it continues with the next
/// neighbour: every neighbour waits for a message, and what a neighbour has sent must not stay in the stream.
fn exchange(
    own: &Segment,
    near: &[(Rank, &std::os::unix::net::UnixStream)],
    deadline: Instant,
) -> drumline_shm::Result<BTreeMap<Rank, PeerSegment>> {
    let handles = own.handles();
    let send = |stream| match &handles {
        Ok(handles) => handover::send(stream, handles, deadline),
        Err(_) => handover::decline(stream, deadline),
    };
    let sent: Vec<_> = near.iter().map(|(_, stream)| send(stream)).collect();
    let receive = |stream| {
        let peer = PeerSegment::map(handover::receive(stream, deadline)?)?;
        if near.len() <= POPULATED_MAX {
            peer.populate();
        }
        Ok(peer)
    };
    let mapped: Vec<drumline_shm::Result<_>> =
        near.iter().map(|(rank, stream)| Ok((*rank, receive(stream)?))).collect();
    handles?;
    sent.into_iter().collect::<drumline_shm::Result<()>>()?;
    mapped.into_iter().collect()
}
