//! Memory that the ranks of a host share.

use std::sync::Mutex;

use drumline::RegisteredBuffer;
use pyo3::prelude::*;

use crate::{error::raise, group::Group};

/// Zeros that collectives of a group reach without a copy. They stay where they are for as long as
/// this object lives, also when the group has ended: whoever makes arrays of them keeps the object.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct Registered {
    /// Aligned for every type. Nobody looks at it here: the arrays do.
    _words: Mutex<RegisteredBuffer<u64>>,
    /// Where it begins, and its bytes.
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

    /// The address of the memory, and its bytes.
    #[getter]
    fn memory(&self) -> (usize, usize) {
        self.memory
    }
}
