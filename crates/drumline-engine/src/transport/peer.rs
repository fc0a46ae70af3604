//! One peer: its streams, and how two ranks agree on the streams to use.
//!
//! ```text
//! caller                                          callee
//! wants the peer
//! opens all streams ────────────────────────────▶ if it calls, too, and is the higher rank: keeps
//!                                                 them aside, its own will do
//!                       ◀────────────────── beat  else: takes them; its own, if any, are dropped
//! may send
//! ```
//!
//! The callee speaks first, on the control stream: a beat, or its goodbye or abort if it no longer takes
//! part. The caller sends no data before that. So nothing is lost when two ranks call each other at the same
//! time.

use std::time::Instant;

use drumline_schedule::step::Rank;

use super::{
    control_link::{ControlLink, PeerState},
    data_link::DataLink,
    duplex::Duplex,
    points::PointLink,
    striped::Striped,
    waits::Waits,
    wire::Control,
};
use crate::error::Cause;

/// The streams between two ranks.
#[derive(Debug)]
pub struct Bundle<S> {
    /// Goodbyes, failures, and news of waiting ranks.
    pub control: S,
    /// The messages of collectives.
    pub data: Striped<S>,
    /// Messages from rank to rank, outside of collectives.
    pub points: S,
}

/// What one of these streams carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Goodbyes, failures, and news of waiting ranks. Its owner reads it whenever it waits; data never holds
    /// it up.
    Control,
    /// Messages from rank to rank, outside of collectives.
    Points,
    /// The messages of collectives. Several streams are told apart by number.
    Data(u8),
}

/// The streams of a [`Bundle`] while they are opened one by one.
#[derive(Debug)]
pub struct Opening<S> {
    control: Option<S>,
    data: Vec<Option<S>>,
    points: Option<S>,
}

impl<S> Opening<S> {
    /// A bundle of which no stream is open yet, with this number of streams for collectives.
    pub fn new(data_streams: usize) -> Opening<S> {
        Opening { control: None, data: (0..data_streams).map(|_| None).collect(), points: None }
    }

    /// The channels that must be opened.
    pub fn channels(data_streams: usize) -> impl Iterator<Item = Channel> {
        let data = (0..data_streams).filter_map(|number| number.try_into().ok());
        [Channel::Control, Channel::Points].into_iter().chain(data.map(Channel::Data))
    }

    /// The place for a channel's stream. `None`: the bundle has no such channel.
    pub fn place(&mut self, channel: Channel) -> Option<&mut Option<S>> {
        match channel {
            Channel::Control => Some(&mut self.control),
            Channel::Points => Some(&mut self.points),
            Channel::Data(number) => self.data.get_mut(usize::from(number)),
        }
    }

    /// Whether all streams are open.
    pub fn is_complete(&self) -> bool {
        let Opening { control, data, points } = self;
        control.is_some() && points.is_some() && data.iter().all(Option::is_some)
    }

    /// The bundle, once all streams are open. Until then nothing changes.
    pub fn take(&mut self) -> Option<Bundle<S>> {
        if !self.is_complete() {
            return None;
        }
        let data: Option<Vec<S>> = self.data.iter_mut().map(Option::take).collect();
        let (control, points) = (self.control.take()?, self.points.take()?);
        Some(Bundle { control, data: Striped::new(data?), points })
    }
}

/// A peer that is connected, or that this rank wants to reach.
#[derive(Debug)]
pub(crate) struct Peer<S> {
    pub(crate) rank: Rank,
    pub(crate) control: ControlLink<S>,
    pub(crate) data: DataLink<S>,
    pub(crate) points: PointLink<S>,
    pub(crate) bond: Bond<S>,
    /// The streams that the peer has opened while this rank, the higher one, calls it.
    aside: Option<Bundle<S>>,
    /// When one of its streams was first seen broken.
    pub(crate) broken_since: Option<Instant>,
}

/// How far two ranks have come with their connection.
#[derive(Debug)]
pub(crate) enum Bond<S> {
    /// This rank calls the peer.
    Called,
    /// This rank has opened streams to the peer. The control stream is in use.
    Offered { data: Striped<S>, points: S },
    /// Both ranks know which streams they use.
    Agreed,
    /// The call has failed.
    Unreachable(Cause),
}

impl<S: Duplex> Peer<S> {
    /// A peer that this rank calls.
    pub(crate) fn called(rank: Rank) -> Peer<S> {
        Peer {
            rank,
            control: ControlLink::new(rank),
            data: DataLink::new(rank),
            points: PointLink::new(rank),
            bond: Bond::Called,
            aside: None,
            broken_since: None,
        }
    }

    /// A peer that is connected from the start.
    pub(crate) fn near(rank: Rank, streams: Bundle<S>) -> Peer<S> {
        let mut peer = Peer::called(rank);
        peer.control.is_near = true;
        peer.use_all(streams);
        peer
    }

    fn use_all(&mut self, Bundle { control, data, points }: Bundle<S>) {
        self.control.connect(control);
        self.data.connect(data);
        self.points.connect(points);
        self.bond = Bond::Agreed;
    }

    pub(crate) fn is_agreed(&self) -> bool {
        matches!(self.bond, Bond::Agreed)
    }

    /// The peer has opened these streams. Returns whether they are in use from now on.
    pub(crate) fn take(
        &mut self,
        mut streams: Bundle<S>,
        is_higher: bool,
        farewell: Option<&Control>,
    ) -> bool {
        match self.bond {
            // This call of the peer crossed with a call of this rank, and the two have agreed already; or the old
            // connection broke. In that case the peer wants to know why.
            Bond::Agreed => {
                if let Some(word) = farewell
                    && let Err(error) = streams.control.write_all(&word.encode())
                {
                    tracing::debug!(peer = self.rank, %error, "called and did not wait for the answer");
                }
                return false;
            }
            // The peer is the lower rank. It waits for this rank's streams, or has accepted them already.
            Bond::Called | Bond::Offered { .. } if is_higher => {
                self.aside = Some(streams);
                farewell.into_iter().for_each(|word| self.say_aside(word));
                return false;
            }
            Bond::Called | Bond::Offered { .. } | Bond::Unreachable(_) => {}
        }
        self.use_all(streams);
        self.control.say(farewell.unwrap_or(&Control::Beat));
        if let Some(Control::Goodbye(_)) = farewell {
            self.data.end();
            self.points.end();
        }
        true
    }

    /// This rank has opened `streams` to the peer. Returns whether they are still wanted.
    pub(crate) fn offer(&mut self, streams: Bundle<S>, farewell: Option<&Control>) -> bool {
        if !matches!(self.bond, Bond::Called) {
            return false;
        }
        let Bundle { control, data, points } = streams;
        self.control.connect(control);
        self.bond = Bond::Offered { data, points };
        if let Some(word) = farewell {
            self.part(word);
        }
        true
    }

    /// The call has failed. Returns whether the streams that the peer has opened are in use now.
    pub(crate) fn fail(&mut self, cause: Cause, farewell: Option<&Control>) -> bool {
        if !matches!(self.bond, Bond::Called) {
            return false;
        }
        self.bond = Bond::Unreachable(cause);
        match self.aside.take() {
            Some(streams) => self.take(streams, true, farewell),
            None => false,
        }
    }

    /// Looks whether the peer has answered an offer. If so, it is connected. Returns whether it has.
    pub(crate) fn agree(&mut self) -> bool {
        self.control.read();
        if !self.control.has_spoken() {
            return false;
        }
        match std::mem::replace(&mut self.bond, Bond::Agreed) {
            Bond::Offered { data, points } => {
                self.data.connect(data);
                self.points.connect(points);
                self.aside = None;
                true
            }
            other => {
                self.bond = other;
                false
            }
        }
    }

    /// Tells a new peer what the others were told before it was connected.
    pub(crate) fn greet(&mut self, waits: &Option<Waits>) {
        if let Some(waits) = waits {
            self.control.tell(waits);
        }
    }

    /// Sends the last message of this rank: a goodbye or an abort.
    pub(crate) fn part(&mut self, word: &Control) {
        if let Control::Goodbye(_) = word {
            // The peer expects the end of the data before the goodbye.
            self.data.end();
            self.points.end();
            if let Bond::Offered { data, points } = &mut self.bond {
                let ended = [data.end(), points.end()];
                if let Some(error) = ended.into_iter().find_map(Result::err) {
                    tracing::debug!(peer = self.rank, %error, "stream was closed already");
                }
            }
        }
        self.control.say(word);
        self.say_aside(word);
    }

    /// Tells an abort also on the streams that the peer has opened, because it may still wait there. (It
    /// finds a goodbye on the streams that this rank has opened.)
    fn say_aside(&mut self, word: &Control) {
        if let (Control::Abort { .. }, Some(Bundle { control, .. })) = (word, &mut self.aside)
            && let Err(error) = control.write_all(&word.encode())
        {
            tracing::debug!(peer = self.rank, %error, "its call was given up");
        }
    }

    /// Whether nothing will come from the peer any more, although it has not failed.
    pub(crate) fn is_gone(&self) -> bool {
        match self.bond {
            Bond::Agreed => {
                *self.control.state() == PeerState::Left && self.points.broken().is_some()
            }
            Bond::Unreachable(_) => true,
            Bond::Called | Bond::Offered { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::unix::net::UnixStream};

    use super::*;
    use crate::error::Reason;

    fn bundles() -> [Bundle<UnixStream>; 2] {
        let [control, data, points] = [(); 3].map(|()| UnixStream::pair().unwrap());
        [
            Bundle { control: control.0, data: Striped::new(vec![data.0]), points: points.0 },
            Bundle { control: control.1, data: Striped::new(vec![data.1]), points: points.1 },
        ]
    }

    /// The lower rank may have accepted the higher rank's streams before the higher rank knows that they are
    /// open. If both have called, the lower rank hears of the failure on one pair of streams or the other.
    #[test]
    fn a_failure_is_told_on_both_sets_of_streams_when_calls_cross() {
        let word = Control::Abort {
            culprit: Some(1),
            reason: Reason::Other,
            text: "out of order".to_owned(),
        };
        let [[own, own_far], [theirs, theirs_far]] = [bundles(), bundles()];
        let mut peer = Peer::called(0);
        assert!(!peer.take(theirs, true, Some(&word)));
        assert!(peer.offer(own, Some(&word)));
        drop(peer);
        for mut far in [own_far, theirs_far] {
            let mut heard = Vec::new();
            far.control.read_to_end(&mut heard).unwrap();
            assert_eq!(Control::take(&mut heard), Ok(Some(word.clone())));
        }
    }
}
