//! Parts of the texts of errors.

use std::time::Duration;

use crate::Section;

/// The text of an error with its section at the end. If `text` quotes an error that has a section, it is that one,
/// because it tells more.
///
/// ```
/// use drumline_error::{Section, in_section};
///
/// let error = in_section(Section::Settings, "DRUMLINE_STREAMS: is 0");
/// assert_eq!(error, "DRUMLINE_STREAMS: is 0 (drumline explain settings)");
/// let quoted = in_section(Section::StartUp, &format!("rank 1 reports ({error})"));
/// assert_eq!(quoted, "rank 1 reports (DRUMLINE_STREAMS: is 0) (drumline explain settings)");
/// ```
pub fn in_section(section: Section, text: &str) -> String {
    match Section::split(text) {
        Some((text, quoted)) => format!("{text} {}", quoted.unwrap_or(section)),
        None => format!("{text} {section}"),
    }
}

/// The text of an error about a setting. That of the secret has a section of its own.
pub fn of_setting(setting: &str, problem: &str) -> String {
    let is_secret = setting.starts_with("DRUMLINE_SECRET");
    let section = if is_secret { Section::Secrets } else { Section::Settings };
    in_section(section, &format!("{setting}: {problem}"))
}

/// A time that was waited in vain: `2.0s`. `0.0ns` would look like a fault of the clock.
///
/// ```
/// use std::time::Duration;
///
/// use drumline_error::spent;
///
/// assert_eq!((spent(Duration::from_secs(2)), spent(Duration::ZERO)), ("2.0s".into(), "no time".into()));
/// ```
pub fn spent(time: Duration) -> String {
    match time.is_zero() {
        true => "no time".to_owned(),
        false => format!("{time:.1?}"),
    }
}
