use std::{fmt, str::FromStr};

use super::{DistributedSampler, DistributedSamplerBuilder};
use crate::{Error, Result};

/// How far all ranks are in the data, in a form that any number of ranks can go on from.
///
/// An epoch has one order of samples, which depends on seed and epoch but not on the number of
/// ranks. All ranks take equally many steps, so what they have used together is always a beginning
/// of that order, [`consumed`](Self::consumed) places long. Going on means to deal out the rest:
/// of `world_size` ranks, rank `r` gets the places `consumed + r`, `consumed + r + world_size`,
/// and so on.
///
/// - The same number of ranks goes on exactly as if it had not been interrupted.
/// - With any sequence of numbers of ranks, every sample is used exactly once per epoch. Only the
///   last of them rounds: it repeats up to `world_size - 1` samples of the order's beginning, or
///   with `drop_last` leaves out as many of its end.
///
/// Its text is meant for the metadata of a [checkpoint](crate::checkpoint):
///
/// ```
/// use drumline::sampler::{DistributedSampler, SamplerState};
///
/// # fn main() -> drumline::train::Result<()> {
/// // Two ranks; this is rank 0, which has used one batch of three.
/// let mut sampler = DistributedSampler::builder(10, 2, 0).shuffle(false).build()?;
/// assert_eq!(sampler.iter().collect::<Vec<_>>(), [0, 2, 4, 6, 8]);
/// sampler.advance(3);
/// let text = sampler.state().to_string();
///
/// // Later there are four ranks. Six samples are done; the other four are dealt out.
/// let state: SamplerState = text.parse()?;
/// for (rank, left) in [6, 7, 8, 9].into_iter().enumerate() {
///     let mut sampler = DistributedSampler::builder(10, 4, rank).shuffle(false).build()?;
///     sampler.resume(&state)?;
///     assert_eq!(sampler.iter().collect::<Vec<_>>(), [left]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SamplerState {
    /// The epoch, as [`DistributedSampler::set_epoch`] got it.
    pub epoch: u64,
    /// Places of this epoch's order that are done, over all ranks. With the padding that the last
    /// ranks add, it can end a little above `samples`.
    pub consumed: usize,
    /// Length of the data set.
    pub samples: usize,
    /// Where the random orders start.
    pub seed: u64,
    /// Whether each epoch has a random order.
    pub shuffle: bool,
    /// Whether samples that do not divide evenly are left out.
    pub drop_last: bool,
}

impl DistributedSampler {
    /// Where the ranks are, as far as [`advance`](Self::advance) was told. The same on all ranks.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let mut sampler = DistributedSampler::builder(1500, 2, 0).seed(7).build()?;
    /// sampler.set_epoch(3);
    /// sampler.advance(64);
    /// let text = sampler.state().to_string(); // for the metadata of a checkpoint
    /// assert_eq!(text, "epoch=3 consumed=128 samples=1500 seed=7 shuffle=1 drop_last=0");
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    pub fn state(&self) -> SamplerState {
        let DistributedSamplerBuilder { samples, seed, shuffle, drop_last, .. } = self.options;
        let (epoch, consumed) = (self.epoch, self.consumed);
        SamplerState { epoch, consumed, samples, seed, shuffle, drop_last }
    }

    /// Goes on where a sampler over the same data with the same settings was, which may have been
    /// one of another number of ranks.
    ///
    /// ```
    /// use drumline::sampler::DistributedSampler;
    ///
    /// let mut before = DistributedSampler::builder(10, 1, 0).seed(7).build()?;
    /// before.advance(6);
    ///
    /// let mut sampler = DistributedSampler::builder(10, 1, 0).seed(7).build()?;
    /// sampler.resume(&before.state())?;
    /// assert_eq!(sampler.iter().collect::<Vec<_>>(), before.iter().collect::<Vec<_>>());
    ///
    /// let mut other = DistributedSampler::builder(10, 1, 0).seed(8).build()?;
    /// assert!(other.resume(&before.state()).unwrap_err().to_string().contains("seed"));
    /// # Ok::<_, drumline::train::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when it had another order: the text names the setting. Then
    /// nothing was changed.
    pub fn resume(&mut self, state: &SamplerState) -> Result<()> {
        let ours = SamplerState { epoch: state.epoch, consumed: state.consumed, ..self.state() };
        let differs = state.fields().into_iter().zip(ours.fields()).find(|(was, is)| was != is);
        if let Some(((setting, was), (_, is))) = differs {
            return Err(Error::InvalidArgument {
                operation: "DistributedSampler::resume",
                problem: format!("the state is of {setting} {was}, but this sampler has {is}"),
            });
        }
        (self.epoch, self.consumed) = (state.epoch, state.consumed);
        Ok(())
    }
}

impl SamplerState {
    fn fields(&self) -> [(&'static str, u64); 6] {
        [
            ("epoch", self.epoch),
            ("consumed", self.consumed as u64),
            ("samples", self.samples as u64),
            ("seed", self.seed),
            ("shuffle", self.shuffle.into()),
            ("drop_last", self.drop_last.into()),
        ]
    }
}

/// `epoch=3 consumed=128 samples=1500 seed=7 shuffle=1 drop_last=0`
impl fmt::Display for SamplerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, value)) in self.fields().into_iter().enumerate() {
            write!(f, "{}{name}={value}", if index == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

impl FromStr for SamplerState {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = |name: &str| -> Option<u64> {
            text.split(' ')
                .find_map(|field| field.strip_prefix(name)?.strip_prefix('='))?
                .parse()
                .ok()
        };
        let parse = || {
            let state = SamplerState {
                epoch: number("epoch")?,
                consumed: number("consumed")?.try_into().ok()?,
                samples: number("samples")?.try_into().ok()?,
                seed: number("seed")?,
                shuffle: number("shuffle")? == 1,
                drop_last: number("drop_last")? == 1,
            };
            // Exactly what Display writes: nothing more, nothing in another order.
            (state.to_string() == text).then_some(state)
        };
        parse().ok_or_else(|| Error::InvalidArgument {
            operation: "SamplerState",
            problem: format!(
                "{text:?} is not the state of a sampler, which looks like \
                 epoch=3 consumed=128 samples=1500 seed=7 shuffle=1 drop_last=0"
            ),
        })
    }
}
