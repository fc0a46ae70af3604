//! What a decoder makes of bytes.

/// What a decoder has made of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They mean something, and it came back the same.
    Taken,
    /// They mean nothing.
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
