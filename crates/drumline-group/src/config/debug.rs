//! How much data-parallel training logs.

use std::str::FromStr;

/// How much data-parallel training logs of itself ([`Config::debug`](crate::Config::debug)), like torch's
/// `TORCH_DISTRIBUTED_DEBUG`.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::config::DebugLevel;
///
/// assert_eq!("DETAIL".parse(), Ok(DebugLevel::Detail));
/// assert!(DebugLevel::Info < DebugLevel::Detail && DebugLevel::Off < DebugLevel::Info);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DebugLevel {
    /// Nothing.
    #[default]
    Off,
    /// The settings of each wrapper when it is made.
    Info,
    /// Also the times of the parts of a step, in the first ten steps and in every hundredth.
    Detail,
}

impl DebugLevel {
    /// The name: `off`, `info` or `detail`.
    pub const fn name(self) -> &'static str {
        match self {
            DebugLevel::Off => "off",
            DebugLevel::Info => "info",
            DebugLevel::Detail => "detail",
        }
    }

    /// Whether the times of step number `step`, counted from 0, are logged.
    pub fn tells(self, step: u64) -> bool {
        self >= DebugLevel::Detail && (step < 10 || step.is_multiple_of(100))
    }
}

impl FromStr for DebugLevel {
    type Err = String;

    /// Accepts a name in upper or lower case.
    fn from_str(name: &str) -> Result<DebugLevel, String> {
        [DebugLevel::Off, DebugLevel::Info, DebugLevel::Detail]
            .into_iter()
            .find(|level| level.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| format!("{name:?} should be off, info or detail"))
    }
}
