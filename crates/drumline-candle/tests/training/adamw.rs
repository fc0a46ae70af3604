//! `AdamW` beside candle's.

use candle_core::{DType, Tensor, backprop::GradStore};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};
use drumline_candle::AdamW;
use proptest::prelude::*;

use crate::{elements, named, numbers, variable};

/// Variables of several shapes.
fn variables(shapes: &[Vec<usize>], dtype: DType) -> (VarMap, Vec<Tensor>) {
    let varmap = VarMap::new();
    let tensors = shapes.iter().enumerate().map(|(at, shape)| {
        let tensor = variable(&varmap, &format!("v{at}"), shape, dtype);
        named(&varmap, &format!("v{at}")).set(&numbers(shape, at, dtype)).unwrap();
        tensor
    });
    let tensors = tensors.collect();
    (varmap, tensors)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn gives_the_bits_of_candles(
        shapes in prop::collection::vec(prop::collection::vec(1usize..5, 0..4), 1..4),
        dtype in prop::sample::select(vec![DType::F32, DType::F64, DType::F16, DType::BF16]),
        (lr, beta1, beta2, eps, weight_decay) in
            (1e-4..0.5, 0.0..0.999, 0.0..0.9999, 1e-8..1e-2, 0.0..0.5),
        // Which variables have a gradient, by step.
        used in prop::collection::vec(prop::collection::vec(prop::bool::weighted(0.8), 4), 1..8),
    ) {
        let params = ParamsAdamW { lr, beta1, beta2, eps, weight_decay };
        let (ours, our_tensors) = variables(&shapes, dtype);
        let (theirs, their_tensors) = variables(&shapes, dtype);
        let mut our_optimizer = AdamW::new(ours.all_vars(), params.clone()).unwrap();
        let mut their_optimizer = candle_nn::AdamW::new(theirs.all_vars(), params).unwrap();
        for (step, used) in used.iter().enumerate() {
            let [mut our_gradients, mut their_gradients] = [GradStore::default(), GradStore::default()];
            for (at, shape) in shapes.iter().enumerate().filter(|(at, _)| used[*at]) {
                let gradient = numbers(shape, 40 + 7 * step + at, dtype);
                our_gradients.insert(&our_tensors[at], gradient.clone());
                their_gradients.insert(&their_tensors[at], gradient);
            }
            our_optimizer.step(&our_gradients).unwrap();
            their_optimizer.step(&their_gradients).unwrap();
            for (our, their) in our_tensors.iter().zip(&their_tensors) {
                let [our, their] = [our, their]
                    .map(|it| elements(it).into_iter().map(f64::to_bits).collect::<Vec<_>>());
                prop_assert_eq!(our, their, "step {}", step);
            }
            // As a schedule does.
            let lr = our_optimizer.learning_rate() * 0.7;
            our_optimizer.set_learning_rate(lr);
            their_optimizer.set_learning_rate(lr);
        }
    }
}
