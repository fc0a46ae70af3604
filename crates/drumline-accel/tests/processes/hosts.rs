//! Sums of devices on two hosts have the bits of the host.

use std::{mem::discriminant, sync::Arc};

use bytemuck::Pod;
use drumline_accel::{Device, DeviceGroup, DeviceOptions, DeviceSlice, Way};
use drumline_cuda::{CudaDevice, Driver};
use drumline_group::{Element, ProcessGroup, Rank, ReduceOp, bf16};
use drumline_standin::{Controls, library};
use fastrand::Rng;

use crate::job::{Ended, Placed, Role, run};

const WINDOW: usize = 4_096;

/// Hosts of equal and of unequal size; hosts whose ranks are no node of the tree of sums; hosts whose ranks share no
/// memory.
const WAYS: [(Placed, &str); 5] = [
    (Placed { hosts: &[2, 2], over: "shared" }, "slices 2"),
    (Placed { hosts: &[4, 2], over: "shared" }, "slices 2"),
    (Placed { hosts: &[2, 1], over: "shared" }, "slices 1"),
    (Placed { hosts: &[3, 2], over: "shared" }, "whole"),
    (Placed { hosts: &[2, 2], over: "unix" }, "whole"),
];

#[test]
fn sums_on_two_hosts_have_the_bits_of_the_host() {
    for (placed, way) in WAYS {
        if !placed.is_possible() {
            continue;
        }
        let ranks = run("hosts::rank_process", placed, way);
        for (rank, Ended { code, output, .. }) in ranks.into_iter().enumerate() {
            // No test has run if a filter matches none.
            let is_right = code == Some(0) && output.contains("same bits");
            assert!(is_right, "{placed:?}, rank {rank}: {code:?}\n{output}");
        }
    }
}

#[test]
fn rank_process() {
    let Some(role) = Role::of_environment() else { return };
    let controls = Controls::load();
    controls.seed(role.rank as u64);
    let driver = Driver::load(Some(&library())).unwrap();
    let device = driver.device(role.rank % driver.devices().unwrap()).unwrap();
    let ranks: Vec<Rank> = (0..role.world_size).collect();
    let group = role.connect("world", &ranks);
    let options = DeviceOptions::default().window_bytes(WINDOW);
    let on = DeviceGroup::new(&group, Arc::new(device.clone()), &options).unwrap();

    let way = match on.explain(f32::DTYPE) {
        Way::Slices { holders } => format!("slices {}", holders.len()),
        Way::Whole { .. } => "whole".to_owned(),
        other => panic!("{other}"),
    };
    assert_eq!(way, role.stage);
    check::<f32>(&group, &on, &device, |random| (random.f32() - 0.5) * 1e6);
    check::<f64>(&group, &on, &device, |random| (random.f64() - 0.5) * 1e6);
    check::<i32>(&group, &on, &device, |random| random.i32(..));
    // Wide sums of narrow floats lie apart, so the slices are as those of other types.
    assert_eq!(discriminant(&on.explain(bf16::DTYPE)), discriminant(&on.explain(f32::DTYPE)));
    check::<bf16>(&group, &on, &device, |random| bf16::from_f32(random.f32()));
    on.destroy().unwrap();
    group.destroy().unwrap();
    assert_eq!(controls.violations(), 0, "{}", controls.last_violation());
    println!("same bits");
}

/// Lengths of nothing, of less than a window, and of many windows.
fn check<T: Element + Pod>(
    group: &ProcessGroup,
    on: &DeviceGroup,
    device: &CudaDevice,
    value: impl Fn(&mut Rng) -> T,
) {
    let stream = device.stream().unwrap();
    let mut random = Rng::with_seed(group.rank() as u64);
    for (len, op) in [
        (0, ReduceOp::Sum),
        (1, ReduceOp::Sum),
        (1_001, ReduceOp::Max),
        (30_003, ReduceOp::Sum),
        (9_999, ReduceOp::Product),
    ] {
        let brought: Vec<T> = (0..len).map(|_| value(&mut random)).collect();
        let mut memory = device.allocate(len * size_of::<T>()).unwrap();
        memory.write(bytemuck::cast_slice(&brought)).unwrap();
        let data = DeviceSlice::new(memory.place(), T::DTYPE);
        on.all_reduce_on(&stream, data, op).unwrap().wait().unwrap();
        let mut found = brought.clone();
        memory.read(bytemuck::cast_slice_mut(&mut found)).unwrap();
        let mut expected = brought;
        group.all_reduce(&mut expected, op).unwrap();
        let (found, expected) =
            (bytemuck::cast_slice::<T, u8>(&found), bytemuck::cast_slice::<T, u8>(&expected));
        assert!(found == expected, "{op} of {len} {}", T::DTYPE);
    }
}
