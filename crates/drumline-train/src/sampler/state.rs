use std::{fmt, str::FromStr};

use crate::{Error, Result};

/// How far all ranks have come in the data. Any number of ranks can go on from it.
///
/// The order of an epoch depends on seed and epoch, and not on the number of ranks. All ranks take
/// the same number of steps, so the samples that they have used together are always the first
/// [`consumed`](Self::consumed) places of that order. When training goes on, the rest is distributed: rank
/// `r` of `world_size` gets the places `consumed + r`, `consumed + r + world_size`, and so on.
///
/// - The same number of ranks goes on exactly as if it had not been interrupted.
/// - Whatever the numbers of ranks over time, an epoch uses every sample exactly once, except at its end: the
///   ranks that finish the epoch repeat up to `world_size - 1` samples from the beginning of the order, or
///   with `drop_last` leave out up to as many at its end.
///
/// Its text is meant for the metadata of a [checkpoint](crate::checkpoint):
///
/// ```
/// use drumline::sampler::{DistributedSampler, SamplerState};
///
/// # fn main() -> drumline::Result<()> {
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
    /// The argument of [`DistributedSampler::set_epoch`](super::DistributedSampler::set_epoch).
    pub epoch: u64,
    /// How many places of this epoch's order all ranks together have used. Padding at the end of
    /// an epoch can bring it to up to `world_size - 1` above `samples`.
    pub consumed: usize,
    /// Length of the data set.
    pub samples: usize,
    /// The seed of the random orders.
    pub seed: u64,
    /// Whether each epoch has a random order.
    pub shuffle: bool,
    /// Whether samples that do not divide evenly are left out.
    pub drop_last: bool,
}

impl SamplerState {
    /// The fields in the order of the text.
    pub(super) fn fields(&self) -> [(&'static str, u64); 6] {
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
        parse().ok_or_else(|| {
            Error::argument(
                "SamplerState",
                format!(
                    "{text:?} is not the state of a sampler, which looks like \
                 epoch=3 consumed=128 samples=1500 seed=7 shuffle=1 drop_last=0"
                ),
            )
        })
    }
}
