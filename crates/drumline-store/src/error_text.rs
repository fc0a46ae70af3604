//! Parts of the texts of errors.

use std::time::Duration;

/// The text of an error with its section of docs/reference/errors.md at the end: ` [errors.md#settings]`. If `text`
/// quotes an error that has a section, it is that one, because it tells more.
///
/// ```
/// use drumline_store::in_section;
///
/// let error = in_section("settings", "DRUMLINE_STREAMS: is 0".to_owned());
/// assert_eq!(error, "DRUMLINE_STREAMS: is 0 [errors.md#settings]");
/// let quoted = in_section("start-up", format!("rank 1 reports ({error})"));
/// assert_eq!(quoted, "rank 1 reports (DRUMLINE_STREAMS: is 0) [errors.md#settings]");
/// ```
pub fn in_section(section: &str, text: String) -> String {
    const BEGIN: &str = " [errors.md#";
    let Some((before, rest)) = text.split_once(BEGIN) else {
        return format!("{text}{BEGIN}{section}]");
    };
    match rest.split_once(']') {
        Some((quoted, after)) => format!("{before}{after}{BEGIN}{quoted}]"),
        None => format!("{before}{BEGIN}{section}]"), // the quotation was cut
    }
}

/// The text of an error about a setting. That of the secret has a section of its own.
pub fn of_setting(setting: &str, problem: &str) -> String {
    let section = if setting.starts_with("DRUMLINE_SECRET") { "secrets" } else { "settings" };
    in_section(section, format!("{setting}: {problem}"))
}

/// A time that was waited in vain: `2.0s`. `0.0ns` would look like a fault of the clock.
///
/// ```
/// use std::time::Duration;
///
/// use drumline_store::spent;
///
/// assert_eq!((spent(Duration::from_secs(2)), spent(Duration::ZERO)), ("2.0s".into(), "no time".into()));
/// ```
pub fn spent(time: Duration) -> String {
    match time.is_zero() {
        true => "no time".to_owned(),
        false => format!("{time:.1?}"),
    }
}
