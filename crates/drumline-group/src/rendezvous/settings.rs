//! Checks the texts of URLs and variables.

use std::net::Ipv6Addr;

use drumline_error::Section;

use crate::{Error, Result};

/// A text, and the place that it comes from.
pub(super) struct Setting {
    pub(super) name: String,
    pub(super) text: Option<String>,
}

impl Setting {
    /// A part of `url`.
    pub(super) fn of_url(url: &str, name: &str, text: Option<&str>) -> Setting {
        Setting { name: format!("{name} in {url}"), text: text.map(str::to_owned) }
    }

    pub(super) fn text(&self) -> &str {
        self.text.as_deref().unwrap_or_default()
    }

    pub(super) fn number(&self, min: usize, max: usize) -> Result<usize> {
        let text = self.text();
        // Without this check, `parse` would accept "+1".
        let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        digits
            .and_then(|digits| digits.parse().ok())
            .filter(|number| (min..=max).contains(number))
            .ok_or_else(|| {
                invalid(&self.name, format!("`{text}` is not a whole number from {min} to {max}"))
            })
    }

    pub(super) fn host(&self) -> Result<String> {
        let host = without_brackets(self.text());
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
        if host.is_empty() || !host.chars().all(is_allowed) {
            let problem = format!("`{host}` is neither a host name nor an address");
            return Err(invalid(&self.name, problem));
        }
        Ok(host.into())
    }
}

/// Checks that all of `settings` have a text. The error names those that have none.
pub(super) fn all_set(settings: &[&Setting], remedy: &str) -> Result<()> {
    let missing = settings.iter().filter(|setting| setting.text.is_none());
    let names: Vec<_> = missing.map(|setting| setting.name.as_str()).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(invalid(&names.join(", "), format!("not set; {remedy} {}", Section::StartUp)))
}

/// A rank and its world size.
pub(super) fn place_of(rank: &Setting, world_size: &Setting) -> Result<(usize, usize)> {
    let (place, size) = (rank.number(0, WORLD_SIZE_MAX)?, world_size.number(1, WORLD_SIZE_MAX)?);
    if place >= size {
        let problem = format!("rank {place} of a job of {size}: ranks run from 0 to {}", size - 1);
        return Err(invalid(&rank.name, problem));
    }
    Ok((place, size))
}

/// Far above the size of any job. So a typing error does not become a huge wait.
const WORLD_SIZE_MAX: usize = 1 << 20;

/// The values of `rank` and `world_size` in a query.
pub(super) fn parse_query(query: &str) -> Result<[Option<&str>; 2], String> {
    let names = ["rank", "world_size"];
    let mut values = [None; 2];
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let index = names.iter().position(|&known| known == name).ok_or_else(|| {
            format!("the parameter `{name}` is unknown; known are {}", names.join(", "))
        })?;
        if values[index].replace(value).is_some() {
            return Err(format!("the parameter `{name}` is given twice"));
        }
    }
    Ok(values)
}

/// `host:port` or `[IPv6 address]:port`; either part may be missing.
pub(super) fn split_place(place: &str) -> Result<(Option<&str>, Option<&str>), String> {
    let bad_address =
        || format!("an IPv6 address stands in brackets: tcp://[::1]:29500, not {place}");
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(bad_address)?;
            host.parse::<Ipv6Addr>().map_err(|_| bad_address())?;
            match rest.strip_prefix(':') {
                None if !rest.is_empty() => return Err(bad_address()),
                port => (host, port),
            }
        }
        None => match place.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err(bad_address()),
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    let given = |text: &&str| !text.is_empty();
    Ok((Some(host).filter(given), port.filter(given)))
}

pub(super) fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

pub(super) fn invalid(setting: &str, problem: String) -> Error {
    Error::setting(setting, problem)
}
