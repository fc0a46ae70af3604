//! Drivers and ranks that fail: who is told what, and that nothing is leaked.

use std::sync::Arc;
use std::thread;

use drumline_accel::{DeviceGroup, Error, Result};
use drumline_group::ReduceOp;

use crate::common::{Data, Member, bench, config, finish, small};

/// Two sums and a broadcast. An error of the test's own calls is none of the group's.
fn job(member: &Member) -> Result<()> {
    let device = Arc::new(member.device.clone());
    let on = DeviceGroup::new(&member.group, device, &small())?;
    let stream = member.stream();
    let data: Vec<Data<f32>> =
        (0..3).map(|_| Data::new(&member.device, &vec![1.0; 5_000])).collect();
    data.iter().for_each(|data| data.put(&*stream));
    // From here on calls of the driver are the group's.
    let works = [
        on.all_reduce_on(&stream, data[0].slice(), ReduceOp::Sum),
        on.broadcast_on(&stream, data[1].slice(), 0),
        on.all_reduce_on(&stream, data[2].slice(), ReduceOp::Avg),
    ];
    // The data is freed when no call uses it any more, whatever became of the others.
    let ended = works.map(|work| work.and_then(|work| work.wait()));
    finish(&stream);
    ended.into_iter().collect::<Result<()>>()?;
    on.destroy()
}

#[test]
fn a_device_that_breaks_is_named_on_all_ranks() {
    let bench = bench();
    let told = bench.world(4, &config(), |member| {
        let on = member.on(&small());
        let stream = member.stream();
        let data: Vec<Data<f32>> =
            (0..40).map(|_| Data::new(&member.device, &vec![1.0; 20_000])).collect();
        let sums = || {
            for (number, data) in data.iter().enumerate() {
                if number == 10 && member.rank() == 1 {
                    bench.controls.break_device(1, 700);
                }
                on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum)?.wait()?;
            }
            Ok::<_, Error>(())
        };
        let error = sums().unwrap_err().to_string();
        let later = on.barrier_on(&stream).unwrap_err().to_string();
        // No thread of this world is left to meddle with the next one.
        on.destroy().unwrap_err();
        (error, later)
    });
    for (rank, (error, later)) in told.iter().enumerate() {
        for text in [error, later] {
            assert!(text.contains("cuda:1"), "rank {rank}: {text}");
            assert!(text.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "rank {rank}: {text}");
        }
    }
    // A broken device gives nothing back, and no thread is left that could.
    bench.settle();
}

#[test]
fn a_rank_that_panics_is_named_on_the_others() {
    let bench = bench();
    let told = bench.world(3, &config(), |member| {
        let on = member.on(&small());
        let stream = member.stream();
        let data = Data::new(&member.device, &[1.0_f32; 5_000]);
        data.put(&*stream);
        finish(&stream);
        if member.rank() == 2 {
            let panics = thread::spawn(move || {
                let _on = on;
                panic!("planned");
            });
            assert!(panics.join().is_err());
            return String::new();
        }
        on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum)
            .and_then(|work| work.wait())
            .unwrap_err()
            .to_string()
    });
    for text in &told[..2] {
        assert!(text.contains("rank 2"), "{text}");
    }
    bench.is_clean();
}

#[test]
fn whichever_call_of_the_driver_fails_all_ranks_are_told() {
    let mut failed = 0;
    // The driver's functions that the group calls, and how often at most.
    let functions = [
        "cuStreamCreate",
        "cuMemHostAlloc",
        "cuMemcpyDtoHAsync",
        "cuMemcpyHtoDAsync",
        "cuEventRecord",
        "cuEventQuery",
        "cuStreamWaitEvent",
        "cuStreamIsCapturing",
        "cuPointerGetAttribute",
    ];
    for function in functions {
        for nth in [1, 2, 3, 5, 9, 15] {
            let bench = bench();
            let told = bench.world(2, &config(), |member| {
                member.group.barrier().unwrap();
                if member.rank() == 0 {
                    bench.controls.fail(function, nth, 2);
                }
                member.group.barrier().unwrap();
                // What the test itself asks for may be what fails.
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(&member)))
            });
            let is_of_test = told.iter().any(Result::is_err);
            let errors: Vec<String> = told
                .into_iter()
                .filter_map(|it| it.ok()?.err().map(|error| error.to_string()))
                .collect();
            failed += usize::from(!errors.is_empty());
            for error in &errors {
                let is_named = error.contains(function) || error.contains("has panicked");
                assert!(is_named, "{function} {nth}: {error}");
            }
            // A test that has failed on its own frees what is still in use.
            match is_of_test {
                true => bench.gives_back(),
                false => bench.is_clean(),
            }
        }
    }
    assert!(failed > 20, "only {failed} failures were told");
}
