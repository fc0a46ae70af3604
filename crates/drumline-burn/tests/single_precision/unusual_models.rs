//! Models that do not use all their parameters, and models on which no tap can be put.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use crate::common::{Mlp, on_ranks, tensor};
use burn::{
    module::{Lora, Module, Param, Reparameterization, Reparameterizer},
    nn::{Linear, LinearConfig},
    optim::{AdamConfig, GradientsParams, SgdConfig, momentum::MomentumConfig},
    tensor::{
        Device, Tensor,
        quantization::{QuantScheme, QuantValue},
    },
};
use drumline::{Config, ProcessGroup, config::DebugLevel};
use drumline_burn::{
    DdpOptions, DistributedDataParallel, ErrorKind, NamedTensor, UnusedParameters, named_tensors,
    parameters_digest,
};

fn device() -> Device {
    Device::flex().autodiff()
}

/// Uses its second layer only when told to.
#[derive(Module, Debug)]
struct Branching {
    always: Linear,
    sometimes: Linear,
}

impl Branching {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(4, 4).init(device);
        Self { always: layer(), sometimes: layer() }
    }

    fn loss(&self, use_both: bool, device: &Device) -> Tensor<1> {
        let hidden = self.always.forward(tensor([2, 4], 1, device));
        let output = if use_both { self.sometimes.forward(hidden) } else { hidden };
        output.square().mean()
    }
}

#[test]
fn an_unused_parameter_is_named_on_every_rank_and_the_next_step_works() {
    for (world_size, lazy_rank) in [(1, 0), (3, 1)] {
        on_ranks(world_size, |group| {
            let device = device();
            let (ddp, model) =
                DistributedDataParallel::wrap(Branching::new(&device), &group).unwrap();
            let loss = model.loss(group.rank() != lazy_rank, &device);
            let error = ddp.backward(loss, &model).map(drop).unwrap_err().to_string();
            let wanted = format!(
                "step 1: parameters `sometimes.weight`, `sometimes.bias` got no gradient on rank \
                 {lazy_rank}; every"
            );
            assert!(error.contains(&wanted), "{error}");

            let gradients = ddp.backward(model.loss(true, &device), &model).unwrap();
            assert_eq!(gradients.len(), 4);
        });
    }
}

fn ignoring() -> DdpOptions {
    DdpOptions::default().unused_parameters(UnusedParameters::Ignore)
}

fn values(model: &Branching, name: &str) -> NamedTensor {
    named_tensors(model).unwrap().into_iter().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn an_unused_parameter_that_is_ignored_counts_as_zero_on_its_rank() {
    let start = Branching::new(&device());
    let plain = start.loss(true, &device()).backward();
    let plain = start.sometimes.weight.base().grad(&plain).unwrap().into_data();
    let plain: Vec<f32> = plain.try_into_vec().unwrap();
    on_ranks(4, |group| {
        let device = device();
        let (ddp, model) =
            DistributedDataParallel::wrap_with(start.clone(), &group, &ignoring()).unwrap();
        for _ in 0..3 {
            let loss = model.loss(group.rank() == 2, &device);
            let gradients = ddp.backward(loss, &model).unwrap();
            assert_eq!(gradients.len(), 4);
            let found = gradients.get::<2>(model.sometimes.weight.id).unwrap().into_data();
            let quarter: Vec<f32> = plain.iter().map(|x| x / 4.0).collect();
            assert_eq!(found.try_into_vec::<f32>().unwrap(), quarter);
        }
    });
}

#[test]
fn a_parameter_that_no_rank_used_is_left_alone_momentum_and_all() {
    for world_size in [1, 2] {
        let ranks = on_ranks(world_size, |group| {
            let device = device();
            let (ddp, mut model) =
                DistributedDataParallel::wrap_with(Branching::new(&device), &group, &ignoring())
                    .unwrap();
            let mut optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
            // Momentum builds up, pauses with the parameter, and goes on where it was.
            for (step, use_both) in [true, true, false, false, true].into_iter().enumerate() {
                let before = values(&model, "sometimes.weight");
                let gradients = ddp.backward(model.loss(use_both, &device), &model).unwrap();
                assert_eq!(gradients.len(), if use_both { 4 } else { 2 });
                model = optimizer.step(0.1, model, gradients);
                let is_same = values(&model, "sometimes.weight") == before;
                assert_eq!(is_same, !use_both, "step {step}");
            }
            parameters_digest(&model).unwrap()
        });
        assert!(ranks.iter().all(|digest| *digest == ranks[0]));
    }
}

/// It would train nothing, without a word.
#[test]
fn a_loss_of_another_model_is_an_error_on_every_rank_also_if_parameters_may_be_unused() {
    for world_size in [1, 3] {
        on_ranks(world_size, |group| {
            let device = device();
            let other = Branching::new(&device);
            let (ddp, model) =
                DistributedDataParallel::wrap_with(Branching::new(&device), &group, &ignoring())
                    .unwrap();
            let has_data = group.rank() < 2;
            let error = match has_data {
                true => ddp.backward(other.loss(true, &device), &model).map(drop).unwrap_err(),
                false => ddp.shadow(&model).map(drop).unwrap_err(),
            };
            assert!(error.to_string().contains("the loss of no rank"), "{error}");
            // The next step works: for one rank the loss is that of the model, and its average is that of all.
            let of = |is_right: bool| if is_right { &model } else { &other };
            let loss = of(group.rank() == 0).loss(true, &device);
            assert_eq!(ddp.backward(loss, &model).unwrap().len(), 4);
        });
    }
}

#[test]
fn a_parameter_used_in_one_micro_batch_is_used() {
    on_ranks(2, |group| {
        let device = device();
        let (ddp, model) = DistributedDataParallel::wrap(Branching::new(&device), &group).unwrap();
        ddp.accumulate(model.loss(true, &device), &model).unwrap();
        let gradients = ddp.backward(model.loss(false, &device), &model).unwrap();
        assert_eq!(gradients.len(), 4);
    });
}

/// `weight · scale`, as a reparameterization whose base is trained too.
#[derive(Module, Debug)]
struct Scale {
    scale: Param<Tensor<1>>,
}

impl Reparameterization for Scale {
    const NAME: &'static str = "scale";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base * self.scale.val().reshape([1; D])
    }
}

struct Scales;

impl Reparameterizer for Scales {
    type Reparam = Scale;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Scale>) {
        let is_scaled = path == "layers.1.weight";
        let scale = is_scaled.then(|| Tensor::full([1], 1.5, &param.lazy_device()));
        (param, scale.map(|scale| Scale { scale: Param::from_tensor(scale) }))
    }
}

/// Trains on each rank with its part of a batch, and alone with the whole of it. Returns the
/// largest difference, and what one rank's log says.
fn train_both_ways(start: &Mlp, device: &Device) -> (f64, String) {
    let rate = 0.01;
    let batch = |step| tensor([8, 4], step, device);
    let loss = |model: &Mlp, input: Tensor<2>| model.forward(input).square().mean();
    let mut one = start.clone();
    let mut optimizer = AdamConfig::new().init();
    for step in 0..4 {
        let gradients = GradientsParams::from_grads(loss(&one, batch(step)).backward(), &one);
        one = optimizer.step(rate, one, gradients);
    }
    let one = named_tensors(&one).unwrap();

    let mut ranks = on_ranks(2, |group| {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone());
        let (ddp, mut model) = tracing::subscriber::with_default(subscriber.finish(), || {
            // What another test begins while nobody listens would never be heard.
            let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
            DistributedDataParallel::wrap(start.clone(), &group).unwrap()
        });
        let mut optimizer = AdamConfig::new().init();
        for step in 0..4 {
            let rows = 4 * group.rank()..4 * group.rank() + 4;
            // Half of the micro-batches travel: both ways of passing gradients are used.
            let [first, second] = [rows.start..rows.start + 2, rows.start + 2..rows.end];
            ddp.accumulate(loss(&model, batch(step).slice([first])) / 2, &model).unwrap();
            let last = loss(&model, batch(step).slice([second])) / 2;
            let gradients = ddp.backward(last, &model).unwrap();
            model = optimizer.step(rate, model, gradients);
        }
        let digest = parameters_digest(&model).unwrap();
        let model = ddp.unwrap(model);
        assert_eq!(parameters_digest(&model).unwrap(), digest);
        (digest, named_tensors(&model).unwrap(), log.text())
    });
    let (digest, tensors, text) = ranks.remove(0);
    assert_eq!(digest, ranks[0].0, "the ranks differ");
    let names = |tensors: &[NamedTensor]| -> Vec<String> {
        tensors.iter().map(|tensor| tensor.name.clone()).collect()
    };
    assert_eq!(names(&tensors), names(&one), "reparameterizations are still there");
    let differences = tensors.iter().zip(&one).map(|(a, b)| {
        let floats = |tensor: &NamedTensor| -> Vec<f32> {
            bytemuck::cast_slice(tensor.values.as_bytes()).to_vec()
        };
        let pairs = floats(a).into_iter().zip(floats(b));
        pairs.map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)
    });
    (differences.fold(0.0, f64::max), text)
}

/// Where a subscriber writes.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl tracing_subscriber::fmt::MakeWriter<'_> for Log {
    type Writer = Log;

    fn make_writer(&self) -> Log {
        self.clone()
    }
}

#[test]
fn a_reparameterized_parameter_is_averaged_after_backward_and_that_is_said() {
    let start = Mlp::new(4, 3, &device()).apply_reparameterization(Scales);
    let (difference, log) = train_both_ways(&start, &device());
    assert!(difference < 1e-5, "{difference:e}");
    let wanted = "1 of 9 parameters are averaged after backward, which hides none of their \
                  communication, because burn lets no gradient tap onto them: `layers.1.weight` \
                  (it carries the reparameterization `scale`)";
    assert_eq!(log.matches(wanted).count(), 1, "{log}");
}

/// What one of two ranks logs in 12 steps.
fn told_with(level: DebugLevel) -> String {
    let config = Config::default().debug(level);
    let groups = drumline::rendezvous::local_world_with(2, &config).unwrap();
    let log = Log::default();
    std::thread::scope(|threads| {
        for group in groups {
            let log = log.clone();
            threads.spawn(move || {
                let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log);
                let train = || {
                    // What another test begins while nobody listens would never be heard.
                    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
                    let start = Mlp::new(4, 2, &device());
                    let (ddp, model) = DistributedDataParallel::wrap(start, &group).unwrap();
                    for step in 0..12 {
                        let output = model.forward(tensor([2, 4], step, &device()));
                        ddp.backward(output.square().mean(), &model).unwrap();
                    }
                };
                match group.rank() {
                    0 => tracing::subscriber::with_default(subscriber.finish(), train),
                    _ => train(),
                }
            });
        }
    });
    log.text()
}

#[test]
fn the_log_tells_what_was_initialized_and_how_long_chosen_steps_took() {
    let told = |text: &str, log: &str| log.matches(text).count();
    let off = told_with(DebugLevel::Off);
    assert_eq!(told("DDP initialized", &off) + told("on average", &off), 0, "{off}");
    let info = told_with(DebugLevel::Info);
    assert_eq!(told("DDP initialized rank=0 world_size=2", &info), 1, "{info}");
    assert_eq!(told("on average", &info), 0, "{info}");
    let detail = told_with(DebugLevel::Detail);
    assert_eq!(told("DDP initialized", &detail), 1, "{detail}");
    assert_eq!(told("on average", &detail), 10, "{detail}");
    assert_eq!(told("step=9", &detail), 1, "{detail}");
}

#[test]
fn the_factors_of_lora_adapters_are_tapped_like_any_parameter() {
    let start = Mlp::new(4, 2, &device()).apply_lora(Lora::new(2, 1.0));
    let (difference, log) = train_both_ways(&start, &device());
    assert!(difference < 1e-5, "{difference:e}");
    assert!(!log.contains("after backward"), "{log}");

    on_ranks(2, |group| {
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
        let (ddp, model) =
            DistributedDataParallel::wrap_with(start.clone(), &group, &options).unwrap();
        let loss = model.forward(tensor([2, 4], 1, &device())).square().mean();
        let gradients = ddp.backward(loss, &model).unwrap();
        assert_eq!(gradients.len(), 6, "two factors for each of three layers, and no base");
        assert_eq!(ddp.stats().buckets_launched_early, 6, "during backward");
    });
}

/// A weight of 8-bit floats.
fn quantized() -> Linear {
    let mut layer: Linear = LinearConfig::new(4, 4).with_bias(false).init(&Device::flex());
    let scheme = QuantScheme::default().with_value(QuantValue::E4M3);
    layer.weight = Param::from_tensor(layer.weight.val().quantize_dynamic(&scheme));
    layer
}

#[test]
fn a_weight_of_8_bit_floats_is_named_on_every_rank() {
    #[derive(Module, Debug)]
    struct Model {
        trained: Linear,
        frozen: Linear,
    }
    let wrap = |group: ProcessGroup, is_quantized: bool| {
        let layer = || LinearConfig::new(4, 4).with_bias(false).init(&device());
        let frozen = if is_quantized { quantized() } else { layer().no_grad() };
        let model = Model { trained: layer(), frozen };
        DistributedDataParallel::wrap(model, &group).map(drop).unwrap_err()
    };
    for error in on_ranks(2, |group| wrap(group, true)) {
        assert!(error.to_string().contains("Drumline carries f32"), "{error}");
        assert!(error.to_string().contains("tensor `frozen.weight` is QFloat"), "{error}");
    }
    let errors = on_ranks(3, |group| {
        let is_quantized = group.rank() == 1;
        wrap(group, is_quantized)
    });
    assert!(errors[1].to_string().contains("Drumline carries f32"), "{}", errors[1]);
    for other in [&errors[0], &errors[2]] {
        assert_eq!(other.kind(), ErrorKind::OtherRanks, "{other}");
        assert!(
            other.to_string().contains("on rank 1: tensor `frozen.weight` is QFloat"),
            "{other}"
        );
    }
}

#[cfg(feature = "ndarray")]
#[test]
fn a_model_on_another_device_is_averaged_after_backward_and_that_is_said() {
    let device = crate::other_device();
    let start = Mlp::new(4, 3, &device);
    let (difference, log) = train_both_ways(&start, &device);
    assert!(difference < 1e-5, "{difference:e}");
    assert!(log.contains("8 of 8 parameters are averaged after backward"), "{log}");
    assert!(log.contains("`layers.0.weight` (it is on NdArray"), "{log}");

    let layer =
        drumline_burn::SyncBatchNormConfig::new(4).init(&drumline::ProcessGroup::alone(), &device);
    let error = layer.forward(tensor::<2>([2, 4], 1, &device)).map(drop).unwrap_err().to_string();
    assert!(error.contains("it is on NdArray"), "{error}");
}
