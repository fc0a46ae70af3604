//! NCCL's part: ranks as threads and as processes, against an oracle.

mod c;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::Barrier;

use c::*;

type Id = [u8; 128];

/// ncclUniqueId goes by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct ById(Id);

#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// What newer versions added.
    rest: [c_int; 23],
}

unsafe extern "C" {
    safe fn ncclGetVersion(version: &mut c_int) -> c_int;
    safe fn ncclGetUniqueId(id: &mut Id) -> c_int;
    safe fn ncclGetErrorString(code: c_int) -> *const c_char;
    safe fn ncclGetLastError(communicator: usize) -> *const c_char;
    safe fn ncclCommInitRank(communicator: &mut usize, size: c_int, id: ById, rank: c_int)
    -> c_int;
    safe fn ncclCommInitRankConfig(
        communicator: &mut usize,
        size: c_int,
        id: ById,
        rank: c_int,
        config: &Config,
    ) -> c_int;
    safe fn ncclCommSplit(
        parent: usize,
        color: c_int,
        key: c_int,
        communicator: &mut usize,
        config: Option<&Config>,
    ) -> c_int;
    safe fn ncclCommFinalize(communicator: usize) -> c_int;
    safe fn ncclCommDestroy(communicator: usize) -> c_int;
    safe fn ncclCommAbort(communicator: usize) -> c_int;
    safe fn ncclCommGetAsyncError(communicator: usize, state: &mut c_int) -> c_int;
    safe fn ncclCommCount(communicator: usize, value: &mut c_int) -> c_int;
    safe fn ncclCommUserRank(communicator: usize, value: &mut c_int) -> c_int;
    safe fn ncclCommCuDevice(communicator: usize, value: &mut c_int) -> c_int;
    safe fn ncclGroupStart() -> c_int;
    safe fn ncclGroupEnd() -> c_int;
    safe fn ncclAllReduce(
        from: usize,
        to: usize,
        count: usize,
        kind: c_int,
        op: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclReduce(
        from: usize,
        to: usize,
        count: usize,
        kind: c_int,
        op: c_int,
        root: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclReduceScatter(
        from: usize,
        to: usize,
        count: usize,
        kind: c_int,
        op: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclBroadcast(
        from: usize,
        to: usize,
        count: usize,
        kind: c_int,
        root: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclAllGather(
        from: usize,
        to: usize,
        count: usize,
        kind: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclAlltoAll(
        from: usize,
        to: usize,
        count: usize,
        kind: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclGather(
        from: usize,
        to: usize,
        count: usize,
        kind: c_int,
        root: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclScatter(
        from: usize,
        to: usize,
        count: usize,
        kind: c_int,
        root: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclSend(
        from: usize,
        count: usize,
        kind: c_int,
        peer: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclRecv(
        to: usize,
        count: usize,
        kind: c_int,
        peer: c_int,
        comm: usize,
        stream: usize,
    ) -> c_int;
    safe fn ncclRedOpCreatePreMulSum(
        op: &mut c_int,
        scalar: *const c_void,
        kind: c_int,
        residence: c_int,
        comm: usize,
    ) -> c_int;
    safe fn ncclRedOpDestroy(op: c_int, comm: usize) -> c_int;
}

const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const IN_PROGRESS: c_int = 7;
const U8: c_int = 1;
const I32: c_int = 2;
const F32: c_int = 7;

fn last_error() -> String {
    // SAFETY: a text of this thread, which lives until its next error.
    unsafe { CStr::from_ptr(ncclGetLastError(0)) }.to_string_lossy().into_owned()
}

fn id() -> Id {
    let mut id = [0; 128];
    assert_eq!(ncclGetUniqueId(&mut id), 0);
    id
}

fn config(blocking: c_int) -> Config {
    Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: 22_304,
        blocking,
        rest: [c_int::MIN; 23],
    }
}

/// A rank, with a stream and the context of its device.
struct Rank {
    rank: usize,
    size: usize,
    communicator: usize,
    stream: usize,
}

impl Rank {
    fn new(id: Id, rank: usize, size: usize, device: usize) -> Self {
        let context = made(|it| cuDevicePrimaryCtxRetain(it, device as c_int));
        assert_eq!(cuCtxSetCurrent(context), 0);
        let mut communicator = 0;
        let code = ncclCommInitRank(&mut communicator, size as c_int, ById(id), rank as c_int);
        assert_eq!(code, 0, "{}", last_error());
        Rank { rank, size, communicator, stream: stream() }
    }

    fn end(self) {
        assert_eq!(ncclCommDestroy(self.communicator), 0);
        assert_eq!(cuStreamDestroy_v2(self.stream), 0);
    }

    fn up(&self, bytes: &[u8]) -> usize {
        let memory = device_memory(bytes.len());
        assert_eq!(
            cuMemcpyHtoDAsync_v2(memory, bytes.as_ptr() as usize, bytes.len(), self.stream),
            0
        );
        memory
    }

    fn down(&self, memory: usize, len: usize) -> Vec<u8> {
        let bytes = vec![0; len];
        assert_eq!(cuMemcpyDtoHAsync_v2(bytes.as_ptr() as usize, memory, len, self.stream), 0);
        std::hint::black_box(bytes)
    }
}

/// Runs something on `size` ranks, each a thread with a device.
fn on_threads(seed: u64, size: usize, program: impl Fn(Rank) + Sync) {
    let _test = Test::with(seed, &[(c"STANDIN_DEVICES", c"3")]);
    let id = id();
    std::thread::scope(|threads| {
        for rank in 0..size {
            let program = &program;
            threads.spawn(move || program(Rank::new(id, rank, size, rank)));
        }
    });
    assert_eq!((standin_leaks(), standin_violations()), (0, 0));
}

/// What rank `rank` gives at place `at`.
fn given(rank: usize, at: usize) -> u8 {
    (rank * 37 + at * 5 + 1) as u8
}

fn input(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| given(rank, at)).collect()
}

fn ints(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|it| it.to_ne_bytes()).collect()
}

/// Every collective in bytes, on every root, in place and out of place.
fn all_collectives(me: &Rank) {
    let (rank, size, comm, stream) = (me.rank, me.size, me.communicator, me.stream);
    let len = 40_000; // more than a datagram
    let sum = |at: usize| (0..size).fold(0u8, |sum, of| sum.wrapping_add(given(of, at)));
    let check = |what: &str, memory: usize, right: Vec<u8>| {
        let came = me.down(memory, right.len());
        assert!(came == right, "{what} of rank {rank}: {:?}.. for {:?}..", &came[..4], &right[..4]);
        assert_eq!(cuMemFree_v2(memory), 0);
    };
    let fresh = |blocks: usize| device_memory(len * blocks);
    let free = |memory: usize| assert_eq!(cuMemFree_v2(memory), 0);

    let (from, to) = (me.up(&input(rank, len)), fresh(1));
    assert_eq!(ncclAllReduce(from, to, len, U8, 0, comm, stream), 0);
    check("all_reduce", to, (0..len).map(sum).collect());
    assert_eq!(ncclAllReduce(from, from, len, U8, 0, comm, stream), 0);
    check("all_reduce in place", from, (0..len).map(sum).collect());

    let (from, to) = (me.up(&input(rank, len)), fresh(size));
    assert_eq!(ncclAllGather(from, to, len, U8, comm, stream), 0);
    check("all_gather", to, (0..size).flat_map(|of| input(of, len)).collect());
    free(from);
    let whole = fresh(size);
    let own = input(rank, len);
    assert_eq!(cuMemcpyHtoDAsync_v2(whole + rank * len, own.as_ptr() as usize, len, stream), 0);
    assert_eq!(ncclAllGather(whole + rank * len, whole, len, U8, comm, stream), 0);
    check("all_gather in place", whole, (0..size).flat_map(|of| input(of, len)).collect());

    let block = |of: usize, number: usize| input(of, len * size)[number * len..][..len].to_vec();
    let (from, to) = (me.up(&input(rank, len * size)), fresh(1));
    assert_eq!(ncclReduceScatter(from, to, len, U8, 0, comm, stream), 0);
    check("reduce_scatter", to, (rank * len..(rank + 1) * len).map(sum).collect());
    let to = fresh(size);
    assert_eq!(ncclAlltoAll(from, to, len, U8, comm, stream), 0);
    check("all_to_all", to, (0..size).flat_map(|of| block(of, rank)).collect());
    free(from);

    for root in 0..size {
        let (from, is_root) = (me.up(&input(rank, len * size)), rank == root);
        let to = fresh(1);
        assert_eq!(ncclBroadcast(from, to, len, U8, root as c_int, comm, stream), 0);
        check("broadcast", to, input(root, len));
        let to = fresh(1);
        assert_eq!(ncclScatter(from, to, len, U8, root as c_int, comm, stream), 0);
        check("scatter", to, block(root, rank));
        let to = fresh(size);
        assert_eq!(ncclReduce(from, to, len, U8, 0, root as c_int, comm, stream), 0);
        let untouched = || vec![POISON; len];
        check("reduce", to, if is_root { (0..len).map(sum).collect() } else { untouched() });
        let to = fresh(size);
        assert_eq!(ncclGather(from, to, len, U8, root as c_int, comm, stream), 0);
        let all = || (0..size).flat_map(|of| input(of, len * size)[..len].to_vec()).collect();
        check("gather", to, if is_root { all() } else { untouched() });
        // In place, and nothing else of the root's changes.
        assert_eq!(ncclBroadcast(from, from, len, U8, root as c_int, comm, stream), 0);
        check(
            "broadcast in place",
            from,
            [block(root, 0), input(rank, len * size)[len..].to_vec()].concat(),
        );
    }

    // Everybody sends to the next, and to himself.
    let (from, to) = (me.up(&input(rank, len)), fresh(2));
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    assert_eq!(ncclGroupStart(), 0);
    assert_eq!(ncclSend(from, len, U8, next as c_int, comm, stream), 0);
    assert_eq!(ncclRecv(to, len, U8, previous as c_int, comm, stream), 0);
    assert_eq!(ncclSend(from, len, U8, rank as c_int, comm, stream), 0);
    assert_eq!(ncclRecv(to + len, len, U8, rank as c_int, comm, stream), 0);
    assert_eq!(ncclGroupEnd(), 0);
    check("messages", to, [input(previous, len), input(rank, len)].concat());
    free(from);
}

#[test]
fn collectives_of_threads() {
    for size in [1, 2, 3] {
        for seed in 0..4 {
            on_threads(seed, size, |me| {
                all_collectives(&me);
                me.end();
            });
        }
    }
}

/// A small number in a type of NCCL.
fn element(kind: c_int, value: f64) -> Vec<u8> {
    let single = (value as f32).to_bits();
    match kind {
        0 => (value as i8).to_le_bytes().to_vec(),
        1 => (value as u8).to_le_bytes().to_vec(),
        2 => (value as i32).to_le_bytes().to_vec(),
        3 => (value as u32).to_le_bytes().to_vec(),
        4 => (value as i64).to_le_bytes().to_vec(),
        5 => (value as u64).to_le_bytes().to_vec(),
        6 if value == 0.0 => vec![0, 0],
        6 => ((((single >> 23 & 0xFF) - 112) << 10 | single >> 13 & 0x3FF) as u16)
            .to_le_bytes()
            .to_vec(),
        7 => single.to_le_bytes().to_vec(),
        8 => value.to_le_bytes().to_vec(),
        _ => ((single >> 16) as u16).to_le_bytes().to_vec(),
    }
}

#[test]
fn every_type_and_operator() {
    on_threads(5, 2, |me| {
        let values = [[1.0, 2.0, 6.0], [3.0, 7.0, 5.0]];
        let fold = |combine: fn(f64, f64) -> f64| {
            [0, 1, 2].map(|at| combine(values[0][at], values[1][at]))
        };
        for kind in 0..10 {
            let encode = |values: &[f64]| {
                values.iter().flat_map(|it| element(kind, *it)).collect::<Vec<u8>>()
            };
            let operators = [
                fold(|a, b| a + b),
                fold(|a, b| a * b),
                fold(f64::max),
                fold(f64::min),
                fold(|a, b| (a + b) / 2.0), // whole numbers lose the half
            ];
            for (operator, right) in operators.iter().enumerate() {
                let data = me.up(&encode(&values[me.rank]));
                let operator = operator as c_int;
                assert_eq!(
                    ncclAllReduce(data, data, 3, kind, operator, me.communicator, me.stream),
                    0
                );
                let right = encode(right);
                assert_eq!(me.down(data, right.len()), right, "type {kind}, operator {operator}");
                assert_eq!(cuMemFree_v2(data), 0);
            }
            // Each rank's factor, in memory of the host or the device, is its own.
            let (factor, mut operator) = (encode(&[[2.0, 1.0][me.rank]]), 0);
            let on_device = me.up(&factor);
            for (residence, at) in [(1, factor.as_ptr() as usize), (0, on_device)] {
                let at = at as *const c_void;
                let comm = me.communicator;
                assert_eq!(ncclRedOpCreatePreMulSum(&mut operator, at, kind, residence, comm), 0);
                let data = me.up(&encode(&values[me.rank]));
                assert_eq!(ncclAllReduce(data, data, 3, kind, operator, comm, me.stream), 0);
                let right = encode(&fold(|a, b| 2.0 * a + b));
                assert_eq!(me.down(data, right.len()), right, "type {kind}, factor");
                assert_eq!(ncclRedOpDestroy(operator, comm), 0);
                assert_eq!(ncclRedOpDestroy(operator, comm), INVALID_ARGUMENT);
                assert_eq!(cuMemFree_v2(data), 0);
            }
            assert_eq!(cuMemFree_v2(on_device), 0);
        }
        me.end();
    });
}

/// Whoever looks at a result without waiting for the stream sees poison, for some seed.
#[test]
fn results_are_poison_until_they_are_there() {
    let early = std::sync::Mutex::new(0);
    for seed in 0..10 {
        on_threads(seed, 2, |me| {
            let (data, event, other) = (me.up(&ints(&[1, 2])), event(), stream());
            assert_eq!(cuStreamSynchronize(me.stream), 0);
            assert_eq!(ncclAllReduce(data, data, 2, I32, 0, me.communicator, me.stream), 0);
            assert_eq!(cuEventRecord(event, me.stream), 0);
            loop {
                let out = Pinned::new(vec![0; 8]);
                assert_eq!(cuMemcpyDtoHAsync_v2(out.at(), data, 8, other), 0);
                assert_eq!(cuStreamSynchronize(other), 0);
                if out.now() == [POISON; 8] {
                    *early.lock().unwrap_or_else(|it| it.into_inner()) += 1;
                }
                if cuEventQuery(event) == 0 {
                    break;
                }
            }
            assert_eq!(me.down(data, 8), ints(&[2, 4]));
            assert_eq!(
                (cuMemFree_v2(data), cuEventDestroy_v2(event), cuStreamDestroy_v2(other)),
                (0, 0, 0)
            );
            me.end();
        });
    }
    assert!(*early.lock().unwrap_or_else(|it| it.into_inner()) > 0);
}

#[test]
fn a_communicator_splits_by_colour_and_key() {
    on_threads(2, 3, |me| {
        let mut part = 0;
        // Ranks 0 and 2 together, in the other order.
        let color = (me.rank % 2) as c_int;
        assert_eq!(ncclCommSplit(me.communicator, color, -(me.rank as c_int), &mut part, None), 0);
        let (mut count, mut rank, mut device) = (0, 0, 0);
        assert_eq!((ncclCommCount(part, &mut count), ncclCommUserRank(part, &mut rank)), (0, 0));
        assert_eq!((ncclCommCuDevice(part, &mut device), device), (0, me.rank as c_int));
        assert_eq!((count, rank), [(2, 1), (1, 0), (2, 0)][me.rank]);
        let data = me.up(&ints(&[me.rank as i32]));
        assert_eq!(ncclAllReduce(data, data, 1, I32, 0, part, me.stream), 0);
        assert_eq!(me.down(data, 4), ints(&[[2, 1, 2][me.rank]]));
        let mut none = 77;
        let color = if me.rank == 1 { 3 } else { -1 };
        assert_eq!(ncclCommSplit(me.communicator, color, 0, &mut none, None), 0);
        assert_eq!(none == 0, me.rank != 1);
        assert_eq!((ncclCommDestroy(none), ncclCommDestroy(part), cuMemFree_v2(data)), (0, 0, 0));
        me.end();
    });
}

fn settled(communicator: usize) -> c_int {
    loop {
        let mut state = 0;
        assert_eq!(ncclCommGetAsyncError(communicator, &mut state), 0);
        if state != IN_PROGRESS {
            return state;
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_communicator_that_does_not_block_says_when_it_is_ready() {
    for seed in 0..5 {
        let test = Test::new(seed);
        let id = id();
        let barrier = Barrier::new(2);
        std::thread::scope(|threads| {
            for rank in 0..2 {
                let (barrier, test) = (&barrier, &test);
                threads.spawn(move || {
                    test.use_device(rank);
                    if rank == 1 {
                        barrier.wait();
                    }
                    let mut comm = 0;
                    assert_eq!(
                        ncclCommInitRankConfig(&mut comm, 2, ById(id), rank, &config(0)),
                        IN_PROGRESS
                    );
                    if rank == 0 {
                        // Its peer has yet to come.
                        let mut state = 0;
                        assert_eq!(
                            (ncclCommGetAsyncError(comm, &mut state), state),
                            (0, IN_PROGRESS)
                        );
                        assert_eq!(ncclCommCount(comm, &mut state), INVALID_ARGUMENT);
                        barrier.wait();
                    }
                    assert_eq!(settled(comm), 0);
                    let (stream, data) = (stream(), device_memory(4));
                    for _ in 0..10 {
                        let code = ncclAllReduce(data, data, 1, I32, 0, comm, stream);
                        assert!(code == 0 || code == IN_PROGRESS);
                        assert_eq!(settled(comm), 0);
                    }
                    assert_eq!(ncclCommFinalize(comm), IN_PROGRESS);
                    assert_eq!(settled(comm), 0);
                    assert_eq!(
                        ncclAllReduce(data, data, 1, I32, 0, comm, stream),
                        INVALID_ARGUMENT
                    );
                    assert_eq!(
                        (ncclCommDestroy(comm), cuMemFree_v2(data), cuStreamDestroy_v2(stream)),
                        (0, 0, 0)
                    );
                });
            }
        });
        assert_eq!((standin_leaks(), standin_violations()), (0, 0));
    }
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    let try_it = |variables: &[(&CStr, &CStr)]| {
        let test = Test::with(1, variables);
        let id = id();
        let codes: Vec<(c_int, String)> = std::thread::scope(|threads| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let test = &test;
                    threads.spawn(move || {
                        test.use_device(0);
                        let mut comm = 0;
                        let code = ncclCommInitRank(&mut comm, 2, ById(id), rank);
                        let error = last_error();
                        assert_eq!(comm == 0, code != 0);
                        assert_eq!(ncclCommDestroy(comm), 0);
                        (code, error)
                    })
                })
                .collect();
            ranks.into_iter().filter_map(|it| it.join().ok()).collect()
        });
        assert_eq!((codes.len(), standin_leaks()), (2, 0));
        codes
    };
    let refused = try_it(&[]);
    assert!(
        refused.iter().all(|(code, why)| *code == INVALID_USAGE && why.contains("Duplicate GPU")),
        "{refused:?}"
    );
    let shared = (c"NCCL_MULTI_RANK_GPU_ENABLE", c"1");
    assert!(
        try_it(&[shared]).iter().all(|(code, _)| *code == INVALID_USAGE),
        "2.23 does not know the variable"
    );
    assert!(
        try_it(&[shared, (c"STANDIN_NCCL_VERSION", c"23007")]).iter().all(|(code, _)| *code == 0)
    );
}

#[test]
fn wrong_arguments_are_refused() {
    on_threads(1, 1, |me| {
        let (comm, stream, data) = (me.communicator, me.stream, device_memory(64));
        let host = [0u8; 64];
        assert_eq!(ncclAllReduce(data, data, 16, F32, 0, comm + 1, stream), INVALID_ARGUMENT);
        assert_eq!(ncclAllReduce(data, data, 16, 12, 0, comm, stream), INVALID_ARGUMENT);
        assert_eq!(ncclAllReduce(data, data, 16, F32, 5, comm, stream), INVALID_ARGUMENT);
        assert_eq!(ncclAllReduce(data, data, 17, F32, 0, comm, stream), INVALID_ARGUMENT);
        assert_eq!(
            ncclAllReduce(host.as_ptr() as usize, data, 16, F32, 0, comm, stream),
            INVALID_ARGUMENT
        );
        assert!(last_error().contains("not a valid pointer"), "{}", last_error());
        assert_eq!(ncclBroadcast(data, data, 16, F32, 1, comm, stream), INVALID_ARGUMENT);
        assert_eq!(ncclAllReduce(data, data, 16, F32, 0, comm, stream + 8), 1);
        assert_eq!(ncclAllReduce(data, data, 0, F32, 0, comm, stream), 0);
        // One wrong call spoils its group.
        assert_eq!(ncclGroupStart(), 0);
        assert_eq!(ncclSend(data, 4, F32, 0, comm, stream), 0);
        assert_eq!(ncclRecv(data, 4, F32, 7, comm, stream), INVALID_ARGUMENT);
        assert_eq!(ncclGroupEnd(), INVALID_ARGUMENT);
        assert_eq!(ncclGroupEnd(), INVALID_USAGE);
        assert_eq!(cuStreamSynchronize(stream), 0);
        standin_fail(c"nccl*".as_ptr(), 2, 3);
        assert_eq!(ncclGroupStart(), 0);
        assert_eq!(ncclGroupEnd(), 3);
        assert_eq!(ncclGroupEnd(), 0);
        let mut version = 0;
        assert_eq!((ncclGetVersion(&mut version), version), (0, 22_304));
        // SAFETY: a text that lives as long as the program.
        assert_eq!(unsafe { CStr::from_ptr(ncclGetErrorString(0)) }, c"no error");
        assert_eq!(cuMemFree_v2(data), 0);
        me.end();
    });
}

#[test]
fn calls_that_do_not_fit_are_a_violation() {
    let _test = Test::new(1);
    let id = id();
    std::thread::scope(|threads| {
        for rank in 0..2 {
            threads.spawn(move || {
                let me = Rank::new(id, rank, 2, rank);
                let data = device_memory(8);
                assert_eq!(
                    ncclAllReduce(data, data, 1 + rank, I32, 0, me.communicator, me.stream),
                    0
                );
                assert_eq!(cuStreamSynchronize(me.stream), 0);
                me.end();
            });
        }
    });
    assert_eq!(standin_violations(), 2);
}

/// Without a group, two that send first wait for each other, as on a device when the data is large.
#[test]
fn ranks_that_both_send_first_wait_for_ever() {
    let _test = Test::with(1, &[(c"STANDIN_PATIENCE_MS", c"200")]);
    let id = id();
    std::thread::scope(|threads| {
        for rank in 0..2 {
            threads.spawn(move || {
                let me = Rank::new(id, rank, 2, rank);
                let (data, peer) = (device_memory(8), 1 - rank as c_int);
                assert_eq!(ncclSend(data, 8, U8, peer, me.communicator, me.stream), 0);
                assert_eq!(ncclRecv(data, 8, U8, peer, me.communicator, me.stream), 0);
                assert_eq!(cuStreamSynchronize(me.stream), 702);
                assert_eq!(ncclCommAbort(me.communicator), 0);
                assert_eq!(cuStreamSynchronize(me.stream), 0);
            });
        }
    });
}

/// Another process, which does what `role` says as rank 1 on a device.
fn process(role: &str, id: Id, device: &str, host: &str) -> std::io::Result<std::process::Child> {
    let hex: String = id.iter().map(|it| format!("{it:02x}")).collect();
    std::env::current_exe().and_then(|program| {
        Command::new(program)
            .args(["--exact", "a_process", "--nocapture"])
            .env("STANDIN_TEST_ROLE", role)
            .env("STANDIN_TEST_ID", hex)
            .env("STANDIN_TEST_DEVICE", device)
            .env("NCCL_HOSTID", host)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
    })
}

/// Not a test: what the other process runs.
#[test]
fn a_process() {
    let Ok(role) = std::env::var("STANDIN_TEST_ROLE") else { return };
    let hex = std::env::var("STANDIN_TEST_ID").unwrap_or_default();
    let id: Id =
        std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap_or(0));
    let device =
        std::env::var("STANDIN_TEST_DEVICE").ok().and_then(|it| it.parse().ok()).unwrap_or(0);
    assert_eq!(cuInit(0), 0);
    let me = Rank::new(id, 1, 2, device);
    if role == "dies" {
        println!("HERE");
        let _ = std::io::stdout().flush();
        // It never comes to its call.
        let _ = std::io::stdin().read(&mut [0]);
        return;
    }
    all_collectives(&me);
    me.end();
    assert_eq!((standin_leaks(), standin_violations()), (0, 0));
}

#[test]
fn collectives_of_processes() -> std::io::Result<()> {
    // On two devices, and on one that two hosts seem to have.
    for (device, host) in [("1", "here"), ("0", "there")] {
        let _test = Test::with(1, &[(c"NCCL_HOSTID", c"here")]);
        let id = id();
        let mut peer = process("all", id, device, host)?;
        let me = Rank::new(id, 0, 2, 0);
        all_collectives(&me);
        me.end();
        assert!(peer.wait()?.success());
        assert_eq!((standin_leaks(), standin_violations()), (0, 0));
    }
    Ok(())
}

#[test]
fn a_killed_peer_is_told_to_nobody_until_the_abort() -> std::io::Result<()> {
    let _test = Test::with(1, &[(c"NCCL_HOSTID", c"here")]);
    let id = id();
    let mut peer = process("dies", id, "1", "here")?;
    let me = Rank::new(id, 0, 2, 0);
    let mut output = peer.stdout.take();
    let (mut said, mut byte) = (String::new(), [0]);
    while !said.ends_with("HERE")
        && output.as_mut().is_some_and(|it| it.read(&mut byte).is_ok_and(|len| len > 0))
    {
        said.push(char::from(byte[0]));
    }
    assert!(said.ends_with("HERE"), "{said}");
    peer.kill()?;
    peer.wait()?;
    let (data, after) = (me.up(&[1; 8]), device_memory(8));
    assert_eq!(ncclAllReduce(data, data, 8, U8, 0, me.communicator, me.stream), 0);
    assert_eq!(cuMemsetD8Async(after, 3, 8, me.stream), 0);
    for _ in 0..1000 {
        let mut state = 0;
        assert_eq!((ncclCommGetAsyncError(me.communicator, &mut state), state), (0, 0));
        assert_eq!(cuStreamQuery(me.stream), NOT_READY);
    }
    assert_eq!(ncclCommAbort(me.communicator), 0);
    assert_eq!(me.down(after, 8), [3; 8]);
    assert_eq!(me.down(data, 8), [POISON; 8]);
    assert_eq!(ncclCommGetAsyncError(me.communicator, &mut 0), INVALID_ARGUMENT);
    assert_eq!((cuMemFree_v2(data), cuMemFree_v2(after), cuStreamDestroy_v2(me.stream)), (0, 0, 0));
    assert_eq!((standin_leaks(), standin_violations()), (0, 0));
    Ok(())
}
