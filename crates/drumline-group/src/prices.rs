//! The prices by which a group chooses algorithms over links: constants, a file, or a short measurement. All
//! ranks use the same prices.

use std::{path::PathBuf, str::FromStr};

use drumline_schedule::price::PriceList;
use drumline_shm::files::read_text;
use xxhash_rust::xxh3::xxh3_64;

use crate::{Error, Result};

pub(crate) mod probe;

/// The source of the prices by which a group chooses algorithms over links
/// ([`Config::prices`](crate::Config::prices)). Prices change the time of a call, never its result.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::algorithms::PriceSource;
///
/// assert_eq!("default".parse(), Ok(PriceSource::Default));
/// assert_eq!("measure".parse(), Ok(PriceSource::Measure));
/// assert_eq!("runs/prices.toml".parse(), Ok(PriceSource::File("runs/prices.toml".into())));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PriceSource {
    /// Constants of the library. They take no time at start-up.
    #[default]
    Default,
    /// When the group is made, rank 0 and a rank that it reaches over a link exchange messages for at most 50
    /// ms. All ranks use the result. A group whose ranks all share memory has no links, and measures nothing.
    Measure,
    /// A file, with the same content on all ranks, in the text form of a [`PriceList`].
    File(PathBuf),
    /// These prices.
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
    /// The first prices: for [`PriceSource::Measure`] those before the measurement.
    ///
    /// # Errors
    ///
    /// [`Setting`](crate::ErrorKind::Setting) names the file, and the line with the error.
    pub(crate) fn load(&self) -> Result<PriceList> {
        match self {
            PriceSource::Default | PriceSource::Measure => Ok(PriceList::default()),
            PriceSource::Given(list) => Ok(PriceList::clone(list)),
            PriceSource::File(path) => {
                let invalid = |problem: String| {
                    Error::setting(
                        "prices (DRUMLINE_PRICES)",
                        format!("{}: {problem}", path.display()),
                    )
                };
                let text = read_text(path, 1 << 20).map_err(|error| {
                    invalid(format!(
                        "{error}; give `default`, `measure` or a file of lines `name = number`"
                    ))
                })?;
                text.parse().map_err(|error| invalid(format!("{error}")))
            }
        }
    }

    /// A digest that ranks compare. Where it differs, they would choose different algorithms.
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
            std::fs::write(&path, text).unwrap();
            PriceSource::File(path.clone()).load()
        };
        assert_eq!(load("far.round_ps = 7").unwrap().far.round_ps, 7);
        let error = load("# prices\nfar.round_ps = soon").unwrap_err().to_string();
        assert!(error.contains("prices.toml: line 2: far.round_ps"), "{error}");
        let error = PriceSource::File("/nowhere/x".into()).load().unwrap_err().to_string();
        assert!(error.contains("/nowhere/x") && error.contains("`measure`"), "{error}");
    }

    #[test]
    fn equal_prices_have_equal_words_wherever_they_come_from() {
        let list = PriceList::default();
        let other = PriceList { nic_byte_fs: 1, ..list.clone() };
        let given = PriceSource::Given(Box::new(list.clone()));
        assert_eq!(given.word(&list), PriceSource::Default.word(&list));
        assert_ne!(given.word(&other), given.word(&list));
        assert_ne!(PriceSource::Measure.word(&list), given.word(&list));
    }
}
