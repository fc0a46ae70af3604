//! A rank that starts up: it runs the code of `drumline_engine::start_up`, and virtual actions answer its
//! questions.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::{Duration, Instant},
};

use drumline_engine::{
    deadline,
    membership::{GlobalRanks, Membership},
    recorder::Recorder,
    start_up::{
        Answer, Ask, Desk, Dialled, Failure, Outside, Step, Steps,
        board::Board,
        card::Card,
        claim::{self, Joining, WORLD, process_key},
        meet::Attempt,
        memory::{self, Offer},
        mesh,
        watch::{Processes, Watch},
    },
    transport::Channel,
};
use drumline_schedule::{Topology, step::Rank};
use drumline_store::store::tcp::protocol::{Key, READY, Request, Value};

use super::{
    action::{Action, Bytes, Want},
    mesh::Sees,
};
use crate::{
    scenario::Scenario,
    time::{Nanos, TIMEOUT, WARN_AFTER},
};

/// How a rank starts up: its place in the job, and its groups.
#[derive(Clone, Debug)]
pub(super) struct RankPlan {
    pub(super) rank: Rank,
    pub(super) host_of: Vec<usize>,
    launched: bool,
    /// For each group, the streams between hosts and whether ranks share memory.
    groups: Vec<(usize, bool)>,
}

impl RankPlan {
    pub(super) fn new(job: &Scenario, rank: Rank) -> RankPlan {
        let groups = if job.world_size > 6 { 1 } else { job.groups.len() };
        let groups = job.groups[..groups].iter();
        let groups = groups.map(|it| (it.streams, it.slot_bytes.is_some())).collect();
        RankPlan { rank, host_of: job.host_of.clone(), launched: job.launched, groups }
    }

    /// Whether hosts are copies of one virtual machine: so in every other scenario.
    fn has_copies(&self) -> bool {
        self.host_of.len().is_multiple_of(2)
    }

    fn boot(&self) -> String {
        format!("host-{}", if self.has_copies() { 0 } else { self.host_of[self.rank] })
    }

    pub(super) fn sees(&self, other: Rank) -> Sees {
        match self.host_of.get(other) == self.host_of.get(self.rank) {
            true => Sees::Near,
            false if self.has_copies() => Sees::Copy,
            false => Sees::Elsewhere,
        }
    }

    /// Whether all ranks are on one host.
    pub(super) fn is_alone(&self) -> bool {
        (0..self.host_of.len()).all(|other| self.sees(other) == Sees::Near)
    }

    /// Whether all ranks see when the process of one ends.
    pub(super) fn sees_all(&self) -> bool {
        (0..self.host_of.len()).all(|other| self.sees(other) != Sees::Copy)
    }

    /// Whether that rank hosts the store.
    pub(super) fn hosts_store(&self, rank: Rank) -> bool {
        rank == 0 && !self.launched
    }

    fn sign(&self, reaches_out: bool) -> String {
        let tcp = if reaches_out { " tcp" } else { "" };
        format!("{} net {}{tcp}", self.boot(), self.rank)
    }

    fn card(&self) -> Card {
        let unix = Some(format!("mesh-{}", self.rank));
        Card { boot: self.boot(), network: "net".to_owned(), uid: 1, unix }
    }

    /// Checks what the rank has learned during its start-up.
    pub(super) fn check(&self, joined: &Joined, secret: &[u8]) -> Result<(), String> {
        if !self.launched && joined.secret != secret {
            return Err("has another secret than rank 0".to_owned());
        }
        let others = (0..self.host_of.len()).filter(|other| *other != self.rank);
        let (near, far): (Vec<Rank>, Vec<Rank>) =
            others.partition(|other| self.host_of[*other] == self.host_of[self.rank]);
        let far: BTreeMap<Rank, String> =
            far.into_iter().map(|rank| (rank, address(rank))).collect();
        for ((_, shares), group) in self.groups.iter().zip(&joined.groups) {
            let expected = match shares {
                true => Topology::placed(self.host_of.iter().copied()),
                false => Topology::placed(0..self.host_of.len()),
            };
            if group.hosts != expected.ranks_by_host() {
                return Err(format!("takes the hosts to be {:?}", group.hosts));
            }
            if group.near != near || group.far != far {
                return Err(format!("reaches {:?} and {:?}", group.near, group.far));
            }
            if group.life != format!("drumline/{}/{}", group.name, ticket(0)) {
                return Err(format!("is part of {}", group.life));
            }
        }
        match joined.groups.len() == self.groups.len() {
            true => Ok(()),
            false => Err("is in too few groups".to_owned()),
        }
    }
}

/// What a rank has learned when it has started up.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) secret: Vec<u8>,
    groups: Vec<JoinedGroup>,
}

#[derive(Debug)]
struct JoinedGroup {
    name: String,
    life: String,
    near: Vec<Rank>,
    far: BTreeMap<Rank, String>,
    hosts: Vec<Vec<Rank>>,
}

/// Why the store gave no answer.
#[derive(Clone, Debug)]
pub(super) struct NoAnswer(String);

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A simulated process. A stream to a peer carries nothing.
#[derive(Debug)]
pub(super) struct Process;

impl Outside for Process {
    type Error = NoAnswer;
    type Stream = ();
}

/// How the start-up of a rank ends.
pub(super) type Outcome = Result<Joined, Failure<NoAnswer>>;

/// Starts a rank up: from its first request to the store to its last group.
async fn start_up(desk: Desk<Process>, plan: RankPlan) -> Outcome {
    let (rank, world_size) = (plan.rank, plan.host_of.len());
    let timeout = Duration::from_nanos(TIMEOUT);
    let (rank_zero_hosts, ticket_bytes) = (!plan.launched, [rank as u8; 32]);
    let joining = Joining { rank, world_size, rank_zero_hosts, timeout, ticket: ticket_bytes };
    joining.run(&desk).await?;
    // With a launcher, ranks have the secret already.
    let secret = match plan.launched {
        true => Vec::new(),
        false => claim::agree_on_secret(&desk, &[rank as u8; 32]).await?,
    };
    let mut groups = Vec::new();
    for (number, settings) in plan.groups.iter().enumerate() {
        let member =
            Membership::new(&number.to_string(), (rank, world_size), GlobalRanks::default());
        let keys = (0..world_size).map(|rank| process_key(WORLD, rank)).collect();
        let processes = Processes { keys, join: number == 0, stay: plan.launched };
        let watch = Watch::new(&member, processes);
        let attempt = Attempt {
            member: &member,
            ticket: &ticket(rank),
            deadline: deadline::after(desk.now(), timeout),
            warn_after: Duration::from_nanos(WARN_AFTER),
            watch: &watch,
            recorder: &Recorder::of(&member.name, rank),
        };
        let board = attempt.run(&desk).await?;
        match connect(&desk, &board, *settings).await {
            Ok(group) => groups.push(group),
            Err(failure) => {
                board.fail(&desk, &failure.text(&member), failure.culprit()).await;
                return Err(failure);
            }
        }
        board.leave(&desk).await;
    }
    Ok(Joined { secret, groups })
}

async fn connect(
    desk: &Desk<Process>,
    board: &Board,
    (streams, shares): (usize, bool),
) -> Result<JoinedGroup, Failure<NoAnswer>> {
    let mesh = mesh::connect(desk, board, streams).await?;
    let near: Vec<Rank> = mesh.near.iter().map(|(rank, _)| *rank).collect();
    let wanted = shares && !near.is_empty();
    let offer = Offer { near: &near, wanted, node: None, alike: &[], prices: "prices" };
    let (_, topology) = memory::share(desk, board, offer).await?;
    let text = |addresses: Vec<_>| addresses.iter().map(ToString::to_string).collect::<String>();
    Ok(JoinedGroup {
        name: board.member().name.clone(),
        life: board.prefix().to_owned(),
        near,
        far: mesh.far.into_iter().map(|(rank, at)| (rank, text(at))).collect(),
        hosts: topology.ranks_by_host().to_vec(),
    })
}

/// The number that a real rank would draw at random.
fn ticket(rank: Rank) -> String {
    format!("number-of-{rank}")
}

/// The address at which a rank listens for ranks of other hosts.
fn address(rank: Rank) -> String {
    format!("10.0.{}.{}:4000", rank / 256, rank % 256)
}

/// Keeps the actions of a rank at fixed addresses, because a wait borrows its keys.
#[derive(Debug, Default)]
pub(super) struct Kept(OnceCell<Box<(Action, Kept)>>);

impl Kept {
    fn push(&self, action: Action) -> (&Action, &Kept) {
        let kept = self.0.get_or_init(|| Box::new((action, Kept::default())));
        (&kept.0, &kept.1)
    }
}

/// A rank that is starting up.
#[derive(Debug)]
pub(super) struct RunningRank<'p> {
    plan: &'p RankPlan,
    steps: Steps<'p, Process, Outcome>,
    /// The question that the current action answers.
    asked: Option<Ask>,
    kept: &'p Kept,
    /// Why the store no longer answers.
    lost: Option<NoAnswer>,
    /// Whether its sign is reached from other networks.
    reaches_out: bool,
    pub(super) result: Option<Outcome>,
}

/// How an action of a rank ended.
#[derive(Debug)]
pub(super) enum Ended {
    Got(Vec<u8>),
    Missing(Vec<Bytes>),
    Dialled(bool),
    Came(Vec<(Rank, Channel)>),
    Signs {
        reached: BTreeSet<String>,
        closed: BTreeSet<String>,
    },
    /// The store is lost.
    Lost(String),
}

impl<'p> RunningRank<'p> {
    pub(super) fn new(plan: &'p RankPlan, kept: &'p Kept, now: Instant) -> RunningRank<'p> {
        let steps = Steps::new(now, |desk| start_up(desk, plan.clone()));
        RunningRank { plan, steps, asked: None, kept, lost: None, reaches_out: false, result: None }
    }

    /// The first action.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        nanos: &dyn Fn(Instant) -> Nanos,
    ) -> Option<&'p Action> {
        let step = self.steps.begin();
        self.follow(step, now, nanos)
    }

    /// The action after one that ended with `ended`; `None` when the rank has started up or failed.
    pub(super) fn next(
        &mut self,
        ended: Ended,
        now: Instant,
        nanos: &dyn Fn(Instant) -> Nanos,
    ) -> Option<&'p Action> {
        let Some(asked) = self.asked.take() else { unreachable!("an action answers a question") };
        let answer = match ended {
            Ended::Lost(problem) => {
                self.lost = Some(NoAnswer(problem.clone()));
                Err(NoAnswer(problem))
            }
            ended => Ok(answer(&asked, ended)),
        };
        let step = self.steps.answer(answer, now);
        self.follow(step, now, nanos)
    }

    fn follow(
        &mut self,
        mut step: Step<Outcome>,
        now: Instant,
        nanos: &dyn Fn(Instant) -> Nanos,
    ) -> Option<&'p Action> {
        loop {
            let question = match step {
                Step::Over(result) => {
                    self.result = Some(result);
                    return None;
                }
                Step::Ask(question) => question,
            };
            let at_once = match &question {
                Ask::Open(_) => Some(Answer::Done),
                Ask::Sign { reaches_out } => {
                    self.reaches_out |= *reaches_out;
                    let sign = self.plan.sign(self.reaches_out);
                    Some(Answer::Words(vec![sign.into_bytes()]))
                }
                Ask::Card => Some(Answer::Words(vec![self.plan.card().to_string().into_bytes()])),
                Ask::Reach { peer, .. } => {
                    let is_here = self.plan.host_of[*peer] == self.plan.host_of[self.plan.rank];
                    Some(Answer::Number(is_here.into()))
                }
                Ask::Listen(_) => Some(Answer::Words(vec![address(self.plan.rank).into_bytes()])),
                Ask::MakeMemory | Ask::MapMemory => Some(Answer::Memory(Ok(()))),
                _ => None,
            };
            let asks_store = !matches!(
                question,
                Ask::Dial { .. } | Ask::Accept(_) | Ask::Pause(_) | Ask::Leave(_) | Ask::Look(_)
            );
            step = match (at_once, &self.lost) {
                (Some(answer), _) => self.steps.answer(Ok(answer), now),
                (None, Some(lost)) if asks_store => self.steps.answer(Err(lost.clone()), now),
                (None, _) => {
                    if matches!(question, Ask::Leave(_)) {
                        self.lost = None;
                    }
                    let action = action(self.plan, &question, nanos);
                    self.asked = Some(question);
                    let (action, kept) = self.kept.push(action);
                    self.kept = kept;
                    return Some(action);
                }
            };
        }
    }
}

/// The action that answers a question.
fn action(plan: &RankPlan, question: &Ask, nanos: &dyn Fn(Instant) -> Nanos) -> Action {
    let slash = |key: &String| format!("/{key}").into_bytes();
    let keys = |keys: &[String]| keys.iter().map(|key| Bytes(slash(key))).collect::<Vec<_>>();
    let duration = |time: &Duration| time.as_nanos() as Nanos;
    let get = |keys| Action::Wait { keys, wants: Want::Values, patience: TIMEOUT };
    // A request without a reply. The answer to the ping behind it shows that it was carried out.
    let tell = |request| Action::ask(&[request, Request::Ping(7)], TIMEOUT);
    let ask = |request| Action::ask(&[request], TIMEOUT);
    match question {
        Ask::Set(key, value) => tell(Request::Set(Key(&slash(key)), Value(value))),
        Ask::SetAll(pairs) => {
            let slashed: Vec<_> = pairs.iter().map(|(key, _)| slash(key)).collect();
            let pairs = slashed.iter().zip(pairs);
            let pairs = pairs.map(|(key, (_, value))| (Key(key), Value(value)));
            tell(Request::MultiSet(pairs.collect()))
        }
        Ask::Get(key) => get(keys(std::slice::from_ref(key))),
        Ask::GetAll(all) => get(keys(all)),
        Ask::CompareSet { key, expected, desired } => {
            ask(Request::CompareSet(Key(&slash(key)), Value(expected), Value(desired)))
        }
        Ask::Add(key, amount) => ask(Request::Add(Key(&slash(key)), *amount)),
        Ask::Delete(key) => ask(Request::DeleteKey(Key(&slash(key)))),
        Ask::Check(key) => ask(Request::Check(vec![Key(&slash(key))])),
        Ask::Wait(all, limit) => {
            Action::Wait { keys: keys(all), wants: Want::Nothing, patience: duration(limit) }
        }
        Ask::Assemble { limit, first, last } => Action::Join {
            key: Bytes(b"init/".to_vec()),
            adds: i64::from(*first),
            all: plan.host_of.len() as i64,
            looks: plan.rank == 0 && !plan.launched,
            must: *last,
            patience: duration(limit),
        },
        Ask::Look(signs) => Action::Look(signs.clone()),
        Ask::Dial { peer, channel, .. } => {
            Action::Dial { from: plan.rank, to: *peer, channel: *channel, patience: TIMEOUT }
        }
        Ask::Accept(until) => Action::Accept { rank: plan.rank, until: nanos(*until) },
        Ask::Pause(time) | Ask::Leave(time) => Action::Pause(duration(time)),
        Ask::Open(_)
        | Ask::Sign { .. }
        | Ask::Card
        | Ask::Reach { .. }
        | Ask::Listen(_)
        | Ask::MakeMemory
        | Ask::MapMemory => unreachable!("answered at once"),
    }
}

/// The answer to a question whose action ended with `ended`.
fn answer(question: &Ask, ended: Ended) -> Answer<()> {
    match (question, ended) {
        (_, Ended::Missing(keys)) => {
            let text = |key: Bytes| String::from_utf8_lossy(&key.0[1..]).into_owned();
            Answer::Missing(keys.into_iter().map(text).collect())
        }
        (_, Ended::Signs { reached, closed }) => Answer::Signs { reached, closed },
        (_, Ended::Dialled(true)) => Answer::Dialled(Dialled::Open(())),
        (_, Ended::Dialled(false)) => {
            Answer::Dialled(Dialled::Closed("connection refused".to_owned()))
        }
        (_, Ended::Came(all)) => {
            Answer::Came(all.into_iter().map(|(rank, channel)| (rank, channel, ())).collect())
        }
        (Ask::Get(_) | Ask::GetAll(_) | Ask::CompareSet { .. }, Ended::Got(got)) => {
            Answer::Words(values(&got))
        }
        (Ask::Add(..), Ended::Got(got)) => {
            Answer::Number(got.try_into().map_or(0, i64::from_le_bytes))
        }
        (Ask::Check(_), Ended::Got(got)) => Answer::Number((got == [READY]).into()),
        _ => Answer::Done,
    }
}

/// The values of a reply, each behind its length.
fn values(mut reply: &[u8]) -> Vec<Vec<u8>> {
    let mut values = Vec::new();
    while let Some((length, rest)) = reply.split_first_chunk() {
        let Some((value, rest)) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)
        else {
            break;
        };
        values.push(value.to_vec());
        reply = rest;
    }
    values
}
