//! Streams that cannot do what calls need: those in capture, and those of a device where they wait for no memory.

use std::sync::Arc;

use drumline_accel::{DeviceGroup, DeviceWork, Result, Stream};
use drumline_group::ReduceOp;

use crate::common::{Data, bench, bench_with, config, finish, small};
use crate::rounds::round;

type On = fn(&DeviceGroup, &Arc<dyn Stream>, &Data<f32>) -> Result<DeviceWork>;

const CALLS: [On; 5] = [
    |on, stream, data| on.all_reduce_on(stream, data.slice(), ReduceOp::Sum),
    |on, stream, data| {
        on.all_reduce_coalesced_on(stream, &[data.slice()], &[data.slice()], ReduceOp::Sum)
    },
    |on, stream, data| on.broadcast_on(stream, data.slice(), 0),
    |on, stream, data| on.reduce_on(stream, data.slice(), ReduceOp::Sum, 0),
    |on, stream, _| on.barrier_on(stream),
];

/// The other ranks make the call. They would fail, or have wrong sums, had they heard of the one that was refused.
#[test]
fn a_stream_in_capture_is_refused_before_any_rank_hears() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let on = member.on(&small());
        let data = Data::new(&member.device, &[member.rank() as f32 + 1.0; 3_000]);
        let stream = member.stream();
        for (number, call) in CALLS.into_iter().enumerate() {
            data.put(&*stream);
            finish(&stream);
            if member.rank() == 1 {
                bench.controls.begin_capture(1);
                let error = call(&on, &stream, &data).unwrap_err();
                let why = error.detail();
                assert!(matches!(why, Some(drumline_device::Error::Capture)), "{error:?}");
                assert!(bench.controls.end_capture(1), "call {number} has spoilt the capture");
                assert!(!on.has_failed());
            }
            let work = call(&on, &stream, &data).unwrap();
            work.join(&stream).unwrap();
            data.fetch(&*stream);
            finish(&stream);
            work.wait().unwrap();
            let own = member.rank() as f32 + 1.0;
            let expected = match number {
                0 | 1 => 3.0,
                2 => 1.0,
                3 => [3.0, own][member.rank()], // only the root has the sum
                _ => own,
            };
            assert!(data.found().iter().all(|it| *it == expected), "call {number}");
        }
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn where_streams_wait_for_no_memory_the_host_waits() {
    for seed in 0..10 {
        let bench = bench_with(2, &[("STANDIN_NO_STREAM_MEM", "1")]);
        bench.controls.seed(seed);
        let ranks = 2 + seed as usize % 3;
        let wrong = bench.world(ranks, &config(), |member| {
            let on = member.on(&small());
            let stream = member.stream();
            let data = Data::new(&member.device, &[1.0_f32; 5_000]);
            data.put(&*stream);
            let work = on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap();
            work.join(&stream).unwrap();
            assert!(work.is_done(), "seed {seed}: the stream would have to wait");
            data.fetch(&*stream);
            finish(&stream);
            assert!(data.found().iter().all(|it| *it == ranks as f32), "seed {seed}");
            let rounds = (0..6).map(|number| round(&member, &on, seed * 6 + number).unwrap());
            let wrong = rounds.collect::<Vec<_>>().concat();
            on.destroy().unwrap();
            wrong
        });
        assert!(wrong.concat().is_empty(), "seed {seed}: {wrong:#?}");
        bench.is_clean();
    }
}
