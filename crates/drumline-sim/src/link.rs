//! The virtual link between two ranks of a group.

use crate::member::PeerStreams;

use crate::{
    network::{LinkQuality, SharedPipe, SimStream},
    scenario::GroupSetup,
};

/// One direction of a stream, which a fault may break.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    pub(crate) group: usize,
    pub(crate) is_control: bool,
    pub(crate) pipe: SharedPipe,
}

/// Both ends of a link, and its wires.
type Link = ([PeerStreams<SimStream>; 2], Vec<Wire>);

/// Opens all streams of a link with `open`.
pub(crate) fn open_link(
    group: usize,
    setup: &GroupSetup,
    quality: LinkQuality,
    open: &mut dyn FnMut(LinkQuality) -> ([SimStream; 2], [SharedPipe; 2]),
) -> Link {
    let mut wires = Vec::new();
    let mut stream = |is_control, quality| {
        let (ends, pipes) = open(quality);
        wires.extend(pipes.map(|pipe| Wire { group, is_control, pipe }));
        ends
    };
    // The few short messages of the control stream never wait for room.
    let spacious = LinkQuality { capacity: 1 << 20, stalls_percent: 0, ..quality };
    let [control, their_control] = stream(true, spacious);
    let data = (0..setup.streams).map(|_| stream(false, quality));
    let (data, their_data) = data.map(|[ours, theirs]| (ours, theirs)).unzip();
    let [points, their_points] = stream(false, quality);
    let block_bytes = setup.block_bytes;
    let ours = PeerStreams { control, data, block_bytes, points };
    let theirs =
        PeerStreams { control: their_control, data: their_data, block_bytes, points: their_points };
    ([ours, theirs], wires)
}
