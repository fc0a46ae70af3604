//! Servers that are not what they should be, and those that want to know who asks.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use drumline_error::ErrorKind;
use drumline_store::store::{Cluster, EtcdStore, Store, TcpStore, etcd::User};
use drumline_testing::etcd::{Server, free_port, is_installed};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
};

use super::cluster;
use crate::HANG;

/// For those that cannot succeed, but may not say so at once.
const SHORT: Duration = Duration::from_millis(500);

fn as_user(cluster: Cluster, name: &str, password: &str) -> Cluster {
    let user = User { name: name.to_owned(), password: password.to_owned().into() };
    Cluster { user: Some(user), ..cluster }
}

/// Why it cannot be opened.
fn refusal(cluster: &Cluster, patience: Duration) -> String {
    EtcdStore::open(cluster, "job", patience).unwrap_err().to_string()
}

#[test]
fn users_are_asked_for_and_checked() {
    if !is_installed() {
        return;
    }
    let mut server = Server::start(&[]);
    // A user is no hindrance where nobody asks.
    let early =
        EtcdStore::open(&as_user(cluster(&[&server]), "drum", "right"), "job", HANG).unwrap();
    early.set("early", b"1").unwrap();
    server.ask_for_users();

    let none = refusal(&cluster(&[&server]), HANG);
    assert!(none.contains("DRUMLINE_ETCD_USER"), "{none}");
    let wrong = refusal(&as_user(cluster(&[&server]), "drum", "wrong"), HANG);
    assert!(wrong.contains("DRUMLINE_ETCD_PASSWORD") && !wrong.contains("wrong"), "{wrong}");
    let elsewhere =
        Cluster { prefix: Some("/other".into()), ..as_user(cluster(&[&server]), "drum", "right") };
    let denied = refusal(&elsewhere, HANG);
    assert!(denied.contains("user drum") && denied.contains("grant-permission"), "{denied}");
    for text in [&none, &wrong, &denied] {
        assert!(text.contains(&server.url()), "{text}");
    }

    let store =
        EtcdStore::open(&as_user(cluster(&[&server]), "drum", "right"), "job", HANG).unwrap();
    crate::semantics::semantics(&store);
    // Also the one that was not asked at first.
    assert_eq!(early.get("early").unwrap(), b"1");
    // The server forgets who has logged in.
    server.kill();
    server.run();
    assert_eq!(store.add("after", 1).unwrap(), 1);
    assert_eq!(early.add("after", 1).unwrap(), 2);
    early.clear().unwrap();
}

/// Somebody who signs certificates.
fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new([]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Files with a certificate that `authority` has signed, for `host`, and with its key.
fn signed(
    authority: &CertifiedIssuer<'static, KeyPair>,
    host: &str,
    directory: &Path,
    name: &str,
) -> (PathBuf, PathBuf) {
    let mut params = CertificateParams::new([host.to_owned()]).unwrap();
    // etcd takes no other from somebody who logs in.
    params.distinguished_name = DistinguishedName::new();
    written(authority, params, directory, name)
}

fn written(
    authority: &CertifiedIssuer<'static, KeyPair>,
    params: CertificateParams,
    directory: &Path,
    name: &str,
) -> (PathBuf, PathBuf) {
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    let paths = (directory.join(format!("{name}.crt")), directory.join(format!("{name}.key")));
    std::fs::write(&paths.0, certificate.pem()).unwrap();
    std::fs::write(&paths.1, key.serialize_pem()).unwrap();
    paths
}

/// Arguments of a server that speaks TLS with a certificate for `host`, and asks for those that `authority` has
/// signed. Their files are in `directory`, as that of the authority, `ca.crt`.
fn tls(authority: &CertifiedIssuer<'static, KeyPair>, host: &str, directory: &Path) -> Vec<String> {
    let (certificate, key) = signed(authority, host, directory, "server");
    let ca = directory.join("ca.crt");
    std::fs::write(&ca, authority.pem()).unwrap();
    let files = [("--cert-file", certificate), ("--key-file", key), ("--trusted-ca-file", ca)];
    let files =
        files.iter().flat_map(|(flag, path)| [(*flag).to_owned(), path.display().to_string()]);
    files.chain(["--client-cert-auth".to_owned()]).collect()
}

#[test]
fn certificates_are_checked_at_both_ends() {
    if !is_installed() {
        return;
    }
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let server = Server::start_as("https", |folder| tls(&ours, "127.0.0.1", folder));
    let own = signed(&ours, "client", server.directory.path(), "client");
    let strange = signed(&theirs, "client", server.directory.path(), "stranger");
    let url = format!("https://127.0.0.1:{}", server.port);
    let right = Cluster {
        servers: vec![url.clone()],
        ca: Some(server.file("ca.crt")),
        certificate: Some(own.clone()),
        ..Cluster::default()
    };
    let store = EtcdStore::open(&right, "job", HANG).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.get("key"));
        store.set("key", b"value").unwrap();
        assert_eq!(waiter.join().unwrap().unwrap(), b"value");
    });

    let told = |cluster: &Cluster, patience, hint: &str| {
        let text = refusal(cluster, patience);
        assert!(text.contains(hint), "{hint}: {text}");
    };
    // Whether the server's reason comes before the end of the connection is chance.
    told(&Cluster { certificate: None, ..right.clone() }, SHORT, "cert, key");
    told(&Cluster { certificate: Some(strange.clone()), ..right.clone() }, SHORT, "cert, key");
    // Found before anything is sent, or at once.
    let mixed = (own.0.clone(), strange.1);
    told(
        &Cluster { certificate: Some(mixed), ..right.clone() },
        HANG,
        "does not fit the certificate",
    );
    told(&Cluster { ca: Some(strange.0), ..right.clone() }, HANG, "ca, cacert");
    told(&Cluster { ca: Some(own.1), ..right.clone() }, HANG, "no certificate in PEM");
    told(&Cluster { ca: Some("/nowhere/ca.crt".into()), ..right.clone() }, HANG, "/nowhere/ca.crt");
    let plain = url.replace("https", "http");
    told(&Cluster { servers: vec![plain], ..right.clone() }, SHORT, "https://");

    let elsewhere = Server::start_as("https", |folder| tls(&ours, "another.host", folder));
    let url = format!("https://127.0.0.1:{}", elsewhere.port);
    told(&Cluster { servers: vec![url], ..right.clone() }, HANG, "another name");
    let without_tls = Server::start(&[]);
    let url = without_tls.url().replace("http", "https");
    told(&Cluster { servers: vec![url], ..right.clone() }, SHORT, "http://");
    let url = answering(b"HTTP/1.0 400 Bad Request\r\n\r\n").replace("http", "https");
    told(&Cluster { servers: vec![url], ..right }, HANG, "write http://");
}

#[test]
fn users_log_in_over_tls() {
    if !is_installed() {
        return;
    }
    let mut server = Server::start(&[]);
    server.ask_for_users();
    let authority = authority("ours");
    let directory = server.directory.path();
    let more = tls(&authority, "127.0.0.1", directory);
    let mut named = CertificateParams::new(["client".to_owned()]).unwrap();
    named.distinguished_name.push(DnType::CommonName, "somebody");
    let named = written(&authority, named, directory, "named");
    let nameless = signed(&authority, "client", directory, "nameless");
    server.kill();
    server.secure(more);
    server.run();

    let right = Cluster {
        servers: vec![server.url().replace("http", "https")],
        ca: Some(server.file("ca.crt")),
        certificate: Some(nameless),
        ..as_user(Cluster::default(), "drum", "right")
    };
    let store = EtcdStore::open(&right, "job", HANG).unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key").unwrap(), b"value");
    let text = refusal(&Cluster { certificate: Some(named), ..right }, HANG);
    assert!(text.contains("common name"), "{text}");
}

/// A server that answers every connection with `answer`.
fn answering(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
        }
    });
    url
}

#[test]
fn what_is_no_etcd_is_told_with_its_address() {
    let told = |url: String, patience, hint: &str| {
        let cluster = Cluster { servers: vec![url.clone()], ..Cluster::default() };
        let text = refusal(&cluster, patience);
        assert!(text.contains(hint) && text.contains(&url), "{hint}: {text}");
    };
    // At once, whatever the time limit.
    let page = b"HTTP/1.0 501 Unsupported method\r\nContent-Length: 6\r\n\r\n<html>";
    told(answering(page), HANG, "--listen-client-urls");
    told(
        answering(b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
        HANG,
        "etcd 3.4 or newer",
    );
    told(answering(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}"), HANG, "etcd 3.4 or newer");
    told(answering(b"SSH-2.0-OpenSSH_9.2\r\n"), HANG, "does not speak HTTP");
    // They may be on their way up or down.
    told(answering(b""), SHORT, "no etcd?");
    let store = TcpStore::host("127.0.0.1", 0).unwrap();
    told(format!("http://{}", store.address().unwrap()), SHORT, "no etcd?");
    told(format!("http://127.0.0.1:{}", free_port()), SHORT, "is it running?");
    told("http://no.such.host.invalid:2379".to_owned(), SHORT, "no.such.host.invalid");
}

#[test]
fn an_etcd_without_the_api_is_told() {
    if !is_installed() {
        return;
    }
    let server = Server::start_as("http", |_| vec!["--enable-grpc-gateway=false".to_owned()]);
    let text = refusal(&cluster(&[&server]), HANG);
    assert!(
        text.contains("it is etcd 3.") && text.contains("--enable-grpc-gateway=false"),
        "{text}"
    );
}

#[test]
fn a_server_that_is_wrong_is_no_hindrance_beside_one_that_is_right() {
    if !is_installed() {
        return;
    }
    let server = Server::start(&[]);
    let page = answering(b"HTTP/1.0 501 Unsupported method\r\nContent-Length: 6\r\n\r\n<html>");
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    let servers = vec![page, silent, format!("http://127.0.0.1:{}", free_port()), server.url()];
    let store = EtcdStore::open(&Cluster { servers, ..Cluster::default() }, "job", HANG).unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key").unwrap(), b"value");
}

#[test]
fn a_wrong_cluster_is_refused_before_anything_is_sent() {
    for servers in [vec![], vec!["etcd-0:2379".to_owned()], vec!["http://me@a:1".to_owned()]] {
        let cluster = Cluster { servers, ..Cluster::default() };
        let error = EtcdStore::open(&cluster, "job", HANG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Setting, "{error}");
    }
}
