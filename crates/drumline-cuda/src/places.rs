//! Which addresses are memory of a device.

use std::ffi::{c_int, c_uint, c_void};

use drumline_device::{Error, Place, Result};

use crate::loaded::{INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED};
use crate::opened::Opened;

impl Opened {
    /// See [`Device::check`](drumline_device::Device::check).
    pub(crate) fn check(&self, place: Place) -> Result<()> {
        // What an allocator has mapped piece by piece consists of several ranges. Each may be another device's.
        let (mut address, mut left) = (place.address, place.bytes as u64);
        while left > 0 {
            let bytes = self.own_from(address)?.map_err(|why| {
                let problem = match address - place.address {
                    0 => why,
                    good => format!("only {good} bytes are memory of this device, and then {why}"),
                };
                Error::Place { place, problem }
            })?;
            left = left.saturating_sub(bytes);
            address = address.saturating_add(bytes);
        }
        Ok(())
    }

    /// The bytes from `address` to the end of its range, if that is memory of this device and this context; or what it
    /// is.
    fn own_from(&self, address: u64) -> Result<std::result::Result<u64, String>> {
        let no = |why: &str| Ok(Err(why.to_owned()));
        let unknown = "it is memory of the host, or was freed";
        match self.attribute::<c_uint>(MEMORY_TYPE, address)? {
            None => return no(unknown),
            Some(OF_DEVICE) => {}
            Some(_) => return no("it is memory of the host"),
        }
        let ordinal = self.attribute::<c_int>(DEVICE_ORDINAL, address)?;
        if let Some(ordinal) = ordinal.filter(|it| *it != self.number) {
            return no(&format!("it is memory of {}:{ordinal}", self.identity.kind));
        }
        // Memory of a pool has no context.
        let context = self.attribute::<usize>(CONTEXT, address)?.unwrap_or(0);
        if context != 0 && context != self.context.addr() {
            return no("it is memory of another context of this device");
        }
        match self.bytes_from(address)? {
            Some(bytes) if bytes > 0 => Ok(Ok(bytes)),
            _ => no(unknown),
        }
    }

    /// One attribute of an address. `None`: the driver does not know the address. HIP before 6.4.2 has no contexts.
    fn attribute<T: Number>(&self, attribute: c_int, address: u64) -> Result<Option<T>> {
        let mut value = T::default();
        let code = self.inside(|functions| {
            let place = (&raw mut value).cast::<c_void>();
            // SAFETY: callers name a type of the width that the attribute has.
            unsafe { (functions.pointer_attribute)(place, attribute, address) }
        })?;
        match code {
            0 => Ok(Some(value)),
            INVALID_VALUE => Ok(None),
            NOT_SUPPORTED if attribute == CONTEXT => Ok(None),
            code => self.done("cuPointerGetAttribute", code).map(|()| None),
        }
    }

    /// The bytes from `address` to the end of its allocation. `None`: nothing is allocated there.
    fn bytes_from(&self, address: u64) -> Result<Option<u64>> {
        let (mut base, mut bytes) = (0_u64, 0_usize);
        let code = self.inside(|functions| {
            // SAFETY: both places are there to be written.
            unsafe { (functions.address_range)(&raw mut base, &raw mut bytes, address) }
        })?;
        match code {
            0 => Ok(Some(base.saturating_add(bytes as u64).saturating_sub(address))),
            INVALID_VALUE | NOT_FOUND => Ok(None),
            // A device that has failed says so.
            code => self.done("cuMemGetAddressRange", code).map(|()| None),
        }
    }
}

/// What an attribute may be: any bytes are a value.
trait Number: Default {}
impl Number for c_int {}
impl Number for c_uint {}
impl Number for usize {}

/// Of `CUpointer_attribute` and `CUmemorytype`; HIP has the same numbers.
const CONTEXT: c_int = 1;
const MEMORY_TYPE: c_int = 2;
const DEVICE_ORDINAL: c_int = 9;
const OF_DEVICE: c_uint = 2;
