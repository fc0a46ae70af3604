//! Calls of the devices among themselves, by a stand-in for NCCL.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use drumline_accel::{
    DeviceGroup, DeviceOptions, DeviceSlice, DeviceWork, Result, Stream, Wanted, Way,
};
use drumline_device::fabric::{Communicator, Fabric, Work};
use drumline_group::backend::{Backend, Request, register_backend};
use drumline_group::{Cause, CollectiveError, ErrorKind};
use drumline_group::{Config, DType, Element, Operator, ReduceOp, algorithms::SumOrder, bf16};
use drumline_standin::library;

use crate::common::{Bench, Data, Member, bench, config, finish, small};

fn with_nccl() -> Config {
    config().nccl_library(library())
}

fn options(way: Wanted) -> DeviceOptions {
    small().way(way)
}

/// Two ranks, each with a device of its own.
fn world<R: Send>(bench: &Bench, rank: impl Fn(Member) -> R + Sync) -> Vec<R> {
    bench.world(2, &with_nccl(), rank)
}

fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| ((rank + 1) * (index % 50 + 1)) as f32).collect()
}

type Call = fn(&DeviceGroup, &Arc<dyn Stream>, DeviceSlice, DeviceSlice) -> Result<DeviceWork>;

/// A call, the lengths of its input and its output in blocks, and what it leaves in the output of a rank, by element.
struct Case {
    name: &'static str,
    call: Call,
    input: fn(usize) -> usize,
    output: fn(usize) -> usize,
    expected: fn(usize, usize) -> f32,
}

const LEN: usize = 1_000;

fn value(rank: usize, index: usize) -> f32 {
    ((rank + 1) * (index % 50 + 1)) as f32
}

const CASES: [Case; 5] = [
    Case {
        name: "all_gather",
        call: |on, stream, from, to| on.all_gather_on(stream, from, to),
        input: |_| 1,
        output: |_| 2,
        expected: |_, index| value(index / LEN, index % LEN),
    },
    Case {
        name: "reduce_scatter",
        call: |on, stream, from, to| on.reduce_scatter_on(stream, from, to, ReduceOp::Sum),
        input: |_| 2,
        output: |_| 1,
        expected: |rank, index| value(0, rank * LEN + index) + value(1, rank * LEN + index),
    },
    Case {
        name: "gather",
        call: |on, stream, from, to| on.gather_on(stream, from, to, 1),
        input: |_| 1,
        output: |rank| 2 * rank,
        expected: |_, index| value(index / LEN, index % LEN),
    },
    Case {
        name: "scatter",
        call: |on, stream, from, to| on.scatter_on(stream, from, to, 1),
        input: |rank| 2 * rank,
        output: |_| 1,
        expected: |rank, index| value(1, rank * LEN + index),
    },
    Case {
        name: "all_to_all",
        call: |on, stream, from, to| on.all_to_all_on(stream, from, to),
        input: |_| 2,
        output: |_| 2,
        expected: |rank, index| value(index / LEN, rank * LEN + index % LEN),
    },
];

#[test]
fn every_call_that_nccl_has_is_right() {
    for seed in 0..4 {
        let bench = bench();
        bench.controls.seed(seed);
        world(&bench, |member| {
            let (rank, on, stream) =
                (member.rank(), member.on(&options(Wanted::Nccl)), member.stream());
            let way = on.explain(DType::F32);
            assert!(
                matches!(&way, Way::Direct { library, .. } if library.contains("nccl")),
                "{way}"
            );
            for case in &CASES {
                let of = |blocks: usize| values(rank, blocks * LEN);
                let input = Data::new(&member.device, &of((case.input)(rank)));
                let output = Data::new(&member.device, &vec![0_f32; (case.output)(rank) * LEN]);
                [&input, &output].iter().for_each(|data| data.put(&*stream));
                let work = (case.call)(&on, &stream, input.slice(), output.slice()).unwrap();
                work.join(&stream).unwrap();
                output.fetch(&*stream);
                finish(&stream);
                let found = output.found();
                let wrong = (0..found.len()).find(|at| found[*at] != (case.expected)(rank, *at));
                assert_eq!(wrong, None, "{} on rank {rank}", case.name);
            }
            for root in 0..2 {
                let data = Data::new(&member.device, &values(rank, LEN));
                data.put(&*stream);
                on.broadcast_on(&stream, data.slice(), root).unwrap().join(&stream).unwrap();
                data.fetch(&*stream);
                finish(&stream);
                assert_eq!(data.found(), values(root, LEN));

                let data = Data::new(&member.device, &values(rank, LEN));
                data.put(&*stream);
                let work = on.reduce_on(&stream, data.slice(), ReduceOp::Max, root).unwrap();
                work.join(&stream).unwrap();
                data.fetch(&*stream);
                finish(&stream);
                let expected = if rank == root { values(1, LEN) } else { values(rank, LEN) };
                assert_eq!(data.found(), expected);
            }
            sums::<f32>(&member, &on, |it| it as f32);
            sums::<f64>(&member, &on, f64::from);
            sums::<i32>(&member, &on, |it| it as i32);
            sums::<bf16>(&member, &on, |it| bf16::from_f32(it as f32));
            // What NCCL does not have goes through the host.
            let data = Data::new(&member.device, &values(rank, LEN));
            data.put(&*stream);
            let halves = Operator::premul_sum(0.5_f32);
            on.all_reduce_on(&stream, data.slice(), halves).unwrap().join(&stream).unwrap();
            data.fetch(&*stream);
            on.barrier_on(&stream).unwrap().wait().unwrap();
            finish(&stream);
            assert!((0..LEN).all(|at| data.found()[at] == 1.5 * value(0, at)));
            on.destroy().unwrap();
        });
        bench.is_clean();
    }
}

/// Many calls under way, of which the host makes some.
fn sums<T: Element + PartialEq>(member: &Member, on: &DeviceGroup, of: fn(u8) -> T) {
    let stream = member.stream();
    let own = of(1 + member.rank() as u8);
    let data: Vec<Data<T>> =
        (0..8).map(|len| Data::new(&member.device, &vec![own; len * 100])).collect();
    let mut works = Vec::new();
    for (number, data) in data.iter().enumerate() {
        data.put(&*stream);
        if number % 3 == 2 {
            works.push(on.barrier_on(&stream).unwrap());
        }
        works.push(on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap());
    }
    works.iter().for_each(|work| work.join(&stream).unwrap());
    data.iter().for_each(|data| data.fetch(&*stream));
    finish(&stream);
    assert!(data.iter().flat_map(Data::found).all(|it| it == of(3)));
}

#[test]
fn the_faster_way_is_taken_and_said() {
    let bench = bench();
    let told = world(&bench, |member| {
        let on = member.on(&options(Wanted::Auto));
        let (why, way) = (on.why(), on.explain(DType::F32));
        let goes_direct = matches!(way, Way::Direct { .. });
        sums::<f32>(&member, &on, |it| it as f32);
        // What NCCL lacks is no error.
        let bits = Data::new(&member.device, &[1_u8 << member.rank(); 9]);
        let stream = member.stream();
        bits.put(&*stream);
        on.all_reduce_on(&stream, bits.slice(), ReduceOp::Bor).unwrap().join(&stream).unwrap();
        bits.fetch(&*stream);
        finish(&stream);
        assert_eq!(bits.found(), [3; 9]);
        on.destroy().unwrap();
        (why, goes_direct)
    });
    assert_eq!(told[0], told[1]);
    assert!(told[0].0.contains("us by NCCL, and"), "{}", told[0].0);
    bench.is_clean();
}

#[test]
fn what_cannot_be_is_refused_on_every_rank_by_name() {
    let refused = |ranks: usize, config: &Config, options: &DeviceOptions, parts: &[&str]| {
        let bench = bench();
        bench.world(ranks, config, |member| {
            let device = Arc::new(member.device.clone());
            let error = DeviceGroup::new(&member.group, device, options).unwrap_err().to_string();
            let is_told = parts.iter().all(|part| error.contains(part));
            assert!(is_told, "rank {}: {error}", member.rank());
        });
        bench.is_clean();
    };
    let nccl = options(Wanted::Nccl);
    let nowhere = config().nccl_library("/no/libnccl.so");
    refused(2, &nowhere, &nccl, &["rank 0 has no NCCL", "/no/libnccl.so"]);
    // The machine has two devices.
    refused(3, &with_nccl(), &nccl, &["ranks 0 and 2 are on one GPU", "NCCL_"]);
    let order = nccl.clone().order(SumOrder::Rank);
    refused(2, &with_nccl(), &order, &["order of Rank were asked for"]);
    // Unless it is asked for, the host is the way.
    let bench = bench();
    bench.world(3, &with_nccl(), |member| {
        let on = member.on(&options(Wanted::Auto));
        assert!(on.why().contains("are on one GPU"), "{}", on.why());
        sums_of_three(&member, &on);
        on.destroy().unwrap();
    });
    bench.is_clean();
}

fn sums_of_three(member: &Member, on: &DeviceGroup) {
    let stream = member.stream();
    let data = Data::new(&member.device, &[1_f32; 500]);
    data.put(&*stream);
    on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap().join(&stream).unwrap();
    data.fetch(&*stream);
    finish(&stream);
    assert_eq!(data.found(), [3.0; 500]);
}

#[test]
fn sums_that_nccl_lacks_are_refused_where_it_was_asked_for() {
    let bench = bench();
    world(&bench, |member| {
        let on = member.on(&options(Wanted::Nccl));
        let stream = member.stream();
        let bits = Data::new(&member.device, &[1_u8; 8]);
        let floats = Data::new(&member.device, &[1_f32; 8]);
        if member.rank() == 0 {
            let refused = |work: Result<DeviceWork>, part: &str| {
                let error = work.unwrap_err().to_string();
                assert!(error.contains(part), "{error}");
            };
            let or = on.all_reduce_on(&stream, bits.slice(), ReduceOp::Bor);
            refused(or, "NCCL has no operators on bits");
        }
        // No rank has heard of it.
        floats.put(&*stream);
        on.all_reduce_on(&stream, floats.slice(), ReduceOp::Sum).unwrap().join(&stream).unwrap();
        floats.fetch(&*stream);
        finish(&stream);
        assert_eq!(floats.found(), [2.0; 8]);
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn some_of_the_ranks_make_a_group_of_their_own() {
    let bench = bench();
    world(&bench, |member| {
        let on = member.on(&options(Wanted::Nccl));
        let own = on.new_group(&[member.rank()]).unwrap();
        let stream = member.stream();
        let data = Data::new(&member.device, &[1_f32; 50]);
        data.put(&*stream);
        own.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap().wait().unwrap();
        on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap().join(&stream).unwrap();
        data.fetch(&*stream);
        finish(&stream);
        assert_eq!(data.found(), [2.0; 50]);
        assert_eq!((own.world_size(), on.world_size()), (1, 2));
        own.destroy().unwrap();
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn ranks_in_different_calls_hear_of_it_and_streams_go_on() {
    let bench = bench();
    let told = world(&bench, |member| {
        let on = member.on(&options(Wanted::Nccl));
        let stream = member.stream();
        let data = Data::new(&member.device, &[1_f32; 600]);
        data.put(&*stream);
        let part = DeviceSlice::new(data.slice().place.part(0..400).unwrap(), DType::F32);
        let data_of_rank = if member.rank() == 0 { data.slice() } else { part };
        let work = on.all_reduce_on(&stream, data_of_rank, ReduceOp::Sum).unwrap();
        // It may have failed already.
        let joined = work.join(&stream);
        let error = work.wait().unwrap_err();
        assert!(joined.is_ok() || joined.unwrap_err().to_string() == error.to_string());
        finish(&stream);
        assert!(
            matches!(on.barrier_on(&stream), Err(error) if error.kind() == ErrorKind::Poisoned)
        );
        on.destroy().unwrap_err();
        error.to_string()
    });
    let names_peer = |at: usize| told[at].contains(&format!("rank {}", 1 - at));
    assert!(names_peer(0) && names_peer(1), "{told:?}");
    for part in ["all_reduce(sum) of 600 f32", "all_reduce(sum) of 100 f32"] {
        assert!(told.iter().all(|text| text.contains(part)), "{told:?}");
    }
    bench.is_clean();
}

#[test]
fn a_rank_that_panics_is_named_and_the_other_makes_a_new_group() {
    let bench = bench();
    let told = world(&bench, |member| {
        let on = member.on(&options(Wanted::Nccl));
        let stream = member.stream();
        let data = Data::new(&member.device, &[1_f32; 5_000]);
        data.put(&*stream);
        if member.rank() == 1 {
            let panics = thread::spawn(move || {
                let _on = on;
                panic!("planned");
            });
            assert!(panics.join().is_err());
            return String::new();
        }
        let work = on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum);
        let error = work.and_then(|work| work.wait()).unwrap_err().to_string();
        finish(&stream);
        on.destroy().unwrap_err();
        let alone = member.group.new_group(&[0], &drumline_group::GroupOptions::default()).unwrap();
        let device = Arc::new(member.device.clone());
        let on = DeviceGroup::new(&alone, device, &options(Wanted::Nccl)).unwrap();
        on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap().wait().unwrap();
        on.destroy().unwrap();
        error
    });
    assert!(told[0].contains("rank 1"), "{}", told[0]);
    bench.is_clean();
}

#[test]
fn a_call_of_nccl_that_fails_is_told_to_all() {
    for function in ["ncclAllReduce", "ncclGroupEnd", "ncclCommInitRankConfig", "ncclGetUniqueId"] {
        let bench = bench();
        bench.controls.fail(function, 1, 3);
        let told = world(&bench, |member| {
            let device = Arc::new(member.device.clone());
            let stream = member.stream();
            let data = Data::new(&member.device, &[1_f32; 500]);
            data.put(&*stream);
            let sum = || {
                let on = DeviceGroup::new(&member.group, device, &options(Wanted::Nccl))?;
                let summed = on
                    .all_reduce_on(&stream, data.slice(), ReduceOp::Sum)
                    .and_then(|work| work.wait());
                let ended = on.destroy();
                summed.and(ended)
            };
            let told = sum().err().map(|error| error.to_string());
            finish(&stream);
            told
        });
        let names = |text: &Option<String>| text.as_ref().is_some_and(|text| text.contains("nccl"));
        // ncclGroupEnd may not be called for one operation.
        assert!(told.iter().all(names) || function == "ncclGroupEnd", "{function}: {told:?}");
        bench.gives_back();
    }
}

/// A backend for one rank, which has a fabric of its own.
#[derive(Debug)]
struct WithFabric(Arc<dyn Fabric>);

/// Calls that went by that fabric.
static CALLS: AtomicUsize = AtomicUsize::new(0);

impl Backend for WithFabric {
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
        let own = request.contribution().to_vec();
        request.data.copy_from_slice(&own);
        Ok(())
    }

    fn on_device(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(Arc::new(self.0.clone()))
    }

    fn abort(&self, _: &CollectiveError) {}

    fn shutdown(&self, _: Instant) -> Result<(), Cause> {
        Ok(())
    }
}

#[derive(Debug)]
struct Counted<T: ?Sized>(Arc<T>);

impl Fabric for Counted<dyn Fabric> {
    fn name(&self) -> String {
        "nccl, counted".to_owned()
    }

    fn supports(&self, dtype: DType, work: Work) -> Result<(), String> {
        self.0.supports(dtype, work)
    }

    fn unique_id(&self) -> drumline_device::Result<Vec<u8>> {
        self.0.unique_id()
    }

    fn join(
        &self,
        id: &[u8],
        rank: usize,
        size: usize,
    ) -> drumline_device::Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Joined(self.0.join(id, rank, size)?)))
    }

    fn one_rank_each(&self) -> Option<String> {
        None
    }
}

#[derive(Debug)]
struct Joined(Arc<dyn Communicator>);

impl Communicator for Joined {
    fn is_ready(&self) -> drumline_device::Result<bool> {
        self.0.is_ready()
    }

    fn queue(
        &self,
        calls: &[drumline_device::fabric::Call],
        stream: &dyn Stream,
    ) -> drumline_device::Result<()> {
        CALLS.fetch_add(calls.len(), Ordering::Relaxed);
        self.0.queue(calls, stream)
    }

    fn abort(&self) -> drumline_device::Result<()> {
        self.0.abort()
    }
}

#[test]
fn a_backend_may_have_a_fabric_of_its_own() {
    let bench = bench();
    // The registry keeps this, so it keeps nothing of the device.
    let fabric = || -> Arc<dyn Fabric> {
        let device = drumline_cuda::Driver::load(Some(&library())).unwrap().device(0).unwrap();
        Arc::new(Counted(drumline_accel::Device::fabric(&device, Some(&library())).unwrap()))
    };
    register_backend("with-fabric", move |_| Ok(Arc::new(WithFabric(fabric())))).unwrap();
    bench.world(1, &config().backend("with-fabric"), |member| {
        let on = member.on(&options(Wanted::Nccl));
        assert!(on.explain(DType::F32).to_string().contains("nccl, counted"));
        let data = Data::new(&member.device, &[1_f32; 50]);
        let stream = member.stream();
        data.put(&*stream);
        on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap().join(&stream).unwrap();
        data.fetch(&*stream);
        finish(&stream);
        assert_eq!(data.found(), [1.0; 50]);
        on.destroy().unwrap();
    });
    assert_eq!(CALLS.load(Ordering::Relaxed), 1);
    bench.is_clean();
}
