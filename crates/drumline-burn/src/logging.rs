//! What a wrapper knows of itself, under torch's names.

use std::{collections::BTreeSet, fmt, time::Duration};

use drumline::ddp::{ParameterSpec, UnusedParameters, Wire};

use crate::{ddp::DistributedDataParallel, debug::Averages};

/// What a wrapper knows of itself and its steps, under the names of torch's `_get_ddp_logging_data`. Times are averages
/// in nanoseconds.
///
/// It prints as torch logs it: a line `name: value` for each field.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, tensor::{Device, Tensor}};
/// use drumline::ProcessGroup;
/// use drumline_burn::DistributedDataParallel;
///
/// let device = Device::flex().autodiff();
/// let model: Linear = LinearConfig::new(2, 1).init(&device);
/// let (ddp, model) = DistributedDataParallel::wrap(model, &ProcessGroup::alone())?;
/// ddp.backward(model.forward(Tensor::<2>::ones([1, 2], &device)).sum(), &model)?;
/// let data = ddp.logging_data();
/// assert_eq!((data.world_size, data.iteration, data.num_parameter_tensors), (1, 1, 2));
/// assert!(data.to_string().contains("total_parameter_size_bytes: 12\n"));
/// # Ok::<_, drumline_burn::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoggingData {
    /// The number of ranks.
    pub world_size: usize,
    /// This rank.
    pub rank: usize,
    /// Who carries out the collectives.
    pub backend_name: String,
    /// The number of finished steps.
    pub iteration: u64,
    /// The bytes at which a bucket is closed, unless buckets are fitted to the model.
    pub bucket_cap_bytes: usize,
    /// The bytes of gradients in each bucket of the first step.
    pub bucket_sizes: Vec<usize>,
    /// Whether the buckets were made anew from the observed order.
    pub has_rebuilt_buckets: bool,
    /// The bytes of gradients in each bucket since then.
    pub rebuilt_bucket_sizes: Vec<usize>,
    /// The parameters of each of these buckets, by their place in the model.
    pub rebuilt_per_bucket_param_indices: Vec<Vec<usize>>,
    /// The number of launched buckets.
    pub num_buckets_reduced: u64,
    /// The number of trained parameters.
    pub num_parameter_tensors: usize,
    /// The bytes of the trained parameters.
    pub total_parameter_size_bytes: usize,
    /// The types of the trained parameters.
    pub dtypes: Vec<String>,
    /// Whether a parameter may be unused.
    pub find_unused_parameters: bool,
    /// What changes the gradients on their way: empty or `bf16_compress`.
    pub comm_hook: String,
    /// From the end of a backward to the beginning of the next: optimizer, data and forward.
    pub avg_forward_compute_time: u64,
    /// How long backward takes.
    pub avg_backward_compute_time: u64,
    /// How long buckets are being averaged.
    pub avg_backward_comm_time: u64,
    /// The part of that which backward hides.
    pub avg_backward_compute_comm_overlap_time: u64,
}

impl DistributedDataParallel {
    /// The settings of this wrapper and the times of its steps, under torch's names. [`stats`](Self::stats) has the sums.
    ///
    /// Steps of [`backward_all`](crate::backward_all) count where the model is the first one.
    #[doc(alias = "_get_ddp_logging_data")]
    pub fn logging_data(&self) -> LoggingData {
        let handle = self.handle();
        let (stats, options) = (self.stats(), &handle.options);
        let reducer = &handle.reductions.own.reducer;
        let group = handle.elastic.group();
        let config = group.config();
        let buckets = reducer.buckets();
        let has_rebuilt_buckets = reducer.stats().steps > 0;
        let sizes = |buckets: &[Vec<usize>]| -> Vec<usize> {
            let bytes = |&parameter: &usize| handle.parameters[parameter].bytes();
            buckets.iter().map(|bucket| bucket.iter().map(bytes).sum()).collect()
        };
        let Averages { between, backward } = handle.debug.averages();
        let steps = u32::try_from(stats.steps.max(1)).unwrap_or(u32::MAX);
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let each = |time: Duration| nanoseconds(time / steps);
        let dtypes: BTreeSet<String> =
            handle.parameters.iter().map(|spec| spec.dtype.to_string()).collect();
        LoggingData {
            world_size: group.world_size(),
            rank: group.rank(),
            backend_name: config.backend.clone().unwrap_or_else(|| "drumline".to_owned()),
            iteration: stats.steps,
            bucket_cap_bytes: options.bucket_bytes,
            bucket_sizes: sizes(&handle.first_buckets),
            has_rebuilt_buckets,
            rebuilt_bucket_sizes: if has_rebuilt_buckets { sizes(&buckets) } else { Vec::new() },
            rebuilt_per_bucket_param_indices: if has_rebuilt_buckets {
                buckets
            } else {
                Vec::new()
            },
            num_buckets_reduced: stats.buckets_launched,
            num_parameter_tensors: handle.parameters.len(),
            total_parameter_size_bytes: handle.parameters.iter().map(ParameterSpec::bytes).sum(),
            dtypes: dtypes.into_iter().collect(),
            find_unused_parameters: options.unused_parameters == UnusedParameters::Ignore,
            comm_hook: if options.wire == Wire::Bf16 { "bf16_compress" } else { "" }.to_owned(),
            avg_forward_compute_time: nanoseconds(between),
            avg_backward_compute_time: nanoseconds(backward),
            avg_backward_comm_time: each(stats.communication),
            avg_backward_compute_comm_overlap_time: each(
                stats.communication.saturating_sub(stats.exposed),
            ),
        }
    }
}

impl fmt::Display for LoggingData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        macro_rules! lines {
            ($($field:ident)*) => {
                $(writeln!(f, "{}: {:?}", stringify!($field), self.$field)?;)*
            };
        }
        lines!(
            world_size rank backend_name iteration bucket_cap_bytes bucket_sizes has_rebuilt_buckets
            rebuilt_bucket_sizes rebuilt_per_bucket_param_indices num_buckets_reduced
            num_parameter_tensors total_parameter_size_bytes dtypes find_unused_parameters comm_hook
            avg_forward_compute_time avg_backward_compute_time avg_backward_comm_time
            avg_backward_compute_comm_overlap_time
        );
        Ok(())
    }
}
