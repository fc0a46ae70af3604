//! The driver's functions, called for real, on a stand-in that has no hardware.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails this way")]

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline_cuda::{CudaDevice, Driver, MemoryHandle};
use drumline_device::{Device, Error, Flight, Part, Pinned, Place, Result, Stream};
use drumline_shm::{PeerSegment, Segment, SegmentSize};
use drumline_standin::{Controls, library};

/// The stand-in belongs to the process, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Bench {
    controls: Controls,
    driver: Driver,
    _turn: MutexGuard<'static, ()>,
}

fn bench() -> Bench {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let controls = Controls::load();
    controls.reset();
    let driver = Driver::load(Some(&library())).unwrap();
    Bench { controls, driver, _turn: turn }
}

impl Bench {
    fn device(&self) -> CudaDevice {
        self.driver.device(0).unwrap()
    }

    fn is_clean(&self) {
        assert_eq!(self.controls.violations(), 0, "{}", self.controls.last_violation());
        assert_eq!(self.controls.leaks(), 0);
    }
}

fn segment() -> Segment {
    Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 22 }).unwrap()
}

fn part(place: Place, at: usize) -> Part {
    Part { place, at, window: None }
}

const BYTES: usize = 100_000;

fn pattern(seed: usize) -> Vec<u8> {
    (0..BYTES).map(|index| (index * 31 + seed * 7 + index / 256) as u8).collect()
}

#[test]
fn a_driver_says_what_it_is_and_which_devices_it_has() {
    let bench = bench();
    assert_eq!(bench.driver.devices().unwrap(), 2);
    let text = bench.driver.to_string();
    assert!(text.starts_with("cuda 1") && text.contains("libdrumline_standin.so"), "{text}");
    let [one, other] = [0, 1].map(|ordinal| bench.driver.device(ordinal).unwrap());
    assert_ne!(one.identity().uuid, other.identity().uuid);
    assert!(one.identity().to_string().starts_with("cuda:0 (Stand-in"), "{}", one.identity());
    assert!(one.reaches(&other).unwrap());
    let error = bench.driver.device(7).unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_INVALID_DEVICE"), "{error}");
}

#[test]
fn no_driver_is_an_error_that_says_what_was_tried() {
    let _turn = bench();
    let empty = tempfile::NamedTempFile::new().unwrap();
    for (path, part) in [
        (Path::new("/no/libcuda.so.1"), "/no/libcuda.so.1"),
        (empty.path(), "too short"),
        (Path::new("libm.so.6"), "it has no function cu"),
    ] {
        let error = Driver::load(Some(path)).unwrap_err();
        assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// Out of a device, in again at another place, by way of registered memory.
fn round(device: &CudaDevice, segment: &Segment) -> Result<Vec<u8>> {
    let (mut from, to) = (device.allocate(BYTES)?, device.allocate(BYTES)?);
    from.write(&pattern(1))?;
    let stream = device.stream()?;
    let memory = segment.arena().allocate::<u8>(BYTES).unwrap();
    let pinned = device.pin(memory).map_err(|refused| refused.0)?;
    let half = BYTES / 2;
    let halves =
        [0..half, half..BYTES].map(|range| (from.place().part(range.clone()), range.start));
    let parts = halves.map(|(place, at)| part(place.unwrap(), at));
    let flight = stream.copy_out(&parts, pinned.into()).map_err(|refused| refused.0)?;
    let event = stream.record()?;
    let back = device.stream()?;
    back.wait(&*event)?;
    let flight = back.copy_in(&[part(to.place(), 0)], flight).map_err(|refused| refused.0)?;
    drop(flight.land()?);
    let mut found = vec![0; BYTES];
    to.read(&mut found)?;
    Ok(found)
}

#[test]
fn copies_bring_what_they_should_in_every_order() {
    let bench = bench();
    let (device, segment) = (bench.device(), segment());
    for seed in 0..100 {
        bench.controls.seed(seed);
        assert!(round(&device, &segment).unwrap() == pattern(1), "seed {seed}");
    }
    bench.is_clean();
}

#[test]
fn memory_is_the_devices_until_it_has_landed() {
    let bench = bench();
    let (device, segment) = (bench.device(), segment());
    let mut from = device.allocate(BYTES).unwrap();
    from.write(&pattern(2)).unwrap();
    let stream = device.stream().unwrap();
    for seed in 0..50 {
        bench.controls.seed(seed);
        let pinned = device.pin(segment.arena().allocate::<u8>(BYTES).unwrap()).unwrap();
        let mut flight = stream.copy_out(&[part(from.place(), 0)], pinned.into()).unwrap();
        if seed % 2 == 0 {
            drop(flight); // waits, so nothing is freed too early
            continue;
        }
        while !flight.has_landed().unwrap() {}
        assert!(flight.land().unwrap().as_ref() == pattern(2), "seed {seed}");
    }
    drop((from, stream));
    bench.is_clean();
}

#[test]
fn what_is_filled_or_written_is_there_for_every_stream() {
    let bench = bench();
    let device = bench.device();
    let stream = device.stream().unwrap();
    for seed in 0..100 {
        bench.controls.seed(seed);
        let mut memory = device.allocate(BYTES).unwrap();
        let expected = match seed % 2 {
            0 => memory.fill(7).map(|()| vec![7; BYTES]),
            _ => memory.write(&pattern(4)).map(|()| pattern(4)),
        };
        let flight = device.pinned(BYTES).unwrap().into();
        let pinned = stream.copy_out(&[part(memory.place(), 0)], flight).unwrap().land().unwrap();
        assert!(pinned.as_ref() == expected.unwrap(), "seed {seed}");
    }
    drop(stream);
    bench.is_clean();
}

#[test]
fn a_neighbours_memory_comes_in_from_where_it_lies() {
    let bench = bench();
    let (device, segment) = (bench.device(), segment());
    let peer = PeerSegment::map(segment.handles().unwrap()).unwrap();
    let mut buffer = segment.arena().allocate::<u8>(BYTES).unwrap();
    buffer.copy_from_slice(&pattern(3));
    let window = peer.window(segment.arena().offset_of(&buffer).unwrap(), BYTES).unwrap();
    let window = device.pin_window(window).unwrap();
    let to = device.allocate(100).unwrap();
    let own = device.pinned(8).unwrap();
    let parts = [Part { place: to.place(), at: 500, window: Some(window.clone()) }];
    let stream = device.stream().unwrap();
    assert!(stream.copy_out(&parts, device.pinned(8).unwrap().into()).is_err(), "it is not ours");
    drop((peer, window));
    stream.copy_in(&parts, own.into()).unwrap().land().unwrap();
    let mut found = [0; 100];
    to.read(&mut found).unwrap();
    assert_eq!(found, pattern(3)[500..600]);
    drop((parts, to, stream));
    bench.is_clean();
}

/// What the process of `lender_process` has lent, and the process, which keeps it until its input is closed.
struct Lender(Child);

impl Lender {
    fn start() -> (Lender, MemoryHandle) {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "lender_process", "--nocapture", "--test-threads=1"])
            .env("CUDA_TEST_LENDS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lender = Lender(child);
        let lines = BufReader::new(lender.0.stdout.as_mut().unwrap()).lines();
        let hex = lines
            .map(Result::unwrap)
            .find_map(|it| it.strip_prefix("lends ").map(str::to_owned))
            .unwrap();
        let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
        (lender, MemoryHandle::from_bytes(std::array::from_fn(byte)))
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn lender_process() {
    if env::var_os("CUDA_TEST_LENDS").is_none() {
        return;
    }
    let bench = bench();
    let mut memory = bench.device().allocate(BYTES).unwrap();
    memory.write(&pattern(1)).unwrap();
    let handle = memory.handle().unwrap().to_bytes();
    assert_eq!(memory.handle().unwrap().to_bytes(), handle);
    // What is written later is seen, too.
    memory.write(&pattern(5)).unwrap();
    // The name of the test stands at the beginning of the line.
    println!("\nlends {}", handle.map(|byte| format!("{byte:02x}")).concat());
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    drop(memory);
    bench.is_clean();
}

#[test]
fn a_process_copies_from_the_device_memory_of_another_one() {
    let (lender, handle) = Lender::start();
    let bench = bench();
    {
        let (device, other) = (bench.device(), bench.driver.device(1).unwrap());
        let lent = device.open_memory(&handle, BYTES).unwrap();
        let again = device.open_memory(&handle, BYTES).unwrap();
        assert_eq!(again.place(), lent.place(), "one address, which two values hold");
        drop(again);
        let own = device.allocate(BYTES).unwrap();
        let stream = device.stream().unwrap();
        stream.copy_within(lent.place(), own.place()).unwrap();
        stream.record().unwrap().wait().unwrap();
        let mut found = vec![0; BYTES];
        own.read(&mut found).unwrap();
        assert!(found == pattern(5));

        let error = device.open_memory(&handle, BYTES + 1).unwrap_err();
        assert!(matches!(error, Error::Place { .. }), "{error}");
        let error = other.check(lent.place()).unwrap_err().to_string();
        assert!(error.contains("memory of cuda:0"), "{error}");
        let error = device.open_memory(&own.handle().unwrap(), BYTES).unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_INVALID_CONTEXT"), "{error}");
        lender.end();
        drop(lent);
        // The memory is freed.
        let error = device.open_memory(&handle, BYTES).unwrap_err().to_string();
        assert!(
            error.contains("cuIpcOpenMemHandle") && error.contains("CUDA_ERROR_INVALID_HANDLE"),
            "{error}"
        );
    }
    bench.is_clean();
}

#[test]
fn a_driver_without_ipc_says_so() {
    let bench = bench();
    bench.controls.set("STANDIN_NO_IPC", Some("1"));
    bench.controls.reset();
    let driver = Driver::load(Some(&library())).unwrap();
    let error = driver.device(0).unwrap().allocate(64).unwrap().handle().unwrap_err().to_string();
    assert!(error.contains("CUDA_ERROR_NOT_SUPPORTED"), "{error}");
    bench.controls.unset_all();
    bench.controls.reset();
}

#[test]
fn bad_places_are_refused_by_name() {
    let bench = bench();
    let (device, other) = (bench.device(), bench.driver.device(1).unwrap());
    let (memory, elsewhere) = (device.allocate(BYTES).unwrap(), other.allocate(BYTES).unwrap());
    let host = [0_u8; 64];
    let freed = device.allocate(BYTES).unwrap().place();
    let pinned = device.pinned(64).unwrap();
    let place = |address: *const u8| Place { address: address as u64, bytes: 64 };
    let cases = [
        (place(host.as_ptr()), "memory of the host"),
        (place(pinned.as_ref().as_ptr()), "memory of the host"),
        (elsewhere.place(), "memory of cuda:1"),
        (freed, "was freed"),
        (Place { bytes: BYTES + 1_000_000, ..memory.place() }, "only"),
        (Place { address: 0, bytes: 1 }, "memory of the host, or was freed"),
    ];
    let stream = device.stream().unwrap();
    for (place, problem) in cases {
        let error = device.check(place).unwrap_err();
        assert!(matches!(error, Error::Place { .. }), "{error:?}");
        assert!(error.to_string().contains(problem), "{error}");
        let refused = stream.copy_out(&[part(place, 0)], device.pinned(64).unwrap().into());
        assert!(refused.is_err(), "{place}");
        assert!(stream.copy_within(place, place).is_err(), "{place}");
    }
    device.check(memory.place()).unwrap();
    device.check(Place { address: 1, bytes: 0 }).unwrap();
    // And bytes that the host does not have.
    let refused = stream.copy_in(&[part(memory.place().part(0..65).unwrap(), 0)], pinned.into());
    let error = refused.unwrap_err().0.to_string();
    assert!(error.contains("do not lie in 64 bytes of the host"), "{error}");
}

/// As allocators have it that map memory piece by piece.
#[test]
fn a_place_of_several_allocations_is_checked_in_each_of_them() {
    const EACH: usize = 1 << 16;
    let bench = bench();
    let (device, other) = (bench.device(), bench.driver.device(1).unwrap());
    bench.controls.side_by_side(4 * EACH);
    let of = |device: &CudaDevice| device.allocate(EACH).unwrap();
    let memory = [of(&device), of(&device), of(&other), of(&device)];
    let start = memory[0].place().address;
    let starts = memory.each_ref().map(|it| it.place().address);
    assert_eq!(starts, [0, 1, 2, 3].map(|it| start + it * EACH as u64));
    let place = |from: usize, to: usize| Place { address: start + from as u64, bytes: to - from };
    device.check(place(0, 2 * EACH)).unwrap();
    device.check(place(EACH - 1, EACH + 1)).unwrap();
    other.check(place(2 * EACH, 3 * EACH)).unwrap();
    let told = |device: &CudaDevice, place: Place| device.check(place).unwrap_err().to_string();
    let error = told(&device, place(100, 4 * EACH));
    let good = 2 * EACH - 100;
    assert!(error.contains(&format!("only {good} bytes")), "{error}");
    assert!(error.contains("memory of cuda:1"), "{error}");
    let error = told(&other, place(3 * EACH - 1, 3 * EACH + 1));
    assert!(error.contains("only 1 bytes") && error.contains("memory of cuda:0"), "{error}");
    let stream = device.stream().unwrap();
    let across = place(2 * EACH - 32, 2 * EACH + 32);
    assert!(stream.copy_out(&[part(across, 0)], device.pinned(64).unwrap().into()).is_err());
    let [one, two, three, four] = memory;
    drop(two);
    let error = told(&device, place(0, 2 * EACH));
    assert!(error.contains(&format!("only {EACH} bytes")), "{error}");
    assert!(error.contains("was freed"), "{error}");
    drop((one, three, four, stream));
    bench.is_clean();
}

#[test]
fn pinned_memory_is_unpinned_before_it_is_detached_and_once() {
    let bench = bench();
    let (device, segment) = (bench.device(), segment());
    let memory = segment.arena().allocate::<u8>(BYTES).unwrap();
    let address = memory.as_ptr();
    let pinned = device.pin(memory).unwrap();
    assert_eq!(bench.controls.leaks(), 1);
    segment.arena().detach(pinned.as_ref()).unwrap();
    assert_eq!(bench.controls.leaks(), 0);
    assert_eq!(pinned.unpin().unwrap().as_ptr(), address);
    bench.is_clean();
}

#[test]
fn a_window_that_two_devices_pin_is_unpinned_by_the_last_of_them() {
    let bench = bench();
    let segment = segment();
    let mut buffer = segment.arena().allocate::<u8>(BYTES).unwrap();
    buffer.copy_from_slice(&pattern(5));
    let peer = PeerSegment::map(segment.handles().unwrap()).unwrap();
    let window = peer.window(segment.arena().offset_of(&buffer).unwrap(), BYTES).unwrap();
    for first in [0, 1] {
        for seed in 0..20 {
            bench.controls.seed(seed);
            let devices = [first, 1 - first].map(|ordinal| bench.driver.device(ordinal).unwrap());
            let [one, two] = devices.each_ref().map(|it| it.pin_window(window.clone()).unwrap());
            let [early, late] = devices;
            let (stream, to) = (late.stream().unwrap(), late.allocate(BYTES).unwrap());
            let own = late.pinned(8).unwrap();
            let before = bench.controls.leaks();
            // The copy is under way when the device that has pinned the pages is given back.
            let parts = [Part { place: to.place(), at: 0, window: Some(two) }];
            let copy = stream.copy_in(&parts, own.into()).unwrap();
            drop((one, early));
            let _own = copy.land().unwrap();
            assert_eq!(bench.controls.leaks(), before, "it is still pinned");
            drop(parts);
            assert_eq!(bench.controls.leaks(), before - 1, "it is unpinned");
            let mut found = vec![0; BYTES];
            to.read(&mut found).unwrap();
            assert!(found == pattern(5), "seed {seed}");
        }
    }
    bench.is_clean();
    assert_eq!(bench.controls.retained(), 0);
}

#[test]
fn a_range_that_overlaps_a_pinned_one_in_part_is_refused() {
    let bench = bench();
    let (device, segment) = (bench.device(), segment());
    let buffer = segment.arena().allocate::<u8>(BYTES).unwrap();
    let offset = segment.arena().offset_of(&buffer).unwrap();
    let peer = PeerSegment::map(segment.handles().unwrap()).unwrap();
    let pin =
        |from: usize, to: usize| device.pin_window(peer.window(offset + from, to - from).unwrap());
    let (low, high) = (pin(1_000, 2_000).unwrap(), pin(2_000, 3_000).unwrap());
    let before = bench.controls.leaks();
    for (from, to) in [(999, 1_001), (1_999, 2_001), (1_200, 1_300), (0, 4_000), (1_000, 3_000)] {
        let error = pin(from, to).unwrap_err();
        let Error::Driver { code: 712, ref name, .. } = error else { panic!("{error:?}") };
        assert_eq!(name, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "{from} to {to}");
    }
    assert_eq!(bench.controls.leaks(), before);
    drop((low, high));
    drop(pin(1_000, 3_000).unwrap());
    bench.is_clean();
}

#[test]
fn a_stream_waits_at_a_gate_until_the_host_opens_it() {
    let bench = bench();
    let device = bench.device();
    let (from, to) = (device.allocate(64).unwrap(), device.allocate(64).unwrap());
    for seed in 0..30 {
        bench.controls.seed(seed);
        let stream = device.stream().unwrap();
        let gate = device.gate().unwrap();
        stream.wait_gate(&gate).unwrap();
        stream.copy_within(from.place(), to.place()).unwrap();
        let event = stream.record().unwrap();
        for _ in 0..20 {
            assert!(!event.has_come().unwrap(), "seed {seed}");
        }
        match seed % 2 {
            0 => gate.open(),
            _ => drop(gate), // opens, and keeps the word until the stream has passed
        }
        event.wait().unwrap();
        drop((event, stream));
    }
    drop((from, to, device.gate().unwrap()));
    bench.is_clean();
}

#[test]
fn the_word_of_a_gate_is_kept_until_the_driver_says_that_the_stream_has_passed() {
    let bench = bench();
    let device = bench.device();
    // Work before the gate keeps the stream from passing.
    let words_left = |question: Option<i32>| {
        bench.controls.seed(3);
        let stream = device.stream().unwrap();
        let first = device.gate().unwrap();
        let second = device.gate().unwrap();
        stream.wait_gate(&first).unwrap();
        stream.wait_gate(&second).unwrap();
        if let Some(code) = question {
            bench.controls.fail("cuEventQuery", 1, code);
        }
        let before = bench.controls.leaks();
        drop(second);
        let kept = bench.controls.leaks() == before;
        first.open();
        stream.record().unwrap().wait().unwrap();
        drop((first, stream));
        kept
    };
    assert!(words_left(None), "it is not passed");
    assert!(words_left(Some(999)), "it is not known to be passed");
    while bench.controls.leaks() > 0 {
        drop(device.gate().unwrap());
    }
    assert_eq!(bench.controls.violations(), 0, "{}", bench.controls.last_violation());
}

#[test]
fn streams_of_others_stay_and_a_capture_is_seen() {
    let bench = bench();
    let device = bench.device();
    // SAFETY: 0 is the legacy default stream, which every context has.
    let legacy = unsafe { device.foreign_stream(0) };
    assert!(!legacy.is_capturing().unwrap());
    let event = legacy.record().unwrap();
    event.wait().unwrap();
    let own = device.stream().unwrap();
    own.wait(&*event).unwrap();
    drop((legacy, event, own));
    bench.is_clean();
}

#[test]
fn a_broken_device_fails_by_name_and_its_memory_is_kept() {
    let bench = bench();
    let (device, segment) = (bench.device(), segment());
    let from = device.allocate(BYTES).unwrap();
    let stream = device.stream().unwrap();
    let pinned = device.pin(segment.arena().allocate::<u8>(BYTES).unwrap()).unwrap();
    let flight = stream.copy_out(&[part(from.place(), 0)], pinned.into()).unwrap();
    bench.controls.break_device(0, 700);
    let error = flight.land().unwrap_err();
    let Error::Driver { ref device, code: 700, ref name, .. } = error else { panic!("{error:?}") };
    assert!(device.starts_with("cuda:0 (Stand-in") && name == "CUDA_ERROR_ILLEGAL_ADDRESS");
}

/// Waits at its end for what a stream holds: the memory that this uses is freed after it.
struct Idle(Arc<dyn Stream>);

impl Drop for Idle {
    fn drop(&mut self) {
        // One call fails, so the second time goes well.
        let _ = (0..2).any(|_| self.0.record().and_then(|event| event.wait()).is_ok());
    }
}

/// Calls every function of the table.
fn tour() -> Result<()> {
    let driver = Driver::load(Some(&library()))?;
    let device = driver.device(0)?;
    driver.devices()?;
    let segment = segment();
    if round(&device, &segment)? != pattern(1) {
        return Err(Error::Argument { problem: "wrong bytes".to_owned() });
    }
    let mut memory = device.allocate(64)?;
    memory.fill(1)?;
    let stream = device.stream()?;
    let _idle = Idle(stream.clone());
    if stream.is_capturing()? {
        return Err(Error::Capture);
    }
    memory.handle()?;
    let gate = device.gate()?;
    gate.open();
    stream.wait_gate(&gate)?;
    let [low, high] = [0..32, 32..64].map(|range| memory.place().part(range));
    stream.copy_within(low.unwrap_or(memory.place()), high.unwrap_or(memory.place()))?;
    let flight = stream.copy_out(&[part(memory.place(), 0)], Flight::from(device.pinned(64)?));
    let pinned: Pinned = flight.map_err(|refused| refused.0)?.land()?;
    match pinned.as_ref() == [1; 64] {
        true => Ok(()),
        false => Err(Error::Argument { problem: "wrong bytes".to_owned() }),
    }
}

#[test]
fn every_call_of_the_driver_may_fail_once() {
    let bench = bench();
    tour().unwrap();
    bench.is_clean();
    let before = bench.controls.calls();
    tour().unwrap();
    let calls = u32::try_from(bench.controls.calls() - before).unwrap();
    assert!(calls > 100, "{calls}");
    let mut typed = 0;
    for nth in 1..=calls {
        bench.controls.reset();
        bench.controls.seed(u64::from(nth));
        bench.controls.fail_any(nth, 999);
        match tour() {
            // It hit a call of a destructor, or one that is made again.
            Ok(()) => assert!(bench.controls.leaks() <= 1, "call {nth}"),
            Err(Error::Driver { code: 999, name, call, .. }) => {
                typed += 1;
                assert_eq!(name, "CUDA_ERROR_UNKNOWN");
                // The word of a gate, of which nobody can tell whether a stream has passed it.
                let kept = bench.controls.leaks();
                assert!(
                    kept <= u64::from(call.starts_with("cuEvent") || call == "cuCtxPushCurrent"),
                    "call {nth}, {call}, keeps {kept}"
                );
            }
            Err(other) => panic!("call {nth}: {other:?}"),
        }
        assert_eq!(bench.controls.violations(), 0, "{nth}: {}", bench.controls.last_violation());
        // A word that was put aside must not outlive the stand-in's memory: it would give back the next one's context.
        for _ in 0..50 {
            drop(bench.driver.device(0).map(|device| device.gate()));
        }
    }
    assert!(typed > calls / 3, "{typed} of {calls}");
    bench.controls.reset();
}

#[test]
fn threads_share_a_device() {
    let bench = bench();
    let device = Arc::new(bench.device());
    std::thread::scope(|threads| {
        for _ in 0..4 {
            let device = device.clone();
            threads.spawn(move || {
                let segment = segment();
                for _ in 0..10 {
                    assert!(round(&device, &segment).unwrap() == pattern(1));
                }
            });
        }
    });
    bench.is_clean();
}
