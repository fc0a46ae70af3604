//! The C functions of NCCL, with the names and types of `nccl.h` 2.18 and later.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Arc, Mutex};

use super::communicator::{
    self, Communicator, FIRST_OPERATOR, Shared, find, lock, new_name, reduction,
};
use super::exchange::{Kind, Outcome, Part};
use super::groups::{self, Call, Making};
use super::kinds::{Factor, Fault, IN_PROGRESS, SUCCESS, Type, text_of, version};
use crate::code::Code;
use crate::memory::Span;
use crate::out::Out;
use crate::world::{World, enter, until, world};

/// ncclUniqueId, by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId([u8; 128]);

/// The beginning of ncclConfig_t, which all versions share.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;
const NO_COLOR: c_int = -1;
const ID_BEGINS: &[u8] = b"drumline-standin";

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// A call of NCCL: it may be made to fail, and its error is kept.
fn call(name: &'static str, body: impl FnOnce() -> Result<c_int, Fault>) -> c_int {
    let result = match enter(name) {
        Some(code) => Err(Fault { code, text: format!("{name} fails on request") }),
        None => body(),
    };
    result.unwrap_or_else(|fault| {
        // A group whose end was not begun is as it was.
        if name != "ncclGroupEnd" {
            groups::note(&fault);
        }
        LAST_ERROR.set(CString::new(fault.text).unwrap_or_default());
        fault.code
    })
}

/// `None`: as the default, or as the parent.
fn is_blocking(config: *const Config) -> Result<Option<bool>, Fault> {
    if config.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, so the caller says that it is an ncclConfig_t, which is longer.
    let config = unsafe { config.read_unaligned() };
    if config.magic != MAGIC || config.size < size_of::<Config>() {
        return Err(Fault::argument(
            "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER",
        ));
    }
    match config.blocking {
        UNDEFINED => Ok(None),
        0 | 1 => Ok(Some(config.blocking == 1)),
        other => Err(Fault::argument(format!("invalid config blocking attribute value {other}"))),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGetVersion(number: Out<c_int>) -> c_int {
    call("ncclGetVersion", || number.set(version()).map(|()| SUCCESS).map_err(Fault::from))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGetUniqueId(id: Out<UniqueId>) -> c_int {
    call("ncclGetUniqueId", || {
        let mut bytes = [0; 128];
        bytes[..ID_BEGINS.len()].copy_from_slice(ID_BEGINS);
        bytes[ID_BEGINS.len()..][..16].copy_from_slice(&new_name());
        id.set(UniqueId(bytes))?;
        Ok(SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    text_of(code).as_ptr().cast()
}

/// Lives until the next error of the thread.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGetLastError(_communicator: usize) -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

fn init(
    give: Out<usize>,
    size: c_int,
    id: &UniqueId,
    rank: c_int,
    config: *const Config,
) -> Result<c_int, Fault> {
    let blocking = is_blocking(config)?.unwrap_or(true);
    let (Ok(size), Ok(rank)) = (usize::try_from(size), usize::try_from(rank)) else {
        return Err(Fault::argument(format!("invalid rank {rank} of {size}")));
    };
    if size == 0 || rank >= size || give.is_null() {
        return Err(Fault::argument(format!("invalid rank {rank} of {size}")));
    }
    let Some(name) = id.0.strip_prefix(ID_BEGINS).and_then(|rest| rest.first_chunk::<16>()) else {
        return Err(Fault::argument("not a unique id of ncclGetUniqueId"));
    };
    let (handle, made) = {
        let mut world = world();
        (world.handle(), Communicator::meet(&world, *name, rank, size, blocking)?)
    };
    groups::make(Making { handle, made: Arc::new(Mutex::new(made)), give })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommInitRankConfig(
    give: Out<usize>,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> c_int {
    call("ncclCommInitRankConfig", || init(give, size, &id, rank, config))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommInitRank(
    give: Out<usize>,
    size: c_int,
    id: UniqueId,
    rank: c_int,
) -> c_int {
    call("ncclCommInitRank", || init(give, size, &id, rank, std::ptr::null()))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommSplit(
    parent: usize,
    color: c_int,
    key: c_int,
    give: Out<usize>,
    config: *const Config,
) -> c_int {
    call("ncclCommSplit", || {
        let blocking = is_blocking(config)?;
        let parent = find(parent)?;
        if color < NO_COLOR || give.is_null() {
            return Err(Fault::argument(format!("invalid color {color}")));
        }
        let (handle, made) = {
            let mut world = world();
            lock(&parent).ready(&world)?;
            (world.handle(), Communicator::split(&world, &parent, color, key, blocking))
        };
        match made {
            Some(made) => groups::make(Making { handle, made: Arc::new(Mutex::new(made)), give }),
            None => {
                give.set(0)?;
                let blocking = lock(&parent).blocking;
                if blocking { wait(&parent) } else { Ok(IN_PROGRESS) }
            }
        }
    })
}

/// Waits until a communicator has nothing to do.
fn wait(communicator: &Shared) -> Result<c_int, Fault> {
    let mut code = IN_PROGRESS;
    let waited = until(|world| {
        code = lock(communicator).poll(world);
        Ok(code != IN_PROGRESS)
    });
    match waited {
        Ok(()) => Ok(code),
        Err(_) => Err(Fault::system("the other ranks of a communicator do not come")),
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommFinalize(handle: usize) -> c_int {
    call("ncclCommFinalize", || {
        let communicator = find(handle)?;
        let blocking = {
            let world = world();
            let mut communicator = lock(&communicator);
            communicator.ready(&world)?;
            communicator.finalized = true;
            communicator.blocking
        };
        if blocking { wait(&communicator) } else { Ok(IN_PROGRESS) }
    })
}

/// Waits for what is queued, unless the communicator has failed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommDestroy(handle: usize) -> c_int {
    call("ncclCommDestroy", || {
        if handle == 0 {
            return Ok(SUCCESS);
        }
        let communicator = find(handle)?;
        lock(&communicator).finalized = true;
        let ended = wait(&communicator);
        lock(&communicator).abort();
        communicator::remove(handle);
        ended.map(|_| SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommAbort(handle: usize) -> c_int {
    call("ncclCommAbort", || {
        if handle == 0 {
            return Ok(SUCCESS);
        }
        let communicator = find(handle)?;
        lock(&communicator).abort();
        communicator::remove(handle);
        Ok(SUCCESS)
    })
}

/// Of a rank that is gone, it says nothing.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommGetAsyncError(handle: usize, state: Out<c_int>) -> c_int {
    call("ncclCommGetAsyncError", || {
        let communicator = find(handle)?;
        let world = world();
        communicator::help_children(&world, &communicator);
        let code = lock(&communicator).poll(&world);
        state.set(code)?;
        if let Some(fault) = lock(&communicator).fault() {
            LAST_ERROR.set(CString::new(fault.text).unwrap_or_default());
        }
        Ok(SUCCESS)
    })
}

fn about(
    handle: usize,
    value: Out<c_int>,
    of: impl FnOnce(&Communicator) -> usize,
) -> Result<c_int, Fault> {
    let communicator = find(handle)?;
    let world = world();
    let mut communicator = lock(&communicator);
    communicator.ready(&world)?;
    value.set(of(&communicator) as c_int)?;
    Ok(SUCCESS)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommCount(handle: usize, value: Out<c_int>) -> c_int {
    call("ncclCommCount", || about(handle, value, |it| it.size))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommUserRank(handle: usize, value: Out<c_int>) -> c_int {
    call("ncclCommUserRank", || about(handle, value, |it| it.rank))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclCommCuDevice(handle: usize, value: Out<c_int>) -> c_int {
    call("ncclCommCuDevice", || about(handle, value, |it| it.current.device))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGroupStart() -> c_int {
    call("ncclGroupStart", || {
        groups::start();
        Ok(SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclGroupEnd() -> c_int {
    call("ncclGroupEnd", groups::end)
}

/// `residence`: 0 is memory of the device, read when an operation begins; 1 is memory of the host, read now.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    operator: Out<c_int>,
    scalar: *const c_void,
    kind: c_int,
    residence: c_int,
    handle: usize,
) -> c_int {
    call("ncclRedOpCreatePreMulSum", || {
        let communicator = find(handle)?;
        let kind = Type::of(kind)?;
        if scalar.is_null() || !kind.can_be_summed() || !(0..2).contains(&residence) {
            return Err(Fault::argument("an invalid factor"));
        }
        let factor = if residence == 0 {
            Factor::At(scalar as usize)
        } else {
            // SAFETY: the caller says that a number of this type is there.
            Factor::Value(
                unsafe { std::slice::from_raw_parts(scalar.cast::<u8>(), kind.size()) }.to_vec(),
            )
        };
        let world = world();
        let mut communicator = lock(&communicator);
        communicator.ready(&world)?;
        operator.set((FIRST_OPERATOR + communicator.operators.len()) as c_int)?;
        communicator.operators.push(Some((kind, factor)));
        Ok(SUCCESS)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ncclRedOpDestroy(operator: c_int, handle: usize) -> c_int {
    call("ncclRedOpDestroy", || {
        let communicator = find(handle)?;
        let mut communicator = lock(&communicator);
        let at = usize::try_from(operator).ok().and_then(|it| it.checked_sub(FIRST_OPERATOR));
        match at.and_then(|at| communicator.operators.get_mut(at)).and_then(Option::take) {
            Some(_) => Ok(SUCCESS),
            None => Err(Fault::argument(format!("invalid operator {operator}"))),
        }
    })
}

/// What an operation is asked for.
struct Asked<'a> {
    world: &'a World,
    communicator: &'a Communicator,
    kind: Type,
    /// Bytes of `count` elements.
    len: usize,
}

impl Asked<'_> {
    fn size(&self) -> usize {
        self.communicator.size
    }

    fn rank(&self) -> usize {
        self.communicator.rank
    }

    /// A rank that the program names.
    fn peer(&self, rank: c_int) -> Result<usize, Fault> {
        usize::try_from(rank)
            .ok()
            .filter(|it| *it < self.size())
            .ok_or_else(|| Fault::argument(format!("invalid rank {rank}")))
    }

    /// `blocks` blocks in memory of the device.
    fn span(&self, address: usize, blocks: usize) -> Result<Span, Fault> {
        let len =
            self.len.checked_mul(blocks).ok_or_else(|| Fault::argument("too many elements"))?;
        if len == 0 {
            return Ok(Span { address, len, range: None, device: None });
        }
        let span = self.world.memory.span(address, len).map_err(|_| {
            Fault::argument(format!("{len} bytes at {address:#x} do not lie in one allocation"))
        })?;
        if span.is_pageable() {
            return Err(Fault::argument(format!(
                "{address:#x} is not a valid pointer of the device"
            )));
        }
        if span.device.is_some_and(|it| it != self.communicator.current.device) {
            return Err(Fault::argument(format!("{address:#x} is memory of another device")));
        }
        Ok(span)
    }

    /// Its blocks, each with its rank.
    fn blocks(&self, address: usize) -> Result<Vec<(usize, Span)>, Fault> {
        let whole = self.span(address, self.size())?;
        Ok((0..self.size()).map(|rank| (rank, whole.part(rank * self.len, self.len))).collect())
    }

    fn to_all(&self, address: usize) -> Result<Vec<(usize, Span)>, Fault> {
        let one = self.span(address, 1)?;
        Ok((0..self.size()).map(|rank| (rank, one)).collect())
    }
}

/// An operation: what it is, what it sends to whom, and what comes of it.
type Planned = (Kind, Vec<(usize, Span)>, Outcome);

fn operate(
    name: &'static str,
    (count, kind): (usize, c_int),
    (handle, stream): (usize, usize),
    plan: impl FnOnce(&Asked<'_>) -> Result<Planned, Fault>,
) -> c_int {
    call(name, || {
        let shared = find(handle)?;
        let kind = Type::of(kind)?;
        let len =
            count.checked_mul(kind.size()).ok_or_else(|| Fault::argument("too many elements"))?;
        let mut world = world();
        let (outgoing_kind, outgoing, outcome) = {
            let mut communicator = lock(&shared);
            communicator.ready(&world)?;
            plan(&Asked { world: &world, communicator: &communicator, kind, len })?
        };
        let stream = world.open_stream(stream)?;
        if world.streams.get(stream)?.device != lock(&shared).current.device {
            return Err(Code::INVALID_HANDLE.into());
        }
        let part = Part::new(name, outgoing_kind, outgoing, outcome);
        groups::call(&mut world, Call { communicator: shared, stream, part })
    })
}

/// The operations of NCCL: the C name of each, its memory, what it has beside the number and the type of elements, and
/// its plan.
macro_rules! operations {
    ($($(#[$about:meta])* $name:ident($($memory:ident),+; $($more:ident),*) |$asked:ident| $plan:block;)+) => {$(
        $(#[$about])*
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            $($memory: usize,)+
            count: usize,
            kind: c_int,
            $($more: c_int,)*
            handle: usize,
            stream: usize,
        ) -> c_int {
            operate(stringify!($name), (count, kind), (handle, stream), |$asked| $plan)
        }
    )+};
}

operations! {
    ncclAllReduce(from, to; operator) |asked| {
        let reduction = reduction(asked.communicator, operator, asked.kind)?;
        let outcome = Outcome::Reduced(asked.span(to, 1)?, asked.kind, reduction);
        Ok((Kind::Collective, asked.to_all(from)?, outcome))
    };

    ncclReduce(from, to; operator, root) |asked| {
        let (root, reduction) =
            (asked.peer(root)?, reduction(asked.communicator, operator, asked.kind)?);
        // Other ranks write nothing, but their factor counts.
        let to = if root == asked.rank() {
            asked.span(to, 1)?
        } else {
            Span { len: 0, ..asked.span(from, 1)? }
        };
        let outcome = Outcome::Reduced(to, asked.kind, reduction);
        Ok((Kind::Collective, vec![(root, asked.span(from, 1)?)], outcome))
    };

    ncclReduceScatter(from, to; operator) |asked| {
        let reduction = reduction(asked.communicator, operator, asked.kind)?;
        let outcome = Outcome::Reduced(asked.span(to, 1)?, asked.kind, reduction);
        Ok((Kind::Collective, asked.blocks(from)?, outcome))
    };

    ncclBroadcast(from, to; root) |asked| {
        let root = asked.peer(root)?;
        let outgoing = if root == asked.rank() { asked.to_all(from)? } else { Vec::new() };
        Ok((Kind::Collective, outgoing, Outcome::Placed(vec![(root, asked.span(to, 1)?)])))
    };

    ncclAllGather(from, to;) |asked| {
        Ok((Kind::Collective, asked.to_all(from)?, Outcome::Placed(asked.blocks(to)?)))
    };

    ncclAlltoAll(from, to;) |asked| {
        Ok((Kind::Collective, asked.blocks(from)?, Outcome::Placed(asked.blocks(to)?)))
    };

    ncclGather(from, to; root) |asked| {
        let root = asked.peer(root)?;
        let outcome = if root == asked.rank() {
            Outcome::Placed(asked.blocks(to)?)
        } else {
            Outcome::Nothing
        };
        Ok((Kind::Collective, vec![(root, asked.span(from, 1)?)], outcome))
    };

    ncclScatter(from, to; root) |asked| {
        let root = asked.peer(root)?;
        let outgoing = if root == asked.rank() { asked.blocks(from)? } else { Vec::new() };
        Ok((Kind::Collective, outgoing, Outcome::Placed(vec![(root, asked.span(to, 1)?)])))
    };

    /// Over when the peer has received: outside of a group, two ranks that first send and then receive wait for ever.
    ncclSend(from; peer) |asked| {
        let peer = asked.peer(peer)?;
        Ok((Kind::Send(peer), vec![(peer, asked.span(from, 1)?)], Outcome::Nothing))
    };

    ncclRecv(to; peer) |asked| {
        let peer = asked.peer(peer)?;
        Ok((Kind::Receive(peer), Vec::new(), Outcome::Placed(vec![(peer, asked.span(to, 1)?)])))
    };
}
