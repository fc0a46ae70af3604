//! Several ranks as threads, each with a reducer.

use std::thread;

use drumline_group::{DType, ReduceOp, bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::ErrorKind;
use crate::ddp::{Divisor, UnusedParameters, Wire};

fn specs(elements: &[usize], dtype: DType) -> Vec<ParameterSpec> {
    let name = |i| format!("p{i}");
    elements.iter().enumerate().map(|(i, &n)| ParameterSpec::new(name(i), [n], dtype)).collect()
}

/// Runs `rank` on one thread for each rank and returns the results.
fn on_ranks<T: Send>(world_size: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let groups = drumline_group::rendezvous::local_world(world_size).unwrap();
    thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A gradient with rounding errors, different on each rank and in each step.
fn gradient(rank: usize, step: usize, parameter: usize, elements: usize) -> Vec<f32> {
    let seed = (rank * 7 + step * 3 + parameter * 11 + 1) as f32;
    (0..elements).map(|i| (seed * (i as f32 + 0.7)).sin() * 1e3).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Whatever the buckets and the order of arrival, which differs between ranks, all ranks get the bits
    /// that one all-reduce per parameter gives.
    #[test]
    fn averages_have_the_bits_of_an_all_reduce_per_parameter(
        elements in prop::collection::vec(0usize..50, 1..8),
        world_size in 1usize..4, first in 0usize..300, rest in 0usize..300, turn in 0usize..8,
    ) {
        let options = DdpOptions::default().first_bucket_bytes(first).bucket_bytes(rest);
        let specs = specs(&elements, DType::F32);
        let results = on_ranks(world_size, |group| {
            let reducer = GradientReducer::new(specs.clone(), &options, &group).unwrap();
            let mut launched = 0;
            for step in 0..3 {
                let gradient = |p: usize| gradient(group.rank(), step, p, elements[p]);
                for i in 0..elements.len() {
                    let parameter = (i + turn * group.rank()) % elements.len();
                    reducer.submit(parameter, gradient(parameter).as_slice().into());
                }
                launched += reducer.buckets().len() as u64;
                let averaged = reducer.finish().unwrap();
                for parameter in 0..elements.len() {
                    let mut wanted = gradient(parameter);
                    group.all_reduce(&mut wanted, ReduceOp::Avg).unwrap();
                    assert_eq!(averaged.get::<f32>(parameter), Some(&wanted[..]));
                }
            }
            let stats = reducer.stats();
            assert_eq!(stats.steps, 3);
            assert_eq!(stats.buckets_launched, launched);
            assert_eq!(stats.buckets_launched_early, stats.buckets_launched);
            assert_eq!(stats.bytes, 3 * 4 * elements.iter().sum::<usize>() as u64);
        });
        prop_assert_eq!(results.len(), world_size);
    }
}

#[test]
fn both_dtypes_in_one_model() {
    let parameters =
        vec![ParameterSpec::new("a", [1], DType::F64), ParameterSpec::new("b", [2], DType::F32)];
    on_ranks(2, |group| {
        let reducer =
            GradientReducer::new(parameters.clone(), &DdpOptions::default(), &group).unwrap();
        let rank = group.rank() as f32;
        reducer.submit(0, [f64::from(rank) + 2.0_f64.powi(-40)][..].into());
        reducer.submit(1, [rank, 2.0 * rank][..].into());
        let averaged = reducer.finish().unwrap();
        assert_eq!(averaged.get(0), Some(&[0.5 + 2.0_f64.powi(-40)][..]));
        assert_eq!(averaged.get(1), Some(&[0.5_f32, 1.0][..]));
        assert_eq!(averaged.get::<f32>(0), None, "it is f64");
        assert_eq!(averaged.values(2), None);
    });
}

/// The faults of one step: (rank, parameter, what the rank does instead of handing in a gradient).
fn finish_with_faults(world_size: usize, faults: &[(usize, usize, FaultKind)]) -> Vec<Error> {
    on_ranks(world_size, |group| {
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
        let reducer =
            GradientReducer::new(specs(&[2, 2, 2], DType::F32), &options, &group).unwrap();
        let good = [1.0_f32, 1.0];
        for parameter in [2, 1, 0] {
            let fault = faults.iter().find(|f| (f.0, f.1) == (group.rank(), parameter));
            match fault.map(|fault| fault.2) {
                None => reducer.submit(parameter, good[..].into()),
                Some(FaultKind::Unused) => {}
                Some(FaultKind::Program) => reducer.fail_step(),
                Some(kind @ (FaultKind::Unread | FaultKind::Value)) => {
                    reducer.fail(parameter, kind);
                }
                Some(FaultKind::WrongType) => reducer.submit(parameter, [1.0_f64; 2][..].into()),
                Some(FaultKind::Twice) => {
                    reducer.submit(parameter, good[..].into());
                    reducer.submit(parameter, good[..].into());
                }
            }
        }
        let error = reducer.finish().map(drop).unwrap_err();

        // The ranks are still in step, so the next step works.
        (0..3).for_each(|parameter| reducer.submit(parameter, good[..].into()));
        assert_eq!(reducer.finish().unwrap().get(1), Some(&good[..]));
        error
    })
}

#[test]
fn a_fault_on_one_rank_is_named_on_every_rank_and_the_next_step_works() {
    for (kind, wanted) in [
        (FaultKind::Unused, "got no gradient"),
        (FaultKind::WrongType, "got a gradient of another dtype or length"),
        (FaultKind::Twice, "got two gradients in one step"),
        (FaultKind::Unread, "has a gradient that could not be read from its device"),
    ] {
        for error in finish_with_faults(3, &[(1, 1, kind)]) {
            let text = error.to_string();
            assert!(text.contains(&format!("parameter `p1` {wanted} on rank 1;")), "{text}");
            assert!(text.starts_with("step 1: "), "{text}");
            let faults = error.detail::<Vec<GradientFault>>().unwrap();
            assert_eq!(faults[..], [GradientFault::new("p1", kind, vec![1])]);
        }
    }
}

#[test]
fn faults_of_several_ranks_come_together() {
    let faults = [(0, 0, FaultKind::Unused), (1, 0, FaultKind::Unused), (1, 2, FaultKind::Unused)];
    for error in finish_with_faults(2, &faults) {
        let text = error.to_string();
        assert!(text.contains("`p0` got no gradient on ranks 0, 1; "), "{text}");
        assert!(text.contains("`p2` got no gradient on rank 1; "), "{text}");
    }
    for error in finish_with_faults(1, &[(0, 2, FaultKind::Unused)]) {
        assert!(error.to_string().contains("`p2` got no gradient on rank 0; "), "{error}");
    }
}

#[test]
fn a_second_gradient_after_all_have_left_is_an_error_here() {
    on_ranks(2, |group| {
        let reducer =
            GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &group).unwrap();
        reducer.submit(0, [1.0_f32][..].into());
        if group.rank() == 1 {
            reducer.submit(0, [1.0_f32][..].into());
            let text = reducer.finish().map(drop).unwrap_err().to_string();
            assert!(text.contains("`p0` got two gradients in one step on rank 1"), "{text}");
            assert_eq!(reducer.finish().map(drop).unwrap_err().to_string(), text);
        } else {
            assert!(reducer.finish().is_ok());
        }
    });
}

#[test]
fn the_error_of_a_collective_comes_out_of_every_later_finish() {
    on_ranks(2, |group| {
        if group.rank() == 1 {
            return; // gone: its group is dropped
        }
        let reducer =
            GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &group).unwrap();
        reducer.submit(0, [1.0_f32][..].into());
        let error = reducer.finish().map(drop).unwrap_err().to_string();
        assert!(error.contains('1'), "names the rank that has gone: {error}");
        reducer.submit(0, [1.0_f32][..].into());
        assert_eq!(reducer.finish().map(drop).unwrap_err().to_string(), error);
    });
}

#[test]
fn dropping_a_reducer_with_a_collective_in_flight_does_not_wait() {
    let groups = drumline_group::rendezvous::local_world(2).unwrap();
    let reducer =
        GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &groups[0]).unwrap();
    reducer.submit(0, [1.0_f32][..].into());
    drop(reducer); // rank 1 never answers; this test ends all the same
}

#[test]
fn averages_may_outlive_the_next_step() {
    let group = ProcessGroup::alone();
    let reducer =
        GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &group).unwrap();
    reducer.submit(0, [1.0_f32][..].into());
    let first = reducer.finish().unwrap();
    reducer.submit(0, [2.0_f32][..].into());
    let second = reducer.finish().unwrap();
    assert_eq!((first.get(0), second.get(0)), (Some(&[1.0_f32][..]), Some(&[2.0_f32][..])));
}

#[test]
fn an_unknown_parameter_is_an_error_that_stays() {
    let group = ProcessGroup::alone();
    let reducer =
        GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &group).unwrap();
    reducer.submit(1, [1.0_f32][..].into());
    reducer.submit(0, [1.0_f32][..].into());
    for _ in 0..2 {
        let error = reducer.finish().map(drop).unwrap_err().to_string();
        assert!(error.contains("there are 1 parameters, no 1"), "{error}");
    }
}

#[test]
fn models_that_cannot_be_trained_are_refused() {
    let group = ProcessGroup::alone();
    for (parameters, wanted) in [
        (vec![], "no parameter to train"),
        (specs(&[3], DType::I64), "parameter `p0` i64[3] cannot be averaged"),
        (specs(&[3], DType::F8E4M3), "parameter `p0` f8e4m3[3] cannot be averaged: sums of 8-bit"),
        (specs(&[3], DType::F8E5M2), "parameter `p0` f8e5m2[3] cannot be averaged: sums of 8-bit"),
    ] {
        let error = GradientReducer::new(parameters, &DdpOptions::default(), &group).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    /// Ranks that see their gradients in different orders still have the same plan: the order of rank 0, from
    /// the second step on.
    #[test]
    fn the_plan_is_made_once_more_from_the_order_of_rank_0(
        (first, second) in (1usize..9).prop_flat_map(|count| {
            let order = || Just((0..count).collect::<Vec<_>>()).prop_shuffle();
            (order(), order())
        }),
        lazy in 0usize..4,
    ) {
        let count = first.len();
        let options = DdpOptions::default()
            .first_bucket_bytes(1)
            .bucket_bytes(16)
            .unused_parameters(UnusedParameters::Ignore);
        on_ranks(3, |group| {
            let specs = specs(&vec![2; count], DType::F32);
            let reducer = GradientReducer::new(specs.clone(), &options, &group).unwrap();
            let value = [1.0_f32, 2.0];
            let members = |buckets: Vec<Vec<usize>>| buckets.concat();
            prop_assert_eq!(members(reducer.buckets()), (0..count).rev().collect::<Vec<_>>());
            for step in 0..3 {
                let mut order = if group.rank() == 0 { first.clone() } else { second.clone() };
                if group.rank() == 0 && step == 0 {
                    order.truncate(count.saturating_sub(lazy)); // the rest is unused at first
                }
                if step == 2 {
                    order.reverse(); // too late to change anything
                }
                order.iter().for_each(|&parameter| reducer.submit(parameter, value[..].into()));
                drop(reducer.finish().unwrap());

                let mut wanted = first.clone();
                let unused = wanted.split_off(count.saturating_sub(lazy));
                wanted.extend((0..count).rev().filter(|parameter| unused.contains(parameter)));
                prop_assert_eq!(members(reducer.buckets()), wanted);
            }
            Ok(())
        }).into_iter().collect::<Result<(), TestCaseError>>()?;
    }
}

#[test]
fn accumulated_gradients_are_averaged_with_the_last_one() {
    on_ranks(2, |group| {
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
        let parameters = vec![
            ParameterSpec::new("a", [2], DType::F32),
            ParameterSpec::new("b", [2], DType::F64),
        ];
        let reducer = GradientReducer::new(parameters, &options, &group).unwrap();
        let rank = group.rank() as f32;
        for step in 1..=3 {
            let scale = step as f32;
            for micro_batch in [1.0, 2.0] {
                let a = [scale * micro_batch, rank];
                reducer.accumulate(0, |place| place.copy_from(a[..].into()));
                let b = [f64::from(micro_batch), 1.0];
                reducer.accumulate(1, |place| place.copy_from(b[..].into()));
            }
            assert_eq!(reducer.stats().buckets_launched, 2 * (step - 1), "nothing leaves");
            assert_eq!(reducer.missing(), [0, 1]);
            assert!(reducer.has_gradients());
            // `b` is not used in the last backward; its accumulated gradient counts.
            reducer.submit(0, [scale, 10.0][..].into());
            let averaged = reducer.finish().unwrap();
            assert_eq!(averaged.get(0), Some(&[4.0 * scale, 2.0 * 0.5 + 10.0][..]));
            assert_eq!(averaged.get(1), Some(&[3.0_f64, 2.0][..]));
            assert!(!reducer.has_gradients(), "the next step starts from nothing");
        }
    });
}

#[test]
fn a_fault_while_accumulating_fails_the_step_on_every_rank() {
    on_ranks(2, |group| {
        let reducer =
            GradientReducer::new(specs(&[2], DType::F32), &DdpOptions::default(), &group).unwrap();
        if group.rank() == 1 {
            reducer.accumulate(0, |_| false);
        }
        reducer.submit(0, [1.0_f32; 2][..].into());
        let error = reducer.finish().map(drop).unwrap_err().to_string();
        assert!(error.contains("`p0` got a gradient of another dtype or length on rank 1"));
        reducer.submit(0, [1.0_f32; 2][..].into());
        assert!(reducer.finish().is_ok());
    });
}

#[test]
fn ignored_parameters_are_averaged_with_zeros_or_have_no_gradient_at_all() {
    on_ranks(3, |group| {
        for bucket_bytes in [1, 1 << 20] {
            let options = DdpOptions::default()
                .first_bucket_bytes(bucket_bytes)
                .bucket_bytes(bucket_bytes)
                .unused_parameters(UnusedParameters::Ignore);
            let reducer =
                GradientReducer::new(specs(&[2, 2, 2], DType::F32), &options, &group).unwrap();
            for step in 0..3 {
                // p0 is used everywhere, p1 on rank 1 alone, p2 nowhere but in step 1.
                let value = [3.0_f32, 6.0];
                if step == 1 {
                    reducer.submit(2, value[..].into());
                }
                if group.rank() == 1 {
                    reducer.submit(1, value[..].into());
                }
                reducer.submit(0, value[..].into());
                let averaged = reducer.finish().unwrap();
                assert_eq!(averaged.get(0), Some(&value[..]));
                assert_eq!(averaged.get(1), Some(&[1.0_f32, 2.0][..]));
                assert_eq!(averaged.get(2), (step == 1).then_some(&value[..]));
            }
        }
    });
}

#[test]
fn an_ignored_parameter_with_a_nan_elsewhere_in_its_bucket_stays_unused() {
    on_ranks(2, |group| {
        let options = DdpOptions::default().unused_parameters(UnusedParameters::Ignore);
        let reducer = GradientReducer::new(specs(&[1, 1], DType::F32), &options, &group).unwrap();
        reducer.submit(0, [f32::NAN][..].into());
        let averaged = reducer.finish().unwrap();
        assert!(averaged.get::<f32>(0).unwrap()[0].is_nan());
        assert_eq!(averaged.values(1), None);
    });
}

#[test]
fn the_timeline_tells_when_each_bucket_travelled() {
    on_ranks(2, |group| {
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
        let reducer =
            GradientReducer::new(specs(&[3, 2, 1], DType::F32), &options, &group).unwrap();
        assert_eq!(reducer.timeline(), Timeline::default());
        for step in 1..=2 {
            reducer.begin_backward();
            // Number 2 comes last although all wait for it.
            for parameter in [0, 1, 2] {
                reducer.submit(parameter, vec![1.0_f32; 3 - parameter].as_slice().into());
            }
            drop(reducer.finish().unwrap());
            let timeline = reducer.timeline();
            assert_eq!(timeline.step, step);
            let bytes: Vec<usize> = timeline.buckets.iter().map(|bucket| bucket.bytes).collect();
            // The first plan is the reverse of definition, the second one as observed.
            assert_eq!(bytes, if step == 1 { [4, 8, 12] } else { [12, 8, 4] });
            let in_order = |a: &BucketTimes, b: &BucketTimes| {
                a.launched_us <= b.launched_us && a.done_us <= b.done_us
            };
            assert!(timeline.buckets.is_sorted_by(in_order), "{timeline}");
            for times in &timeline.buckets {
                assert!(times.first_us <= times.ready_us, "{timeline}");
                assert!(times.ready_us <= times.launched_us, "{timeline}");
                assert!(times.launched_us <= timeline.backward_us, "{timeline}");
                assert!(times.launched_us <= times.done_us, "{timeline}");
                assert!(times.done_us <= timeline.done_us, "{timeline}");
            }
        }
    });
}

#[test]
fn ranks_without_data_shadow_the_others_until_nobody_has_any() {
    // Steps of each rank; some have none at all.
    for steps in [vec![3, 1], vec![0, 2, 4], vec![2, 2], vec![0, 0]] {
        let world_size = steps.len();
        let most = *steps.iter().max().unwrap();
        let ranks = on_ranks(world_size, |group| {
            let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
            let reducer =
                GradientReducer::new(specs(&[2, 1], DType::F32), &options, &group).unwrap();
            let mut seen: Vec<Vec<f32>> = Vec::new();
            let mut note = |averaged: Averaged<'_>| {
                seen.push([averaged.get(0).unwrap(), averaged.get(1).unwrap()].concat());
            };
            for _ in 0..steps[group.rank()] {
                reducer.submit(1, [5.0_f32][..].into());
                reducer.submit(0, [1.0_f32, group.rank() as f32][..].into());
                note(reducer.finish().unwrap());
            }
            while let Some(averaged) = reducer.shadow().unwrap() {
                note(averaged);
            }
            assert_eq!(reducer.stats().steps, most as u64);
            seen
        });
        for seen in &ranks {
            assert_eq!(seen.len(), most);
            assert_eq!(*seen, ranks[0], "all ranks see all averages");
            for (step, averages) in seen.iter().enumerate() {
                let active = (0..world_size).filter(|&rank| steps[rank] > step);
                let (count, sum) =
                    active.fold((0, 0), |(count, sum), rank| (count + 1, sum + rank));
                let average = |sum: usize| sum as f32 / world_size as f32;
                assert_eq!(*averages, [average(count), average(sum), average(5 * count)]);
            }
        }
    }
}

#[test]
fn gradients_of_16_bits_are_averaged_as_f32_and_rounded_once() {
    // Rounded after each addition, the ones would be lost beside 2048 (f16) and 256 (bf16).
    let values = [2048.0, 1.0, 1.0];
    on_ranks(3, |group| {
        let parameters = vec![
            ParameterSpec::new("a", [1], DType::F16),
            ParameterSpec::new("b", [1], DType::Bf16),
        ];
        let reducer = GradientReducer::new(parameters, &DdpOptions::default(), &group).unwrap();
        let own = values[group.rank()];
        for micro_batches in 1..=2 {
            if micro_batches == 2 {
                reducer.accumulate(0, |place| place.copy_from([f16::from_f32(1.0)][..].into()));
            }
            reducer.submit(1, [bf16::from_f32(own / 8.0)][..].into());
            reducer.submit(0, [f16::from_f32(own)][..].into());
            let averaged = reducer.finish().unwrap();
            let wanted = f16::from_f32(2050.0 / 3.0 + (micro_batches - 1) as f32);
            let found = averaged.get::<f16>(0).unwrap()[0];
            // With two micro-batches this rank's sum was rounded first, as in burn.
            assert!(
                (found.to_f32() - wanted.to_f32()).abs()
                    <= if micro_batches == 1 { 0.0 } else { 1.0 }
            );
            assert_eq!(averaged.get::<bf16>(1), Some(&[bf16::from_f32(256.25 / 3.0)][..]));
        }
    });
}

#[test]
fn bf16_on_the_wire_rounds_each_ranks_sum_and_the_average() {
    let rounded = |x: f32| bf16::from_f32(x).to_f32();
    on_ranks(3, |group| {
        let options = DdpOptions::default().wire(Wire::Bf16).bucket_bytes(4);
        let parameters = vec![
            ParameterSpec::new("a", [2], DType::F32),
            ParameterSpec::new("b", [1], DType::F64),
        ];
        let reducer = GradientReducer::new(parameters, &options, &group).unwrap();
        let own = |rank: usize, part: usize| gradient(rank, part, 0, 2);
        for _ in 0..2 {
            reducer.accumulate(0, |place| place.copy_from(own(group.rank(), 0).as_slice().into()));
            reducer.submit(0, own(group.rank(), 1).as_slice().into());
            reducer.submit(1, [1.0 + f64::EPSILON][..].into());
            let averaged = reducer.finish().unwrap();
            let wanted = [0, 1].map(|at| {
                let each = (0..3).map(|rank| rounded(own(rank, 0)[at] + own(rank, 1)[at]));
                rounded(each.reduce(|a, b| a + b).unwrap() / 3.0)
            });
            assert_eq!(averaged.get(0), Some(&wanted[..]));
            assert_eq!(averaged.get(1), Some(&[1.0 + f64::EPSILON][..]), "f64 travels as it is");
        }
    });
}

#[test]
fn an_ignored_parameter_must_not_come_to_the_reducer() {
    let options = DdpOptions::default().ignore(["p1"]);
    let parameters = specs(&[1, 1], DType::F32);
    let error = GradientReducer::new(parameters, &options, &ProcessGroup::alone()).unwrap_err();
    assert!(error.to_string().contains("parameter `p1` f32[1] is to be ignored"), "{error}");
}

#[test]
fn sums_are_divided_by_the_ranks_with_data_if_asked_for() {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16] {
        for wire in [Wire::AsIs, Wire::Bf16] {
            let batches = [0, 4, 1, 2];
            on_ranks(4, |group| {
                let options = DdpOptions::default().divisor(Divisor::ActiveRanks).wire(wire);
                let reducer = GradientReducer::new(specs(&[1], dtype), &options, &group).unwrap();
                let mut step = 0;
                loop {
                    let active: Vec<usize> = (0..4).filter(|&rank| batches[rank] > step).collect();
                    let averaged = if batches[group.rank()] > step {
                        reducer.submit_with(0, |place| {
                            let own = (8 * group.rank()) as f32;
                            match place {
                                ValuesMut::F32(place) => place[0] = own,
                                ValuesMut::F64(place) => place[0] = own.into(),
                                ValuesMut::F16(place) => place[0] = f16::from_f32(own),
                                ValuesMut::Bf16(place) => place[0] = bf16::from_f32(own),
                            }
                            true
                        });
                        Some(reducer.finish().unwrap())
                    } else {
                        reducer.shadow().unwrap()
                    };
                    let Some(averaged) = averaged else { break };
                    let found = match averaged.values(0).unwrap() {
                        Values::F32(values) => f64::from(values[0]),
                        Values::F64(values) => values[0],
                        Values::F16(values) => values[0].into(),
                        Values::Bf16(values) => values[0].into(),
                    };
                    let sum: usize = active.iter().map(|rank| 8 * rank).sum();
                    assert_eq!(found, sum as f64 / active.len() as f64, "{dtype}, step {step}");
                    assert_eq!(reducer.lowest_active_rank(), active[0]);
                    step += 1;
                }
                assert_eq!((step, reducer.lowest_active_rank()), (4, 1));
            });
        }
    }
}

#[test]
fn shared_gradients_keep_their_values_and_give_their_memory_back() {
    on_ranks(2, |group| {
        let reducer =
            GradientReducer::new(specs(&[3, 2], DType::F32), &DdpOptions::default(), &group)
                .unwrap();
        let step = |value: f32| {
            reducer.submit(1, [value; 2][..].into());
            reducer.submit(0, [value; 3][..].into());
            let averaged = reducer.finish().unwrap();
            [0, 1].map(|parameter| averaged.share(parameter).unwrap())
        };
        let address = |gradient: &SharedGradient| gradient.as_ref().as_ptr();
        drop(step(0.0)); // then the buckets are planned anew
        let [first, second] = step(1.0);
        let place = address(&first);
        drop(second);
        let [other, _] = step(2.0);
        assert_ne!(address(&other), place, "a part of the bucket is still held");
        assert_eq!(first.values(), Values::F32(&[1.0; 3]));
        assert_eq!(other.values(), Values::F32(&[2.0; 3]));
        drop(other);
        drop(first);
        let [again, _] = step(3.0);
        assert_eq!(address(&again), place, "it came back");
        assert_eq!(reducer.stats().bytes_copied, 4 * 20);
        drop(reducer);
        assert_eq!(again.values(), Values::F32(&[3.0; 3]));
    });
}

#[test]
fn a_small_model_has_several_buckets_unless_a_size_is_set() {
    let launched_early = |options: DdpOptions| {
        on_ranks(2, |group| {
            let layers = specs(&[1 << 18; 6], DType::F32); // 6 MiB
            let reducer = GradientReducer::new(layers, &options, &group).unwrap();
            let gradient = vec![1.0_f32; 1 << 18];
            for _ in 0..2 {
                (0..6).rev().for_each(|layer| reducer.submit(layer, gradient[..].into()));
                drop(reducer.finish().unwrap());
            }
            reducer.timeline().buckets.iter().map(|it| it.bytes >> 20).collect::<Vec<_>>()
        })
    };
    assert_eq!(launched_early(DdpOptions::default()), [[1; 6], [1; 6]]);
    let set = DdpOptions::default().bucket_bytes(25 << 20);
    assert_eq!(launched_early(set), [[1, 5], [1, 5]]);
}

/// What a rank does in one step: gradients that it accumulates (false) or submits (true), by parameter, and whether it
/// ends the step with `finish` (true) or `shadow`.
type Part = (Vec<(bool, usize)>, bool);

const PARAMETERS: usize = 3;

/// Rank, step, and how many gradients came before, as a number that is exact in every sum.
fn value(rank: usize, step: usize, number: usize) -> f64 {
    (1 + number + 8 * step + 64 * rank) as f64
}

/// The gradients that a part hands in, by parameter: what comes after a final gradient is left out.
fn in_order(part: &Part) -> Vec<(bool, usize)> {
    let mut is_final = [false; PARAMETERS];
    let mut kept = part.0.clone();
    kept.retain(|&(submits, parameter)| {
        let keeps = !is_final[parameter];
        is_final[parameter] |= submits;
        keeps
    });
    kept
}

/// How a step ends on all ranks, computed in one process: `Err` if a rank lacks a gradient, `Ok(None)` if no rank has
/// data, else the averages.
fn model(
    parts: &[&Part],
    step: usize,
    options: &DdpOptions,
) -> Result<Option<Vec<Option<f64>>>, ()> {
    let mut sums = [None; PARAMETERS];
    let mut active = 0;
    for (rank, part) in parts.iter().enumerate() {
        let gradients = in_order(part);
        let is_active = part.1 || !gradients.is_empty();
        active += usize::from(is_active);
        for (number, &(_, parameter)) in gradients.iter().enumerate() {
            *sums[parameter].get_or_insert(0.0) += value(rank, step, number);
        }
        let has = |parameter| gradients.iter().any(|&(_, of)| of == parameter);
        let lacks = is_active && !(0..PARAMETERS).all(has);
        if lacks && options.unused_parameters == UnusedParameters::Error {
            return Err(());
        }
    }
    let divisor = match options.divisor {
        Divisor::InitialWorld => parts.len(),
        Divisor::ActiveRanks => active.max(1),
    };
    let average = |sum: &Option<f64>| sum.map(|sum| sum / divisor as f64);
    Ok((active > 0).then(|| sums.iter().map(average).collect()))
}

fn part() -> impl Strategy<Value = Part> {
    let some = prop::collection::vec((any::<bool>(), 0..PARAMETERS), 0..6);
    let all = Just((0..PARAMETERS).map(|parameter| (true, parameter)).collect::<Vec<_>>());
    let accumulated = Just((0..PARAMETERS).map(|parameter| (false, parameter)).collect::<Vec<_>>());
    (prop_oneof![some, all, accumulated, Just(Vec::new())], any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    /// Whatever each rank accumulates and submits, in whatever order, and however it ends each step.
    #[test]
    fn any_program_of_ranks_gives_what_the_definition_says(
        programs in (1usize..=4, 1usize..4).prop_flat_map(|(world_size, steps)| {
            prop::collection::vec(prop::collection::vec(part(), steps), world_size)
        }),
        counts_active in any::<bool>(), ignores in any::<bool>(), sharded in any::<bool>(), small in any::<bool>(),
    ) {
        let options = DdpOptions::default()
            .divisor(if counts_active { Divisor::ActiveRanks } else { Divisor::InitialWorld })
            .unused_parameters(if ignores { UnusedParameters::Ignore } else { UnusedParameters::Error })
            .first_bucket_bytes(if small { 1 } else { 1 << 20 })
            .sharded(sharded);
        on_ranks(programs.len(), |group| {
            let rank = group.rank();
            let reducer = GradientReducer::new(specs(&[1; PARAMETERS], DType::F64), &options, &group).unwrap();
            for step in 0..programs[0].len() {
                let parts: Vec<&Part> = programs.iter().map(|program| &program[step]).collect();
                for (number, (submits, parameter)) in in_order(parts[rank]).into_iter().enumerate() {
                    let gradient = [value(rank, step, number)];
                    match submits {
                        true => reducer.submit(parameter, gradient[..].into()),
                        false => reducer.accumulate(parameter, |place| place.copy_from(gradient[..].into())),
                    }
                }
                let ended = if parts[rank].1 { reducer.finish().map(Some) } else { reducer.shadow() };
                match (ended, model(&parts, step, &options)) {
                    (Err(error), Err(())) if error.kind() == ErrorKind::Gradients => {}
                    (Ok(None), Ok(None)) => {}
                    (Ok(Some(found)), Ok(Some(wanted))) => {
                        for (parameter, wanted) in wanted.into_iter().enumerate() {
                            let owner = reducer.owners().and_then(|owners| owners.of(parameter));
                            let wanted = wanted.filter(|_| owner.is_none_or(|owner| owner == rank));
                            let found = found.get::<f64>(parameter).map(|values| values[0]);
                            let is_near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-12 * b.abs();
                            assert!(found.is_some() == wanted.is_some(), "{found:?}, not {wanted:?}");
                            assert!(found.zip(wanted).is_none_or(is_near), "{found:?}, not {wanted:?}");
                        }
                    }
                    (found, wanted) => panic!("{found:?}, not {wanted:?}"),
                }
            }
        });
    }
}

#[test]
fn values_are_compared_after_the_first_step_and_as_often_as_the_options_say() {
    for (every, wanted) in [(0, vec![1]), (1, vec![1, 2, 3, 4]), (2, vec![1, 2, 4])] {
        let due = on_ranks(2, |group| {
            let options = DdpOptions::default().check_every(every);
            let reducer = GradientReducer::new(specs(&[1], DType::F32), &options, &group).unwrap();
            let mut due = Vec::new();
            for step in 0..5 {
                // Only rank 0 has data in every second step; the second one fails.
                if reducer.is_check_due() {
                    due.push(reducer.lock().averaged);
                    reducer.check(&[7]).unwrap();
                    assert!(!reducer.is_check_due());
                }
                if step == 2 {
                    assert!(reducer.finish().is_err());
                    assert!(!reducer.is_check_due(), "nothing has changed");
                }
                if group.rank() == 0 || step % 2 == 0 {
                    reducer.submit(0, [1.0_f32][..].into());
                }
                match group.rank() == 0 || step % 2 == 0 {
                    true => drop(reducer.finish().unwrap()),
                    false => drop(reducer.shadow().unwrap()),
                }
            }
            due
        });
        assert_eq!(due, [wanted.clone(), wanted]);
    }
    let alone = GradientReducer::new(
        specs(&[1], DType::F32),
        &DdpOptions::default(),
        &ProcessGroup::alone(),
    );
    let alone = alone.unwrap();
    alone.submit(0, [1.0_f32][..].into());
    drop(alone.finish().unwrap());
    assert!(!alone.is_check_due());
    assert!(alone.check(&[1, 2]).unwrap_err().to_string().contains("2 digests of 1 parameters"));
}
