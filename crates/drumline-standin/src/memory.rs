//! Memory that the driver knows: of devices, and of the host where it is pinned.
//!
//! Addresses of device memory are reserved without any right, so that a CPU that touches one gets a fatal signal. The
//! bytes lie in a second mapping, which only the stand-in knows.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::ops;
use std::os::fd::AsRawFd;

use crate::code::Code;
use crate::host::{self, PAGE};
use crate::ipc::{Handle, Lent, file_of, handle_of};

/// What fills memory whose contents nobody may rely on: new memory, and what a copy has yet to write.
pub(crate) const POISON: u8 = 0xDB;

/// The most that a copy moves in one step through a buffer.
const PIECE: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory of a device; its bytes lie at `hidden`.
    Device { hidden: usize },
    /// Memory of a device that another process has lent; its bytes lie at `hidden`.
    Opened { hidden: usize },
    /// Host memory that the driver gave out.
    HostAlloc,
    /// Host memory of the program, pinned in place.
    Registered,
}

/// One allocation or registration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) id: u64,
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) kind: Kind,
    pub(crate) context: usize,
    pub(crate) device: usize,
}

impl Range {
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.kind, Kind::Device { .. } | Kind::Opened { .. })
    }

    /// Whether other processes may open it.
    pub(crate) fn is_lendable(&self) -> bool {
        matches!(self.kind, Kind::Device { .. })
    }
}

/// Bytes that an operation reads or writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) address: usize,
    pub(crate) len: usize,
    /// The range that they were in when the operation was queued. None: pageable host memory.
    pub(crate) range: Option<u64>,
    /// The device whose memory it is.
    pub(crate) device: Option<usize>,
}

impl Span {
    pub(crate) fn overlaps(&self, other: &Span) -> bool {
        self.address < other.address + other.len && other.address < self.address + self.len
    }

    pub(crate) fn is_pageable(&self) -> bool {
        self.range.is_none()
    }

    /// Its part of `len` bytes from `offset` on.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Span {
        Span { address: self.address + offset, len, ..*self }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Memory {
    ranges: BTreeMap<usize, Range>,
    made: u64,
    /// Reserved addresses for the next allocations of device memory, one behind the other.
    stretch: ops::Range<usize>,
    /// By range: where the bytes lie that other processes may open.
    lent: BTreeMap<u64, File>,
    /// What was opened here: where it begins, and how often it was opened.
    opened: BTreeMap<Handle, (usize, usize)>,
}

impl Memory {
    /// Lays the next allocations of device memory side by side, as long as they fit into `len` bytes.
    pub(crate) fn lay_side_by_side(&mut self, len: usize) -> Result<(), Code> {
        self.give_stretch_back();
        let len = len.next_multiple_of(PAGE);
        let start = map(len, libc::PROT_NONE)?;
        self.stretch = start..start + len;
        Ok(())
    }

    fn give_stretch_back(&mut self) {
        let rest = std::mem::take(&mut self.stretch);
        if !rest.is_empty() {
            unmap(rest.start, rest.len());
        }
    }

    /// Addresses for device memory, without any right.
    fn reserve(&mut self, len: usize) -> Result<usize, Code> {
        let whole = len.next_multiple_of(PAGE);
        if whole > self.stretch.len() {
            return map(len, libc::PROT_NONE);
        }
        let start = self.stretch.start;
        self.stretch.start += whole;
        Ok(start)
    }

    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Bytes in use on a device.
    pub(crate) fn used(&self, device: usize) -> usize {
        self.ranges
            .values()
            .filter(|it| matches!(it.kind, Kind::Device { .. }) && it.device == device)
            .map(|it| it.len)
            .sum()
    }

    pub(crate) fn find(&self, address: usize) -> Option<&Range> {
        let (_, range) = self.ranges.range(..=address).next_back()?;
        (address < range.start + range.len).then_some(range)
    }

    /// The ranges of a context.
    pub(crate) fn of_context(&self, context: usize) -> Vec<Range> {
        self.ranges.values().filter(|it| it.context == context).copied().collect()
    }

    /// What an operation on these bytes touches. They lie in one range, or in none.
    pub(crate) fn span(&self, address: usize, len: usize) -> Result<Span, Code> {
        let end = address.checked_add(len).ok_or(Code::INVALID_VALUE)?;
        if address == 0 {
            return Err(Code::INVALID_VALUE);
        }
        match self.find(address) {
            Some(range) if end <= range.start + range.len => Ok(Span {
                address,
                len,
                range: Some(range.id),
                device: range.is_device().then_some(range.device),
            }),
            Some(_) => Err(Code::INVALID_VALUE),
            None if self.ranges.range(address..end.max(address)).next().is_some() => {
                Err(Code::INVALID_VALUE)
            }
            None => Ok(Span { address, len, range: None, device: None }),
        }
    }

    /// New memory of a device, full of poison.
    pub(crate) fn allocate(
        &mut self,
        len: usize,
        context: usize,
        device: usize,
    ) -> Result<usize, Code> {
        let hidden = map(len, libc::PROT_READ | libc::PROT_WRITE)?;
        let start = match self.reserve(len) {
            Ok(start) => start,
            Err(code) => {
                unmap(hidden, len);
                return Err(code);
            }
        };
        // SAFETY: a fresh mapping of at least `len` bytes.
        unsafe { std::ptr::write_bytes(hidden as *mut u8, POISON, len) };
        self.add(start, len, Kind::Device { hidden }, context, device);
        Ok(start)
    }

    /// New pinned memory of the host, full of poison.
    pub(crate) fn allocate_host(
        &mut self,
        len: usize,
        context: usize,
        device: usize,
    ) -> Result<usize, Code> {
        let start = map(len, libc::PROT_READ | libc::PROT_WRITE)?;
        // SAFETY: a fresh mapping of at least `len` bytes.
        unsafe { std::ptr::write_bytes(start as *mut u8, POISON, len) };
        self.add(start, len, Kind::HostAlloc, context, device);
        Ok(start)
    }

    pub(crate) fn register(
        &mut self,
        start: usize,
        len: usize,
        context: usize,
        device: usize,
    ) -> Result<(), Code> {
        let end = start.checked_add(len).ok_or(Code::INVALID_VALUE)?;
        if start == 0 || len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if self.find(start).is_some() || self.ranges.range(start..end).next().is_some() {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        if !host::is_mapped(start, len) {
            return Err(Code::INVALID_VALUE);
        }
        self.add(start, len, Kind::Registered, context, device);
        Ok(())
    }

    /// Lets other processes open the memory of a device that starts here. `number`: the machine's of the device.
    pub(crate) fn lend(&mut self, start: usize, number: usize) -> Result<Handle, Code> {
        let range = *self.ranges.get(&start).ok_or(Code::INVALID_VALUE)?;
        let Kind::Device { hidden } = range.kind else { return Err(Code::INVALID_VALUE) };
        let file = match self.lent.entry(range.id) {
            Entry::Occupied(lent) => lent.into_mut(),
            Entry::Vacant(none) => none.insert(into_file(hidden, range.len)?),
        };
        handle_of(file, range.len, number).map_err(|_| Code::OPERATING_SYSTEM)
    }

    /// Memory that another process has lent, and where it is here. Who opens it twice gets one address.
    pub(crate) fn open(
        &mut self,
        handle: &Handle,
        lent: &Lent,
        context: usize,
        device: usize,
    ) -> Result<usize, Code> {
        if let Some((start, times)) = self.opened.get_mut(handle) {
            *times += 1;
            return Ok(*start);
        }
        let file = lent.file()?;
        let hidden = map(lent.len, libc::PROT_READ | libc::PROT_WRITE)?;
        let start = lie_in(&file, hidden, lent.len).and_then(|()| self.reserve(lent.len));
        let start = start.inspect_err(|_| unmap(hidden, lent.len))?;
        self.add(start, lent.len, Kind::Opened { hidden }, context, device);
        self.opened.insert(*handle, (start, 1));
        Ok(start)
    }

    /// Closes what was opened, once. The last time its range is forgotten.
    pub(crate) fn close(&mut self, start: usize) -> Result<Option<Range>, Code> {
        let opened = self.opened.values_mut().find(|(at, _)| *at == start);
        let (_, times) = opened.ok_or(Code::INVALID_VALUE)?;
        *times -= 1;
        match times {
            0 => Ok(self.release(start, |_| true)),
            _ => Ok(None),
        }
    }

    /// Forgets the range that starts here, if `fits` says so, and gives its memory back.
    pub(crate) fn release(&mut self, start: usize, fits: impl Fn(Kind) -> bool) -> Option<Range> {
        let range = *self.ranges.get(&start).filter(|it| fits(it.kind))?;
        self.ranges.remove(&start);
        self.lent.remove(&range.id);
        self.opened.retain(|_, (at, _)| *at != start);
        match range.kind {
            Kind::Device { hidden } | Kind::Opened { hidden } => {
                unmap(hidden, range.len);
                unmap(range.start, range.len);
            }
            Kind::HostAlloc => unmap(range.start, range.len),
            Kind::Registered => {}
        }
        Some(range)
    }

    pub(crate) fn clear(&mut self) {
        self.give_stretch_back();
        let starts: Vec<usize> = self.ranges.keys().copied().collect();
        for start in starts {
            self.release(start, |_| true);
        }
    }

    /// Reads bytes of a span. False: it is gone.
    pub(crate) fn read(&self, span: &Span, into: &mut [u8]) -> bool {
        match self.bytes_of(span) {
            None => false,
            Some(None) => host::read(span.address, into),
            Some(Some(hidden)) => {
                // SAFETY: the span lies in a live range, so its bytes lie in the hidden mapping.
                unsafe { std::ptr::copy(hidden as *const u8, into.as_mut_ptr(), into.len()) };
                true
            }
        }
    }

    /// Writes bytes of a span. False: it is gone.
    pub(crate) fn write(&mut self, span: &Span, from: &[u8]) -> bool {
        match self.bytes_of(span) {
            None => false,
            Some(None) => host::write(span.address, from),
            Some(Some(hidden)) => {
                // SAFETY: the span lies in a live range, so its bytes lie in the hidden mapping.
                unsafe { std::ptr::copy(from.as_ptr(), hidden as *mut u8, from.len()) };
                true
            }
        }
    }

    /// Sets all bytes of a span. False: it is gone.
    pub(crate) fn fill(&mut self, span: &Span, value: u8) -> bool {
        let piece = vec![value; span.len.min(PIECE)];
        (0..span.len).step_by(PIECE).all(|at| {
            self.write(&span.part(at, PIECE.min(span.len - at)), &piece[..PIECE.min(span.len - at)])
        })
    }

    /// Copies from one span to another of the same length. False: one of them is gone.
    pub(crate) fn copy(&mut self, to: &Span, from: &Span) -> bool {
        let mut piece = vec![0; from.len.min(PIECE)];
        (0..from.len).step_by(PIECE).all(|at| {
            let len = PIECE.min(from.len - at);
            self.read(&from.part(at, len), &mut piece[..len])
                && self.write(&to.part(at, len), &piece[..len])
        })
    }

    /// The word at the start of a span. None: it is gone.
    pub(crate) fn load(&self, span: &Span) -> Option<u32> {
        match self.bytes_of(span)? {
            None => host::load(span.address),
            Some(_) => {
                let mut word = [0; 4];
                self.read(span, &mut word).then(|| u32::from_ne_bytes(word))
            }
        }
    }

    /// Writes the word at the start of a span. False: it is gone.
    pub(crate) fn store(&mut self, span: &Span, value: u32) -> bool {
        match self.bytes_of(span) {
            None => false,
            Some(None) => host::store(span.address, value),
            Some(Some(_)) => self.write(span, &value.to_ne_bytes()),
        }
    }

    /// Where the bytes of a span are: None: its range is gone; Some(None): at its own address.
    fn bytes_of(&self, span: &Span) -> Option<Option<usize>> {
        let Some(id) = span.range else { return Some(None) };
        let range = self.find(span.address).filter(|it| it.id == id)?;
        match range.kind {
            Kind::Device { hidden } | Kind::Opened { hidden } => {
                Some(Some(hidden + (span.address - range.start)))
            }
            Kind::HostAlloc | Kind::Registered => Some(None),
        }
    }

    fn add(&mut self, start: usize, len: usize, kind: Kind, context: usize, device: usize) {
        self.made += 1;
        self.ranges.insert(start, Range { id: self.made, start, len, kind, context, device });
    }
}

fn map(len: usize, rights: i32) -> Result<usize, Code> {
    // SAFETY: a new private mapping at an address that the kernel chooses.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len.next_multiple_of(PAGE),
            rights,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(start as usize) }
}

/// Lets bytes of a mapping lie in a file, which has them from then on.
fn into_file(hidden: usize, len: usize) -> Result<File, Code> {
    let file = file_of(len.next_multiple_of(PAGE))?;
    // SAFETY: as many bytes are mapped there and initialised, and nobody writes to them: the caller has the lock.
    let bytes = unsafe { std::slice::from_raw_parts(hidden as *const u8, len) };
    std::os::unix::fs::FileExt::write_all_at(&file, bytes, 0).map_err(|_| Code::OUT_OF_MEMORY)?;
    lie_in(&file, hidden, len)?;
    Ok(file)
}

/// Maps a file in place of a mapping of [`map`].
fn lie_in(file: &File, hidden: usize, len: usize) -> Result<(), Code> {
    // SAFETY: the mapping is this module's and has this length, and no reference points there. A file that is shorter
    // was refused.
    let at = unsafe {
        libc::mmap(
            hidden as *mut libc::c_void,
            len.next_multiple_of(PAGE),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            file.as_raw_fd(),
            0,
        )
    };
    if at == libc::MAP_FAILED { Err(Code::MAP_FAILED) } else { Ok(()) }
}

fn unmap(start: usize, len: usize) {
    // SAFETY: `map` made this mapping with this length, and its range has just been forgotten.
    unsafe { libc::munmap(start as *mut libc::c_void, len.next_multiple_of(PAGE)) };
}
