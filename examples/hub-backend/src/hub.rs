//! The hub: a switch in the process of rank 0.
//!
//! It knows nothing of operations. In every call each rank brings a part for each rank, and gets a
//! part from each. When all have called, it compares what they called and deals the parts out.

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

use drumline::backend::Signature;

use crate::wire::{BODY_BYTES_MAX, Frame, Kind, NOBODY, join, split};

/// How long a stranger may take to say who it is, and a rank to take what it is sent.
const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) const TOKEN_BYTES: usize = 16;

#[derive(Debug)]
struct Hub {
    /// To each rank.
    lines: Vec<Mutex<TcpStream>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What each rank brings to the call at hand: its signature and its parts.
    calls: Vec<Option<Vec<u8>>>,
    left: Vec<bool>,
    failed: bool,
}

/// Frames, and to whom they go.
type Post = Vec<(usize, Frame)>;

/// Waits until all ranks have connected, and then serves them until they go.
///
/// # Errors
///
/// Who has not come in time.
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
                // A stranger is turned away; that no more are wanted is seen above.
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
    // Opens the door once more, so that it sees that it is closed.
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

/// Which rank that is.
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
    let state = State { calls: vec![None; ranks], left: vec![false; ranks], failed: false };
    let hub = Arc::new(Hub {
        lines: lines.into_iter().map(Mutex::new).collect(),
        state: Mutex::new(state),
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
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, post: Post) {
        for (rank, frame) in post {
            let line = self.lines[rank].lock().unwrap_or_else(PoisonError::into_inner);
            if frame.write(&*line).is_err() {
                // Whoever reads from it notices, and tells the others.
                let _ = line.shutdown(Shutdown::Both);
            }
        }
    }
}

impl State {
    fn on_frame(&mut self, rank: usize, frame: Frame) -> Post {
        match frame.kind {
            // All have been told, or are just being told, why.
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

    /// A call is complete, or never will be.
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

    /// Tells each rank of one that called something else.
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
        let culprit = missing.first().map_or(NOBODY, |rank| *rank as u64);
        let told = here.into_iter().map(|to| (to, Frame::new(Kind::Missing, 0, list.clone())));
        let told = mismatch.unwrap_or_else(|| told.collect()).into_iter();
        let late = Frame { number: culprit, ..Frame::new(Kind::Failed, rank, late) };
        told.chain(missing.iter().map(|to| (*to, late.clone()))).collect()
    }

    /// Only the first failure counts.
    fn fail(&mut self, frame: Frame) -> Post {
        match std::mem::replace(&mut self.failed, true) {
            true => Vec::new(),
            false => self.to_all(&frame),
        }
    }

    /// Rank 0 comes last: when it has gone, the hub goes with its process.
    fn to_all(&self, frame: &Frame) -> Post {
        (0..self.calls.len()).rev().map(|rank| (rank, frame.clone())).collect()
    }
}
