//! The norm of all gradients together.

use candle_core::{DType, Tensor};
use candle_nn::{Optimizer, VarMap};
use drumline::ProcessGroup;
use drumline_candle::{AdamW, DataParallel, DdpOptions, ShardedOptimizer, variables_digest};

use crate::{
    elements, gradients_of, on_ranks,
    sharded::{Model, params},
    variable,
};

#[test]
fn gradients_are_clipped_as_one_vector_and_alike_on_all_ranks() {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        let of_ranks = on_ranks(2, |group| {
            let varmap = VarMap::new();
            let [a, b, own] = [("a", 3), ("b", 1), ("own", 2)]
                .map(|(name, n)| variable(&varmap, name, &[n], dtype));
            let options = DdpOptions::default().ignore(["own"]);
            let mut ddp = DataParallel::wrap_with(&varmap, &group, &options).unwrap();
            let mut gradients = gradients_of(&[&a, &b, &own], group.rank()).unwrap();
            ddp.average(&mut gradients).unwrap(); // four averages of 1.5
            let loose = ddp.clip_grad_norm(&mut gradients, 100.0).unwrap();
            let as_they_were = elements(gradients.get(&a).unwrap());
            let norm = ddp.clip_grad_norm(&mut gradients, 1.0).unwrap();
            assert_eq!((loose, norm), (3.0, 3.0));
            assert_eq!(as_they_were, [1.5; 3]);
            let ignored = elements(gradients.get(&own).unwrap());
            assert_eq!(
                ignored,
                [(group.rank() + 1) as f64; 2],
                "it is neither averaged nor clipped"
            );
            [&a, &b].map(|it| elements(gradients.get(it).unwrap()))
        });
        assert_eq!(of_ranks[0], of_ranks[1]);
        let clipped = of_ranks[0].concat();
        let error = |value: &f64| (value - 0.5).abs();
        assert!(clipped.len() == 4 && clipped.iter().all(|it| error(it) < 2e-3), "{clipped:?}");
    }
}

#[test]
fn what_is_not_finite_is_seen() {
    let varmap = VarMap::new();
    let a = variable(&varmap, "a", &[2], DType::F32);
    let mut ddp = DataParallel::wrap(&varmap, &ProcessGroup::alone()).unwrap();
    let scaled = |by: f64| (a.sum_all().unwrap() * by).unwrap();
    let mut gradients = ddp.backward(&scaled(f64::INFINITY)).unwrap();
    assert_eq!(ddp.clip_grad_norm(&mut gradients, 1.0).unwrap(), f64::INFINITY);
    let mut gradients = ddp.backward(&scaled(f64::NAN)).unwrap();
    assert!(ddp.clip_grad_norm(&mut gradients, 1.0).unwrap().is_nan());
}

#[test]
fn sharded_gradients_are_clipped_to_the_same_bits() {
    for world_size in 1..=4 {
        let start = Model::new(DType::F32);
        let loss = |model: &Model, group: &ProcessGroup, step: usize| -> Tensor {
            (model.loss(10 * group.rank() + step, DType::F32) * 50.0).unwrap()
        };
        let plain = on_ranks(world_size, |group| {
            let model = Model::like(&start, DType::F32);
            let mut ddp = DataParallel::wrap(&model.varmap, &group).unwrap();
            let mut optimizer = AdamW::new(model.varmap.all_vars(), params()).unwrap();
            let norms = [0, 1, 2].map(|step| {
                let mut gradients = ddp.backward(&loss(&model, &group, step)).unwrap();
                let norm = ddp.clip_grad_norm(&mut gradients, 0.5).unwrap();
                optimizer.step(&gradients).unwrap();
                norm
            });
            (norms, variables_digest(&model.varmap).unwrap())
        });
        let sharded = on_ranks(world_size, |group| {
            let model = Model::like(&start, DType::F32);
            let mut optimizer = ShardedOptimizer::wrap(&model.varmap, params(), &group).unwrap();
            let norms = [0, 1, 2].map(|step| {
                let mut gradients = optimizer.backward(&loss(&model, &group, step)).unwrap();
                let norm = optimizer.clip_grad_norm(&mut gradients, 0.5).unwrap();
                optimizer.step(gradients).unwrap();
                norm
            });
            (norms, variables_digest(&model.varmap).unwrap())
        });
        assert!(plain[0].0.iter().all(|norm| *norm > 0.5), "nothing is clipped: {plain:?}");
        assert!(plain.iter().chain(&sharded).all(|it| *it == plain[0]), "{plain:?} {sharded:?}");
    }
}
