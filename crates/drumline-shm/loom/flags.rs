//! Tries all interleavings of posting and sleeping with loom. Needs a build of its own:
//!
//! ```sh
//! RUSTFLAGS="--cfg loom" cargo test -p drumline-loom --release --target-dir target/loom
//! ```
#![cfg(loom)]
#![allow(clippy::unwrap_used)]
#![allow(
    dead_code,
    unreachable_pub,
    reason = "only the crate of the module uses some of its parts"
)]

#[path = "../src/flag.rs"]
mod flag;

use flag::{Announcement, Doorbell, Flags};
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// Stands for an eventfd and the `poll` that sleeps on it.
#[derive(Debug)]
struct Bell {
    rings: Mutex<u64>,
    rung: Condvar,
}

impl Bell {
    fn new() -> Bell {
        Bell { rings: Mutex::new(0), rung: Condvar::new() }
    }

    /// Sleeps until the bell was rung. If no thread ever rings, loom reports a deadlock.
    fn poll(&self) {
        let mut rings = self.rings.lock().unwrap();
        while *rings == 0 {
            rings = self.rung.wait(rings).unwrap();
        }
    }
}

impl Doorbell for Bell {
    fn ring(&self) {
        *self.rings.lock().unwrap() += 1;
        self.rung.notify_all();
    }

    fn drain(&self) {
        *self.rings.lock().unwrap() = 0;
    }
}

/// One rank's segment. Its payload is one word that is not atomic: loom reports a thread that reads
/// the word without having seen the post.
struct Rank {
    flags: Flags,
    bell: Bell,
    payload: UnsafeCell<u64>,
}

impl Rank {
    fn new() -> Arc<Rank> {
        Arc::new(Rank { flags: Flags::new(), bell: Bell::new(), payload: UnsafeCell::new(0) })
    }

    /// Writes `value` to payload, announcement and description, and makes the `count`th post.
    fn say(&self, value: u64, count: u64, peers: &[&Rank]) {
        self.payload.with_mut(|payload| unsafe { *payload = value });
        let parity = count as usize % 2;
        let mut description = [0; 64];
        description[56..].copy_from_slice(&value.to_ne_bytes());
        let announcement = Announcement { digest: value, place: value };
        self.flags.announce(parity, announcement, &description);
        let peers = peers.iter().map(|peer| (&peer.flags, &peer.bell));
        self.flags.post_and_wake(parity, count, peers);
    }

    /// The value of `peer`'s `count`th post, if it has made that post.
    fn heard(&self, peer: &Rank, count: u64) -> Option<u64> {
        let parity = count as usize % 2;
        (peer.flags.posted(parity) >= count).then(|| {
            let value = peer.payload.with(|payload| unsafe { *payload });
            let announcement = Announcement { digest: value, place: value };
            assert_eq!(peer.flags.announcement(parity), announcement);
            assert_eq!(peer.flags.description(parity)[56..], value.to_ne_bytes());
            value
        })
    }

    /// Sleeps until `peer` has posted `count` times.
    fn await_post(&self, peer: &Rank, count: u64) -> u64 {
        loop {
            if let Some(value) = self.heard(peer, count) {
                return value;
            }
            let _asleep = self.flags.prepare_sleep(&self.bell);
            if let Some(value) = self.heard(peer, count) {
                return value;
            }
            self.bell.poll();
        }
    }
}

#[test]
fn no_wake_up_is_lost_and_the_payload_is_seen() {
    loom::model(|| {
        let (poster, sleeper) = (Rank::new(), Rank::new());
        let posting = thread::spawn({
            let (poster, sleeper) = (poster.clone(), sleeper.clone());
            move || poster.say(5, 1, &[&sleeper])
        });
        assert_eq!(sleeper.await_post(&poster, 1), 5);
        posting.join().unwrap();
    });
}

#[test]
fn two_ranks_sleep_and_wake_each_other_in_turn() {
    loom::model(|| {
        let (ping, pong) = (Rank::new(), Rank::new());
        let answering = thread::spawn({
            let (ping, pong) = (ping.clone(), pong.clone());
            move || {
                let value = pong.await_post(&ping, 1);
                pong.say(value + 1, 1, &[&ping]);
                assert_eq!(pong.await_post(&ping, 2), 9);
            }
        });
        ping.say(7, 1, &[&pong]);
        assert_eq!(ping.await_post(&pong, 1), 8);
        ping.say(9, 2, &[&pong]);
        answering.join().unwrap();
    });
}

#[test]
fn a_sleeper_hears_both_of_two_posters() {
    // All interleavings of three threads would take minutes. Those with up to three preemptions
    // take seconds.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (first, second, sleeper) = (Rank::new(), Rank::new(), Rank::new());
        let posting = [(&first, 3), (&second, 4)].map(|(poster, value)| {
            let (poster, sleeper) = (poster.clone(), sleeper.clone());
            thread::spawn(move || poster.say(value, 1, &[&sleeper]))
        });
        assert_eq!(sleeper.await_post(&first, 1), 3);
        assert_eq!(sleeper.await_post(&second, 1), 4);
        for thread in posting {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_late_rank_sees_the_failure_or_the_rank_that_gives_up_sees_its_post() {
    loom::model(|| {
        let (gives_up, late) = (Rank::new(), Rank::new());
        let posting = thread::spawn({
            let (gives_up, late) = (gives_up.clone(), late.clone());
            move || {
                late.say(5, 1, &[&gives_up]);
                gives_up.flags.has_failed(0)
            }
        });
        gives_up.flags.fail(0);
        let sees_post = late.flags.posted(1) >= 1;
        assert!(posting.join().unwrap() || sees_post);
    });
}

/// A guard inside another must not drain rings that the outer one still needs.
#[test]
fn a_nested_guard_loses_no_ring() {
    loom::model(|| {
        let (poster, sleeper) = (Rank::new(), Rank::new());
        let posting = thread::spawn({
            let (poster, sleeper) = (poster.clone(), sleeper.clone());
            move || poster.say(1, 1, &[&sleeper])
        });
        let asleep = sleeper.flags.prepare_sleep(&sleeper.bell);
        if sleeper.heard(&poster, 1).is_none() {
            drop(sleeper.flags.prepare_sleep(&sleeper.bell));
            sleeper.bell.poll();
        }
        drop(asleep);
        assert_eq!(sleeper.heard(&poster, 1), Some(1));
        posting.join().unwrap();
    });
}
