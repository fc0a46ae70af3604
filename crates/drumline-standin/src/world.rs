//! All that the stand-in knows, behind one lock, and the way of every call through it.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::code::Code;
use crate::devices::{Device, Settings};
use crate::faults::Faults;
use crate::memory::{Memory, Range};
use crate::streams::{Capture, Streams};
use crate::variables::variable;
use crate::work::{Action, OpId, Step, Work};

pub(crate) struct World {
    /// The process that initialised the driver. A forked child has no driver.
    process: Option<u32>,
    pub(crate) settings: Settings,
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: Memory,
    pub(crate) streams: Streams,
    pub(crate) work: Work,
    pub(crate) faults: Faults,
    pub(crate) violations: u64,
    pub(crate) last_violation: String,
    /// What was not given back before its context ended.
    pub(crate) abandoned: usize,
    handles: usize,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

thread_local! {
    /// The contexts of this thread; the last is the current one.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The current context of a thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Current {
    pub(crate) context: usize,
    pub(crate) device: usize,
}

/// What a call waits for.
#[derive(Debug)]
pub(crate) struct Awaited {
    pub(crate) ops: Vec<OpId>,
    pub(crate) device: usize,
}

/// Handles lie where no program has memory. Distances of 16 make a wrong one likely to be noticed.
const FIRST_HANDLE: usize = 0x5354_0000_0000;

impl World {
    fn new() -> Self {
        let seed = variable("STANDIN_SEED").and_then(|it| it.parse().ok()).unwrap_or(1);
        World {
            process: None,
            settings: Settings::read(),
            devices: Vec::new(),
            memory: Memory::default(),
            streams: Streams::default(),
            work: Work::new(seed),
            faults: variable("STANDIN_FAIL").map(|it| Faults::of_variable(&it)).unwrap_or_default(),
            violations: 0,
            last_violation: String::new(),
            abandoned: 0,
            handles: 0,
        }
    }

    /// cuInit.
    pub(crate) fn init(&mut self) -> Result<(), Code> {
        if self.process.is_none() {
            self.settings = Settings::read();
            let numbers = self.settings.visible();
            if numbers.is_empty() {
                return Err(Code::NO_DEVICE);
            }
            for number in numbers {
                let context = self.handle();
                self.devices.push(Device::new(number, context));
            }
            self.process = Some(std::process::id());
        }
        Ok(())
    }

    /// As it was when the library was loaded. Handles are not used again.
    pub(crate) fn reset(&mut self) {
        self.memory.clear();
        let handles = self.handles;
        *self = World { handles, ..World::new() };
    }

    pub(crate) fn ready(&self) -> Result<(), Code> {
        if self.process == Some(std::process::id()) { Ok(()) } else { Err(Code::NOT_INITIALIZED) }
    }

    pub(crate) fn handle(&mut self) -> usize {
        self.handles += 1;
        FIRST_HANDLE + 16 * self.handles
    }

    pub(crate) fn device(&mut self, ordinal: i32) -> Result<&mut Device, Code> {
        self.ready()?;
        usize::try_from(ordinal)
            .ok()
            .and_then(|it| self.devices.get_mut(it))
            .ok_or(Code::INVALID_DEVICE)
    }

    /// The device of a live context.
    pub(crate) fn device_of(&self, context: usize) -> Result<usize, Code> {
        self.ready()?;
        match self.devices.iter().position(|it| it.context == context) {
            Some(device) if self.devices[device].retained > 0 => Ok(device),
            Some(_) => Err(Code::CONTEXT_IS_DESTROYED),
            None => Err(Code::INVALID_CONTEXT),
        }
    }

    /// The current context of this thread, whether or not its device works.
    pub(crate) fn current_of_any(&self) -> Result<Current, Code> {
        self.ready()?;
        let context = CONTEXTS.with_borrow(|it| it.last().copied()).ok_or(Code::INVALID_CONTEXT)?;
        Ok(Current { context, device: self.device_of(context)? })
    }

    /// The current context of this thread; its device works.
    pub(crate) fn current(&self) -> Result<Current, Code> {
        let current = self.current_of_any()?;
        self.works(current.device)?;
        Ok(current)
    }

    pub(crate) fn works(&self, device: usize) -> Result<(), Code> {
        self.devices.get(device).and_then(|it| it.broken).map_or(Ok(()), Err)
    }

    /// All that the device does from now on fails.
    pub(crate) fn break_device(&mut self, device: usize, code: Code) {
        if let Some(it) = self.devices.get_mut(device)
            && it.broken.is_none()
        {
            it.broken = Some(code);
            self.work.drop_device(device);
        }
    }

    /// The handle of the stream that a program gave.
    pub(crate) fn stream(&mut self, given: usize) -> Result<usize, Code> {
        self.ready()?;
        let current = self.current_of_any().ok().map(|it| (it.context, it.device));
        let handles = &mut self.handles;
        self.streams.resolve(given, current, || {
            *handles += 1;
            FIRST_HANDLE + 16 * *handles
        })
    }

    /// The handle of a stream that takes operations now.
    pub(crate) fn open_stream(&mut self, given: usize) -> Result<usize, Code> {
        let stream = self.stream(given)?;
        self.works(self.streams.get(stream)?.device)?;
        if self.streams.meets_capture(stream)? {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        match self.streams.get(stream)?.capture {
            Capture::None => Ok(stream),
            // There are no graphs.
            Capture::Active | Capture::Invalid => {
                self.streams.get_mut(stream)?.capture = Capture::Invalid;
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Queues an operation on an open stream, after these others too.
    pub(crate) fn queue(
        &mut self,
        stream: usize,
        also: &[OpId],
        action: Action,
    ) -> Result<OpId, Code> {
        let device = self.streams.get(stream)?.device;
        let mut after = self.streams.before(stream)?;
        after.extend(also);
        let op = self.work.queue(&mut self.memory, device, stream, after, action);
        self.streams.get_mut(stream)?.tail = op;
        Ok(op)
    }

    /// All that ends before a stream is empty.
    pub(crate) fn awaited(&self, stream: usize) -> Result<Awaited, Code> {
        let ops = self.streams.before(stream)?;
        Ok(Awaited { ops, device: self.streams.get(stream)?.device })
    }

    /// Whether all of it has ended.
    pub(crate) fn is_over(&self, awaited: &Awaited) -> Result<bool, Code> {
        self.works(awaited.device)?;
        Ok(!awaited.ops.iter().any(|op| self.work.is_pending(*op)))
    }

    /// The program gave this memory away. If something queued uses it, that is the program's mistake.
    pub(crate) fn was_released(&mut self, range: &Range, how: &str) {
        if self.work.touches(range.id) {
            self.violate(format!(
                "{how} of {:#x}, {} bytes, which queued work uses",
                range.start, range.len
            ));
        }
    }

    pub(crate) fn violate(&mut self, what: String) {
        self.violations += 1;
        self.last_violation = what;
    }
}

/// A closed door to the world.
pub(crate) fn world() -> Door {
    let mut guard = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    guard.get_or_insert_with(World::new);
    Door(guard)
}

pub(crate) struct Door(MutexGuard<'static, Option<World>>);

impl std::ops::Deref for Door {
    type Target = World;

    fn deref(&self) -> &World {
        match &*self.0 {
            Some(world) => world,
            None => unreachable!("`world` made it"),
        }
    }
}

impl std::ops::DerefMut for Door {
    fn deref_mut(&mut self) -> &mut World {
        match &mut *self.0 {
            Some(world) => world,
            None => unreachable!("`world` made it"),
        }
    }
}

/// A call of the driver: it may be made to fail, lets some work move on, and then does what it is for.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&mut World) -> Result<(), Code>) -> i32 {
    if let Some(code) = enter(name) {
        return code;
    }
    number(body(&mut world()))
}

/// A call that returns when what it asks for is over.
pub(crate) fn call_and_wait(
    name: &'static str,
    body: impl FnOnce(&mut World) -> Result<Option<Awaited>, Code>,
) -> i32 {
    if let Some(code) = enter(name) {
        return code;
    }
    let awaited = match body(&mut world()) {
        Ok(Some(awaited)) => awaited,
        other => return number(other.map(|_| ())),
    };
    number(until(|world| world.is_over(&awaited)))
}

/// Counts a call, and lets some work move on. A code: the call must fail with it.
pub(crate) fn enter(name: &'static str) -> Option<i32> {
    if let Some(code) = world().faults.call(name) {
        return Some(code);
    }
    let steps = world().work.steps();
    for _ in 0..steps {
        if !step() {
            break;
        }
    }
    None
}

/// Lets work move on until something is so. An error if for a long time nothing moves: other threads or processes may
/// have to do something first, and never do.
pub(crate) fn until(mut is_so: impl FnMut(&mut World) -> Result<bool, Code>) -> Result<(), Code> {
    let mut since: Option<Instant> = None;
    let mut turns = 0u32;
    loop {
        let mut door = world();
        if is_so(&mut door)? {
            return Ok(());
        }
        let patience = Duration::from_millis(door.settings.patience_ms);
        drop(door);
        if step() {
            (since, turns) = (None, 0);
            continue;
        }
        if since.get_or_insert_with(Instant::now).elapsed() > patience {
            return Err(Code::LAUNCH_TIMEOUT);
        }
        turns += 1;
        if turns < 100 {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Moves one operation. False: none can move.
fn step() -> bool {
    let mut door = world();
    let World { work, memory, .. } = &mut *door;
    match work.step(memory) {
        Step::Idle => false,
        Step::Moved => true,
        Step::Marked { event, op, at } => {
            if let Ok(event) = door.streams.event_mut(event)
                && event.op == op
            {
                event.at = at;
            }
            true
        }
        Step::Violated(how) => {
            door.violate(how);
            true
        }
        Step::Broke { device, code } => {
            door.break_device(device, code);
            true
        }
        Step::Call { op, function, data } => {
            drop(door);
            // SAFETY: the program gave both to cuLaunchHostFunc, which calls the one with the other, once. The lock is
            // open, so that a function that calls the driver, which it must not, gets an answer.
            unsafe { function(data as *mut std::ffi::c_void) };
            world().work.end(op);
            true
        }
    }
}

fn number(result: Result<(), Code>) -> i32 {
    result.err().map_or(0, |code| code.0)
}

/// Changes the contexts of this thread.
pub(crate) fn with_contexts<T>(change: impl FnOnce(&mut Vec<usize>) -> T) -> T {
    CONTEXTS.with_borrow_mut(change)
}
