//! The C functions of the driver: each checks what it was given, and changes the [world](crate::world).
//!
//! Names, types and codes are those of `cuda.h` of CUDA 12. A function that `cuda.h` renames by a macro has the name
//! that the library has, such as `cuMemAlloc_v2`.

mod copies;
mod devices;
mod events;
mod ipc;
mod memory;
mod pointers;
mod streams;
