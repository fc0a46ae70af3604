//! A stream that does not take a goodbye at once.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
};

use super::*;
use crate::error::Reason;

fn bundles() -> [Bundle<UnixStream>; 2] {
    let [control, data, points] = [(); 3].map(|()| {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        far.set_nonblocking(true).unwrap();
        (near, far)
    });
    [
        Bundle { control: control.0, data: Striped::new(vec![data.0]), points: points.0 },
        Bundle { control: control.1, data: Striped::new(vec![data.1]), points: points.1 },
    ]
}

#[test]
fn a_rank_is_not_done_before_its_goodbye_is_out() {
    let [mut near, far] = bundles();
    let mut reader = far.control.try_clone().unwrap();
    while near.control.write(&Control::Beat.encode()).is_ok() {}
    let mut first = Streams::new(0, 2, [(1, near)]);
    let mut second = Streams::new(1, 2, [(0, far)]);
    let history = History::default();
    first.take_leave(None);
    second.take_leave(None);
    assert!(first.has_unsent());
    let present = first.still_present(&history).unwrap();
    assert_eq!(present, [1], "it has left, and has not heard that this rank has");
    let wanted = first.interests().any(|(it, _)| it.kind == StreamKind::Control && it.writable);
    assert!(wanted, "or the rank would sleep on");
    // The peer reads everything that was sent before.
    while reader.read(&mut [0; 1024]).is_ok() {}
    assert_eq!(first.still_present(&history).unwrap(), []);
    second.on_readable(0, StreamKind::Control);
    assert_eq!(second.still_present(&history).unwrap(), []);
}

#[test]
fn nobody_waits_to_say_goodbye_to_a_peer_that_is_gone() {
    let [mut near, far] = bundles();
    while near.control.write(&Control::Beat.encode()).is_ok() {}
    let mut first = Streams::new(0, 2, [(1, near)]);
    let mut second = Streams::new(1, 2, [(0, far)]);
    first.take_leave(None);
    second.take_leave(None);
    drop(second);
    assert_eq!(first.still_present(&History::default()).unwrap(), []);
}

/// A rank whose control stream can no longer send, and the peer's ends of its streams.
fn one_way() -> (Streams<UnixStream>, Bundle<UnixStream>) {
    let [near, far] = bundles();
    near.control.shutdown(std::net::Shutdown::Write).unwrap();
    let mut streams = Streams::new(0, 2, [(1, near)]);
    streams.tell(&Waits { call: None, messages: vec![1] }, Instant::now());
    (streams, far)
}

#[test]
fn a_peer_that_can_be_told_nothing_is_lost_after_a_while() {
    let (mut streams, _far) = one_way();
    let now = Instant::now();
    let mut look = |now| streams.progress_points(false, now, &mut Vec::new());
    assert_eq!(look(now), Ok(false), "its goodbye may be on its way");
    let Err(Cause::Disconnected { peer: 1, problem }) = look(now + GRACE) else { panic!() };
    assert!(problem.contains("os error 32"), "{problem}");
}

#[test]
fn a_peer_that_has_left_need_be_told_nothing() {
    let (mut streams, mut far) = one_way();
    far.control.write_all(&Control::Goodbye(None).encode()).unwrap();
    let now = Instant::now();
    for now in [now, now + GRACE] {
        assert_eq!(streams.progress_points(false, now, &mut Vec::new()), Ok(false));
    }
}

#[test]
fn a_goodbye_names_the_rank_whose_failure_it_follows() {
    let seen = SeenFailure { culprit: Some(2), text: "rank 2 has ended".to_owned() };
    let told =
        Cause::Reported { by: 0, culprit: Some(2), reason: Reason::Other, text: seen.text.clone() };
    for (seen, expected) in [(None, Cause::PeerLeft { peer: 0 }), (Some(seen), told)] {
        let [near, far] = bundles();
        let mut first = Streams::new(0, 3, [(1, near)]);
        let mut second = Streams::new(1, 3, [(0, far)]);
        assert_eq!(second.left(0), None);
        first.take_leave(seen);
        assert_eq!(second.lost(0), None, "it has left in good order");
        assert_eq!(second.left(0), Some(expected));
    }
}

/// A rank whose streams to a peer on another host have been closed, and that calls the peer to learn why.
fn in_doubt() -> Streams<UnixStream> {
    let [near, far] = bundles();
    let mut streams = Streams::new(0, 2, []);
    assert!(streams.came(1, near));
    drop(far);
    assert_eq!(streams.still_present(&History::default()).unwrap(), [1]);
    assert_eq!(streams.lost(1), None, "nobody knows yet");
    assert_eq!(streams.take_wanted(), [1]);
    assert_eq!(streams.take_wanted(), []);
    assert!(streams.is_calling(1));
    streams
}

fn said_of(streams: &mut Streams<UnixStream>) -> String {
    streams.progress_points(false, Instant::now(), &mut Vec::new()).unwrap_err().to_string()
}

#[test]
fn a_peer_at_whose_address_nothing_listens_has_ended() {
    let mut streams = in_doubt();
    let cause = || Cause::Unreachable { peer: 1, problem: String::new() };
    streams.unreachable(1, cause(), true);
    assert_eq!(streams.lost(1), None, "this connection may have been reset, too");
    assert_eq!(streams.take_wanted(), [1]);
    streams.unreachable(1, cause(), true);
    assert_eq!(streams.lost(1), Some(Cause::PeerExited { peer: 1 }));
    assert!(!streams.is_calling(1));

    let mut streams = in_doubt();
    streams.unreachable(1, cause(), false);
    let told = said_of(&mut streams);
    assert!(told.contains("its process may have ended, or something between"), "{told}");

    let mut streams = in_doubt();
    streams.unreachable(1, cause(), true);
    streams.lives(1);
    let told = said_of(&mut streams);
    assert!(told.contains("its process lives"), "{told}");
}

#[test]
fn a_peer_that_answers_lives_and_says_why_its_connection_ended() {
    let abort =
        Control::Abort { culprit: Some(2), reason: Reason::Other, text: "rank 2 fell".to_owned() };
    let words = [None, Some(Control::Beat), Some(abort)];
    for (word, expected) in
        words.into_iter().zip(["its process lives", "its process lives", "rank 2 fell"])
    {
        let mut streams = in_doubt();
        let [near, mut far] = bundles();
        assert!(streams.called(1, near));
        if let Some(word) = &word {
            far.control.write_all(&word.encode()).unwrap();
        }
        assert_eq!(streams.lost(1).is_some(), word.is_some());
        drop(far);
        streams.on_readable(1, StreamKind::Control);
        let told = said_of(&mut streams);
        assert!(told.contains(expected), "{told}");
    }
    // It calls, too: perhaps it did before it ended.
    let mut streams = in_doubt();
    let [near, _far] = bundles();
    assert!(!streams.came(1, near));
    assert!(streams.is_calling(1));
}

#[test]
fn who_has_failed_says_so_to_a_peer_that_calls_again() {
    let mut streams = Streams::new(0, 2, []);
    let [near, _far] = bundles();
    assert!(streams.came(1, near));
    streams.take_leave(None);
    let [near, mut far] = bundles();
    assert!(!streams.came(1, near));
    let mut heard = Vec::new();
    far.control.read_to_end(&mut heard).unwrap();
    assert_eq!(Control::take(&mut heard), Ok(Some(Control::Goodbye(None))));
}

#[test]
fn on_a_host_only_the_end_of_a_process_ends_its_streams() {
    let [near, far] = bundles();
    let mut streams = Streams::new(0, 2, [(1, near)]);
    drop(far);
    assert_eq!(streams.lost(1), Some(Cause::PeerExited { peer: 1 }));
}
