//! Averages and values that are shared out between the ranks.

use drumline_group::{DType, ProcessGroup, bf16, f16};
use drumline_train::{
    ddp::{
        DdpOptions, Divisor, GradientReducer, ParameterSpec, UnusedParameters, Values, ValuesMut,
        Wire,
    },
    local,
};
use proptest::prelude::*;

/// Runs `rank` on one thread for each rank and returns the results.
fn on_ranks<T: Send>(world_size: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    local(world_size, |group| Ok(rank(group))).unwrap()
}

#[derive(Clone, Debug)]
struct Case {
    specs: Vec<ParameterSpec>,
    options: DdpOptions,
    /// The steps of each rank.
    steps: Vec<usize>,
    /// Each rank passes over every so many-th parameter.
    passes_over: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    let dtype =
        prop::sample::select(vec![DType::F32, DType::F32, DType::F64, DType::F16, DType::Bf16]);
    let specs = prop::collection::vec((0_usize..60, dtype), 1..9);
    let options = (0_usize..300, 0_usize..300, any::<bool>(), any::<bool>());
    (specs, options, prop::collection::vec(1_usize..4, 1..=4), 2_usize..9).prop_map(
        |(specs, (first, rest, is_narrow, by_active), steps, passes_over)| {
            let specs = specs.into_iter().enumerate();
            let specs =
                specs.map(|(at, (n, dtype))| ParameterSpec::new(format!("p{at}"), [n], dtype));
            let options = DdpOptions::default()
                .first_bucket_bytes(first)
                .bucket_bytes(rest)
                .wire(if is_narrow { Wire::Bf16 } else { Wire::AsIs })
                .divisor(if by_active { Divisor::ActiveRanks } else { Divisor::InitialWorld })
                .unused_parameters(UnusedParameters::Ignore);
            Case { specs: specs.collect(), options, steps, passes_over }
        },
    )
}

/// Writes numbers with rounding errors that depend on `seed`.
fn write(place: ValuesMut<'_>, seed: usize) -> bool {
    let value = |at: usize| ((seed * 31 + at) as f64 * 0.618).sin() * 1e2;
    match place {
        ValuesMut::F32(it) => it.iter_mut().enumerate().for_each(|(at, x)| *x = value(at) as f32),
        ValuesMut::F64(it) => it.iter_mut().enumerate().for_each(|(at, x)| *x = value(at)),
        ValuesMut::F16(it) => {
            it.iter_mut().enumerate().for_each(|(at, x)| *x = f16::from_f64(value(at)));
        }
        ValuesMut::Bf16(it) => {
            it.iter_mut().enumerate().for_each(|(at, x)| *x = bf16::from_f64(value(at)));
        }
        _ => return false,
    }
    true
}

/// The averages of every step that this rank has, by step and parameter. If it shares with others, what the owners have
/// comes by way of `gather`.
fn averages(case: &Case, is_sharded: bool, group: &ProcessGroup) -> Vec<Vec<Option<Vec<u8>>>> {
    let options = case.options.clone().sharded(is_sharded);
    let reducer = GradientReducer::new(case.specs.clone(), &options, group).unwrap();
    let (rank, count) = (group.rank(), case.specs.len());
    let mut seen = Vec::new();
    for step in 0.. {
        let has_data = step < case.steps[rank];
        if has_data {
            for parameter in (0..count).filter(|it| (it + rank + step) % case.passes_over != 0) {
                let seed = 100 * step + 10 * rank + parameter;
                reducer.accumulate(parameter, |place| write(place, seed + 1000));
                reducer.submit_with(parameter, |place| write(place, seed));
            }
        }
        let averaged = match has_data {
            true => Some(reducer.finish().unwrap()),
            false => reducer.shadow().unwrap(),
        };
        let Some(averaged) = averaged else { break };
        let bytes = |parameter| averaged.values(parameter).map(|it| it.as_bytes().to_vec());
        let mut all: Vec<Option<Vec<u8>>> = (0..count).map(bytes).collect();
        if let Some(owners) = reducer.owners().filter(|_| group.world_size() > 1) {
            let is_own = |parameter: usize| owners.of(parameter) == Some(rank);
            assert!((0..count).all(|it| is_own(it) || all[it].is_none()), "of another rank");
            let mut received = vec![None; count];
            let read = |parameter: usize, place: ValuesMut<'_>| {
                assert!(is_own(parameter));
                match averaged.values(parameter) {
                    Some(average) => place.copy_from(average),
                    None => write(place, 7777),
                }
            };
            let take = |parameter: usize, values: Values<'_>| {
                let before = received[parameter].replace(values.as_bytes().to_vec());
                assert!(before.is_none() && !is_own(parameter));
            };
            reducer.gather(read, take).unwrap();
            for (parameter, received) in received.into_iter().enumerate() {
                if !is_own(parameter) {
                    all[parameter] = Some(received.expect("all values of others come"));
                }
            }
        }
        seen.push(all);
    }
    seen
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Any types, buckets, ranks that end early, parameters that are not used: each owner has the bits that all ranks
    /// have otherwise, and all ranks get them from it.
    #[test]
    fn owners_have_the_bits_that_all_ranks_have_otherwise(case in cases()) {
        let ranks = on_ranks(case.steps.len(), |group| {
            (averages(&case, false, &group), averages(&case, true, &group))
        });
        // What its owner brings for a parameter that no rank has used.
        let unused = |parameter: usize| -> Vec<u8> {
            let ParameterSpec { shape, dtype, .. } = &case.specs[parameter];
            let mut wide = vec![0.0; shape[0]];
            write(ValuesMut::F64(&mut wide), 7777);
            let each = wide.into_iter();
            match dtype {
                DType::F64 => each.flat_map(f64::to_ne_bytes).collect(),
                DType::F16 => each.flat_map(|it| f16::from_f64(it).to_ne_bytes()).collect(),
                DType::Bf16 => each.flat_map(|it| bf16::from_f64(it).to_ne_bytes()).collect(),
                _ => each.flat_map(|it| (it as f32).to_ne_bytes()).collect(),
            }
        };
        for (plain, sharded) in &ranks {
            prop_assert_eq!(plain.len(), sharded.len());
            for (plain, sharded) in plain.iter().zip(sharded) {
                for (parameter, (plain, sharded)) in plain.iter().zip(sharded).enumerate() {
                    match (plain, sharded) {
                        (None, Some(sharded)) => prop_assert_eq!(sharded, &unused(parameter)),
                        _ => prop_assert_eq!(plain, sharded, "parameter {}", parameter),
                    }
                }
            }
        }
    }
}

fn specs(elements: &[usize]) -> Vec<ParameterSpec> {
    let name = |i| format!("p{i}");
    let elements = elements.iter().enumerate();
    elements.map(|(i, &n)| ParameterSpec::new(name(i), [n], DType::F32)).collect()
}

#[test]
fn a_value_that_cannot_be_read_is_named_on_every_rank() {
    for world_size in [2, 3] {
        let options = DdpOptions::default().sharded(true).bucket_bytes(1);
        for error in on_ranks(world_size, |group| {
            let reducer = GradientReducer::new(specs(&[2, 2, 2, 2]), &options, &group).unwrap();
            let run = |fails: bool| {
                (0..4).for_each(|it| reducer.submit(it, [1.0_f32; 2][..].into()));
                drop(reducer.finish().unwrap());
                let read = |parameter: usize, place: ValuesMut<'_>| {
                    !(fails && parameter == 1) && place.copy_from([5.0_f32; 2][..].into())
                };
                let mut count = 0;
                reducer.gather(read, |_, _| count += 1).map(|()| count)
            };
            let error = run(true).unwrap_err().to_string();
            let owners = reducer.owners().unwrap();
            assert_eq!(owners.of(1), Some(1));
            let own = owners.parameters(group.rank()).count();
            assert_eq!(run(false).unwrap(), 4 - own, "the ranks are still in step");
            error
        }) {
            let wanted = "step 1: parameter `p1` got a new value that could not be sent on rank 1;";
            assert!(error.contains(wanted), "{error}");
        }
    }
}

#[test]
fn a_fault_is_named_on_every_rank_and_the_next_step_works() {
    for world_size in [1, 2, 4] {
        let options = DdpOptions::default().sharded(true).first_bucket_bytes(1).bucket_bytes(1);
        for error in on_ranks(world_size, |group| {
            let last = group.world_size() - 1;
            let reducer = GradientReducer::new(specs(&[2, 3, 1]), &options, &group).unwrap();
            let submit = |parameter: usize, elements: usize| {
                reducer.submit(parameter, vec![1.0_f32; elements].as_slice().into());
            };
            submit(2, if group.rank() == last { 9 } else { 1 });
            submit(1, 3);
            submit(0, 2);
            let error = reducer.finish().unwrap_err().to_string();
            (0..3).for_each(|parameter| submit(parameter, [2, 3, 1][parameter]));
            let averaged = reducer.finish().unwrap();
            for parameter in reducer.owners().unwrap().parameters(group.rank()) {
                assert!(averaged.get::<f32>(parameter).unwrap().iter().all(|&it| it == 1.0));
            }
            (error, last)
        }) {
            let (error, last) = error;
            let wanted = format!("`p2` got a gradient of another dtype or length on rank {last};");
            assert!(error.contains(&wanted), "{error}");
        }
    }
}

/// The memory of a bucket serves its gradients and its values, and that of a block its averages and this rank's values.
#[test]
fn no_step_takes_other_memory_than_the_one_before() {
    on_ranks(2, |group| {
        let options = DdpOptions::default().sharded(true);
        let reducer = GradientReducer::new(specs(&[300, 200, 100]), &options, &group).unwrap();
        let step = || {
            for (parameter, elements) in [300, 200, 100].into_iter().enumerate() {
                reducer.submit(parameter, vec![1.0_f32; elements].as_slice().into());
            }
            let averaged = reducer.finish().unwrap();
            let own = reducer.owners().unwrap().parameters(group.rank()).next().unwrap();
            let average = averaged.get::<f32>(own).unwrap().as_ptr() as usize;
            drop(averaged);
            let (mut read, mut taken) = (0, 0);
            let put = |parameter: usize, place: ValuesMut<'_>| {
                let ValuesMut::F32(place) = place else { return false };
                if parameter == own {
                    read = place.as_ptr() as usize;
                }
                place.fill(1.0);
                true
            };
            reducer.gather(put, |_, values| taken = values.as_bytes().as_ptr() as usize).unwrap();
            [average, read, taken]
        };
        let _before_the_plan_is_made_anew = step();
        let first = step();
        assert_eq!(first[0], first[1], "the memory of averages takes the values");
        assert_eq!(step(), first);
        assert_eq!(reducer.stats().bytes_gathered, 3 * 2400);
    });
}

#[test]
fn without_owners_nothing_is_gathered() {
    let group = ProcessGroup::alone();
    let reducer = GradientReducer::new(specs(&[1]), &DdpOptions::default(), &group).unwrap();
    let error = reducer.gather(|_, _| true, |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("parameters have owners only with `DdpOptions::sharded`"), "{error}");
    assert_eq!(reducer.owners(), None);
}
