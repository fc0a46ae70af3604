/// The factor by which a loss is multiplied, so that small gradients do not become zero in 16 bits. It adapts: it grows
/// as long as gradients are finite, and shrinks when they are not. The rule is that of torch's `GradScaler`.
///
/// Averaged gradients have the same bits on all ranks. So all ranks see alike whether they are finite, and no message is
/// needed to keep the factors equal: an infinity or NaN of one rank is in every rank's average.
///
/// ```
/// use drumline::ddp::LossScale;
///
/// let mut scale = LossScale::default().growth_interval(2);
/// assert_eq!(scale.value(), 65536.0);
/// scale.update(true); // some gradient was infinite, so the step was skipped
/// assert_eq!(scale.value(), 32768.0);
/// scale.update(false);
/// scale.update(false);
/// assert_eq!(scale.value(), 65536.0);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    value: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u64,
    /// The number of steps with finite gradients since the factor changed.
    growth_tracker: u64,
}

impl LossScale {
    /// The factor to begin with: 65536 unless set.
    #[must_use]
    pub fn init_scale(mut self, value: f64) -> Self {
        self.value = value;
        self
    }

    /// By what to multiply the factor after enough finite steps: 2 unless set.
    #[must_use]
    pub fn growth_factor(mut self, factor: f64) -> Self {
        self.growth_factor = factor;
        self
    }

    /// By what to multiply the factor after a step that was not finite: 0.5 unless set.
    #[must_use]
    pub fn backoff_factor(mut self, factor: f64) -> Self {
        self.backoff_factor = factor;
        self
    }

    /// The number of finite steps in a row after which the factor grows: 2000 unless set.
    #[must_use]
    pub fn growth_interval(mut self, steps: u64) -> Self {
        self.growth_interval = steps;
        self
    }

    /// The present factor.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// The number of finite steps since the factor changed. A checkpoint holds it and the factor.
    pub fn growth_tracker(&self) -> u64 {
        self.growth_tracker
    }

    /// Goes on from a checkpoint.
    #[must_use]
    pub fn resume(mut self, value: f64, growth_tracker: u64) -> Self {
        self.value = value;
        self.growth_tracker = growth_tracker;
        self
    }

    /// Ends a step. `found_inf` says whether a gradient was infinite or NaN.
    pub fn update(&mut self, found_inf: bool) {
        if found_inf {
            self.value *= self.backoff_factor;
            self.growth_tracker = 0;
            return;
        }
        self.growth_tracker += 1;
        if self.growth_tracker >= self.growth_interval {
            let grown = self.value * self.growth_factor;
            // Losses are f32 or narrower.
            if (grown as f32).is_finite() {
                self.value = grown;
            }
            self.growth_tracker = 0;
        }
    }
}

impl Default for LossScale {
    fn default() -> Self {
        Self {
            value: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            growth_tracker: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_and_backs_off_as_torchs_does() {
        let mut scale = LossScale::default()
            .init_scale(8.0)
            .growth_factor(4.0)
            .backoff_factor(0.25)
            .growth_interval(3);
        let steps = [false, false, true, false, false, false, false, true, true];
        let seen = steps.map(|found_inf| {
            scale.update(found_inf);
            (scale.value(), scale.growth_tracker())
        });
        let wanted = [
            (8.0, 1),
            (8.0, 2),
            (2.0, 0),
            (2.0, 1),
            (2.0, 2),
            (8.0, 0),
            (8.0, 1),
            (2.0, 0),
            (0.5, 0),
        ];
        assert_eq!(seen, wanted);
    }

    #[test]
    fn it_does_not_grow_beyond_single_precision() {
        let mut scale = LossScale::default().init_scale(2_f64.powi(127)).growth_interval(1);
        scale.update(false);
        assert_eq!((scale.value(), scale.growth_tracker()), (2_f64.powi(127), 0));
    }
}
