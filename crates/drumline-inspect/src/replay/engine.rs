//! The event loop of a replay: takes the events of all ranks in the order of time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use drumline_schedule::price::Link;
use drumline_schedule::step::Rank;

use super::cluster::{Cluster, Method, Outcome};
use super::hosts::{Hosts, of_bytes};
use super::program::{PricedStep, Program};

pub(super) struct Engine<'a> {
    cluster: &'a Cluster,
    hosts: Hosts<'a>,
    ranks: Vec<Player>,
    /// Ordered by time, then by the order in which they were pushed.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// The number of events so far.
    count: u64,
    /// The time at which the last rank ended each call.
    ends: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The rank continues.
    Go(u32),
    /// The first byte of a message reaches the line of the receiver's host.
    AtLine(Message),
    /// The first byte of a message reaches its receiver.
    Deliver(Message),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Message {
    from: u32,
    to: u32,
    bytes: u64,
    /// The earliest time at which its last byte has arrived.
    whole_at: u64,
    /// Messages and posts in the longest chain that ends with it.
    depth: u32,
}

/// The state of one rank.
struct Player {
    program: Program,
    call: usize,
    /// Index of the turn, in this call. Without lags a turn is a piece.
    turn: usize,
    op: usize,
    /// The neighbours whose posts it has seen at the beginning of this turn.
    entered: usize,
    /// Messages and posts in the longest chain that it has seen, in this turn.
    depth: u32,
    /// Whether it waits for a message of the current run of receives.
    receiving: bool,
    /// Incomplete receives of the run.
    open: usize,
    /// For each sender, the number of messages of the run that have not arrived.
    wanted: ByRank<u32>,
    /// Messages of the run that have begun to arrive.
    ready: VecDeque<Message>,
    /// For each sender, messages of later steps.
    early: ByRank<VecDeque<Message>>,
    /// The time at which each message leaves its source, for each piece that is under way.
    left: Vec<Vec<u64>>,
    /// The time at which neighbours see each post, and its depth.
    posts: Vec<(u64, u32)>,
    /// The ranks that wait for its next post.
    waiting: Vec<u32>,
    grip: Grip,
    /// The time up to which it has run without a look at other ranks.
    busy_until: u64,
}

/// Whether a rank holds its core, which it may share with other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grip {
    Has,
    /// It waits for a post, so another rank may take the core.
    Waits,
    /// The same, and the rank on the core may continue first.
    LetPass,
}

/// When a rank can continue.
enum Progress {
    Now,
    At(u64),
    /// At this time, on its core, with no other rank in between.
    OnCore(u64),
    /// When an event wakes it.
    Blocked,
}

impl<'a> Engine<'a> {
    /// An engine in which every rank makes `calls` calls, one right after another.
    pub(super) fn new(cluster: &'a Cluster, programs: Vec<Program>, calls: usize) -> Engine<'a> {
        let ranks: Vec<Player> = programs.into_iter().map(Player::new).collect();
        let mut engine = Engine {
            cluster,
            hosts: Hosts::new(cluster),
            ranks,
            events: BinaryHeap::new(),
            count: 0,
            ends: vec![0; calls],
        };
        for rank in 0..engine.ranks.len() {
            let (_, end) = engine.hosts.work(rank, 0, cluster.prices.call_ps);
            engine.go(rank, end);
        }
        engine
    }

    /// Runs the replay to its end. The time of the outcome is the mean of the calls after the first `before`.
    pub(super) fn run(mut self, before: usize) -> Outcome {
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            match event {
                Event::Go(rank) => self.go(rank as Rank, now),
                Event::AtLine(message) => {
                    let to = message.to as Rank;
                    let (start, end) = self.hosts.line_in(to, now, message.bytes);
                    let whole_at = message.whole_at.max(end);
                    self.push(start, Event::Deliver(Message { whole_at, ..message }));
                }
                Event::Deliver(message) => self.deliver(message, now),
            }
        }
        let depth = self.ranks.iter().map(|rank| rank.depth).max().unwrap_or(0);
        let end_of = |calls: usize| calls.checked_sub(1).map_or(0, |last| self.ends[last]);
        let calls = self.ends.len();
        Outcome {
            time_ps: (end_of(calls) - end_of(before)) / (calls - before) as u64,
            line_bytes: self.hosts.line_bytes() / calls as u64,
            rounds: depth as usize,
            events: self.count,
            method: Method::Replay,
        }
    }

    fn push(&mut self, at: u64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((at, self.count, event)));
    }

    /// Lets the rank do what it can do now.
    fn go(&mut self, rank: Rank, now: u64) {
        // Something may have happened while it worked.
        let mut now = now.max(self.ranks[rank].busy_until);
        loop {
            match self.step(rank, now) {
                Progress::Now => {}
                Progress::At(at) if at <= now => {}
                Progress::OnCore(at) => {
                    now = at;
                    self.ranks[rank].busy_until = at;
                }
                Progress::At(at) => return self.push(at, Event::Go(rank as u32)),
                Progress::Blocked => return,
            }
        }
    }

    fn step(&mut self, rank: Rank, now: u64) -> Progress {
        if let Some(turn) = self.enter(rank, now) {
            return turn;
        }
        let (op, piece) = self.ranks[rank].next_op();
        if !matches!(op, Some(PricedStep::Wait { .. }))
            && let Some(turn) = self.take_core(rank, now)
        {
            return turn;
        }
        let Some(op) = op else { return self.end_of_turn(rank, now) };
        let walker = &mut self.ranks[rank];
        match op {
            PricedStep::Work { core_ps, memory_bytes } => {
                walker.op += 1;
                let (start, end) = self.hosts.work(rank, now, core_ps);
                match memory_bytes {
                    0 => Progress::OnCore(end),
                    _ => Progress::At(end.max(self.hosts.memory(rank, start, memory_bytes))),
                }
            }
            PricedStep::Send { to, bytes, number } => {
                walker.op += 1;
                let (end, left) = self.send(rank, to, bytes, now);
                self.ranks[rank].note_left(piece, number, left);
                Progress::At(end)
            }
            PricedStep::Recv { .. } | PricedStep::RecvAlone { .. } => self.receive(rank, now),
            PricedStep::Flush { sent } => {
                walker.op += 1;
                sent.map_or(Progress::Now, |sent| Progress::At(walker.left_at(piece, sent)))
            }
            PricedStep::Post => {
                walker.op += 1;
                let seen = now.saturating_add(self.cluster.prices.post_ps);
                walker.posts.push((seen, walker.depth + 1));
                for waiter in std::mem::take(&mut walker.waiting) {
                    self.push(seen, Event::Go(waiter));
                }
                Progress::Now
            }
            PricedStep::Wait { peer, upto } => {
                let number = walker.turns_begun() * walker.program.posts + upto as usize;
                let turn = self.seen(rank, peer, number, now);
                if !matches!(turn, Progress::Blocked) {
                    self.ranks[rank].op += 1;
                }
                turn
            }
        }
    }

    /// Waits at the beginning of a turn until each neighbour has begun the turn before. `None` if there is
    /// nothing to wait for.
    fn enter(&mut self, rank: Rank, now: u64) -> Option<Progress> {
        let walker = &self.ranks[rank];
        let (turn, posts, entered) = (walker.turns_begun(), walker.program.posts, walker.entered);
        let neighbours = self.cluster.topology.neighbours(rank);
        if walker.op > 0 || turn == 0 || posts == 0 || entered == neighbours.len() {
            return None;
        }
        let peer = neighbours[entered];
        let progress = match peer == rank {
            true => Progress::Now,
            false => self.seen(rank, peer as u32, (turn - 1) * posts + 1, now),
        };
        if !matches!(progress, Progress::Blocked) {
            let walker = &mut self.ranks[rank];
            walker.entered += 1;
            // A chain is counted within a turn.
            walker.depth = 0;
        }
        Some(progress)
    }

    /// Waits for post `number` of `peer`, counted from 1 and over all turns.
    fn seen(&mut self, rank: Rank, peer: u32, number: usize, now: u64) -> Progress {
        match self.ranks[peer as usize].posts.get(number - 1).copied() {
            Some((seen, depth)) if seen <= now => {
                let walker = &mut self.ranks[rank];
                walker.depth = walker.depth.max(depth);
                Progress::Now
            }
            Some((seen, _)) => {
                self.ranks[rank].grip = Grip::Waits;
                self.push(seen, Event::Go(rank as u32));
                Progress::Blocked
            }
            None => {
                self.ranks[rank].grip = Grip::Waits;
                self.ranks[peer as usize].waiting.push(rank as u32);
                Progress::Blocked
            }
        }
    }

    /// Gives a core to a rank that has waited. The rank needs the core for the work after a post, but not for
    /// looking at the post.
    fn take_core(&mut self, rank: Rank, now: u64) -> Option<Progress> {
        let grip = self.ranks[rank].grip;
        let waits = |rank: Rank| self.ranks[rank].grip != Grip::Has;
        match grip {
            Grip::Has => None,
            // If both ranks can go on, the core need not change.
            Grip::Waits if self.hosts.in_place_of(rank).is_some_and(waits) => {
                self.ranks[rank].grip = Grip::LetPass;
                self.push(now, Event::Go(rank as u32));
                Some(Progress::Blocked)
            }
            Grip::Waits | Grip::LetPass => {
                self.ranks[rank].grip = Grip::Has;
                Some(Progress::OnCore(self.hosts.work(rank, now, 0).1))
            }
        }
    }

    /// Sends a message. Returns the times at which the sender is done, and at which the message has left.
    fn send(&mut self, rank: Rank, to: u32, bytes: u64, now: u64) -> (u64, u64) {
        let (link, near) = self.link(rank, to as Rank);
        let begin_ps = link.message_ps / 2;
        let (start, end) = self.hosts.work(rank, now, self.half_of_message(rank, link, bytes));
        let walker = &mut self.ranks[rank];
        let mut message =
            Message { from: rank as u32, to, bytes, whole_at: 0, depth: walker.depth + 1 };
        let (first, last) = match near {
            true => (start + begin_ps, end),
            false => {
                let (first, last) = self.hosts.line_out(rank, start + begin_ps, bytes);
                (first, last.max(end))
            }
        };
        message.whole_at = last.saturating_add(link.round_ps);
        let event = if near { Event::Deliver(message) } else { Event::AtLine(message) };
        self.push(first.saturating_add(link.round_ps), event);
        (end, last)
    }

    fn deliver(&mut self, message: Message, now: u64) {
        let walker = &mut self.ranks[message.to as usize];
        match walker.wanted.get_mut(&message.from).filter(|wanted| **wanted > 0) {
            Some(wanted) => {
                *wanted -= 1;
                walker.ready.push_back(message);
                if std::mem::take(&mut walker.receiving) {
                    self.go(message.to as Rank, now);
                }
            }
            None => walker.early.entry(message.from).or_default().push_back(message),
        }
    }

    /// Takes the message of the run at hand that came first.
    fn receive(&mut self, rank: Rank, now: u64) -> Progress {
        let walker = &mut self.ranks[rank];
        if walker.open == 0 {
            walker.begin_run();
        }
        let Some(message) = walker.ready.pop_front() else {
            walker.receiving = true;
            return Progress::Blocked;
        };
        walker.depth = walker.depth.max(message.depth);
        walker.open -= 1;
        walker.op += 1;
        let (link, _) = self.link(message.from as Rank, rank);
        let end_ps = link.message_ps - link.message_ps / 2;
        let (_, end) = self.hosts.work(rank, now, self.half_of_message(rank, link, message.bytes));
        Progress::At(end.max(message.whole_at.saturating_add(end_ps)))
    }

    fn end_of_turn(&mut self, rank: Rank, now: u64) -> Progress {
        let walker = &mut self.ranks[rank];
        walker.turn += 1;
        (walker.op, walker.entered) = (0, 0);
        if walker.turn < walker.program.turns() {
            return Progress::Now;
        }
        let end = &mut self.ends[walker.call];
        *end = now.max(*end);
        if walker.call + 1 == self.ends.len() {
            return Progress::Blocked;
        }
        walker.call += 1;
        (walker.turn, walker.depth) = (0, 0);
        Progress::OnCore(self.hosts.work(rank, now, self.cluster.prices.call_ps).1)
    }

    /// The work for a message at one end, in picoseconds.
    fn half_of_message(&self, rank: Rank, link: Link, bytes: u64) -> u64 {
        let Program { windows, working_bytes, .. } = self.ranks[rank].program;
        // The kernel keeps a copy, so the working set is twice as large.
        let byte_fs =
            link.byte.of(working_bytes.saturating_mul(2), self.cluster.prices.cache_bytes);
        link.message_ps.saturating_mul(windows) / 2 + of_bytes(bytes, byte_fs) / 2
    }

    /// The link between two ranks, and whether they are on one host.
    fn link(&self, one: Rank, other: Rank) -> (Link, bool) {
        let Cluster { machines, prices, .. } = self.cluster;
        match machines.host_of(one) == machines.host_of(other) {
            true => (prices.near, true),
            false => (prices.far, false),
        }
    }
}

impl Player {
    fn new(program: Program) -> Player {
        Player {
            left: vec![vec![]; program.depth + 1],
            program,
            call: 0,
            turn: 0,
            op: 0,
            entered: 0,
            depth: 0,
            receiving: false,
            open: 0,
            wanted: ByRank::default(),
            ready: VecDeque::new(),
            early: ByRank::default(),
            posts: vec![],
            waiting: vec![],
            grip: Grip::Has,
            busy_until: 0,
        }
    }

    /// The turns of all calls before the current turn.
    fn turns_begun(&self) -> usize {
        self.call * self.program.turns() + self.turn
    }

    /// Goes on to the next step that has something to do in this turn. Returns the step and its piece.
    fn next_op(&mut self) -> (Option<PricedStep>, usize) {
        let end = self.program.last.len();
        let found = (self.op..end).find_map(|op| Some((op, self.op_here(op)?)));
        self.op = found.map_or(end, |(op, _)| op);
        found.map_or((None, 0), |(_, (step, piece))| (Some(step), piece))
    }

    /// A step and its piece, if it has something to do in this turn.
    fn op_here(&self, op: usize) -> Option<(PricedStep, usize)> {
        let piece = self.program.piece_of(op, self.turn)?;
        Some((self.program.op(op, piece)?, piece))
    }

    /// Notes when a message of a piece leaves its source.
    fn note_left(&mut self, piece: usize, number: u32, at: u64) {
        let (places, number) = (self.left.len(), number as usize);
        let left = &mut self.left[piece % places];
        left.resize(left.len().max(number + 1), 0);
        left[number] = at;
    }

    fn left_at(&self, piece: usize, number: u32) -> u64 {
        let left = &self.left[piece % self.left.len()];
        left.get(number as usize).copied().unwrap_or(0)
    }

    /// Consecutive receives may complete in any order.
    fn begin_run(&mut self) {
        let rest = (self.op..self.program.last.len()).map_while(|op| match self.program.last[op] {
            PricedStep::Recv { from } => Some(self.op_here(op).map(|_| from)),
            _ => None,
        });
        let run: Vec<u32> = match self.program.last[self.op] {
            PricedStep::RecvAlone { from } => vec![from],
            _ => rest.flatten().collect(),
        };
        self.open = run.len();
        self.wanted.clear();
        for from in run {
            match self.early.get_mut(&from).and_then(VecDeque::pop_front) {
                Some(message) => self.ready.push_back(message),
                None => *self.wanted.entry(from).or_default() += 1,
            }
        }
    }
}

/// A map with a fast hash, because there are millions of look-ups. No attacker chooses the ranks.
type ByRank<V> = HashMap<u32, V, BuildHasherDefault<RankHasher>>;

#[derive(Default)]
struct RankHasher(u64);

impl Hasher for RankHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, rank: u32) {
        // Fibonacci hashing: 2^64 divided by the golden ratio.
        self.0 = (self.0 ^ u64::from(rank)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
