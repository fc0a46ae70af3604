//! `VarMap` has another order on every rank and in every run.

use candle_core::{DType, TensorId};
use candle_nn::{Optimizer, VarMap};
use drumline_candle::{AdamW, DataParallel, DdpOptions, variables_digest};

use crate::{numbers, on_ranks, variable};

/// The names in the order of `all_vars`.
fn order(varmap: &VarMap) -> Vec<String> {
    let data = varmap.data().lock().unwrap();
    let name = |id: TensorId| data.iter().find(|(_, var)| var.id() == id).unwrap().0.clone();
    data.values().map(|var| name(var.id())).collect()
}

#[test]
fn fifty_runs_end_with_equal_ranks_whatever_the_order_of_the_map() {
    const VARIABLES: usize = 12;
    let mut others = 0;
    for run in 0..50 {
        let world_size = 2 + run % 3;
        let ends = on_ranks(world_size, |group| {
            let varmap = VarMap::new();
            // Variables of the same shape, so that gradients which change places are not noticed by their length.
            let variables: Vec<_> = (0..VARIABLES)
                .map(|at| variable(&varmap, &format!("layer{at}.weight"), &[2, 3], DType::F32))
                .collect();
            for (at, var) in varmap.all_vars().iter().enumerate() {
                var.set(&numbers(&[2, 3], 1 + at + 31 * group.rank(), DType::F32)).unwrap();
            }
            let options = DdpOptions::default().first_bucket_bytes(48).bucket_bytes(96);
            let mut ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
            let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.01).unwrap();
            for step in 0..3 {
                let mut loss = numbers(&[], 5, DType::F32);
                for (at, variable) in variables.iter().enumerate() {
                    let target =
                        numbers(&[2, 3], at + 100 * step + 1000 * group.rank(), DType::F32);
                    loss = (loss + (variable - target).unwrap().sqr().unwrap().sum_all().unwrap())
                        .unwrap();
                }
                let mut gradients = loss.backward().unwrap();
                ddp.average(&mut gradients).unwrap();
                // Each variable gets its own average and not a neighbour's: 2 (variable - mean of the targets).
                for (at, variable) in variables.iter().enumerate() {
                    let mean = (0..world_size)
                        .map(|rank| numbers(&[2, 3], at + 100 * step + 1000 * rank, DType::F32))
                        .reduce(|a, b| (a + b).unwrap())
                        .map(|sum| (sum / world_size as f64).unwrap())
                        .unwrap();
                    let wanted = ((variable.detach() - mean).unwrap() * 2.0).unwrap();
                    let off = (gradients.get(variable).unwrap() - wanted).unwrap().abs().unwrap();
                    let off = off.max_all().unwrap().to_scalar::<f32>().unwrap();
                    assert!(off < 1e-5, "run {run}, step {step}, variable {at}: {off}");
                }
                optimizer.step(&gradients).unwrap();
            }
            (order(&varmap), variables_digest(&varmap).unwrap())
        });
        for (order, digest) in &ends {
            others += usize::from(*order != ends[0].0);
            assert_eq!(*digest, ends[0].1, "run {run}");
        }
    }
    assert!(others > 50, "the maps had the same order, so this shows nothing");
}
