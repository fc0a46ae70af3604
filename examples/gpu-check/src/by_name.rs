//! Gradients by name in random orders, beside one all-reduce of as many bytes.

use std::sync::Arc;

use anyhow::{Context, ensure};
use drumline::{
    DType, ProcessGroup, ReduceOp,
    async_reduce::{AsyncReduceOptions, TensorRegistry},
    device::{Device, DeviceAsyncReduce, DeviceGroup, DeviceOptions, DeviceSlice, Driver, Wanted},
};

use crate::Options;
use crate::sums::{bytes_of, value};
use crate::table::{gb_s, median, row, size};

/// As many as the layers of hfreduce's own benchmark, unless the longest copy is short.
const TENSORS: usize = 46;
const TENSOR_BYTES: usize = 4 << 20;

pub(crate) fn headline() {
    println!(
        "\n{TENSORS} gradients by name, in random orders, beside one all-reduce of as many bytes"
    );
    row("ranks", ["bytes", "us", "GB/s", "of one"].map(str::to_owned));
}

/// What one rank does.
pub(crate) fn one(options: &Options, rank: usize) -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = Driver::load(options.library.as_deref())?.device(options.device)?;
    let bytes = TENSOR_BYTES.min(options.bytes_max / TENSORS).next_multiple_of(4);
    let stream = device.stream()?;

    let whole = device.allocate(TENSORS * bytes)?;
    let through_host = DeviceOptions::default().way(Wanted::Host);
    let on = DeviceGroup::new(&group, Arc::new(device.clone()), &through_host)?;
    let all = DeviceSlice::new(whole.place(), DType::F32);
    let once =
        median(options.rounds, || Ok(on.all_reduce_on(&stream, all, ReduceOp::Avg)?.wait()?))?;
    on.destroy().context("at the end")?;

    let mut registry = TensorRegistry::new();
    let names: Vec<String> = (0..TENSORS).map(|number| format!("layer{number}")).collect();
    for name in &names {
        registry.register::<f32>(name, bytes / 4)?;
    }
    let mut fused = None;
    let mut reduce = DeviceAsyncReduce::new(
        registry,
        &group,
        Arc::new(device.clone()),
        &DeviceOptions::default(),
        &AsyncReduceOptions::default(),
        |bytes| {
            let memory = device.allocate(bytes).map_err(|error| error.to_string())?;
            Ok(fused.insert(memory).place())
        },
    )?;
    let gradient = |number: usize| -> anyhow::Result<DeviceSlice> {
        let place = whole.place().part(number * bytes..(number + 1) * bytes);
        Ok(DeviceSlice::new(place.context("a gradient lies beyond the memory")?, DType::F32))
    };

    // Right first: one gradient with values, and zeros elsewhere.
    let own: Vec<f32> = (0..bytes / 4).map(|at| value(rank, at)).collect();
    let mut expected = own.clone();
    group.all_reduce(&mut expected, ReduceOp::Avg)?;
    let mut probe = device.allocate(bytes)?;
    probe.write(&bytes_of(&own))?;
    for (number, name) in names.iter().enumerate() {
        let from = match number {
            0 => DeviceSlice::new(probe.place(), DType::F32),
            _ => gradient(number)?,
        };
        reduce.async_reduce_from(name, from, &stream)?;
    }
    reduce.synchronize(&stream)?;
    stream.copy_within(reduce.gradient(&names[0])?.place, probe.place())?;
    stream.record()?.wait()?;
    let mut found = vec![0; bytes];
    probe.read(&mut found)?;
    ensure!(found == bytes_of(&expected), "gradients of {} were summed wrongly", size(bytes));

    let mut state = rank as u64 + 1;
    let time = median(options.rounds, || {
        let mut order: Vec<usize> = (0..TENSORS).collect();
        for at in (1..TENSORS).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            order.swap(at, (state >> 33) as usize % (at + 1));
        }
        for number in order {
            reduce.async_reduce_from(&names[number], gradient(number)?, &stream)?;
        }
        reduce.synchronize(&stream)?;
        Ok(reduce.wait()?)
    })?;
    reduce.stop().context("at the end")?;
    if rank == 0 {
        let us = format!("{:.1}", time.as_secs_f64() * 1e6);
        let ratio = time.as_secs_f64() / once.as_secs_f64().max(1e-12);
        let ranks = group.world_size().to_string();
        let all = TENSORS * bytes;
        row(&ranks, [size(all), us, gb_s(all, time), format!("{ratio:.2} x")]);
    }
    group.destroy()?;
    Ok(())
}
