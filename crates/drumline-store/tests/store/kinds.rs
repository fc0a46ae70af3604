//! Every store there is.

use std::{any::Any, sync::Arc, thread};

use drumline_store::{
    auth::Secret,
    store::{FileStore, HashStore, PrefixStore, Store, tcp::TcpStore},
};

use super::HANG;

/// A store of some kind, and what must live as long as it does.
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) store: Arc<dyn Store>,
    pub(super) _keeper: Box<dyn Any>,
}

impl Subject {
    fn new(name: &'static str, store: impl Store + 'static) -> Subject {
        Subject { name, store: Arc::new(store), _keeper: Box::new(()) }
    }

    fn kept_by(self, keeper: impl Any) -> Subject {
        Subject { _keeper: Box::new(keeper), ..self }
    }
}

pub(super) fn stores() -> Vec<Subject> {
    let tcp = || TcpStore::host("127.0.0.1", 0).unwrap();
    let secured = |name, endpoint: &str| {
        let secret = Secret::random().unwrap();
        let host = TcpStore::host_secured(&endpoint.parse().unwrap(), &secret).unwrap();
        // What a client does to it, seen from a client.
        let client = TcpStore::connect_secured(&host.name().parse().unwrap(), &secret, HANG);
        Subject::new(name, client.unwrap()).kept_by(host)
    };
    let name = format!("unix:@drumline-suite-{}-{:?}", std::process::id(), thread::current().id());
    let directory = tempfile::tempdir().unwrap();
    let file = |name| FileStore::open(directory.path().join(name), 1).unwrap();
    let (alone, shared) = (file("a"), file("b"));
    let second = file("b");
    let cloned = tcp();
    let clone = cloned.try_clone().unwrap();
    #[cfg_attr(not(feature = "etcd"), expect(unused_mut))]
    let mut all = vec![
        Subject::new("hash", HashStore::new()),
        Subject::new("prefix over hash", PrefixStore::new("a/b", Arc::new(HashStore::new()))),
        Subject::new("tcp", tcp()),
        secured("tcp with a secret", "tcp://127.0.0.1:0"),
        secured("Unix socket with a secret", &name),
        Subject::new("prefix over tcp", PrefixStore::new("a/b", Arc::new(tcp()))),
        Subject::new("clone of tcp", PrefixStore::new("c", Arc::from(clone))).kept_by(cloned),
        Subject::new("file", alone),
        Subject::new("prefix over file", PrefixStore::new("a/b", Arc::new(shared)))
            .kept_by((second, directory)),
    ];
    #[cfg(feature = "etcd")]
    all.extend(super::etcd::of_shared_server().map(|store| Subject::new("etcd", store)));
    all
}
