//! What the driver says of a pointer.

use std::ffi::{c_int, c_uint, c_void};

use crate::code::Code;
use crate::memory::Range;
use crate::out::Out;
use crate::world::call;

/// A value of an attribute, in the width that `cuda.h` gives it.
enum Value {
    Int(i32),
    Flag(bool),
    Long(u64),
}

impl Value {
    fn put(self, at: *mut c_void) -> Result<(), Code> {
        match self {
            Value::Int(value) => Out::new(at.cast()).set(value),
            Value::Flag(value) => Out::new(at.cast()).set(u8::from(value)),
            Value::Long(value) => Out::new(at.cast()).set(value),
        }
    }
}

/// An attribute of a pointer into a range, or of one into memory that the driver does not know.
fn value(attribute: c_int, pointer: usize, range: Option<&Range>) -> Result<Value, Code> {
    let on_device = range.is_some_and(Range::is_device);
    let number = |of: fn(&Range) -> usize| Value::Long(range.map_or(0, of) as u64);
    Ok(match attribute {
        1 => number(|it| it.context),
        2 => Value::Int(range.map_or(0, |_| if on_device { 2 } else { 1 })), // MEMORY_TYPE
        3 => Value::Long(range.map_or(0, |_| pointer as u64)),               // DEVICE_POINTER
        4 if on_device => return Err(Code::INVALID_VALUE),                   // HOST_POINTER
        4 => Value::Long(range.map_or(0, |_| pointer as u64)),
        6 | 8 => Value::Flag(false), // SYNC_MEMOPS, IS_MANAGED
        7 => number(|it| it.id as usize),
        9 => Value::Int(range.map_or(-2, |it| it.device as i32)), // DEVICE_ORDINAL
        10 => Value::Flag(range.is_some_and(Range::is_lendable)), // IS_LEGACY_CUDA_IPC_CAPABLE
        15 => Value::Flag(false),                                 // IS_GPU_DIRECT_RDMA_CAPABLE
        11 => number(|it| it.start),
        12 => number(|it| it.len),
        13 => Value::Flag(range.is_some()), // MAPPED
        14 => Value::Long(0),               // ALLOWED_HANDLE_TYPES
        16 => Value::Int(if range.is_some() { 3 } else { 0 }), // ACCESS_FLAGS
        17 => Value::Long(0),               // MEMPOOL_HANDLE
        _ => return Err(Code::INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: c_int,
    pointer: usize,
) -> c_int {
    call("cuPointerGetAttribute", |world| {
        world.ready()?;
        let range = world.memory.find(pointer).ok_or(Code::INVALID_VALUE)?;
        value(attribute, pointer, Some(range))?.put(data)
    })
}

/// Unlike the function above, this one succeeds for a pointer that the driver does not know: its values are then
/// nothing.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    attributes: *const c_int,
    data: *const *mut c_void,
    pointer: usize,
) -> c_int {
    call("cuPointerGetAttributes", |world| {
        world.ready()?;
        if count == 0 || attributes.is_null() || data.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let range = world.memory.find(pointer);
        for at in 0..count as usize {
            // SAFETY: the caller says that both arrays have `count` members.
            let (attribute, data) = unsafe { (*attributes.add(at), *data.add(at)) };
            match value(attribute, pointer, range) {
                Ok(value) => value.put(data)?,
                // A host pointer of device memory is nothing here.
                Err(_) if attribute == 4 => Value::Long(0).put(data)?,
                Err(code) => return Err(code),
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: Out<usize>,
    len: Out<usize>,
    pointer: usize,
) -> c_int {
    call("cuMemGetAddressRange_v2", |world| {
        world.current()?;
        let range = world.memory.find(pointer).ok_or(Code::NOT_FOUND)?;
        if !base.is_null() {
            base.set(range.start)?;
        }
        if len.is_null() { Ok(()) } else { len.set(range.len) }
    })
}
