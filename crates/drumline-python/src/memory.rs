//! Memory that belongs to Python objects.

use drumline::{DType, driving::Bytes};
use pyo3::{exceptions::PyValueError, prelude::*};

/// Contiguous elements in the memory of a Python object: `(address, elements, dtype, owner)`.
///
/// The package `drumline` takes the numbers from numpy, torch or DLPack. The owner is an object that keeps
/// the memory in place. `_core` trusts the package, as every extension trusts its array library.
pub(crate) struct Memory {
    address: usize,
    count: usize,
    pub(crate) dtype: DType,
    _owner: Py<PyAny>,
}

impl<'py> FromPyObject<'_, 'py> for Memory {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Memory> {
        let (address, count, code, owner): (usize, usize, u8, Py<PyAny>) = object.extract()?;
        let dtype = DType::from_code(code)
            .ok_or_else(|| PyValueError::new_err(format!("no element type has the code {code}")))?;
        let is_aligned = address.is_multiple_of(dtype.kernels().align);
        let is_memory = address != 0 && count.checked_mul(dtype.size()).is_some_and(is_addressable);
        if count > 0 && !(is_aligned && is_memory) {
            let problem = format!("{count} elements of type {dtype} cannot lie at {address:#x}");
            return Err(PyValueError::new_err(problem));
        }
        Ok(Memory { address, count, dtype, _owner: owner })
    }
}

fn is_addressable(bytes: usize) -> bool {
    isize::try_from(bytes).is_ok()
}

impl Memory {
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    fn end(&self) -> usize {
        self.address + self.byte_len()
    }

    /// Whether the two have a byte in common.
    pub(crate) fn overlaps(&self, other: &Memory) -> bool {
        self.count > 0
            && other.count > 0
            && self.address < other.end()
            && other.address < self.end()
    }

    fn pointer(&self) -> *mut u8 {
        match self.count {
            0 => std::ptr::NonNull::dangling().as_ptr(),
            _ => self.address as *mut u8,
        }
    }

    /// The number of bytes. `extract` has checked that they fit the address space.
    fn byte_len(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// The bytes of the elements in their present state.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `extract` has checked that the bytes fit the address space. The package promises that they are
        // mapped and initialised while the owner lives, and `self` holds the owner. Another Python thread may write
        // to them meanwhile, as with numpy and torch; the documentation forbids it.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.byte_len()) }
    }

    /// The bytes of the elements, for writing. No other slice of these elements may be in use.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`. The package also promises that the memory may be written. `&mut self` keeps
        // this call from lending the elements twice, and calls check that their memories do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.byte_len()) }
    }
}

/// Elements that a call only reads.
pub(crate) enum Input {
    Lent(Memory),
    Copied(Bytes),
}

impl Input {
    /// Copies the elements if the call writes to the same memory.
    pub(crate) fn new(input: Memory, outputs: &[&Memory]) -> Input {
        match outputs.iter().any(|output| output.overlaps(&input)) {
            true => Input::Copied(input.bytes().into()),
            false => Input::Lent(input),
        }
    }

    /// No elements, for calls on one buffer.
    pub(crate) fn none() -> Input {
        Input::Copied(Bytes::default())
    }

    /// The elements of all inputs, one input after another.
    pub(crate) fn joined(inputs: &[Memory]) -> Input {
        Input::Copied(joined(inputs.iter().map(Memory::bytes)))
    }
}

impl AsRef<[u8]> for Input {
    fn as_ref(&self) -> &[u8] {
        match self {
            Input::Lent(memory) => memory.bytes(),
            Input::Copied(bytes) => bytes,
        }
    }
}

/// All bytes, one part after another.
pub(crate) fn joined<'a>(parts: impl Iterator<Item = &'a [u8]> + Clone) -> Bytes {
    let mut all = Bytes::zeroed(parts.clone().map(<[u8]>::len).sum());
    let mut rest = &mut all[..];
    for part in parts {
        let (own, others) = rest.split_at_mut(part.len());
        own.copy_from_slice(part);
        rest = others;
    }
    all
}

/// Elements that a call writes.
pub(crate) struct Buffer {
    elements: Elements,
    /// The memories that [`Buffer::deal_out`] fills in order; empty if the call writes in place.
    parts: Vec<Memory>,
}

enum Elements {
    Lent(Memory),
    Gathered(Bytes),
}

impl Buffer {
    pub(crate) fn of(memory: Memory) -> Buffer {
        Buffer { elements: Elements::Lent(memory), parts: Vec::new() }
    }

    /// One buffer for several memories. [`Buffer::deal_out`] fills them after the call.
    pub(crate) fn gathered(parts: Vec<Memory>) -> Buffer {
        let bytes = parts.iter().map(Memory::byte_len).sum();
        Buffer { elements: Elements::Gathered(Bytes::zeroed(bytes)), parts }
    }

    /// After the call: copies the elements to the memories of [`Buffer::gathered`].
    pub(crate) fn deal_out(&mut self) {
        let Elements::Gathered(all) = &self.elements else { return };
        let mut rest = &all[..];
        for part in &mut self.parts {
            let (own, others) = rest.split_at(part.byte_len());
            part.bytes_mut().copy_from_slice(own);
            rest = others;
        }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        match &self.elements {
            Elements::Lent(memory) => memory.bytes(),
            Elements::Gathered(bytes) => bytes,
        }
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        match &mut self.elements {
            Elements::Lent(memory) => memory.bytes_mut(),
            Elements::Gathered(bytes) => bytes,
        }
    }
}

/// The element types by the names of the core, with their codes.
pub(crate) fn names() -> Vec<(&'static str, u8)> {
    DType::ALL.map(|dtype| (dtype.name(), dtype as u8)).to_vec()
}

/// Whether the operator `op` supports elements of the type with code `dtype`.
#[pyfunction]
pub(crate) fn supports(op: &str, dtype: u8) -> bool {
    let op: Option<drumline::ReduceOp> = op.parse().ok();
    op.zip(DType::from_code(dtype)).is_some_and(|(op, dtype)| op.supports(dtype))
}
