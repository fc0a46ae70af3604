//! Values as text: a version, and JSON. Strict, because others write them.

use std::fmt;

use serde::{Serialize, de::DeserializeOwned};

use super::values::{Failure, Host, Named, Phase, Plan, Report, Verdict, Why};

/// What every value begins with. A launcher that means something else by its values has another number here.
const VERSION: &str = "2 ";

/// The most bytes of any value. A plan of 4,096 hosts fits.
const BYTES_MAX: usize = 1 << 20;

/// The most ranks of a host, and the most hosts.
pub const RANKS_MAX: usize = 4096;

/// The most bytes of a name, an address, or a reason.
const NAME_BYTES_MAX: usize = 1024;

/// The most bytes of the text of a [`Failure`].
pub const TEXT_BYTES_MAX: usize = 8192;

/// A value in the store that cannot be used.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the value of {key} in the store cannot be used: {problem}; start all hosts with the same version of drumline, \
     and each job with its own --rdzv-id {}",
    drumline::Section::TheLauncher
)]
pub struct BadValue {
    /// Its key.
    pub key: String,
    /// What is wrong with it.
    pub problem: String,
}

impl fmt::Debug for BadValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A value that hosts write for each other.
pub trait Value: Serialize + DeserializeOwned {
    /// What its numbers and texts must keep to.
    ///
    /// # Errors
    ///
    /// What is too much, for people.
    fn keeps_limits(&self) -> Result<(), String>;

    /// Its bytes. Equal values have equal bytes.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = VERSION.as_bytes().to_vec();
        // Writing to memory cannot fail, and no map of ours has a key that is not text.
        if serde_json::to_writer(&mut bytes, self).is_err() {
            unreachable!("values of the membership are plain data");
        }
        bytes
    }

    /// The value of `key`.
    ///
    /// # Errors
    ///
    /// It is of another version, damaged, or beyond a limit.
    fn decode(key: &str, bytes: &[u8]) -> Result<Self, BadValue> {
        let bad = |problem: String| BadValue { key: key.to_owned(), problem };
        if bytes.len() > BYTES_MAX {
            return Err(bad(format!("it has {} bytes, more than {BYTES_MAX}", bytes.len())));
        }
        let Some(json) = bytes.strip_prefix(VERSION.as_bytes()) else {
            return Err(bad(format!("it does not begin with version {}", VERSION.trim())));
        };
        let value: Self = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        value.keeps_limits().map_err(bad)?;
        Ok(value)
    }
}

fn at_most(what: &str, number: usize, max: usize) -> Result<(), String> {
    if number <= max { Ok(()) } else { Err(format!("{what}: {number}, more than {max}")) }
}

fn short(what: &str, text: &str) -> Result<(), String> {
    at_most(&format!("bytes of {what}"), text.len(), NAME_BYTES_MAX)
}

impl Value for Host {
    fn keeps_limits(&self) -> Result<(), String> {
        if self.ranks == 0 {
            return Err("it has no ranks".into());
        }
        at_most("ranks", self.ranks, RANKS_MAX)?;
        at_most("node rank", self.node_rank.unwrap_or(0), RANKS_MAX)?;
        if self.terms.hosts.min > self.terms.hosts.max {
            return Err("it needs more hosts than it may have".into());
        }
        at_most("hosts", self.terms.hosts.max.get(), RANKS_MAX)?;
        short("the name", &self.name)?;
        short("the address", &self.address)?;
        short("the version", &self.terms.version)?;
        short("the run id", &self.terms.run_id)?;
        short("the backend", &self.terms.backend)
    }
}

impl Value for Report {
    fn keeps_limits(&self) -> Result<(), String> {
        self.failure.as_ref().map_or(Ok(()), failure_keeps_limits)
    }
}

impl Value for Plan {
    fn keeps_limits(&self) -> Result<(), String> {
        at_most("members", self.members.len(), RANKS_MAX)?;
        at_most("lost hosts", self.lost.len(), RANKS_MAX)?;
        self.lost.iter().try_for_each(named_keeps_limits)?;
        at_most("refused hosts", self.refused.len(), RANKS_MAX)?;
        for member in &self.members {
            at_most("ranks", member.ranks, RANKS_MAX)?;
            at_most("first rank", member.first_rank, RANKS_MAX * RANKS_MAX)?;
        }
        for refused in &self.refused {
            short("the name", &refused.name)?;
            short("the reason", &refused.why)?;
        }
        if let Some(origin) = &self.failure {
            short("the name", &origin.name)?;
            failure_keeps_limits(&origin.failure)?;
        }
        match &self.phase {
            Phase::Ending(Why::Lost(named) | Why::Left(named, _))
            | Phase::Over(Verdict::Stopped(named, _)) => named_keeps_limits(named),
            Phase::Over(Verdict::NoQuorum { came, .. }) => {
                at_most("hosts", came.len(), RANKS_MAX)?;
                came.iter().try_for_each(named_keeps_limits)
            }
            _ => Ok(()),
        }
    }
}

fn named_keeps_limits(named: &Named) -> Result<(), String> {
    short("the name", &named.name)?;
    short("the address", &named.address)
}

fn failure_keeps_limits(failure: &Failure) -> Result<(), String> {
    at_most("rank", failure.rank, RANKS_MAX * RANKS_MAX)?;
    at_most("local rank", failure.local_rank, RANKS_MAX)?;
    at_most("bytes of the report", failure.text.len(), TEXT_BYTES_MAX)
}
