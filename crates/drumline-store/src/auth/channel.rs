//! What a connection is for.

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// Goodbyes and failures. Its owner reads it whenever it waits; data never holds it up.
    Control,
    /// Messages from one rank to another, outside of collectives.
    Points,
    /// Requests to a store. Rank, world size and group mean nothing here.
    Store,
    /// The messages of collectives. Several connections are told apart by number.
    Data(u8),
}

/// The code of the first data channel. The codes of the others follow.
const DATA_CODE: u8 = 16;

impl Channel {
    /// The code of the channel in a greeting.
    pub fn code(self) -> u8 {
        match self {
            Channel::Control => 0,
            Channel::Points => 1,
            Channel::Store => 2,
            Channel::Data(number) => DATA_CODE.saturating_add(number),
        }
    }

    /// The channel with this code.
    pub fn from_code(code: u8) -> Option<Channel> {
        let data = || code.checked_sub(DATA_CODE).map(Channel::Data);
        let named = [Channel::Control, Channel::Points, Channel::Store];
        named.into_iter().find(|channel| channel.code() == code).or_else(data)
    }
}
