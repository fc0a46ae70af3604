//! The driver's part, through its C functions.

mod c;

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};

use c::*;

const SEEDS: u64 = 200;

fn name_of(code: c_int) -> String {
    let mut text: *const c_char = std::ptr::null();
    assert_eq!(cuGetErrorName(code, &mut text), 0);
    // SAFETY: the function succeeded, so it is a text.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn bytes_on_device(at: usize, len: usize) -> Vec<u8> {
    let bytes = vec![0; len];
    assert_eq!(cuMemcpyDtoH_v2(bytes.as_ptr() as usize, at, len), 0);
    bytes
}

#[test]
fn nothing_works_before_init_and_codes_have_names() {
    let test = Test::new(1);
    standin_reset();
    let mut count = 0;
    assert_eq!(cuDeviceGetCount(&mut count), NOT_INITIALIZED);
    assert_eq!(cuInit(1), INVALID_VALUE);
    assert_eq!(cuInit(0), 0);
    assert_eq!((cuDeviceGetCount(&mut count), count), (0, 2));
    // The context of this thread was that of another life.
    assert_eq!(cuMemAlloc_v2(&mut 0, 16), INVALID_CONTEXT);
    assert_eq!(name_of(700), "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(cuGetErrorName(12345, &mut std::ptr::null()), INVALID_VALUE);
    drop(test);
}

#[test]
fn devices_say_who_they_are() {
    let _test = Test::new(1);
    let (mut uuids, mut buses) = (BTreeSet::new(), BTreeSet::new());
    for device in 0..2 {
        let mut uuid = [0; 16];
        assert_eq!(cuDeviceGetUuid_v2(&mut uuid, device), 0);
        uuids.insert(uuid);
        let mut text = [0 as c_char; 32];
        assert_eq!(cuDeviceGetPCIBusId(text.as_mut_ptr(), 32, device), 0);
        buses.insert(text);
        assert_eq!(cuDeviceGetName(text.as_mut_ptr(), 6, device), 0);
        assert_eq!(text[4..6], [b'd' as c_char, 0]); // cut to what there is room for
        let mut value = 0;
        for (attribute, right) in [(40, 2), (41, 1), (92, 1), (99, 1)] {
            assert_eq!((cuDeviceGetAttribute(&mut value, attribute, device), value), (0, right));
        }
    }
    assert_eq!((uuids.len(), buses.len()), (2, 2));
    assert_eq!(cuDeviceGetUuid_v2(&mut [0; 16], 2), 101);
}

#[test]
fn contexts_are_a_stack_of_the_thread() {
    let test = Test::new(1);
    let mut now = 0;
    let first = made(|it| cuCtxGetCurrent(it));
    let second = made(|it| cuDevicePrimaryCtxRetain(it, 1));
    assert_eq!(cuCtxPushCurrent_v2(second), 0);
    assert_eq!((cuCtxGetCurrent(&mut now), now), (0, second));
    assert_eq!((cuCtxPopCurrent_v2(&mut now), now), (0, second));
    assert_eq!((cuCtxGetCurrent(&mut now), now), (0, first));
    std::thread::scope(|threads| {
        threads.spawn(|| {
            assert_eq!(made(|it| cuCtxGetCurrent(it)), 0);
            assert_eq!(cuMemAlloc_v2(&mut 0, 16), INVALID_CONTEXT);
        });
    });
    assert_eq!(cuCtxSetCurrent(second + 1), INVALID_CONTEXT);
    assert_eq!(cuDevicePrimaryCtxRelease_v2(1), 0);
    assert_eq!(cuCtxSetCurrent(second), 709); // destroyed
    drop(test);
}

#[test]
fn variables_say_what_the_machine_has() {
    let (mut count, mut value, mut can) = (0, 0, 9);
    {
        let seen = [
            (c"STANDIN_DEVICES", c"4"),
            (c"CUDA_VISIBLE_DEVICES", c"3,1"),
            (c"STANDIN_NUMA", c"0,5"),
        ];
        let _test = Test::with(1, &seen);
        assert_eq!((cuDeviceGetCount(&mut count), count), (0, 2));
        let mut name = [0 as c_char; 32];
        assert_eq!(cuDeviceGetName(name.as_mut_ptr(), 32, 0), 0);
        assert_eq!(
            name[..11],
            c"Stand-in 3".to_bytes_with_nul().iter().map(|it| *it as c_char).collect::<Vec<_>>()
        );
        assert_eq!((cuDeviceGetAttribute(&mut value, 134, 0), value), (0, 5));
        assert_eq!((cuDeviceCanAccessPeer(&mut can, 0, 1), can), (0, 1));
    }
    let lacks = [
        (c"STANDIN_NO_STREAM_MEM", c"1"),
        (c"STANDIN_NO_HOST_REGISTER", c"1"),
        (c"STANDIN_NO_PEER", c"1"),
        (c"STANDIN_MEMORY", c"1000"),
        (c"STANDIN_FAIL", c"cuEventCreate:2:46,cuStreamQuery:1:999"),
    ];
    let test = Test::with(1, &lacks);
    let (stream, bytes) = (stream(), [0u8; 64]);
    assert_eq!(cuStreamWaitValue32_v2(stream, device_memory(64), 1, 0), 801);
    assert_eq!(cuMemHostRegister_v2(bytes.as_ptr() as usize, 64, 0), 801);
    assert_eq!((cuDeviceCanAccessPeer(&mut can, 0, 1), can), (0, 0));
    let other = test.use_device(1);
    test.use_device(0);
    assert_eq!(cuCtxEnablePeerAccess(other, 0), 217);
    let (mut free, mut total) = (0, 0);
    assert_eq!((cuMemGetInfo_v2(&mut free, &mut total), free, total), (0, 936, 1000));
    assert_eq!(cuMemAlloc_v2(&mut 0, 937), OUT_OF_MEMORY);
    let _first = event();
    assert_eq!((cuEventCreate(&mut 0, 0), cuStreamQuery(stream)), (46, 999));
}

#[test]
fn devices_copy_to_each_other() {
    for seed in 0..SEEDS {
        let test = Test::new(seed);
        let (second, there) = (test.use_device(1), device_memory(500));
        let (first, here, stream) = (test.use_device(0), device_memory(500), stream());
        assert_eq!(cuMemsetD8Async(here, 6, 500, stream), 0);
        assert_eq!(cuMemcpyPeerAsync(there, first, here, second, 500, stream), INVALID_VALUE);
        assert_eq!(cuMemcpyPeerAsync(there, second, here, first, 500, stream), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(bytes_on_device(there, 500), [6; 500]);
    }
}

#[test]
fn copies_of_a_stream_keep_their_order() {
    for seed in 0..SEEDS {
        let _test = Test::new(seed);
        let stream = stream();
        let memory = device_memory(3000);
        let (mut from, to) = (Pinned::new(vec![0; 3000]), Pinned::new(vec![0; 3000]));
        from.0.iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        assert_eq!(cuMemcpyHtoDAsync_v2(memory, from.at(), 3000, stream), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(to.at(), memory, 3000, stream), 0);
        assert_eq!(cuMemsetD8Async(memory, 9, 3000, stream), 0);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(to.now(), from.now());
        assert_eq!(bytes_on_device(memory, 3000), vec![9; 3000]);
        assert_eq!(standin_violations(), 0);
    }
}

/// Without an event between the streams, some seed gives the wrong bytes; with one, none does.
#[test]
fn events_order_streams_and_nothing_else_does() {
    let run = |seed: u64, with_event: bool| {
        let _test = Test::new(seed);
        let (one, two, event) = (stream(), stream(), event());
        let memory = device_memory(64);
        let (from, to) = (Pinned::new(vec![7; 64]), Pinned::new(vec![0; 64]));
        assert_eq!(cuMemcpyHtoDAsync_v2(memory, from.at(), 64, one), 0);
        assert_eq!(cuEventRecord(event, one), 0);
        if with_event {
            assert_eq!(cuStreamWaitEvent(two, event, 0), 0);
        }
        assert_eq!(cuMemcpyDtoHAsync_v2(to.at(), memory, 64, two), 0);
        assert_eq!(cuStreamSynchronize(two), 0);
        to.now()
    };
    assert!((0..SEEDS).all(|seed| run(seed, true) == [7; 64]));
    let wrong: BTreeSet<Vec<u8>> = (0..SEEDS).map(|seed| run(seed, false)).collect();
    assert!(wrong.contains(&vec![7; 64]), "some order is right by chance");
    assert!(wrong.contains(&vec![POISON; 64]), "some is too early");
    assert!(
        wrong.iter().any(|it| it.contains(&7) && it.contains(&POISON)),
        "some is in the middle of the copy"
    );
}

#[test]
fn a_destination_is_poison_until_its_copy_is_over() {
    let (mut early, mut torn) = (0, 0);
    for seed in 0..SEEDS {
        let _test = Test::new(seed);
        let (stream, event) = (stream(), event());
        let memory = device_memory(4096);
        assert_eq!(bytes_on_device(memory, 4096), vec![POISON; 4096], "new memory");
        let (from, to) = (Pinned::new(vec![1; 4096]), Pinned::new(vec![1; 4096]));
        assert_eq!(cuMemcpyHtoD_v2(memory, from.at(), 4096), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(to.at(), memory, 4096, stream), 0);
        // Nothing moved since the copy was queued.
        assert_eq!(to.now(), vec![POISON; 4096]);
        assert_eq!(cuEventRecord(event, stream), 0);
        loop {
            let (asked, seen) = (cuEventQuery(event), to.now());
            if asked == 0 {
                assert_eq!(seen, vec![1; 4096]);
                break;
            }
            assert_eq!(asked, NOT_READY);
            early += u32::from(seen[0] == POISON);
            torn += u32::from(seen[0] == 1 && seen[4095] == POISON);
        }
    }
    assert!(early > 0 && torn > 0, "{early} early looks, {torn} torn ones");
}

#[test]
fn a_source_is_read_when_the_copy_is_carried_out() {
    let late = (0..SEEDS).filter(|seed| {
        let _test = Test::new(*seed);
        let stream = stream();
        let memory = device_memory(64);
        let mut from = Pinned::new(vec![1; 64]);
        assert_eq!(cuMemcpyHtoDAsync_v2(memory, from.at(), 64, stream), 0);
        from.0.fill(2);
        assert_eq!(cuStreamSynchronize(stream), 0);
        bytes_on_device(memory, 64) == [2; 64]
    });
    assert_eq!(late.count() as u64, SEEDS);
}

/// The destination of a copy may still be in use by what is queued before it: then its poison must wait.
#[test]
fn poison_never_harms_a_correct_program() {
    for seed in 0..SEEDS {
        let _test = Test::new(seed);
        let (one, two) = (stream(), stream());
        let (a, b) = (device_memory(256), device_memory(256));
        let (ones, twos) = (Pinned::new(vec![1; 256]), Pinned::new(vec![2; 256]));
        let (out, word) = (Pinned::new(vec![0; 256]), Pinned::new(vec![0; 64]));
        let word_at = word.at().next_multiple_of(4);
        // b is overwritten in stream order, after it was read.
        assert_eq!(cuMemcpyHtoDAsync_v2(a, ones.at(), 256, one), 0);
        assert_eq!(cuMemcpyAsync(b, a, 256, one), 0);
        assert_eq!(cuMemcpyHtoDAsync_v2(a, twos.at(), 256, one), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(out.at(), b, 256, one), 0);
        assert_eq!(cuStreamSynchronize(one), 0);
        assert_eq!(out.now(), [1; 256]);
        // Stream two may not begin before the program says so, and until then all is the program's.
        assert_eq!(cuStreamWaitValue32_v2(two, word_at, 5, 0), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(out.at(), a, 256, two), 0);
        for _ in 0..20 {
            assert_eq!(cuStreamQuery(two), NOT_READY);
            assert_eq!(out.now(), [1; 256]);
        }
        // SAFETY: an aligned word within the pinned bytes.
        unsafe { AtomicU32::from_ptr(word_at as *mut u32) }.store(5, Ordering::Release);
        assert_eq!(cuStreamSynchronize(two), 0);
        assert_eq!(out.now(), [2; 256]);
        assert_eq!(standin_violations(), 0);
    }
}

#[test]
fn pageable_memory_is_copied_at_once() {
    for seed in 0..SEEDS {
        let _test = Test::new(seed);
        let stream = stream();
        let memory = device_memory(100);
        let (mut from, to) = (vec![3u8; 100], vec![0u8; 100]);
        assert_eq!(cuMemcpyHtoDAsync_v2(memory, from.as_ptr() as usize, 100, stream), 0);
        from.fill(4);
        assert_eq!(cuMemcpyDtoHAsync_v2(to.as_ptr() as usize, memory, 100, stream), 0);
        assert_eq!(std::hint::black_box(&to), &[3; 100]);
    }
}

#[test]
fn streams_write_and_wait_for_words() {
    for seed in 0..SEEDS {
        let _test = Test::new(seed);
        let (one, two) = (stream(), stream());
        let (word, memory) = (device_memory(4), device_memory(32));
        assert_eq!(cuStreamWriteValue32_v2(one, word, 0, 0), 0);
        assert_eq!(cuStreamSynchronize(one), 0);
        assert_eq!(cuStreamWaitValue32_v2(two, word, 3, 1), 0);
        assert_eq!(cuMemsetD8Async(memory, 2, 32, two), 0);
        assert_eq!(cuMemsetD8Async(memory, 1, 32, one), 0);
        assert_eq!(cuStreamWriteValue32_v2(one, word, 3, 0), 0);
        assert_eq!(cuStreamSynchronize(two), 0);
        assert_eq!(bytes_on_device(memory, 32), [2; 32]);
        assert_eq!(cuStreamWaitValue32_v2(two, word + 1, 3, 1), INVALID_VALUE);
    }
}

#[test]
fn another_thread_opens_what_a_stream_waits_for() {
    let _test = Test::new(3);
    let stream = stream();
    let word = Pinned::new(vec![0; 64]);
    let at = word.at().next_multiple_of(4);
    assert_eq!(cuStreamWaitValue32_v2(stream, at, 1, 0), 0);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            // SAFETY: an aligned word within the pinned bytes.
            unsafe { AtomicU32::from_ptr(at as *mut u32) }.store(1, Ordering::Release);
        });
        assert_eq!(cuStreamSynchronize(stream), 0);
    });
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    for seed in 0..SEEDS {
        let _test = Test::new(seed);
        let blocking = made(|it| cuStreamCreate(it, 0));
        let memory = device_memory(128);
        let out = Pinned::new(vec![0; 128]);
        assert_eq!(cuMemsetD8Async(memory, 1, 128, blocking), 0);
        assert_eq!(cuMemcpyDtoHAsync_v2(out.at(), memory, 128, 0), 0);
        assert_eq!(cuMemsetD8Async(memory, 2, 128, blocking), 0);
        assert_eq!(cuCtxSynchronize(), 0);
        assert_eq!(out.now(), [1; 128]);
    }
}

extern "C" fn add_one(data: *mut c_void) {
    // SAFETY: the tests give a live counter.
    unsafe { AtomicU32::from_ptr(data.cast()) }.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn host_functions_run_in_order_and_once() {
    for seed in 0..SEEDS {
        let _test = Test::new(seed);
        let (stream, count) = (stream(), AtomicU32::new(0));
        let gate = Pinned::new(vec![0; 8]);
        let at = gate.at().next_multiple_of(4);
        assert_eq!(cuStreamWaitValue32_v2(stream, at, 1, 0), 0);
        assert_eq!(cuLaunchHostFunc(stream, add_one, count.as_ptr() as usize), 0);
        assert_eq!(cuStreamQuery(stream), NOT_READY);
        assert_eq!(count.load(Ordering::Relaxed), 0);
        // SAFETY: an aligned word within the pinned bytes.
        unsafe { AtomicU32::from_ptr(at as *mut u32) }.store(1, Ordering::Release);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}

/// Fifty looks at three streams that copy from one place to another.
fn history(seed: u64) -> Vec<Vec<c_int>> {
    let _test = Test::new(seed);
    let streams = [stream(), stream(), stream()];
    let memory = device_memory(30_000);
    let from = Pinned::new(vec![5; 30_000]);
    for (at, stream) in streams.iter().enumerate() {
        for _ in 0..4 {
            assert_eq!(cuMemcpyHtoDAsync_v2(memory + at * 10_000, from.at(), 10_000, *stream), 0);
        }
    }
    let looks = (0..50).map(|_| streams.map(|it| cuStreamQuery(it)).to_vec()).collect();
    assert_eq!(cuCtxSynchronize(), 0);
    looks
}

#[test]
fn a_seed_gives_one_order_and_seeds_differ() {
    for seed in 0..20 {
        assert_eq!(history(seed), history(seed));
    }
    let distinct: BTreeSet<_> = (0..20).map(history).collect();
    assert!(distinct.len() > 10, "{} orders", distinct.len());
}

#[test]
fn memory_that_is_given_away_in_use_is_a_violation() {
    for seed in 0..20 {
        let _test = Test::new(seed);
        let stream = stream();
        let (word, memory) = (Pinned::new(vec![0; 8]), device_memory(64));
        let from = Pinned::new(vec![1; 64]);
        let at = word.at().next_multiple_of(4);
        assert_eq!(cuStreamWaitValue32_v2(stream, at, 1, 0), 0);
        assert_eq!(cuMemcpyHtoDAsync_v2(memory, from.at(), 64, stream), 0);
        drop(from);
        assert_eq!(standin_violations(), 1);
        // SAFETY: an aligned word within the pinned bytes.
        unsafe { AtomicU32::from_ptr(at as *mut u32) }.store(1, Ordering::Release);
        assert_eq!(cuStreamSynchronize(stream), 0);
        assert_eq!(bytes_on_device(memory, 64), [POISON; 64]);
        // A stream that waits for a word that is gone breaks its device.
        assert_eq!(cuStreamWaitValue32_v2(stream, at, 2, 0), 0);
        drop(word);
        assert_eq!(cuStreamSynchronize(stream), ILLEGAL_ADDRESS);
        assert_eq!(cuMemAlloc_v2(&mut 0, 16), ILLEGAL_ADDRESS);
    }
}

#[test]
fn registrations_are_checked() {
    let _test = Test::new(1);
    let bytes = Pinned::new(vec![0; 10_000]);
    assert_eq!(cuMemHostRegister_v2(bytes.at() + 8, 16, 0), ALREADY_REGISTERED);
    assert_eq!(cuMemHostRegister_v2(bytes.at() - 8, 16, 0), ALREADY_REGISTERED);
    assert_eq!(cuMemHostUnregister(bytes.at() + 8), NOT_REGISTERED);
    assert_eq!(cuMemHostRegister_v2(4096, 16, 0), INVALID_VALUE); // nothing is mapped there
    assert_eq!(cuMemFreeHost(bytes.at()), INVALID_VALUE);
    let own = made(|it| cuMemHostAlloc(it, 100, 0));
    assert_eq!(cuMemHostUnregister(own), NOT_REGISTERED);
    assert_eq!(cuMemFreeHost(own), 0);
    assert_eq!(cuMemAlloc_v2(&mut 0, 1 << 40), OUT_OF_MEMORY);
}

#[test]
fn pointers_are_known_or_refused() {
    let test = Test::new(1);
    let context = test.use_device(1);
    let (memory, host) = (device_memory(1000), Pinned::new(vec![0; 100]));
    let plain = [0u8; 8];
    let int = |attribute, pointer| {
        let mut value: c_int = 77;
        (cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer), value)
    };
    let long = |attribute, pointer| {
        let mut value = 0usize;
        (cuPointerGetAttribute((&raw mut value).cast(), attribute, pointer), value)
    };
    assert_eq!(int(2, memory + 999), (0, 2));
    assert_eq!(int(2, host.at()), (0, 1));
    assert_eq!(int(2, plain.as_ptr() as usize), (INVALID_VALUE, 77));
    assert_eq!(int(2, memory + 1000).0, INVALID_VALUE);
    assert_eq!(int(9, memory), (0, 1));
    assert_eq!(long(1, memory), (0, context));
    assert_eq!((long(11, memory + 5), long(12, memory + 5)), ((0, memory), (0, 1000)));
    let (mut base, mut len) = (0, 0);
    assert_eq!(cuMemGetAddressRange_v2(&mut base, &mut len, memory + 3), 0);
    assert_eq!((base, len), (memory, 1000));
    let (mut kind, mut ordinal): (c_int, c_int) = (7, 7);
    let data = [(&raw mut kind).cast::<c_void>(), (&raw mut ordinal).cast()];
    assert_eq!(
        cuPointerGetAttributes(2, [2, 9].as_ptr(), data.as_ptr(), plain.as_ptr() as usize),
        0
    );
    assert_eq!((kind, ordinal), (0, -2));
    // What runs over the end of an allocation is no place to copy to.
    let stream = stream();
    assert_eq!(cuMemcpyHtoDAsync_v2(memory + 990, host.at(), 11, stream), INVALID_VALUE);
    assert_eq!(cuMemcpyHtoDAsync_v2(plain.as_ptr() as usize, host.at(), 8, stream), INVALID_VALUE);
    assert_eq!(cuMemFree_v2(memory), 0);
    assert_eq!(cuMemcpyHtoDAsync_v2(memory, host.at(), 11, stream), INVALID_VALUE);
    assert_eq!(cuMemFree_v2(memory), INVALID_VALUE);
}

#[test]
fn wrong_handles_are_refused() {
    let test = Test::new(1);
    let (stream, event) = (stream(), event());
    for wrong in [stream + 1, event, 3, usize::MAX] {
        assert_eq!(cuStreamQuery(wrong), INVALID_HANDLE);
        assert_eq!(cuStreamDestroy_v2(wrong), INVALID_HANDLE);
        assert_eq!(cuEventRecord(event, wrong), INVALID_HANDLE);
    }
    assert_eq!(cuEventQuery(stream), INVALID_HANDLE);
    assert_eq!(cuStreamDestroy_v2(stream), 0);
    assert_eq!(cuStreamSynchronize(stream), INVALID_HANDLE);
    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(cuEventDestroy_v2(event), INVALID_HANDLE);
    assert_eq!(cuStreamCreate(&mut 0, 8), INVALID_VALUE);
    // An event is recorded in streams of its own device.
    let event = self::event();
    test.use_device(1);
    assert_eq!(cuEventRecord(event, self::stream()), INVALID_HANDLE);
}

#[test]
fn a_captured_stream_takes_no_work() {
    let _test = Test::new(1);
    let (captured, other, event) = (made(|it| cuStreamCreate(it, 0)), stream(), event());
    let (mut status, mut graph) = (9, 0);
    assert_eq!((cuStreamIsCapturing(captured, &mut status), status), (0, 0));
    assert_eq!(cuStreamBeginCapture_v2(captured, 2), 0);
    assert_eq!((cuStreamIsCapturing(captured, &mut status), status), (0, 1));
    assert_eq!(cuStreamIsCapturing(0, &mut status), 906);
    assert_eq!(cuEventRecord(event, captured), 0);
    assert_eq!(cuEventQuery(event), CAPTURE_UNSUPPORTED);
    assert_eq!(cuStreamWaitEvent(other, event, 0), CAPTURE_UNSUPPORTED);
    assert_eq!(cuStreamEndCapture(captured, &mut graph), 0);
    assert_eq!(cuStreamBeginCapture_v2(captured, 2), 0);
    assert_eq!(cuStreamQuery(captured), CAPTURE_UNSUPPORTED);
    assert_eq!((cuStreamIsCapturing(captured, &mut status), status), (0, 2));
    assert_eq!(cuStreamEndCapture(captured, &mut graph), CAPTURE_INVALIDATED);
    assert_eq!(cuStreamEndCapture(captured, &mut graph), 903);
    assert_eq!(cuStreamQuery(captured), 0);
    assert_eq!(cuStreamBeginCapture_v2(0, 2), CAPTURE_UNSUPPORTED);
}

#[test]
fn events_measure_and_say_when_they_cannot() {
    let _test = Test::new(1);
    let stream = stream();
    let timed = || made(|it| cuEventCreate(it, 0));
    let (start, end, mut time) = (timed(), timed(), -1.0);
    assert_eq!(cuEventElapsedTime(&mut time, start, end), INVALID_HANDLE); // not recorded
    assert_eq!(cuEventQuery(start), 0);
    let memory = device_memory(16);
    assert_eq!(cuEventRecord(start, stream), 0);
    assert_eq!(cuMemsetD8Async(memory, 1, 16, stream), 0);
    assert_eq!(cuEventRecord(end, stream), 0);
    assert_eq!(cuEventSynchronize(end), 0);
    assert_eq!(cuEventElapsedTime(&mut time, start, end), 0);
    assert!(time > 0.0);
    let untimed = event();
    assert_eq!(cuEventRecord(untimed, stream), 0);
    assert_eq!(cuEventSynchronize(untimed), 0);
    assert_eq!(cuEventElapsedTime(&mut time, start, untimed), INVALID_HANDLE);
}

#[test]
fn the_nth_call_fails_and_does_nothing() {
    let _test = Test::new(1);
    standin_fail(c"cuMemAlloc".as_ptr(), 2, OUT_OF_MEMORY);
    let memory = device_memory(16);
    assert_eq!(cuMemAlloc_v2(&mut 0, 16), OUT_OF_MEMORY);
    assert_eq!(standin_leaks(), 1);
    standin_fail_any(3, 999);
    let before = standin_calls();
    assert_eq!(cuStreamQuery(0), 0);
    assert_eq!(cuStreamQuery(0), 0);
    assert_eq!(cuMemFree_v2(memory), 999);
    assert_eq!(cuMemFree_v2(memory), 0);
    assert_eq!((standin_calls() - before, standin_leaks()), (4, 0));
}

#[test]
fn leaks_are_what_was_not_given_back() {
    let _test = Test::new(1);
    assert_eq!(standin_leaks(), 0);
    let (stream, event, memory) = (stream(), event(), device_memory(8));
    let pinned = Pinned::new(vec![0; 8]);
    assert_eq!(cuStreamQuery(0), 0); // the driver's own stream is none
    assert_eq!(standin_leaks(), 4);
    drop(pinned);
    assert_eq!((cuStreamDestroy_v2(stream), cuEventDestroy_v2(event), standin_leaks()), (0, 0, 1));
    // The end of a context takes all, and hides nothing.
    assert_eq!(cuDevicePrimaryCtxRelease_v2(0), 0);
    assert_eq!(standin_leaks(), 1);
    assert_ne!(cuMemFree_v2(memory), 0);
}

#[test]
fn a_broken_device_fails_everything_and_the_other_goes_on() {
    let test = Test::new(1);
    let (stream, event, memory) = (stream(), event(), device_memory(64));
    let pinned = Pinned::new(vec![1; 64]);
    assert_eq!(cuMemcpyHtoDAsync_v2(memory, pinned.at(), 64, stream), 0);
    assert_eq!(cuEventRecord(event, stream), 0);
    standin_break_device(0, ILLEGAL_ADDRESS);
    assert_eq!(cuStreamSynchronize(stream), ILLEGAL_ADDRESS);
    assert_eq!(cuEventQuery(event), ILLEGAL_ADDRESS);
    assert_eq!(cuMemcpyHtoDAsync_v2(memory, pinned.at(), 64, stream), ILLEGAL_ADDRESS);
    // What is given back is gone, though the call says what is wrong.
    assert_eq!(cuStreamDestroy_v2(stream), ILLEGAL_ADDRESS);
    assert_eq!(cuEventDestroy_v2(event), ILLEGAL_ADDRESS);
    assert_eq!(cuMemFree_v2(memory), ILLEGAL_ADDRESS);
    assert_eq!(cuMemHostUnregister(pinned.at()), ILLEGAL_ADDRESS);
    assert_eq!(standin_leaks(), 0);
    test.use_device(1);
    assert_eq!(bytes_on_device(device_memory(8), 8), [POISON; 8]);
}

/// Runs something in a forked child, and says how the child ended.
fn in_a_child(what: impl FnOnce() -> c_int) -> c_int {
    // SAFETY: the child calls only functions that need no other thread, and ends without running anything else.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            libc::_exit(what());
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status
    }
}

#[test]
fn the_cpu_cannot_touch_memory_of_a_device() {
    let _test = Test::new(1);
    let memory = device_memory(64);
    // SAFETY: none: it is the point that this ends the child.
    let status = in_a_child(|| c_int::from(unsafe { (memory as *const u8).read_volatile() }));
    assert!(libc::WIFSIGNALED(status));
    assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
}

#[test]
fn a_forked_child_has_no_driver() {
    let _test = Test::new(1);
    let status = in_a_child(|| cuMemFree_v2(0));
    assert!(libc::WIFEXITED(status));
    assert_eq!(libc::WEXITSTATUS(status), NOT_INITIALIZED);
}
