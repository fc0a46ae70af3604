//! Calls that devices carry out among themselves: by NCCL.
//!
//! NCCL tells nobody that a rank has died, that it makes another call, or that it makes none. So every call begins with
//! a round of words on the process group: what each rank calls. Calls that go through the host on such a group begin
//! so, too. The call is queued when all ranks have said the same. While it runs, the watcher looks whether a peer is
//! lost. Then the communicator is aborted, and the streams go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use drumline_device::fabric::{Call, Communicator, Fabric, Operator, Work};
use drumline_device::{Device, Event, Place, Stream};
use drumline_group::{Cause, DType, GroupOptions, ProcessGroup, Rank, ReduceOp, driving};

use crate::host_call::Operation;
use crate::operator::builtin;
use crate::{DeviceOptions, DeviceSlice, Error, Result, Wanted, error};

const OPERATION: &str = "DeviceGroup::new";

/// A group's end in the library that joins devices.
#[derive(Debug)]
pub(crate) struct Direct {
    fabric: Arc<dyn Fabric>,
    communicator: Arc<dyn Communicator>,
    /// Whether the program has asked for it, so that nothing goes another way unasked.
    is_wanted: bool,
}

/// A call that is carried out so, and how far it has come.
#[derive(Debug)]
pub(crate) struct DirectCall {
    call: Call,
    /// What is compared on all ranks.
    words: [u64; WORDS],
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Asked,
    Agreeing(Arc<Agreement>),
    Queued,
    Running(Arc<dyn Event>),
    Done,
}

impl Direct {
    /// The library, with its version.
    pub(crate) fn name(&self) -> String {
        self.fabric.name()
    }

    /// The call that carries out an operation. `None`: it goes through the host.
    ///
    /// # Errors
    ///
    /// What the library lacks, where it was asked for.
    pub(crate) fn call(
        &self,
        operation: &Operation,
        own: Rank,
        from: DeviceSlice,
        to: DeviceSlice,
    ) -> Result<Option<DirectCall>> {
        let dtype = from.dtype;
        let work = match operation {
            Operation::AllReduce(op) | Operation::Reduce(op, _) | Operation::ReduceScatter(op) => {
                match builtin(op) {
                    Some(op) => Work::Reduce(op),
                    None => return Ok(None),
                }
            }
            _ => Work::Move,
        };
        if let Err(problem) = self.fabric.supports(dtype, work) {
            let operation = operation.name();
            return match self.is_wanted {
                true => Err(Error::argument(operation, problem)),
                false => Ok(None),
            };
        }
        let made = made(operation, own, from.place, to.place, dtype);
        Ok(made.map(|call| DirectCall::new(call, operation, from, to)))
    }

    /// Whether it adds elements of this type.
    pub(crate) fn sums(&self, dtype: DType) -> bool {
        self.fabric.supports(dtype, Work::Reduce(ReduceOp::Sum)).is_ok()
    }

    pub(crate) fn abort(&self) {
        if let Err(error) = self.communicator.abort() {
            tracing::warn!(%error, "a communicator was not aborted");
        }
    }
}

fn made(operation: &Operation, own: Rank, from: Place, to: Place, dtype: DType) -> Option<Call> {
    let operator = |op: &crate::DeviceOp| builtin(op).map(Operator::Plain);
    let at_root = |root: &Rank, place: Place| (*root == own).then_some(place);
    Some(match operation {
        Operation::AllReduce(op) => Call::AllReduce { from, to, dtype, operator: operator(op)? },
        Operation::Reduce(op, root) => {
            let to = at_root(root, to);
            Call::Reduce { from, to, dtype, operator: operator(op)?, root: *root }
        }
        Operation::ReduceScatter(op) => {
            Call::ReduceScatter { from, to, dtype, operator: operator(op)? }
        }
        Operation::Broadcast(root) => Call::Broadcast { place: from, root: *root },
        Operation::AllGather => Call::AllGather { from, to },
        Operation::Gather(root) => Call::Gather { from, to: at_root(root, to), root: *root },
        Operation::Scatter(root) => Call::Scatter { from: at_root(root, from), to, root: *root },
        Operation::AllToAll => Call::AllToAll { from, to },
        _ => return None,
    })
}

impl DirectCall {
    fn new(call: Call, operation: &Operation, from: DeviceSlice, to: DeviceSlice) -> DirectCall {
        let (op, root) = match operation {
            Operation::AllReduce(op) | Operation::ReduceScatter(op) => (builtin(op), None),
            Operation::Reduce(op, root) => (builtin(op), Some(*root)),
            Operation::Broadcast(root) | Operation::Gather(root) | Operation::Scatter(root) => {
                (None, Some(*root))
            }
            _ => (None, None),
        };
        // What a rank brings, or what it gets where only the root brings.
        let block = match operation {
            Operation::Scatter(_) => to,
            Operation::ReduceScatter(_) => to,
            _ => from,
        };
        let number = NAMES.iter().position(|name| *name == operation.name());
        let words = [
            number.map_or(u64::MAX, |number| number as u64),
            block.dtype as u64,
            block.len() as u64,
            op.map_or(u64::MAX, |op| op as u64),
            root.map_or(u64::MAX, |root| root as u64),
        ];
        DirectCall { call, words, stage: Stage::Asked }
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }

    /// Whether the library has it.
    pub(crate) fn is_under_way(&self) -> bool {
        matches!(self.stage, Stage::Queued | Stage::Running(_))
    }

    /// Goes on, as far as nothing must be waited for: whether the next call may be queued. `agree` compares words on
    /// all ranks, and returns what is told when they have answered.
    pub(crate) fn go_on(
        &mut self,
        direct: &Direct,
        stream: &dyn Stream,
        after: &dyn Event,
        agree: impl FnOnce(&[u64; WORDS]) -> Arc<Agreement>,
    ) -> Result<bool> {
        let failed = error::of("nccl");
        match &self.stage {
            Stage::Asked => {
                self.stage = Stage::Agreeing(agree(&self.words));
            }
            Stage::Agreeing(agreement) => match agreement.answer() {
                Answer::None => {}
                Answer::Asked => self.stage = Stage::Asked,
                Answer::Same => {
                    if direct.communicator.is_ready().map_err(&failed)? {
                        stream.wait(after).map_err(&failed)?;
                        self.stage = Stage::Queued;
                        direct.communicator.queue(&[self.call], stream).map_err(&failed)?;
                    }
                }
            },
            // The library may queue it in a thread of its own.
            Stage::Queued => {
                if direct.communicator.is_ready().map_err(&failed)? {
                    self.stage = Stage::Running(stream.record().map_err(&failed)?);
                }
            }
            Stage::Running(_) | Stage::Done => {}
        }
        Ok(matches!(self.stage, Stage::Running(_) | Stage::Done))
    }

    /// Whether it has just ended.
    pub(crate) fn land(&mut self) -> Result<bool> {
        let Stage::Running(event) = &self.stage else { return Ok(false) };
        let has_come = event.has_come().map_err(error::of("nccl"))?;
        if has_come {
            self.stage = Stage::Done;
        }
        Ok(has_come)
    }

    /// After a failure and an abort: whether nothing uses the memory of the call any more.
    pub(crate) fn is_settled(&mut self, stream: &dyn Stream) -> bool {
        if matches!(self.stage, Stage::Queued) {
            self.stage = match stream.record() {
                Ok(event) => Stage::Running(event),
                Err(_) => Stage::Done,
            };
        }
        match &self.stage {
            Stage::Running(event) => !matches!(event.has_come(), Ok(false)),
            _ => true,
        }
    }
}

/// What a round of words has come to, which ends on another thread.
#[derive(Debug, Default)]
pub(crate) struct Agreement(AtomicU8);

/// What the ranks have answered in a round of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Not all have answered, or they differ, which is told elsewhere.
    None,
    /// All make the same call.
    Same,
    /// A rank makes no call yet: it [asks](ASK) whether a rank is lost. The round is made again.
    Asked,
}

impl Agreement {
    pub(crate) fn tell(&self, answer: Answer) {
        self.0.store(answer as u8, Ordering::Release);
    }

    pub(crate) fn answer(&self) -> Answer {
        [Answer::Same, Answer::Asked]
            .into_iter()
            .find(|answer| *answer as u8 == self.0.load(Ordering::Acquire))
            .unwrap_or(Answer::None)
    }
}

/// The calls, by the number that stands for each in words.
const NAMES: [&str; 8] = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
];

/// The number of words.
pub(crate) const WORDS: usize = 5;

/// The words of a rank that asks whether a rank is lost.
pub(crate) const ASK: [u64; WORDS] = [u64::MAX; WORDS];

/// The words of a call that goes through the host, where it is compared.
pub(crate) const THROUGH_HOST: [u64; WORDS] = [u64::MAX - 1; WORDS];

/// What words say: `reduce(sum)(root 1) of 100 f32`.
pub(crate) fn describe(words: &[u64]) -> String {
    if words == THROUGH_HOST {
        return "a call through the host".to_owned();
    }
    let &[name, dtype, len, op, root] = words else { return "another call".to_owned() };
    let name = usize::try_from(name).ok().and_then(|at| NAMES.get(at)).unwrap_or(&"another call");
    let code = |word: u64| u8::try_from(word).ok();
    let op = code(op).and_then(ReduceOp::from_code).map(|op| format!("({op})"));
    let root = (root != u64::MAX).then(|| format!("(root {root})"));
    let dtype = code(dtype).and_then(DType::from_code).map(|dtype| dtype.to_string());
    let [op, root, dtype] = [op, root, dtype].map(Option::unwrap_or_default);
    format!("{name}{op}{root} of {len} {dtype}")
}

/// Joins the devices of all ranks, if that is wanted and possible. If not: why.
///
/// # Errors
///
/// Where it was asked for: why it cannot be, the same on all ranks.
pub(crate) fn set_up(
    group: &ProcessGroup,
    device: &Arc<dyn Device>,
    options: &DeviceOptions,
) -> Result<Result<Direct, String>> {
    let refuse = |problem: String| match options.way {
        Wanted::Nccl => Err(Error::argument(OPERATION, problem)),
        _ => Ok(Err(problem)),
    };
    if options.way == Wanted::Host {
        return Ok(Err("the program has asked for the way through the host".to_owned()));
    }
    if let Some(order) = options.order {
        return refuse(format!(
            "NCCL adds in an order of its own, and sums in the order of {order:?} were asked for"
        ));
    }
    let of_backend = driving::on_device(group).map(|it| it.downcast::<Arc<dyn Fabric>>());
    let found = match of_backend {
        Some(Ok(fabric)) => Ok((*fabric).clone()),
        _ => device.fabric(group.config().nccl_library.as_deref()),
    };
    let word = match &found {
        Ok(fabric) => Said { can: true, text: fabric.one_rank_each().unwrap_or_default() },
        Err(error) => Said { can: false, text: error.to_string() },
    };
    let all = tell_all(group, &word, &device.identity().uuid)?;
    if let Some((rank, (said, _))) = all.iter().enumerate().find(|(_, (said, _))| !said.can) {
        return refuse(format!("rank {rank} has no NCCL: {}", said.text));
    }
    for (rank, (said, uuid)) in all.iter().enumerate() {
        let other = all[..rank].iter().position(|(_, other)| other == uuid);
        let is_refused = !said.text.is_empty() || options.way == Wanted::Auto;
        if let Some(other) = other.filter(|_| is_refused) {
            let hint = if said.text.is_empty() { "NCCL was let to share it" } else { &said.text };
            return refuse(format!("ranks {other} and {rank} are on one GPU: {hint}"));
        }
    }
    let Ok(fabric) = found else { return refuse("NCCL is not there".to_owned()) };
    listen_to_all(group);
    // If a device does not join, this group fails and no other.
    let ranks: Vec<Rank> = (0..group.world_size()).collect();
    let trial = group.new_group(&ranks, &GroupOptions::default().name("join"))?;
    let joined = join(&trial, fabric.as_ref());
    if let Err(error) = &joined {
        let cause = Cause::Device { problem: error.to_string() };
        driving::fail(&trial, OPERATION, cause);
    }
    let word = match &joined {
        Ok(_) => Said { can: true, text: String::new() },
        Err(error) => Said { can: false, text: error.to_string() },
    };
    // A rank that is lost is told by this call.
    let all = tell_all(group, &word, &[0; 16]);
    let failed = match &all {
        Ok(all) => all.iter().enumerate().find(|(_, (said, _))| !said.can),
        Err(_) => None,
    };
    let is_joined = all.is_ok() && failed.is_none();
    if let (Ok(communicator), false) = (&joined, is_joined) {
        let _ = communicator.abort(); // the failure is told below
    }
    if let Some((rank, (said, _))) = failed {
        return refuse(format!("rank {rank} did not join: {}", said.text));
    }
    all?;
    match joined {
        Ok(communicator) => {
            Ok(Ok(Direct { fabric, communicator, is_wanted: options.way == Wanted::Nccl }))
        }
        Err(error) => refuse(error.to_string()),
    }
}

/// Makes the communicator, and waits until all ranks have.
fn join(group: &ProcessGroup, fabric: &dyn Fabric) -> Result<Arc<dyn Communicator>> {
    let failed = error::of(OPERATION);
    listen_to_all(group);
    let mut id = vec![0; ID_BYTES];
    let made = (group.rank() == 0).then(|| fabric.unique_id());
    if let Some(Ok(made)) = &made
        && made.len() == ID_BYTES
    {
        id.copy_from_slice(made);
    }
    group.broadcast(&mut id, 0)?;
    made.transpose().map_err(&failed)?;
    if id.iter().all(|byte| *byte == 0) {
        let problem = "rank 0 could not make an id of 128 bytes for the communicator";
        return Err(Error::argument(OPERATION, problem));
    }
    let communicator = fabric.join(&id, group.rank(), group.world_size()).map_err(&failed)?;
    let deadline = Instant::now() + group.config().timeout;
    loop {
        let is_ready = communicator.is_ready().map_err(&failed);
        let is_late = Instant::now() > deadline;
        match (is_ready, driving::hear(group, None)) {
            (Ok(true), _) => return Ok(communicator),
            (Ok(false), None) if !is_late => std::thread::sleep(LOOK_EVERY),
            (ready, heard) => {
                let _ = communicator.abort(); // it is of no use any more
                ready?;
                let problem = match heard {
                    Some(cause) => cause.to_string(),
                    None => "the devices did not find each other in time".to_owned(),
                };
                return Err(Error::argument(OPERATION, problem));
            }
        }
    }
}

/// Connects to all ranks, so that this one hears of each that is lost.
fn listen_to_all(group: &ProcessGroup) {
    if group.world_size() <= HEARD_MAX {
        driving::meet_all(group, Instant::now() + group.config().timeout);
    }
}

/// The most ranks that all listen to each other while devices are at it. In a larger group a rank listens to those that
/// it exchanges words with, and a failure is told from rank to rank.
const HEARD_MAX: usize = 64;

/// The length of an id: that of NCCL.
const ID_BYTES: usize = 128;

/// How often a thread that waits for a library looks for lost peers.
pub(crate) const LOOK_EVERY: Duration = Duration::from_micros(200);

/// What a rank says of its library.
struct Said {
    can: bool,
    text: String,
}

const TEXT_BYTES: usize = 600;

/// What all ranks say, by rank.
fn tell_all(group: &ProcessGroup, own: &Said, uuid: &[u8; 16]) -> Result<Vec<(Said, [u8; 16])>> {
    let mut word = vec![u8::from(own.can)];
    word.extend(uuid);
    let text = own.text.as_bytes();
    word.extend(&text[..text.len().min(TEXT_BYTES)]);
    word.resize(17 + TEXT_BYTES, 0);
    let mut all = vec![0; word.len() * group.world_size()];
    group.all_gather(&word, &mut all)?;
    let said = all.chunks_exact(word.len()).map(|word| {
        let text = word[17..].split(|byte| *byte == 0).next().unwrap_or_default();
        let text = String::from_utf8_lossy(text).into_owned();
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&word[1..17]);
        (Said { can: word[0] > 0, text }, uuid)
    });
    Ok(said.collect())
}
