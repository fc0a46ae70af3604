//! Parameters that some ranks, or all, do not use in a step.

use burn::tensor::Tensor;
use drumline::{ProcessGroup, ReduceOp};
use drumline_burn::{DdpOptions, UnusedParameters};

use crate::{
    common::{Mlp, on_ranks, tensor},
    device, own_gradients, small_buckets, wrap,
};

/// A loss without the head, or the whole.
fn loss(model: &Mlp, group: &ProcessGroup, with_head: bool) -> Tensor<1> {
    let input = || tensor([3, 4], group.rank(), &device());
    match with_head {
        true => model.loss(input(), tensor([3, 1], 7, &device())),
        false => model.layers[0].forward(input()).square().mean(),
    }
}

#[test]
fn a_parameter_that_one_rank_uses_has_an_average_with_zero_on_all() {
    on_ranks(2, |group| {
        let options = small_buckets().unused_parameters(UnusedParameters::Ignore);
        let (ddp, model) = wrap(&group, &options, 4, 1);
        let uses_head = group.rank() == 1;
        let own = loss(&model, &group, uses_head).backward();
        let head = model.head.weight.base();
        let mut wanted: Vec<f32> = match head.grad(&own) {
            Some(gradient) => gradient.into_data().try_into_vec().unwrap(),
            None => vec![0.0; 4],
        };
        assert_eq!(wanted.iter().any(|it| *it != 0.0), uses_head);
        group.all_reduce(&mut wanted, ReduceOp::Avg).unwrap();
        for _ in 0..2 {
            let averaged = ddp.backward(loss(&model, &group, uses_head), &model).unwrap();
            assert_eq!(averaged.len(), 4);
            let averaged = averaged.get::<2>(model.head.weight.id).unwrap();
            assert_eq!(averaged.device(), head.device().without_autodiff());
            assert_eq!(averaged.into_data().try_into_vec::<f32>().unwrap(), wanted);
        }
        // Nobody uses the head: it gets no gradient, and the layer below gets one.
        let averaged = ddp.backward(loss(&model, &group, false), &model).unwrap();
        assert!(averaged.get::<2>(model.head.weight.id).is_none());
        assert!(averaged.get::<2>(model.layers[0].weight.id).is_some());
    });
}

#[test]
fn every_rank_is_told_the_parameter_and_can_go_on() {
    on_ranks(2, |group| {
        let (ddp, model) = wrap(&group, &DdpOptions::default(), 4, 1);
        let error = ddp.backward(loss(&model, &group, group.rank() == 1), &model);
        let error = error.map(drop).unwrap_err().to_string();
        let wanted = "parameters `head.weight`, `head.bias` got no gradient on rank 0";
        assert!(error.contains(wanted), "{error}");
        assert_eq!(ddp.backward(loss(&model, &group, true), &model).unwrap().len(), 4);
        assert!(own_gradients(&model, loss(&model, &group, true)).iter().all(|it| !it.is_empty()));
    });
}
