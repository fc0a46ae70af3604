//! How fast memory goes between a device and its host: by how the host's memory is pinned.

use anyhow::{anyhow, ensure};
use drumline_cuda::{CudaDevice, DeviceMemory};
use drumline_device::{Device, Flight, Part, Pinned, Stream};
use drumline_shm::{Segment, SegmentSize};

use crate::Options;
use crate::left_out::LeftOut;
use crate::lent::Borrowed;
use crate::table::{gb_s, median, row, size};

/// Prints gigabytes per second for each size, and returns those of the last size both ways at once, in memory that is
/// pinned in place. A copy that brings wrong bytes is an error.
pub(crate) fn report(
    options: &Options,
    device: &CudaDevice,
    sizes: &[usize],
    left_out: &mut LeftOut,
) -> anyhow::Result<f64> {
    let rounds = options.rounds;
    let borrowed = match Borrowed::new(options, device) {
        Ok(borrowed) => Some(borrowed),
        Err(error) => {
            left_out.add("copies between processes by CUDA IPC", format!("{error:#}"));
            None
        }
    };
    let longest = sizes.iter().copied().max().unwrap_or(0);
    let arena_bytes = (4 * longest).next_multiple_of(1 << 21);
    let segment = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes })?;
    println!(
        "\ncopies, GB/s: pinned in place | the driver's pinned memory | pageable | from the device memory of another process \
         (CUDA IPC); pinning in place, us"
    );
    let ways = ["out", "in", "both", "out", "in", "both", "out", "in"];
    row("bytes", ways.iter().chain(&["CUDA IPC", "pin"]).map(|it| (*it).to_owned()));
    let mut both = 0.0;
    for &bytes in sizes {
        let mut cells = Vec::new();
        let in_place = || {
            let memory = segment.arena().allocate::<u8>(bytes)?;
            device.pin(memory).map_err(|refused| anyhow!("{}", refused.0))
        };
        for pinned in
            [&in_place as &dyn Fn() -> anyhow::Result<Pinned>, &|| Ok(device.pinned(bytes)?)]
        {
            let bench = Bench::new(device, bytes, [pinned()?, pinned()?])?;
            cells.extend(bench.run(rounds)?);
        }
        cells.extend(pageable(device, bytes, rounds)?);
        let between = borrowed.as_ref().map(|it| it.copy(bytes, rounds)).transpose()?;
        cells.push(between.unwrap_or_else(|| "-".to_owned()));
        let pinning = median(rounds.min(3), || in_place().map(drop))?;
        cells.push(format!("{:.1}", pinning.as_secs_f64() * 1e6));
        both = cells.get(2).and_then(|cell| cell.parse().ok()).unwrap_or(0.0);
        row(&size(bytes), cells);
    }
    Ok(both)
}

/// Memory of the host and of the device, for both directions.
struct Bench {
    bytes: usize,
    host: [Option<Flight<Pinned>>; 2],
    device: [DeviceMemory; 2],
    streams: [std::sync::Arc<dyn Stream>; 2],
}

#[derive(Clone, Copy)]
enum Way {
    Out,
    In,
}

impl Bench {
    fn new(device: &CudaDevice, bytes: usize, host: [Pinned; 2]) -> anyhow::Result<Bench> {
        let mut on_device = [device.allocate(bytes)?, device.allocate(bytes)?];
        on_device[0].write(&pattern(bytes))?;
        let streams = [device.stream()?, device.stream()?];
        Ok(Bench { bytes, host: host.map(|it| Some(Flight::from(it))), device: on_device, streams })
    }

    /// Out, in, and both at once.
    fn run(mut self, rounds: usize) -> anyhow::Result<[String; 3]> {
        let bytes = self.bytes;
        let out = median(rounds, || self.go(&[(Way::Out, 0)]))?;
        // What came out goes in at another place.
        let back = median(rounds, || self.go(&[(Way::In, 0)]))?;
        let mut found = vec![0; bytes];
        self.device[1].read(&mut found)?;
        ensure!(found == pattern(bytes), "a copy of {bytes} bytes brought wrong bytes");
        let both = median(rounds, || self.go(&[(Way::Out, 0), (Way::In, 1)]))?;
        Ok([gb_s(bytes, out), gb_s(bytes, back), gb_s(2 * bytes, both)])
    }

    /// Copies between the host's memory of these numbers and the device's of that direction, and waits.
    fn go(&mut self, copies: &[(Way, usize)]) -> anyhow::Result<()> {
        for &(way, host) in copies {
            let memory = self.host[host].take().ok_or_else(|| anyhow!("it is under way"))?;
            let at = way as usize;
            let part = Part { place: self.device[at].place(), at: 0, window: None };
            let flight = match way {
                Way::Out => self.streams[at].copy_out(&[part], memory),
                Way::In => self.streams[at].copy_in(&[part], memory),
            };
            self.host[host] = Some(flight.map_err(|refused| anyhow!("{}", refused.0))?);
        }
        for &(_, host) in copies {
            let flight = self.host[host].take().ok_or_else(|| anyhow!("it has landed"))?;
            self.host[host] = Some(Flight::from(flight.land()?));
        }
        Ok(())
    }
}

fn pageable(device: &CudaDevice, bytes: usize, rounds: usize) -> anyhow::Result<[String; 2]> {
    let mut memory = device.allocate(bytes)?;
    let mut host = pattern(bytes);
    let back = median(rounds, || Ok(memory.write(&host)?))?;
    let out = median(rounds, || Ok(memory.read(&mut host)?))?;
    Ok([gb_s(bytes, out), gb_s(bytes, back)])
}

/// What the copies bring.
pub(crate) fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 131 + at / 251) as u8).collect()
}
