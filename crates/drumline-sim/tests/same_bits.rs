//! The same bits for one input over shared memory, Unix sockets, TCP and simulated connections,
//! whatever the size and the algorithm.

#![allow(clippy::panic)]

use drumline_conformance::{
    Case,
    on_group::Form,
    same_bits::{Digests, WORLD_SIZES, Way, cases, over_real_transports},
};
use drumline_schedule::SumOrder;
use drumline_sim::{Job, Place};

const PLACES: [Place; 3] = [Place::OneHost, Place::Hosts(2), Place::Flat];

fn over_the_simulator(digests: &mut Digests) -> Result<(), String> {
    for world_size in WORLD_SIZES {
        for place in PLACES {
            let job = Job {
                world_size,
                place,
                sum_order: SumOrder::Rank,
                all_reduce: None,
                form: Form::Blocking,
                cases: &[],
            };
            for way in Way::all(&job.topology(), job.shares_memory()) {
                let cases: Vec<Case> =
                    cases().into_iter().filter(|case| way.serves(case)).collect();
                let all_reduce = Some(way.algorithm.name);
                let job = Job { all_reduce, form: way.form, cases: &cases, ..job.clone() };
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
        // Each rank of each group is compared, in every case and way but the first.
        Ok((real, all)) => assert!(real > 15_000 && all > 2 * real, "{real} and {all}"),
        Err(problem) => panic!("{problem}"),
    }
}
