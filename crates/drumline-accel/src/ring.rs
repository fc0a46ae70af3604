//! The slots through which the windows of all-reduces pass.

use std::collections::VecDeque;
use std::mem::{forget, replace};
use std::ops::Range;
use std::sync::Arc;

use drumline_device::{
    Action, Event, Flight, Part, Pinned, PinnedWindow, Pipeline, Place, Refused, Stream,
};
use drumline_group::{DType, ProcessGroup, Rank, Result as HostResult};

use crate::host_call::sum;
use crate::options::Planted;
use crate::{DeviceOp, Result, error};

const OPERATION: &str = "all_reduce";

/// The slots of this rank, and how far their windows have come.
#[derive(Debug)]
pub(crate) struct Ring {
    pipeline: Pipeline,
    slots: Vec<Slot>,
    /// By slot: the call whose window has it, or had it last.
    used_by: Vec<u64>,
    /// The slots of the neighbours that hold slices.
    neighbours: Vec<(Rank, Vec<PinnedWindow>)>,
    /// The windows that are to be copied in, from the first one on.
    windows: VecDeque<Window>,
    /// The number of the first of them.
    first: u64,
    out: Arc<dyn Stream>,
    into: Arc<dyn Stream>,
    /// Whether all ranks have left the group.
    is_over: bool,
    /// An error that tests plant.
    planted: Option<Planted>,
}

/// What a call wants to have summed: a part of its data.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    /// The number of the call.
    pub(crate) call: u64,
    /// In the slot they lie one behind the other. There is one at least.
    pub(crate) pieces: Vec<Piece>,
    pub(crate) dtype: DType,
    pub(crate) op: DeviceOp,
    /// Who holds slices of the sum. `None`: everybody has all of it.
    pub(crate) holders: Option<Arc<[Rank]>>,
    /// What the caller's streams must have done before.
    pub(crate) after: Vec<Arc<dyn Event>>,
}

/// Where a piece of the data lies, and where its sum goes: as many bytes, on the same device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) from: Place,
    pub(crate) to: Place,
}

impl Piece {
    pub(crate) fn bytes(&self) -> usize {
        self.from.bytes
    }

    pub(crate) fn part(&self, range: Range<usize>) -> Option<Piece> {
        Some(Piece { from: self.from.part(range.clone())?, to: self.to.part(range)? })
    }
}

impl Window {
    pub(crate) fn bytes(&self) -> usize {
        self.pieces.iter().map(Piece::bytes).sum()
    }

    /// The pieces, and where each begins in the slot.
    fn laid_out(&self) -> impl Iterator<Item = (usize, &Piece)> {
        let mut end = 0;
        self.pieces.iter().map(move |piece| {
            let at = end;
            end += piece.bytes();
            (at, piece)
        })
    }
}

#[derive(Debug)]
enum Slot {
    /// It is here for its next action.
    Here(Pinned, Action),
    Flying(Flight<Pinned>),
    /// The host sums it.
    Away,
    /// It is lost with its device, or given back.
    Gone,
}

impl Ring {
    pub(crate) fn new(
        pipeline: Pipeline,
        slots: Vec<Pinned>,
        neighbours: Vec<(Rank, Vec<PinnedWindow>)>,
        [out, into]: [Arc<dyn Stream>; 2],
    ) -> Ring {
        let used_by = vec![0; slots.len()];
        let slots = slots.into_iter().map(|slot| Slot::Here(slot, Action::CopyOut)).collect();
        let windows = VecDeque::new();
        Ring {
            pipeline,
            slots,
            used_by,
            neighbours,
            windows,
            first: 0,
            out,
            into,
            is_over: false,
            planted: None,
        }
    }

    /// Plants an error, for tests.
    pub(crate) fn plant(&mut self, planted: Option<Planted>) {
        self.planted = planted;
    }

    /// All ranks have left the group, so nobody reads the slots any more.
    pub(crate) fn is_over(&mut self) {
        self.is_over = true;
    }

    /// One more window is to be done.
    pub(crate) fn add(&mut self, window: Window) {
        self.pipeline.add(1);
        self.windows.push_back(window);
    }

    /// Queues the next copy out, if it may begin.
    pub(crate) fn copy_out(&mut self) -> Result<bool> {
        let Some((window, slot, pinned)) = self.begin(Action::CopyOut) else { return Ok(false) };
        let window = self.window(window);
        if let Err(error) = window.after.iter().try_for_each(|event| self.out.wait(&**event)) {
            self.slots[slot] = Slot::Here(pinned, Action::CopyOut);
            return Err(error::of(OPERATION)(error));
        }
        let parts =
            window.laid_out().map(|(at, piece)| Part { place: piece.from, at, window: None });
        let copied = self.out.copy_out(&parts.collect::<Vec<_>>(), pinned.into());
        self.take_off(slot, copied)?;
        Ok(true)
    }

    /// Begins the next sum, if it may.
    pub(crate) fn reduce(
        &mut self,
        group: &ProcessGroup,
        end: impl FnOnce(HostResult<()>, Pinned) + Send + 'static,
    ) -> bool {
        let Some((window, _, slot)) = self.begin(Action::Reduce) else { return false };
        let window = self.window(window);
        let Window { dtype, op, holders, .. } = window;
        let (bytes, in_slices) = (window.bytes(), holders.is_some());
        sum(group, (slot, bytes), (*dtype, op), in_slices, end);
        true
    }

    /// The oldest sum has ended.
    pub(crate) fn reduced(&mut self, pinned: Pinned) {
        let slot = self.pipeline.slot(self.pipeline.ended(Action::Reduce));
        self.slots[slot] = Slot::Here(pinned, Action::CopyIn);
        self.pipeline.end(Action::Reduce);
    }

    /// Queues the next copy in, if it may begin. Tells its call.
    pub(crate) fn copy_in(&mut self) -> Result<Option<u64>> {
        let Some((window, slot, pinned)) = self.begin(Action::CopyIn) else { return Ok(None) };
        let mut parts = self.parts(self.window(window), slot);
        parts.retain(|part| !self.is_early(part));
        let call = self.window(window).call;
        let copied = self.into.copy_in(&parts, pinned.into());
        self.take_off(slot, copied)?;
        Ok(Some(call))
    }

    /// Lands the oldest copy out, if it has ended.
    pub(crate) fn land_out(&mut self) -> Result<bool> {
        self.land(Action::CopyOut)
    }

    /// Lands the oldest copy in, if it has ended. Tells its call.
    pub(crate) fn land_in(&mut self) -> Result<Option<u64>> {
        let window = if self.land(Action::CopyIn)? { self.windows.pop_front() } else { None };
        self.first += u64::from(window.is_some());
        Ok(window.map(|it| it.call))
    }

    /// After a failure: whether nothing uses the device memory of a call any more.
    pub(crate) fn is_settled(&mut self, call: u64) -> bool {
        let own = self.slots.iter_mut().zip(&self.used_by).filter(|(_, by)| **by == call);
        own.fold(true, |settled, (slot, _)| match slot {
            Slot::Away => false,
            Slot::Flying(flight) => match flight.has_landed() {
                Ok(false) => false,
                // What has failed is dropped: that waits for the copy, or leaks its memory.
                Ok(true) | Err(_) => {
                    retire(slot);
                    settled
                }
            },
            Slot::Here(..) | Slot::Gone => settled,
        })
    }

    /// Whether an action is under way.
    pub(crate) fn is_under_way(&self, action: Action) -> bool {
        self.pipeline.ended(action) < self.pipeline.begun(action)
    }

    /// The next window of an action, if that may begin, and its slot, which is taken out.
    fn begin(&mut self, action: Action) -> Option<(u64, usize, Pinned)> {
        let slot = self.pipeline.slot(self.pipeline.begun(action));
        // By the rules of the pipeline the slot is here. There is none where nothing is summed.
        if !matches!(self.slots.get(slot), Some(Slot::Here(_, next)) if *next == action) {
            return None;
        }
        let window = self.pipeline.begin(action)?;
        self.used_by[slot] = self.window(window).call;
        match replace(&mut self.slots[slot], Slot::Away) {
            Slot::Here(pinned, _) => Some((window, slot, pinned)),
            _ => unreachable!("it was here"),
        }
    }

    fn take_off(
        &mut self,
        slot: usize,
        copied: Result<Flight<Pinned>, Refused<Flight<Pinned>>>,
    ) -> Result<()> {
        let (flight, result) = match copied {
            Ok(flight) => (flight, Ok(())),
            Err(refused) => (refused.1, Err(error::of(OPERATION)(refused.0))),
        };
        self.slots[slot] = Slot::Flying(flight);
        result
    }

    /// Lands the oldest copy of an action, if it has ended.
    fn land(&mut self, action: Action) -> Result<bool> {
        if !self.is_under_way(action) {
            return Ok(false);
        }
        let number = self.pipeline.ended(action);
        let at = self.pipeline.slot(number);
        let slot = &mut self.slots[at];
        let Slot::Flying(flight) = slot else { return Ok(false) };
        if !flight.has_landed().map_err(error::of(OPERATION))? {
            return Ok(false);
        }
        let Slot::Flying(flight) = replace(slot, Slot::Gone) else { unreachable!("it was flying") };
        let mut pinned = flight.land().map_err(error::of(OPERATION))?;
        let next = match action {
            Action::CopyOut => Action::Reduce,
            Action::Reduce | Action::CopyIn => Action::CopyOut,
        };
        if next == Action::Reduce && self.planted.is_some() {
            pinned = self.copy_in_early(number, at, pinned)?;
        }
        self.slots[at] = Slot::Here(pinned, next);
        self.pipeline.end(action);
        Ok(true)
    }

    /// An error that tests plant: copies parts of a window in that are not summed yet.
    fn copy_in_early(&self, number: u64, slot: usize, pinned: Pinned) -> Result<Pinned> {
        let mut parts = self.parts(self.window(number), slot);
        parts.retain(|part| self.is_early(part));
        let copied = self.into.copy_in(&parts, pinned.into()).map_err(|refused| refused.0);
        copied.and_then(Flight::land).map_err(error::of(OPERATION))
    }

    /// Whether tests have planted that a part is copied in before it is summed.
    fn is_early(&self, part: &Part) -> bool {
        match self.planted {
            Some(Planted::CopiesInEarly) => part.window.is_none(),
            Some(Planted::FetchesEarly) => part.window.is_some(),
            _ => false,
        }
    }

    fn window(&self, number: u64) -> &Window {
        &self.windows[(number - self.first) as usize]
    }

    /// Where the sum of a window lies.
    fn parts(&self, window: &Window, slot: usize) -> Vec<Part> {
        let Some(holders) = &window.holders else {
            let whole = window.laid_out();
            return whole.map(|(at, piece)| Part { place: piece.to, at, window: None }).collect();
        };
        let width = window.dtype.size();
        let len = window.bytes() / width;
        let border =
            |slice: usize| (len as u128 * slice as u128 / holders.len() as u128) as usize * width;
        let slices = holders.iter().enumerate().flat_map(|(slice, holder)| {
            let slice_at = border(slice)..border(slice + 1);
            // This rank is no neighbour of its own.
            let neighbour = self.neighbours.iter().find(|(rank, _)| rank == holder);
            window.laid_out().filter_map(move |(piece_at, piece)| {
                let at = slice_at.start.max(piece_at);
                let end = slice_at.end.min(piece_at + piece.bytes());
                let range = (at < end).then(|| at - piece_at..end - piece_at)?;
                let place = piece.to.part(range)?;
                Some(Part { place, at, window: neighbour.map(|(_, slots)| slots[slot].clone()) })
            })
        });
        slices.collect()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if !self.is_over {
            self.slots.iter_mut().for_each(retire);
        }
    }
}

/// Gives a slot up whose sums neighbours may yet read. Memory that is freed holds zeros, which they would take for
/// sums. What is detached keeps its values for them.
fn retire(slot: &mut Slot) {
    let pinned = match replace(slot, Slot::Gone) {
        Slot::Here(pinned, _) => Some(pinned),
        // If the device has failed, the flight keeps its memory for ever.
        Slot::Flying(flight) => flight.land().ok(),
        Slot::Away | Slot::Gone => None,
    };
    let Some(memory) = pinned.and_then(Pinned::unpin) else { return };
    if let Err(error) = memory.arena().detach(&memory) {
        tracing::error!(%error, "a slot stays: neighbours may yet read it");
        forget(memory);
    }
}
