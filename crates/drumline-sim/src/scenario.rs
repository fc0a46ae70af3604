//! A whole job, before it runs: its ranks, groups, programs, network and fault.

use drumline_engine::{DType, Settings};

use crate::member::posting::Side;
use drumline_schedule::{ALGORITHMS, Algorithm, Collective, MemoryUse, SumOrder, Topology};

use crate::{call::PlannedCall, messages::Messages, network::LinkQuality, time::Nanos};

/// A whole job. Ranks name calls and messages by their indices here.
#[derive(Debug)]
pub(crate) struct Scenario {
    pub(crate) world_size: usize,
    /// The host of each rank.
    pub(crate) host_of: Vec<usize>,
    pub(crate) groups: Vec<GroupSetup>,
    pub(crate) calls: Vec<PlannedCall>,
    pub(crate) messages: Vec<Messages>,
    /// The program of each rank.
    pub(crate) programs: Vec<Vec<Instruction>>,
    pub(crate) fault: Option<Fault>,
    /// Whether launchers watch the processes.
    pub(crate) launched: bool,
    /// Whether a process goes on with its program after an error. Otherwise it ends.
    pub(crate) goes_on: bool,
    /// Links within a host.
    pub(crate) near: LinkQuality,
    /// Links between hosts.
    pub(crate) far: LinkQuality,
}

/// A process group of all ranks.
#[derive(Debug)]
pub(crate) struct GroupSetup {
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
    pub(crate) sum_order: SumOrder,
    /// How many streams carry the data of two ranks.
    pub(crate) streams: usize,
    /// Bytes that a data stream carries before the next data stream of the link has its turn.
    pub(crate) block_bytes: usize,
    /// Bytes of each staging slot that are used; `None` without shared memory.
    pub(crate) slot_bytes: Option<usize>,
    /// Bytes of each rank's arena. Buffers stay registered to the end of the job, so that a write
    /// after the end of a call is noticed.
    pub(crate) arena_bytes: usize,
}

/// One step of a rank's program.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Instruction {
    Compute(Nanos),
    Call {
        call: usize,
        blocking: bool,
    },
    /// Sends or receives one of the messages with this index.
    Post {
        messages: usize,
        side: Side,
    },
    /// Waits for all asynchronous calls and messages of a group.
    Wait {
        group: usize,
    },
    Close {
        group: usize,
    },
}

/// A fault, which strikes when the process of its victim has stepped `after_steps` times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) victim: usize,
    pub(crate) after_steps: u32,
    pub(crate) kind: FaultKind,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum FaultKind {
    /// The process ends without telling anyone.
    Crash,
    /// The network cuts off the victim's host. Keep-alives notice it after this time.
    SilentHost(Nanos),
    /// The link to a peer breaks in one group.
    LostConnection { peer: usize, group: usize, control: bool, data: bool, reset: bool },
    /// The process is stopped for this time.
    Slow(Nanos),
    /// The victim makes the call `with` instead of `call`, or no call.
    Mismatch { call: usize, with: Option<usize> },
    /// The victim aborts a group.
    Abort { group: usize },
}

impl Scenario {
    pub(crate) fn same_host(&self, a: usize, b: usize) -> bool {
        self.host_of[a] == self.host_of[b]
    }
}

impl GroupSetup {
    /// Whether every all-reduce must be on registered buffers.
    pub(crate) fn needs_registered(&self) -> bool {
        self.settings.all_reduce.as_ref().is_some_and(|name| {
            Algorithm::find(Collective::AllReduce, name)
                .is_ok_and(|row| row.memory == MemoryUse::Registered)
        })
    }

    /// Whether some algorithm leaves sums of this type in slices.
    pub(crate) fn leaves_slices(&self, dtype: DType) -> bool {
        self.slot_bytes.is_some() && leaves_slices(&self.topology, dtype)
    }

    /// Whether some algorithm can carry out the collective.
    pub(crate) fn has(&self, collective: Collective) -> bool {
        ALGORITHMS.iter().any(|row| {
            row.collective == collective
                && (row.applies)(&self.topology)
                && (self.slot_bytes.is_some() || row.memory == MemoryUse::Private)
        })
    }
}

/// Whether some algorithm leaves sums of this type in slices, in registered buffers: those that would be widened have no room
/// there.
pub(crate) fn leaves_slices(topology: &Topology, dtype: DType) -> bool {
    let mut rows = ALGORITHMS.iter().filter(|row| row.collective == Collective::ReduceSlices);
    let is_narrow = dtype.accumulator() != dtype;
    rows.any(|row| {
        (row.applies)(topology) && !(is_narrow && row.partial_sums_travel && !row.sums_apart)
    })
}
