//! Somebody sits between two ranks and changes what they send: at the level `tls` no sum
//! is wrong, and the error names the other rank.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drumline_group::{
    Config, ReduceOp,
    auth::{Channel, Hello, Level, Secret},
    store::{HashStore, Store},
};

/// Nothing here takes that long unless something hangs.
const HANG: Duration = Duration::from_secs(60);

/// What becomes of the bytes of one direction of a connection.
#[derive(Clone, Copy, Debug)]
enum Meddling {
    /// The byte at this place is changed.
    Change(usize),
    /// Nothing comes behind this place but the end.
    Cut(usize),
    /// The bytes before this place come twice, from the end of the greeting on.
    Repeat(usize),
}

/// On which channel, in which direction, and what.
#[derive(Clone, Copy, Debug)]
struct Plan {
    channel: Channel,
    from_caller: bool,
    meddling: Meddling,
}

impl Plan {
    fn apply(&self, before: usize, bytes: &mut Vec<u8>) {
        let whole = before..before + bytes.len();
        match self.meddling {
            Meddling::Change(at) if whole.contains(&at) => bytes[at - before] ^= 1,
            Meddling::Cut(at) if whole.end > at => bytes.truncate(at.saturating_sub(before)),
            Meddling::Repeat(at) if whole.contains(&at) => {
                let seen = bytes[..at - before].to_vec();
                bytes.splice(at - before..at - before, seen);
            }
            _ => {}
        }
    }
}

/// A store that tells every rank the addresses of proxies instead of those of its peers.
#[derive(Debug)]
struct Detour {
    store: Arc<dyn Store>,
    plan: Plan,
}

impl Detour {
    /// Ports of the system's choice have five digits, so nothing else in the value changes.
    fn rewrite(&self, value: &[u8]) -> Vec<u8> {
        const FRONT: &[u8] = b"127.0.0.1:";
        let mut value = value.to_vec();
        for at in 0..value.len().saturating_sub(FRONT.len() + 4) {
            if value[at..].starts_with(FRONT) {
                let port = &mut value[at + FRONT.len()..][..5];
                let real = std::str::from_utf8(port).unwrap().parse().unwrap();
                port.copy_from_slice(proxy(real, self.plan).to_string().as_bytes());
            }
        }
        value
    }
}

/// Stands before a port of this host; its own port.
fn proxy(port: u16, plan: Plan) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for caller in listener.incoming() {
            let Ok(mut caller) = caller else { return };
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let Ok(mut answerer) = TcpStream::connect(address) else { continue };
            thread::spawn(move || {
                let mut greeting = [0; Hello::BYTES];
                if caller.read_exact(&mut greeting).is_err() {
                    return;
                }
                answerer.write_all(&greeting).unwrap();
                let is_meant = Channel::from_code(greeting[7]) == Some(plan.channel);
                let plan_of = move |from_caller| {
                    (is_meant && plan.from_caller == from_caller).then_some(plan)
                };
                let ends = [caller.try_clone().unwrap(), answerer.try_clone().unwrap()];
                let back = thread::spawn(move || carry(answerer, caller, plan_of(false), 0));
                let [caller, answerer] = ends;
                carry(caller, answerer, plan_of(true), Hello::BYTES);
                back.join().unwrap();
            });
        }
    });
    own
}

fn carry(mut from: TcpStream, mut to: TcpStream, plan: Option<Plan>, mut before: usize) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut bytes = buffer[..count].to_vec();
        if let Some(plan) = plan {
            plan.apply(before, &mut bytes);
        }
        before += count;
        let is_cut =
            plan.is_some_and(|plan| matches!(plan.meddling, Meddling::Cut(at) if before > at));
        if to.write_all(&bytes).is_err() || is_cut {
            break;
        }
    }
    let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
}

macro_rules! passed_on {
    ($($name:ident($($argument:ident: $type:ty),*) -> $returned:ty;)*) => {
        impl Store for Detour {
            fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> drumline_group::Result<Vec<u8>> {
                self.store.compare_set(key, expected, &self.rewrite(desired))
            }

            $(fn $name(&self $(, $argument: $type)*) -> $returned {
                self.store.$name($($argument),*)
            })*
        }
    };
}

passed_on! {
    set(key: &str, value: &[u8]) -> drumline_group::Result<()>;
    get(key: &str) -> drumline_group::Result<Vec<u8>>;
    add(key: &str, amount: i64) -> drumline_group::Result<i64>;
    wait(keys: &[&str], timeout: Duration) -> drumline_group::Result<()>;
    check(keys: &[&str]) -> drumline_group::Result<bool>;
    num_keys() -> drumline_group::Result<usize>;
    delete_key(key: &str) -> drumline_group::Result<bool>;
    append(key: &str, value: &[u8]) -> drumline_group::Result<()>;
    multi_get(keys: &[&str]) -> drumline_group::Result<Vec<Vec<u8>>>;
    multi_set(pairs: &[(&str, &[u8])]) -> drumline_group::Result<()>;
    queue_push(key: &str, value: &[u8]) -> drumline_group::Result<()>;
    queue_pop(key: &str) -> drumline_group::Result<Vec<u8>>;
    queue_try_pop(key: &str) -> drumline_group::Result<Option<Vec<u8>>>;
    queue_len(key: &str) -> drumline_group::Result<usize>;
    list_keys() -> drumline_group::Result<Vec<String>>;
    barrier(key: &str, world_size: usize, timeout: Duration) -> drumline_group::Result<()>;
    timeout() -> Duration;
    set_timeout(timeout: Duration) -> ();
    try_clone() -> drumline_group::Result<Box<dyn Store>>;
}

fn config(level: Level) -> Config {
    Config::default()
        .shared_memory(false)
        .unix_sockets(false)
        .timeout(Duration::from_secs(20))
        .secret(Secret::new("of the test of meddlers").unwrap())
        .security(level)
}

/// What each of two ranks gets from adding ones ten times, with somebody in between.
fn sums(level: Level, plan: Plan) -> [Result<bool, String>; 2] {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    thread::scope(|threads| {
        let ranks = [0, 1].map(|rank| {
            let store = Arc::new(Detour { store: store.clone(), plan });
            threads.spawn(move || {
                let group =
                    drumline_group::rendezvous::connect("meddled", store, rank, 2, &config(level))
                        .map_err(|error| error.to_string())?;
                let mut right = true;
                for _ in 0..10 {
                    let mut ones = vec![1_u32; 10_000];
                    group
                        .all_reduce(&mut ones, ReduceOp::Sum)
                        .map_err(|error| error.to_string())?;
                    right &= ones.iter().all(|sum| *sum == 2);
                }
                group.destroy().map_err(|error| error.to_string())?;
                Ok(right)
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    })
}

/// Behind every handshake, within the payload of a message.
const PAYLOAD: usize = 20_000;

#[test]
fn at_auth_a_changed_byte_makes_a_wrong_sum() {
    let meddling = Meddling::Change(PAYLOAD);
    let plan = Plan { channel: Channel::Data(0), from_caller: true, meddling };
    assert!(sums(Level::Auth, plan).contains(&Ok(false)), "the test does not meddle");
}

#[test]
fn at_tls_no_sum_is_wrong_and_the_error_names_the_rank() {
    let start = Instant::now();
    for from_caller in [true, false] {
        for meddling in
            [Meddling::Change(PAYLOAD), Meddling::Repeat(PAYLOAD), Meddling::Cut(PAYLOAD)]
        {
            let plan = Plan { channel: Channel::Data(0), from_caller, meddling };
            let results = sums(Level::Tls, plan);
            let errors = results.map(|result| result.unwrap_err());
            let told = errors.iter().enumerate().any(|(rank, error)| {
                error.contains(&format!("rank {}", 1 - rank))
                    && match meddling {
                        Meddling::Cut(_) => error.contains("broke"),
                        _ => error.contains("somebody changed bytes on the way"),
                    }
            });
            assert!(told, "{plan:?}: {errors:?}");
        }
        // In the first word of control, or in the handshake of TLS. The caller's first word may be
        // its last, which nobody has to hear.
        let plan = Plan { channel: Channel::Control, from_caller, meddling: Meddling::Change(100) };
        let results = sums(Level::Tls, plan);
        assert!(!results.contains(&Ok(false)), "{plan:?}: {results:?}");
        assert!(from_caller || results.iter().any(Result::is_err), "{plan:?}");
    }
    assert!(start.elapsed() < 2 * HANG);
}

#[test]
fn ranks_with_other_levels_name_each_other() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    thread::scope(|threads| {
        let ranks = [Level::Tls, Level::Auth].into_iter().enumerate().map(|(rank, level)| {
            let store = store.clone();
            threads.spawn(move || {
                let group =
                    drumline_group::rendezvous::connect("levels", store, rank, 2, &config(level));
                group.map(drop).unwrap_err().to_string()
            })
        });
        for (rank, thread) in ranks.collect::<Vec<_>>().into_iter().enumerate() {
            let error = thread.join().unwrap();
            let named = error.contains("DRUMLINE_SECURITY") && error.contains("level is");
            assert!(named && error.contains(&format!("rank {}", 1 - rank)), "{error}");
        }
    });
}

#[test]
fn levels_between_hosts_take_a_secret() {
    let config = config(Level::Tls).secret(None);
    let error = drumline_group::rendezvous::local_world_with(2, &config).unwrap_err().to_string();
    assert!(error.contains("DRUMLINE_SECURITY") && error.contains("secret"), "{error}");
}
