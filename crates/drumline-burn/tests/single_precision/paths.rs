//! Tensors that cannot be told apart: by their path, or by their id.

use burn::{
    module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Int, Tensor},
};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, Error, ShardedOptimizer, UnusedParameters,
    checkpoint::{Checkpoints, TrainingState},
    clip_grad_norm, load_named_tensors, named_tensors, parameters_digest,
};

use crate::common::{on_ranks, tensor};

fn device() -> Device {
    Device::flex().autodiff()
}

fn layer() -> Linear {
    LinearConfig::new(4, 4).with_bias(false).init(&device())
}

/// A container that does not name its parts, as a user may write one.
#[derive(Clone, Debug)]
struct Pair<A, B>(A, B);

impl<A: Module, B: Module> Module for Pair<A, B> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        self.1.collect_devices(self.0.collect_devices(devices))
    }

    fn fork(self, device: &Device) -> Self {
        Self(self.0.fork(device), self.1.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        Self(self.0.to_device(device), self.1.to_device(device))
    }

    fn train(self) -> Self {
        Self(self.0.train(), self.1.train())
    }

    fn valid(&self) -> Self {
        Self(self.0.valid(), self.1.valid())
    }

    fn materialize(self) -> Self {
        Self(self.0.materialize(), self.1.materialize())
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.0.visit(visitor);
        self.1.visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let second = self.1.map(mapper);
        Self(self.0.map(mapper), second)
    }
}

/// An integer where [`layer`] has its weight.
#[derive(Module, Debug)]
struct Counter {
    weight: Param<Tensor<1, Int>>,
}

/// What every way into training says of a model.
fn refuse<M: Module + Sync>(model: &M, path: &str) {
    let is_refused = |error: Error| {
        let wanted = format!("two tensors of the model have the path `{path}`");
        assert!(error.to_string().contains(&wanted), "{error}");
    };
    is_refused(named_tensors(model).unwrap_err());
    is_refused(load_named_tensors(model.clone(), Vec::new()).map(drop).unwrap_err());
    for world_size in [1, 2] {
        on_ranks(world_size, |group| {
            is_refused(DistributedDataParallel::wrap(model.clone(), &group).map(drop).unwrap_err());
            let options = DdpOptions::default().unused_parameters(UnusedParameters::Ignore);
            let wrapped = DistributedDataParallel::wrap_with(model.clone(), &group, &options);
            is_refused(wrapped.map(drop).unwrap_err());
            let sharded = ShardedOptimizer::wrap(model.clone(), SgdConfig::new(), &group);
            is_refused(sharded.map(drop).unwrap_err());
            let directory = tempfile::tempdir().unwrap();
            let checkpoints = Checkpoints::open(directory.path(), &group).unwrap();
            let state = TrainingState::new(model.clone(), SgdConfig::new());
            let error = checkpoints.save(&state).unwrap_err().to_string();
            assert!(error.contains(&format!("the path `{path}`")), "{error}");
        });
    }
}

#[test]
fn tensors_of_one_path_are_refused_by_name() {
    refuse(&Pair(layer(), layer()), "weight");
    refuse(&Pair(layer(), layer().no_grad()), "weight");
    let counter =
        Counter { weight: Param::initialized(ParamId::new(), Tensor::zeros([3], &device())) };
    refuse(&Pair(layer(), counter), "weight");
    refuse(&vec![Pair(layer(), layer())], "0.weight");
    refuse(&Pair(vec![layer()], Some(vec![layer()])), "0.weight");
    // The digest and clipping need no paths.
    let pair = Pair(layer(), layer());
    assert_ne!(
        parameters_digest(&pair).unwrap(),
        parameters_digest(&Pair(pair.1.clone(), pair.0.clone())).unwrap()
    );
    let loss = pair.0.weight.val().sum() + pair.1.weight.val().sum() * 2;
    let mut gradients = GradientsParams::from_grads(loss.backward(), &pair);
    let norm = clip_grad_norm(&mut gradients, &pair, 1e9).unwrap();
    assert_eq!(norm, 80_f64.sqrt());
}

#[test]
fn tensors_of_one_name_are_not_loaded() {
    let model = layer();
    let mut tensors = named_tensors(&model).unwrap();
    tensors.push(tensors[0].clone());
    let error = load_named_tensors(model, tensors).map(drop).unwrap_err().to_string();
    assert!(error.contains("`weight` comes twice"), "{error}");
}

/// A network, and a slow copy of it that is not trained.
#[derive(Module, Debug)]
struct WithTarget {
    before: Option<Linear>,
    online: Linear,
    after: Option<Linear>,
}

#[test]
fn a_frozen_copy_that_has_the_ids_of_what_is_trained_is_refused_with_the_way_out() {
    let online = layer();
    let clone = || Some(online.clone().no_grad());
    let from_record = Some(layer().no_grad().load_record(online.clone().into_record()));
    for (before, after) in [(clone(), None), (None, clone()), (None, from_record)] {
        let copy = if before.is_some() { "before.weight" } else { "after.weight" };
        let model = WithTarget { before, online: online.clone(), after };
        for error in on_ranks(2, |group| {
            DistributedDataParallel::wrap(model.clone(), &group).map(drop).unwrap_err().to_string()
        }) {
            let wanted =
                format!("`{copy}` is not trained, but has the id of parameter `online.weight`");
            assert!(error.contains(&wanted), "{error}");
        }
    }
    // As the error says.
    let target = || load_named_tensors(layer(), named_tensors(&online).unwrap()).unwrap().no_grad();
    let model =
        WithTarget { before: Some(target()), online: online.clone(), after: Some(target()) };
    on_ranks(2, |group| {
        let (ddp, model) = DistributedDataParallel::wrap(model.clone(), &group).unwrap();
        let input = tensor::<2>([2, 4], group.rank(), &device());
        let output = model.online.forward(input.clone());
        let target = model.before.as_ref().unwrap().forward(input) + 1;
        let gradients = ddp.backward((output - target).square().mean(), &model).unwrap();
        assert_eq!(gradients.len(), 1);
        let trained = SgdConfig::new().init().step(0.1, model, gradients);
        let [before, online, after] = &named_tensors(&trained).unwrap()[..] else { panic!() };
        assert_eq!(before.values, after.values);
        assert_ne!(before.values, online.values);
    });
}

#[test]
fn frozen_tensors_of_one_id_do_no_harm() {
    let frozen = layer().no_grad();
    let model = WithTarget { before: Some(frozen.clone()), online: layer(), after: Some(frozen) };
    on_ranks(2, |group| {
        let (ddp, model) = DistributedDataParallel::wrap(model.clone(), &group).unwrap();
        let loss = model.online.forward(tensor::<2>([2, 4], 1, &device())).mean();
        assert_eq!(ddp.backward(loss, &model).unwrap().len(), 1);
    });
}
