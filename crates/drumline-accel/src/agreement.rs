//! What the ranks tell each other when they make a device group: options, what their drivers can do, and where their
//! slots lie.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use drumline_device::{Device, Pinned, PinnedWindow, Pipeline};
use drumline_group::{DType, ProcessGroup, Rank, driving};

use crate::direct::{self, Direct};
use crate::options::Planted;
use crate::{DeviceOptions, Result, error};

const OPERATION: &str = "DeviceGroup::new";

/// What all ranks of a host have agreed on.
#[derive(Debug)]
pub(crate) struct Agreed {
    /// Whether every rank's slots are registered buffers. If not: the driver of which rank has refused that, and what
    /// it has said to this rank.
    slots: Result<(), Refusal>,
    /// Whether every rank reaches the slots of its neighbours.
    windows: Result<(), Refusal>,
    /// The ranks of this host that hold slices of a type, where sums may stay in slices.
    holders: Vec<(DType, Arc<[Rank]>)>,
    /// What joins the devices, if anything does, and whether calls go there.
    direct: Option<Arc<Direct>>,
    goes_direct: AtomicBool,
    /// Why calls go there, or not.
    why: Mutex<String>,
}

#[derive(Clone, Debug)]
struct Refusal {
    rank: Rank,
    why: Option<String>,
}

/// What a ring is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) pipeline: Pipeline,
    pub(crate) slots: Vec<Pinned>,
    pub(crate) neighbours: Vec<(Rank, Vec<PinnedWindow>)>,
}

/// The way of an all-reduce on devices.
///
/// ```no_run
/// use drumline_accel::{DType, DeviceGroup, Way};
///
/// fn adds_on_gpus(on: &DeviceGroup) -> bool {
///     matches!(on.explain(DType::F32), Way::Direct { .. })
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Way {
    /// The devices add among themselves, in the order of the library.
    Direct {
        /// The library.
        library: String,
        /// Why calls go this way.
        why: String,
    },
    /// Each rank sums a slice of each window; devices fetch the slices from where they were summed.
    Slices {
        /// The ranks of this host that hold slices.
        holders: Vec<Rank>,
    },
    /// Each rank has the whole sum of each window, from which its device fetches it.
    Whole {
        /// Whether the host sums in place, in registered buffers.
        registered: bool,
        /// Why there are no slices.
        why: String,
    },
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Direct { library, why } => {
                write!(f, "by {library}, whose order of sums is its own: {why}")
            }
            Way::Slices { holders } => write!(
                f,
                "in slices: ranks {holders:?} of this host sum a slice each, and every device fetches all slices"
            ),
            Way::Whole { registered: true, why } => {
                write!(f, "as a whole, in registered buffers: {why}")
            }
            Way::Whole { registered: false, why } => {
                write!(f, "as a whole, in a ring of the driver's memory: {why}")
            }
        }
    }
}

impl Agreed {
    /// For a rank that sums nothing.
    pub(crate) fn no_slots() -> Agreed {
        let refusal = Refusal { rank: 0, why: Some("there are no slots".to_owned()) };
        let why = Mutex::new("messages go through the host".to_owned());
        let (direct, goes_direct) = (None, AtomicBool::new(false));
        let (slots, windows) = (Err(refusal.clone()), Err(refusal));
        Agreed { slots, windows, holders: Vec::new(), direct, goes_direct, why }
    }

    /// What carries out the calls of the devices among themselves, if anything does.
    pub(crate) fn direct(&self) -> Option<&Arc<Direct>> {
        self.direct.as_ref().filter(|_| self.goes_direct.load(Ordering::Relaxed))
    }

    /// What joins the devices, whether or not calls go there.
    pub(crate) fn joined(&self) -> Option<&Arc<Direct>> {
        self.direct.as_ref()
    }

    /// Has calls go directly or through the host from now on, and says why.
    pub(crate) fn choose(&self, direct: bool, why: String) {
        self.goes_direct.store(direct, Ordering::Relaxed);
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }

    /// Why calls go directly, or through the host.
    pub(crate) fn why(&self) -> String {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn holders(&self, dtype: DType) -> Option<Arc<[Rank]>> {
        let of_type = self.holders.iter().find(|(it, _)| *it == dtype);
        of_type.map(|(_, holders)| holders.clone())
    }

    pub(crate) fn way(&self, group: &ProcessGroup, dtype: DType) -> Way {
        if let Some(direct) = self.direct()
            && direct.sums(dtype)
        {
            return Way::Direct { library: direct.name(), why: self.why() };
        }
        if let Some(holders) = self.holders(dtype) {
            return Way::Slices { holders: holders.to_vec() };
        }
        let say = |Refusal { rank, why }: &Refusal, what: &str| match why {
            Some(why) => format!("{what}: {why}"),
            None => format!("{what} of rank {rank}"),
        };
        let why = match (&self.slots, &self.windows) {
            _ if driving::arena(group).is_none() => "the ranks share no memory".to_owned(),
            (Err(refusal), _) => say(refusal, "the driver does not pin the buffers"),
            (_, Err(refusal)) => say(refusal, "the driver does not pin the neighbours' buffers"),
            _ => format!("no algorithm leaves slices of {dtype} on these hosts"),
        };
        Way::Whole { registered: self.slots.is_ok(), why }
    }
}

/// Agrees with all ranks, and pins the memory for it.
pub(crate) fn agree(
    group: &ProcessGroup,
    device: &Arc<dyn Device>,
    options: &DeviceOptions,
) -> Result<(Agreed, Parts)> {
    let order = options.order.map_or(0, |order| 1 + order as usize);
    let way = options.way as usize;
    let own = [options.window_bytes, options.slots, options.lag, way, order].map(|it| it as u64);
    for (peer, theirs) in gather(group, &own)?.iter().enumerate() {
        if theirs[..] != own {
            let show = |it: &[u64]| {
                let way = ["auto", "host", "nccl"].get(it[3] as usize).unwrap_or(&"unknown");
                let order = ["any order", "the order of ranks", "the order of placement"];
                let order = order.get(it[4] as usize).unwrap_or(&"another order");
                format!(
                    "windows of {} bytes, {} slots, a lag of {}, the way {way}, sums in {order}",
                    it[0], it[1], it[2]
                )
            };
            let (theirs, ours) = (show(theirs), show(&own));
            return Err(error::differs(OPERATION, peer, &theirs, &ours));
        }
    }
    let in_place = pin_in_place(group, device.as_ref(), options);
    let offsets = match &in_place {
        Ok(slots) => slots.iter().map(|(offset, _)| *offset as u64 + 1).collect(),
        // No slot: 0.
        Err(_) => vec![0; options.slots],
    };
    let all = gather(group, &offsets)?;
    let slots = verdict(all.iter().map(|it| it[0] > 0), in_place.as_ref().err());
    let pinned = match (&slots, in_place) {
        (Ok(()), Ok(in_place)) => in_place.into_iter().map(|(_, pinned)| pinned).collect(),
        (_, in_place) => {
            drop(in_place);
            let of_driver = || device.pinned(options.window_bytes).map_err(error::of(OPERATION));
            (0..options.slots).map(|_| of_driver()).collect::<Result<_>>()?
        }
    };
    let neighbours = match &slots {
        Ok(()) => pin_neighbours(group, device.as_ref(), options, &all),
        Err(_) => Err("the slots are no registered buffers".to_owned()),
    };
    let can = gather(group, &[u64::from(neighbours.is_ok())])?;
    let windows = verdict(can.iter().map(|it| it[0] > 0), neighbours.as_ref().err());
    let neighbours = neighbours.ok().filter(|_| windows.is_ok()).unwrap_or_default();
    let direct = direct::set_up(group, device, options)?;
    let why = match &direct {
        Ok(_) => "the program has asked for it".to_owned(),
        Err(why) => why.clone(),
    };
    let (direct, why) = (direct.ok().map(Arc::new), Mutex::new(why));
    let goes_direct = AtomicBool::new(direct.is_some());
    let mut holders = Vec::new();
    if slots.is_ok() && windows.is_ok() {
        for dtype in DType::ALL {
            let of_type = driving::slice_holders(group, dtype)?;
            holders.extend(of_type.map(|of_type| (dtype, of_type.into())));
        }
    }
    let agreed = Agreed { slots, windows, holders, direct, goes_direct, why };
    tracing::debug!(device = %device.identity(), way = %agreed.way(group, DType::F32), "a device group is ready");
    let pipeline = match options.planted {
        Some(Planted::Rules(rules)) => Pipeline::with(rules, options.slots),
        _ => Pipeline::new(options.slots, options.lag),
    };
    Ok((agreed, Parts { pipeline, slots: pinned, neighbours }))
}

/// What all ranks have said, by rank.
fn gather(group: &ProcessGroup, own: &[u64]) -> Result<Vec<Vec<u64>>> {
    let mut all = vec![0; own.len() * group.world_size()];
    group.all_gather(own, &mut all)?;
    Ok(all.chunks_exact(own.len()).map(<[u64]>::to_vec).collect())
}

/// Whether all ranks can do something, or the first that cannot.
fn verdict(all: impl Iterator<Item = bool>, own: Option<&String>) -> Result<(), Refusal> {
    match all.enumerate().find(|(_, can)| !can) {
        None => Ok(()),
        Some((rank, _)) => Err(Refusal { rank, why: own.cloned() }),
    }
}

/// The slots, and where they lie in the arena; or why there are none.
fn pin_in_place(
    group: &ProcessGroup,
    device: &dyn Device,
    options: &DeviceOptions,
) -> Result<Vec<(usize, Pinned)>, String> {
    let arena = driving::arena(group).ok_or("the ranks share no memory")?;
    let slot = || {
        let memory =
            arena.allocate::<u8>(options.window_bytes).map_err(|error| error.to_string())?;
        let offset = arena.offset_of(&memory[..]).ok_or("a new buffer is detached")?;
        let pinned = device.pin(memory).map_err(|refused| refused.0.to_string())?;
        Ok((offset, pinned))
    };
    let slots: Result<Vec<_>, String> = (0..options.slots).map(|_| slot()).collect();
    slots.inspect_err(|why| tracing::debug!("slots are of the driver's memory: {why}"))
}

/// The slots of the neighbours that hold slices of any type. Ranks that share no memory with others have none.
fn pin_neighbours(
    group: &ProcessGroup,
    device: &dyn Device,
    options: &DeviceOptions,
    offsets: &[Vec<u64>],
) -> Result<Vec<(Rank, Vec<PinnedWindow>)>, String> {
    let holders = DType::ALL.into_iter().map(|dtype| driving::slice_holders(group, dtype));
    let holders: Result<Vec<_>, _> = holders.collect();
    let holders = holders.map_err(|error| error.to_string())?.into_iter().flatten().next();
    let of_others = holders.into_iter().flatten().filter(|rank| *rank != group.rank());
    let pin = |rank: Rank, offset: u64| {
        let window = driving::window_of(group, rank, offset as usize - 1, options.window_bytes);
        let window = window.map_err(|error| error.to_string())?;
        device.pin_window(window).map_err(|error| error.to_string())
    };
    let slots = |rank: Rank| {
        offsets[rank].iter().map(|offset| pin(rank, *offset)).collect::<Result<Vec<_>, String>>()
    };
    of_others.map(|rank| slots(rank).map(|slots| (rank, slots))).collect()
}
