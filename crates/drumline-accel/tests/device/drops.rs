//! Ranks that end before others have read what they hold.

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
