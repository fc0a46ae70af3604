//! Every call of ranks without a GPU beside ranks with one.

use std::sync::Arc;

use drumline_accel::{Device, DeviceGroup, DeviceOptions, DeviceSlice, Error, Stream, Way};
use drumline_device::{Flight, HostDevice, Memory, Part};
use drumline_group::{DType, ReduceOp};

use crate::collectives::{self, values};
use crate::common::{Bench, Member, bench, config, finish, small};
use crate::pieces::{self, Counts};

/// What every rank has, of any driver.
struct Mixed {
    member: Member,
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
}

/// Elements on a device of any driver.
struct Data {
    memory: Box<dyn Memory>,
    len: usize,
}

impl Mixed {
    fn new(member: Member, has_gpu: bool) -> Mixed {
        let device: Arc<dyn Device> = match has_gpu {
            true => Arc::new(member.device.clone()),
            false => Arc::new(HostDevice::new()),
        };
        let stream = device.stream().unwrap();
        Mixed { member, device, stream }
    }

    fn group(&self, options: &DeviceOptions) -> Result<DeviceGroup, Error> {
        DeviceGroup::new(&self.member.group, self.device.clone(), options)
    }

    /// Has the stream put elements on the device.
    fn data(&self, values: &[f32]) -> Data {
        let bytes = size_of_val(values);
        let data = Data { memory: self.device.memory(bytes).unwrap(), len: values.len() };
        let mut pinned = self.device.pinned(bytes).unwrap();
        pinned.as_mut().copy_from_slice(bytemuck::cast_slice(values));
        let copied = self.stream.copy_in(&data.parts(), Flight::from(pinned)).unwrap();
        copied.land().unwrap();
        data
    }

    /// What is there when the stream has come so far.
    fn found(&self, data: &Data) -> Vec<f32> {
        let pinned = Flight::from(self.device.pinned(data.memory.place().bytes).unwrap());
        let copied = self.stream.copy_out(&data.parts(), pinned).unwrap();
        let mut found = vec![0.0; data.len];
        bytemuck::cast_slice_mut(&mut found).copy_from_slice(copied.land().unwrap().as_ref());
        found
    }
}

impl Data {
    fn parts(&self) -> [Part; 1] {
        [Part { place: self.memory.place(), at: 0, window: None }]
    }

    fn slice(&self) -> DeviceSlice {
        DeviceSlice { place: self.memory.place(), dtype: DType::F32 }
    }
}

/// Worlds of 2 to 4 ranks: which ranks have a GPU, by bit.
fn worlds() -> impl Iterator<Item = (usize, usize)> {
    [(2, 0b01), (2, 0b10), (3, 0b101), (3, 0b010), (4, 0b0011), (4, 0b1000), (3, 0)].into_iter()
}

fn world<R: Send>(
    bench: &Bench,
    (ranks, gpus): (usize, usize),
    shares_memory: bool,
    rank: impl Fn(Mixed) -> R + Sync,
) -> Vec<R> {
    let config = config().shared_memory(shares_memory);
    bench.world(ranks, &config, |member| {
        let has_gpu = gpus >> member.rank() & 1 == 1;
        rank(Mixed::new(member, has_gpu))
    })
}

#[test]
fn sums_have_the_bits_of_the_host() {
    for (of, shares_memory) in worlds().flat_map(|of| [(of, true), (of, false)]) {
        let bench = bench();
        world(&bench, of, shares_memory, |mixed| {
            let on = mixed.group(&small()).unwrap();
            let way = on.explain(DType::F32);
            assert_eq!(matches!(way, Way::Slices { .. }), shares_memory, "{of:?}: {way}");
            // Several windows of 1,024 elements are under way at once.
            for (salt, len) in [0, 1, 1_000, 10_001].into_iter().enumerate() {
                let mut expected = values(&mixed.member, len, salt);
                let data = mixed.data(&expected);
                let work = on.all_reduce_on(&mixed.stream, data.slice(), ReduceOp::Avg).unwrap();
                work.join(&mixed.stream).unwrap();
                mixed.member.group.all_reduce(&mut expected, ReduceOp::Avg).unwrap();
                assert!(mixed.found(&data) == expected, "{of:?}, {len} elements");
            }
            let brought = [70, 0, 3_000].map(|len| values(&mixed.member, len, len));
            let all = brought.each_ref().map(|it| mixed.data(it));
            let slices = all.each_ref().map(Data::slice);
            on.all_reduce_coalesced_on(&mixed.stream, &slices, &slices, ReduceOp::Sum)
                .unwrap()
                .join(&mixed.stream)
                .unwrap();
            let mut expected = brought.concat();
            mixed.member.group.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
            let found = all.iter().flat_map(|it| mixed.found(it)).collect::<Vec<_>>();
            assert!(found == expected, "{of:?}, in pieces");
            on.destroy().unwrap();
        });
        bench.is_clean();
    }
}

#[test]
fn every_other_call_has_the_results_of_the_host() {
    for of in worlds() {
        let bench = bench();
        world(&bench, of, true, |mixed| {
            let (ranks, _) = of;
            let (member, stream) = (&mixed.member, &mixed.stream);
            let on = mixed.group(&small()).unwrap();
            for (salt, case) in collectives::CASES.iter().enumerate() {
                for block in [0, 1, 3_001] {
                    let root = (salt + block) % ranks;
                    let is_root = member.rank() == root;
                    let brought = values(member, case.input.of(block, ranks, is_root), salt);
                    let len = case.output.of(block, ranks, is_root);
                    let mut expected = values(member, len, salt + 50);
                    let [input, output] = [&brought, &expected].map(|it| mixed.data(it));
                    let work = (case.on)(&on, stream, input.slice(), output.slice(), root);
                    work.unwrap().join(stream).unwrap();
                    (case.host)(&member.group, &brought, &mut expected, root).unwrap();
                    let what = format!("{}, {of:?}, blocks of {block}", case.name);
                    assert!(mixed.found(&output) == expected, "{what}");
                    assert!(mixed.found(&input) == brought, "the input of {what}");
                }
            }
            for (salt, case) in pieces::CASES.iter().enumerate() {
                let counts = Counts::new(member.rank(), ranks, salt);
                let brought = values(member, (case.input)(&counts), salt);
                let mut expected = values(member, (case.output)(&counts), salt + 50);
                let [input, output] = [&brought, &expected].map(|it| mixed.data(it));
                let (from, to) = ([input.slice()], [output.slice()]);
                let work = (case.on)(&on, stream, &from, &to, &counts);
                work.unwrap().join(stream).unwrap();
                (case.host)(&member.group, &brought, &mut expected, &counts).unwrap();
                assert!(mixed.found(&output) == expected, "{}, {of:?}", case.name);
            }
            // Around: what each has goes to the next.
            let [to, from] = [1, ranks - 1].map(|by| (member.rank() + by) % ranks);
            let [own, got] = [1.0, 9.0].map(|it| mixed.data(&[member.rank() as f32 + it; 2_000]));
            let sent = on.send_on(stream, own.slice(), to, 7).unwrap();
            on.recv_on(stream, got.slice(), from, 7).unwrap().join(stream).unwrap();
            sent.wait().unwrap();
            assert!(mixed.found(&got) == [from as f32 + 1.0; 2_000], "{of:?}");
            on.barrier_on(stream).unwrap().join(stream).unwrap();
            finish(stream);
            on.destroy().unwrap();
        });
        bench.is_clean();
    }
}

#[test]
fn memory_that_is_freed_too_early_is_named_on_all_ranks() {
    let bench = bench();
    let told = world(&bench, (2, 0b01), true, |mixed| {
        let on = mixed.group(&small()).unwrap();
        let data = mixed.data(&[1.0; 100_000]);
        let (slice, is_early) = (data.slice(), mixed.member.rank() == 1);
        let sum = || on.all_reduce_on(&mixed.stream, slice, ReduceOp::Sum).unwrap();
        // More windows than there are slots: without rank 0, the last ones are still to be copied.
        let early = is_early.then(sum);
        let kept = (!is_early).then_some(data);
        mixed.member.group.barrier().unwrap();
        let error = early.unwrap_or_else(sum).wait().unwrap_err();
        on.destroy().unwrap_err();
        drop(kept);
        error.to_string()
    });
    for (rank, error) in told.iter().enumerate() {
        assert!(error.contains("not within memory of this device"), "rank {rank}: {error}");
    }
    assert!(told[0].contains("rank 1"), "{}", told[0]);
}
