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
    /// Whether buckets of a small model are smaller than the two limits: an eighth of the model, and at least 1 MiB.
    /// So several of them leave while backward still runs. Between hosts they are larger again if smaller ones would
    /// cost much, by the prices of the group. True, until one of the limits is set.
    pub fits_buckets_to_model: bool,
    /// What to do about a parameter that a step did not use.
    pub unused_parameters: UnusedParameters,
    /// The type in which gradients of f32 travel.
    pub wire: Wire,
    /// By what sums are divided when some ranks have no data left.
    pub divisor: Divisor,
    /// Tensors that every rank keeps for itself. Each is named by its path, or by that of a module around it.
    pub ignored: Vec<String>,
    /// Whether each rank keeps the optimizer's state of its own parameters only.
    pub sharded: bool,
    /// The ranks compare the values of their parameters every so many steps. 0: after the first step only.
    pub check_every: u64,
    /// How many shards a step has, whatever the number of ranks. `None`: each rank has a batch of its own.
    pub shards: Option<usize>,
    /// From which the random numbers of shards follow.
    pub seed: u64,
}

/// The type in which gradients of f32 travel.
///
/// ```
/// use drumline::{DType, bf16};
/// use drumline::ddp::{DdpOptions, GradientReducer, ParameterSpec, Wire};
///
/// drumline::local(2, |group| {
///     let bias = ParameterSpec::new("bias", [1], DType::F32);
///     let options = DdpOptions::default().wire(Wire::Bf16);
///     let reducer = GradientReducer::new(vec![bias], &options, &group)?;
///     reducer.submit(0, [1.001_f32][..].into());
///     let averaged = reducer.finish()?;
///     assert_eq!(averaged.get::<f32>(0), Some(&[bf16::from_f32(1.001).to_f32()][..]));
///     Ok(())
/// })?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wire {
    /// As f32.
    #[default]
    AsIs,
    /// As bf16, which halves the bytes on one host. Each gradient is rounded when its bucket leaves. The rounded gradients
    /// are added as f32, and the average is rounded once more. It comes back as f32. Micro-batches are added before
    /// the first rounding. Gradients of other types than f32 travel as they are.
    Bf16,
}

/// By what sums are divided when some ranks have no data left and only [shadow](super::GradientReducer::shadow).
///
/// ```
/// use drumline::DType;
/// use drumline::ddp::{DdpOptions, Divisor, GradientReducer, ParameterSpec};
///
/// drumline::local(2, |group| {
///     let bias = ParameterSpec::new("bias", [1], DType::F32);
///     let options = DdpOptions::default().divisor(Divisor::ActiveRanks);
///     let reducer = GradientReducer::new(vec![bias], &options, &group)?;
///     if group.rank() == 0 {
///         reducer.submit(0, [3.0_f32][..].into()); // one batch more than rank 1 has
///         assert_eq!(reducer.finish()?.get::<f32>(0), Some(&[3.0][..]));
///     }
///     while reducer.shadow()?.is_some() {}
///     Ok(())
/// })?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "divide_by_initial_world_size")]
pub enum Divisor {
    /// By the number of all ranks: ranks without data count as zeros. So every batch has the same weight, however many
    /// ranks still have one.
    #[default]
    InitialWorld,
    /// By the number of ranks that still have data: a step has the same size, however many ranks take part. (With torch,
    /// `join(divide_by_initial_world_size=False)`.) In a step with all ranks the bits are those of
    /// [`Divisor::InitialWorld`].
    ActiveRanks,
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
    /// Sets [`DdpOptions::first_bucket_bytes`], whatever the size of the model.
    #[must_use]
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.first_bucket_bytes = bytes;
        self.fits_buckets_to_model = false;
        self
    }

    /// Sets [`DdpOptions::bucket_bytes`], whatever the size of the model.
    #[must_use]
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.bucket_bytes = bytes;
        self.fits_buckets_to_model = false;
        self
    }

    /// Sets [`DdpOptions::unused_parameters`].
    #[must_use]
    pub fn unused_parameters(mut self, unused: UnusedParameters) -> Self {
        self.unused_parameters = unused;
        self
    }

    /// Sets [`DdpOptions::wire`].
    #[must_use]
    pub fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Sets [`DdpOptions::divisor`].
    #[must_use]
    pub fn divisor(mut self, divisor: Divisor) -> Self {
        self.divisor = divisor;
        self
    }

    /// Leaves tensors out: they are neither compared nor copied from rank 0, and their gradients are neither sent nor
    /// averaged. A name is the path of a tensor, or of a module, which stands for all its tensors. Further calls add
    /// names. (torch: `_set_params_and_buffers_to_ignore_for_model`.)
    #[must_use]
    pub fn ignore(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.ignored.extend(names.into_iter().map(Into::into));
        self.ignored.sort_unstable();
        self.ignored.dedup();
        self
    }

    /// Gives each rank the averages of its own parameters alone, so that it keeps the optimizer's state of those alone
    /// ([`GradientReducer`](super::GradientReducer#sharded) says how). Whoever takes a step must then bring the new
    /// values to all ranks; in the adapters `ShardedOptimizer` does both, and sets this.
    #[must_use]
    #[doc(alias = "ZeroRedundancyOptimizer")]
    pub fn sharded(mut self, sharded: bool) -> Self {
        self.sharded = sharded;
        self
    }

    /// Compares the values of all parameters between the ranks every `steps` steps, where a step begins. Without this
    /// call, or with 0, the ranks do so once, after the first step. If they differ, the step fails on every rank, with an
    /// error that names the rank and the parameter.
    ///
    /// Ranks drift apart in silence if one of them has another learning rate, or loads weights after wrapping. A
    /// comparison reads all parameters once, and sends one number.
    #[must_use]
    pub fn check_every(mut self, steps: u64) -> Self {
        self.check_every = steps;
        self
    }

    /// Makes a step of `count` shards, whatever the number of ranks. Each rank has a run of them, and computes the
    /// gradient of each alone. The average over the shards has the same bits on 1, 2, ... `count` ranks: their sum
    /// follows one tree, of which each rank brings parts.
    ///
    /// Adapters run such a step as one call; `accumulate`, `backward` and `shadow` have no place beside it. Parameters
    /// are f32 or f64.
    #[must_use]
    pub fn shards(mut self, count: usize) -> Self {
        self.shards = Some(count);
        self
    }

    /// Sets the seed of the random numbers of [shards](DdpOptions::shards), 0 unless set. Those of a shard follow from the
    /// seed, the number of the step and that of the shard.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether the tensor `name` is ignored, by its own name or by that of a module around it.
    pub fn ignores(&self, name: &str) -> bool {
        self.ignored.iter().any(|ignored| covers(ignored, name))
    }

    /// The ignored names that none of the tensors `names` has.
    pub(crate) fn unknown_names<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<&str> {
        let names: Vec<&str> = names.collect();
        let is_known = |ignored: &&String| names.iter().any(|name| covers(ignored, name));
        self.ignored.iter().filter(|it| !is_known(it)).map(String::as_str).collect()
    }
}

/// Whether `path` is that of the tensor `name`, or of a module around it.
fn covers(path: &str, name: &str) -> bool {
    name.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

impl Default for DdpOptions {
    fn default() -> Self {
        Self {
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            fits_buckets_to_model: true,
            unused_parameters: UnusedParameters::default(),
            wire: Wire::default(),
            divisor: Divisor::default(),
            ignored: Vec::new(),
            sharded: false,
            check_every: 0,
            shards: None,
            seed: 0,
        }
    }
}
