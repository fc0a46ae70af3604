//! Where etcd is, and how this process proves to it who it is.

use std::{
    env, fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use drumline_shm::files::read;
use rustls::{
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    sign::CertifiedKey,
};
use ureq::{
    Agent,
    http::Uri,
    tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig},
};
use zeroize::Zeroizing;

use crate::{Error, Result, text::escaped};

/// The variables of [`User::from_env`].
const USER: &str = "DRUMLINE_ETCD_USER";
const PASSWORD: &str = "DRUMLINE_ETCD_PASSWORD";

/// What keys begin with, unless the cluster says otherwise.
const PREFIX: &str = "/drumline";

/// Idle connections that are kept for each server: as many as a process has threads that call at once.
const IDLE_MAX: usize = 8;

/// Where etcd is, and how this process proves to it who it is.
///
/// ```
/// # use drumline_store as drumline;
/// use drumline::store::{Cluster, etcd::User};
///
/// let cluster = Cluster {
///     servers: vec!["https://etcd-0:2379".into(), "https://etcd-1:2379".into()],
///     ca: Some("/etc/etcd/ca.pem".into()),
///     user: User::from_env()?,
///     ..Cluster::default()
/// };
/// # assert!(cluster.user.is_none());
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// URLs of its servers: `http://host:port` or `https://host:port`. One that answers is enough.
    pub servers: Vec<String>,
    /// What all keys begin with. `None`: `/drumline`.
    pub prefix: Option<String>,
    /// A file with the certificates, in PEM, of those who may sign the servers' ones. `None`: those that the
    /// system trusts.
    pub ca: Option<PathBuf>,
    /// Files with the certificate of this process and with its key, in PEM, for servers that ask for one.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// The user, for servers that ask for one.
    pub user: Option<User>,
}

/// A user of etcd. The password is shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct User {
    /// The name.
    pub name: String,
    /// The password.
    pub password: Zeroizing<String>,
}

impl User {
    /// The user that `DRUMLINE_ETCD_USER` and `DRUMLINE_ETCD_PASSWORD` name; `None` if neither is set.
    ///
    /// # Errors
    ///
    /// [`Setting`](drumline_error::ErrorKind::Setting) if only one of the two is set, or one is not UTF-8.
    pub fn from_env() -> Result<Option<User>> {
        let read = |name: &str| match env::var(name) {
            Ok(value) => Ok(Some(Zeroizing::new(value))),
            Err(env::VarError::NotPresent) => Ok(None),
            Err(_) => Err(wrong(name, "it is not UTF-8")),
        };
        User::of(read(USER)?, read(PASSWORD)?)
    }

    /// The user of two variables, of which both or neither are set.
    fn of(
        name: Option<Zeroizing<String>>,
        password: Option<Zeroizing<String>>,
    ) -> Result<Option<User>> {
        let lacks = |there, absent| {
            Err(wrong(there, &format!("it is set, and {absent} is not; set both or neither")))
        };
        match (name, password) {
            (None, None) => Ok(None),
            (Some(name), Some(password)) => Ok(Some(User { name: name.to_string(), password })),
            (Some(_), None) => lacks(USER, PASSWORD),
            (None, Some(_)) => lacks(PASSWORD, USER),
        }
    }
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Cluster {
    /// The servers' URLs, checked, without a `/` at the end.
    pub(super) fn urls(&self) -> Result<Vec<String>> {
        if self.servers.is_empty() {
            return Err(wrong("etcd", "no server is given; give http://host:2379"));
        }
        self.servers.iter().map(|server| url(server)).collect()
    }

    /// What the keys of `job` begin with. A `/` in its name is written `%2F`, so no job's keys are among
    /// those of another one.
    pub(super) fn root(&self, job: &str) -> String {
        let prefix = self.prefix.as_deref().unwrap_or(PREFIX).trim_end_matches('/');
        format!("{prefix}/{}/", job.replace('%', "%25").replace('/', "%2F"))
    }

    /// What speaks HTTP with the servers.
    pub(super) fn agent(&self) -> Result<Agent> {
        let is_secured = self.servers.iter().any(|server| server.starts_with("https:"));
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .max_idle_connections_per_host(IDLE_MAX)
            .max_idle_connections(IDLE_MAX * self.servers.len())
            // The servers are near. A proxy for the outer world would only be in the way.
            .proxy(None);
        let config = if is_secured { config.tls_config(self.tls()?) } else { config };
        Ok(config.build().into())
    }

    fn tls(&self) -> Result<TlsConfig> {
        let provider = Arc::new(default_provider());
        let roots = match &self.ca {
            Some(path) => certificates(path)?,
            None => of_the_system()?,
        };
        let roots: Vec<_> = roots.iter().map(|it| Certificate::from_der(it).to_owned()).collect();
        let own = match &self.certificate {
            None => None,
            Some((certificate, key)) => {
                let chain = certificates(certificate)?;
                let owned: Vec<_> =
                    chain.iter().map(|it| Certificate::from_der(it).to_owned()).collect();
                let (key_of_ureq, key_of_rustls) = private_key(key)?;
                CertifiedKey::from_der(chain, key_of_rustls, &provider).map_err(|error| {
                    let certificate = certificate.display();
                    let problem =
                        format!("it does not fit the certificate in {certificate}: {error}");
                    wrong_file(key, &problem)
                })?;
                Some(ClientCert::new_with_certs(&owned, key_of_ureq))
            }
        };
        Ok(TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&roots))
            .client_cert(own)
            .unversioned_rustls_crypto_provider(provider)
            .build())
    }
}

/// The longest time in which a server must accept a connection.
pub(super) const CONNECT_PATIENCE: Duration = Duration::from_secs(3);

/// `server` as `scheme://host:port`.
fn url(server: &str) -> Result<String> {
    let refused =
        |problem: &str| Err(wrong(&format!("etcd server `{}`", escaped(server)), problem));
    let form = "it is not a URL like http://host:2379 or https://host:2379";
    let Ok(uri) = server.parse::<Uri>() else { return refused(form) };
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return refused(form);
    };
    if !["http", "https"].contains(&scheme) || uri.port_u16().is_none() {
        return refused(form);
    }
    if authority.as_str().contains('@') {
        return refused(&format!("a user is not given in the URL; set {USER} and {PASSWORD}"));
    }
    if uri.path_and_query().is_some_and(|path| path != "/") {
        return refused("nothing may follow the port");
    }
    Ok(format!("{scheme}://{authority}"))
}

/// The longest file of certificates or of a key. That of all authorities of the web has a quarter.
const PEM_BYTES_MAX: usize = 1024 * 1024;

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = read(path, PEM_BYTES_MAX)
        .map_err(|error| wrong_file(path, &format!("it cannot be read: {error}")))?;
    match CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>() {
        Ok(found) if found.is_empty() => Err(wrong_file(path, "it holds no certificate in PEM")),
        Ok(found) => Ok(found),
        Err(error) => Err(wrong_file(path, &format!("it holds no certificates in PEM: {error}"))),
    }
}

/// The key in a file, once for each of two libraries.
fn private_key(path: &Path) -> Result<(PrivateKey<'static>, PrivateKeyDer<'static>)> {
    let no_key = |error: &dyn fmt::Display| {
        wrong_file(path, &format!("it holds no private key in PEM: {error}"))
    };
    let pem = Zeroizing::new(read(path, PEM_BYTES_MAX).map_err(|error| no_key(&error))?);
    let of_ureq = PrivateKey::from_pem(&pem).map_err(|error| no_key(&error))?;
    let of_rustls = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| no_key(&error))?;
    Ok((of_ureq, of_rustls))
}

/// The certificates of those whom the system trusts.
fn of_the_system() -> Result<Vec<CertificateDer<'static>>> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        let problem = "the system names nobody whose signature it trusts; give a file with the certificate \
                       that signed those of etcd (ca, cacert)";
        return Err(wrong("etcd over https", problem));
    }
    Ok(found.certs)
}

fn wrong_file(path: &Path, problem: &str) -> Error {
    wrong(&escaped(&path.display().to_string()), problem)
}

fn wrong(setting: &str, problem: &str) -> Error {
    Error::setting(setting, problem.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_a_url_with_a_port_and_no_more() {
        let url = |text: &str| url(text).map_err(|error| error.to_string());
        assert_eq!(url("http://a:1/").unwrap(), "http://a:1");
        assert_eq!(url("https://[::1]:2379").unwrap(), "https://[::1]:2379");
        for (text, hint) in [
            ("a:2379", "http://host:2379"),
            ("ftp://a:1", "http://host:2379"),
            ("http://a", "http://host:2379"),
            ("http://a:99999", "http://host:2379"),
            ("http://a:1/v3", "nothing may follow"),
            ("http://me:secret@a:1", PASSWORD),
            ("", "http://host:2379"),
        ] {
            let error = url(text).unwrap_err();
            assert!(error.contains(hint) && error.contains(text), "{error}");
        }
    }

    #[test]
    fn the_keys_of_a_job_are_not_among_those_of_another() {
        let cluster = Cluster::default();
        assert_eq!(cluster.root("a"), "/drumline/a/");
        assert_eq!(cluster.root("a/b"), "/drumline/a%2Fb/");
        assert_ne!(cluster.root("a/b"), cluster.root("a%2Fb"));
        let cluster = Cluster { prefix: Some("jobs/".into()), ..cluster };
        assert_eq!(cluster.root("a"), "jobs/a/");
    }

    #[test]
    fn a_user_has_a_name_and_a_password() {
        let some = |text: &str| Some(Zeroizing::new(text.to_owned()));
        assert_eq!(User::of(None, None).unwrap(), None);
        assert_eq!(User::of(some("me"), some("hunter2")).unwrap().unwrap().name, "me");
        for (error, hint) in [
            (User::of(some("me"), None).unwrap_err(), "DRUMLINE_ETCD_PASSWORD is not"),
            (User::of(None, some("hunter2")).unwrap_err(), "DRUMLINE_ETCD_USER is not"),
        ] {
            let text = error.to_string();
            assert!(text.contains(hint) && !text.contains("hunter2"), "{text}");
        }
    }

    #[test]
    fn a_password_is_not_shown() {
        let user = User { name: "me".into(), password: "hunter2".to_owned().into() };
        let cluster = Cluster { user: Some(user), ..Cluster::default() };
        let shown = format!("{cluster:?}");
        assert!(shown.contains("me") && !shown.contains("hunter2"), "{shown}");
    }
}
