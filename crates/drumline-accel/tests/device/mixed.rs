//! Ranks without a GPU beside ranks with one.

use std::sync::Arc;

use drumline_accel::{Device, DeviceGroup, DeviceOptions, DeviceSlice, Place, Wanted};
use drumline_cuda::DeviceMemory;
use drumline_device::{HostDevice, HostMemory};
use drumline_group::{DType, Element, ReduceOp, bf16};

use crate::common::{Member, bench, config, small};

/// Memory of whichever device a rank has.
enum Memory {
    OfGpu(DeviceMemory),
    OfHost(HostMemory),
}

impl Memory {
    fn place(&self) -> Place {
        match self {
            Memory::OfGpu(memory) => memory.place(),
            Memory::OfHost(memory) => memory.place(),
        }
    }

    fn found<T: Element>(&self, len: usize) -> Vec<T> {
        let mut found = vec![T::zeroed(); len];
        let bytes = bytemuck::cast_slice_mut(&mut found);
        match self {
            Memory::OfGpu(memory) => memory.read(bytes).unwrap(),
            Memory::OfHost(memory) => memory.read(bytes).unwrap(),
        }
        found
    }
}

/// A rank, with its device or without one.
struct End {
    device: Arc<dyn Device>,
    /// Its own device, where it has none.
    host: Option<HostDevice>,
    member: Member,
}

impl End {
    fn new(member: Member, has_gpu: bool) -> End {
        let host = (!has_gpu).then(HostDevice::new);
        let device: Arc<dyn Device> = match &host {
            Some(host) => Arc::new(host.clone()),
            None => Arc::new(member.device.clone()),
        };
        End { device, host, member }
    }

    fn holding<T: Element>(&self, values: &[T]) -> Memory {
        let bytes = bytemuck::cast_slice(values);
        match &self.host {
            Some(host) => {
                let mut memory = host.allocate(bytes.len());
                memory.write(bytes).unwrap();
                Memory::OfHost(memory)
            }
            None => {
                let mut memory = self.member.device.allocate(bytes.len()).unwrap();
                memory.write(bytes).unwrap();
                Memory::OfGpu(memory)
            }
        }
    }
}

fn slice(memory: &Memory, dtype: DType) -> DeviceSlice {
    DeviceSlice::new(memory.place(), dtype)
}

/// Several windows of sums, whose bits are those of the host.
fn sums<T: Element>(end: &End, on: &DeviceGroup, of: fn(f32) -> T) {
    let rank = end.member.rank();
    for len in [1, 700, 5_000] {
        let own: Vec<T> = (0..len).map(|at| of(((rank * 31 + at) as f32).sin() * 1e3)).collect();
        let mut expected = own.clone();
        end.member.group.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
        let memory = end.holding(&own);
        let stream = end.device.stream().unwrap();
        let work = on.all_reduce_on(&stream, slice(&memory, T::DTYPE), ReduceOp::Sum).unwrap();
        work.join(&stream).unwrap();
        stream.record().unwrap().wait().unwrap();
        let found = memory.found::<T>(len);
        let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
        assert!(bits(&found) == bits(&expected), "{len} {} on rank {rank}", T::DTYPE);
    }
}

#[test]
fn ranks_with_and_without_a_gpu_get_the_same() {
    for (ranks, with_gpu) in [(2, [true, false, true, false]), (3, [false, true, true, false])]
        .into_iter()
        .chain([(4, [true, false, false, true]), (2, [false; 4])])
    {
        for config in [config(), config().shared_memory(false)] {
            let bench = bench();
            bench.world(ranks, &config, |member| {
                let rank = member.rank();
                let end = End::new(member, with_gpu[rank]);
                let on = DeviceGroup::new(&end.member.group, end.device.clone(), &small()).unwrap();
                sums::<f32>(&end, &on, |it| it);
                sums::<f64>(&end, &on, f64::from);
                sums::<bf16>(&end, &on, bf16::from_f32);
                let stream = end.device.stream().unwrap();
                let own = end.holding(&[rank as f32; 300]);
                let all = end.holding(&vec![0_f32; ranks * 300]);
                let (from, to) = (slice(&own, DType::F32), slice(&all, DType::F32));
                on.all_gather_on(&stream, from, to).unwrap().wait().unwrap();
                let expected: Vec<f32> = (0..ranks * 300).map(|at| (at / 300) as f32).collect();
                assert_eq!(all.found::<f32>(ranks * 300), expected);
                on.broadcast_on(&stream, from, ranks - 1).unwrap().wait().unwrap();
                assert_eq!(own.found::<f32>(300), [(ranks - 1) as f32; 300]);
                on.barrier_on(&stream).unwrap().wait().unwrap();
                drop((own, all));
                on.destroy().unwrap();
            });
            bench.is_clean();
        }
    }
}

#[test]
fn nccl_takes_no_rank_without_a_gpu() {
    let bench = bench();
    let config = config().nccl_library(drumline_standin::library());
    bench.world(2, &config, |member| {
        let has_gpu = member.rank() == 0;
        let end = End::new(member, has_gpu);
        let with = |options: &DeviceOptions| {
            DeviceGroup::new(&end.member.group, end.device.clone(), options)
        };
        let error = with(&small().way(Wanted::Nccl)).unwrap_err().to_string();
        assert!(error.contains("rank 1 has no NCCL: host:0"), "{error}");
        let on = with(&small()).unwrap();
        assert!(on.why().contains("rank 1 has no NCCL"), "{}", on.why());
        sums::<f32>(&end, &on, |it| it);
        on.destroy().unwrap();
    });
    bench.is_clean();
}
