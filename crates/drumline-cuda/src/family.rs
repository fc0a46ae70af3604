/// A driver's family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// NVIDIA's CUDA.
    Cuda,
    /// AMD's HIP.
    Hip,
}

impl Family {
    /// `cuda` or `hip`.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Cuda => "cuda",
            Family::Hip => "hip",
        }
    }
}
