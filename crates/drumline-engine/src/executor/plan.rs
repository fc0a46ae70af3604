//! The plan of a call.

use std::{ops::Range, sync::Arc};

use drumline_kernels::{DType, KernelTable};
use drumline_schedule::{
    Collective, Counts, Lags, MemoryUse, Pipeline, Schedule, Shelves,
    step::{Buffer, Loc, Rank},
};
use drumline_shm::PAYLOAD_BYTES;

use super::{
    flags::Seats,
    layout::{Layout, Place, Stretch},
    local::{Area, Extent, Operand, Slots},
    message::{Description, Frame},
    scratch::Scratch,
    task::Tasks,
};

/// Everything that follows from the shape of a call. It is worked out when a group first makes such a call,
/// and kept. The rest is in the [`Machine`](super::Machine) and in the caller's buffers.
#[derive(Debug)]
pub struct Plan {
    pub(crate) schedule: Arc<Schedule>,
    /// The description for peers, with sequence number 0.
    description: Description,
    pub(crate) frame: Frame,
    digest: u64,
    pub(crate) layout: Layout,
    pub(crate) windows: usize,
    pub(crate) pipeline: Pipeline,
    /// The loops of the elements in all places but those for sums.
    pub(crate) kernels: &'static KernelTable,
    /// The size of an element in places for sums.
    sum_bytes: usize,
    /// Whether narrow floats are widened for the whole call.
    pub wide: bool,
    /// Whether neighbours work in the caller's registered buffer.
    pub registered: bool,
    /// How often the schedule posts.
    pub(crate) posts: u64,
    pub(crate) uses_messages: bool,
    /// Whether the caller's buffers are too long to be found in the cache after the call.
    pub(crate) passes_cache: bool,
    /// Whether this rank gets a result.
    pub writes: bool,
    pub(crate) tasks: Tasks,
    scratch: Scratch,
    sums: Scratch,
}

/// What determines a [`Plan`].
#[derive(Debug)]
pub struct Shape<'a> {
    pub schedule: Arc<Schedule>,
    /// The seats of this rank's neighbours.
    pub seats: &'a Seats,
    pub description: Description,
    pub layout: Layout,
    /// The loops of the elements in all places but those for sums.
    pub kernels: &'static KernelTable,
    /// The size of an element in places for sums.
    pub sum_bytes: usize,
    pub wide: bool,
    /// This rank's share of the cache. `None`: ranks share no memory.
    pub cache_bytes: Option<usize>,
}

impl Plan {
    /// Lays a call of this shape out.
    pub fn new(shape: Shape<'_>) -> Plan {
        let Shape { schedule, seats, description, layout, kernels, sum_bytes, wide, cache_bytes } =
            shape;
        let element_bytes = kernels.dtype.size();
        let windows = layout.windows();
        let pipeline = if windows > 1 { Pipeline::of(&schedule) } else { Pipeline::default() };
        let is_data = |loc: Loc| loc.peer.is_none() && loc.buffer == Buffer::Data;
        // Short data travels in the lines of announcements.
        let slots = match layout.slot_len() * element_bytes <= PAYLOAD_BYTES {
            true => Slots::InLine,
            false => Slots::Apart,
        };
        let copies = pipeline.scratch_copies();
        let mut plan = Plan {
            description,
            frame: Frame::of(description),
            digest: description.digest(),
            kernels,
            sum_bytes,
            wide,
            registered: schedule.memory == MemoryUse::Registered,
            posts: schedule.posts() as u64,
            uses_messages: schedule.uses_messages(),
            passes_cache: cache_bytes
                .is_some_and(|cache| layout.buffers_len() * element_bytes >= cache),
            writes: schedule.steps.iter().any(|step| step.writes().any(is_data)),
            tasks: Tasks::default(),
            scratch: Scratch::new(&schedule, &layout, copies, element_bytes, false),
            sums: Scratch::new(&schedule, &layout, copies, sum_bytes, true),
            layout,
            windows,
            pipeline,
            schedule,
        };
        let seat = |neighbour: Rank| {
            let Some(seat) = seats.find(neighbour) else {
                unreachable!("schedules wait for neighbours only, and name no other peer's memory");
            };
            seat
        };
        let operand = |loc| Operand {
            area: Area::of(loc, slots, seat),
            extent: match windows {
                1 => Extent::Fixed(plan.bytes_at(Place { loc, window: 0 })),
                _ => Extent::Moving(loc),
            },
        };
        plan.tasks = Tasks::of(&plan.schedule, &plan.pipeline, operand, seat);
        plan
    }

    /// A plan that does nothing.
    pub(crate) fn idle() -> Plan {
        let schedule = Schedule {
            collective: Collective::Barrier,
            algorithm: "none",
            world_size: 1,
            rank: 0,
            root: 0,
            memory: MemoryUse::Private,
            uneven: false,
            lags: Lags::NONE,
            shelves: Shelves::AfterOwner,
            slot_parts: 1,
            steps: Vec::new(),
        };
        Plan::new(Shape {
            layout: Layout::new(&schedule, Counts::Even(0), None),
            schedule: Arc::new(schedule),
            seats: &Seats::default(),
            description: Description::NONE,
            kernels: DType::U8.kernels(),
            sum_bytes: 1,
            wide: false,
            cache_bytes: None,
        })
    }

    /// The description of call number `sequence`.
    pub(crate) fn description(&self, sequence: u64) -> Description {
        self.description.numbered(sequence)
    }

    /// A digest of [`Plan::description`], for places that have no room for it. It is equal on ranks that make
    /// the same call. Different calls have the same digest with a probability of 2^-64.
    pub(crate) fn digest(&self, sequence: u64) -> u64 {
        // The factor is odd, so no two sequence numbers give the same digest.
        self.digest ^ sequence.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// How many bytes of working memory the call needs.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch.len() * self.element_bytes()
    }

    /// How many bytes of memory for sums the call needs.
    pub(crate) fn sums_bytes(&self) -> usize {
        self.sums.len() * self.sum_bytes
    }

    /// The size of an element in all places but those for sums.
    pub(crate) fn element_bytes(&self) -> usize {
        self.kernels.dtype.size()
    }

    /// The elements of its buffer at which a place lies.
    fn resolve(&self, place: Place) -> Range<usize> {
        match (place.loc.peer, place.loc.buffer) {
            (None, Buffer::Scratch(id)) => self.scratch.resolve(id, place, &self.layout),
            (None, Buffer::Sum(id)) => self.sums.resolve(id, place, &self.layout),
            _ => self.layout.resolve(place),
        }
    }

    /// The bytes of its buffer at which a place lies.
    fn bytes_at(&self, place: Place) -> Range<usize> {
        let width = match (place.loc.peer, place.loc.buffer) {
            (None, Buffer::Sum(_)) => self.sum_bytes,
            _ => self.element_bytes(),
        };
        let Range { start, end } = self.resolve(place);
        start * width..end * width
    }

    /// Resolves a place in this rank's own buffers to a stretch that a message carries.
    pub(crate) fn stretch(&self, place: Place) -> Stretch {
        let Range { start: first, end } = self.bytes_at(place);
        Stretch { buffer: place.loc.buffer, first, len: end - first }
    }

    /// The bytes of its buffer for which an operand stands in a window.
    #[inline]
    pub(crate) fn range(&self, operand: &Operand, window: usize) -> Range<usize> {
        match operand.extent {
            Extent::Fixed(ref range) => range.clone(),
            Extent::Moving(loc) => self.bytes_at(Place { loc, window }),
        }
    }
}
