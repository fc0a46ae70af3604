//! Ranks that drift apart: found where the second step begins, or when the options say.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, ParamsAdamW, SGD, VarMap};
use drumline::ProcessGroup;
use drumline_candle::{DataParallel, DdpOptions, Result, ShardedOptimizer, UnusedParameters};

use crate::{gradients_of, named, on_ranks, variable};

/// Makes up to six steps, in which `spoil` may change variables, and choose the learning rate of a step. Returns each
/// rank's error, and the number of its steps.
fn train(
    options: &DdpOptions,
    steps: impl Fn(usize) -> usize + Sync,
    spoil: impl Fn(&VarMap, usize, usize) -> f64 + Sync,
) -> Vec<(Option<String>, usize)> {
    on_ranks(3, |group| {
        let varmap = VarMap::new();
        let [a, b] = ["a", "b"].map(|name| variable(&varmap, name, &[2, 3], DType::F32));
        variable(&varmap, "statistic", &[2], DType::F32);
        let mut ddp = DataParallel::wrap_with(&varmap, &group, options).unwrap();
        let mut optimizer = SGD::new(varmap.all_vars(), 0.1).unwrap();
        let mut run = |step: usize| -> Result<bool> {
            optimizer.set_learning_rate(spoil(&varmap, group.rank(), step));
            let gradients = if step < steps(group.rank()) {
                let mut gradients = gradients_of(&[&a, &b], group.rank()).unwrap();
                ddp.average(&mut gradients)?;
                Some(gradients)
            } else {
                ddp.shadow()?
            };
            let Some(gradients) = gradients else { return Ok(false) };
            optimizer.step(&gradients).unwrap();
            // Statistics of each rank.
            let own = Tensor::full(group.rank() as f32, 2, &Device::Cpu).unwrap();
            named(&varmap, "statistic").set(&own).unwrap();
            Ok(true)
        };
        for step in 0..6 {
            match run(step) {
                Ok(true) => {}
                Ok(false) => return (None, step),
                Err(error) => return (Some(error.to_string()), step),
            }
        }
        (None, 6)
    })
}

fn assert_found(ranks: &[(Option<String>, usize)], step: usize, wanted: &str) {
    for (error, steps) in ranks {
        let error = error.as_ref().expect("an error");
        assert!(error.contains(wanted), "{error}");
        assert_eq!(*steps, step, "{error}");
    }
}

#[test]
fn a_rank_that_drifts_apart_is_named_with_the_variable() {
    for policy in [UnusedParameters::Error, UnusedParameters::Ignore] {
        let default = DdpOptions::default().unused_parameters(policy);
        let rate = |_: &VarMap, rank, _| if rank == 1 { 0.2 } else { 0.1 };
        let wanted =
            "after step 1, parameter `a` (and 1 more) on rank 1 differs from that of rank 0";
        assert_found(&train(&default, |_| 6, rate), 1, wanted);
        // Whoever has data.
        assert_found(&train(&default, |rank| [1, 6, 0][rank], rate), 1, wanted);

        let loaded = |varmap: &VarMap, rank, step| {
            if (rank, step) == (2, 0) {
                let weights = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
                named(varmap, "b").set(&weights).unwrap();
            }
            0.1
        };
        let wanted = "after step 1, parameter `b` on rank 2 differs from that of rank 0";
        assert_found(&train(&default, |_| 6, loaded), 1, wanted);

        let late = |_: &VarMap, rank, step| if rank == 0 && step == 2 { 0.2 } else { 0.1 };
        assert!(train(&default, |_| 6, late).iter().all(|it| *it == (None, 6)), "not looked at");
        let wanted =
            "after step 4, parameter `a` (and 1 more) on rank 0 differs from that of rank 1";
        assert_found(&train(&default.check_every(2), |_| 6, late), 4, wanted);
    }
}

#[test]
fn what_may_differ_is_no_fault() {
    let each = DdpOptions::default().check_every(1);
    let ignoring = each.clone().ignore(["b"]);
    let nan = |varmap: &VarMap, rank: usize, step| {
        if step == 1 {
            // As sums may have other payloads.
            let nan = f32::from_bits(0x7fc0_0000 + rank as u32);
            named(varmap, "a").set(&Tensor::full(nan, (2, 3), &Device::Cpu).unwrap()).unwrap();
        }
        0.1
    };
    let own = |varmap: &VarMap, rank: usize, _| {
        let own = Tensor::full(rank as f32, (2, 3), &Device::Cpu).unwrap();
        named(varmap, "b").set(&own).unwrap();
        0.1
    };
    for steps in [[6, 6, 6], [4, 2, 3], [0, 0, 3], [0, 0, 0]] {
        let most = *steps.iter().max().unwrap();
        let ends = |ranks: Vec<(Option<String>, usize)>| {
            assert!(ranks.iter().all(|it| *it == (None, most)), "{ranks:?}");
        };
        ends(train(&each, |rank| steps[rank], |_, _, _| 0.1));
        ends(train(&each, |rank| steps[rank], nan));
        ends(train(&ignoring, |rank| steps[rank], own));
    }
}

#[test]
fn settings_of_a_sharded_optimizer_are_compared() {
    let errors = on_ranks(3, |group: ProcessGroup| {
        let varmap = VarMap::new();
        let [a, b] = ["a", "b"].map(|name| variable(&varmap, name, &[2, 3], DType::F32));
        let lr = if group.rank() == 2 { 0.2 } else { 0.1 };
        let params = ParamsAdamW { lr, ..ParamsAdamW::default() };
        let mut optimizer = ShardedOptimizer::wrap(&varmap, params, &group).unwrap();
        let gradients = gradients_of(&[&a, &b], group.rank()).unwrap();
        let gradients = optimizer.average(gradients).unwrap();
        optimizer.step(gradients).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 2: it has ParamsAdamW { lr: 0.2"), "{error}");
        assert!(error.contains("but rank 0 has ParamsAdamW { lr: 0.1"), "{error}");
    }
}
