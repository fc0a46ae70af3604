//! Messages of a process group from and to the memory of a device.

use std::sync::Arc;

use drumline_device::{Device, Pipeline, Stream};
use drumline_group::{ProcessGroup, Rank};

use crate::agreement::Agreed;
use crate::host_call::Operation;
use crate::inbox::Shared;
use crate::ring::Ring;
use crate::{DeviceGroup, DeviceOptions, DeviceSlice, DeviceWork, Result, error};

/// Messages of a process group from and to the memory of a device of this rank.
///
/// They are messages of that group: what is sent from a device may be received in memory of a host, and the other way
/// round. So no other rank takes part when this is made. Messages with one receiver and one tag keep their order if
/// they come from one device; those from other memory may overtake them. A message that fails poisons the group.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use drumline_accel::{DType, Device, DeviceMessages, DeviceSlice, Place, Stream};
/// use drumline_group::ProcessGroup;
///
/// # fn example(group: ProcessGroup, device: Arc<dyn Device>, stream: Arc<dyn Stream>, place: Place) -> drumline_accel::Result<()> {
/// let messages = DeviceMessages::new(&group, device)?;
/// let work = messages.recv_any_on(&stream, DeviceSlice::new(place, DType::F32), 7)?;
/// work.wait()?;
/// println!("from {:?}", work.source());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeviceMessages(DeviceGroup);

impl DeviceMessages {
    /// Those of this group, on this device.
    ///
    /// # Errors
    ///
    /// [`Device`](drumline_error::ErrorKind::Device): the driver makes no stream.
    pub fn new(group: &ProcessGroup, device: Arc<dyn Device>) -> Result<DeviceMessages> {
        let stream = || device.stream().map_err(error::of("DeviceMessages::new"));
        let streams = [stream()?, stream()?];
        let options = DeviceOptions::default();
        // No window ever comes here.
        let pipeline = Pipeline::new(options.slots, options.lag);
        let ring = Ring::new(pipeline, Vec::new(), Vec::new(), streams.clone());
        let shared = Shared::new(group.clone(), device, options);
        Ok(DeviceMessages(DeviceGroup::of_parts(shared, Agreed::no_slots(), ring, streams, None)))
    }

    /// Sends the data to a rank, when the stream has come there.
    ///
    /// # Errors
    ///
    /// As for [`DeviceGroup::all_reduce_on`].
    pub fn send_on(
        &self,
        stream: &Arc<dyn Stream>,
        data: DeviceSlice,
        to: Rank,
        tag: u64,
    ) -> Result<DeviceWork> {
        self.0.send_on(stream, data, to, tag)
    }

    /// Receives data from a rank, of the type and the length that it sends.
    ///
    /// # Errors
    ///
    /// As for [`DeviceGroup::all_reduce_on`].
    pub fn recv_on(
        &self,
        stream: &Arc<dyn Stream>,
        data: DeviceSlice,
        from: Rank,
        tag: u64,
    ) -> Result<DeviceWork> {
        self.0.recv_on(stream, data, from, tag)
    }

    /// Receives from the first rank that sends with this tag: [`DeviceWork::source`] says which.
    ///
    /// # Errors
    ///
    /// As for [`DeviceGroup::all_reduce_on`].
    pub fn recv_any_on(
        &self,
        stream: &Arc<dyn Stream>,
        data: DeviceSlice,
        tag: u64,
    ) -> Result<DeviceWork> {
        self.0.in_place(stream, Operation::Receive(None, tag), data, false, true)
    }

    /// Fails all messages that are under way, and the process group.
    pub fn abort(&self) {
        self.0.abort();
    }
}
