//! Communicators: how their ranks meet, part, and give up.
//!
//! Whoever locks the world and a communicator locks the world first.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::kinds::{
    Factor, Fault, IN_PROGRESS, INTERNAL, Reduction, SUCCESS, Type, UNHANDLED_CUDA,
};
use super::mail::{Channel, Key, Mail, Name};
use crate::random::Random;
use crate::variables::variable;
use crate::work::OpId;
use crate::world::{Current, World};

pub(crate) type Shared = Arc<Mutex<Communicator>>;

enum Stage {
    /// The ranks of a split tell each other their colours, over the old communicator.
    Splitting(Split),
    Meeting,
    Ready,
}

/// What a communicator that is split has yet to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parting {
    Nothing,
    /// The new communicator takes the colours.
    Child,
    /// This rank gets no new communicator, and takes the colours all the same: the others must be able to send them.
    Alone,
}

struct Split {
    parent: Shared,
    number: u64,
    color: c_int,
}

pub(crate) struct Communicator {
    name: Name,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) current: Current,
    uuid: [u8; 16],
    pub(crate) blocking: bool,
    stage: Stage,
    fault: Option<Fault>,
    /// None: aborted, or not yet there.
    pub(crate) mail: Option<Mail>,
    pub(crate) aborted: bool,
    pub(crate) finalized: bool,
    /// How often a non-blocking communicator says yet that it is at work.
    pub(crate) hesitates: u32,
    splits: u64,
    parting: Parting,
    pub(crate) collectives: u64,
    /// Messages to and from each rank.
    pub(crate) sent: Vec<u64>,
    pub(crate) received: Vec<u64>,
    pub(crate) last: OpId,
    /// The operators of the program, by their number less [`FIRST_OPERATOR`].
    pub(crate) operators: Vec<Option<(Type, Factor)>>,
}

pub(crate) const FIRST_OPERATOR: usize = 5;

static ALL: Mutex<BTreeMap<usize, Shared>> = Mutex::new(BTreeMap::new());

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The communicator of a handle.
pub(crate) fn find(handle: usize) -> Result<Shared, Fault> {
    lock(&ALL).get(&handle).cloned().ok_or_else(|| Fault::argument("invalid communicator"))
}

pub(crate) fn insert(handle: usize, made: Shared) {
    lock(&ALL).insert(handle, made);
}

pub(crate) fn remove(handle: usize) {
    lock(&ALL).remove(&handle);
}

/// Lets communicators go on that `parent` is split into: it is done when they are, and NCCL's own thread does that.
pub(crate) fn help_children(world: &World, parent: &Shared) {
    let all: Vec<Shared> = lock(&ALL).values().cloned().collect();
    for other in all.iter().filter(|it| !Arc::ptr_eq(it, parent)) {
        let mut other = lock(other);
        if matches!(&other.stage, Stage::Splitting(split) if Arc::ptr_eq(&split.parent, parent)) {
            let hesitates = other.hesitates;
            other.poll(world);
            other.hesitates = hesitates;
        }
    }
}

/// Communicators that were not given back.
pub(crate) fn count() -> usize {
    lock(&ALL).len()
}

pub(crate) fn forget_all() {
    let all = std::mem::take(&mut *lock(&ALL));
    for communicator in all.into_values() {
        lock(&communicator).abort();
    }
}

/// A name that no other communicator has.
pub(crate) fn new_name() -> Name {
    let (one, two) =
        (RandomState::new().hash_one(std::process::id()), RandomState::new().hash_one(0));
    named(one, two)
}

fn named(one: u64, two: u64) -> Name {
    let mut name = [0; 16];
    name[..8].copy_from_slice(&one.to_le_bytes());
    name[8..].copy_from_slice(&two.to_le_bytes());
    name
}

impl Communicator {
    pub(crate) fn meet(
        world: &World,
        name: Name,
        rank: usize,
        size: usize,
        blocking: bool,
    ) -> Result<Communicator, Fault> {
        let current = world.current()?;
        let mut made = Communicator::new(world, current, blocking, Stage::Meeting);
        made.begin_meeting(name, rank, size)?;
        Ok(made)
    }

    /// The part of this rank in a split of `parent`; nothing if it wants no new communicator.
    pub(crate) fn split(
        world: &World,
        parent: &Shared,
        color: c_int,
        key: c_int,
        blocking: Option<bool>,
    ) -> Option<Communicator> {
        let mut old = lock(parent);
        old.splits += 1;
        old.parting = if color >= 0 { Parting::Child } else { Parting::Alone };
        let number = old.splits;
        let bytes = Arc::new([color.to_le_bytes(), key.to_le_bytes()].concat());
        let size = old.size;
        if let Some(mail) = &mut old.mail {
            (0..size).for_each(|to| mail.send(to, Channel::Split, number, bytes.clone()));
            mail.pump();
        }
        let blocking = blocking.unwrap_or(old.blocking);
        let stage = Stage::Splitting(Split { parent: parent.clone(), number, color });
        (color >= 0).then(|| Communicator::new(world, old.current, blocking, stage))
    }

    fn new(world: &World, current: Current, blocking: bool, stage: Stage) -> Self {
        Communicator {
            name: Name::default(),
            rank: 0,
            size: 0,
            current,
            uuid: world.devices.get(current.device).map(|it| it.uuid()).unwrap_or_default(),
            blocking,
            stage,
            fault: None,
            mail: None,
            aborted: false,
            finalized: false,
            hesitates: 0,
            splits: 0,
            parting: Parting::Nothing,
            collectives: 0,
            sent: Vec::new(),
            received: Vec::new(),
            last: 0,
            operators: Vec::new(),
        }
    }

    /// The state of the communicator, after what can be done now was done.
    pub(crate) fn poll(&mut self, world: &World) -> c_int {
        if world.works(self.current.device).is_err() {
            return UNHANDLED_CUDA;
        }
        if self.aborted {
            return INTERNAL;
        }
        if self.fault.is_none()
            && let Err(fault) = self.go_on()
        {
            self.fault = Some(fault);
        }
        if self.hesitates > 0 {
            self.hesitates -= 1;
            return IN_PROGRESS;
        }
        match &self.fault {
            Some(fault) => fault.code,
            None if !matches!(self.stage, Stage::Ready) || self.parting != Parting::Nothing => {
                IN_PROGRESS
            }
            None if self.finalized && world.work.is_pending(self.last) => IN_PROGRESS,
            None => SUCCESS,
        }
    }

    pub(crate) fn fault(&self) -> Option<Fault> {
        self.fault.clone()
    }

    /// A communicator that may be used now.
    pub(crate) fn ready(&mut self, world: &World) -> Result<(), Fault> {
        let hesitates = self.hesitates;
        let state = self.poll(world);
        self.hesitates = hesitates;
        match (state, &self.fault) {
            (SUCCESS, _) if self.finalized => Err(Fault::argument("the communicator is finalized")),
            (SUCCESS, _) => Ok(()),
            (IN_PROGRESS, _) => Err(Fault::argument(
                "Attempt to use communicator before the previous operation returned ncclSuccess",
            )),
            (_, Some(fault)) => Err(fault.clone()),
            (code, None) => Err(Fault::of_state(code)),
        }
    }

    /// A non-blocking communicator may say for a while that it is at work.
    pub(crate) fn hesitate(&mut self, random: &mut Random) -> bool {
        self.hesitates =
            if self.blocking || random.below(3) > 0 { 0 } else { 1 + random.below(3) as u32 };
        self.hesitates > 0
    }

    /// What is queued ends, in whatever state.
    pub(crate) fn abort(&mut self) {
        self.aborted = true;
        self.mail = None;
    }

    fn go_on(&mut self) -> Result<(), Fault> {
        if let Some(mail) = &mut self.mail {
            mail.pump();
            if self.parting == Parting::Alone && colors(mail, self.size, self.splits).is_some() {
                self.parting = Parting::Nothing;
            }
        }
        if let Stage::Splitting(split) = &self.stage
            && let Some((name, rank, size)) = split.result()?
        {
            self.begin_meeting(name, rank, size)?;
        }
        if matches!(self.stage, Stage::Meeting) {
            self.go_on_meeting()?;
        }
        Ok(())
    }

    fn begin_meeting(&mut self, name: Name, rank: usize, size: usize) -> Result<(), Fault> {
        let mut mail = Mail::new(&name, rank, size)
            .map_err(|error| Fault::system(format!("rank {rank} cannot be reached: {error}")))?;
        let host = variable("NCCL_HOSTID").unwrap_or_else(|| "this host".to_owned());
        let about = Arc::new([&self.uuid[..], host.as_bytes()].concat());
        (0..size).for_each(|to| mail.send(to, Channel::Meeting, 0, about.clone()));
        mail.pump();
        (self.name, self.rank, self.size, self.mail) = (name, rank, size, Some(mail));
        (self.sent, self.received) = (vec![0; size], vec![0; size]);
        self.stage = Stage::Meeting;
        Ok(())
    }

    fn go_on_meeting(&mut self) -> Result<(), Fault> {
        let Some(mail) = &mut self.mail else { return Ok(()) };
        let key = |from| Key { from, channel: Channel::Meeting, number: 0 };
        if !mail.has_left(Channel::Meeting, 0)
            || !(0..self.size).all(|rank| mail.has_come(key(rank)))
        {
            return Ok(());
        }
        let all: Vec<_> = (0..self.size).map(|rank| mail.take(key(rank))).collect();
        self.stage = Stage::Ready;
        // NCCL 2.30 came to share a device if it is told to.
        let may_share = super::kinds::version() >= 23_000
            && variable("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|it| it == "1");
        for (rank, about) in all.iter().enumerate() {
            if rank != self.rank && *about == all[self.rank] && !may_share {
                return Err(Fault::usage(format!(
                    "Duplicate GPU detected : rank {} and rank {rank} both on CUDA device {}",
                    self.rank, self.current.device
                )));
            }
        }
        Ok(())
    }
}

impl Split {
    /// Name, rank and size of the new communicator, once all ranks have told their colours.
    fn result(&self) -> Result<Option<(Name, usize, usize)>, Fault> {
        let mut parent = lock(&self.parent);
        let (size, own, old_name) = (parent.size, parent.rank, parent.name);
        let Some(mail) = &mut parent.mail else {
            return Err(Fault::usage("the communicator that was split is aborted"));
        };
        mail.pump();
        let Some(colors) = colors(mail, size, self.number) else { return Ok(None) };
        parent.parting = Parting::Nothing;
        let members = colors.into_iter().enumerate().filter(|(_, (color, _))| *color == self.color);
        let mut members: Vec<(c_int, usize)> =
            members.map(|(rank, (_, key))| (key, rank)).collect();
        members.sort_unstable();
        let rank = members.iter().position(|(_, rank)| *rank == own).unwrap_or(0);
        // The same on all ranks, and another for each split and colour.
        let mut random = Random::new(self.number << 32 | self.color as u64);
        let mut half = |bytes: &[u8]| {
            bytes.iter().fold(random.next(), |sum, it| Random::new(sum ^ u64::from(*it)).next())
        };
        Ok(Some((named(half(&old_name), half(&old_name)), rank, members.len())))
    }
}

/// Colour and key of each rank, once all have come and the own have left: then nobody needs this rank any more.
fn colors(mail: &mut Mail, size: usize, number: u64) -> Option<Vec<(c_int, c_int)>> {
    let key = |from| Key { from, channel: Channel::Split, number };
    if !mail.has_left(Channel::Split, number) || !(0..size).all(|rank| mail.has_come(key(rank))) {
        return None;
    }
    let number = |bytes: &[u8]| bytes.first_chunk().map_or(0, |it| c_int::from_le_bytes(*it));
    let both = |bytes: Vec<u8>| (number(&bytes), bytes.get(4..).map_or(0, number));
    Some((0..size).map(|rank| both(mail.take(key(rank)).unwrap_or_default())).collect())
}

/// The reduction that an operator's number stands for.
pub(crate) fn reduction(
    communicator: &Communicator,
    number: c_int,
    kind: Type,
) -> Result<Reduction, Fault> {
    use super::kinds::Operator::*;
    if !kind.can_be_summed() {
        return Err(Fault::argument("8-bit floats cannot be reduced on this device"));
    }
    let plain = |operator| Reduction { operator, factor: None, divisor: None };
    let size = communicator.size as u64;
    Ok(match number {
        0 => plain(Sum),
        1 => plain(Product),
        2 => plain(Max),
        3 => plain(Min),
        // As NCCL does: floats are scaled before they are added, whole numbers divided afterwards.
        4 if kind.is_float() => Reduction {
            factor: Some(Factor::Value(super::sums::one_over(kind, size))),
            ..plain(Sum)
        },
        4 => Reduction { divisor: Some(size), ..plain(Sum) },
        _ => {
            let made = usize::try_from(number).ok().and_then(|it| it.checked_sub(FIRST_OPERATOR));
            match made.and_then(|it| communicator.operators.get(it)) {
                Some(Some((of, factor))) if *of == kind => {
                    Reduction { factor: Some(factor.clone()), ..plain(Sum) }
                }
                Some(Some(_)) => {
                    return Err(Fault::argument("the operator was made for another type"));
                }
                _ => return Err(Fault::argument(format!("invalid operator {number}"))),
            }
        }
    })
}
