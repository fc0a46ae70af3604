//! What is refused before any rank hears.

use drumline_accel::{DeviceGroup, DeviceWork};
use drumline_accel::{DeviceOptions, DeviceSlice, Place, Result};
use drumline_group::{DType, ErrorKind, Operator, ReduceOp};
use std::sync::Arc;

use crate::common::{bench, config, finish, small};

#[test]
fn wrong_arguments_are_refused_before_any_rank_hears() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let on = member.on(&small());
        let stream = member.stream();
        let memory = member.device.allocate(1_024).unwrap();
        let place = memory.place();
        let f32s = |range: std::ops::Range<usize>| {
            DeviceSlice::new(place.part(range).unwrap(), DType::F32)
        };
        let other_device = (member.rank() + 1) % 2;
        let elsewhere = bench.device(other_device).allocate(64).unwrap();
        // Then nobody allocates where this rank has freed.
        member.group.barrier().unwrap();
        let freed = member.device.allocate(64).unwrap().place();
        let of_host = [0_f32; 4];
        let at =
            |address: u64, bytes: usize| DeviceSlice::new(Place { address, bytes }, DType::F32);
        // Only rank 0 makes the calls. If rank 1 heard of one, its own calls below would fail.
        if member.rank() == 0 {
            let sum = |data| on.all_reduce_on(&stream, data, ReduceOp::Sum);
            let refused = |result: Result<DeviceWork>, part: &str| {
                let error = result.expect_err(part).to_string();
                assert!(error.contains(part), "{error:?} has no {part:?}");
            };
            refused(sum(at(of_host.as_ptr().addr() as u64, 16)), "memory of the host");
            refused(sum(at(freed.address, 64)), "cannot be used on this device");
            refused(sum(at(place.address, 4_096)), "only 1024 bytes are memory of this device");
            refused(sum(DeviceSlice::new(elsewhere.place(), DType::F32)), "it is memory of cuda:1");
            refused(sum(f32s(0..7)), "no whole number of f32");
            refused(sum(f32s(2..10)), "not aligned: f32 begin at multiples of 4");
            let bools = DeviceSlice::new(place, DType::Bool);
            refused(
                on.all_reduce_on(&stream, bools, ReduceOp::Avg),
                "bool has no operator avg, but",
            );
            let by_f64 = Operator::premul_sum(2.0_f64);
            refused(
                on.all_reduce_on(&stream, f32s(0..8), by_f64),
                "is one of f64, but the data is f32",
            );
            let coalesced =
                |from: &[_], to: &[_]| on.all_reduce_coalesced_on(&stream, from, to, ReduceOp::Sum);
            let [one, two] = [f32s(0..8), f32s(8..16)];
            refused(coalesced(&[], &[]), "there is no data");
            refused(coalesced(&[one, two], &[one]), "there are 2 inputs and 1 outputs");
            refused(coalesced(&[one], &[f32s(0..16)]), "an input of 2 elements and an output of 4");
            refused(coalesced(&[one, two], &[two, one]), "an output overlaps another piece");
            refused(coalesced(&[one, one], &[one, one]), "an output overlaps another piece");
            let f64s = DeviceSlice::new(two.place, DType::F64);
            refused(coalesced(&[one, f64s], &[one, f64s]), "they must be of one type");
            refused(on.broadcast_on(&stream, f32s(0..8), 2), "there is no rank 2");
            refused(on.send_on(&stream, f32s(0..8), 9, 0), "there is no rank 9");
            refused(
                on.all_gather_on(&stream, f32s(0..8), f32s(512..524)),
                "does not hold a block of 2",
            );
            refused(on.all_gather_on(&stream, f32s(0..8), f32s(4..20)), "input and output overlap");
            refused(on.all_to_all_on(&stream, f32s(0..8), f32s(0..8)), "input and output overlap");
            refused(on.all_to_all_on(&stream, f32s(0..8), f32s(8..12)), "they must have as many");
            refused(on.all_to_all_on(&stream, f32s(0..12), f32s(12..24)), "does not hold a block");
            refused(on.scatter_on(&stream, f32s(0..8), f32s(8..16), 1), "where there should be 0");
            let bytes = DeviceSlice::new(place.part(0..4).unwrap(), DType::U8);
            refused(
                on.all_gather_on(&stream, bytes, f32s(8..16)),
                "the input and the output differ",
            );
        }
        // What may overlap.
        let own = 4 * member.rank()..4 * member.rank() + 4;
        on.all_gather_on(&stream, f32s(own), f32s(0..8)).unwrap().join(&stream).unwrap();
        finish(&stream);
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn options_that_differ_are_named() {
    let bench = bench();
    bench.world(3, &config(), |member| {
        let options = match member.rank() {
            1 => small().slots(5),
            _ => small(),
        };
        let device = Arc::new(member.device.clone());
        let error = DeviceGroup::new(&member.group, device, &options).unwrap_err();
        let kinds = [ErrorKind::Mismatch, ErrorKind::Collective, ErrorKind::Poisoned];
        assert!(kinds.contains(&error.kind()), "{error:?}");
        let error = error.to_string();
        for part in ["windows of 4096 bytes, 5 slots, a lag of 2", "4 slots, a lag of 2"] {
            assert!(error.contains(part), "{error}");
        }
        member.group.barrier().unwrap();
    });
    bench.is_clean();
}

#[test]
fn options_that_cannot_work_are_refused() {
    let bench = bench();
    bench.world(1, &config(), |member| {
        for (options, part) in [
            (DeviceOptions::default().window_bytes(100), "a multiple of 16"),
            (DeviceOptions::default().slots(2), "a lag of 2 windows does not fit 2 slots"),
            (DeviceOptions::default().lag(0), "a lag of 0 windows"),
        ] {
            let device = Arc::new(member.device.clone());
            let error = DeviceGroup::new(&member.group, device, &options).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    });
}

#[test]
fn ranks_in_different_calls_hear_of_it() {
    let bench = bench();
    for (lens, part) in [
        ([100, 101], "ranks disagree"),
        ([1_024, 2_048], "ranks disagree"),
        ([2_048, 4_096], "4096 elements"),
    ] {
        bench.world(2, &config(), |member| {
            let on = member.on(&small());
            let stream = member.stream();
            let len = lens[member.rank()];
            let memory = member.device.allocate(4 * len).unwrap();
            let data = DeviceSlice::new(memory.place(), DType::F32);
            let work = on.all_reduce_on(&stream, data, ReduceOp::Sum).unwrap();
            let error =
                work.wait().expect_err(&format!("{lens:?}, rank {}", member.rank())).to_string();
            assert!(error.contains(part), "{error}");
            let later = on.barrier_on(&stream).unwrap_err();
            assert_eq!(later.kind(), ErrorKind::Poisoned, "{later:?}");
            assert!(later.to_string().starts_with("barrier did not happen"), "{later:?}");
            assert!(later.to_string().contains(part), "{later}");
            // A stream that has joined goes on.
            finish(&stream);
            // The group of the user has not failed.
            member.group.barrier().unwrap();
        });
        bench.is_clean();
    }
}
