//! What a wrapper logs about itself (`Config::debug`).

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use drumline::{
    ProcessGroup,
    config::DebugLevel,
    ddp::{DdpOptions, ParameterSpec, ReducerStats},
};

/// Logs the settings with which the wrapper was made, and then how long steps take, if the level asks for it.
pub(crate) struct Debug {
    level: DebugLevel,
    times: Mutex<Times>,
}

/// Times that the reducer does not see.
#[derive(Default)]
struct Times {
    /// When the backward of the last step had ended.
    ended: Option<Instant>,
    /// The time from there to the next backward: optimizer, data and forward.
    between: Duration,
    backward: Duration,
    steps: u32,
}

impl Debug {
    pub(crate) fn begin(
        group: &ProcessGroup,
        parameters: &[ParameterSpec],
        buffers: usize,
        options: &DdpOptions,
    ) -> Debug {
        let config = group.config();
        if config.debug >= DebugLevel::Info {
            let bytes = |it: &ParameterSpec| it.shape.iter().product::<usize>() * it.dtype.size();
            tracing::info!(
                target: "drumline_burn::ddp",
                rank = group.rank(),
                world_size = group.world_size(),
                backend_name = config.backend.as_deref().unwrap_or("drumline"),
                num_parameter_tensors = parameters.len(),
                total_parameter_size_bytes = parameters.iter().map(bytes).sum::<usize>(),
                num_buffers = buffers,
                first_bucket_bytes = options.first_bucket_bytes,
                bucket_cap_bytes = options.bucket_bytes,
                unused_parameters = ?options.unused_parameters,
                "DDP initialized"
            );
        }
        Debug { level: config.debug, times: Mutex::default() }
    }

    /// The backward that ends a step begins. Returns the time.
    pub(crate) fn begin_backward(&self) -> Instant {
        let (now, mut times) = (Instant::now(), self.times());
        if let Some(ended) = times.ended.take() {
            times.between += now.saturating_duration_since(ended);
        }
        now
    }

    /// This rank has all its gradients.
    pub(crate) fn end_backward(&self, began: Instant) {
        self.times().backward += began.elapsed();
    }

    /// All gradients are averaged.
    pub(crate) fn end_step(&self, group: &ProcessGroup, stats: impl FnOnce() -> ReducerStats) {
        let mut times = self.times();
        let step = times.steps;
        times.steps += 1;
        times.ended = Some(Instant::now());
        if self.level.tells(u64::from(step)) {
            let stats = stats();
            let each = |sum: Duration| sum / times.steps;
            let between = times.between / (times.steps - 1).max(1);
            tracing::info!(
                target: "drumline_burn::ddp",
                rank = group.rank(),
                step,
                "on average: {between:.1?} for optimizer, data and forward, {:.1?} for backward, {:.1?} \
                 for communication, of which backward hid {:.1?}",
                each(times.backward),
                each(stats.communication),
                each(stats.communication.saturating_sub(stats.exposed)),
            );
        }
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
