//! The variables of the processes above this one.

use std::fs;

use rustix::process::getppid;

use super::launchers::Variables;
use crate::processes::Process;

/// Those of the parent, of its parent, and so on, up to the first that belongs to another user.
pub(super) fn variables() -> Vec<Variables> {
    let mut above = Vec::new();
    let mut next = getppid();
    while let Some(pid) = next
        && let Ok(text) = fs::read(format!("/proc/{pid}/environ"))
    {
        above.push(parse(&text));
        next = Process::read(pid).and_then(|it| it.parent());
    }
    above
}

/// As a process gets them when it starts.
fn parse(text: &[u8]) -> Variables {
    let texts = text.split(|&byte| byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    let pairs = texts.filter_map(|text| text.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_variable_is_left_out() {
        assert_eq!(
            parse(b"A=1\0B=x=y\0\xff=1\0C").into_iter().collect::<Vec<_>>(),
            [("A".to_owned(), "1".to_owned()), ("B".to_owned(), "x=y".to_owned())]
        );
    }
}
