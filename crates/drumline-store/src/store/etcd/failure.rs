//! What a failed attempt means: whether another attempt may succeed, here or at another server.

use std::{fmt, io::ErrorKind};

use rustls::{AlertDescription, CertificateError, Error as TlsError};

use super::api::Refusal;
use crate::text::escaped;

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Another attempt may succeed.
    Passing(String),
    /// This server will fail again. Another one may answer.
    Server(String),
    /// All servers will fail alike.
    Cluster(String),
    /// The server wants to know who asks, or has forgotten it.
    Login(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Failure::Passing(why)
        | Failure::Server(why)
        | Failure::Cluster(why)
        | Failure::Login(why)) = self;
        f.write_str(why)
    }
}

/// The codes of gRPC.
mod code {
    pub(super) const INVALID_ARGUMENT: i64 = 3;
    pub(super) const PERMISSION_DENIED: i64 = 7;
    pub(super) const RESOURCE_EXHAUSTED: i64 = 8;
    pub(super) const FAILED_PRECONDITION: i64 = 9;
    pub(super) const OUT_OF_RANGE: i64 = 11;
    pub(super) const UNIMPLEMENTED: i64 = 12;
    pub(super) const UNAUTHENTICATED: i64 = 16;
}

/// What `login` is answered by a server that knows no users.
const NO_USERS: &str = "authentication is not enabled";

/// What an answer with this status and text, other than success, means.
pub(super) fn of_answer(status: u16, text: &str) -> Failure {
    let Ok(refusal) = serde_json::from_str::<Refusal>(text) else {
        return of_page(status, text);
    };
    let code = refusal.code;
    let said = escaped(&refusal.text());
    let said = said.strip_prefix("etcdserver: ").unwrap_or(&said);
    match code {
        code::UNAUTHENTICATED => Failure::Login(said.into()),
        code::INVALID_ARGUMENT if said.contains("user name is empty") => {
            Failure::Login(said.into())
        }
        code::INVALID_ARGUMENT if said.contains("auth store is old") => Failure::Login(said.into()),
        code::INVALID_ARGUMENT if said.contains("authentication failed") => {
            Failure::Cluster(format!(
                "it does not accept the user and the password ({said}); correct DRUMLINE_ETCD_USER and \
             DRUMLINE_ETCD_PASSWORD"
            ))
        }
        code::INVALID_ARGUMENT if said.contains("too large") => {
            Failure::Cluster(format!("{said}; start etcd with --max-request-bytes=1572864 or more"))
        }
        code::FAILED_PRECONDITION if said.contains(NO_USERS) => Failure::Cluster(NO_USERS.into()),
        code::RESOURCE_EXHAUSTED if said.contains("space") => Failure::Cluster(format!(
            "{said}; make room in etcd: etcdctl compact REVISION, etcdctl defrag, etcdctl alarm disarm"
        )),
        code::INVALID_ARGUMENT | code::FAILED_PRECONDITION | code::OUT_OF_RANGE => {
            Failure::Cluster(format!("it refuses: {said}"))
        }
        code::PERMISSION_DENIED => Failure::Cluster(said.into()),
        code::UNIMPLEMENTED => {
            Failure::Server(format!("it lacks the API v3 ({said}); etcd 3.4 or newer is needed"))
        }
        _ => Failure::Passing(format!("it says: {said}")),
    }
}

/// Whether `failure` is that of a login where nobody has to log in.
pub(super) fn knows_no_users(failure: &Failure) -> bool {
    matches!(failure, Failure::Cluster(text) if text == NO_USERS)
}

/// An answer that is not of etcd's API.
fn of_page(status: u16, text: &str) -> Failure {
    let excerpt = excerpt(text);
    if excerpt.contains("HTTP request to an HTTPS server") {
        return Failure::Server("it speaks TLS; write https:// in place of http://".into());
    }
    if excerpt.starts_with("CommonName of client") {
        return Failure::Cluster(
            "it does not take a certificate with a common name (CN) from somebody who logs in; give one without (cert, \
             key)"
                .into(),
        );
    }
    match status {
        421 => Failure::Server(format!(
            "it does not serve this name ({excerpt}); add the name to its --host-whitelist, or give an address"
        )),
        // Proxies say so as long as the server behind them is away.
        502..=504 | 429 => Failure::Passing(format!("it answers HTTP {status}: {excerpt}")),
        _ => not_etcd(&format!("it answers HTTP {status}: {excerpt}")),
    }
}

/// The server does what etcd would not do.
pub(super) fn not_etcd(what: &str) -> Failure {
    Failure::Server(format!(
        "{what}; that is not etcd's API v3; give the client URL of an etcd 3.4 or newer \
         (--listen-client-urls)"
    ))
}

/// The first line of what somebody has sent.
fn excerpt(text: &str) -> String {
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("nothing");
    escaped(&line.chars().take(80).collect::<String>())
}

/// What an exchange that did not come to an answer means. `is_secured`: it goes over TLS.
pub(super) fn of_exchange(error: &ureq::Error, is_secured: bool) -> Failure {
    if let Some(tls) = of_tls(error) {
        return of_tls_error(tls);
    }
    match error {
        ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
            Failure::Passing("it cannot be reached: no answer to a connection".into())
        }
        ureq::Error::Timeout(_) => Failure::Passing("it does not answer; is it stopped?".into()),
        ureq::Error::HostNotFound => Failure::Passing("its name is not known".into()),
        ureq::Error::Io(io) => match io.kind() {
            ErrorKind::ConnectionRefused => {
                Failure::Passing("nobody listens there (connection refused); is it running?".into())
            }
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                let hint = match is_secured {
                    true => {
                        "does it ask for a certificate (cert, key), not speak TLS (http://), or is it no etcd?"
                    }
                    false => "does it speak TLS (https://), or is it no etcd?",
                };
                Failure::Passing(format!(
                    "it closes the connection without an answer ({io}); {hint}"
                ))
            }
            _ => Failure::Passing(io.to_string()),
        },
        ureq::Error::Protocol(_) | ureq::Error::LargeResponseHeader(..) => {
            not_etcd(&format!("it does not speak HTTP ({error})"))
        }
        ureq::Error::BodyExceedsLimit(limit) => Failure::Cluster(format!(
            "an answer of more than {limit} bytes; ask for fewer keys at once"
        )),
        ureq::Error::Tls(text) => Failure::Server((*text).into()),
        _ => Failure::Passing(error.to_string()),
    }
}

/// The error of TLS in it.
fn of_tls(error: &ureq::Error) -> Option<&TlsError> {
    match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(io) => {
            let inner = io.get_ref()?;
            inner.downcast_ref().or_else(|| inner.source()?.downcast_ref())
        }
        _ => None,
    }
}

fn of_tls_error(error: &TlsError) -> Failure {
    use AlertDescription as Alert;
    let hint = match error {
        TlsError::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "nobody whom this process trusts has signed its certificate; give the file with the certificate that \
             signed it (ca, cacert)"
        }
        TlsError::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "its certificate is for another name; use a name or address that the certificate has",
        TlsError::InvalidCertificate(_) => "its certificate is refused",
        TlsError::InvalidMessage(_) => "it does not speak TLS; write http:// in place of https://?",
        TlsError::AlertReceived(Alert::CertificateRequired) => {
            "it asks for a certificate of this process; give one with its key (cert, key)"
        }
        TlsError::AlertReceived(
            Alert::BadCertificate
            | Alert::UnknownCA
            | Alert::CertificateUnknown
            | Alert::CertificateExpired
            | Alert::CertificateRevoked
            | Alert::UnsupportedCertificate
            | Alert::AccessDenied,
        ) => {
            "it does not accept the certificate of this process; give one that its --trusted-ca-file has signed \
             (cert, key)"
        }
        _ => "TLS fails",
    };
    Failure::Server(format!("{hint} ({error})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(code: i64, text: &str) -> Failure {
        of_answer(400, &format!(r#"{{"error":"{text}","code":{code},"message":"{text}"}}"#))
    }

    #[test]
    fn every_refusal_has_a_meaning() {
        use Failure::*;
        for (code, text, meant) in [
            (14, "etcdserver: no leader", Passing(String::new())),
            (14, "etcdserver: request timed out", Passing(String::new())),
            (2, "context canceled", Passing(String::new())),
            (8, "etcdserver: too many requests", Passing(String::new())),
            (8, "etcdserver: mvcc: database space exceeded", Cluster("alarm disarm".into())),
            (16, "etcdserver: invalid auth token", Login(String::new())),
            (3, "etcdserver: user name is empty", Login(String::new())),
            (3, "etcdserver: revision of auth store is old", Login(String::new())),
            (
                3,
                "etcdserver: authentication failed, invalid user ID or password",
                Cluster("DRUMLINE_ETCD_PASSWORD".into()),
            ),
            (3, "etcdserver: request is too large", Cluster("--max-request-bytes".into())),
            (7, "etcdserver: permission denied", Cluster("permission denied".into())),
            (12, "Method Not Allowed", Server("3.4 or newer".into())),
        ] {
            match (answer(code, text), meant) {
                (Passing(told), Passing(hint))
                | (Login(told), Login(hint))
                | (Cluster(told), Cluster(hint))
                | (Server(told), Server(hint)) => assert!(told.contains(&hint), "{told}"),
                (other, _) => panic!("{code} {text}: {other:?}"),
            }
        }
        assert!(knows_no_users(&answer(9, "etcdserver: authentication is not enabled")));
        // The gateway of 3.6.
        let text = r#"{"code":16,"message":"etcdserver: invalid auth token","details":[]}"#;
        assert_eq!(of_answer(401, text), Login("invalid auth token".into()));
    }

    #[test]
    fn a_page_of_another_server_is_shown_in_one_line() {
        let Failure::Server(text) = of_answer(501, "\n<html>\u{1b}[2J\nmore") else { panic!() };
        assert!(text.contains("HTTP 501: <html>\\u{1b}[2J;"), "{text}");
        assert!(matches!(of_answer(503, "no backend"), Failure::Passing(_)));
        let Failure::Server(text) =
            of_answer(400, "Client sent an HTTP request to an HTTPS server.\n")
        else {
            panic!()
        };
        assert!(text.contains("https://"), "{text}");
    }
}
