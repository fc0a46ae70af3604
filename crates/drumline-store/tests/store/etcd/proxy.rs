//! A server in front of etcd that loses requests and answers, and delivers requests again later.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// What happens to a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    None,
    /// etcd never sees it.
    LostRequest,
    /// etcd has done it, and nobody is told.
    LostAnswer,
    /// As before; and etcd sees it once more, later.
    Again,
    /// The caller is told nothing, and etcd sees it later.
    Late,
    /// etcd has done it, nobody is told, and etcd sees it once more at [`Proxy::deliver`].
    Held,
}

/// How much later: long enough for other requests to come before it.
const LATER: Duration = Duration::from_millis(60);

type Held = Arc<Mutex<Vec<Vec<u8>>>>;

pub(super) struct Proxy {
    pub(super) port: u16,
    etcd: u16,
    held: Held,
}

impl Proxy {
    /// Delivers the requests that are held, and returns how many they were.
    pub(super) fn deliver(&self) -> usize {
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        let answers = held.iter().map(|request| forward(self.etcd, request).unwrap());
        answers.filter(|answer| answer.starts_with(b"HTTP/1.1 200")).count()
    }
}

/// Listens until the process ends. `fault` chooses what happens to the request with this number.
pub(super) fn before(etcd: u16, fault: impl Fn(u64) -> Fault + Send + Sync + 'static) -> Proxy {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let held = Held::default();
    let proxy = Proxy { port, etcd, held: Arc::clone(&held) };
    let (fault, count) = (Arc::new(fault), Arc::new(AtomicU64::new(0)));
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, fault, count) = (stream.unwrap(), Arc::clone(&fault), Arc::clone(&count));
            let held = Arc::clone(&held);
            thread::spawn(move || {
                serve(stream, etcd, &held, &|| fault(count.fetch_add(1, Ordering::Relaxed)));
            });
        }
    });
    proxy
}

/// Serves one connection until one end closes it, or a fault does.
fn serve(mut caller: TcpStream, etcd: u16, held: &Held, fault: &dyn Fn() -> Fault) {
    let mut from_caller = BufReader::new(caller.try_clone().unwrap());
    while let Some(request) = message(&mut from_caller) {
        if request.starts_with(b"POST /v3/watch") {
            // An endless answer.
            let mut up = TcpStream::connect(("127.0.0.1", etcd)).unwrap();
            up.write_all(&request).unwrap();
            let _ = std::io::copy(&mut up, &mut caller);
            return;
        }
        let later = |request: Vec<u8>| {
            thread::spawn(move || {
                thread::sleep(LATER);
                forward(etcd, &request);
            });
        };
        match fault() {
            Fault::LostRequest => return,
            Fault::LostAnswer => {
                forward(etcd, &request);
                return;
            }
            Fault::Again => {
                forward(etcd, &request);
                later(request);
                return;
            }
            Fault::Held => {
                forward(etcd, &request);
                held.lock().unwrap().push(request);
                return;
            }
            Fault::Late => {
                later(request);
                return;
            }
            Fault::None => {
                let Some(answer) = forward(etcd, &request) else { return };
                if caller.write_all(&answer).is_err() {
                    return;
                }
            }
        }
    }
}

/// Asks etcd.
fn forward(etcd: u16, request: &[u8]) -> Option<Vec<u8>> {
    let mut up = TcpStream::connect(("127.0.0.1", etcd)).ok()?;
    up.write_all(request).ok()?;
    message(&mut BufReader::new(up))
}

/// A request or answer whose length its head tells.
fn message(from: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let (mut message, mut length) = (Vec::new(), 0);
    loop {
        let begin = message.len();
        if from.read_until(b'\n', &mut message).ok()? == 0 {
            return None;
        }
        let line = String::from_utf8_lossy(&message[begin..]).to_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        assert!(!line.starts_with("transfer-encoding"), "an answer in chunks");
        if line.trim().is_empty() {
            break;
        }
    }
    let head = message.len();
    message.resize(head + length, 0);
    from.read_exact(&mut message[head..]).ok()?;
    Some(message)
}
