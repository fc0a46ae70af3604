//! A small network that notes what it is asked to do, and data that can fail.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use burn::{
    data::{
        dataloader::{
            DataLoader, DataLoaderBuilder, DataLoaderIterator, Progress, batcher::Batcher,
        },
        dataset::{Dataset, DatasetError},
    },
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    module::{Module, Param},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, ModuleOptimizer},
    tensor::{Device, Tensor, TensorData, activation::tanh},
    train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep},
};

const INPUTS: usize = 4;

#[derive(Module, Debug)]
pub(crate) struct Network {
    hidden: Linear,
    head: Linear,
    #[module(skip)]
    notes: Notes,
}

/// What a rank's network was asked to do, and what it does when it is asked.
#[derive(Clone, Default)]
pub(crate) struct Notes(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    losses: Vec<f32>,
    rates: Vec<f64>,
    validated: usize,
    at_step: Option<Box<dyn Fn(usize) + Send>>,
    at_validation: Option<Box<dyn Fn() + Send>>,
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notes")
    }
}

impl Notes {
    /// Calls `act` at each step, counted from 1.
    pub(crate) fn at_step(self, act: impl Fn(usize) + Send + 'static) -> Self {
        self.0.lock().unwrap().at_step = Some(Box::new(act));
        self
    }

    /// Calls `act` for each batch of validation.
    pub(crate) fn at_validation(self, act: impl Fn() + Send + 'static) -> Self {
        self.0.lock().unwrap().at_validation = Some(Box::new(act));
        self
    }

    /// The loss of each call of `TrainStep::step`.
    pub(crate) fn losses(&self) -> Vec<f32> {
        self.0.lock().unwrap().losses.clone()
    }

    /// The learning rate of each update of the parameters.
    pub(crate) fn rates(&self) -> Vec<f64> {
        self.0.lock().unwrap().rates.clone()
    }

    /// The number of validated items.
    pub(crate) fn validated(&self) -> usize {
        self.0.lock().unwrap().validated
    }
}

impl Network {
    /// Weights that are the same for the same `seed`.
    pub(crate) fn new(seed: usize, width: usize, notes: Notes, device: &Device) -> Self {
        let linear = |inputs: usize, outputs: usize, seed: usize| {
            let mut linear: Linear = LinearConfig::new(inputs, outputs).init(device);
            let weight = TensorData::new(numbers(seed, inputs * outputs), [inputs, outputs]);
            linear.weight = Param::from_data(weight, device);
            let bias = TensorData::new(numbers(seed + 1, outputs), [outputs]);
            linear.bias = Some(Param::from_data(bias, device));
            linear
        };
        Self { hidden: linear(INPUTS, width, seed), head: linear(width, 1, seed + 2), notes }
    }

    fn output(&self, batch: Batch) -> RegressionOutput {
        let output = self.head.forward(tanh(self.hidden.forward(batch.inputs)));
        let loss = (output.clone() - batch.targets.clone()).square().mean();
        RegressionOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Network {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.output(batch);
        let mut notes = self.notes.0.lock().unwrap();
        notes.losses.push(output.loss.clone().into_scalar::<f32>());
        if let Some(act) = &notes.at_step {
            act(notes.losses.len());
        }
        drop(notes);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(
        self,
        optimizer: &mut ModuleOptimizer,
        rate: ModuleLearningRate,
        gradients: GradientsParams,
    ) -> Self {
        self.notes.0.lock().unwrap().rates.push(rate.base());
        optimizer.step(rate, self, gradients)
    }
}

impl InferenceStep for Network {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        let mut notes = self.notes.0.lock().unwrap();
        notes.validated += batch.targets.dims()[0];
        if let Some(act) = &notes.at_validation {
            act();
        }
        drop(notes);
        self.output(batch)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Batch {
    inputs: Tensor<2>,
    targets: Tensor<2>,
}

/// Samples, by number. Reading sample `unreadable` fails.
#[derive(Clone, Default)]
pub(crate) struct Samples {
    pub(crate) numbers: Vec<usize>,
    pub(crate) unreadable: Option<usize>,
}

#[derive(Debug, thiserror::Error)]
#[error("sample {0} is unreadable")]
struct Unreadable(usize);

impl Dataset<usize> for Samples {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        let number = self.numbers[index];
        match self.unreadable == Some(number) {
            true => Err(DatasetError::new(Unreadable(number))),
            false => Ok(number),
        }
    }

    fn len(&self) -> usize {
        self.numbers.len()
    }
}

impl Samples {
    pub(crate) fn new(numbers: impl IntoIterator<Item = usize>) -> Self {
        Self { numbers: numbers.into_iter().collect(), unreadable: None }
    }

    pub(crate) fn loader(self, batch_size: usize, workers: usize) -> Arc<dyn DataLoader<Batch>> {
        DataLoaderBuilder::new(Stack).batch_size(batch_size).num_workers(workers).build(self)
    }
}

pub(crate) struct Stack;

impl Batcher<usize, Batch> for Stack {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let count = items.len();
        let inputs: Vec<f32> = items.iter().flat_map(|item| numbers(1000 + item, INPUTS)).collect();
        let targets: Vec<f32> = items.iter().flat_map(|item| numbers(5000 + item, 1)).collect();
        Batch {
            inputs: Tensor::from_data(TensorData::new(inputs, [count, INPUTS]), device),
            targets: Tensor::from_data(TensorData::new(targets, [count, 1]), device),
        }
    }
}

/// Numbers between -1 and 1 that depend on `seed`.
fn numbers(seed: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((seed * 7919 + i * 31) as f64 * 0.618 + 0.3).sin() as f32).collect()
}

/// A loader whose epochs end after `batches` batches, but that does not say so.
pub(crate) fn ends_early(
    inner: Arc<dyn DataLoader<Batch>>,
    batches: usize,
) -> Arc<dyn DataLoader<Batch>> {
    Arc::new(EndsEarly { inner, batches })
}

struct EndsEarly {
    inner: Arc<dyn DataLoader<Batch>>,
    batches: usize,
}

struct Early<'a> {
    inner: Box<dyn DataLoaderIterator<Batch> + 'a>,
    left: usize,
}

impl Iterator for Early<'_> {
    type Item = Result<Batch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        self.inner.next()
    }
}

impl DataLoaderIterator<Batch> for Early<'_> {
    fn progress(&self) -> Progress {
        self.inner.progress()
    }
}

impl DataLoader<Batch> for EndsEarly {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<Batch> + 'a> {
        Box::new(Early { inner: self.inner.iter(), left: self.batches })
    }

    fn num_items(&self) -> usize {
        self.inner.num_items()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<Batch>> {
        ends_early(self.inner.to_device(device), self.batches)
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<Batch>> {
        ends_early(self.inner.slice(start, end), self.batches)
    }
}
