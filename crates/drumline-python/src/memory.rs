//! Memory that belongs to Python objects.

use drumline::{Bool, Complex, DType, Element, F8E4M3, F8E5M2, bf16, f16};
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
        let is_aligned = address.is_multiple_of(alignment(dtype));
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

/// The alignment of a type in bytes. Complex numbers have the alignment of their parts.
fn alignment(dtype: DType) -> usize {
    match dtype {
        DType::Complex64 | DType::Complex128 => dtype.size() / 2,
        _ => dtype.size(),
    }
}

impl Memory {
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    fn end(&self) -> usize {
        self.address + self.count * self.dtype.size()
    }

    /// Whether the two have a byte in common.
    pub(crate) fn overlaps(&self, other: &Memory) -> bool {
        self.count > 0
            && other.count > 0
            && self.address < other.end()
            && other.address < self.end()
    }

    fn pointer<T: Element>(&self) -> *mut T {
        debug_assert_eq!(self.dtype, T::DTYPE);
        match self.count {
            0 => std::ptr::NonNull::dangling().as_ptr(),
            _ => self.address as *mut T,
        }
    }

    /// The elements in their present state.
    pub(crate) fn read<T: Element>(&self) -> &[T] {
        // SAFETY: `extract` has checked the alignment, and that the bytes fit the address space. The package
        // promises that they are mapped and initialised while the owner lives, and `self` holds the owner.
        // Every bit pattern is a `T` (`Element: Pod`). Another Python thread may write to them meanwhile, as
        // with numpy and torch; the documentation forbids it.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.count) }
    }

    /// The elements, for writing. No other slice of these elements may be in use.
    pub(crate) fn write<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: as in `read`. The package also promises that the memory may be written. `&mut self` keeps
        // this call from lending the elements twice, and calls check that their memories do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.count) }
    }
}

/// Elements that a call only reads.
pub(crate) enum Input<T> {
    Lent(Memory),
    Copied(Vec<T>),
}

impl<T: Element> Input<T> {
    /// Copies the elements if the call writes to the same memory.
    pub(crate) fn new(input: Memory, outputs: &[&Memory]) -> Input<T> {
        match outputs.iter().any(|output| output.overlaps(&input)) {
            true => Input::Copied(input.read().to_vec()),
            false => Input::Lent(input),
        }
    }

    /// No elements, for calls on one buffer.
    pub(crate) fn none() -> Input<T> {
        Input::Copied(Vec::new())
    }

    /// The elements of all inputs, one input after another.
    pub(crate) fn joined(inputs: &[Memory]) -> Input<T> {
        Input::Copied(inputs.iter().flat_map(Memory::read::<T>).copied().collect())
    }
}

impl<T: Element> AsRef<[T]> for Input<T> {
    fn as_ref(&self) -> &[T] {
        match self {
            Input::Lent(memory) => memory.read(),
            Input::Copied(elements) => elements,
        }
    }
}

/// Elements that a call writes.
pub(crate) struct Buffer<T> {
    elements: Elements<T>,
    /// The memories that [`Buffer::deal_out`] fills in order; empty if the call writes in place.
    parts: Vec<Memory>,
}

enum Elements<T> {
    Lent(Memory),
    Gathered(Vec<T>),
}

impl<T: Element> Buffer<T> {
    pub(crate) fn of(memory: Memory) -> Buffer<T> {
        Buffer { elements: Elements::Lent(memory), parts: Vec::new() }
    }

    /// One buffer for several memories. [`Buffer::deal_out`] fills them after the call.
    pub(crate) fn gathered(parts: Vec<Memory>) -> Buffer<T> {
        let count = parts.iter().map(Memory::len).sum();
        Buffer { elements: Elements::Gathered(vec![T::zeroed(); count]), parts }
    }

    /// After the call: copies the elements to the memories of [`Buffer::gathered`].
    pub(crate) fn deal_out(&mut self) {
        let Elements::Gathered(all) = &self.elements else { return };
        let mut rest = &all[..];
        for part in &mut self.parts {
            let (own, others) = rest.split_at(part.len());
            part.write::<T>().copy_from_slice(own);
            rest = others;
        }
    }
}

impl<T: Element> AsRef<[T]> for Buffer<T> {
    fn as_ref(&self) -> &[T] {
        match &self.elements {
            Elements::Lent(memory) => memory.read(),
            Elements::Gathered(elements) => elements,
        }
    }
}

impl<T: Element> AsMut<[T]> for Buffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        match &mut self.elements {
            Elements::Lent(memory) => memory.write(),
            Elements::Gathered(elements) => elements,
        }
    }
}

/// Runs an expression with `$element` as the Rust type of a [`DType`].
macro_rules! with_element {
    ($dtype:expr, $element:ident => $run:expr) => {
        $crate::memory::with_element!(@ $dtype, $element => $run;
            U8 u8, I8 i8, U16 u16, I16 i16, U32 u32, I32 i32, U64 u64, I64 i64,
            F32 f32, F64 f64, F16 ::drumline::f16, Bf16 ::drumline::bf16,
            F8E4M3 ::drumline::F8E4M3, F8E5M2 ::drumline::F8E5M2, Bool ::drumline::Bool,
            Complex64 ::drumline::Complex<f32>, Complex128 ::drumline::Complex<f64>)
    };
    (@ $dtype:expr, $element:ident => $run:expr; $($code:ident $type:ty),*) => {
        match $dtype {
            $(::drumline::DType::$code => {
                type $element = $type;
                $run
            })*
            other => Err(::pyo3::exceptions::PyValueError::new_err(format!(
                "elements of type {other} are not known to Python yet"
            ))),
        }
    };
}
pub(crate) use with_element;

/// An element type to which a Python number converts, as the factor of `premul_sum`.
pub(crate) trait Factor: Element {
    fn from_python(value: &Bound<'_, PyAny>) -> PyResult<Self>;
}

macro_rules! factor {
    ($($type:ty: $via:ty => $convert:expr;)*) => {$(
        impl Factor for $type {
            fn from_python(value: &Bound<'_, PyAny>) -> PyResult<$type> {
                let convert: fn($via) -> $type = $convert;
                value.extract::<$via>().map(convert)
            }
        }
    )*};
}

factor! {
    u8: u8 => |it| it;
    i8: i8 => |it| it;
    u16: u16 => |it| it;
    i16: i16 => |it| it;
    u32: u32 => |it| it;
    i32: i32 => |it| it;
    u64: u64 => |it| it;
    i64: i64 => |it| it;
    f32: f64 => |it| it as f32;
    f64: f64 => |it| it;
    f16: f64 => f16::from_f64;
    bf16: f64 => bf16::from_f64;
    F8E4M3: f64 => |it| F8E4M3::from_f32(it as f32);
    F8E5M2: f64 => |it| F8E5M2::from_f32(it as f32);
    Bool: bool => Bool::from;
    Complex<f32>: f64 => |it| Complex::new(it as f32, 0.0);
    Complex<f64>: f64 => |it| Complex::new(it, 0.0);
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
