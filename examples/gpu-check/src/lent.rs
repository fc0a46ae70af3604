//! Memory of the device that one process lends to another: CUDA IPC. Drumline itself does not use it; it is measured
//! beside the other ways.

use std::io::{self, BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail, ensure};
use drumline_cuda::{CudaDevice, Driver, MemoryHandle, OpenedMemory};
use drumline_device::{Device, Stream};

use crate::Options;
use crate::copies::pattern;
use crate::part::{Part, again};
use crate::table::{gb_s, median};

/// What the process that lends says first on its output.
const LENDS: &str = "lends ";
const REFUSES: &str = "refuses ";

/// A process that lends memory with a pattern, until its input is closed.
struct Lender(Child);

impl Lender {
    fn start(options: &Options) -> anyhow::Result<(Lender, MemoryHandle)> {
        let mut program = again(options, Part::Lend, 1)?;
        let mut lender = Lender(program.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
        let mut line = String::new();
        BufReader::new(lender.0.stdout.as_mut().context("no output")?).read_line(&mut line)?;
        let hex = match (line.trim().strip_prefix(LENDS), line.trim().strip_prefix(REFUSES)) {
            (Some(hex), _) => hex,
            (None, Some(why)) => bail!("{why}"),
            (None, None) => bail!("the process that lends memory said {line:?}"),
        };
        Ok((lender, handle_of(hex).with_context(|| format!("no handle: {hex}"))?))
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn handle_of(hex: &str) -> Option<MemoryHandle> {
    let mut bytes = [0; MemoryHandle::BYTES];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(MemoryHandle::from_bytes(bytes))
}

/// What the process does that lends.
pub(crate) fn lend(options: &Options) -> anyhow::Result<()> {
    let device = Driver::load(options.library.as_deref())?.device(options.device)?;
    let mut memory = device.allocate(options.bytes_max)?;
    memory.write(&pattern(options.bytes_max))?;
    match memory.handle() {
        Ok(handle) => {
            println!("{LENDS}{}", handle.to_bytes().map(|byte| format!("{byte:02x}")).concat());
            io::copy(&mut io::stdin(), &mut io::sink())?;
        }
        Err(error) => println!("{REFUSES}{error}"),
    }
    Ok(())
}

/// Memory of another process, and copies from there.
pub(crate) struct Borrowed {
    device: CudaDevice,
    stream: Arc<dyn Stream>,
    memory: OpenedMemory,
    /// It is dropped last: it frees the memory.
    _lender: Lender,
}

impl Borrowed {
    /// As many bytes as the longest copy has. The error says why the driver refuses.
    pub(crate) fn new(options: &Options, device: &CudaDevice) -> anyhow::Result<Borrowed> {
        let (lender, handle) = Lender::start(options)?;
        let memory = device.open_memory(&handle, options.bytes_max)?;
        let (device, stream) = (device.clone(), device.stream()?);
        Ok(Borrowed { device, stream, memory, _lender: lender })
    }

    /// Gigabytes per second of a copy to memory of this process. Wrong bytes are an error.
    pub(crate) fn copy(&self, bytes: usize, rounds: usize) -> anyhow::Result<String> {
        let own = self.device.allocate(bytes)?;
        let part = self.memory.place().part(0..bytes).ok_or_else(|| anyhow!("too few bytes"))?;
        let time = median(rounds, || {
            self.stream.copy_within(part, own.place())?;
            Ok(self.stream.record()?.wait()?)
        })?;
        let mut found = vec![0; bytes];
        own.read(&mut found)?;
        ensure!(found == pattern(bytes), "a copy between processes brought wrong bytes");
        Ok(gb_s(bytes, time))
    }
}
