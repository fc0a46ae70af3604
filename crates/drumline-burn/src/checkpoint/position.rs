use drumline::sampler::{DistributedSampler, SamplerState};

/// What knows the place in the data: a [`DistributedSampler`], or `()` if a checkpoint need not hold it.
///
/// Implement it for a source of data of your own that goes by the indices of a sampler.
///
/// ```
/// use drumline::sampler::DistributedSampler;
/// use drumline_burn::checkpoint::DataPosition;
///
/// let mut sampler = DistributedSampler::builder(10, 2, 0).build()?;
/// sampler.advance(3); // this rank has used three, so the other one has, too
/// assert_eq!(DataPosition::state(&sampler).unwrap().consumed, 6);
/// assert!(().state().is_none());
/// # Ok::<_, drumline::Error>(())
/// ```
pub trait DataPosition {
    /// How far all ranks are. The same on all ranks.
    fn state(&self) -> Option<SamplerState>;

    /// Goes on from there.
    ///
    /// # Errors
    ///
    /// The state is of other data, or of another order; the error names the setting.
    fn resume(&mut self, state: &SamplerState) -> drumline::Result<()>;
}

impl DataPosition for () {
    fn state(&self) -> Option<SamplerState> {
        None
    }

    fn resume(&mut self, _: &SamplerState) -> drumline::Result<()> {
        Ok(())
    }
}

impl DataPosition for DistributedSampler {
    fn state(&self) -> Option<SamplerState> {
        Some(self.state())
    }

    fn resume(&mut self, state: &SamplerState) -> drumline::Result<()> {
        self.resume(state)
    }
}
