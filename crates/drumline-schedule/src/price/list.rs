//! The price list of a cluster, from which algorithms are chosen and predictions are made, and its text form.

use std::{collections::BTreeMap, fmt};

use super::prices::Prices;
use crate::topology::Topology;

/// The figures of a cluster of equal hosts. Times are in picoseconds (`_ps`), rates in femtoseconds per byte
/// (`_fs`: 1 GB/s is 1,000,000).
///
/// In the text form each line is `name = number`, and `#` begins a comment. A missing name has its value in
/// [`PriceList::default`]. Every such text is also valid TOML.
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
    /// The work of a call in addition to its steps.
    pub call_ps: u64,
    /// In shared memory: the time from a post until a waiting neighbour continues.
    pub post_ps: u64,
    /// The work for a place that a step reads or writes, in addition to its bytes.
    pub touch_ps: u64,
    /// The time in which a core changes from one rank to another, if a host has more ranks than cores.
    pub switch_ps: u64,
    /// Sockets between ranks of one host.
    pub near: Link,
    /// TCP between hosts.
    pub far: Link,
    /// A byte on a host's line, in each direction, shared by its ranks.
    pub nic_byte_fs: u64,
    /// A byte that is copied.
    pub copy: Rate,
    /// A byte that is combined into another.
    pub combine: Rate,
    /// The extra price of a byte from a neighbour's slot, out of the neighbour's cache, if two ranks share a
    /// host and exchange their slots.
    pub slot_byte_fs: u64,
    /// The same if more than two ranks share a host: half of a slot then stays in its owner's cache.
    pub shared_slot_byte_fs: u64,
    /// The bytes of buffers, of all ranks of a core together, that stay in the core's caches.
    pub cache_bytes: u64,
    /// A byte to or from the memory of a host, shared by its ranks.
    pub memory_byte_fs: u64,
}

/// The prices of a link between two ranks.
///
/// ```
/// use drumline_schedule::price::{Link, PriceList};
///
/// let Link { round_ps: near, .. } = PriceList::default().near;
/// let Link { round_ps: far, .. } = PriceList::default().far;
/// assert!(near < far);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// The time from the send of an empty message until the receiver continues.
    pub round_ps: u64,
    /// Work for a message of any length, half of it at each end.
    pub message_ps: u64,
    /// Work for a byte, half of it at each end.
    pub byte: Rate,
}

/// The price of a byte, in the caches and in memory.
///
/// ```
/// use drumline_schedule::price::Rate;
///
/// let copy = Rate { cached_fs: 20_000, memory_fs: 100_000 }; // 50 GB/s, and 10
/// assert_eq!(copy.of(1 << 10, 1 << 20), 20_000);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    /// In the caches.
    pub cached_fs: u64,
    /// In memory.
    pub memory_fs: u64,
}

impl Rate {
    /// The mean price of a byte, in femtoseconds, of `bytes` bytes. Of these `cache_bytes` stay in the
    /// caches.
    pub fn of(self, bytes: u64, cache_bytes: u64) -> u64 {
        let cached = u128::from(bytes.min(cache_bytes));
        let beyond = u128::from(bytes) - cached;
        let sum = cached * u128::from(self.cached_fs) + beyond * u128::from(self.memory_fs);
        // A rate is less than 2^64, and so is a mean of two.
        sum.checked_div(u128::from(bytes)).map_or(self.cached_fs, |mean| mean as u64)
    }
}

/// `far` is [`Prices::TCP`]. The other figures were measured on two cores of a virtual machine (AMD EPYC,
/// 2026-11-22) that shared a cache. `shared_slot_byte_fs` is the value with which the replay predicts most of
/// these measurements well.
impl Default for PriceList {
    fn default() -> PriceList {
        PriceList {
            call_ps: 90_000,
            post_ps: 80_000,
            touch_ps: 14_000,
            switch_ps: 2_150_000,
            near: Link {
                round_ps: 1_350_000,
                message_ps: 2_900_000,
                byte: Rate { cached_fs: 156_000, memory_fs: 270_000 },
            },
            far: Link { round_ps: 7_000_000, message_ps: 2_000_000, byte: TCP_BYTE },
            nic_byte_fs: 80_000,
            copy: Rate { cached_fs: 23_000, memory_fs: 118_000 },
            combine: Rate { cached_fs: 30_000, memory_fs: 118_000 },
            slot_byte_fs: 1_000,
            shared_slot_byte_fs: 10_000,
            cache_bytes: 12_600_000,
            memory_byte_fs: 18_100,
        }
    }
}

const TCP_BYTE: Rate = Rate { cached_fs: 150_000, memory_fs: 300_000 };

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
            byte_ps: link.byte.memory_fs.max(wire_fs).div_ceil(1_000),
            combined_byte_ps: self.combine.memory_fs.div_ceil(1_000),
        }
    }

    /// Changes the price with this name; `false` if there is none.
    pub fn set(&mut self, name: &str, value: u64) -> bool {
        let field = FIELDS.iter().find(|field| field.name == name);
        field.map(|field| *(field.of)(self) = value).is_some()
    }

    /// The names of all prices.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FIELDS.iter().map(|field| field.name)
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
    Field { name: "call_ps", of: |it| &mut it.call_ps, about: "a call, beside its steps" },
    Field { name: "post_ps", of: |it| &mut it.post_ps, about: "shared memory: from a post to who waits for it" },
    Field { name: "touch_ps", of: |it| &mut it.touch_ps, about: "a place that a step reads or writes" },
    Field { name: "switch_ps", of: |it| &mut it.switch_ps, about: "a core changes from one rank to another" },
    Field { name: "near.round_ps", of: |it| &mut it.near.round_ps, about: "sockets of one host: an empty message" },
    Field { name: "near.message_ps", of: |it| &mut it.near.message_ps, about: "work for a message, both ends together" },
    Field { name: "near.byte.cached_fs", of: |it| &mut it.near.byte.cached_fs, about: "work for a byte in the caches, both ends together" },
    Field { name: "near.byte.memory_fs", of: |it| &mut it.near.byte.memory_fs, about: "the same in memory" },
    Field { name: "far.round_ps", of: |it| &mut it.far.round_ps, about: "between hosts: an empty message" },
    Field { name: "far.message_ps", of: |it| &mut it.far.message_ps, about: "work for a message, both ends together" },
    Field { name: "far.byte.cached_fs", of: |it| &mut it.far.byte.cached_fs, about: "work for a byte in the caches, both ends together" },
    Field { name: "far.byte.memory_fs", of: |it| &mut it.far.byte.memory_fs, about: "the same in memory" },
    Field { name: "nic_byte_fs", of: |it| &mut it.nic_byte_fs, about: "a byte on the line of a host, each direction" },
    Field { name: "copy.cached_fs", of: |it| &mut it.copy.cached_fs, about: "a byte copied in the caches" },
    Field { name: "copy.memory_fs", of: |it| &mut it.copy.memory_fs, about: "a byte copied in memory" },
    Field { name: "combine.cached_fs", of: |it| &mut it.combine.cached_fs, about: "a byte combined in the caches" },
    Field { name: "combine.memory_fs", of: |it| &mut it.combine.memory_fs, about: "a byte combined in memory" },
    Field { name: "slot_byte_fs", of: |it| &mut it.slot_byte_fs, about: "more for a byte fetched from a neighbour's slot" },
    Field { name: "shared_slot_byte_fs", of: |it| &mut it.shared_slot_byte_fs, about: "the same where more than two ranks share a host" },
    Field { name: "cache_bytes", of: |it| &mut it.cache_bytes, about: "what stays in the caches of a core" },
    Field { name: "memory_byte_fs", of: |it| &mut it.memory_byte_fs, about: "a byte to or from a host's memory" },
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
            if !list.set(name, value) {
                return Err(unknown(line, name));
            }
        }
        Ok(list)
    }
}

/// A line of a text in the form of [`PriceList`]'s.
///
/// ```
/// use drumline_schedule::price::{Entry, entries};
///
/// let entry: Entry<'_> = entries("# a comment\nhosts = 1_6")?[0];
/// assert_eq!(entry, Entry { line: 2, name: "hosts", value: 16 });
/// # Ok::<_, drumline_schedule::price::ParseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The number of the line, from 1.
    pub line: usize,
    /// The name before the `=`.
    pub name: &'a str,
    /// The number after the `=`.
    pub value: u64,
}

/// What is wrong with a line of such a text.
///
/// ```
/// use drumline_schedule::price::{ParseError, PriceList};
///
/// let error = "call_ps = 1\npost_ps = soon".parse::<PriceList>().unwrap_err();
/// let ParseError { line, problem } = error;
/// assert_eq!(line, 2);
/// assert!(problem.contains("a whole number"), "{problem}");
/// ```
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
///
/// ```
/// use drumline_schedule::price::entries;
///
/// let list = entries("call_ps = 1  # a picosecond\n\nhosts = 16")?;
/// let lines: Vec<_> = list.iter().map(|entry| (entry.line, entry.name)).collect();
/// assert_eq!(lines, [(1, "call_ps"), (3, "hosts")]);
/// assert!(entries("hosts = 16\nhosts = 17").is_err()); // twice
/// # Ok::<_, drumline_schedule::price::ParseError>(())
/// ```
///
/// # Errors
///
/// [`ParseError`] for the first line that is no `name = number`, or names what an earlier line has
/// named.
pub fn entries(text: &str) -> Result<Vec<Entry<'_>>, ParseError> {
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

/// The error for an unknown name.
///
/// ```
/// use drumline_schedule::price::unknown;
///
/// let error = unknown(7, "far.round").to_string();
/// assert!(error.starts_with("line 7: \"far.round\" is no price; there is call_ps"));
/// ```
pub fn unknown(line: usize, name: &str) -> ParseError {
    let names: Vec<&str> = PriceList::names().collect();
    ParseError { line, problem: format!("{name:?} is no price; there is {}", names.join(", ")) }
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
            ("# prices\ncall_ps", r#"line 2: "call_ps" should be `name = number`"#),
            ("call_ps = 1\n\ncall_ps = 2", r#"line 3: "call_ps" stands in line 1 already"#),
            ("call_ps = 1.5", "line 1: call_ps = \"1.5\" should be a whole number"),
            ("call_ps = -1", "line 1: call_ps = \"-1\""),
            ("call_ps =", "line 1: call_ps = \"\""),
            ("call_ps = 99999999999999999", "line 1"),
            ("calls = 1", r#"line 1: "calls" is no price; there is call_ps, post_ps"#),
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
            for (name, value) in PriceList::names().zip(&values) {
                prop_assert!(list.set(name, *value));
            }
            let text = list.to_string();
            prop_assert_eq!(text.parse::<PriceList>().unwrap(), list);
            let kept: Vec<u64> = entries(&text).unwrap().iter().map(|entry| entry.value).collect();
            prop_assert_eq!(kept, values);
        }

        #[test]
        fn a_byte_costs_between_cache_and_memory(bytes in 1_u64..1 << 40, cache in 0_u64..1 << 30) {
            let rate = Rate { cached_fs: 20_000, memory_fs: 100_000 };
            let price = rate.of(bytes, cache);
            prop_assert!((20_000..=100_000).contains(&price));
            prop_assert!(rate.of(2 * bytes, cache) >= price);
            prop_assert_eq!(price == 20_000, bytes <= cache || (bytes - cache) * 80_000 < bytes);
        }
    }
}
