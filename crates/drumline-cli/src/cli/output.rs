//! What is written to files, and what is shown.

use std::{ops::RangeInclusive, path::PathBuf};

use clap::Args;
use drumline_launch::{Logs, Stdin, StreamMap, Streams};

use super::{
    host::Host,
    names::{Names, Refusal},
    nearest::nearest,
    ranks::RANKS_MAX,
};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(super) struct OutputArgs {
    /// The directory for files: DIR/ID_RANDOM/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Streams that go to files and are not shown: 0 none, 1 stdout, 2 stderr, 3 both; or of some local ranks:
    /// 0:3,4-7:1
    #[arg(short = 'r', long, value_name = "STREAMS", default_value = "0", value_parser = streams)]
    redirects: StreamMap,

    /// Streams that go to files and are shown; written like --redirects
    #[arg(short = 't', long, value_name = "STREAMS", default_value = "0", value_parser = streams)]
    tee: StreamMap,

    /// The local ranks whose output is shown: 0,4-7 [default: all]
    #[arg(long, value_name = "RANKS", value_parser = ranks)]
    local_ranks_filter: Option<Ranks>,

    /// Lines of stdout that contain one of these texts also go to the file filtered_stdout.log; `,,` is a comma
    #[arg(long, value_name = "TEXTS", value_parser = filters)]
    duplicate_stdout_filters: Option<Filters>,

    /// The same for stderr and filtered_stderr.log
    #[arg(long, value_name = "TEXTS", value_parser = filters)]
    duplicate_stderr_filters: Option<Filters>,

    /// What shown lines begin with, with ${rank}, ${local_rank}, ${role_name}, ${hostname}, ${time}
    /// [default: `[${rank}] `]
    #[arg(long, value_name = "TEXT", value_parser = prefix)]
    log_line_prefix_template: Option<String>,

    /// The local rank that gets the stdin of the launcher, or `none` [default: 0 on a terminal, and one rank alone]
    #[arg(long, value_name = "RANK", value_parser = stdin)]
    stdin: Option<Stdin>,

    /// Write how the job ended on this host to FILE, as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,
}

impl OutputArgs {
    /// Who gets the stdin of the launcher, of so many ranks on this host.
    pub(super) fn stdin(&self, ranks: usize, names: &Names) -> Result<Stdin, Refusal> {
        let given = self.stdin.unwrap_or_default();
        match given {
            Stdin::Worker(rank) if rank >= ranks => Err(no_local_rank("stdin", rank, ranks, names)),
            _ => Ok(given),
        }
    }

    /// The same for a job with so many ranks on this host.
    pub(super) fn logs(
        self,
        ranks: usize,
        names: &Names,
        host: &Host<'_>,
    ) -> Result<Logs, Refusal> {
        let mapped = |map: &StreamMap| map.ranks.iter().map(|(rank, _)| *rank).max();
        let shown = self.local_ranks_filter.map_or(Vec::new(), |Ranks(shown)| shown);
        for (option, highest) in [
            ("redirects", mapped(&self.redirects)),
            ("tee", mapped(&self.tee)),
            ("local-ranks-filter", shown.iter().copied().max()),
        ] {
            if let Some(rank) = highest.filter(|&rank| rank >= ranks) {
                return Err(no_local_rank(option, rank, ranks, names));
            }
        }
        let prefix = match self.log_line_prefix_template {
            Some(given) => Some(given),
            None => host.parsed("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", prefix)?,
        };
        let texts = |filters: Option<Filters>| filters.map_or(Vec::new(), |Filters(texts)| texts);
        Ok(Logs {
            dir: self.log_dir,
            redirects: self.redirects,
            tee: self.tee,
            shown,
            stdout_filters: texts(self.duplicate_stdout_filters),
            stderr_filters: texts(self.duplicate_stderr_filters),
            prefix,
        })
    }
}

fn no_local_rank(option: &'static str, rank: usize, ranks: usize, names: &Names) -> Refusal {
    let text = format!(
        "{}: there is no local rank {rank}, only 0 to {}; --nproc-per-node says how many there are",
        names.of(option),
        ranks - 1
    );
    Refusal::of(text, [option])
}

/// `2`, or `none`.
fn stdin(text: &str) -> Result<Stdin, String> {
    match (text, text.parse()) {
        ("none", _) => Ok(Stdin::Nobody),
        (_, Ok(rank)) => Ok(Stdin::Worker(rank)),
        (_, Err(_)) => Err("give a local rank, or none".to_owned()),
    }
}

/// Local ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ranks(Vec<usize>);

/// Texts, of which a line contains one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Filters(Vec<String>);

/// `3`, for all ranks, or `0:3,4-7:1`.
fn streams(text: &str) -> Result<StreamMap, String> {
    if let Some(default) = number_of_streams(text) {
        return Ok(StreamMap { default, ranks: Vec::new() });
    }
    let mut map = StreamMap::default();
    for entry in text.split(',') {
        let (range, streams) = entry
            .split_once(':')
            .and_then(|(ranks, streams)| Some((range(ranks)?, number_of_streams(streams)?)))
            .ok_or("give 0, 1 (stdout), 2 (stderr) or 3 (both), or such numbers of local ranks: 0:3,4-7:1")?;
        for rank in range {
            if map.ranks.iter().any(|(known, _)| *known == rank) {
                return Err(format!("local rank {rank} is there twice"));
            }
            map.ranks.push((rank, streams));
        }
    }
    Ok(map)
}

fn number_of_streams(text: &str) -> Option<Streams> {
    let (stdout, stderr) = match text {
        "0" => (false, false),
        "1" => (true, false),
        "2" => (false, true),
        "3" => (true, true),
        _ => return None,
    };
    Some(Streams { stdout, stderr })
}

/// `0,4-7`.
fn ranks(text: &str) -> Result<Ranks, String> {
    let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
    let ranks = ranges.ok_or("give local ranks: 0,4-7")?.into_iter().flatten().collect();
    Ok(Ranks(ranks))
}

/// `4-7`, or one rank.
fn range(text: &str) -> Option<RangeInclusive<usize>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (first <= last && last < RANKS_MAX).then_some(first..=last)
}

/// `error,warning`. A comma in a text is written twice.
fn filters(text: &str) -> Result<Filters, String> {
    let mut texts = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match (letter, texts.last_mut()) {
            (',', _) if letters.peek() != Some(&',') => texts.push(String::new()),
            (',', Some(last)) => last.extend(letters.next()),
            (_, Some(last)) => last.push(letter),
            (_, None) => {}
        }
    }
    match texts.iter().any(String::is_empty) {
        true => Err("every line contains an empty text; write a comma in a text as `,,`".into()),
        false => Ok(Filters(texts)),
    }
}

/// What can be put into the beginning of a line.
const MACROS: [&str; 5] = ["rank", "local_rank", "role_name", "hostname", "time"];

/// The template with every macro as `${name}`. Like torch, this takes `$name`, and `$$` for `$`.
fn prefix(text: &str) -> Result<String, String> {
    let (mut done, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('$') {
        done.push_str(before);
        done.push('$');
        let (name, behind) = match after.strip_prefix('{') {
            Some(braced) => braced.split_once('}').ok_or("a `}` is missing")?,
            None => {
                let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
                after.split_at(after.find(|letter| !is_name(letter)).unwrap_or(after.len()))
            }
        };
        if !after.starts_with('{') && name.is_empty() {
            rest = after.strip_prefix('$').unwrap_or(after);
            continue;
        }
        if !MACROS.contains(&name) {
            let all = MACROS.map(|name| format!("${{{name}}}")).join(", ");
            return Err(match nearest(name, MACROS.into_iter()) {
                Some(known) => format!("there is no ${{{name}}}; is it ${{{known}}}?"),
                None => format!("there is no ${{{name}}}, but {all}; a `$` is written `$$`"),
            });
        }
        done.push_str(&format!("{{{name}}}"));
        rest = behind;
    }
    Ok(done + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_a_number_or_a_map() {
        let both = Streams { stdout: true, stderr: true };
        let out = Streams { stdout: true, stderr: false };
        let err = Streams { stdout: false, stderr: true };
        let map = |ranks: &[(usize, Streams)]| {
            Ok(StreamMap { default: Streams::default(), ranks: ranks.to_vec() })
        };
        assert_eq!(streams("3"), Ok(StreamMap { default: both, ranks: Vec::new() }));
        assert_eq!(streams("0"), map(&[]));
        assert_eq!(streams("0:3,1:1"), map(&[(0, both), (1, out)]));
        assert_eq!(
            streams("1-2:2,12:1,0:0"),
            map(&[(1, err), (2, err), (12, out), (0, Streams::default())])
        );
        for bad in ["", "4", "0:4", "0:", ":1", "3-1:1", "0:1,", "0-99999:1", "a:1", "-1:1"] {
            assert!(streams(bad).is_err(), "{bad}");
        }
        assert_eq!(streams("0-2:1,2:3"), Err("local rank 2 is there twice".into()));
    }

    #[test]
    fn shown_ranks_are_numbers_and_ranges() {
        assert_eq!(ranks("0,4-6"), Ok(Ranks(vec![0, 4, 5, 6])));
        for bad in ["", "0,", "one", "2-1", "0-4096"] {
            assert!(ranks(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn two_commas_are_a_comma() {
        let filters = |text| filters(text).map(|Filters(texts)| texts);
        assert_eq!(filters("apple,orange"), Ok(vec!["apple".into(), "orange".into()]));
        assert_eq!(filters("a,,b,c"), Ok(vec!["a,b".into(), "c".into()]));
        assert_eq!(filters("a,,,b"), Ok(vec!["a,".into(), "b".into()]));
        for bad in ["", "a,", ",a"] {
            assert!(filters(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn macros_of_a_prefix_are_known() {
        for (text, expected) in [
            ("[${role_name}${local_rank}]:", "[${role_name}${local_rank}]:"),
            ("$hostname:$rank ", "${hostname}:${rank} "),
            ("${time} 5$$ $ ", "${time} 5$ $ "),
            ("", ""),
        ] {
            assert_eq!(prefix(text), Ok(expected.to_owned()), "{text}");
        }
        for (text, part) in [
            ("${ranc}", "is it ${rank}?"),
            ("$localrank", "is it ${local_rank}?"),
            ("${x}", "there is no ${x}, but ${rank}, ${local_rank}"),
            ("${}", "there is no ${}"),
            ("${rank", "`}` is missing"),
        ] {
            let error = prefix(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
