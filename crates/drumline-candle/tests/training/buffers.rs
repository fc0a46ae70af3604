//! What no optimizer changes: copied from rank 0, and nothing else is.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{
    BatchNorm, Linear, Module, ModuleT, Optimizer, ParamsAdamW, VarBuilder, VarMap, batch_norm,
    linear_no_bias,
};
use drumline::{Objects, ProcessGroup};
use drumline_candle::{
    AdamW, DataParallel, DdpOptions, Result, ShardedOptimizer, UnusedParameters, variables_digest,
};

use crate::{elements, named, numbers, on_ranks, variable};

/// Layers of one shape, a normalisation between them, and variables of two types that nothing trains.
struct Model {
    varmap: VarMap,
    layers: Vec<Linear>,
    norm: BatchNorm,
}

const BUFFERS: [&str; 4] = ["count", "idle", "norm.running_mean", "norm.running_var"];

impl Model {
    fn new() -> Self {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
        let layers = ["a", "b", "c"].map(|name| linear_no_bias(4, 4, vb.pp(name)).unwrap());
        let norm = batch_norm(4, 1e-5, vb.pp("norm")).unwrap();
        variable(&varmap, "idle", &[4, 4], DType::F32);
        variable(&varmap, "count", &[2], DType::I64);
        Self { varmap, layers: layers.into(), norm }
    }

    /// Depends on the rank, and changes the running statistics.
    fn loss(&self, rank: usize) -> Tensor {
        let input = numbers(&[5, 4], rank, DType::F32);
        let hidden = self.layers[0].forward(&input).unwrap().unsqueeze(2).unwrap();
        let hidden = self.norm.forward_t(&hidden, true).unwrap().squeeze(2).unwrap();
        let layers = self.layers[1..].iter();
        let output = layers.fold(hidden, |hidden, layer| layer.forward(&hidden).unwrap());
        output.sqr().unwrap().mean_all().unwrap()
    }

    fn values(&self) -> BTreeMap<String, Vec<f64>> {
        let named = self.varmap.data().lock().unwrap();
        named.iter().map(|(name, var)| (name.clone(), elements(var))).collect()
    }
}

enum Adapter {
    Plain(Box<DataParallel>, AdamW),
    Sharded(Box<ShardedOptimizer>),
}

impl Adapter {
    fn wrap(varmap: &VarMap, group: &ProcessGroup, options: &DdpOptions, is_sharded: bool) -> Self {
        let params = ParamsAdamW { lr: 0.1, ..ParamsAdamW::default() };
        match is_sharded {
            true => {
                let it = ShardedOptimizer::wrap_with(varmap, params, group, options).unwrap();
                Adapter::Sharded(Box::new(it))
            }
            false => {
                let ddp = DataParallel::wrap_with(varmap, group, options).unwrap();
                Adapter::Plain(Box::new(ddp), AdamW::new(varmap.all_vars(), params).unwrap())
            }
        }
    }

    /// The `way`-th way to take a step.
    fn step(&mut self, loss: &Tensor, way: usize) {
        match (self, way) {
            (Adapter::Plain(ddp, optimizer), 0) => ddp.backward_step(optimizer, loss).unwrap(),
            (Adapter::Plain(ddp, optimizer), 1) => {
                optimizer.step(&ddp.backward(loss).unwrap()).unwrap();
            }
            (Adapter::Plain(ddp, optimizer), _) => {
                let mut gradients = loss.backward().unwrap();
                ddp.average(&mut gradients).unwrap();
                ddp.clip_grad_norm(&mut gradients, 0.1).unwrap();
                optimizer.step(&gradients).unwrap();
            }
            (Adapter::Sharded(optimizer), 0) => optimizer.backward_step(loss).unwrap(),
            (Adapter::Sharded(optimizer), 1) => {
                let gradients = optimizer.backward(loss).unwrap();
                optimizer.step(gradients).unwrap();
            }
            (Adapter::Sharded(optimizer), _) => {
                let mut gradients = optimizer.average(loss.backward().unwrap()).unwrap();
                optimizer.clip_grad_norm(&mut gradients, 0.1).unwrap();
                optimizer.step(gradients).unwrap();
            }
        }
    }

    fn shadow(&mut self) -> bool {
        match self {
            Adapter::Plain(ddp, optimizer) => {
                ddp.shadow().unwrap().map(|it| optimizer.step(&it).unwrap()).is_some()
            }
            Adapter::Sharded(optimizer) => {
                optimizer.shadow().unwrap().map(|it| optimizer.step(it).unwrap()).is_some()
            }
        }
    }

    fn sync_buffers(&self) -> Result<()> {
        match self {
            Adapter::Plain(ddp, _) => ddp.sync_buffers(),
            Adapter::Sharded(optimizer) => optimizer.sync_buffers(),
        }
    }
}

/// Synchronises, and checks what has changed.
fn sync(model: &Model, adapter: &Adapter, group: &ProcessGroup) {
    let before = model.values();
    let of_root = group.all_gather_object(&before).unwrap().remove(0);
    adapter.sync_buffers().unwrap();
    for (name, after) in model.values() {
        let wanted = if BUFFERS.contains(&&name[..]) { &of_root } else { &before };
        assert_eq!(after, wanted[&name], "{name} on rank {}", group.rank());
    }
    let digests = group.all_gather_object(&variables_digest(&model.varmap).unwrap()).unwrap();
    assert!(digests.iter().all(|it| *it == digests[0]), "{digests:?}");
}

#[test]
fn buffers_are_those_of_rank_0_and_parameters_stay() {
    for is_sharded in [false, true] {
        for policy in [UnusedParameters::Error, UnusedParameters::Ignore] {
            on_ranks(3, |group| {
                let rank = group.rank();
                let model = Model::new();
                let options = DdpOptions::default().unused_parameters(policy).check_every(1);
                let mut adapter = Adapter::wrap(&model.varmap, &group, &options, is_sharded);
                sync(&model, &adapter, &group);
                for way in 0..3 {
                    let own = numbers(&[4, 4], 7 + rank, DType::F32);
                    named(&model.varmap, "idle").set(&own).unwrap();
                    let own = Tensor::new(&[rank as i64, 1 << 40], &Device::Cpu).unwrap();
                    named(&model.varmap, "count").set(&own).unwrap();
                    adapter.step(&model.loss(rank), way);
                    sync(&model, &adapter, &group);
                }
                // Rank 1 has more data than the others.
                if rank == 1 {
                    adapter.step(&model.loss(rank), 0);
                }
                while adapter.shadow() {}
                sync(&model, &adapter, &group);
            });
        }
    }
}

#[test]
fn a_variable_that_had_no_gradient_on_any_rank_yet_is_a_buffer() {
    for is_sharded in [false, true] {
        on_ranks(3, |group| {
            let varmap = VarMap::new();
            let all = ["a", "b", "c"].map(|name| variable(&varmap, name, &[4, 4], DType::F32));
            let options = DdpOptions::default().unused_parameters(UnusedParameters::Ignore);
            let mut adapter = Adapter::wrap(&varmap, &group, &options, is_sharded);
            // `b` is used on rank 2 alone, and `c` on none.
            let used = if group.rank() == 2 { &all[..2] } else { &all[..1] };
            let loss = used.iter().fold(Tensor::new(1_f32, &Device::Cpu).unwrap(), |sum, it| {
                (sum + it.exp().unwrap().sum_all().unwrap()).unwrap()
            });
            adapter.step(&loss, 0);
            let own = Tensor::full(group.rank() as f32, (4, 4), &Device::Cpu).unwrap();
            named(&varmap, "c").set(&own).unwrap();
            let trained = ["a", "b"].map(|name| elements(&named(&varmap, name)));
            assert!(trained.iter().all(|it| it[0] < 0.0), "both have learnt: {trained:?}");
            adapter.sync_buffers().unwrap();
            assert_eq!(["a", "b"].map(|name| elements(&named(&varmap, name))), trained);
            assert_eq!(elements(&named(&varmap, "c")), [0.0; 16]);
        });
    }
}

#[test]
fn a_rank_with_another_list_of_variables_is_named() {
    type Change = fn(&VarMap);
    let changes: [(Change, &str); 3] = [
        (
            |varmap| drop(variable(varmap, "extra", &[1], DType::F32)),
            "rank 1: variable `extra` was added to the VarMap after `wrap`",
        ),
        (
            |varmap| drop(varmap.data().lock().unwrap().remove("idle")),
            "rank 1: variable `idle` was taken out of the VarMap, or replaced",
        ),
        (
            |varmap| {
                drop(varmap.data().lock().unwrap().remove("a.weight"));
                variable(varmap, "a.weight", &[4, 4], DType::F32);
            },
            "rank 1: variable `a.weight` was taken out of the VarMap, or replaced",
        ),
    ];
    for (change, wanted) in changes {
        for is_sharded in [false, true] {
            for error in on_ranks(3, |group| {
                let model = Model::new();
                let options = DdpOptions::default();
                let mut adapter = Adapter::wrap(&model.varmap, &group, &options, is_sharded);
                adapter.step(&model.loss(group.rank()), 0);
                if group.rank() == 1 {
                    change(&model.varmap);
                }
                let before = model.values();
                let error = adapter.sync_buffers().unwrap_err();
                assert_eq!(model.values(), before);
                error.to_string()
            }) {
                assert!(error.contains(wanted), "{error}");
            }
        }
    }
}
