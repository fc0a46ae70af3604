//! Devices and their primary contexts.

use crate::code::Code;
use crate::variables::variable;

/// What the variables say when the driver is initialised.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    devices: usize,
    visible: Option<String>,
    pub(crate) memory: usize,
    pub(crate) stream_memory: bool,
    pub(crate) host_register: bool,
    pub(crate) peers: bool,
    pub(crate) ipc: bool,
    pub(crate) numa: Vec<i32>,
    pub(crate) patience_ms: u64,
}

impl Settings {
    pub(crate) fn read() -> Self {
        let text = variable;
        let number =
            |name, otherwise| text(name).and_then(|it| it.parse().ok()).unwrap_or(otherwise);
        let is_set = |name: &str| text(name).is_some_and(|it| it == "1");
        Settings {
            devices: number("STANDIN_DEVICES", 2),
            visible: text("CUDA_VISIBLE_DEVICES"),
            memory: number("STANDIN_MEMORY", 1 << 32),
            stream_memory: !is_set("STANDIN_NO_STREAM_MEM"),
            host_register: !is_set("STANDIN_NO_HOST_REGISTER"),
            peers: !is_set("STANDIN_NO_PEER"),
            ipc: !is_set("STANDIN_NO_IPC"),
            numa: text("STANDIN_NUMA")
                .map(|it| it.split(',').filter_map(|node| node.trim().parse().ok()).collect())
                .unwrap_or_default(),
            patience_ms: number("STANDIN_PATIENCE_MS", 20_000) as u64,
        }
    }

    /// The devices of the machine that this process sees, as `CUDA_VISIBLE_DEVICES` says: those before the first wrong
    /// number.
    pub(crate) fn visible(&self) -> Vec<usize> {
        match &self.visible {
            None => (0..self.devices).collect(),
            Some(list) => list
                .split(',')
                .map_while(|it| it.trim().parse().ok().filter(|number| *number < self.devices))
                .collect(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Device {
    /// Its number on the machine, which processes that see other devices agree on.
    pub(crate) number: usize,
    /// The handle of its primary context.
    pub(crate) context: usize,
    pub(crate) retained: usize,
    /// All its calls fail with this from now on.
    pub(crate) broken: Option<Code>,
    pub(crate) peers: Vec<usize>,
}

impl Device {
    pub(crate) fn new(number: usize, context: usize) -> Self {
        Device { number, context, retained: 0, broken: None, peers: Vec::new() }
    }

    pub(crate) fn name(&self) -> String {
        format!("Stand-in {}", self.number)
    }

    /// In a domain that no machine has.
    pub(crate) fn pci(&self) -> String {
        format!("{DOMAIN:04X}:{:02X}:00.0", self.bus())
    }

    fn bus(&self) -> usize {
        0x10 + self.number
    }

    pub(crate) fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"stand-in device\0";
        uuid[15] = self.number as u8;
        uuid
    }

    /// cuDeviceGetAttribute, for the attributes that somebody may ask for. Others are 0.
    pub(crate) fn attribute(&self, attribute: i32, settings: &Settings) -> Result<i32, Code> {
        Ok(match attribute {
            ..1 | 200.. => return Err(Code::INVALID_VALUE),
            13 => 1_000_000,                                    // CLOCK_RATE
            15 | 19 | 31 | 41 | 89 => 1, // overlap, mapped host memory, concurrency, one address space
            16 => 1,                     // MULTIPROCESSOR_COUNT
            33 => self.bus() as i32,     // PCI_BUS_ID
            34 => 0,                     // PCI_DEVICE_ID
            40 => 2,                     // ASYNC_ENGINE_COUNT
            50 => DOMAIN as i32,         // PCI_DOMAIN_ID
            75 => 8,                     // COMPUTE_CAPABILITY_MAJOR
            91 => 1,                     // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            92 | 94 | 123 => i32::from(settings.stream_memory), // CAN_USE_STREAM_MEM_OPS (V1), WAIT_VALUE_NOR
            99 => i32::from(settings.host_register),            // HOST_REGISTER_SUPPORTED
            // HOST_NUMA_ID: -1 where the system knows no nodes.
            134 => {
                settings.numa.get(self.number % settings.numa.len().max(1)).copied().unwrap_or(0)
            }
            _ => 0,
        })
    }
}

const DOMAIN: usize = 0xD5;
