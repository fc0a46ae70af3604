//! How a job is, over HTTP: `GET /health` and `GET /metrics`.
//!
//! One thread serves everybody. Each connection has one request, a limit of time and of bytes, and there are few of
//! them: a new one takes the place of the oldest. So a client that is slow, or many, only hold up themselves.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::status::Status;
use crate::{Error, Result};

/// So many connections may be open at once.
const GUESTS_MAX: usize = 32;

/// How long a connection may be open.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest request.
const REQUEST_MAX: usize = 8 * 1024;

/// How long nobody is let in if the system has no more descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers until it is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    /// The thread ends when this is closed.
    _near: UnixStream,
}

impl Server {
    pub(crate) fn listen(host: &str, port: u16, status: Arc<Mutex<Status>>) -> Result<Server> {
        let failed = || {
            Error::system(format!(
                "listen at {host}:{port} for questions about the health (--health-port)"
            ))
        };
        let listener = TcpListener::bind((host, port)).map_err(failed())?;
        listener.set_nonblocking(true).map_err(failed())?;
        let address = listener.local_addr().map_err(failed())?;
        let (near, far) =
            UnixStream::pair().map_err(Error::call("socketpair", "make a socket pair"))?;
        thread::Builder::new()
            .name("health".into())
            .stack_size(256 * 1024)
            .spawn(move || serve(&listener, &far, &status))
            .map_err(Error::call("clone3", "start a thread that answers about the health"))?;
        tracing::info!("health and metrics are at http://{address}/health and /metrics");
        Ok(Server { address, _near: near })
    }
}

/// Somebody who asks.
struct Guest {
    stream: TcpStream,
    since: Instant,
    request: Vec<u8>,
    /// What is still to be sent, once the request is there.
    answer: Option<Vec<u8>>,
}

fn serve(listener: &TcpListener, stop: &UnixStream, status: &Mutex<Status>) {
    let mut guests: Vec<Guest> = Vec::new();
    let mut closed_until: Option<Instant> = None;
    loop {
        let now = Instant::now();
        guests.retain(|guest| now.duration_since(guest.since) < PATIENCE);
        closed_until = closed_until.filter(|until| now < *until);
        let ends = guests.iter().map(|guest| guest.since + PATIENCE);
        let next = ends.chain(closed_until).min();
        let timeout = next.map(|at| at.saturating_duration_since(now));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let door = if closed_until.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut ready = vec![PollFd::new(&stop, PollFlags::IN), PollFd::new(&listener, door)];
        ready.extend(guests.iter().map(|guest| {
            let wants = if guest.answer.is_some() { PollFlags::OUT } else { PollFlags::IN };
            PollFd::from_borrowed_fd(guest.stream.as_fd(), wants)
        }));
        if poll(&mut ready, timeout.as_ref()).is_err() {
            continue;
        }
        let ready: Vec<bool> = ready.iter().map(|it| !it.revents().is_empty()).collect();
        if ready[0] {
            return;
        }
        let mut turns = ready[2..].iter();
        guests.retain_mut(|guest| !turns.next().is_some_and(|ready| *ready) || guest.turn(status));
        if ready[1] {
            match listener.accept() {
                Ok((stream, _)) => {
                    if guests.len() == GUESTS_MAX {
                        guests.remove(0);
                    }
                    guests.extend(Guest::new(stream));
                }
                Err(error) if is_of_one_connection(error.kind()) => {}
                Err(_) => closed_until = Some(Instant::now() + PAUSE),
            }
        }
    }
}

/// Whether it is only the connection that was not taken.
fn is_of_one_connection(error: ErrorKind) -> bool {
    use ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(error, ConnectionAborted | ConnectionReset | Interrupted | WouldBlock)
}

impl Guest {
    fn new(stream: TcpStream) -> Option<Guest> {
        stream.set_nonblocking(true).ok()?;
        Some(Guest { stream, since: Instant::now(), request: Vec::new(), answer: None })
    }

    /// Reads or writes what is possible. Returns `false` when the connection is to be closed.
    fn turn(&mut self, status: &Mutex<Status>) -> bool {
        let done = match &self.answer {
            None => self.read(status),
            Some(_) => self.write(),
        };
        match done {
            Ok(goes_on) => goes_on,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    fn read(&mut self, status: &Mutex<Status>) -> std::io::Result<bool> {
        let mut bytes = [0; 4096];
        let count = self.stream.read(&mut bytes)?;
        self.request.extend_from_slice(&bytes[..count]);
        let answer = match asked(&self.request) {
            None if count == 0 => return Ok(false),
            None => return Ok(true),
            Some(asked) => {
                let status = status.lock().unwrap_or_else(PoisonError::into_inner);
                answer(asked, &status)
            }
        };
        self.answer = Some(answer);
        self.write()
    }

    fn write(&mut self) -> std::io::Result<bool> {
        let Some(answer) = &mut self.answer else { return Ok(true) };
        while !answer.is_empty() {
            let count = self.stream.write(answer)?;
            answer.drain(..count);
        }
        Ok(false)
    }
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Health {
        head: bool,
    },
    Metrics {
        head: bool,
    },
    /// Something else: the status that says so.
    Refused(&'static str),
}

/// Understands a request. `None`: it is not there as a whole yet.
fn asked(request: &[u8]) -> Option<Asked> {
    const BAD: Asked = Asked::Refused("400 Bad Request");
    let line_end = request.iter().position(|&byte| byte == b'\n');
    let Some(line_end) = line_end else {
        return (request.len() > REQUEST_MAX).then_some(Asked::Refused("414 URI Too Long"));
    };
    let Ok(line) = std::str::from_utf8(&request[..line_end]) else { return Some(BAD) };
    let words: Vec<&str> = line.trim_end_matches('\r').split(' ').collect();
    let &[method, target, "HTTP/1.0" | "HTTP/1.1"] = words.as_slice() else { return Some(BAD) };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
    if !is_method || !target.starts_with('/') {
        return Some(BAD);
    }
    // The headers are not looked at, but an answer in the middle of them would be lost.
    let is_whole = request.windows(4).any(|it| it == b"\r\n\r\n")
        || request.windows(2).any(|it| it == b"\n\n");
    if !is_whole {
        let too_long = Asked::Refused("431 Request Header Fields Too Large");
        return (request.len() > REQUEST_MAX).then_some(too_long);
    }
    let head = method == "HEAD";
    let path = target.split('?').next().unwrap_or_default();
    Some(match (method, path) {
        ("GET" | "HEAD", "/health" | "/healthz") => Asked::Health { head },
        ("GET" | "HEAD", "/metrics") => Asked::Metrics { head },
        ("GET" | "HEAD", _) => Asked::Refused("404 Not Found"),
        _ => Asked::Refused("405 Method Not Allowed"),
    })
}

fn answer(asked: Asked, status: &Status) -> Vec<u8> {
    const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
    let (code, kind, body, head) = match asked {
        Asked::Health { head } => {
            let (is_healthy, body) = status.health();
            let code = if is_healthy { "200 OK" } else { "503 Service Unavailable" };
            (code, "application/json", body, head)
        }
        Asked::Metrics { head } => ("200 OK", PROMETHEUS, status.metrics(), head),
        Asked::Refused(code) => {
            (code, "text/plain", format!("{code}: GET /health or GET /metrics\n"), false)
        }
    };
    let length = body.len();
    let body = if head { "" } else { &body };
    let text = format!(
        "HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nAllow: GET, HEAD\r\n\
         Cache-Control: no-store\r\nConnection: close\r\n\r\n{body}"
    );
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_understood_when_they_are_whole() {
        let health = Some(Asked::Health { head: false });
        assert_eq!(asked(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"), health);
        assert_eq!(asked(b"GET /healthz?verbose HTTP/1.0\r\n\r\n"), health);
        assert_eq!(asked(b"GET /health HTTP/1.1\n\n"), health);
        assert_eq!(asked(b"HEAD /metrics HTTP/1.1\r\n\r\n"), Some(Asked::Metrics { head: true }));
        for part in [
            &b""[..],
            b"GET /hea",
            b"GET /health HTTP/1.1\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\n",
        ] {
            assert_eq!(asked(part), None, "{}", String::from_utf8_lossy(part));
        }
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let code = |request: &[u8]| match asked(request) {
            Some(Asked::Refused(code)) => code[..3].to_owned(),
            other => format!("{other:?}"),
        };
        assert_eq!(code(b"GET / HTTP/1.1\r\n\r\n"), "404");
        assert_eq!(code(b"POST /health HTTP/1.1\r\n\r\n"), "405");
        for garbage in [
            &b"\x16\x03\x01\n"[..],
            b"\n",
            b"hello\n",
            b"GET /health HTTP/2\n",
            b"get /health HTTP/1.1\n",
            b"GET  HTTP/1.1\n",
            b"\xff\xfe / HTTP/1.1\n",
        ] {
            assert_eq!(code(garbage), "400", "{}", String::from_utf8_lossy(garbage));
        }
        assert_eq!(code(&[b'x'; REQUEST_MAX + 1]), "414");
        let long = [b"GET /health HTTP/1.1\r\n".as_slice(), &[b'x'; REQUEST_MAX]].concat();
        assert_eq!(code(&long), "431");
    }
}
