//! Where hosts meet: the values of `--rdzv-backend`, `--rdzv-endpoint` and `--rdzv-conf`.

use std::{
    net::{IpAddr, Ipv6Addr},
    path::PathBuf,
    time::Duration,
};

use drumline_launch::Etcd;

use super::{nearest::nearest, time::time};

/// How hosts meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Backend {
    /// At the first host; every host knows its number
    Static,
    /// At the first host; the hosts agree on their numbers
    #[value(alias = "c10d")]
    Drumline,
    /// In a file that all hosts see
    File,
    /// In etcd, by its API v3
    Etcd,
    #[value(name = "etcd-v2", hide = true)]
    EtcdV2,
}

/// `host`, `host:port`, `[::1]:port`, `::1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: Option<u16>,
}

impl Address {
    /// Whether only this host can be meant.
    pub(super) fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.host.parse().is_ok_and(|it: IpAddr| it.is_loopback())
    }
}

pub(super) fn address(text: &str) -> Result<Address, String> {
    let wrong =
        || format!("`{text}` is not HOST:PORT; an address of IPv6 is written [ADDRESS]:PORT");
    let text = text.trim();
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, behind) = rest.split_once(']').ok_or_else(wrong)?;
            host.parse::<Ipv6Addr>().map_err(|_| wrong())?;
            (host, (!behind.is_empty()).then(|| behind.strip_prefix(':').unwrap_or("")))
        }
        None if text.parse::<Ipv6Addr>().is_ok() => (text, None),
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "-._:%".contains(letter);
    if host.is_empty() || !host.chars().all(is_name) {
        return Err(wrong());
    }
    let port = port.map(|port| port.parse().map_err(|_| wrong())).transpose()?;
    Ok(Address { host: host.into(), port })
}

/// What `--rdzv-conf` says. `None`: nothing about that.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Conf {
    pub(super) join_timeout: Option<Duration>,
    pub(super) last_call: Option<Duration>,
    pub(super) is_first: Option<bool>,
    /// Whether the hosts meet in a file, and not over TCP.
    pub(super) is_file: bool,
    scheme: Option<&'static str>,
    prefix: Option<String>,
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    /// The keys that are there.
    given: Vec<&'static str>,
}

/// A key of `--rdzv-conf`.
struct Key {
    name: &'static str,
    /// With these it means something.
    heeded_by: &'static [Backend],
    set: fn(&mut Conf, &str) -> Result<(), String>,
}

const fn key(
    name: &'static str,
    heeded_by: &'static [Backend],
    set: fn(&mut Conf, &str) -> Result<(), String>,
) -> Key {
    Key { name, heeded_by, set }
}

const STATIC_TOO: &[Backend] = &[Backend::Static, Backend::Drumline, Backend::File, Backend::Etcd];
const ELASTIC: &[Backend] = &[Backend::Drumline, Backend::File, Backend::Etcd];
const DRUMLINE: &[Backend] = &[Backend::Drumline];
const ETCD: &[Backend] = &[Backend::Etcd];

/// All keys that some backend of torch knows.
const KEYS: [Key; 19] = [
    key("join_timeout", STATIC_TOO, |conf, text| keep(&mut conf.join_timeout, time(text))),
    key("timeout", STATIC_TOO, |conf, text| keep(&mut conf.join_timeout, time(text))),
    key("last_call_timeout", ELASTIC, |conf, text| keep(&mut conf.last_call, time(text))),
    key("is_host", DRUMLINE, |conf, text| keep(&mut conf.is_first, yes_or_no(text))),
    key("store_type", ELASTIC, |conf, text| {
        conf.is_file = one_of(text, &[("tcp", false), ("file", true)])?;
        Ok(())
    }),
    key("protocol", ETCD, |conf, text| {
        keep(&mut conf.scheme, one_of(text, &[("http", "http"), ("https", "https")]))
    }),
    key("etcd_prefix", ETCD, |conf, text| keep(&mut conf.prefix, Ok(text.into()))),
    key("cacert", ETCD, |conf, text| keep(&mut conf.ca, Ok(text.into()))),
    key("ca_cert", ETCD, |conf, text| keep(&mut conf.ca, Ok(text.into()))),
    key("cert", ETCD, |conf, text| keep(&mut conf.certificate, Ok(text.into()))),
    key("ssl_cert", ETCD, |conf, text| keep(&mut conf.certificate, Ok(text.into()))),
    key("key", ETCD, |conf, text| keep(&mut conf.key, Ok(text.into()))),
    key("ssl_cert_key", ETCD, |conf, text| keep(&mut conf.key, Ok(text.into()))),
    key("close_timeout", &[], nothing),
    key("heartbeat_timeout", &[], nothing),
    key("keep_alive_interval", &[], nothing),
    key("keep_alive_max_attempt", &[], nothing),
    key("read_timeout", &[], nothing),
    key("cas_backoff_max_seconds", &[], nothing),
];

fn nothing(_: &mut Conf, _: &str) -> Result<(), String> {
    Ok(())
}

fn keep<T>(place: &mut Option<T>, value: Result<T, String>) -> Result<(), String> {
    *place = Some(value?);
    Ok(())
}

fn one_of<T: Copy>(text: &str, values: &[(&str, T)]) -> Result<T, String> {
    let value = values.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    value.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = values.iter().map(|(name, _)| *name).collect();
        format!("give {}", names.join(" or "))
    })
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" => Ok(true),
        "0" | "false" | "f" | "no" | "n" => Ok(false),
        _ => Err("give 1 or 0".into()),
    }
}

/// `key=value,key=value`.
pub(super) fn conf(text: &str) -> Result<Conf, String> {
    let mut conf = Conf::default();
    if text.trim().is_empty() {
        return Ok(conf);
    }
    for entry in text.split(',') {
        let (name, value) = entry.split_once('=').unwrap_or((entry, ""));
        let (name, value) = (name.trim(), value.trim());
        let names = || KEYS.iter().map(|key| key.name);
        let Some(key) = KEYS.iter().find(|key| key.name == name) else {
            return Err(match nearest(name, names()) {
                Some(known) => format!("there is no key `{name}`; is it `{known}`?"),
                None => {
                    format!("there is no key `{name}`, but {}", Vec::from_iter(names()).join(", "))
                }
            });
        };
        if value.is_empty() {
            return Err(format!("`{name}` has no value: write {name}=VALUE"));
        }
        (key.set)(&mut conf, value).map_err(|why| format!("{name}={value}: {why}"))?;
        conf.given.push(key.name);
    }
    Ok(conf)
}

impl Conf {
    /// The keys that mean nothing with this backend, or, without one, to a host that is alone.
    pub(super) fn ignored(&self, backend: Option<Backend>) -> impl Iterator<Item = &'static str> {
        let heeded = move |key: &Key| backend.is_some_and(|it| key.heeded_by.contains(&it));
        let given = KEYS.into_iter().filter(|key| self.given.contains(&key.name));
        given.filter(move |key| !heeded(key)).map(|key| key.name)
    }

    /// etcd at these addresses: `host`, `host:port` or URLs, with commas between them.
    pub(super) fn etcd(&self, endpoint: &str) -> Result<Etcd, String> {
        let scheme = self.scheme.unwrap_or("http");
        let servers = endpoint.split(',').map(|server| {
            let (own, rest) = match server.trim().split_once("://") {
                Some((own @ ("http" | "https"), rest)) => (own, rest.trim_end_matches('/')),
                Some(_) => return Err(format!("`{server}`: etcd is at http:// or https://")),
                None => (scheme, server),
            };
            if self.scheme.is_some_and(|scheme| scheme != own) {
                return Err(format!("`{server}` contradicts protocol={scheme} of --rdzv-conf"));
            }
            let Address { host, port } = address(rest)?;
            let host = if host.contains(':') { format!("[{host}]") } else { host };
            Ok(format!("{own}://{host}:{}", port.unwrap_or(ETCD_PORT)))
        });
        let certificate = match (self.certificate.clone(), self.key.clone()) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(_), None) => return Err("cert of --rdzv-conf needs its key: key=FILE".into()),
            (None, Some(_)) => return Err("key of --rdzv-conf needs its cert: cert=FILE".into()),
        };
        let servers = servers.collect::<Result<_, _>>()?;
        Ok(Etcd { servers, prefix: self.prefix.clone(), ca: self.ca.clone(), certificate })
    }
}

const ETCD_PORT: u16 = 2379;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_a_host_and_perhaps_a_port() {
        for (text, host, port) in [
            ("host0:29400", "host0", Some(29400)),
            (" host0 ", "host0", None),
            ("10.0.0.1:0", "10.0.0.1", Some(0)),
            ("[::1]:29400", "::1", Some(29400)),
            ("[fe80::1]", "fe80::1", None),
            ("fe80::1", "fe80::1", None),
        ] {
            assert_eq!(address(text), Ok(Address { host: host.into(), port }), "{text}");
        }
        for bad in
            ["", ":29400", "host:", "host:70000", "a:b:c", "[::1", "[host]:1", "[::1]1", "a/b"]
        {
            assert!(address(bad).unwrap_err().contains("[ADDRESS]:PORT"), "{bad}");
        }
        let is_loopback = |text| address(text).unwrap().is_loopback();
        assert!(is_loopback("localhost:0") && is_loopback("127.0.0.7") && is_loopback("[::1]:1"));
        assert!(!is_loopback("host0") && !is_loopback("10.0.0.1"));
    }

    #[test]
    fn keys_of_the_configuration_are_known_and_have_values() {
        let parsed = conf("join_timeout=60, last_call_timeout=5s,is_host=true").unwrap();
        assert_eq!(parsed.join_timeout, Some(Duration::from_secs(60)));
        assert_eq!(parsed.last_call, Some(Duration::from_secs(5)));
        assert_eq!((parsed.is_first, parsed.is_file), (Some(true), false));
        assert_eq!(conf("timeout=7").unwrap().join_timeout, Some(Duration::from_secs(7)));
        assert!(conf("store_type=file").unwrap().is_file);
        assert_eq!(conf(""), Ok(Conf::default()));
        for (text, part) in [
            ("join_timout=60", "no key `join_timout`; is it `join_timeout`?"),
            ("x=1", "no key `x`, but join_timeout, timeout"),
            ("join_timeout", "write join_timeout=VALUE"),
            ("join_timeout=", "write join_timeout=VALUE"),
            ("join_timeout=soon", "join_timeout=soon: give a time"),
            ("is_host=perhaps", "give 1 or 0"),
            ("store_type=redis", "give tcp or file"),
            ("protocol=grpc", "give http or https"),
            ("a=1,,b=2", "no key"),
        ] {
            let error = conf(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn keys_without_a_meaning_are_told() {
        let parsed = conf("join_timeout=1,is_host=0,read_timeout=2,protocol=http").unwrap();
        let ignored = |backend| parsed.ignored(backend).collect::<Vec<_>>();
        assert_eq!(ignored(Some(Backend::Drumline)), ["protocol", "read_timeout"]);
        assert_eq!(ignored(Some(Backend::Etcd)), ["is_host", "read_timeout"]);
        assert_eq!(ignored(None), ["join_timeout", "is_host", "protocol", "read_timeout"]);
    }

    #[test]
    fn etcd_has_urls() {
        let servers =
            |text: &str, endpoint: &str| conf(text)?.etcd(endpoint).map(|etcd| etcd.servers);
        let is = |urls: &[&str]| Ok(urls.iter().map(|url| (*url).to_owned()).collect::<Vec<_>>());
        assert_eq!(servers("", "host0"), is(&["http://host0:2379"]));
        assert_eq!(
            servers("protocol=https", "a:1,[::1]:2"),
            is(&["https://a:1", "https://[::1]:2"])
        );
        assert_eq!(servers("", "https://a:1/"), is(&["https://a:1"]));
        let error = |text, endpoint| servers(text, endpoint).unwrap_err();
        assert!(error("protocol=http", "https://a").contains("contradicts protocol=http"));
        assert!(error("", "ftp://a").contains("http:// or https://"));
        assert!(error("cert=c.pem", "a").contains("key=FILE"));
        let tls = conf("cacert=a,cert=b,key=c,etcd_prefix=/x").unwrap().etcd("h").unwrap();
        assert_eq!(tls.certificate, Some(("b".into(), "c".into())));
        assert_eq!((tls.ca, tls.prefix), (Some("a".into()), Some("/x".into())));
    }
}
