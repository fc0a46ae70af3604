//! The price list of a cluster, from which algorithms are chosen, and its text form.

use std::{collections::BTreeMap, fmt};

use super::prices::Prices;
use crate::topology::Topology;

/// The figures of a cluster of equal hosts. Times are in picoseconds (`_ps`), rates in femtoseconds per byte
/// (`_fs`: 1 GB/s is 1,000,000).
///
/// In the text form each line is `name = number`, and `#` begins a comment. A missing name has its value in
/// [`PriceList::default`]. Every such text is also TOML.
///
/// ```
/// use drumline_schedule::price::PriceList;
///
/// let list: PriceList = "far.round_ps = 20_000_000  # 20 us\nnic_byte_fs = 320_000".parse()?;
/// assert_eq!((list.far.round_ps, list.nic_byte_fs), (20_000_000, 320_000));
/// assert_eq!(list.near, PriceList::default().near);
/// assert_eq!(list.to_string().parse(), Ok(list));
///
/// let error = "\nfar.round = 7".parse::<PriceList>().unwrap_err();
/// assert!(error.to_string().starts_with(r#"line 2: "far.round" is no price; "#));
/// # Ok::<_, drumline_schedule::price::ParseError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PriceList {
    /// Sockets between ranks of one host.
    pub near: Link,
    /// TCP between hosts.
    pub far: Link,
    /// A byte on a host's line, in each direction, shared by its ranks.
    pub nic_byte_fs: u64,
    /// A byte that is combined into another, in memory.
    pub combined_byte_fs: u64,
}

/// The prices of a link between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// The time from the send of an empty message until the receiver continues.
    pub round_ps: u64,
    /// Work for a message of any length, half of it at each end.
    pub message_ps: u64,
    /// Work for a byte, half of it at each end.
    pub byte_fs: u64,
}

/// `far` is [`Prices::TCP`]. The other figures were measured on two cores of a virtual machine (AMD EPYC,
/// 2026-11-22) that shared a cache.
impl Default for PriceList {
    fn default() -> PriceList {
        PriceList {
            near: Link { round_ps: 1_350_000, message_ps: 2_900_000, byte_fs: 270_000 },
            far: Link { round_ps: 7_000_000, message_ps: 2_000_000, byte_fs: 300_000 },
            nic_byte_fs: 80_000,
            combined_byte_fs: 118_000,
        }
    }
}

impl PriceList {
    /// The prices for the choice of algorithms over links: those of the sockets of one host, or of the lines
    /// between hosts, which the ranks of a host share.
    pub fn links(&self, topology: &Topology) -> Prices {
        let (link, wire_fs) = match topology.is_one_host() {
            true => (self.near, 0),
            false => {
                let largest = topology.ranks_by_host().iter().map(Vec::len).max();
                (self.far, self.nic_byte_fs.saturating_mul(largest.unwrap_or(1) as u64))
            }
        };
        Prices {
            round_ps: link.round_ps,
            message_ps: link.message_ps,
            byte_ps: link.byte_fs.max(wire_fs).div_ceil(1_000),
            combined_byte_ps: self.combined_byte_fs.div_ceil(1_000),
        }
    }
}

/// A line of the text form.
struct Field {
    name: &'static str,
    of: fn(&mut PriceList) -> &mut u64,
    /// Its comment in the text form.
    about: &'static str,
}

#[rustfmt::skip]
const FIELDS: &[Field] = &[
    Field { name: "near.round_ps", of: |it| &mut it.near.round_ps, about: "sockets of one host: an empty message" },
    Field { name: "near.message_ps", of: |it| &mut it.near.message_ps, about: "work for a message, both ends together" },
    Field { name: "near.byte_fs", of: |it| &mut it.near.byte_fs, about: "work for a byte, both ends together" },
    Field { name: "far.round_ps", of: |it| &mut it.far.round_ps, about: "between hosts: an empty message" },
    Field { name: "far.message_ps", of: |it| &mut it.far.message_ps, about: "work for a message, both ends together" },
    Field { name: "far.byte_fs", of: |it| &mut it.far.byte_fs, about: "work for a byte, both ends together" },
    Field { name: "nic_byte_fs", of: |it| &mut it.nic_byte_fs, about: "a byte on the line of a host, each direction" },
    Field { name: "combined_byte_fs", of: |it| &mut it.combined_byte_fs, about: "a byte combined into another" },
];

impl fmt::Display for PriceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut list = self.clone();
        for Field { name, of, about } in FIELDS {
            writeln!(f, "{name} = {}  # {about}", of(&mut list))?;
        }
        Ok(())
    }
}

impl std::str::FromStr for PriceList {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<PriceList, ParseError> {
        let mut list = PriceList::default();
        for Entry { line, name, value } in entries(text)? {
            let Some(field) = FIELDS.iter().find(|field| field.name == name) else {
                let names: Vec<&str> = FIELDS.iter().map(|field| field.name).collect();
                let problem = format!("{name:?} is no price; there is {}", names.join(", "));
                return Err(ParseError { line, problem });
            };
            *(field.of)(&mut list) = value;
        }
        Ok(list)
    }
}

/// A line of the text form: its number, from 1, and what it says.
struct Entry<'a> {
    line: usize,
    name: &'a str,
    value: u64,
}

/// What is wrong with a line of such a text.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct ParseError {
    /// The number of the line, from 1.
    pub line: usize,
    /// What is wrong, and what to write instead.
    pub problem: String,
}

impl fmt::Debug for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The largest price: an hour in picoseconds.
const VALUE_MAX: u64 = 3_600_000_000_000_000;

/// The lines of such a text, with any names.
fn entries(text: &str) -> Result<Vec<Entry<'_>>, ParseError> {
    let mut entries: Vec<Entry<'_>> = vec![];
    let mut lines = BTreeMap::new();
    for (line, content) in (1..).zip(text.lines()) {
        let content = content.split('#').next().unwrap_or_default().trim();
        if content.is_empty() {
            continue;
        }
        let error = |problem| ParseError { line, problem };
        let parts = content.split_once('=').map(|(name, value)| (name.trim(), value.trim()));
        let (name, value) =
            parts.ok_or_else(|| error(format!("{content:?} should be `name = number`")))?;
        if let Some(earlier) = lines.insert(name, line) {
            return Err(error(format!("{name:?} stands in line {earlier} already")));
        }
        let number = value.replace('_', "").parse().ok().filter(|value| *value <= VALUE_MAX);
        let value = number.ok_or_else(|| {
            error(format!("{name} = {value:?} should be a whole number, at most {VALUE_MAX}"))
        })?;
        entries.push(Entry { line, name, value });
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn links_between_hosts_are_shared_by_their_ranks() {
        let list = PriceList { nic_byte_fs: 320_000, ..PriceList::default() };
        let tcp = Prices { combined_byte_ps: 118, ..Prices::TCP };
        assert_eq!(PriceList::default().links(&Topology::flat(4)), tcp);
        let byte_ps = |hosts: &[usize]| list.links(&Topology::hosts(hosts)).byte_ps;
        assert_eq!([byte_ps(&[1, 1]), byte_ps(&[4, 8]), byte_ps(&[8])], [320, 8 * 320, 270]);
    }

    #[test]
    fn a_wrong_line_is_named_with_what_is_wrong() {
        for (text, problem) in [
            ("# prices\nnic_byte_fs", r#"line 2: "nic_byte_fs" should be `name = number`"#),
            (
                "nic_byte_fs = 1\n\nnic_byte_fs = 2",
                r#"line 3: "nic_byte_fs" stands in line 1 already"#,
            ),
            ("nic_byte_fs = 1.5", "line 1: nic_byte_fs = \"1.5\" should be a whole number"),
            ("nic_byte_fs = -1", "line 1: nic_byte_fs = \"-1\""),
            ("nic_byte_fs =", "line 1: nic_byte_fs = \"\""),
            ("nic_byte_fs = 99999999999999999", "line 1"),
            (
                "calls = 1",
                r#"line 1: "calls" is no price; there is near.round_ps, near.message_ps"#,
            ),
        ] {
            let error = text.parse::<PriceList>().unwrap_err().to_string();
            assert!(error.starts_with(problem), "{error}");
        }
    }

    /// The text may come from another rank.
    #[test]
    fn many_lines_take_no_longer_than_it_takes_to_read_them() {
        let text: String = (0..300_000).map(|line| format!("n{line} = 1\n")).collect();
        assert_eq!(entries(&text).unwrap().len(), 300_000);
    }

    proptest! {
        #[test]
        fn text_keeps_every_figure(values in prop::collection::vec(0..VALUE_MAX, FIELDS.len())) {
            let mut list = PriceList::default();
            for (field, value) in FIELDS.iter().zip(&values) {
                *(field.of)(&mut list) = *value;
            }
            let text = list.to_string();
            prop_assert_eq!(text.parse::<PriceList>().unwrap(), list);
            let kept: Vec<u64> = entries(&text).unwrap().iter().map(|entry| entry.value).collect();
            prop_assert_eq!(kept, values);
        }
    }
}
