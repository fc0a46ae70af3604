use crate::algorithm::Cost;

/// The prices of the parts of a [`Cost`], in picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prices {
    /// A round: from a send to what the receiver does next.
    pub round_ps: u64,
    /// A message: the work of sender and receiver for it, whatever its length.
    pub message_ps: u64,
    /// A byte on the wire.
    pub byte_ps: u64,
    /// A byte that is combined into another.
    pub combined_byte_ps: u64,
}

impl Prices {
    /// TCP between processes of one host: the best of many runs of `drumline bench` on two shared cores of a
    /// virtual machine. 8 bytes between 2 ranks took 7 us. 128 KiB to 1 MiB took 3 GB/s, combining included.
    /// The price of a message is that of two system calls, and was not measured by itself. The price of
    /// combining is 10 GB/s, from memory to memory.
    pub const TCP: Prices =
        Prices { round_ps: 7_000_000, message_ps: 2_000_000, byte_ps: 300, combined_byte_ps: 100 };

    /// The price of `cost` with elements of this width, in picoseconds. It leaves shared memory out.
    pub fn of(&self, cost: Cost, element_bytes: usize) -> u128 {
        let Cost { rounds, messages, elements, combined, shared_elements: _ } = cost;
        let of = |count: usize, ps: u64| count as u128 * u128::from(ps);
        of(rounds, self.round_ps)
            + of(messages, self.message_ps)
            + of(elements, self.byte_ps) * element_bytes as u128
            + of(combined, self.combined_byte_ps) * element_bytes as u128
    }
}

/// The widths of an element type, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ElementKind {
    /// The width of an element.
    pub bytes: usize,
    /// The width of a sum, which is larger for narrow floats (f16, bf16). Partial sums travel in this width,
    /// because they must not be rounded.
    pub sum_bytes: usize,
}
