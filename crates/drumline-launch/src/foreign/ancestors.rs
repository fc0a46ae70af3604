//! The variables of the processes above this one.

use std::fs;

use rustix::process::getppid;

use super::launchers::Variables;

/// Those of the parent, of its parent, and so on, up to the first that belongs to another user.
pub(super) fn variables() -> Vec<Variables> {
    let mut above = Vec::new();
    let mut next = getppid().map(|pid| pid.as_raw_pid());
    while let Some(pid) = next
        && let Ok(text) = fs::read(format!("/proc/{pid}/environ"))
    {
        above.push(parse(&text));
        next = fs::read_to_string(format!("/proc/{pid}/stat")).ok().and_then(|stat| parent(&stat));
    }
    above
}

/// As a process gets them when it starts.
fn parse(text: &[u8]) -> Variables {
    let texts = text.split(|&byte| byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    let pairs = texts.filter_map(|text| text.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The second field behind the name, which may hold anything.
fn parent(stat: &str) -> Option<i32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok().filter(|&pid| pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_stands_behind_the_name() {
        assert_eq!(parent("12 (a) b) S 7 12 12 0"), Some(7));
        assert_eq!(parent("1 (init) S 0 1 1"), None);
        assert_eq!(parent(""), None);
        assert_eq!(
            parse(b"A=1\0B=x=y\0\xff=1\0C").into_iter().collect::<Vec<_>>(),
            [("A".to_owned(), "1".to_owned()), ("B".to_owned(), "x=y".to_owned())]
        );
    }
}
