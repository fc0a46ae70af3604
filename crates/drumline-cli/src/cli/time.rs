//! Times, as options write them.

use std::time::Duration;

/// `500ms`, `1.5s`, `2m`, or seconds without a unit, up to a day.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => Some(1e-3),
        "" | "s" => Some(1.0),
        "m" => Some(60.0),
        _ => None,
    };
    let seconds = unit.zip(digits.parse::<f64>().ok()).map(|(unit, number)| unit * number);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|&time| time <= Duration::from_secs(24 * 3600))
        .ok_or_else(|| "give a time like 500ms, 30s or 2m, at most 24 hours".into())
}

/// The shortest and the longest of some times: `1s..60s`, or one time that is both.
pub(super) fn times(text: &str) -> Result<(Duration, Duration), String> {
    let (shortest, longest) = text.split_once("..").unwrap_or((text, text));
    let times = (time(shortest)?, time(longest)?);
    match times.0 <= times.1 {
        true => Ok(times),
        false => Err(format!("the shorter time comes first: {longest}..{shortest}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(time("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "ms", "s", "nan", "inf", "-1", "5 s", "5h"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_range_has_two_times_or_one() {
        let seconds = |from, to| Ok((Duration::from_secs(from), Duration::from_secs(to)));
        assert_eq!(times("1s..60s"), seconds(1, 60));
        assert_eq!(times("1..1m"), seconds(1, 60));
        assert_eq!(times("0"), seconds(0, 0));
        assert_eq!(times("60s..1s"), Err("the shorter time comes first: 1s..60s".into()));
        for bad in ["", "..", "1s..", "1s..2s..3s"] {
            assert!(times(bad).is_err(), "{bad}");
        }
    }
}
