//! Tensors of devices, as cubecl and burn's fusion see them.

use burn::backend::Backend;
use burn_fusion::{FusionBackend, FusionTensor};

pub(crate) use burn::backend::Cube;
pub(crate) use burn_cubecl::{
    CubeBackend,
    cubecl::server::{CopyDescriptor, ServerError},
    kernel::into_contiguous_aligned,
    tensor::CubeTensor,
};
pub(crate) use burn_std::id::StreamId;

/// A tensor of `Cube`: of `CubeBackend` itself, or of `Fusion<CubeBackend>` where burn's feature `fusion` is on. A
/// crate cannot ask which features another crate has, so both are served. `B` is there because `CubeBackend` can be
/// fused only with that feature.
pub(crate) trait OnDevice<B> {
    /// The tensor in the device's memory. This starts the operations that it waits for, but does not wait for their
    /// end.
    fn resolve(self) -> CubeTensor;
}

impl OnDevice<CubeBackend> for CubeTensor {
    fn resolve(self) -> CubeTensor {
        self
    }
}

/// 0.23: `resolve_tensor_float` returns a `Result`. An error means that an operation before this one has failed; 0.22
/// panics then.
impl<B> OnDevice<B> for FusionTensor<B::FusionRuntime>
where
    B: FusionBackend + Backend<FloatTensorPrimitive = CubeTensor>,
{
    fn resolve(self) -> CubeTensor {
        let client = self.client.clone();
        client.resolve_tensor_float::<B>(self)
    }
}
