//! The result of a decoder.

/// The result of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The decoder has taken the bytes, and its checks have passed.
    Taken,
    /// The decoder has refused the bytes.
    Refused,
}

impl<T> From<Option<T>> for Verdict {
    fn from(read: Option<T>) -> Verdict {
        if read.is_some() { Verdict::Taken } else { Verdict::Refused }
    }
}

impl<T, E> From<Result<T, E>> for Verdict {
    fn from(read: Result<T, E>) -> Verdict {
        read.ok().into()
    }
}
