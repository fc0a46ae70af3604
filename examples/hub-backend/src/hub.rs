//! The hub: a switch in the process of rank 0.
//!
//! The hub knows no collectives. In every call each rank sends a part for each rank, and gets a part from
//! each. When all ranks have called, the hub compares their calls and distributes the parts.

use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use drumline::{Reason, backend::Signature};

use crate::wire::{BODY_BYTES_MAX, Frame, Kind, join, split};

/// Time limit for a new connection to identify itself, and for a rank to accept a frame.
const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) const TOKEN_BYTES: usize = 16;

#[derive(Debug)]
struct Hub {
    /// The connection to each rank.
    lines: Vec<Mutex<TcpStream>>,
    ranks: Mutex<Ranks>,
}

#[derive(Debug)]
struct Ranks {
    /// What each rank has sent for the present call: its signature and its parts.
    calls: Vec<Option<Vec<u8>>>,
    left: Vec<bool>,
    failed: bool,
}

/// Frames with their receivers.
type Post = Vec<(usize, Frame)>;

/// Waits until all ranks have connected, then serves them until they leave.
///
/// # Errors
///
/// Ranks have not connected in time; the text names them.
pub(crate) fn open(
    listener: TcpListener,
    token: [u8; TOKEN_BYTES],
    world_size: usize,
    deadline: Instant,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    let (arrive, arrivals) = mpsc::channel();
    let closed = Arc::new(AtomicBool::new(false));
    let door = {
        let closed = closed.clone();
        thread::Builder::new().name("hub-door".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                if closed.load(Ordering::SeqCst) {
                    break;
                }
                let met = stream.and_then(|stream| Ok((meet(&stream, &token)?, stream)));
                // Other connections are dropped. The receiver may have gone; see the check of `closed`.
                if let Ok(met) = met {
                    let _ = arrive.send(met);
                }
            }
        })?
    };
    let mut lines: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
    while lines.iter().any(Option::is_none) {
        let left = deadline.saturating_duration_since(Instant::now());
        match arrivals.recv_timeout(left) {
            Ok((rank, line)) if rank < world_size && lines[rank].is_none() => {
                lines[rank] = Some(line);
            }
            Ok(_) => {}
            Err(_) => break,
        }
    }
    closed.store(true, Ordering::SeqCst);
    // A last connection, so that the thread returns from `accept` and sees `closed`.
    let knock = TcpStream::connect(address);
    if knock.is_ok() {
        let _ = door.join();
    }
    let missing: Vec<usize> = (0..world_size).filter(|rank| lines[*rank].is_none()).collect();
    if !missing.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("ranks {missing:?} have not come to the hub at {address} in time"),
        ));
    }
    serve(lines.into_iter().flatten().collect())
}

/// Returns the rank of a new connection.
fn meet(stream: &TcpStream, token: &[u8]) -> io::Result<usize> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    let hello = Frame::read(stream, TOKEN_BYTES as u64)?;
    match hello.kind == Kind::Hello && hello.body == token {
        true => stream.set_read_timeout(None).map(|()| hello.rank),
        false => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

fn serve(lines: Vec<TcpStream>) -> io::Result<()> {
    let ranks = lines.len();
    let readers = lines.iter().map(TcpStream::try_clone).collect::<io::Result<Vec<_>>>()?;
    let all = Ranks { calls: vec![None; ranks], left: vec![false; ranks], failed: false };
    let hub = Arc::new(Hub {
        lines: lines.into_iter().map(Mutex::new).collect(),
        ranks: Mutex::new(all),
    });
    hub.deliver((0..ranks).map(|rank| (rank, Frame::new(Kind::Hello, 0, []))).collect());
    for (rank, reader) in readers.into_iter().enumerate() {
        let hub = hub.clone();
        thread::Builder::new().name(format!("hub-{rank}")).spawn(move || {
            while let Ok(frame) = Frame::read(&reader, BODY_BYTES_MAX) {
                hub.deliver(hub.lock().on_frame(rank, frame));
            }
            hub.deliver(hub.lock().on_end(rank));
        })?;
    }
    Ok(())
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, Ranks> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, post: Post) {
        for (rank, frame) in post {
            let line = self.lines[rank].lock().unwrap_or_else(PoisonError::into_inner);
            if frame.write(&*line).is_err() {
                // The thread that reads from this line notices, and tells the other ranks.
                let _ = line.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Ranks {
    fn on_frame(&mut self, rank: usize, frame: Frame) -> Post {
        match frame.kind {
            // All ranks have got, or are getting, the reason.
            Kind::Call | Kind::Late if self.failed => Vec::new(),
            Kind::Call => {
                self.calls[rank] = Some(frame.body);
                self.look()
            }
            Kind::Message if frame.rank < self.calls.len() => {
                vec![(frame.rank, Frame { rank, ..frame })]
            }
            Kind::Late if self.calls[rank].is_some() => self.on_late(rank),
            Kind::Left => {
                self.left[rank] = true;
                let mut post = self.to_all(&Frame::new(Kind::Left, rank, []));
                post.extend(self.look());
                post
            }
            Kind::Failed => self.fail(Frame { rank, ..frame }),
            _ => Vec::new(),
        }
    }

    fn on_end(&mut self, rank: usize) -> Post {
        match self.left[rank] {
            true => Vec::new(),
            false => self.fail(Frame::new(Kind::Exited, rank, [])),
        }
    }

    /// Answers the present call if it is complete, or fails if it cannot complete.
    fn look(&mut self) -> Post {
        let ranks = self.calls.len();
        let gone = (0..ranks).find(|rank| self.left[*rank] && self.calls[*rank].is_none());
        if let (Some(gone), true) = (gone, self.calls.iter().any(Option::is_some)) {
            return self.fail(Frame::new(Kind::Needed, gone, []));
        }
        if self.calls.iter().any(Option::is_none) {
            return Vec::new();
        }
        if let Some(mismatch) = self.mismatch() {
            return mismatch;
        }
        let calls: Vec<Vec<u8>> = self.calls.iter_mut().filter_map(Option::take).collect();
        let parts: Vec<Vec<&[u8]>> =
            calls.iter().map(|call| split(call.get(Signature::BYTES..).unwrap_or(&[]))).collect();
        let answer = |to: usize| {
            let part_of = |parts: &Vec<&[u8]>| -> Option<usize> {
                // One part for all ranks, or one for each.
                Some(if parts.len() == 1 { 0 } else { to }).filter(|at| *at < parts.len())
            };
            let own = parts.iter().map(|parts| part_of(parts).map_or(&[][..], |at| parts[at]));
            (to, Frame::new(Kind::Answer, 0, join(own)))
        };
        (0..ranks).rev().map(answer).collect() // rank 0 last, see `to_all`
    }

    /// If ranks made different calls: tells each rank the call of another one.
    fn mismatch(&mut self) -> Option<Post> {
        let signature = |rank: &usize| self.calls[*rank].as_ref()?.get(..Signature::BYTES);
        let present: Vec<usize> =
            (0..self.calls.len()).filter(|rank| self.calls[*rank].is_some()).collect();
        let told = present.iter().map(|rank| {
            let other = present.iter().find(|other| signature(other) != signature(rank))?;
            Some((*rank, Frame::new(Kind::Mismatch, *other, signature(other)?)))
        });
        let told: Post = told.collect::<Option<_>>()?;
        self.failed = true;
        Some(told)
    }

    fn on_late(&mut self, rank: usize) -> Post {
        let (here, missing): (Vec<usize>, Vec<usize>) =
            (0..self.calls.len()).partition(|rank| self.calls[*rank].is_some());
        let mismatch = self.mismatch();
        self.failed = true;
        let list: Vec<u8> = missing.iter().flat_map(|rank| (*rank as u32).to_le_bytes()).collect();
        let late = format!("ranks {missing:?} have not made the call that ranks {here:?} made");
        let told = here.into_iter().map(|to| (to, Frame::new(Kind::Missing, 0, list.clone())));
        let told = mismatch.unwrap_or_else(|| told.collect()).into_iter();
        let culprit = missing.first().copied();
        let late = Frame::failed(rank, culprit, Reason::Timeout, &late);
        told.chain(missing.iter().map(|to| (*to, late.clone()))).collect()
    }

    /// Only the first failure counts.
    fn fail(&mut self, frame: Frame) -> Post {
        match std::mem::replace(&mut self.failed, true) {
            true => Vec::new(),
            false => self.to_all(&frame),
        }
    }

    /// Rank 0 comes last: when it leaves, its process ends, and the hub with it.
    fn to_all(&self, frame: &Frame) -> Post {
        (0..self.calls.len()).rev().map(|rank| (rank, frame.clone())).collect()
    }
}
