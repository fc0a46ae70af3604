use std::{fmt, str::FromStr};

use fastrand::Rng;

/// One part of a list, for tests that are spread over several runs: `3/24`.
///
/// The contents of a part depend only on the list. Each part is a sample of the whole list.
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
    /// Counted from 0.
    index: usize,
    parts: usize,
}

impl Part {
    /// The whole list.
    pub const WHOLE: Part = Part { index: 0, parts: 1 };

    /// The environment variable that names a part.
    pub const VARIABLE: &str = "DRUMLINE_PART";

    /// The part that the environment names, or the whole list.
    ///
    /// # Errors
    ///
    /// The variable is set to something else.
    pub fn from_env() -> Result<Part, String> {
        match std::env::var(Part::VARIABLE) {
            Ok(text) => text.parse().map_err(|problem| format!("{}: {problem}", Part::VARIABLE)),
            Err(_) => Ok(Part::WHOLE),
        }
    }

    /// The items of this part, shuffled.
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
