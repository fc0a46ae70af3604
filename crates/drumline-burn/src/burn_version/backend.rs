//! Names from within burn's backends and its autodiff. burn opens them to extensions (its feature `extension`).
//!
//! 0.23.0-pre.1 has all of them, in the same places. It has no device `NdArray`, and one more, `Group`.

pub(crate) use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchDevice, Flex, GradientCheckpointingStrategy,
    TensorMetadata,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind, unary},
    },
    backend_extension,
    flex::{FlexTensor, Layout},
    read_sync,
    tensor::FloatTensor,
};
