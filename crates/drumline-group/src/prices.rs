//! What algorithms over links are chosen by: constants, a file, or a short measurement, but the same
//! on all ranks.

use std::{fs, path::PathBuf, str::FromStr};

use drumline_schedule::price::PriceList;
use xxhash_rust::xxh3::xxh3_64;

use crate::{Error, Result};

pub(crate) mod probe;

/// Where the prices come from that algorithms over links are chosen by
/// ([`Config::prices`](crate::Config::prices)). They change the time that a call takes, never its
/// result.
///
/// ```
/// use drumline::PriceSource;
///
/// assert_eq!("default".parse(), Ok(PriceSource::Default));
/// assert_eq!("measure".parse(), Ok(PriceSource::Measure));
/// assert_eq!("runs/prices.toml".parse(), Ok(PriceSource::File("runs/prices.toml".into())));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PriceSource {
    /// Constants of the library: start-up takes no longer.
    #[default]
    Default,
    /// Rank 0 and a rank that it reaches over a link send each other messages for at most 50 ms when
    /// the group is made, and all ranks take what they find. Nothing is measured where the ranks of
    /// a group share memory: they have no links to choose for.
    Measure,
    /// A file, which must say the same on all ranks. `drumline simulate --measure` writes one;
    /// [`PriceList`] has the format.
    File(PathBuf),
    /// These.
    Given(Box<PriceList>),
}

impl FromStr for PriceSource {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<PriceSource, Self::Err> {
        Ok(match text {
            "" | "default" => PriceSource::Default,
            "measure" => PriceSource::Measure,
            path => PriceSource::File(path.into()),
        })
    }
}

impl PriceSource {
    /// The prices to begin with: of [`PriceSource::Measure`], before anything is measured.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] names the file, and the line that cannot be understood.
    pub(crate) fn load(&self) -> Result<PriceList> {
        match self {
            PriceSource::Default | PriceSource::Measure => Ok(PriceList::default()),
            PriceSource::Given(list) => Ok(PriceList::clone(list)),
            PriceSource::File(path) => {
                let invalid = |problem: String| Error::InvalidSetting {
                    setting: "prices (DRUMLINE_PRICES)".to_owned(),
                    problem: format!("{}: {problem}", path.display()),
                };
                let text = fs::read_to_string(path).map_err(|error| {
                    invalid(format!(
                        "{error}; give `default`, `measure` or a file as \
                         `drumline simulate --measure` writes it"
                    ))
                })?;
                text.parse().map_err(|error| invalid(format!("{error}")))
            }
        }
    }

    /// What ranks compare: where it differs, they would choose differently.
    pub(crate) fn word(&self, list: &PriceList) -> String {
        match self {
            PriceSource::Measure => "measured".to_owned(),
            _ => format!("{:016x}", xxh3_64(list.to_string().as_bytes())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_with_its_wrong_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prices.toml");
        let load = |text: &str| {
            fs::write(&path, text).unwrap();
            PriceSource::File(path.clone()).load()
        };
        assert_eq!(load("far.round_ps = 7").unwrap().far.round_ps, 7);
        let error = load("# prices\nfar.round_ps = soon").unwrap_err().to_string();
        assert!(error.contains("prices.toml: line 2: far.round_ps"), "{error}");
        let error = PriceSource::File("/nowhere/x".into()).load().unwrap_err().to_string();
        assert!(error.contains("/nowhere/x") && error.contains("--measure"), "{error}");
    }

    #[test]
    fn equal_prices_have_equal_words_wherever_they_come_from() {
        let list = PriceList::default();
        let other = PriceList { call_ps: 1, ..list.clone() };
        let given = PriceSource::Given(Box::new(list.clone()));
        assert_eq!(given.word(&list), PriceSource::Default.word(&list));
        assert_ne!(given.word(&other), given.word(&list));
        assert_ne!(PriceSource::Measure.word(&list), given.word(&list));
    }
}
