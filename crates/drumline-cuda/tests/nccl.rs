//! NCCL's functions, called for real, on a stand-in that has no hardware: ranks are threads, each with a device.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails this way")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;

use drumline_cuda::nccl::{
    Call, Communicator, Nccl, Operator, State, UniqueId, Work, look_in, same_gpu_hint,
};
use drumline_cuda::{CudaDevice, DeviceMemory, Driver};
use drumline_device::{Device, Error, Place, Result, Stream};
use drumline_kernels::{DType, ReduceOp, bf16, f16};
use drumline_standin::{Controls, library, library_without};

/// The stand-in belongs to the process, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Bench {
    controls: Controls,
    driver: Driver,
    nccl: Nccl,
    _turn: MutexGuard<'static, ()>,
}

fn bench() -> Bench {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let controls = Controls::load();
    controls.unset_all();
    controls.set("STANDIN_DEVICES", Some("3"));
    controls.reset();
    let driver = Driver::load(Some(&library())).unwrap();
    Bench { controls, driver, nccl: Nccl::load(Some(&library())).unwrap(), _turn: turn }
}

/// One rank of a test.
struct Rank {
    device: CudaDevice,
    communicator: Communicator,
    stream: Arc<dyn Stream>,
}

impl Bench {
    fn is_clean(&self) {
        assert_eq!(self.controls.violations(), 0, "{}", self.controls.last_violation());
        assert_eq!(self.controls.leaks(), 0);
    }

    fn rank(&self, id: &UniqueId, rank: usize, size: usize) -> Result<Rank> {
        let device = self.driver.device(rank)?;
        let communicator = Communicator::new(&self.nccl, &device, id, rank, size)?;
        Ok(Rank { stream: device.stream()?, device, communicator })
    }

    /// Runs `body` on each rank, in a thread of its own.
    fn ranks<R: Send>(&self, size: usize, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
        let id = self.nccl.unique_id().unwrap();
        thread::scope(|threads| {
            let all: Vec<_> = (0..size)
                .map(|rank| {
                    threads.spawn({
                        let (id, body) = (&id, &body);
                        move || body(self.rank(id, rank, size).unwrap())
                    })
                })
                .collect();
            all.into_iter().map(|it| it.join().unwrap()).collect()
        })
    }
}

impl Rank {
    fn number(&self) -> usize {
        self.communicator.rank()
    }

    fn holding(&self, bytes: &[u8]) -> DeviceMemory {
        let mut memory = self.device.allocate(bytes.len()).unwrap();
        memory.write(bytes).unwrap();
        memory
    }

    fn wait(&self) {
        self.stream.record().unwrap().wait().unwrap();
    }
}

fn read(memory: &DeviceMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.place().bytes];
    memory.read(&mut bytes).unwrap();
    bytes
}

const DTYPES: [DType; 5] = [DType::F32, DType::F64, DType::I32, DType::F16, DType::Bf16];
const COUNT: usize = 6 * 17;

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let bytes = |value: f64| match dtype {
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F64 => value.to_ne_bytes().to_vec(),
        DType::I32 => (value as i32).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(value).to_ne_bytes().to_vec(),
        DType::Bf16 => bf16::from_f64(value).to_ne_bytes().to_vec(),
        other => panic!("{other}"),
    };
    values.iter().flat_map(|value| bytes(*value)).collect()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let value = |it: &[u8]| match dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(it.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(it.try_into().unwrap()),
        DType::I32 => f64::from(i32::from_ne_bytes(it.try_into().unwrap())),
        DType::F16 => f16::from_ne_bytes(it.try_into().unwrap()).to_f64(),
        DType::Bf16 => bf16::from_ne_bytes(it.try_into().unwrap()).to_f64(),
        other => panic!("{other}"),
    };
    bytes.chunks_exact(dtype.size()).map(value).collect()
}

/// What a rank puts in: small whole numbers, whose sums and products are exact in every type.
fn input(rank: usize) -> Vec<f64> {
    (0..COUNT).map(|index| ((rank * 7 + index * 3 + index / 5) % 5 + 1) as f64).collect()
}

/// What the ranks should get.
fn oracle(size: usize, dtype: DType, operator: Operator) -> Vec<f64> {
    let column = |index: usize| (0..size).map(move |rank| input(rank)[index]);
    (0..COUNT)
        .map(|index| match operator {
            Operator::Plain(ReduceOp::Sum) => column(index).sum(),
            Operator::Plain(ReduceOp::Product) => column(index).product(),
            Operator::Plain(ReduceOp::Min) => column(index).fold(f64::MAX, f64::min),
            Operator::Plain(ReduceOp::Max) => column(index).fold(0.0, f64::max),
            Operator::Plain(ReduceOp::Avg) if dtype == DType::I32 => {
                (column(index).sum::<f64>() / size as f64).floor()
            }
            Operator::Plain(ReduceOp::Avg) => column(index).sum::<f64>() / size as f64,
            Operator::PreMulSum(factor) => column(index).map(|it| it * factor).sum(),
            other => panic!("{other:?}"),
        })
        .collect()
}

fn is_right(found: &[u8], expected: &[f64], dtype: DType, operator: Operator, what: &str) {
    let found = decode(dtype, found);
    assert_eq!(found.len(), expected.len());
    // NCCL multiplies with 1 / size in the type of the data: all else is exact.
    let slack = match operator {
        Operator::Plain(ReduceOp::Avg) if dtype != DType::I32 => 0.01,
        _ => 0.0,
    };
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs();
        assert!(
            off <= slack * expected,
            "{what} of {dtype} by {operator:?}, {index}: {found} for {expected}"
        );
    }
}

fn operators(dtype: DType) -> Vec<Operator> {
    use ReduceOp::*;
    let mut all: Vec<Operator> = [Sum, Product, Min, Max, Avg].map(Operator::Plain).to_vec();
    if dtype != DType::I32 {
        all.push(Operator::PreMulSum(0.5));
    }
    all
}

#[test]
fn reductions_are_those_of_an_oracle() {
    for size in 1..=3 {
        let bench = bench();
        bench.controls.seed(size as u64);
        bench.ranks(size, |rank| {
            let (number, stream) = (rank.number(), &*rank.stream);
            let communicator = &rank.communicator;
            for dtype in DTYPES {
                for operator in operators(dtype) {
                    let expected = oracle(size, dtype, operator);
                    let bytes = encode(dtype, &input(number));
                    let from = rank.holding(&bytes);
                    let to = rank.holding(&bytes); // at first in place
                    let place = to.place();
                    communicator.all_reduce(place, place, dtype, operator, stream).unwrap();
                    rank.wait();
                    is_right(&read(&to), &expected, dtype, operator, "all_reduce in place");
                    communicator.all_reduce(from.place(), place, dtype, operator, stream).unwrap();
                    rank.wait();
                    is_right(&read(&to), &expected, dtype, operator, "all_reduce");
                    let root = size - 1;
                    let result = (number == root).then(|| rank.holding(&vec![0; bytes.len()]));
                    let at = result.as_ref().map(DeviceMemory::place);
                    communicator.reduce(from.place(), at, dtype, operator, root, stream).unwrap();
                    rank.wait();
                    if let Some(result) = result {
                        is_right(&read(&result), &expected, dtype, operator, "reduce");
                    }
                    let block = bytes.len() / size;
                    let part = from.place().part(number * block..(number + 1) * block).unwrap();
                    communicator
                        .reduce_scatter(from.place(), part, dtype, operator, stream)
                        .unwrap();
                    rank.wait();
                    let found = &read(&from)[number * block..][..block];
                    let expected = &expected[number * COUNT / size..][..COUNT / size];
                    is_right(found, expected, dtype, operator, "reduce_scatter in place");
                }
            }
        });
        bench.is_clean();
    }
}

const BLOCK: usize = 1000;

/// What rank `from` has for rank `to`.
fn message(from: usize, to: usize) -> Vec<u8> {
    (0..BLOCK).map(|index| (index * 7 + from * 50 + to * 11) as u8).collect()
}

#[test]
fn bytes_go_where_they_should() {
    for size in 1..=3 {
        let bench = bench();
        bench.controls.seed(size as u64);
        bench.ranks(size, |rank| {
            let (number, stream) = (rank.number(), &*rank.stream);
            let communicator = &rank.communicator;
            let one = rank.holding(&message(number, 0));
            let row: Vec<u8> = (0..size).flat_map(|to| message(number, to)).collect();
            let column: Vec<u8> = (0..size).flat_map(|from| message(from, number)).collect();
            let first: Vec<u8> = (0..size).flat_map(|from| message(from, 0)).collect();
            let [row, all] = [rank.holding(&row), rank.holding(&vec![0; size * BLOCK])];
            communicator.all_gather(one.place(), all.place(), stream).unwrap();
            rank.wait();
            assert!(read(&all) == first, "all_gather");
            communicator.all_to_all(row.place(), all.place(), stream).unwrap();
            rank.wait();
            assert!(read(&all) == column, "all_to_all");
            for root in 0..size {
                let is_root = number == root;
                let gathered = rank.holding(&vec![0; size * BLOCK]);
                let to = is_root.then(|| gathered.place());
                communicator.gather(one.place(), to, root, stream).unwrap();
                let place = rank.holding(&message(number, 1));
                communicator.broadcast(place.place(), root, stream).unwrap();
                let part = rank.device.allocate(BLOCK).unwrap();
                let from = is_root.then(|| row.place());
                communicator.scatter(from, part.place(), root, stream).unwrap();
                rank.wait();
                assert!(!is_root || read(&gathered) == first, "gather");
                assert!(read(&place) == message(root, 1), "broadcast");
                assert!(read(&part) == message(root, number), "scatter");
                // In place, a root keeps its own block where it lies.
                let own = gathered.place().part(number * BLOCK..(number + 1) * BLOCK).unwrap();
                if is_root {
                    communicator.gather(own, to, root, stream).unwrap();
                } else {
                    communicator.gather(one.place(), None, root, stream).unwrap();
                }
                rank.wait();
                assert!(!is_root || read(&gathered) == first, "gather in place");
            }
            let right = (number + 1) % size;
            let left = (number + size - 1) % size;
            let calls = [
                Call::Send { from: one.place(), peer: right },
                Call::Receive { to: all.place().part(0..BLOCK).unwrap(), peer: left },
            ];
            communicator.queue(&calls, stream).unwrap();
            if size > 1 && number < 2 {
                let place = row.place().part(0..BLOCK).unwrap();
                match number {
                    0 => communicator.send(one.place(), 1, stream).unwrap(),
                    _ => communicator.recv(place, 0, stream).unwrap(),
                }
            }
            rank.wait();
            assert!(read(&all)[..BLOCK] == message(left, 0), "a ring");
            assert!(number != 1 || read(&row)[..BLOCK] == message(0, 0), "send and recv");
        });
        bench.is_clean();
    }
}

#[test]
fn a_communicator_splits() {
    let bench = bench();
    bench.ranks(3, |rank| {
        let number = rank.number();
        // Ranks 2 and 0 in this order, and rank 1 alone.
        let part = rank.communicator.split(Some(number as u32 % 2), -(number as i32)).unwrap();
        let part = part.unwrap();
        let expected = [(1, 2), (0, 1), (0, 2)][number];
        assert_eq!((part.rank(), part.size()), expected);
        let memory = rank.holding(&encode(DType::F32, &[number as f64 + 1.0]));
        let place = memory.place();
        part.all_reduce(place, place, DType::F32, ReduceOp::Sum, &*rank.stream).unwrap();
        rank.wait();
        assert_eq!(decode(DType::F32, &read(&memory)), [[4.0], [2.0], [4.0]][number]);
        drop(part);
        // Who names no color gets none, and the whole goes on.
        let some = (number > 0).then_some(5);
        let pair = rank.communicator.split(some, 0).unwrap();
        assert_eq!(pair.as_ref().map(Communicator::size), some.map(|_| 2));
        rank.communicator
            .all_reduce(place, place, DType::F32, ReduceOp::Max, &*rank.stream)
            .unwrap();
        rank.wait();
        assert_eq!(decode(DType::F32, &read(&memory)), [4.0]);
        assert!(rank.communicator.split(Some(u32::MAX), 0).is_err());
    });
    bench.is_clean();
}

#[test]
fn calls_of_a_group_go_on_together() {
    let bench = bench();
    bench.ranks(2, |rank| {
        let from = rank.holding(&encode(DType::F32, &input(rank.number())));
        let to: Vec<DeviceMemory> = (0..3).map(|_| rank.holding(&read(&from))).collect();
        let reduce = |to: &DeviceMemory, operator| Call::AllReduce {
            from: from.place(),
            to: to.place(),
            dtype: DType::F32,
            operator,
        };
        let peer = 1 - rank.number();
        let all = [
            reduce(&to[0], Operator::PreMulSum(2.0)),
            Call::Send { from: from.place(), peer },
            Call::Receive { to: to[1].place(), peer },
            reduce(&to[2], ReduceOp::Max.into()),
        ];
        rank.communicator.queue(&all, &*rank.stream).unwrap();
        rank.communicator.queue(&[], &*rank.stream).unwrap();
        rank.wait();
        let expected = |operator| oracle(2, DType::F32, operator);
        assert_eq!(decode(DType::F32, &read(&to[0])), expected(Operator::PreMulSum(2.0)));
        assert_eq!(decode(DType::F32, &read(&to[1])), input(peer));
        assert_eq!(decode(DType::F32, &read(&to[2])), expected(ReduceOp::Max.into()));
    });
    bench.is_clean();
}

#[test]
fn bad_arguments_are_refused_before_anything_is_queued() {
    let bench = bench();
    let together = Barrier::new(2);
    bench.ranks(2, |rank| {
        while rank.communicator.state().unwrap() == State::InProgress {}
        let memory = rank.holding(&[0; 96]);
        let other = bench.driver.device(2).unwrap();
        let (elsewhere, foreign) = (other.allocate(96).unwrap(), other.stream().unwrap());
        let host = [0_u8; 96];
        let on_host = Place { address: host.as_ptr() as u64, bytes: 96 };
        together.wait();
        let before = bench.controls.nccl_calls();
        together.wait();
        let (here, half) = (memory.place(), memory.place().part(0..48).unwrap());
        let reduce = |from, to, dtype, operator: Operator, stream: &dyn Stream| {
            rank.communicator.all_reduce(from, to, dtype, operator, stream).unwrap_err().to_string()
        };
        let (sum, stream) = (Operator::Plain(ReduceOp::Sum), &*rank.stream);
        for (said, problem) in [
            (reduce(here, here, DType::F32, sum, &*foreign), "the stream is of cuda:2"),
            (reduce(elsewhere.place(), here, DType::F32, sum, stream), "memory of cuda:2"),
            (reduce(here, on_host, DType::F32, sum, stream), "memory of the host"),
            (reduce(here, half, DType::F32, sum, stream), "do not fit"),
            (reduce(here, here, DType::Bool, sum, stream), "NCCL has no booleans"),
            (reduce(here, here, DType::F8E4M3, sum, stream), "this is 2.23.4"),
            (reduce(here, here, DType::I32, ReduceOp::Bor.into(), stream), "operators on bits"),
            (reduce(here, here, DType::I32, Operator::PreMulSum(2.0), stream), "premul_sum"),
        ] {
            assert!(said.contains(problem), "{said}");
        }
        assert!(rank.communicator.broadcast(here, 2, stream).is_err());
        let none = Place { address: 0, bytes: 0 };
        rank.communicator.all_reduce(none, none, DType::F32, ReduceOp::Sum, stream).unwrap();
        together.wait();
        assert_eq!(bench.controls.nccl_calls(), before, "NCCL has heard of none of them");
        together.wait();
        rank.communicator.all_reduce(here, here, DType::F32, ReduceOp::Sum, stream).unwrap();
        rank.wait();
        drop((elsewhere, foreign));
    });
    assert!(bench.nccl.supports(DType::I16, Work::Move).is_ok());
    let id = bench.nccl.unique_id().unwrap();
    assert!(bench.rank(&id, 2, 2).err().unwrap().to_string().contains("there is no rank 2"));
    bench.is_clean();
}

#[test]
fn an_abort_frees_a_stream_that_waits_for_a_rank_that_never_comes() {
    let bench = bench();
    for seed in 0..10 {
        bench.controls.seed(seed);
        let over = Barrier::new(2);
        bench.ranks(2, |rank| {
            let communicator = &rank.communicator;
            if rank.number() == 1 {
                // It is there, and queues nothing.
                while communicator.state().unwrap() == State::InProgress {}
                over.wait();
                return;
            }
            let memory = rank.holding(&[1; 64]);
            let place = memory.place();
            communicator
                .all_reduce(place, place, DType::F32, ReduceOp::Sum, &*rank.stream)
                .unwrap();
            let event = rank.stream.record().unwrap();
            for _ in 0..100 {
                assert!(!event.has_come().unwrap(), "seed {seed}");
            }
            thread::scope(|threads| {
                for _ in 0..3 {
                    threads.spawn(|| communicator.abort().unwrap());
                }
                event.wait().unwrap();
            });
            let error = communicator.broadcast(place, 0, &*rank.stream).unwrap_err();
            assert!(matches!(error, Error::Aborted { .. }), "{error:?}");
            assert!(matches!(communicator.state(), Err(Error::Aborted { .. })));
            over.wait();
        });
        bench.is_clean();
    }
}

#[test]
fn an_abort_ends_the_wait_for_ranks_that_do_not_come() {
    let bench = bench();
    let id = bench.nccl.unique_id().unwrap();
    let rank = bench.rank(&id, 0, 2).unwrap();
    assert_eq!(rank.communicator.state().unwrap(), State::InProgress);
    let memory = rank.holding(&[1; 64]);
    thread::scope(|threads| {
        let queued =
            threads.spawn(|| rank.communicator.broadcast(memory.place(), 0, &*rank.stream));
        let split = threads.spawn(|| rank.communicator.split(Some(0), 0));
        rank.communicator.abort().unwrap();
        assert!(matches!(queued.join().unwrap(), Err(Error::Aborted { .. })));
        assert!(matches!(split.join().unwrap(), Err(Error::Aborted { .. })));
    });
    drop(rank);
    drop(memory);
    bench.is_clean();
    // A communicator that is never used, and a split that not all ranks join.
    drop(bench.rank(&id, 1, 2).unwrap());
    let over = Barrier::new(2);
    bench.ranks(2, |rank| {
        while rank.communicator.state().unwrap() == State::InProgress {}
        if rank.number() == 0 {
            thread::scope(|threads| {
                let split = threads.spawn(|| rank.communicator.split(Some(0), 0));
                rank.communicator.abort().unwrap();
                assert!(matches!(split.join().unwrap(), Err(Error::Aborted { .. })));
            });
        }
        over.wait();
    });
    bench.is_clean();
}

#[test]
fn two_ranks_on_one_gpu_are_refused_and_told_what_helps() {
    let bench = bench();
    let pair = |version: &str| {
        bench.controls.set("STANDIN_NCCL_VERSION", Some(version));
        let nccl = Nccl::load(Some(&library())).unwrap();
        let id = nccl.unique_id().unwrap();
        let device = bench.driver.device(0).unwrap();
        let both = [0, 1].map(|rank| Communicator::new(&nccl, &device, &id, rank, 2).unwrap());
        both.map(|it| {
            loop {
                match it.state() {
                    Ok(State::InProgress) => {}
                    other => return other,
                }
            }
        })
    };
    for (version, number) in [("22304", 22_304), ("23007", 23_007)] {
        for state in pair(version) {
            let error = state.unwrap_err();
            let Error::Driver { name, text, .. } = &error else { panic!("{error:?}") };
            assert_eq!(name, "ncclInvalidUsage");
            assert!(text.contains("Duplicate GPU"), "{text}");
            assert!(text.contains(same_gpu_hint(number)), "{text}");
        }
    }
    bench.controls.set("NCCL_MULTI_RANK_GPU_ENABLE", Some("1"));
    assert!(pair("23007").into_iter().all(|state| state.unwrap() == State::Ready));
    bench.is_clean();
}

#[test]
fn a_library_that_does_not_serve_says_why() {
    let bench = bench();
    let empty = tempfile::NamedTempFile::new().unwrap();
    let without = library_without(&["ncclCommSplit"]);
    bench.controls.set("STANDIN_NCCL_VERSION", Some("21701"));
    for (path, parts) in [
        (Path::new("/no/libnccl.so.2"), &["/no/libnccl.so.2", "nvidia-nccl-cu12"][..]),
        (empty.path(), &["too short"]),
        (Path::new("libm.so.6"), &["libm.so.6: it has no function ncclGetVersion"]),
        (&without, &["it has no function ncclCommSplit"]),
        (&library(), &["it is version 2.17.1, and at least 2.18.0 is needed"]),
    ] {
        let error = Nccl::load(Some(path)).unwrap_err();
        assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    bench.controls.set("STANDIN_NCCL_VERSION", Some("21800"));
    let nccl = Nccl::load(Some(&library())).unwrap();
    assert_eq!(nccl.version(), 21_800);
    assert!(nccl.to_string().starts_with("nccl 2.18.0 ("), "{nccl}");
}

#[test]
fn packages_of_python_are_searched() {
    let _bench = bench();
    let home = tempfile::tempdir().unwrap();
    let place = home.path().join("nvidia/nccl/lib");
    fs::create_dir_all(&place).unwrap();
    look_in(home.path());
    if drumline_loader::Library::open("libnccl.so.2".as_ref()).is_ok() {
        return; // this machine has one, which comes first
    }
    let text = Nccl::load(None).unwrap_err().to_string();
    assert!(text.contains("libnccl.so.2") && text.contains("librccl.so.1"), "{text}");
    assert!(text.contains(place.to_str().unwrap()), "{text}");
    let file = place.join("libnccl.so.2");
    symlink(library(), &file).unwrap();
    let nccl = Nccl::load(None).unwrap();
    assert!(nccl.to_string().contains(file.to_str().unwrap()), "{nccl}");
}

#[test]
fn what_is_queued_ends_before_a_communicator_does() {
    let bench = bench();
    for seed in 0..20 {
        bench.controls.seed(seed);
        bench.ranks(2, |rank| {
            let memory = rank.holding(&encode(DType::F32, &input(rank.number())));
            let place = memory.place();
            let Rank { communicator, stream, .. } = rank;
            communicator.all_reduce(place, place, DType::F32, ReduceOp::Sum, &*stream).unwrap();
            drop(communicator);
            let sum = Operator::Plain(ReduceOp::Sum);
            is_right(&read(&memory), &oracle(2, DType::F32, sum), DType::F32, sum, "a last call");
        });
        bench.is_clean();
    }
}

#[test]
fn a_broken_device_fails_by_name() {
    let bench = bench();
    let id = bench.nccl.unique_id().unwrap();
    let rank = bench.rank(&id, 0, 1).unwrap();
    while rank.communicator.state().unwrap() == State::InProgress {}
    bench.controls.break_device(0, 700);
    let error = rank.communicator.state().unwrap_err();
    assert!(matches!(error, Error::Driver { .. }), "{error:?}");
    drop(rank.communicator);
    assert_eq!(bench.controls.violations(), 0, "{}", bench.controls.last_violation());
    drop((rank.stream, rank.device));
    bench.controls.reset();
}

/// What ranks do for each other when one fails, as those do who learn of it: all communicators are aborted.
#[derive(Default)]
struct Guard {
    has_failed: AtomicBool,
    all: Mutex<Vec<Arc<Communicator>>>,
}

impl Guard {
    fn watch(&self, communicator: Communicator) -> Arc<Communicator> {
        let communicator = Arc::new(communicator);
        self.all.lock().unwrap().push(communicator.clone());
        if self.has_failed.load(Ordering::SeqCst) {
            let _ = communicator.abort();
        }
        communicator
    }

    fn fail(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
        for communicator in &*self.all.lock().unwrap() {
            let _ = communicator.abort();
        }
    }
}

/// Calls every function of the table.
fn tour(
    (driver, nccl): (&Driver, &Nccl),
    id: &UniqueId,
    (rank, size): (usize, usize),
    guard: &Guard,
) -> Result<()> {
    let (device, dtype) = (driver.device(rank)?, DType::F32);
    let stream = device.stream()?;
    let stream = &*stream;
    let memory = device.allocate(size * 64)?;
    let other = device.allocate(size * 64)?;
    let (from, to) = (memory.place(), other.place());
    let part = from.part(0..64).unwrap_or(from);
    let toured = (|| {
        let communicator = guard.watch(Communicator::new(nccl, &device, id, rank, size)?);
        communicator.all_reduce(from, from, dtype, ReduceOp::Sum, stream)?;
        communicator.all_reduce(from, to, dtype, Operator::PreMulSum(0.5), stream)?;
        communicator.reduce(from, Some(to), dtype, ReduceOp::Max, 0, stream)?;
        communicator.reduce_scatter(to, part, dtype, ReduceOp::Min, stream)?;
        communicator.broadcast(from, 0, stream)?;
        communicator.all_gather(part, to, stream)?;
        communicator.all_to_all(from, to, stream)?;
        if let Some(half) = communicator.split(Some(0), 0)? {
            let half = guard.watch(half);
            half.all_reduce(from, from, dtype, ReduceOp::Sum, stream)?;
            stream.record()?.wait()?;
        }
        communicator.split(None, 0)?;
        stream.record()?.wait()
    })();
    if toured.is_err() {
        guard.fail();
        // What is queued still uses the memory.
        let _ = stream.record().and_then(|event| event.wait());
    }
    toured
}

/// The results of all ranks, after their communicators are gone.
fn tours(size: usize) -> Result<Vec<Result<()>>> {
    // After a reset the driver has to start anew.
    let driver = Driver::load(Some(&library()))?;
    let nccl = Nccl::load(Some(&library()))?;
    let id = nccl.unique_id()?;
    let guard = Guard::default();
    Ok(thread::scope(|threads| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                threads.spawn({
                    let (libraries, id, guard) = ((&driver, &nccl), &id, &guard);
                    move || tour(libraries, id, (rank, size), guard)
                })
            })
            .collect();
        ranks.into_iter().map(|it| it.join().unwrap()).collect()
    }))
}

/// Functions of NCCL whose failure a caller is told, and those that end a communicator.
const TOLD: [&str; 18] = [
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommGetAsyncError",
    "ncclCommSplit",
    "ncclCommCount",
    "ncclCommUserRank",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
    "ncclAllReduce",
    "ncclReduce",
    "ncclReduceScatter",
    "ncclBroadcast",
    "ncclAllGather",
    "ncclSend",
    "ncclRecv",
];
const LAST: [&str; 2] = ["ncclCommFinalize", "ncclCommDestroy"];

#[test]
fn every_call_of_nccl_may_fail_once() {
    let bench = bench();
    let all = TOLD.iter().chain(&LAST).flat_map(|call| [1, 2, 5].map(|nth| (*call, nth)));
    for (size, (name, nth)) in [1, 2].iter().flat_map(|size| all.clone().map(|it| (*size, it))) {
        let what = format!("call {nth} of {name} among {size}");
        bench.controls.reset();
        bench.controls.seed(u64::from(nth));
        bench.controls.fail(name, nth, 3);
        let results = tours(size).unwrap_or_else(|error| vec![Err(error)]);
        let mut is_told = false;
        for error in results.iter().filter_map(|it| it.as_ref().err()) {
            match error {
                Error::Driver { call, code: 3, name: code, text, .. } => {
                    is_told = true;
                    assert_eq!((*call, &**code), (name, "ncclInternalError"), "{what}");
                    assert!(text.contains(&format!("{name} fails on request")), "{what}: {text}");
                }
                Error::NotFound { .. } => is_told = name == "ncclGetVersion",
                Error::Aborted { .. } if size > 1 => {}
                other => panic!("{what}: {other:?}"),
            }
        }
        assert!(is_told || nth > 1 || LAST.contains(&name), "{what}: {results:?}");
        // What NCCL refuses to take back stays its own. All else is given back.
        let kept = u64::from(name == "ncclCommDestroy");
        assert!(bench.controls.leaks() <= kept, "{what}: {}", bench.controls.leaks());
        let violations = bench.controls.violations();
        assert_eq!(violations, 0, "{what}: {}", bench.controls.last_violation());
        // This thread is in no group, and new communicators work.
        bench.controls.reset();
        assert!(tours(size).unwrap().iter().all(Result::is_ok), "after {what}");
    }
}
