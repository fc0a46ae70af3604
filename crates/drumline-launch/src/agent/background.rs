//! The thread that speaks with the store in which the hosts meet. A store may be slow, and the launcher must hear
//! signals and exits meanwhile.

use std::{
    collections::VecDeque,
    io::{self, PipeReader, Write as _},
    os::fd::{AsFd, BorrowedFd},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use drumline::Error as StoreError;
use rustix::io::ioctl_fionbio;

use super::keys::{BEAT, COUNT, HOST, PLAN, REPORT, WORLD, key};
use super::{
    generation,
    meeting::{self, Own, Place},
};
use crate::{Error, Result, job::Meeting, launch::Launch, lease::BootTime};

/// What to write to the store and what to read from it, in this order.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// What this host reports, without its beat, if that has changed.
    pub(super) report: Option<Vec<u8>>,
    pub(super) beat: u64,
    /// Whether to read how many hosts have come.
    pub(super) counts: bool,
    pub(super) hosts: Vec<u64>,
    pub(super) reports: Vec<u64>,
    /// The world whose ranks look for the place where they meet.
    pub(super) announcement_of: Option<u64>,
}

/// What was read.
#[derive(Debug)]
pub(super) struct Heard {
    /// When the round began: the others have heard of this host until then, at least.
    pub(super) began: BootTime,
    pub(super) plan: Option<Vec<u8>>,
    pub(super) count: Option<u64>,
    pub(super) hosts: Vec<(u64, Vec<u8>)>,
    pub(super) reports: Vec<(u64, Option<Told>)>,
    pub(super) announcement: Option<Vec<u8>>,
}

/// What a host reports, without its beat, and its beat.
pub(super) type Told = (Vec<u8>, u64);

/// How this host has come to the others.
#[derive(Debug)]
pub(super) struct Arrival {
    /// The number of this host. No other has it, and it has no other one until it comes anew.
    pub(super) number: u64,
    pub(super) address: std::net::IpAddr,
    pub(super) is_hosted: bool,
    pub(super) beat_every: Duration,
    pub(super) name: String,
}

#[derive(Debug)]
pub(super) enum Message {
    /// The store is open, or cannot be opened.
    Opened(Result<()>),
    Arrived(drumline::Result<Arrival>),
    Heard(drumline::Result<Heard>),
    /// The plan that is in the store now.
    Planned(drumline::Result<Option<Vec<u8>>>),
}

#[derive(Debug)]
pub(super) enum Request {
    /// Writes a value under a key, with the next round. Where that fails, it is written with a later one.
    Write(String, Vec<u8>),
    Round(Round),
    WritePlan {
        expected: Option<Vec<u8>>,
        plan: Vec<u8>,
    },
    /// Comes anew, under another number.
    Arrive,
}

/// The launcher's end.
#[derive(Debug)]
pub(super) struct Background {
    requests: Sender<Request>,
    messages: Receiver<Message>,
    ready: PipeReader,
}

impl Background {
    /// Starts the thread, which first opens the store. It ends when this is dropped.
    pub(super) fn start(
        launch: &Launch<'_>,
        meeting: &Meeting,
        deadline: Instant,
    ) -> Result<Background> {
        let (requests, requested) = channel();
        let (sender, messages) = channel();
        let (ready, mut wake) = io::pipe().map_err(Error::call("pipe2", "make a pipe"))?;
        ioctl_fionbio(&ready, true).map_err(Error::system("set up a pipe"))?;
        ioctl_fionbio(&wake, true).map_err(Error::system("set up a pipe"))?;
        let (own, meeting) = (Own::of(launch), meeting.clone());
        let work = move || {
            let mut tell = |message| {
                let _ = sender.send(message);
                // If the pipe is full, the launcher has enough to read.
                let _ = wake.write(&[0]);
            };
            match meeting::open(&own, &meeting, deadline) {
                Ok(place) => {
                    tell(Message::Opened(Ok(())));
                    serve(place, &requested, &mut tell);
                }
                Err(error) => tell(Message::Opened(Err(error))),
            }
        };
        thread::Builder::new()
            .name("drumline-hosts".into())
            .spawn(work)
            .map_err(Error::call("clone3", "start a thread"))?;
        Ok(Background { requests, messages, ready })
    }

    pub(super) fn ask(&self, request: Request) {
        // The thread ends only after an error, which it has told.
        let _ = self.requests.send(request);
    }

    /// What the thread has told since.
    pub(super) fn told(&mut self) -> Option<Message> {
        let mut bytes = [0; 64];
        while io::Read::read(&mut self.ready, &mut bytes).is_ok_and(|count| count > 0) {}
        self.messages.try_recv().ok()
    }
}

/// Readable once the thread has told something.
impl AsFd for Background {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

/// Carries out what the launcher asks for, until it asks for nothing more.
fn serve(mut place: Place, requested: &Receiver<Request>, tell: &mut impl FnMut(Message)) {
    let (mut number, mut generation, mut unwritten) = (0, None, VecDeque::new());
    for request in requested {
        match request {
            Request::Arrive => {
                // That was said under another number.
                unwritten.clear();
                let found = match generation {
                    Some(generation) => Ok(generation),
                    None => generation::current(&mut place.store),
                };
                let arrived = found.and_then(|found| {
                    generation = Some(found);
                    generation::enter(&mut place.store, found);
                    arrive(&place)
                });
                number = arrived.as_ref().map_or(0, |arrival| arrival.number);
                tell(Message::Arrived(arrived));
            }
            Request::Write(key, value) => unwritten.push_back((key, value)),
            Request::Round(round) => {
                let written = write(&place, &mut unwritten);
                tell(Message::Heard(written.and_then(|()| hear(&place, number, round))));
            }
            Request::WritePlan { expected, plan } => {
                let written = place.store.replace(PLAN, expected.as_deref(), &plan);
                let planned = written.and_then(|is_ours| match is_ours {
                    true => Ok(Some(plan)),
                    false => Ok(place.store.read(&[PLAN.to_owned()])?.pop().flatten()),
                });
                tell(Message::Planned(planned));
            }
        }
    }
}

fn arrive(place: &Place) -> drumline::Result<Arrival> {
    let count = place.store.add(COUNT, 1)?;
    let number = u64::try_from(count).ok().filter(|&number| number > 0);
    let number = number.ok_or_else(|| {
        StoreError::store(
            &place.name,
            "count hosts",
            format!("somebody has set the number to {count}: start with another --rdzv-id"),
        )
    })?;
    Ok(Arrival {
        number,
        address: place.address,
        is_hosted: place.is_hosted,
        beat_every: place.beat_every,
        name: place.name.clone(),
    })
}

/// Writes what was not written yet.
fn write(place: &Place, unwritten: &mut VecDeque<(String, Vec<u8>)>) -> drumline::Result<()> {
    while let Some((key, value)) = unwritten.front() {
        place.store.set(key, value)?;
        unwritten.pop_front();
    }
    Ok(())
}

fn hear(place: &Place, number: u64, round: Round) -> drumline::Result<Heard> {
    let began = BootTime::now();
    let store = &place.store;
    if let Some(report) = round.report {
        store.set(&key(REPORT, number), &report)?;
    }
    store.set(&key(BEAT, number), round.beat.to_string().as_bytes())?;

    let count = if round.counts { u64::try_from(store.add(COUNT, 0)?).ok() } else { None };
    let mut keys = vec![PLAN.to_owned()];
    keys.extend(round.hosts.iter().map(|&host| key(HOST, host)));
    keys.extend(round.reports.iter().flat_map(|&host| [key(REPORT, host), key(BEAT, host)]));
    keys.extend(round.announcement_of.map(|world| key(WORLD, world)));
    let mut values = store.read(&keys)?.into_iter();
    let mut next = || values.next().flatten();
    let plan = next();
    let hosts = round.hosts.into_iter().filter_map(|host| Some((host, next()?))).collect();
    let report = |host| {
        let (report, beat) = (next(), next());
        let beat = beat.and_then(|beat| String::from_utf8(beat).ok()?.parse().ok());
        (host, report.zip(beat))
    };
    let reports = round.reports.into_iter().map(report).collect();
    let announcement = round.announcement_of.and_then(|_| values.next().flatten());
    Ok(Heard { began, plan, count, hosts, reports, announcement })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use drumline::{
        auth::Secret,
        store::{HashStore, Store as _},
    };

    use super::*;
    use crate::agent::signed::Signed;

    /// A store may be away, or full, when a host says who it is or where ranks meet. It says that once only.
    #[test]
    fn what_the_store_did_not_take_is_written_later() {
        let keys = HashStore::with_limit(2_000);
        let clone = keys.try_clone().unwrap();
        let place = Place {
            store: Signed::over(clone, Secret::random().unwrap(), String::new()),
            address: Ipv4Addr::LOCALHOST.into(),
            is_hosted: false,
            beat_every: Duration::ZERO,
            name: "a store".into(),
        };
        let (requests, requested) = channel();
        let (sender, messages) = channel();
        let server = thread::spawn(move || {
            serve(place, &requested, &mut |message| drop(sender.send(message)));
        });
        let ask = |request| requests.send(request).unwrap();
        let round = || {
            ask(Request::Round(Round::default()));
            matches!(messages.recv().unwrap(), Message::Heard(Ok(_)))
        };
        ask(Request::Arrive);
        assert!(matches!(messages.recv().unwrap(), Message::Arrived(Ok(_))));
        assert!(round());
        keys.set("rubbish", &[0; 1_500]).unwrap();
        for kind in [HOST, WORLD] {
            ask(Request::Write(key(kind, 1), vec![1; 300]));
        }
        assert!(!round() && !round());
        keys.delete_key("rubbish").unwrap();
        assert!(round());
        assert!(keys.check(&["0/host/1", "0/world/1"]).unwrap());
        drop(requests);
        server.join().unwrap();
    }
}
