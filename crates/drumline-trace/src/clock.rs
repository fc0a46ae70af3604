//! The time on this host's clock and on rank 0's.

use std::{
    fmt, fs,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use drumline_store::store::Store;
use rustix::time::{ClockId, clock_gettime};

use crate::Result;

/// The clock that all processes of a host share, as this process sees it.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    /// The identity of the clock. Equal texts mean the same clock.
    pub(crate) id: String,
    /// The wall clock's time minus this clock's, in nanoseconds.
    pub(crate) wall_ns: i64,
    origin: Instant,
    origin_ns: i64,
}

impl Clock {
    pub(crate) fn of_this_host() -> Clock {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        // A container may have a clock of its own, which starts at another time.
        let namespace = fs::read_link("/proc/self/ns/time").unwrap_or_default();
        let id = match boot {
            Ok(boot) => format!("{} {}", boot.trim(), namespace.display()),
            Err(_) => format!("process {} of an unknown host", std::process::id()),
        };
        let origin = Instant::now();
        let now = clock_gettime(ClockId::Monotonic);
        let origin_ns = now.tv_sec * 1_000_000_000 + now.tv_nsec;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock { id, wall_ns: wall.as_nanos() as i64 - origin_ns, origin, origin_ns }
    }

    /// The time of `instant` on this clock, in nanoseconds.
    pub(crate) fn ns(&self, instant: Instant) -> i64 {
        let after = instant.saturating_duration_since(self.origin).as_nanos() as i64;
        let before = self.origin.saturating_duration_since(instant).as_nanos() as i64;
        self.origin_ns + after - before
    }
}

/// The difference between two clocks, and how wrong it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offset {
    /// What is to be added to times of this host.
    pub offset_ns: i64,
    /// How wrong that may be.
    pub uncertainty_ns: u64,
}

impl Offset {
    pub(crate) const NONE: Offset = Offset { offset_ns: 0, uncertainty_ns: 0 };

    /// Reads what [`Display`](fmt::Display) writes.
    pub fn parse(text: &[u8]) -> Option<Offset> {
        let (offset_ns, uncertainty_ns) = std::str::from_utf8(text).ok()?.split_once(' ')?;
        Some(Offset {
            offset_ns: offset_ns.parse().ok()?,
            uncertainty_ns: uncertainty_ns.parse().ok()?,
        })
    }
}

/// In the form that [`Offset::parse`] reads.
impl fmt::Display for Offset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.offset_ns, self.uncertainty_ns)
    }
}

/// How often a rank asks rank 0. The fastest answer counts.
const ROUNDS: usize = 8;

/// The key of rank 0's clock. It exists only if rank 0 writes a trace, and is set before any key for which
/// the other ranks wait.
const REFERENCE: &str = "trace/clock";
/// The key that counts the clocks that must be compared with it.
const ASKERS: &str = "trace/askers";

/// On rank 0: publishes the identity of its clock.
pub(crate) fn offer(store: &dyn Store, id: &str) -> Result<()> {
    store.set(REFERENCE, id.as_bytes())
}

/// How a rank learns the offset of its clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inquiry {
    /// Not at all: rank 0 writes no trace, or the offset is known already.
    InVain,
    /// This rank and rank 0 have the same clock.
    #[doc(hidden)]
    Same { reference: String },
    /// This rank asks. Its question has this number.
    #[doc(hidden)]
    Ask { reference: String, number: i64 },
    /// Another rank with the same clock asks, and this rank waits for the result.
    #[doc(hidden)]
    Wait { reference: String },
}

/// Decides how this rank learns its offset. All ranks must do so before rank 0 calls [`answer`].
pub(crate) fn inquire(store: &dyn Store, id: &str) -> Result<Inquiry> {
    if !store.check(&[REFERENCE])? {
        return Ok(Inquiry::InVain);
    }
    let reference = String::from_utf8_lossy(&store.get(REFERENCE)?).into_owned();
    if reference == id {
        return Ok(Inquiry::Same { reference });
    }
    match store.add(&format!("trace/asks/{id}"), 1)? {
        1 => Ok(Inquiry::Ask { reference, number: store.add(ASKERS, 1)? }),
        _ => Ok(Inquiry::Wait { reference }),
    }
}

/// On rank 0: answers all ranks that ask, once all ranks have called [`inquire`].
pub(crate) fn answer(store: &dyn Store, now_ns: &dyn Fn() -> i64) -> Result<()> {
    for number in 1..=store.add(ASKERS, 0)? {
        for round in 0..ROUNDS {
            store.get(&format!("trace/ping/{number}/{round}"))?;
            let now = now_ns().to_string();
            store.set(&format!("trace/pong/{number}/{round}"), now.as_bytes())?;
        }
    }
    Ok(())
}

/// Measures the offset, or waits for the rank that measures it. Returns the identity of the reference clock
/// and the offset. `None`: there is no reference clock.
pub(crate) fn measure(
    store: &dyn Store,
    id: &str,
    inquiry: Inquiry,
    now_ns: &dyn Fn() -> i64,
) -> Result<Option<(String, Offset)>> {
    let result = format!("trace/offset/{id}");
    let (reference, offset) = match inquiry {
        Inquiry::InVain => return Ok(None),
        Inquiry::Same { reference } => (reference, Some(Offset::NONE)),
        Inquiry::Wait { reference } => (reference, Offset::parse(&store.get(&result)?)),
        Inquiry::Ask { reference, number } => {
            let mut best: Option<Offset> = None;
            for round in 0..ROUNDS {
                let asked = now_ns();
                store.set(&format!("trace/ping/{number}/{round}"), b"?")?;
                let text = store.get(&format!("trace/pong/{number}/{round}"))?;
                let told = now_ns();
                let theirs = std::str::from_utf8(&text).ok().and_then(|it| it.parse::<i64>().ok());
                let Some(theirs) = theirs else { continue };
                // Rank 0 read its clock at some time between the two.
                let half = (told - asked) / 2;
                let uncertainty_ns = half.unsigned_abs() + 1;
                if best.is_none_or(|best| uncertainty_ns < best.uncertainty_ns) {
                    let offset_ns = theirs.saturating_sub(asked.saturating_add(half));
                    best = Some(Offset { offset_ns, uncertainty_ns });
                }
            }
            let text = best.map_or_else(|| "unknown".to_owned(), |best| best.to_string());
            store.set(&result, text.as_bytes())?;
            (reference, best)
        }
    };
    Ok(offset.map(|offset| (reference, offset)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_store::store::HashStore;

    /// Three hosts, two of them with two ranks. Their clocks are seconds apart.
    #[test]
    fn the_true_offset_lies_within_the_uncertainty() {
        let origin = Instant::now();
        let store = HashStore::new();
        let clocks = [("a", 0), ("b", 5_000_000_000_i64), ("b", 5_000_000_000), ("c", -70_000)];
        let now = |skew: i64| move || origin.elapsed().as_nanos() as i64 + skew;
        offer(&store, clocks[0].0).unwrap();
        let inquiries = clocks.map(|(id, _)| inquire(&store, id).unwrap());
        assert!(matches!(&inquiries[0], Inquiry::Same { reference } if reference == "a"));
        assert!(matches!(inquiries[2], Inquiry::Wait { .. }), "one rank of a host asks");
        std::thread::scope(|threads| {
            threads.spawn(|| answer(&store, &now(0)).unwrap());
            for ((id, skew), inquiry) in clocks.into_iter().zip(inquiries) {
                let store = &store;
                threads.spawn(move || {
                    let measured = measure(store, id, inquiry, &now(skew)).unwrap();
                    let (reference, offset) = measured.unwrap();
                    assert_eq!(reference, "a");
                    let error = (offset.offset_ns + skew).unsigned_abs();
                    assert!(error <= offset.uncertainty_ns, "{id}: {offset:?} of {skew}");
                });
            }
        });
    }

    #[test]
    fn a_time_that_cannot_be_is_no_panic() {
        let store = HashStore::new();
        for round in 0..ROUNDS {
            let told = if round % 2 == 0 { i64::MIN } else { i64::MAX };
            store.set(&format!("trace/pong/1/{round}"), told.to_string().as_bytes()).unwrap();
        }
        let inquiry = Inquiry::Ask { reference: "a".to_owned(), number: 1 };
        assert!(measure(&store, "b", inquiry, &|| 5_000).unwrap().is_some());
    }

    #[test]
    fn nobody_waits_for_a_rank_0_that_does_not_trace() {
        let store = HashStore::new();
        let inquiry = inquire(&store, "b").unwrap();
        assert_eq!(inquiry, Inquiry::InVain);
        assert_eq!(measure(&store, "b", inquiry, &|| 0).unwrap(), None);
    }
}
