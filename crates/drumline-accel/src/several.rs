//! Several devices of one process.

use std::sync::Arc;

use drumline_device::{Device, Stream};
use drumline_group::{ProcessGroup, Rank, driving};

use crate::{DeviceGroup, DeviceOp, DeviceOptions, DeviceSlice, DeviceWork, Error, Result, error};

/// The ranks of a group, each with as many devices: collectives on one piece of memory of each device.
///
/// Every device counts as a rank of its own: device `i` of rank `r` is number `r * n + i`, where `n` is the number of
/// devices of a rank. So sums are those of `n` times as many ranks, and devices of one process add in slices as those
/// of several processes do. [`ends`](DeviceGroups::ends) has every other call.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use drumline_accel::{Device, DeviceGroups, DeviceOptions, DeviceSlice, Stream};
/// use drumline_group::{ProcessGroup, ReduceOp};
///
/// # fn example(
/// #     group: ProcessGroup,
/// #     devices: Vec<Arc<dyn Device>>,
/// #     streams: Vec<Arc<dyn Stream>>,
/// #     gradients: Vec<DeviceSlice>,
/// # ) -> drumline_accel::Result<()> {
/// let on = DeviceGroups::new(&group, devices, &DeviceOptions::default())?;
/// for work in on.all_reduce_multi_on(&streams, &gradients, ReduceOp::Avg)? {
///     work.wait()?;
/// }
/// on.destroy()
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeviceGroups {
    ends: Vec<DeviceGroup>,
}

/// One stream and one piece of memory for each device of this rank, in the order of the devices.
impl DeviceGroups {
    /// Makes the group. All ranks of `group` call this together, each with as many devices. A device may be there
    /// twice.
    ///
    /// # Errors
    ///
    /// [`Argument`](drumline_error::ErrorKind::Argument) for no device;
    /// [`Mismatch`](drumline_error::ErrorKind::Mismatch) names a rank with more or fewer of them; otherwise as for
    /// [`DeviceGroup::new`].
    pub fn new(
        group: &ProcessGroup,
        devices: Vec<Arc<dyn Device>>,
        options: &DeviceOptions,
    ) -> Result<DeviceGroups> {
        let operation = "DeviceGroups::new";
        let count = devices.len();
        let mut counts = vec![0; group.world_size()];
        group.all_gather(&[count as u64], &mut counts)?;
        if let Some(peer) = counts.iter().position(|theirs| *theirs != count as u64) {
            let (theirs, ours) = (format!("{} devices", counts[peer]), format!("{count} devices"));
            return Err(error::differs(operation, peer, &theirs, &ours));
        }
        if count == 0 {
            let problem = "there is no device";
            return Err(Error::argument(operation, problem));
        }
        let members = driving::with_members(group, "devices", count)?;
        // Each waits for the others.
        let ends = std::thread::scope(|threads| {
            let make = |(member, device): (ProcessGroup, Arc<dyn Device>)| {
                threads.spawn(move || DeviceGroup::new(&member, device, options))
            };
            let made: Vec<_> = members.into_iter().zip(devices).map(make).collect();
            let panicked = |_| {
                let problem = "a thread has panicked";
                Err(Error::argument(operation, problem))
            };
            made.into_iter().map(|it| it.join().unwrap_or_else(panicked)).collect::<Result<_>>()
        })?;
        Ok(DeviceGroups { ends })
    }

    /// The device groups: one for each device of this rank.
    pub fn ends(&self) -> &[DeviceGroup] {
        &self.ends
    }

    /// [`DeviceGroup::all_reduce_on`] on all devices of all ranks.
    ///
    /// # Errors
    ///
    /// [`Argument`](drumline_error::ErrorKind::Argument) unless there is one stream and one piece for each device;
    /// otherwise as for one device.
    pub fn all_reduce_multi_on(
        &self,
        streams: &[Arc<dyn Stream>],
        data: &[DeviceSlice],
        op: impl Into<DeviceOp>,
    ) -> Result<Vec<DeviceWork>> {
        let op = op.into();
        self.on_all("all_reduce_multi", streams, &[data], |end, stream, [data]| {
            end.all_reduce_on(stream, data, op.clone())
        })
    }

    /// [`DeviceGroup::reduce_on`] to device `root_device` of rank `root`.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_multi_on`](DeviceGroups::all_reduce_multi_on).
    pub fn reduce_multi_on(
        &self,
        streams: &[Arc<dyn Stream>],
        data: &[DeviceSlice],
        op: impl Into<DeviceOp>,
        root: Rank,
        root_device: usize,
    ) -> Result<Vec<DeviceWork>> {
        let op = op.into();
        let root = self.number("reduce_multi", root, root_device)?;
        self.on_all("reduce_multi", streams, &[data], |end, stream, [data]| {
            end.reduce_on(stream, data, op.clone(), root)
        })
    }

    /// [`DeviceGroup::broadcast_on`] from device `root_device` of rank `root`.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_multi_on`](DeviceGroups::all_reduce_multi_on).
    pub fn broadcast_multi_on(
        &self,
        streams: &[Arc<dyn Stream>],
        data: &[DeviceSlice],
        root: Rank,
        root_device: usize,
    ) -> Result<Vec<DeviceWork>> {
        let root = self.number("broadcast_multi", root, root_device)?;
        self.on_all("broadcast_multi", streams, &[data], |end, stream, [data]| {
            end.broadcast_on(stream, data, root)
        })
    }

    /// [`DeviceGroup::all_gather_on`]: every output gets the inputs of all devices of all ranks, by number.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_multi_on`](DeviceGroups::all_reduce_multi_on).
    pub fn all_gather_multi_on(
        &self,
        streams: &[Arc<dyn Stream>],
        inputs: &[DeviceSlice],
        outputs: &[DeviceSlice],
    ) -> Result<Vec<DeviceWork>> {
        self.on_all("all_gather_multi", streams, &[inputs, outputs], |end, stream, [from, to]| {
            end.all_gather_on(stream, from, to)
        })
    }

    /// [`DeviceGroup::reduce_scatter_on`]: each output gets the block of the sum that has its device's number.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_multi_on`](DeviceGroups::all_reduce_multi_on).
    pub fn reduce_scatter_multi_on(
        &self,
        streams: &[Arc<dyn Stream>],
        inputs: &[DeviceSlice],
        outputs: &[DeviceSlice],
        op: impl Into<DeviceOp>,
    ) -> Result<Vec<DeviceWork>> {
        let op = op.into();
        let lists = &[inputs, outputs];
        self.on_all("reduce_scatter_multi", streams, lists, |end, stream, [from, to]| {
            end.reduce_scatter_on(stream, from, to, op.clone())
        })
    }

    /// Closes the group when all calls have ended and all ranks have called this.
    ///
    /// # Errors
    ///
    /// As for [`DeviceGroup::destroy`].
    pub fn destroy(self) -> Result<()> {
        let ended = std::thread::scope(|threads| {
            let ends = self.ends.into_iter();
            let ending: Vec<_> = ends.map(|end| threads.spawn(|| end.destroy())).collect();
            let panicked = |_| {
                let problem = "a thread has panicked";
                Err(Error::argument("destroy", problem))
            };
            ending.into_iter().map(|it| it.join().unwrap_or_else(panicked)).collect::<Vec<_>>()
        });
        ended.into_iter().collect()
    }

    /// Makes a call on every device. All pieces are checked before. If a device refuses the call nevertheless, those
    /// before it wait for it in vain: so the group has failed then.
    fn on_all<const N: usize>(
        &self,
        operation: &'static str,
        streams: &[Arc<dyn Stream>],
        lists: &[&[DeviceSlice]; N],
        call: impl Fn(&DeviceGroup, &Arc<dyn Stream>, [DeviceSlice; N]) -> Result<DeviceWork>,
    ) -> Result<Vec<DeviceWork>> {
        let count = self.ends.len();
        if let Some(found) =
            [streams.len()].into_iter().chain(lists.map(<[_]>::len)).find(|len| *len != count)
        {
            let problem = format!("there are {found} streams or pieces for {count} devices");
            return Err(Error::argument(operation, problem));
        }
        for (at, end) in self.ends.iter().enumerate() {
            lists.iter().try_for_each(|list| end.check(operation, list[at]))?;
        }
        let mut works = Vec::with_capacity(count);
        for (at, (end, stream)) in self.ends.iter().zip(streams).enumerate() {
            match call(end, stream, lists.map(|list| list[at])) {
                Ok(work) => works.push(work),
                Err(error) => {
                    if at > 0 {
                        self.ends.iter().for_each(DeviceGroup::abort);
                    }
                    return Err(error);
                }
            }
        }
        Ok(works)
    }

    fn number(&self, operation: &'static str, rank: Rank, device: usize) -> Result<Rank> {
        let count = self.ends.len();
        if device < count && rank < self.ends[0].world_size() / count {
            return Ok(rank * count + device);
        }
        let problem = format!("there is no device {device} of rank {rank}");
        Err(Error::argument(operation, problem))
    }
}
