//! Ranks that end before others have read what they hold.

use std::time::Duration;

use drumline_group::ReduceOp;

use crate::common::{Data, bench, config, finish, small};

/// A rank whose call has ended knows nothing of its neighbours' copies. Its memory is theirs until they have come.
#[test]
fn a_rank_that_drops_its_group_takes_nothing_from_others() {
    let bench = bench();
    for seed in 0..200 {
        bench.controls.seed(seed);
        bench.world(3, &config(), |member| {
            let on = member.on(&small());
            let stream = member.stream();
            let own: Vec<f32> = (0..3_000).map(|at| (at + member.rank()) as f32).collect();
            let data = Data::new(&member.device, &own);
            data.put(&*stream);
            let work = on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap();
            if seed % 3 == 0 {
                drop(on);
                work.wait().unwrap();
            } else {
                work.wait().unwrap();
                drop(on);
            }
            data.fetch(&*stream);
            finish(&stream);
            let expected = (0..3_000).map(|at| (3 * at + 3) as f32);
            assert!(data.found().into_iter().eq(expected), "seed {seed}, rank {}", member.rank());
        });
        bench.gives_back();
    }
    bench.is_clean();
}

/// The other rank has not left, and does so when it has heard that this one is through. If this one waited for it, both
/// would wait until the timeout of their groups.
#[test]
fn a_rank_that_leaves_goes_without_those_that_never_do() {
    let bench = bench();
    for has_called in [false, true] {
        bench.world(2, &config(), |member| {
            let on = member.on(&small());
            let stream = member.stream();
            let data = Data::new(&member.device, &[1.0_f32; 3_000]);
            data.put(&*stream);
            if has_called {
                let work = on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap();
                work.wait().unwrap();
            }
            finish(&stream);
            if member.rank() == 0 {
                on.leave(Duration::from_millis(20)).unwrap();
                member.group.barrier().unwrap();
            } else {
                member.group.barrier().unwrap();
                drop(on);
            }
        });
        bench.gives_back();
    }
    bench.is_clean();
}

#[test]
fn ranks_that_all_leave_have_their_results_and_leave_nothing() {
    let bench = bench();
    for seed in 0..20 {
        bench.controls.seed(seed);
        bench.world(3, &config(), |member| {
            let on = member.on(&small());
            let stream = member.stream();
            let data = Data::new(&member.device, &[1.0_f32; 3_000]);
            data.put(&*stream);
            let work = on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap();
            // It is under way.
            on.leave(Duration::from_secs(20)).unwrap();
            assert!(work.is_done());
            work.wait().unwrap();
            data.fetch(&*stream);
            finish(&stream);
            assert!(data.found().iter().all(|it| *it == 3.0), "seed {seed}");
            member.group.barrier().unwrap();
        });
        bench.gives_back();
    }
    bench.is_clean();
}
