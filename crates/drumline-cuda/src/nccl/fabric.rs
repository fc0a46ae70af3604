//! NCCL, for one device.

use std::env::var_os;
use std::sync::Arc;

use drumline_device::fabric::{Call, Communicator, Fabric, Work};
use drumline_device::{Error, Result, Stream};
use drumline_kernels::DType;

use crate::device::CudaDevice;
use crate::nccl::communicator::{Communicator as Joined, State};
use crate::nccl::library::Nccl;
use crate::nccl::unique_id::UniqueId;
use crate::nccl::version::same_gpu_hint;

#[derive(Debug)]
pub(crate) struct OfNccl {
    pub(crate) nccl: Nccl,
    pub(crate) device: CudaDevice,
}

impl Fabric for OfNccl {
    fn name(&self) -> String {
        self.nccl.to_string()
    }

    fn supports(&self, dtype: DType, work: Work) -> Result<(), String> {
        self.nccl.supports(dtype, work)
    }

    fn unique_id(&self) -> Result<Vec<u8>> {
        Ok(self.nccl.unique_id()?.to_bytes().to_vec())
    }

    fn join(&self, id: &[u8], rank: usize, size: usize) -> Result<Arc<dyn Communicator>> {
        let id = id.try_into().map_err(|_| {
            let problem = format!("an id has {} bytes, not {}", UniqueId::BYTES, id.len());
            Error::Argument { problem }
        })?;
        let id = UniqueId::from_bytes(id);
        Ok(Arc::new(Joined::new(&self.nccl, &self.device, &id, rank, size)?))
    }

    /// The program may have asked for it: then NCCL decides.
    fn one_rank_each(&self) -> Option<String> {
        let is_asked = |name: &str| var_os(name).is_some_and(|value| !value.is_empty());
        let asked = ["NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID"].into_iter().any(is_asked);
        (!asked).then(|| same_gpu_hint(self.nccl.version()).to_owned())
    }
}

impl Communicator for Joined {
    fn is_ready(&self) -> Result<bool> {
        Ok(self.state()? == State::Ready)
    }

    fn queue(&self, calls: &[Call], stream: &dyn Stream) -> Result<()> {
        Joined::queue(self, calls, stream)
    }

    fn abort(&self) -> Result<()> {
        Joined::abort(self)
    }
}
