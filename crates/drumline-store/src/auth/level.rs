//! How a connection is protected after both ends have proven themselves.

use std::{fmt, str::FromStr};

/// How the bytes of a TCP connection are protected after both ends have proven that they know the secret.
/// Both ends must have the same level, which their proofs cover.
///
/// It does not apply to Unix sockets, because the kernel keeps other users out of those.
///
/// ```
/// # use drumline_store as drumline;
/// use drumline::auth::Level;
///
/// assert_eq!("tls".parse(), Ok(Level::Tls));
/// assert_eq!(Level::default().to_string(), "auth");
/// assert!("none".parse::<Level>().is_err());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain bytes. Someone who can change packets on the way can change bytes unnoticed.
    #[default]
    Auth,
    /// TLS 1.3. If someone changes, cuts, repeats or reorders bytes, the receiver notices. Nobody on the way can read
    /// them, also not who learns the secret later.
    Tls,
}

impl Level {
    /// All levels, the weakest first.
    pub const ALL: [Level; 2] = [Level::Auth, Level::Tls];

    /// The code of the level in the greeting of an end that has a secret.
    pub(super) fn code(self) -> u8 {
        match self {
            Level::Auth => 1,
            // 2 was a level of earlier releases.
            Level::Tls => 3,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Auth => "auth",
            Level::Tls => "tls",
        })
    }
}

/// A text that names no [`Level`].
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoLevel {
    /// No release knows this level.
    #[error("it should be auth or tls")]
    Unknown,
    /// A level of earlier releases.
    #[error(
        "it should be auth or tls, which protects against the same and more than integrity did"
    )]
    Integrity,
}

impl fmt::Debug for NoLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Level {
    type Err = NoLevel;

    fn from_str(text: &str) -> Result<Level, NoLevel> {
        let found = Level::ALL.into_iter().find(|level| level.to_string() == text);
        found.ok_or(if text == "integrity" { NoLevel::Integrity } else { NoLevel::Unknown })
    }
}
