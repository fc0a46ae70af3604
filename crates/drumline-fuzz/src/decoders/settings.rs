//! Decoders of what a user sets: prices, URLs, endpoints, variables, secrets.

use std::time::{Duration, Instant};

use drumline_group::{
    algorithms::PriceList,
    decoders,
    rendezvous::{Endpoint, Plan},
};
use drumline_store::{auth::Secret, net::interface};

use super::scratch::Scratch;
use crate::Verdict;

/// A list of prices. Writing it loses comments, so the written list is read again and must be equal.
pub(super) fn prices(bytes: &[u8]) -> Verdict {
    let Ok(text) = str::from_utf8(bytes) else { return Verdict::Refused };
    let Ok(prices) = text.parse::<PriceList>() else { return Verdict::Refused };
    assert_eq!(prices.to_string().parse(), Ok(prices));
    Verdict::Taken
}

/// A URL in the first line and variables in the other lines. The plan is written as a `tcp://` URL, which
/// must give the same plan.
pub(super) fn url(bytes: &[u8]) -> Verdict {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines();
    let url = lines.next().unwrap_or_default();
    if url.starts_with("file://") {
        let read = decoders::file_url(url);
        if let Ok((path, rank, world_size)) = &read {
            assert!(rank < world_size && path.starts_with('/'));
            let again = format!("file://{path}?rank={rank}&world_size={world_size}");
            assert_eq!(decoders::file_url(&again).as_ref().ok(), read.as_ref().ok());
        }
        return read.into();
    }
    let read = Plan::parse(url, &|name| value(&text, name));
    match &read {
        Err(error) => drop(error.to_string()),
        Ok(plan) => {
            assert!(plan.rank < plan.world_size);
            if let Endpoint::Tcp { host, port } = &plan.store {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                let Plan { rank, world_size, .. } = plan;
                let again = format!("tcp://{host}:{port}?rank={rank}&world_size={world_size}");
                if let Ok(again) = Plan::parse(&again, &|name| value(&text, name)) {
                    assert_eq!((&again.store, again.rank), (&plan.store, plan.rank));
                }
            }
        }
    }
    read.into()
}

/// An endpoint. Its text must give the same endpoint.
pub(super) fn endpoint(bytes: &[u8]) -> Verdict {
    let Ok(text) = str::from_utf8(bytes) else { return Verdict::Refused };
    let Ok(endpoint) = text.parse::<Endpoint>() else { return Verdict::Refused };
    assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
    Verdict::Taken
}

/// Lines `NAME=VALUE`, for every variable except the secret. Settings cannot be written as text, so this
/// checks that they can be used.
pub(super) fn variables(bytes: &[u8]) -> Verdict {
    let text = String::from_utf8_lossy(bytes);
    let read = decoders::settings(|name| value(&text, name));
    match &read {
        Err(error) => drop(error.to_string()),
        Ok(config) => {
            let now = Instant::now();
            for limit in [config.timeout, config.warn_after] {
                assert!(limit > Duration::ZERO);
                let _ = now.checked_add(limit);
            }
            assert!((1..=16).contains(&config.streams));
            if let Some(names) = &config.socket_ifname {
                let _ = interface::addresses_of(names, None);
            }
        }
    }
    read.into()
}

fn value(lines: &str, name: &str) -> Option<String> {
    let given = |line: &str| line.strip_prefix(name)?.strip_prefix('=').map(str::to_owned);
    lines.lines().find_map(given)
}

/// A secret. The first byte says whether the rest is the value of a variable or the content of a file. The
/// secret must be the input without a line break at its end.
pub(super) fn secret(bytes: &[u8]) -> Verdict {
    let Some((&form, bytes)) = bytes.split_first() else { return Verdict::Refused };
    let secret = match form & 1 {
        0 => Secret::new(bytes),
        _ => {
            let Ok(scratch) = Scratch::new() else { return Verdict::Refused };
            let Ok(path) = scratch.file(bytes) else { return Verdict::Refused };
            Secret::from_file(path)
        }
    };
    if let Ok(secret) = &secret {
        let behind = bytes.strip_prefix(secret.expose());
        assert!(matches!(behind, Some(b"" | b"\n" | b"\r\n")), "{} bytes", bytes.len());
    }
    secret.into()
}
