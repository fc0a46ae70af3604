//! Training with candle on several ranks, which are threads here.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adamw;
mod buffers;
mod clip;
mod diverged;
mod elastic;
mod equivalence;
mod faults;
mod killed;
mod random_order;
mod resume;
mod sharded;
mod shards;
mod steps;

use candle_core::{DType, Device, Result, Tensor, Var, backprop::GradStore};
use candle_nn::{Init, VarMap};
use drumline::ProcessGroup;

/// Runs `rank` on a thread per rank and returns what each gave, by rank.
fn on_ranks<T: Send>(world_size: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    drumline::local(world_size, |group| Ok(rank(group))).unwrap()
}

/// Numbers between -1 and 1 that depend on `seed`.
fn numbers(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let count = shape.iter().product();
    let value = |i: usize| ((seed * 7919 + i) as f64 * 0.618 + 0.3).sin();
    let values: Vec<f64> = (0..count).map(value).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// A variable of that name in `varmap`, with zeros.
fn variable(varmap: &VarMap, name: &str, shape: &[usize], dtype: DType) -> Tensor {
    varmap.get(shape, name, Init::Const(0.0), dtype, &Device::Cpu).unwrap()
}

/// The variable of that name.
fn named(varmap: &VarMap, name: &str) -> Var {
    varmap.data().lock().unwrap()[name].clone()
}

/// The gradient of a loss that is the sum of `(rank + 1) * variable` over these variables.
fn gradients_of(variables: &[&Tensor], rank: usize) -> Result<GradStore> {
    let mut loss = Tensor::zeros((), variables[0].dtype(), &Device::Cpu)?;
    for variable in variables {
        loss = (loss + (variable.sum_all()? * (rank + 1) as f64)?)?;
    }
    loss.backward()
}

/// The elements as f64, row-major.
fn elements(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}
