//! A device for ranks that have none: memory of the host behind made-up addresses.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use drumline_shm::{PeerWindow, Registered};

use crate::fabric::Fabric;
use crate::{
    Device, Error, Event, Flight, Gate, Identity, Memory, Part, Pinned, PinnedWindow, Place,
    Refused, Result, Stream,
};

/// A device without hardware, with which a rank that has no GPU takes part in a group of ranks that have one.
///
/// Its streams do their work at once: a copy has ended when its call returns. So where a stream would wait, the caller
/// waits. Clones are one device.
///
/// ```
/// use drumline_device::{Device, HostDevice, Stream};
///
/// # fn main() -> drumline_device::Result<()> {
/// let device = HostDevice::new();
/// let mut gradient = device.allocate(4);
/// let copy = device.allocate(4);
/// gradient.write(&[1, 2, 3, 4])?;
///
/// device.stream()?.copy_within(gradient.place(), copy.place())?;
/// let mut found = [0; 4];
/// copy.read(&mut found)?;
/// assert_eq!(found, [1, 2, 3, 4]);
///
/// let place = gradient.place();
/// drop(gradient);
/// assert!(device.check(place).is_err()); // freed
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct HostDevice(Arc<Buffers>);

/// All memory of a device.
struct Buffers {
    identity: Identity,
    /// By their made-up addresses.
    bytes: Mutex<BTreeMap<u64, Vec<u8>>>,
}

/// Where the next buffer of any device begins. No process has memory there: addresses of programs have fewer bits.
static NEXT: AtomicU64 = AtomicU64::new(1 << 62);

const ALIGNMENT: u64 = 256;

impl HostDevice {
    /// A device that has no memory yet.
    pub fn new() -> HostDevice {
        // These keys differ in all processes.
        let keys = [RandomState::new(), RandomState::new()].map(|keys| keys.hash_one(0));
        let uuid = (u128::from(keys[0]) << 64 | u128::from(keys[1])).to_ne_bytes();
        let identity = Identity {
            kind: "host",
            ordinal: 0,
            name: "no GPU".to_owned(),
            pci: "memory of the host".to_owned(),
            uuid,
            numa_node: None,
        };
        HostDevice(Arc::new(Buffers { identity, bytes: Mutex::default() }))
    }

    /// Memory of this device, in zeros.
    pub fn allocate(&self, bytes: usize) -> HostMemory {
        let room = (bytes.max(1) as u64).next_multiple_of(ALIGNMENT);
        let address = NEXT.fetch_add(room, Ordering::Relaxed);
        self.0.lock(|all| all.insert(address, vec![0; bytes]));
        HostMemory { buffers: self.0.clone(), place: Place { address, bytes } }
    }

    fn lacks(&self, what: &'static str) -> Error {
        Error::Unsupported { device: self.0.identity.to_string(), what }
    }
}

impl Default for HostDevice {
    fn default() -> HostDevice {
        HostDevice::new()
    }
}

impl Device for HostDevice {
    fn identity(&self) -> &Identity {
        &self.0.identity
    }

    fn check(&self, place: Place) -> Result<()> {
        self.0.with(place, |_| ())
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(HostStream(self.0.clone())))
    }

    fn pin(&self, memory: Registered<u8>) -> Result<Pinned, Refused<Registered<u8>>> {
        Ok(Pinned::in_place(memory, ()))
    }

    fn pin_window(&self, window: PeerWindow) -> Result<PinnedWindow> {
        Ok(PinnedWindow::new(window, ()))
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned> {
        Ok(Pinned::of_driver(vec![0; bytes]))
    }

    /// Unsupported: who joins a call waits on the host for its end.
    fn gate(&self) -> Result<Arc<dyn Gate>> {
        Err(self.lacks("let streams wait for the host"))
    }

    /// Unsupported.
    fn fabric(&self, _library: Option<&Path>) -> Result<Arc<dyn Fabric>> {
        Err(self.lacks("be joined to GPUs: this rank has none"))
    }

    fn memory(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(self.allocate(bytes)))
    }
}

impl Buffers {
    /// No call panics while it holds the lock in a state that others must not see.
    fn lock<R>(&self, act: impl FnOnce(&mut BTreeMap<u64, Vec<u8>>) -> R) -> R {
        act(&mut self.bytes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Does something with the bytes of a place.
    fn with<R>(&self, place: Place, act: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        if place.bytes == 0 {
            return Ok(act(&mut []));
        }
        self.lock(|all| {
            let within = all.range_mut(..=place.address).next_back().and_then(|(start, buffer)| {
                let first = usize::try_from(place.address - start).ok()?;
                buffer.get_mut(first..)?.get_mut(..place.bytes)
            });
            let problem = "it is not within memory of this device that is allocated now: pass what \
                           `HostDevice::allocate` gives, and keep it until calls have ended";
            within.map(act).ok_or(Error::Place { place, problem: problem.to_owned() })
        })
    }
}

/// Memory of a [`HostDevice`], which is freed on drop.
pub struct HostMemory {
    buffers: Arc<Buffers>,
    place: Place,
}

impl HostMemory {
    /// Where it lies.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Copies `bytes` to the beginning.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when there are too many.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.buffers.with(self.first(bytes.len())?, |own| own.copy_from_slice(bytes))
    }

    /// Copies the first bytes.
    ///
    /// # Errors
    ///
    /// As for [`HostMemory::write`].
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        self.buffers.with(self.first(bytes.len())?, |own| bytes.copy_from_slice(own))
    }

    fn first(&self, bytes: usize) -> Result<Place> {
        let problem = || format!("{bytes} bytes do not fit into {}", self.place);
        self.place.part(0..bytes).ok_or_else(|| Error::Argument { problem: problem() })
    }
}

impl Memory for HostMemory {
    fn place(&self) -> Place {
        self.place
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        self.buffers.lock(|all| all.remove(&self.place.address));
    }
}

/// It is always at its end.
struct HostStream(Arc<Buffers>);

/// Memory that no copy uses now, and how its copies went.
fn copied(
    mut memory: Flight<Pinned>,
    parts: &[Part],
    copy: impl Fn(&Part, &mut Pinned) -> Result<()>,
) -> Result<Flight<Pinned>, Refused<Flight<Pinned>>> {
    let done =
        memory.settled().and_then(|memory| parts.iter().try_for_each(|part| copy(part, memory)));
    match done {
        Ok(()) => Ok(memory),
        Err(error) => Err(Box::new((error, memory))),
    }
}

fn outside(part: &Part, bytes: usize) -> Error {
    let Part { place, at, .. } = part;
    let problem =
        format!("{} bytes from byte {at} on do not lie in {bytes} bytes of the host", place.bytes);
    Error::Argument { problem }
}

impl Stream for HostStream {
    fn copy_out(
        &self,
        parts: &[Part],
        memory: Flight<Pinned>,
    ) -> Result<Flight<Pinned>, Refused<Flight<Pinned>>> {
        copied(memory, parts, |part, memory| {
            if part.window.is_some() {
                let problem = "a device does not write to the memory of a neighbour".to_owned();
                return Err(Error::Argument { problem });
            }
            let memory = memory.as_mut();
            let bytes = memory.len();
            let to = memory.get_mut(part.at..).and_then(|it| it.get_mut(..part.place.bytes));
            let to = to.ok_or_else(|| outside(part, bytes))?;
            self.0.with(part.place, |from| to.copy_from_slice(from))
        })
    }

    fn copy_in(
        &self,
        parts: &[Part],
        memory: Flight<Pinned>,
    ) -> Result<Flight<Pinned>, Refused<Flight<Pinned>>> {
        copied(memory, parts, |part, memory| {
            let Part { place, at, window } = part;
            let Some(window) = window.as_ref().map(PinnedWindow::window) else {
                let memory = (*memory).as_ref();
                let from = memory.get(*at..).and_then(|it| it.get(..place.bytes));
                let from = from.ok_or_else(|| outside(part, memory.len()))?;
                return self.0.with(*place, |to| to.copy_from_slice(from));
            };
            let end = at.checked_add(place.bytes).ok_or_else(|| outside(part, window.len()))?;
            let from = window.to_vec(*at..end).map_err(|_| outside(part, window.len()))?;
            self.0.with(*place, |to| to.copy_from_slice(&from))
        })
    }

    fn copy_within(&self, from: Place, to: Place) -> Result<()> {
        if from.bytes != to.bytes {
            let problem = format!("{from} do not fit {to}");
            return Err(Error::Argument { problem });
        }
        let bytes = self.0.with(from, |bytes| bytes.to_vec())?;
        self.0.with(to, |to| to.copy_from_slice(&bytes))
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(Come))
    }

    /// Waits on the host, for an event of any driver.
    fn wait(&self, event: &dyn Event) -> Result<()> {
        event.wait()
    }

    /// Unsupported: see [`HostDevice::gate`](Device::gate).
    fn wait_gate(&self, _gate: &Arc<dyn Gate>) -> Result<()> {
        let device = self.0.identity.to_string();
        Err(Error::Unsupported { device, what: "let streams wait for the host" })
    }

    fn is_capturing(&self) -> Result<bool> {
        Ok(false)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An event that has come.
#[derive(Debug)]
struct Come;

impl Event for Come {
    fn has_come(&self) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for HostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HostDevice").field(&self.0.identity.to_string()).finish()
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("place", &self.place).finish()
    }
}

impl fmt::Debug for HostStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostStream")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(memory: &HostMemory) -> Vec<u8> {
        let mut bytes = vec![0; memory.place().bytes];
        memory.read(&mut bytes).unwrap();
        bytes
    }

    fn part(place: Place, at: usize) -> Part {
        Part { place, at, window: None }
    }

    #[test]
    fn places_are_aligned_and_only_those_that_are_allocated_pass() {
        let device = HostDevice::new();
        let [first, second] = [device.allocate(300), device.allocate(10)];
        let [Place { address, .. }, other] = [first.place(), second.place()];
        assert_eq!((address % 256, other.address % 256), (0, 0));
        assert!(!first.place().overlaps(other));
        let check = |address, bytes| device.check(Place { address, bytes });
        check(address + 299, 1).unwrap();
        check(7, 0).unwrap();
        for (address, bytes) in [(address, 301), (address + 300, 1), (7, 1), (u64::MAX, 1)] {
            assert!(matches!(check(address, bytes), Err(Error::Place { .. })), "{address:#x}");
        }
        HostDevice::new().check(other).unwrap_err();
        drop(second);
        device.check(other).unwrap_err();
        assert_ne!(device.identity().uuid, HostDevice::new().identity().uuid);
    }

    #[test]
    fn copies_go_where_their_parts_say() {
        let device = HostDevice::new();
        let stream = device.stream().unwrap();
        let mut memory = device.allocate(6);
        memory.write(&[1, 2, 3, 4, 5, 6]).unwrap();
        let of = |range| memory.place().part(range).unwrap();
        let pinned = Flight::from(device.pinned(6).unwrap());
        let parts = [part(of(4..6), 0), part(of(0..3), 3)];
        let pinned = stream.copy_out(&parts, pinned).unwrap();
        let pinned = stream.copy_in(&[part(of(0..6), 0)], pinned).unwrap();
        assert_eq!(bytes_of(&memory), [5, 6, 0, 1, 2, 3]);
        // Within the buffer, over itself.
        stream.copy_within(of(0..4), of(2..6)).unwrap();
        assert_eq!(bytes_of(&memory), [5, 6, 5, 6, 0, 1]);
        stream.copy_within(of(0..4), of(0..3)).unwrap_err();
        // The memory comes back when a copy is refused.
        let refused = stream.copy_in(&[part(of(0..4), 3)], pinned).unwrap_err();
        assert!(refused.0.to_string().contains("4 bytes from byte 3 on"), "{}", refused.0);
        let refused = stream.copy_out(&[part(of(0..4), usize::MAX)], refused.1).unwrap_err();
        assert_eq!(refused.1.land().unwrap().as_ref(), [5, 6, 0, 1, 2, 3]);
        assert_eq!(bytes_of(&memory), [5, 6, 5, 6, 0, 1]);
        assert!(memory.write(&[0; 7]).is_err());
    }
}
