use std::fmt;

/// What one run of an algorithm costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Messages and posts in the longest chain in which each waits for the one before it.
    pub rounds: usize,
    /// Messages sent by the rank that sends the most messages.
    pub messages: usize,
    /// Elements sent by the rank that sends the most elements.
    pub elements: usize,
    /// Elements combined into others by the rank that combines the most.
    pub combined: usize,
    /// Elements read from and written to the memory of neighbours, by the rank that accesses the most.
    pub shared_elements: usize,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { rounds, messages, elements, combined, shared_elements } = self;
        write!(f, "rounds: {rounds}, messages per rank: {messages}, ")?;
        write!(f, "elements per rank: {elements} sent, {combined} combined, ")?;
        write!(f, "{shared_elements} in the memory of peers")
    }
}

/// What one rank does in an all-reduce over links.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    pub(super) messages: usize,
    /// Elements.
    pub(super) sent: usize,
    /// Elements.
    pub(super) combined: usize,
}

impl Load {
    /// The maximum of each figure over all ranks.
    pub(super) fn most(loads: impl IntoIterator<Item = Load>) -> Cost {
        loads.into_iter().fold(Cost::default(), |cost, Load { messages, sent, combined }| Cost {
            messages: cost.messages.max(messages),
            elements: cost.elements.max(sent),
            combined: cost.combined.max(combined),
            ..cost
        })
    }
}

/// `ceil(log2(world_size))`: the rounds in which the number of informed ranks doubles until all know.
pub(super) fn doublings(world_size: usize) -> usize {
    world_size.next_power_of_two().ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doublings_round_up() {
        assert_eq!([1, 2, 3, 4, 5, 8, 9].map(doublings), [0, 1, 2, 2, 3, 3, 4]);
    }
}
