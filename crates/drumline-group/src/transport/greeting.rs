//! The greetings with which a connection between ranks begins.

use std::ops::Range;

use drumline_engine::{membership::Membership, transport};
use drumline_schedule::step::Rank;
use drumline_store::auth::{Channel, Expected, Hello};

/// The greeting of this rank, for a stream of this kind.
pub(super) fn hello(member: &Membership, channel: transport::Channel) -> Hello {
    let channel = match channel {
        transport::Channel::Control => Channel::Control,
        transport::Channel::Points => Channel::Points,
        transport::Channel::Data(number) => Channel::Data(number),
    };
    let Membership { rank, world_size, digest, .. } = *member;
    Hello { channel, rank, world_size, group: digest }
}

/// The greetings that are expected from these ranks.
pub(super) fn expect(member: &Membership, ranks: Range<Rank>) -> Expected {
    Expected { ranks, world_size: member.world_size, group: member.digest }
}

/// The kind of stream between ranks that a greeting names. `None`: the greeting asks for the store.
pub(super) fn stream_of(channel: Channel) -> Option<transport::Channel> {
    match channel {
        Channel::Control => Some(transport::Channel::Control),
        Channel::Points => Some(transport::Channel::Points),
        Channel::Data(number) => Some(transport::Channel::Data(number)),
        Channel::Store => None,
    }
}
