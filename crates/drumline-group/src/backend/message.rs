//! Messages from rank to rank.

use std::{fmt, time::Instant};

use drumline_schedule::step::Rank;

/// What a message holds: the type and number of its elements, or an object. The label travels with the
/// message, and the library compares it with what the receiver expects.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::backend::Label;
///
/// // A backend carries it beside the bytes, and looks at neither.
/// let label = Label([7; Label::BYTES]);
/// let wire = [&label.0[..], b"bytes"].concat();
/// assert_eq!(wire.split_first_chunk().map(|(label, _)| Label(*label)), Some(label));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Label(pub [u8; Label::BYTES]);

impl Label {
    /// The length of a label as it travels.
    pub const BYTES: usize = 40;
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Label").field(&self.0.escape_ascii().to_string()).finish()
    }
}

/// A message to send.
///
/// ```
/// # use drumline_group as drumline;
/// use std::{collections::VecDeque, sync::Mutex};
///
/// use drumline::backend::{Arrived, Label, Outgoing};
///
/// /// [`Backend::send`](drumline::backend::Backend::send) to this rank itself.
/// fn send(message: &Outgoing<'_>, queue: &Mutex<VecDeque<(u64, Arrived)>>) {
///     let bytes = message.bytes.to_vec(); // they are lent until this returns
///     let arrived = Arrived { from: message.to, label: message.label, bytes };
///     queue.lock().unwrap().push_back((message.tag, arrived));
/// }
/// # let deadline = std::time::Instant::now();
/// # let label = Label([1; Label::BYTES]);
/// # let message = Outgoing { to: 0, tag: 7, label, bytes: b"pi", deadline };
/// # let queue = Mutex::default();
/// # send(&message, &queue);
/// # let (tag, arrived) = queue.into_inner().unwrap().pop_front().unwrap();
/// # assert_eq!((tag, arrived.from, arrived.label), (7, 0, label));
/// # assert_eq!(arrived.bytes, b"pi");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The receiver, which may be this rank itself.
    pub to: Rank,
    /// The tag. Only receives with the same tag take the message.
    pub tag: u64,
    /// What the message holds.
    pub label: Label,
    /// The bytes of the message.
    pub bytes: &'a [u8],
    /// The time by which it must be sent.
    pub deadline: Instant,
}

/// A message that this rank wants to receive.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::backend::{Arrived, Wanted};
///
/// /// Whether a message with this tag is one that a receive waits for.
/// fn is_wanted(wanted: &Wanted, tag: u64, arrived: &Arrived) -> bool {
///     wanted.tag == tag && wanted.from.is_none_or(|from| from == arrived.from)
/// }
/// # use drumline::backend::Label;
/// # let arrived = Arrived { from: 2, label: Label([0; Label::BYTES]), bytes: vec![] };
/// # let wanted = |from| Wanted { from, tag: 7, deadline: std::time::Instant::now() };
/// # let fits = |from, tag| is_wanted(&wanted(from), tag, &arrived);
/// # assert!(fits(None, 7) && fits(Some(2), 7) && !fits(Some(1), 7) && !fits(None, 8));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The sender. `None`: the rank that sends first.
    pub from: Option<Rank>,
    /// The tag that the message must have.
    pub tag: u64,
    /// The time by which it must have come.
    pub deadline: Instant,
}

/// A message that has been received.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::backend::{Arrived, Label};
///
/// /// A message as it has come from rank `from`: its label, and the bytes behind it.
/// fn read(from: usize, frame: &[u8]) -> Option<Arrived> {
///     let (label, bytes) = frame.split_first_chunk()?;
///     Some(Arrived { from, label: Label(*label), bytes: bytes.to_vec() })
/// }
/// let arrived = read(3, &[5; Label::BYTES + 2]).expect("it is long enough");
/// assert_eq!((arrived.from, arrived.label), (3, Label([5; Label::BYTES])));
/// assert_eq!(arrived.bytes, [5, 5]);
/// ```
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The sender.
    pub from: Rank,
    /// The label that the sender gave.
    pub label: Label,
    /// The bytes that the sender gave.
    pub bytes: Vec<u8>,
}
