//! Steps of shards: the same bits on any number of ranks.

use drumline_group::{Config, DType, ErrorKind, ProcessGroup, algorithms::SumOrder};
use drumline_train::{
    ddp::{
        DdpOptions, GradientReducer, ParameterSpec, UnusedParameters, Values, ValuesMut, Wire,
        verify_model,
    },
    local,
};

use crate::common::{everywhere, tree, world_with};

/// The number of elements of each parameter; the last one is f64.
const PARAMETERS: [usize; 4] = [3, 0, 17, 5];

fn specs() -> Vec<ParameterSpec> {
    let dtype = |at| if at + 1 == PARAMETERS.len() { DType::F64 } else { DType::F32 };
    let spec = |(at, &elements): (usize, &usize)| {
        ParameterSpec::new(format!("p{at}"), [elements], dtype(at))
    };
    PARAMETERS.iter().enumerate().map(spec).collect()
}

/// An element of a gradient, whose sums depend on the order.
fn element(step: usize, shard: usize, parameter: usize, at: usize) -> f64 {
    let seed = ((step * 37 + shard) * 11 + parameter) * 23 + at;
    (seed as f64 * 0.618).sin() * 10_f64.powi((seed % 9) as i32)
}

fn write(step: usize, shard: usize, parameter: usize, place: ValuesMut<'_>) -> bool {
    let value = |at| element(step, shard, parameter, at);
    match place {
        ValuesMut::F32(it) => it.iter_mut().enumerate().for_each(|(at, x)| *x = value(at) as f32),
        ValuesMut::F64(it) => it.iter_mut().enumerate().for_each(|(at, x)| *x = value(at)),
        _ => return false,
    }
    true
}

/// Hands in the gradients of a step, but those that `skips` names.
fn hand_in(reducer: &GradientReducer, step: usize, skips: impl Fn(usize, usize) -> bool) {
    let shards = reducer.shards().unwrap();
    for shard in shards.clone() {
        // Another order on each rank.
        for at in 0..PARAMETERS.len() {
            let parameter = (at + shard) % PARAMETERS.len();
            let fill = |place: ValuesMut<'_>| write(step, shard, parameter, place);
            match shard + 1 == shards.end {
                _ if skips(shard, parameter) => {}
                true => reducer.submit_with(parameter, fill),
                false => reducer.accumulate(parameter, fill),
            }
        }
        if shard + 1 < shards.end {
            reducer.end_shard();
        }
    }
}

/// The average by its definition, as bytes.
fn wanted(step: usize, shards: usize, parameter: usize) -> Vec<u8> {
    let of_element = |at: usize| -> Vec<u8> {
        let leaves: Vec<f64> =
            (0..shards).map(|shard| element(step, shard, parameter, at)).collect();
        match parameter + 1 == PARAMETERS.len() {
            true => {
                let sum = tree(&leaves, &|a, b| a + b);
                (sum / shards as f64).to_ne_bytes().to_vec()
            }
            false => {
                let leaves: Vec<f32> = leaves.into_iter().map(|it| it as f32).collect();
                let sum = tree(&leaves, &|a, b| a + b);
                (sum / shards as f32).to_ne_bytes().to_vec()
            }
        }
    };
    (0..PARAMETERS[parameter]).flat_map(of_element).collect()
}

/// Two buckets at least.
fn options(shards: usize) -> DdpOptions {
    DdpOptions::default().first_bucket_bytes(1).bucket_bytes(70).shards(shards)
}

#[test]
fn averages_are_those_of_the_tree_of_shards_on_any_ranks_over_any_connection() {
    let test = |ranks: usize, config: &Config| {
        world_with(ranks, config, |group| {
            for (shards, is_sharded) in (ranks..=16).flat_map(|it| [(it, false), (it, true)]) {
                let options = options(shards).sharded(is_sharded);
                let reducer = GradientReducer::new(specs(), &options, &group).unwrap();
                for step in 0..2 {
                    hand_in(&reducer, step, |_, _| false);
                    let averaged = reducer.finish().unwrap();
                    for parameter in 0..PARAMETERS.len() {
                        let owner = reducer.owners().and_then(|it| it.of(parameter));
                        let is_mine = owner.is_none_or(|owner| owner == group.rank());
                        let got = averaged.values(parameter).map(Values::as_bytes);
                        let wanted = is_mine.then(|| wanted(step, shards, parameter));
                        let rank = group.rank();
                        assert_eq!(
                            got,
                            wanted.as_deref(),
                            "{shards} shards, {ranks} ranks: {parameter} on rank {rank} in step {step}"
                        );
                    }
                }
            }
        });
    };
    everywhere(|config| (1..=4).for_each(|ranks| test(ranks, config)));
    (5..=8).for_each(|ranks| test(ranks, &Config::default()));
    test(4, &Config::default().sum_order(SumOrder::Placement));
}

#[test]
fn the_average_of_losses_follows_the_tree_too_and_the_numbers_of_steps_are_compared() {
    let losses: Vec<f64> = (0..7).map(|shard| element(0, shard, 0, 0)).collect();
    let wanted = tree(&losses, &|a, b| a + b) / 7.0;
    for ranks in 1..=4 {
        world_with(ranks, &Config::default(), |group| {
            let reducer = GradientReducer::new(specs(), &options(7), &group).unwrap();
            let own = &losses[reducer.shards().unwrap()];
            let finish = |number, losses: &[f64]| {
                hand_in(&reducer, 0, |_, _| false);
                reducer.finish_shards(number, losses).map(|(_, loss)| loss.to_bits())
            };
            assert_eq!(finish(5, own).unwrap(), wanted.to_bits());
            let error = finish(6, &losses[..own.len() - 1]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Argument);
            if ranks == 1 {
                return;
            }
            // Of the other ranks' faults each rank hears.
            let error = match group.rank() {
                0 => finish(6, &own[1..]).unwrap_err(),
                _ => finish(6, own).unwrap_err(),
            };
            let wanted = match group.rank() {
                0 => "losses are not those of this rank's",
                _ => "the step failed in the program on rank 0;",
            };
            assert!(error.to_string().contains(wanted), "{error}");
            let error = finish(8 + (group.rank() as u64).div_ceil(2), own).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch);
            let wanted = "step 8: rank 0 runs step 8, and rank 1 step 9;";
            assert!(error.to_string().starts_with(wanted), "{error}");
            assert!(finish(9, own).is_ok());
        });
    }
}

#[test]
fn a_shard_that_does_not_use_a_parameter_counts_as_zeros_or_is_a_fault_on_any_ranks() {
    // Parameter 2 has no gradient in shards 1 and 4, parameter 0 in none.
    let skips = |shard, parameter| parameter == 0 || parameter == 2 && [1, 4].contains(&shard);
    let averages = |ranks| {
        let of_ranks = world_with(ranks, &Config::default(), |group| {
            let options = options(6).unused_parameters(UnusedParameters::Ignore);
            let reducer = GradientReducer::new(specs(), &options, &group).unwrap();
            hand_in(&reducer, 0, skips);
            let averaged = reducer.finish().unwrap();
            let bytes = |at| averaged.values(at).map(|values| values.as_bytes().to_vec());
            (0..PARAMETERS.len()).map(bytes).collect::<Vec<_>>()
        });
        assert!(of_ranks.iter().all(|it| *it == of_ranks[0]));
        of_ranks[0].clone()
    };
    let alone = averages(1);
    assert!(alone[0].is_none() && alone[2].is_some());
    assert_eq!(alone[3], Some(wanted(0, 6, 3)));
    (2..=6).for_each(|ranks| assert_eq!(averages(ranks), alone, "{ranks} ranks"));

    world_with(3, &Config::default(), |group| {
        let reducer = GradientReducer::new(specs(), &options(6), &group).unwrap();
        // Shard 2 is the first one of rank 1.
        hand_in(&reducer, 0, |shard, parameter| (shard, parameter) == (2, 2));
        let error = reducer.finish().map(drop).unwrap_err().to_string();
        assert!(error.contains("parameter `p2` got no gradient on rank 1;"), "{error}");
        hand_in(&reducer, 1, |_, _| false);
        let averaged = reducer.finish().unwrap();
        assert_eq!(averaged.values(2).unwrap().as_bytes(), wanted(1, 6, 2));
    });
}

#[test]
fn a_program_that_fails_tells_all_ranks_and_blames_no_parameter() {
    world_with(3, &Config::default(), |group| {
        let reducer = GradientReducer::new(specs(), &options(8), &group).unwrap();
        match group.rank() {
            1 => reducer.fail_step(),
            _ => hand_in(&reducer, 0, |_, _| false),
        }
        let error = reducer.finish().map(drop).unwrap_err();
        let text =
            "step 1: the step failed in the program on rank 1; that rank's own error says why";
        assert!(error.to_string().starts_with(text), "{error}");
        hand_in(&reducer, 1, |_, _| false);
        assert_eq!(reducer.finish().unwrap().values(0).unwrap().as_bytes(), wanted(1, 8, 0));
    });
}

#[test]
fn a_gradient_that_comes_twice_in_a_shard_is_a_fault() {
    let reducer = GradientReducer::new(specs(), &options(2), &ProcessGroup::alone()).unwrap();
    for _ in 0..2 {
        reducer.accumulate(0, |place| write(0, 0, 0, place));
    }
    let error = reducer.finish().map(drop).unwrap_err().to_string();
    assert!(error.contains("parameter `p0` got two gradients in one step on rank 0"), "{error}");
}

#[test]
fn shards_that_cannot_be_dealt_are_refused_by_name() {
    let bf16 = vec![ParameterSpec::new("narrow", [1], DType::Bf16)];
    let cases = [
        (specs(), options(1), "1 shards are too few for 2 ranks"),
        (specs(), options(65_537), "65537 shards are more than 65536"),
        (specs(), options(2).wire(Wire::Bf16), "leave `wire` as it is"),
        (bf16, options(2), "parameter `narrow`"),
    ];
    for (specs, options, wanted) in cases {
        local(2, |group| {
            for refused in [
                verify_model(&group, &specs, &[], &options).unwrap_err(),
                GradientReducer::new(specs.clone(), &options, &group).unwrap_err(),
            ] {
                assert_eq!(refused.kind(), ErrorKind::Argument);
                assert!(refused.to_string().contains(wanted), "{refused}");
            }
            Ok(())
        })
        .unwrap();
    }
    local(2, |group| {
        let error = verify_model(&group, &specs(), &[], &options(4 + group.rank())).unwrap_err();
        let wanted = "option `shards` is 5 with seed 0, rank 0 has 4 with seed 0";
        assert!(error.to_string().contains(wanted), "{error}");
        let reducer = GradientReducer::new(specs(), &options(4), &group)?;
        assert_eq!(reducer.shadow().map(drop).unwrap_err().kind(), ErrorKind::Argument);
        Ok(())
    })
    .unwrap();
}
