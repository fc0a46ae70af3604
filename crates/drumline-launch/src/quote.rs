//! What others have written, as lines of the report.

/// The most lines that are quoted.
const LINES_MAX: usize = 60;

/// How many of them come from the beginning, if there are more: an error of Rust begins with its message, one of
/// Python ends with it.
const FIRST_LINES: usize = 20;

/// The most characters of a line that are quoted.
const LINE_MAX: usize = 400;

/// The lines of `text`. Long ones are cut, and of many some in the middle are left out. Characters that could
/// move the cursor of a terminal, or give it orders, are escaped.
pub(crate) fn quoted(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    let left_out = lines.len().saturating_sub(LINES_MAX);
    let (head, rest) = match left_out {
        0 => (&lines[..], &[][..]),
        _ => (&lines[..FIRST_LINES], &lines[FIRST_LINES + left_out..]),
    };
    let gap = (left_out > 0).then(|| format!("... {left_out} more lines ..."));
    head.iter().map(|it| line(it)).chain(gap).chain(rest.iter().map(|it| line(it))).collect()
}

fn line(text: &str) -> String {
    let mut safe = String::new();
    let mut letters = text.chars();
    for letter in letters.by_ref().take(LINE_MAX) {
        match letter {
            '\t' => safe.push('\t'),
            _ if letter.is_control() => safe.extend(letter.escape_default()),
            _ => safe.push(letter),
        }
    }
    if letters.next().is_some() {
        safe.push_str(" ...");
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_as_they_are() {
        assert_eq!(quoted("Traceback\n\tx = é\n\nboom\n\n"), ["Traceback", "\tx = é", "", "boom"]);
        assert!(quoted("").is_empty());
    }

    #[test]
    fn orders_to_the_terminal_are_escaped() {
        assert_eq!(quoted("a\x1b[2Jb\rc\u{9b}1m"), ["a\\u{1b}[2Jb\\rc\\u{9b}1m"]);
    }

    #[test]
    fn much_is_cut() {
        let many: String = (0..100).map(|i| format!("{i}\n")).collect();
        let lines = quoted(&many);
        assert_eq!(lines.len(), LINES_MAX + 1);
        assert_eq!((lines[19].as_str(), lines[21].as_str()), ("19", "60"));
        assert_eq!((lines[20].as_str(), lines[60].as_str()), ("... 40 more lines ...", "99"));
        assert_eq!(quoted(&"é".repeat(500)), [format!("{} ...", "é".repeat(LINE_MAX))]);
    }
}
