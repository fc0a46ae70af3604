/// Which of the two slots and lines of a segment a call uses. Consecutive calls take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parity {
    /// Calls 0, 2, 4, ...
    Even,
    /// Calls 1, 3, 5, ...
    Odd,
}

impl Parity {
    /// The parity of a call's sequence number.
    pub const fn of(sequence: u64) -> Parity {
        if sequence.is_multiple_of(2) { Parity::Even } else { Parity::Odd }
    }

    /// The parity of the call before this one, and of the next.
    pub const fn other(self) -> Parity {
        match self {
            Parity::Even => Parity::Odd,
            Parity::Odd => Parity::Even,
        }
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}
