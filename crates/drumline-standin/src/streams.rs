//! Streams and events: names for operations.

use std::collections::BTreeMap;
use std::thread::ThreadId;

use crate::code::Code;
use crate::work::OpId;

/// The stream that a program names by 1, or by nothing.
pub(crate) const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Program,
    /// The driver: one for each context.
    Legacy,
    /// The driver: one for each context and thread.
    Thread,
}

#[derive(Clone, Debug)]
pub(crate) struct Stream {
    pub(crate) context: usize,
    pub(crate) device: usize,
    /// It and the legacy stream wait for each other.
    pub(crate) blocking: bool,
    pub(crate) tail: OpId,
    pub(crate) capture: Capture,
    owner: Owner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capture {
    None,
    Active,
    /// Something was asked for that cannot be captured.
    Invalid,
}

#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) context: usize,
    pub(crate) device: usize,
    pub(crate) timed: bool,
    pub(crate) recorded: bool,
    pub(crate) captured: bool,
    pub(crate) op: OpId,
    /// When the device passed it, in ended operations.
    pub(crate) at: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: BTreeMap<usize, Stream>,
    events: BTreeMap<usize, Event>,
    legacy: BTreeMap<usize, usize>,
    threads: Vec<(usize, ThreadId, usize)>,
}

impl Streams {
    /// Those of the program.
    pub(crate) fn len(&self) -> usize {
        self.streams.values().filter(|it| it.owner == Owner::Program).count() + self.events.len()
    }

    pub(crate) fn create(&mut self, handle: usize, context: usize, device: usize, blocking: bool) {
        self.add(handle, context, device, blocking, Owner::Program);
    }

    /// The handle that stands for what a program gave: 0, 1 and 2 are streams of the driver.
    pub(crate) fn resolve(
        &mut self,
        given: usize,
        context: Option<(usize, usize)>,
        handle: impl FnOnce() -> usize,
    ) -> Result<usize, Code> {
        match given {
            0 | LEGACY => {
                let (context, device) = context.ok_or(Code::INVALID_CONTEXT)?;
                if let Some(found) = self.legacy.get(&context) {
                    return Ok(*found);
                }
                let handle = handle();
                self.legacy.insert(context, handle);
                self.add(handle, context, device, false, Owner::Legacy);
                Ok(handle)
            }
            PER_THREAD => {
                let (context, device) = context.ok_or(Code::INVALID_CONTEXT)?;
                let thread = std::thread::current().id();
                if let Some((.., found)) =
                    self.threads.iter().find(|(of, by, _)| (*of, *by) == (context, thread))
                {
                    return Ok(*found);
                }
                let handle = handle();
                self.threads.push((context, thread, handle));
                self.add(handle, context, device, true, Owner::Thread);
                Ok(handle)
            }
            _ => match self.streams.get(&given) {
                Some(stream) if stream.owner == Owner::Program => Ok(given),
                _ => Err(Code::INVALID_HANDLE),
            },
        }
    }

    pub(crate) fn get(&self, handle: usize) -> Result<&Stream, Code> {
        self.streams.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn get_mut(&mut self, handle: usize) -> Result<&mut Stream, Code> {
        self.streams.get_mut(&handle).ok_or(Code::INVALID_HANDLE)
    }

    /// What the next operation of a stream must wait for.
    pub(crate) fn before(&self, handle: usize) -> Result<Vec<OpId>, Code> {
        let stream = self.get(handle)?;
        let of_context = |it: &&Stream| it.context == stream.context;
        let mut before = vec![stream.tail];
        if stream.owner == Owner::Legacy {
            before.extend(
                self.streams.values().filter(of_context).filter(|it| it.blocking).map(|it| it.tail),
            );
        } else if stream.blocking {
            let legacy = |it: &&Stream| it.owner == Owner::Legacy;
            before
                .extend(self.streams.values().filter(of_context).filter(legacy).map(|it| it.tail));
        }
        Ok(before)
    }

    /// Whether an operation of this stream would have to wait for one that is being captured.
    pub(crate) fn meets_capture(&self, handle: usize) -> Result<bool, Code> {
        let stream = self.get(handle)?;
        Ok(stream.owner == Owner::Legacy
            && self.streams.values().any(|it| {
                it.context == stream.context && it.blocking && it.capture != Capture::None
            }))
    }

    /// The stream that the program has made last on a device. Handles grow.
    pub(crate) fn last_of(&mut self, device: usize) -> Option<&mut Stream> {
        let is_meant = |it: &&mut Stream| it.owner == Owner::Program && it.device == device;
        self.streams.values_mut().rev().find(is_meant)
    }

    pub(crate) fn is_legacy(&self, handle: usize) -> bool {
        self.streams.get(&handle).is_some_and(|it| it.owner == Owner::Legacy)
    }

    pub(crate) fn destroy(&mut self, handle: usize) -> Result<Stream, Code> {
        match self.streams.get(&handle) {
            Some(stream) if stream.owner == Owner::Program => {}
            _ => return Err(Code::INVALID_HANDLE),
        }
        self.streams.remove(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn create_event(
        &mut self,
        handle: usize,
        context: usize,
        device: usize,
        timed: bool,
    ) {
        let event =
            Event { context, device, timed, recorded: false, captured: false, op: 0, at: 0 };
        self.events.insert(handle, event);
    }

    pub(crate) fn event(&self, handle: usize) -> Result<&Event, Code> {
        self.events.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn event_mut(&mut self, handle: usize) -> Result<&mut Event, Code> {
        self.events.get_mut(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn destroy_event(&mut self, handle: usize) -> Result<Event, Code> {
        self.events.remove(&handle).ok_or(Code::INVALID_HANDLE)
    }

    /// The context is gone, and all that it had. Says how much of this was the program's.
    pub(crate) fn drop_context(&mut self, context: usize) -> usize {
        let before = self.len();
        self.streams.retain(|_, it| it.context != context);
        self.events.retain(|_, it| it.context != context);
        self.legacy.remove(&context);
        self.threads.retain(|(of, ..)| *of != context);
        before - self.len()
    }

    fn add(&mut self, handle: usize, context: usize, device: usize, blocking: bool, owner: Owner) {
        let stream = Stream { context, device, blocking, tail: 0, capture: Capture::None, owner };
        self.streams.insert(handle, stream);
    }
}
