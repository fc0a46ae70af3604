/// How gradients are averaged. The options must be equal on all ranks; [`verify_model`](super::verify_model)
/// checks that.
///
/// ```
/// use drumline::ddp::{DdpOptions, UnusedParameters};
///
/// let options =
///     DdpOptions::default().bucket_bytes(5 << 20).unused_parameters(UnusedParameters::Ignore);
/// assert_eq!(options.first_bucket_bytes, 1 << 20);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DdpOptions {
    /// The first bucket of each dtype is closed when it holds at least this many bytes. It is small (1 MiB),
    /// so that communication starts soon after backward does.
    pub first_bucket_bytes: usize,
    /// Each later bucket is closed when it holds at least this many bytes. It is large (25 MiB), so that the
    /// fixed cost of a collective is paid rarely.
    pub bucket_bytes: usize,
    /// What to do about a parameter that a step did not use.
    pub unused_parameters: UnusedParameters,
}

/// What happens to a parameter that gets no gradient in a step.
///
/// ```
/// use drumline::ddp::{DdpOptions, UnusedParameters};
///
/// let options = DdpOptions::default();
/// // A mistake, unless said otherwise.
/// assert_eq!(options.unused_parameters, UnusedParameters::Error);
/// let options = options.unused_parameters(UnusedParameters::Ignore);
/// assert_eq!(options.unused_parameters, UnusedParameters::Ignore);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnusedParameters {
    /// The step fails on every rank, with an error that names each such parameter and its ranks. In most
    /// models an unused parameter is a mistake in forward.
    #[default]
    Error,
    /// A parameter that some ranks have used is averaged over *all* ranks, with zeros for the ranks that have
    /// not. A parameter that no rank has used gets no gradient on any rank, so optimizers change neither it
    /// nor its momentum. For models whose forward takes different paths. A bucket with an unused parameter,
    /// and the buckets after it, are launched only when backward has ended.
    Ignore,
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

    /// Sets [`DdpOptions::unused_parameters`].
    #[must_use]
    pub fn unused_parameters(mut self, unused: UnusedParameters) -> Self {
        self.unused_parameters = unused;
        self
    }
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            unused_parameters: UnusedParameters::default(),
        }
    }
}
