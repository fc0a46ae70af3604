//! What a device of CUDA or HIP does for those who know no driver.

use std::path::Path;
use std::sync::Arc;

use drumline_device::fabric::Fabric;
use drumline_device::{
    Device, Error, Gate, Identity, Memory, Pinned, PinnedWindow, Place, Refused, Result, Stream,
};
use drumline_shm::{PeerWindow, Registered};

use crate::device::CudaDevice;
use crate::gate::CudaGate;
use crate::memory::{DeviceMemory, HostMemory};
use crate::nccl::Nccl;
use crate::nccl::fabric::OfNccl;
use crate::pin::Pin;
use crate::stream::CudaStream;

impl Device for CudaDevice {
    fn identity(&self) -> &Identity {
        &self.opened().identity
    }

    fn check(&self, place: Place) -> Result<()> {
        self.opened().check(place)
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::new(self.opened().clone())?))
    }

    fn pin(&self, memory: Registered<u8>) -> Result<Pinned, Refused<Registered<u8>>> {
        let pin = match Pin::new(self.opened().clone(), memory.as_ptr(), memory.len()) {
            Ok(pin) => Arc::new(pin),
            Err(error) => return Err(Box::new((error, memory))),
        };
        let of_detach = pin.clone();
        let hook = memory.before_detach(move || of_detach.release());
        // A tuple drops in order. The pin is released by whichever comes first.
        Ok(Pinned::in_place(memory, (pin, hook)))
    }

    fn pin_window(&self, window: PeerWindow) -> Result<PinnedWindow> {
        let pin = Pin::new(self.opened().clone(), window.address(), window.len())?;
        Ok(PinnedWindow::new(window, pin))
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned> {
        Ok(Pinned::of_driver(HostMemory::new(self.opened().clone(), bytes)?))
    }

    fn gate(&self) -> Result<Arc<dyn Gate>> {
        if self.opened().functions().wait_value.is_none() {
            let device = self.opened().name.clone();
            return Err(Error::Unsupported { device, what: "let streams wait for the host" });
        }
        Ok(Arc::new(CudaGate::new(self.opened().clone())?))
    }

    fn fabric(&self, library: Option<&Path>) -> Result<Arc<dyn Fabric>> {
        Ok(Arc::new(OfNccl { nccl: Nccl::load(library)?, device: self.clone() }))
    }

    fn memory(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(self.allocate(bytes)?))
    }
}

impl Memory for DeviceMemory {
    fn place(&self) -> Place {
        DeviceMemory::place(self)
    }
}
