//! Messages between the ranks of a communicator, which are threads and processes of one host.
//!
//! Each rank has a datagram socket, whose name follows from the communicator and the rank. The kernel holds what has
//! been sent until the receiver calls the library. A rank that is gone takes nothing, and nobody is told: as with NCCL,
//! whoever waits for it waits for ever.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;

/// The name of a communicator on this host.
pub(crate) type Name = [u8; 16];

/// What messages are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Channel {
    Meeting,
    Split,
    Collective,
    /// ncclSend to ncclRecv.
    Data,
    /// The receiver has the data.
    Receipt,
}

const CHANNELS: [Channel; 5] =
    [Channel::Meeting, Channel::Split, Channel::Collective, Channel::Data, Channel::Receipt];

/// Which message: the one of a number, in a channel, from a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) from: usize,
    pub(crate) channel: Channel,
    pub(crate) number: u64,
}

struct Parcel {
    key: Key,
    bytes: Arc<Vec<u8>>,
    sent: usize,
}

/// A message that has come in part.
#[derive(Default)]
struct Arrival {
    bytes: Vec<u8>,
    is_whole: bool,
}

pub(crate) struct Mail {
    rank: usize,
    socket: UnixDatagram,
    peers: Vec<SocketAddr>,
    out: Vec<VecDeque<Parcel>>,
    come: BTreeMap<Key, Arrival>,
}

const PIECE: usize = 32 << 10;
/// channel, from, number, length of the message.
const HEADER: usize = 1 + 4 + 8 + 8;

impl Mail {
    pub(crate) fn new(name: &Name, rank: usize, size: usize) -> io::Result<Self> {
        let peers = (0..size).map(|rank| address(name, rank)).collect::<io::Result<Vec<_>>>()?;
        let socket = UnixDatagram::bind_addr(&peers[rank])?;
        socket.set_nonblocking(true)?;
        let out = (0..size).map(|_| VecDeque::new()).collect();
        Ok(Mail { rank, socket, peers, out, come: BTreeMap::new() })
    }

    pub(crate) fn send(&mut self, to: usize, channel: Channel, number: u64, bytes: Arc<Vec<u8>>) {
        let key = Key { from: self.rank, channel, number };
        if to == self.rank {
            self.come.insert(key, Arrival { bytes: bytes.to_vec(), is_whole: true });
        } else {
            self.out[to].push_back(Parcel { key, bytes, sent: 0 });
        }
    }

    /// Sends and takes what can be sent and taken now. True: something was.
    pub(crate) fn pump(&mut self) -> bool {
        let mut moved = false;
        for (queue, peer) in self.out.iter_mut().zip(&self.peers) {
            // An error: the peer is not there yet, or no more, or has much to read first.
            while let Some(parcel) = queue.front_mut() {
                let end = parcel.bytes.len().min(parcel.sent + PIECE);
                let mut datagram = header(parcel);
                datagram.extend_from_slice(&parcel.bytes[parcel.sent..end]);
                if self.socket.send_to_addr(&datagram, peer).is_err() {
                    break;
                }
                moved = true;
                parcel.sent = end;
                if end == parcel.bytes.len() {
                    queue.pop_front();
                }
            }
        }
        let mut datagram = [0; HEADER + PIECE];
        while let Ok(len) = self.socket.recv(&mut datagram) {
            moved |= self.take_in(&datagram[..len]).is_some();
        }
        moved
    }

    /// Whether this message has left whole, to all.
    pub(crate) fn has_left(&self, channel: Channel, number: u64) -> bool {
        !self.out.iter().flatten().any(|it| (it.key.channel, it.key.number) == (channel, number))
    }

    /// Whether this message has come whole.
    pub(crate) fn has_come(&self, key: Key) -> bool {
        self.come.get(&key).is_some_and(|it| it.is_whole)
    }

    /// A message that has come.
    pub(crate) fn take(&mut self, key: Key) -> Option<Vec<u8>> {
        if self.has_come(key) { self.come.remove(&key).map(|it| it.bytes) } else { None }
    }

    fn take_in(&mut self, datagram: &[u8]) -> Option<()> {
        let (channel, rest) = datagram.split_first()?;
        let (from, rest) = rest.split_first_chunk::<4>()?;
        let (number, rest) = rest.split_first_chunk::<8>()?;
        let (len, piece) = rest.split_first_chunk::<8>()?;
        let key = Key {
            from: u32::from_le_bytes(*from) as usize,
            channel: *CHANNELS.get(usize::from(*channel))?,
            number: u64::from_le_bytes(*number),
        };
        let arrival = self.come.entry(key).or_default();
        arrival.bytes.extend_from_slice(piece);
        arrival.is_whole = arrival.bytes.len() as u64 == u64::from_le_bytes(*len);
        Some(())
    }
}

fn header(parcel: &Parcel) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER + PIECE);
    header.push(parcel.key.channel as u8);
    header.extend_from_slice(&(parcel.key.from as u32).to_le_bytes());
    header.extend_from_slice(&parcel.key.number.to_le_bytes());
    header.extend_from_slice(&(parcel.bytes.len() as u64).to_le_bytes());
    header
}

fn address(name: &Name, rank: usize) -> io::Result<SocketAddr> {
    let hex: String = name.iter().map(|it| format!("{it:02x}")).collect();
    SocketAddr::from_abstract_name(format!("drumline-standin/{hex}/{rank}"))
}
