//! Calls every operation on two ranks with GPUs.

use std::{fmt::Display, sync::Arc};

use drumline::{
    Config, DType, ErrorKind, ProcessGroup, ReduceOp, Section, backend,
    device::{
        CudaDevice, Device as _, DeviceGroup, DeviceMemory, DeviceOptions, DeviceSlice, DeviceWork,
        Driver, DriverError, Result, Stream, Wanted,
    },
};

use super::{
    operations::OPERATIONS,
    report::{Column, NCCL, RANKS},
    try_out::{attempt, world},
};

/// One rank's end.
struct Rank<'a> {
    group: &'a ProcessGroup,
    on: DeviceGroup,
    device: CudaDevice,
    stream: Arc<dyn Stream>,
}

/// Calls an operation on the device, and returns whether its result is right.
type Attempt = fn(&Rank<'_>) -> Result<bool>;

/// Those of `OPERATIONS` that have a form for devices. The others are calls of the host alone.
const ON_DEVICE: [(&str, Attempt); 10] = [
    ("send, recv", |rank| {
        let (ranks, own) = (rank.group.world_size(), rank.group.rank());
        let (sent, got) = (rank.holding(&[own as f32])?, rank.holding(&[9.0])?);
        let before = (own + ranks - 1) % ranks;
        let sending = rank.on.send_on(&rank.stream, slice(&sent), (own + 1) % ranks, 3)?;
        rank.on.recv_on(&rank.stream, slice(&got), before, 3)?.wait()?;
        sending.wait()?;
        rank.holds(&got, &[before as f32])
    }),
    ("broadcast", |rank| {
        let data = rank.own()?;
        rank.on.broadcast_on(&rank.stream, slice(&data), 1)?.wait()?;
        rank.holds(&data, &[1.0])
    }),
    ("all_reduce", |rank| {
        let data = rank.own()?;
        let work: DeviceWork = rank.on.all_reduce_on(&rank.stream, slice(&data), ReduceOp::Sum)?;
        work.join(&rank.stream)?;
        work.wait()?;
        rank.holds(&data, &[rank.sum()])
    }),
    ("reduce", |rank| {
        let data = rank.own()?;
        rank.on.reduce_on(&rank.stream, slice(&data), ReduceOp::Sum, 0)?.wait()?;
        let own = rank.group.rank();
        rank.holds(&data, &[if own == 0 { rank.sum() } else { own as f32 }])
    }),
    ("all_gather", |rank| {
        let (own, all) = (rank.own()?, rank.zeros(rank.group.world_size())?);
        rank.on.all_gather_on(&rank.stream, slice(&own), slice(&all))?.wait()?;
        rank.holds(&all, &rank.ranks())
    }),
    ("gather", |rank| {
        let expected = if rank.group.rank() == 0 { rank.ranks() } else { vec![] };
        let (own, all) = (rank.own()?, rank.zeros(expected.len())?);
        rank.on.gather_on(&rank.stream, slice(&own), slice(&all), 0)?.wait()?;
        rank.holds(&all, &expected)
    }),
    ("scatter", |rank| {
        let brought = if rank.group.rank() == 0 { rank.ranks() } else { vec![] };
        let (input, data) = (rank.holding(&brought)?, rank.holding(&[9.0])?);
        rank.on.scatter_on(&rank.stream, slice(&input), slice(&data), 0)?.wait()?;
        rank.holds(&data, &[rank.group.rank() as f32])
    }),
    ("reduce_scatter", |rank| {
        let (input, data) = (rank.holding(&rank.ranks())?, rank.zeros(1)?);
        let work =
            rank.on.reduce_scatter_on(&rank.stream, slice(&input), slice(&data), ReduceOp::Sum)?;
        work.wait()?;
        rank.holds(&data, &[(rank.group.rank() * rank.group.world_size()) as f32])
    }),
    ("all_to_all", |rank| {
        let ranks = rank.group.world_size();
        let (input, data) = (rank.holding(&rank.ranks())?, rank.zeros(ranks)?);
        rank.on.all_to_all_on(&rank.stream, slice(&input), slice(&data))?.wait()?;
        rank.holds(&data, &vec![rank.group.rank() as f32; ranks])
    }),
    ("barrier", |rank| rank.on.barrier_on(&rank.stream)?.wait().map(|()| true)),
];

/// What two ranks can do: through the host on the first GPU, which they share, or by NCCL, which takes two.
pub(super) fn try_on_device(config: &Config, way: Wanted) -> Column {
    let carrier = if way == Wanted::Nccl { NCCL } else { backend::BUILT_IN };
    let column = |kind, tried| Column::on_device(carrier, kind, tried);
    let found = Driver::load(config.cuda_library.as_deref()).and_then(|driver| {
        let taken = if way == Wanted::Nccl { RANKS } else { 1 };
        let devices = (0..driver.devices()?.min(taken)).map(|ordinal| driver.device(ordinal));
        Ok((driver.family().name(), devices.collect::<Result<Vec<_>, _>>()?))
    });
    let (kind, devices) = match found {
        Ok((kind, devices)) if devices.is_empty() => {
            return column(kind, Err("the driver has no device".to_owned()));
        }
        Ok(found) => found,
        Err(error) => return column("cuda", Err(error.to_string())),
    };
    let tried_on = |call: Attempt| {
        world(config, |group| on(group, &devices[group.rank() % devices.len()], way, call))
    };
    if way == Wanted::Nccl
        && let Err(problem) = tried_on(|_| Ok(true))
    {
        return column(kind, Err(problem));
    }
    let of_host = |name: &str| OPERATIONS.iter().find(|(known, _)| *known == name);
    let tried = OPERATIONS.iter().map(|(name, _)| {
        let on_device = ON_DEVICE.iter().find(|(known, _)| known == name);
        match (on_device, of_host(name)) {
            (Some((_, call)), _) => attempt(name, tried_on(*call)),
            (None, Some((_, call))) => {
                attempt(name, world(config, |group| call(group).map_err(text)))
            }
            (None, None) => None,
        }
    });
    column(kind, Ok(tried.collect()))
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn on(group: &ProcessGroup, device: &CudaDevice, way: Wanted, call: Attempt) -> Result<bool> {
    let options = DeviceOptions::default().way(way);
    let on = DeviceGroup::new(group, Arc::new(device.clone()), &options)?;
    let stream = device.stream().map_err(of_driver)?;
    let rank = Rank { group, on: on.clone(), device: device.clone(), stream };
    let is_right = call(&rank)?;
    drop(rank);
    on.destroy()?;
    Ok(is_right)
}

fn slice(memory: &DeviceMemory) -> DeviceSlice {
    DeviceSlice::new(memory.place(), DType::F32)
}

fn of_driver(error: DriverError) -> drumline::Error {
    let text = format!("drumline check: {error}");
    drumline::Error::new(ErrorKind::Device, Section::Device, text)
}

impl Rank<'_> {
    /// Memory of the device with these values.
    fn holding(&self, values: &[f32]) -> Result<DeviceMemory> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let mut memory = self.device.allocate(bytes.len()).map_err(of_driver)?;
        memory.write(&bytes).map_err(of_driver)?;
        Ok(memory)
    }

    fn zeros(&self, count: usize) -> Result<DeviceMemory> {
        self.holding(&vec![0.0; count])
    }

    /// The input of a rank: its number.
    fn own(&self) -> Result<DeviceMemory> {
        self.holding(&[self.group.rank() as f32])
    }

    /// The inputs of all ranks.
    fn ranks(&self) -> Vec<f32> {
        (0..self.group.world_size()).map(|rank| rank as f32).collect()
    }

    fn sum(&self) -> f32 {
        self.ranks().iter().sum()
    }

    fn holds(&self, memory: &DeviceMemory, expected: &[f32]) -> Result<bool> {
        let mut bytes = vec![0; 4 * expected.len()];
        memory.read(&mut bytes).map_err(of_driver)?;
        let expected: Vec<u8> = expected.iter().flat_map(|value| value.to_ne_bytes()).collect();
        Ok(bytes == expected)
    }
}
