//! Clients without a secret, carried to a server that asks for one.

use std::time::Duration;

use drumline_store::{
    auth::{Level, Secret},
    store::{
        BYTES_MAX, Store,
        tcp::{Door, Relay, TcpStore, TcpStoreServer},
    },
};

const PATIENCE: Duration = Duration::from_secs(20);

fn loopback() -> Door {
    Door::Loopback { host: "127.0.0.1".into(), port: 0 }
}

fn server(secret: &Secret, level: Level) -> TcpStoreServer {
    let endpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let door = Door::Secured { endpoint, secret: secret.clone(), level };
    TcpStoreServer::open(&[door], BYTES_MAX).unwrap()
}

fn client(relay: &Relay) -> TcpStore {
    TcpStore::connect("127.0.0.1", relay.address().unwrap().port(), PATIENCE).unwrap()
}

#[test]
fn clients_without_a_secret_reach_the_store_at_every_level() {
    for level in Level::ALL {
        let secret = Secret::random().unwrap();
        let server = server(&secret, level);
        let relay =
            Relay::open(&loopback(), server.endpoint(), (&secret, level), PATIENCE).unwrap();
        let ours = TcpStore::connect_at(server.endpoint(), &secret, level, PATIENCE).unwrap();

        // More than the buffers of both connections hold, there and back, from several clients at once.
        let large: Vec<u8> = (0..8 << 20).map(|i: u32| (i % 251) as u8).collect();
        std::thread::scope(|scope| {
            for name in ["a", "b", "c"] {
                let (relay, large, ours) = (&relay, &large, &ours);
                scope.spawn(move || {
                    let theirs = client(relay);
                    theirs.set(name, large).unwrap();
                    assert!(ours.get(name).unwrap() == *large);
                    assert!(theirs.get(name).unwrap() == *large);
                });
            }
        });
        assert_eq!(client(&relay).add("n", 2).unwrap(), 2);
    }
}

#[test]
fn a_client_that_waits_is_woken_by_another_host() {
    let secret = Secret::random().unwrap();
    let server = server(&secret, Level::Auth);
    let [here, there] = [(), ()].map(|()| {
        Relay::open(&loopback(), server.endpoint(), (&secret, Level::Auth), PATIENCE).unwrap()
    });
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| client(&here).get("colour").unwrap());
        client(&there).set("colour", b"green").unwrap();
        assert_eq!(waits.join().unwrap(), b"green");
    });
}

#[test]
fn the_end_of_the_store_and_of_the_relay_end_the_connections() {
    let secret = Secret::random().unwrap();
    let first = server(&secret, Level::Auth);
    let relay =
        Relay::open(&loopback(), first.endpoint(), (&secret, Level::Auth), PATIENCE).unwrap();
    let theirs = client(&relay);
    theirs.set("key", b"value").unwrap();
    drop(first);
    let error = theirs.get("key").unwrap_err().to_string();
    assert!(error.contains("the connection is closed"), "{error}");

    let second = server(&secret, Level::Auth);
    let relay =
        Relay::open(&loopback(), second.endpoint(), (&secret, Level::Auth), PATIENCE).unwrap();
    let (theirs, waits) = (client(&relay), client(&relay));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| waits.get("never"));
        theirs.set("key", b"value").unwrap();
        drop(relay);
        assert!(waiting.join().unwrap().is_err());
    });
    assert!(theirs.get("key").is_err());
}

#[test]
fn a_relay_needs_the_secret_and_a_server() {
    let secret = Secret::random().unwrap();
    let server = server(&secret, Level::Auth);
    let open = |secret: &Secret, level| {
        let error = Relay::open(&loopback(), server.endpoint(), (secret, level), PATIENCE);
        error.unwrap_err().to_string()
    };
    let error = open(&Secret::random().unwrap(), Level::Auth);
    assert!(error.contains("secret"), "{error}");
    let error = open(&secret, Level::Tls);
    assert!(error.contains("level is auth"), "{error}");
    let endpoint = server.endpoint().clone();
    drop(server);
    let short = Duration::from_secs(2);
    let error = Relay::open(&loopback(), &endpoint, (&secret, Level::Auth), short).unwrap_err();
    assert!(error.to_string().contains("nobody listens there"), "{error}");
    let door =
        Door::Secured { endpoint: endpoint.clone(), secret: secret.clone(), level: Level::Auth };
    let error = Relay::open(&door, &endpoint, (&secret, Level::Auth), short).unwrap_err();
    assert!(error.to_string().contains("without a secret"), "{error}");
}
