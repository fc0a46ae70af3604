use std::{fmt, str::FromStr};

use fastrand::Rng;

/// One of so many parts of a list, to be gone through in several runs: `3/24`.
///
/// What is in a part follows from the list alone. Each part has something of everything.
///
/// ```
/// use drumline_conformance::Part;
///
/// let part: Part = "2/3".parse()?;
/// assert_eq!(part.of((0..9).collect()).len(), 3);
/// assert_eq!(Part::WHOLE.of((0..9).collect()).len(), 9);
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// From 0 on.
    index: usize,
    parts: usize,
}

impl Part {
    /// All of it.
    pub const WHOLE: Part = Part { index: 0, parts: 1 };

    /// The environment variable that names one.
    pub const VARIABLE: &str = "DRUMLINE_PART";

    /// The one that the environment names, or all.
    ///
    /// # Errors
    ///
    /// When it names none.
    pub fn from_env() -> Result<Part, String> {
        match std::env::var(Part::VARIABLE) {
            Ok(text) => text.parse().map_err(|problem| format!("{}: {problem}", Part::VARIABLE)),
            Err(_) => Ok(Part::WHOLE),
        }
    }

    /// What is in it, in an order of its own.
    pub fn of<T>(self, mut list: Vec<T>) -> Vec<T> {
        Rng::with_seed(list.len() as u64).shuffle(&mut list);
        list.into_iter().skip(self.index).step_by(self.parts).collect()
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Part, String> {
        let numbers = text.split_once('/').map(|(number, of)| (number.parse(), of.parse()));
        match numbers {
            Some((Ok(number), Ok(parts))) if (1..=parts).contains(&number) => {
                Ok(Part { index: number - 1, parts })
            }
            _ => Err(format!("{text:?} is no part: one is written 3/24")),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index + 1, self.parts)
    }
}
