//! Memory that the ranks of a host share.

use std::sync::Mutex;

use drumline::RegisteredBuffer;
use pyo3::prelude::*;

use crate::{error::raise, group::Group};

/// Memory, zero at first, in which collectives of a group work without a copy. It stays in place as long as
/// this object lives, also after the end of the group. Arrays over the memory must keep this object.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct Registered {
    /// The memory as words, which are aligned for every element type. Only Python's arrays read them.
    _words: Mutex<RegisteredBuffer<u64>>,
    /// The address of the memory, and its length in bytes.
    memory: (usize, usize),
}

#[pymethods]
impl Registered {
    #[new]
    fn new(py: Python<'_>, group: &Group, bytes: usize) -> PyResult<Registered> {
        let (group, count) = (group.get()?, bytes.div_ceil(size_of::<u64>()));
        let mut words = py.detach(|| group.alloc_registered::<u64>(count)).map_err(raise)?;
        let address = words.as_mut_ptr().addr();
        Ok(Registered { _words: Mutex::new(words), memory: (address, bytes) })
    }

    /// The address of the memory, and its length in bytes.
    #[getter]
    fn memory(&self) -> (usize, usize) {
        self.memory
    }
}
