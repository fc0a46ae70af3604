//! A short measurement of a link, made when a group is made.

use std::time::{Duration, Instant};

use drumline_schedule::{Topology, price::PriceList, step::Rank};

use crate::{ProcessGroup, Result};

/// How long the probe keeps asking for messages.
const BUDGET: Duration = Duration::from_millis(40);

/// A tag that programs are unlikely to use. All messages of the probe have been received when the program
/// gets the group.
const TAG: u64 = u64::MAX - 0xD12;

/// The length of the next message that rank 0 wants; 0: the probe is over.
type Wanted = [u64; 1];

/// The rank with which rank 0 measures the links: the lowest rank that shares no memory with it. `None`: all
/// ranks share memory, so no algorithm uses links.
pub(crate) fn peer(topology: &Topology) -> Option<Rank> {
    (1..topology.world_size).find(|rank| topology.host_of(*rank) != topology.host_of(0))
}

/// On rank 0: measures the link to `peer`, and returns `list` with the new prices.
pub(crate) fn ask(group: &ProcessGroup, peer: Rank, list: &PriceList) -> Result<PriceList> {
    round_trip(group, peer, SHORT_BYTES)?; // opens the connection
    let began = Instant::now();
    let mut short = round_trip(group, peer, SHORT_BYTES)?;
    while began.elapsed() < BUDGET / 4 {
        short = short.min(round_trip(group, peer, SHORT_BYTES)?);
    }
    let (mut bytes, mut long) = (LONG_BYTES[0], round_trip(group, peer, LONG_BYTES[0])?);
    for wanted in LONG_BYTES {
        let expected = long * (wanted / bytes) as u32;
        if began.elapsed() + 2 * expected > BUDGET {
            break;
        }
        // The kernel's buffers grow during the first message.
        let first = round_trip(group, peer, wanted)?;
        (bytes, long) = (wanted, first.min(round_trip(group, peer, wanted)?));
    }
    let over: Wanted = [0];
    group.send(&over, peer, TAG)?;

    let mut list = list.clone();
    let link = &mut list.far;
    // A message takes three legs: offer, grant and payload. The round trip is two messages.
    let leg_ps = ps(short) / 6;
    link.message_ps = leg_ps * 2 / 9;
    link.round_ps = leg_ps - link.message_ps;
    let byte_fs = ps(long.saturating_sub(short)) * 1_000 / 2 / bytes as u64;
    link.byte_fs = byte_fs;
    list.nic_byte_fs = byte_fs;
    list.combined_byte_fs = combined_byte_fs();
    Ok(list)
}

const SHORT_BYTES: usize = 8;

/// Lengths that are long enough to show the price of a byte, tried while there is time.
const LONG_BYTES: [usize; 3] = [16 << 10, 128 << 10, 1 << 20];

/// On `peer`: answers the messages of [`ask`].
pub(crate) fn answer(group: &ProcessGroup, peer: Rank) -> Result<()> {
    loop {
        let mut wanted: Wanted = [0];
        group.recv(&mut wanted, peer, TAG)?;
        if wanted == [0] {
            return Ok(());
        }
        let message = group.recv_async(vec![0_u8; wanted[0] as usize], peer, TAG)?.wait()?;
        group.send_async(message, peer, TAG)?.wait()?;
    }
}

fn round_trip(group: &ProcessGroup, peer: Rank, bytes: usize) -> Result<Duration> {
    let wanted: Wanted = [bytes as u64];
    group.send(&wanted, peer, TAG)?;
    let message = vec![0_u8; bytes];
    let reply = group.recv_async(vec![0_u8; bytes], peer, TAG)?;
    let began = Instant::now();
    group.send_async(message, peer, TAG)?.wait()?;
    reply.wait()?;
    Ok(began.elapsed())
}

/// The time to combine a byte into another one, from memory to memory.
fn combined_byte_fs() -> u64 {
    const ELEMENTS: usize = 1 << 19;
    let (mut sum, addend) = (vec![1_f32; ELEMENTS], vec![1_f32; ELEMENTS]);
    let mut time = || {
        let began = Instant::now();
        sum.iter_mut().zip(&addend).for_each(|(sum, addend)| *sum += addend);
        std::hint::black_box(&mut sum);
        began.elapsed()
    };
    let best = time().min(time()).min(time());
    (ps(best) * 1_000 / (4 * ELEMENTS as u64)).max(1)
}

fn ps(time: Duration) -> u64 {
    u64::try_from(time.as_nanos() * 1_000).unwrap_or(u64::MAX / 1_000_000)
}
