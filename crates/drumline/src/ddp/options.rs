/// How gradients are put into buckets. Must be equal on all ranks, and is checked.
///
/// ```
/// use drumline::ddp::DdpOptions;
///
/// let options = DdpOptions::default().bucket_bytes(5 << 20);
/// assert_eq!(options.first_bucket_bytes, 1 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DdpOptions {
    /// The first bucket of each dtype is closed when it holds at least so many bytes. Small
    /// (1 MiB), so that communication starts soon after backward does.
    pub first_bucket_bytes: usize,
    /// All later buckets are closed when they hold at least so many bytes. Large (25 MiB), so
    /// that the fixed cost of a collective is paid rarely.
    pub bucket_bytes: usize,
}

impl DdpOptions {
    /// Sets [`DdpOptions::first_bucket_bytes`].
    #[must_use]
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self
    }

    /// Sets [`DdpOptions::bucket_bytes`].
    #[must_use]
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self
    }
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self { first_bucket_bytes: 1 << 20, bucket_bytes: 25 << 20 }
    }
}
