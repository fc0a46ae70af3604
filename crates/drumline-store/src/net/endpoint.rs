use std::{fmt, str::FromStr};

/// The address of a store: `tcp://host:port`, or `unix:@name` for an abstract Unix socket. Such a socket can
/// only be seen by processes of one machine and one network namespace, and leaves no file.
///
/// ```
/// # mod drumline { pub use drumline_store::net as rendezvous; }
/// use drumline::rendezvous::Endpoint;
///
/// let store: Endpoint = "tcp://[fd00::1]:29500".parse()?;
/// assert_eq!(store, Endpoint::Tcp { host: "fd00::1".to_owned(), port: 29500 });
/// assert_eq!(store.to_string(), "tcp://[fd00::1]:29500");
/// assert!("http://host:80".parse::<Endpoint>().is_err());
/// # Ok::<_, String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A port of a host. The host is a name, or an address without brackets.
    Tcp {
        /// The host.
        host: String,
        /// Its port.
        port: u16,
    },
    /// The name of an abstract Unix socket, without the `@`.
    Unix(String),
}

/// The kernel's limit, without the zero byte at the front.
const NAME_BYTES_MAX: usize = 107;

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Endpoint, String> {
        let problem = || format!("{text:?} should be tcp://host:port or unix:@name");
        if let Some(name) = text.strip_prefix("unix:@") {
            let fits = (1..=NAME_BYTES_MAX).contains(&name.len());
            return if fits { Ok(Endpoint::Unix(name.to_owned())) } else { Err(problem()) };
        }
        let place = text.strip_prefix("tcp://").ok_or_else(problem)?;
        let (host, port) = place.rsplit_once(':').ok_or_else(problem)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_plain = bare.is_some() || !host.contains(':');
        let host = bare.unwrap_or(host);
        let is_plain = is_plain && !host.is_empty() && !host.contains(['[', ']']);
        let port = port.parse().ok().filter(|_| is_plain);
        Ok(Endpoint::Tcp { host: host.to_owned(), port: port.ok_or_else(problem)? })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp { host, port } if host.contains(':') => {
                write!(f, "tcp://[{host}]:{port}")
            }
            Endpoint::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Endpoint::Unix(name) => write!(f, "unix:@{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_survive_as_text() {
        for text in ["tcp://node-0.example:29500", "tcp://[::1]:1", "unix:@drumline-1", "unix:@@"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_endpoint_is_shown() {
        let long = format!("unix:@{}", "x".repeat(108));
        for text in [
            "",
            "tcp://",
            "tcp://[[h]]:1",
            "tcp://h",
            "tcp://:1",
            "tcp://h:65536",
            "tcp://::1:1",
            "unix:@",
            &long,
        ] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert!(error.contains(&format!("{text:?}")) && error.contains("unix:@name"));
        }
    }
}
