//! The ranks of one host meet at a Unix socket with an abstract name, which the first rank opens for a moment.
//!
//! ```text
//! rank 3 ── "3" ──► rank 0
//!        ◄─ word ──
//! ```
//!
//! Both ends look which user the other one is.

use std::{
    io::{self, BufRead, BufReader, ErrorKind, Read, Write},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    thread,
    time::Duration,
};

use rustix::{net::sockopt::socket_peercred, process::geteuid};

use super::{agreed::WORD_MAX, patience::Patience};
use crate::{Error, Result};

/// Where the ranks of a job meet. Another job of this host has another name.
#[derive(Debug)]
pub(super) struct MeetingPoint(String);

/// An abstract name has at most 107 bytes.
const NAME_MAX: usize = 80;

impl MeetingPoint {
    /// The meeting point of this user's job `job`. The end of long names tells jobs apart.
    pub(super) fn of(job: &str) -> MeetingPoint {
        let bytes = job.as_bytes();
        let end = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(NAME_MAX)..]);
        let end: String = end.chars().filter(char::is_ascii).collect();
        MeetingPoint(format!("drumline-env-{}-{end}", geteuid().as_raw()))
    }

    fn address(&self) -> io::Result<SocketAddr> {
        SocketAddr::from_abstract_name(self.0.as_bytes())
    }

    /// Tells `word` to the ranks 1 to `size` − 1, and returns when all have heard it.
    pub(super) fn tell(&self, word: &str, size: usize, patience: Patience) -> Result<()> {
        let listener = self.address().and_then(|address| UnixListener::bind_addr(&address));
        let listener =
            listener.map_err(Error::system(format!("listen at the Unix socket @{}", self.0)))?;
        let mut missing: Vec<usize> = (1..size).collect();
        while !missing.is_empty() {
            if !patience.wait_for(&listener) {
                let list = missing.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                return Err(patience
                    .over(format!("of the ranks 1 to {}, these have not come: {list}", size - 1)));
            }
            // A peer that goes away, or says nonsense, counts as one that has not come.
            if let Ok((stream, _)) = listener.accept()
                && let Ok(Some(rank)) = answer(stream, word)
            {
                missing.retain(|&it| it != rank);
            }
        }
        Ok(())
    }

    /// What the first rank tells.
    pub(super) fn hear(&self, rank: usize, patience: Patience) -> Result<String> {
        let mut pause = Duration::from_millis(1);
        loop {
            let heard = self.address().and_then(|address| UnixStream::connect_addr(&address));
            match heard.and_then(|stream| ask(stream, rank, patience)) {
                Ok(Some(word)) => return Ok(word),
                Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                    return Err(Error::not_agreed(format!(
                        "the Unix socket @{} belongs to another user of this host",
                        self.0
                    )));
                }
                // It is not there yet; or it serves the program that ran before this one.
                Ok(None) | Err(_) if patience.is_over() => {
                    return Err(patience.over("rank 0 has not come".into()));
                }
                Ok(None) | Err(_) => {}
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

const PAUSE_MAX: Duration = Duration::from_millis(50);

/// How long a peer may take for its number. It writes it as soon as it is connected.
const GREETING: Duration = Duration::from_secs(5);

/// The peer's rank, if it is of this user.
fn answer(stream: UnixStream, word: &str) -> io::Result<Option<usize>> {
    if !is_own(&stream)? {
        return Ok(None);
    }
    stream.set_read_timeout(Some(GREETING))?;
    let mut line = String::new();
    BufReader::new((&stream).take(20)).read_line(&mut line)?;
    let Ok(rank) = line.trim_end().parse() else { return Ok(None) };
    writeln!(&stream, "{word}")?;
    Ok(Some(rank))
}

/// `None`: the other end closed before it answered.
fn ask(mut stream: UnixStream, rank: usize, patience: Patience) -> io::Result<Option<String>> {
    if !is_own(&stream)? {
        return Err(ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(patience.left().max(Duration::from_millis(1))))?;
    writeln!(stream, "{rank}")?;
    let mut line = String::new();
    BufReader::new(stream.take(WORD_MAX as u64 + 1)).read_line(&mut line)?;
    Ok(line.strip_suffix('\n').map(str::to_owned))
}

fn is_own(stream: &UnixStream) -> io::Result<bool> {
    Ok(socket_peercred(stream)?.uid == geteuid())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(name: &str) -> MeetingPoint {
        MeetingPoint::of(&format!("test-{}-{name}", std::process::id()))
    }

    #[test]
    fn all_ranks_hear_what_the_first_one_tells_whoever_comes_first() {
        let patience = Patience::new(Duration::from_secs(60));
        for first_comes_last in [false, true] {
            let point = point(&format!("tell-{first_comes_last}"));
            thread::scope(|scope| {
                let peers = || {
                    [1, 2, 3].map(|rank| {
                        let point = &point;
                        scope.spawn(move || point.hear(rank, patience))
                    })
                };
                let (peers, told) = match first_comes_last {
                    true => (peers(), point.tell("word", 4, patience)),
                    false => {
                        let told = scope.spawn(|| point.tell("word", 4, patience));
                        (peers(), told.join().unwrap())
                    }
                };
                told.unwrap();
                for peer in peers {
                    assert_eq!(peer.join().unwrap().unwrap(), "word");
                }
            });
        }
    }

    #[test]
    fn who_does_not_come_is_named() {
        let point = point("missing");
        let patience = Patience::new(Duration::from_millis(300));
        let error = thread::scope(|scope| {
            let peer = scope.spawn(|| point.hear(2, patience));
            let error = point.tell("word", 4, patience).unwrap_err().to_string();
            assert_eq!(peer.join().unwrap().unwrap(), "word");
            error
        });
        assert!(
            error.contains("these have not come: 1, 3") && error.contains("--timeout"),
            "{error}"
        );
        let error = point.hear(1, Patience::new(Duration::ZERO)).unwrap_err().to_string();
        assert!(error.contains("rank 0 has not come"), "{error}");
    }

    #[test]
    fn two_ranks_cannot_be_the_first_one() {
        let point = point("twice");
        let _first = UnixListener::bind_addr(&point.address().unwrap()).unwrap();
        let error = point.tell("word", 2, Patience::new(Duration::from_secs(60))).unwrap_err();
        assert!(error.to_string().contains("@drumline-env-"), "{error}");
    }

    #[test]
    fn strangers_and_nonsense_count_as_nobody() {
        let point = point("nonsense");
        let patience = Patience::new(Duration::from_secs(60));
        thread::scope(|scope| {
            let told = scope.spawn(|| point.tell("word", 2, patience));
            let connect = || loop {
                if let Ok(stream) = UnixStream::connect_addr(&point.address().unwrap()) {
                    break stream;
                }
                thread::yield_now();
            };
            drop(connect());
            connect().write_all(b"nobody\n").unwrap();
            connect().write_all(b"7\n").unwrap();
            assert_eq!(point.hear(1, patience).unwrap(), "word");
            told.join().unwrap().unwrap();
        });
    }
}
