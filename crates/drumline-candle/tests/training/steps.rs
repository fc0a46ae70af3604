//! What a step does with buffers, types, micro-batches and ranks without data.

use candle_core::{DType, Device, Tensor, backprop::GradStore};
use candle_nn::{ModuleT, Optimizer, SGD, VarBuilder, VarMap, batch_norm};
use drumline_candle::{
    DataParallel, DdpOptions, Divisor, UnusedParameters, Wire, variables_digest,
};
use half::{bf16, f16};

use crate::{elements, gradients_of, named, numbers, on_ranks, variable};

#[test]
fn running_statistics_are_buffers() {
    let digests = on_ranks(3, |group| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let norm = batch_norm(2, 1e-5, vb).unwrap();
        let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
        let mut optimizer = SGD::new(varmap.all_vars(), 0.1).unwrap();
        for step in 0..2 {
            let batch = numbers(&[4, 2, 3], 10 * step + group.rank(), DType::F32);
            let loss = norm.forward_t(&batch, true).unwrap().sqr().unwrap().mean_all().unwrap();
            ddp.backward_step(&mut optimizer, &loss).unwrap();
        }
        let mean = named(&varmap, "running_mean");
        let own = elements(&mean);
        let drifted = variables_digest(&varmap).unwrap();
        ddp.sync_buffers().unwrap();
        (own, elements(&mean), drifted, variables_digest(&varmap).unwrap())
    });
    assert_ne!(digests[0].2, digests[1].2, "there is nothing to synchronise");
    for (_, synchronised, _, digest) in &digests {
        assert_eq!(*synchronised, digests[0].0, "rank 0's statistics are taken");
        assert_eq!(*digest, digests[0].3);
    }
}

#[test]
fn before_the_first_step_all_variables_are_synchronised() {
    for policy in [UnusedParameters::Error, UnusedParameters::Ignore] {
        let digests = on_ranks(2, |group| {
            let varmap = VarMap::new();
            variable(&varmap, "w", &[3], DType::F32);
            let options = DdpOptions::default().unused_parameters(policy);
            let ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
            named(&varmap, "w").set(&numbers(&[3], group.rank(), DType::F32)).unwrap();
            ddp.sync_buffers().unwrap();
            elements(&named(&varmap, "w"))
        });
        assert_eq!(digests[0], elements(&numbers(&[3], 0, DType::F32)));
        assert_eq!(digests[1], digests[0]);
    }
}

#[test]
fn with_ignore_parameters_are_those_that_had_a_gradient() {
    on_ranks(2, |group| {
        let varmap = VarMap::new();
        let [a, b, c] = ["a", "b", "c"].map(|name| variable(&varmap, name, &[2], DType::F64));
        let options = DdpOptions::default().unused_parameters(UnusedParameters::Ignore);
        let mut ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
        // Rank 1 alone uses b, and no rank uses c.
        let used: &[&Tensor] = if group.rank() == 0 { &[&a] } else { &[&a, &b] };
        let mut gradients = gradients_of(used, group.rank()).unwrap();
        ddp.average(&mut gradients).unwrap();
        assert_eq!(elements(gradients.get(&a).unwrap()), [1.5; 2]);
        assert_eq!(elements(gradients.get(&b).unwrap()), [1.0; 2], "rank 0 counts as zeros");
        assert!(gradients.get(&c).is_none());
        for name in ["a", "b", "c"] {
            named(&varmap, name).set(&numbers(&[2], group.rank(), DType::F64)).unwrap();
        }
        ddp.sync_buffers().unwrap();
        for (name, seed) in [("a", group.rank()), ("b", group.rank()), ("c", 0)] {
            assert_eq!(elements(&named(&varmap, name)), elements(&numbers(&[2], seed, DType::F64)));
        }
        // A later step may use c.
        for name in ["a", "b"] {
            named(&varmap, name).set(&numbers(&[2], 0, DType::F64)).unwrap();
        }
        let mut gradients = gradients_of(&[&c], group.rank()).unwrap();
        ddp.average(&mut gradients).unwrap();
        assert_eq!(elements(gradients.get(&c).unwrap()), [1.5; 2]);
        assert!(gradients.get(&a).is_none());
    });
}

/// A gradient of a rank, as an optimizer with variables of f32 would see it.
fn own_gradient(rank: usize, dtype: DType) -> Vec<f32> {
    let gradient = numbers(&[64], 3 + rank, DType::F64).affine(100.0, 0.0).unwrap();
    gradient.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

#[test]
fn short_floats_travel_as_they_are_and_are_summed_in_f32_and_rounded_once() {
    for (dtype, epsilon) in
        [(DType::F16, f16::EPSILON.to_f32()), (DType::BF16, bf16::EPSILON.to_f32())]
    {
        for world_size in [1, 2, 3, 4] {
            let mut sum = vec![0.0_f32; 64];
            for rank in 0..world_size {
                sum.iter_mut().zip(own_gradient(rank, dtype)).for_each(|(sum, own)| *sum += own);
            }
            let bytes = on_ranks(world_size, |group| {
                let varmap = VarMap::new();
                let weight = variable(&varmap, "weight", &[64], dtype);
                let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
                let mut gradients = GradStore::default();
                let own = Tensor::new(own_gradient(group.rank(), dtype), &Device::Cpu).unwrap();
                gradients.insert(&weight, own.to_dtype(dtype).unwrap());
                ddp.average(&mut gradients).unwrap();
                let average = gradients.get(&weight).unwrap();
                assert_eq!(average.dtype(), dtype);
                for (average, sum) in elements(average).iter().zip(&sum) {
                    let exact = f64::from(*sum) / world_size as f64;
                    // One rounding is half a step of the type at most, and that of f32 is far smaller.
                    let off = (average - exact).abs();
                    let half_a_step = exact.abs() * f64::from(epsilon) / 2.0;
                    assert!(
                        off <= half_a_step * 1.001,
                        "{dtype:?}, {world_size}: {average}, {exact}"
                    );
                }
                ddp.stats().bytes
            });
            if world_size > 1 {
                // Two bytes for each of 64 elements, and a few marks.
                assert!((128..160).contains(&bytes[0]), "{bytes:?}");
            }
        }
    }
}

#[test]
fn ones_are_not_lost_beside_a_large_number_of_bf16() {
    on_ranks(4, |group| {
        let varmap = VarMap::new();
        let half = variable(&varmap, "half", &[1], DType::F16);
        let brain = variable(&varmap, "brain", &[1], DType::BF16);
        let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
        // In bf16, 256 + 1 is 256: a sum in short floats would lose all of the ones.
        let of = [256.0, 1.0, 1.0, 1.0][group.rank()];
        let mut gradients = GradStore::default();
        for (variable, dtype) in [(&half, DType::F16), (&brain, DType::BF16)] {
            let gradient = Tensor::full(of, 1, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            gradients.insert(variable, gradient);
        }
        ddp.average(&mut gradients).unwrap();
        let wanted = 259.0 / 4.0;
        let half = gradients.get(&half).unwrap().to_vec1::<f16>().unwrap();
        assert_eq!(half, [f16::from_f32(wanted)]);
        let brain = gradients.get(&brain).unwrap().to_vec1::<bf16>().unwrap();
        assert_eq!(brain, [bf16::from_f32(wanted)]);
        assert_ne!(brain, [bf16::from_f32(64.0)]);
    });
}

#[test]
fn integers_travel_as_buffers() {
    on_ranks(2, |group| {
        let varmap = VarMap::new();
        let weight = variable(&varmap, "weight", &[2], DType::F32);
        variable(&varmap, "counts", &[3], DType::U32);
        let counts = named(&varmap, "counts");
        let of_rank = Tensor::full(7 + group.rank() as u32, 3, &Device::Cpu).unwrap();
        counts.set(&of_rank).unwrap();
        let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
        assert_eq!(counts.to_vec1::<u32>().unwrap(), [7; 3]);
        let mut gradients = gradients_of(&[&weight], group.rank()).unwrap();
        ddp.average(&mut gradients).unwrap();
        counts.set(&of_rank).unwrap();
        ddp.sync_buffers().unwrap();
        assert_eq!(counts.to_vec1::<u32>().unwrap(), [7; 3]);
    });
}

#[test]
fn micro_batches_are_added_up_by_candle() {
    let wanted = on_ranks(2, |group| {
        let varmap = VarMap::new();
        let weight = variable(&varmap, "weight", &[3], DType::F64);
        let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
        let mut gradients = gradients_of(&[&weight], group.rank()).unwrap();
        gradients.extend(gradients_of(&[&weight], 9).unwrap()).unwrap();
        ddp.average(&mut gradients).unwrap();
        assert_eq!(ddp.stats().steps, 1);
        elements(gradients.get(&weight).unwrap())
    });
    assert_eq!(wanted, [[11.5; 3], [11.5; 3]]);
}

#[test]
fn strided_gradients_are_averaged_row_major() {
    on_ranks(2, |group| {
        let varmap = VarMap::new();
        let weight = variable(&varmap, "weight", &[2, 3], DType::F32);
        let mut ddp = DataParallel::wrap(&varmap, &group).unwrap();
        let mut gradients = GradStore::default();
        let gradient = numbers(&[3, 2], 4, DType::F32).t().unwrap();
        assert!(!gradient.is_contiguous());
        gradients.insert(&weight, gradient.clone());
        ddp.average(&mut gradients).unwrap();
        assert_eq!(elements(gradients.get(&weight).unwrap()), elements(&gradient));
    });
}

#[test]
fn ranks_without_data_shadow_the_others() {
    const BATCHES: [usize; 4] = [5, 3, 1, 0];
    // Each batch gives 8. The sum of a step is divided by four, or by the number of those that have a batch.
    let of_all = -8.0 * BATCHES.iter().sum::<usize>() as f64 / 4.0;
    let ends = [(Divisor::InitialWorld, of_all), (Divisor::ActiveRanks, -8.0 * 5.0)];
    for (first, (divisor, wanted)) in (0..4).flat_map(|first| ends.map(|end| (first, end))) {
        // Also with a rank 0 that has no data at all, and no first step.
        let ends = on_ranks(4, |group| {
            let varmap = VarMap::new();
            let weight = variable(&varmap, "weight", &[2], DType::F64);
            let options = DdpOptions::default().divisor(divisor);
            let mut ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
            let mut optimizer = SGD::new(varmap.all_vars(), 1.0).unwrap();
            let batches = BATCHES[(group.rank() + first) % 4];
            for _ in 0..batches {
                let mut gradients = gradients_of(&[&weight], 7).unwrap();
                ddp.average(&mut gradients).unwrap();
                optimizer.step(&gradients).unwrap();
            }
            let mut shadowed = 0;
            while let Some(gradients) = ddp.shadow().unwrap() {
                optimizer.step(&gradients).unwrap();
                shadowed += 1;
            }
            assert_eq!(shadowed, 5 - batches);
            assert_eq!(ddp.stats().steps, 5);
            elements(&named(&varmap, "weight"))
        });
        for end in ends {
            assert_eq!(end, [wanted; 2], "{divisor:?}");
        }
    }
}

#[test]
fn gradients_travel_as_bf16_where_the_options_say_so() {
    on_ranks(2, |group| {
        let varmap = VarMap::new();
        let weight = variable(&varmap, "weight", &[1], DType::F32);
        let options = DdpOptions::default().wire(Wire::Bf16);
        let mut ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
        let loss = (&weight * 1.001).unwrap().sum_all().unwrap();
        let averages = ddp.backward(&loss).unwrap();
        let rounded = f64::from(bf16::from_f32(1.001).to_f32());
        assert_eq!(elements(averages.get(&weight).unwrap()), [rounded]);
    });
}

#[test]
fn nobody_has_data() {
    for policy in [UnusedParameters::Error, UnusedParameters::Ignore] {
        on_ranks(2, |group| {
            let varmap = VarMap::new();
            variable(&varmap, "weight", &[2], DType::F64);
            let options = DdpOptions::default().unused_parameters(policy);
            let mut ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
            assert!(ddp.shadow().unwrap().is_none());
            assert!(ddp.shadow().unwrap().is_none());
            assert_eq!(ddp.stats().steps, 0);
        });
    }
}

#[test]
fn ignored_variables_stay_with_each_rank() {
    on_ranks(2, |group| {
        let rank = group.rank();
        let varmap = VarMap::new();
        let shared = variable(&varmap, "shared", &[2], DType::F64);
        // Its length differs between ranks, and more of its module comes later.
        let own = variable(&varmap, "own.weight", &[1 + rank], DType::F64);
        let options = DdpOptions::default().ignore(["own"]);
        let mut ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
        variable(&varmap, "own.bias", &[1], DType::F64);
        let mut gradients = gradients_of(&[&shared, &own], rank).unwrap();
        ddp.average(&mut gradients).unwrap();
        assert_eq!(elements(gradients.get(&shared).unwrap()), [1.5, 1.5]);
        assert_eq!(elements(gradients.get(&own).unwrap()), vec![(rank + 1) as f64; 1 + rank]);

        let unknown = DdpOptions::default().ignore(["own", "another"]);
        let error = DataParallel::wrap_with(&varmap, &group, &unknown).unwrap_err().to_string();
        assert!(error.contains("another"), "{error}");
    });
}
