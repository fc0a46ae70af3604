//! One input gives the same bits over shared memory, Unix sockets, TCP and simulated connections,
//! for every number of ranks and every algorithm.

use drumline_conformance::{
    Case,
    on_group::Form,
    same_bits::{Digests, WORLD_SIZES, Way, cases, over_real_transports},
};
use drumline_schedule::{Rounding, SumOrder};
use drumline_sim::{ConformanceJob, Place};

const PLACES: [Place; 3] = [Place::OneHost, Place::Hosts(2), Place::Flat];

fn over_the_simulator(digests: &mut Digests) -> Result<(), String> {
    for world_size in WORLD_SIZES {
        for place in PLACES {
            let job = ConformanceJob {
                world_size,
                place,
                sum_order: SumOrder::Rank,
                rounding: Rounding::Once,
                all_reduce: None,
                form: Form::Blocking,
                cases: &[],
            };
            for way in Way::all(&job.topology(), job.shares_memory()) {
                let cases: Vec<Case> =
                    cases().into_iter().filter(|case| way.serves(case)).collect();
                let all_reduce = Some(way.algorithm.name);
                let job =
                    ConformanceJob { all_reduce, form: way.form, cases: &cases, ..job.clone() };
                for (case, digest) in job.digests()? {
                    digests.add(&case, world_size, digest, &job.name())?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn all_algorithms_give_the_same_bits_over_all_transports() {
    let mut digests = Digests::default();
    let compared = over_real_transports(&mut digests)
        .map(|()| digests.compared())
        .and_then(|real| over_the_simulator(&mut digests).map(|()| (real, digests.compared())));
    match compared {
        // Every rank's result is compared with that of the first way, in every case.
        Ok((real, all)) => assert!(real > 15_000 && all > 2 * real, "{real} and {all}"),
        Err(problem) => panic!("{problem}"),
    }
}
