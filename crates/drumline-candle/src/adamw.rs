use candle_core::{Result as CandleResult, Tensor, TensorId, Var, backprop::GradStore};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};
use drumline::{
    checkpoint::{self, Checkpoint},
    ddp::ParameterSpec,
};

use crate::{
    Error, Result,
    checkpoint::Resumable,
    failure::{self, OrFail},
    host,
    variables::{self, Variable, carried},
};

/// AdamW with a state that can be saved, and the arithmetic of `candle_nn::AdamW`: it gives the same bits.
///
/// It is used like candle's. [`checkpoint`](crate::checkpoint()) saves it, and [`resume`](crate::resume) loads it.
/// candle's own keeps its moments to itself, so training with it cannot be resumed to the same bits.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear};
/// use drumline_candle::AdamW; // instead of candle_nn::AdamW
///
/// let varmap = VarMap::new();
/// let model = linear(2, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
/// let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.01)?;
/// let input = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
/// optimizer.backward_step(&model.forward(&input)?.sqr()?.mean_all()?)?;
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct AdamW {
    parameters: Vec<Parameter>,
    /// The number of steps so far.
    steps: usize,
    params: ParamsAdamW,
}

/// A variable and the moving averages of its gradient.
#[derive(Debug)]
struct Parameter {
    var: Var,
    /// Of the gradient.
    first_moment: Tensor,
    /// Of its square.
    second_moment: Tensor,
}

impl AdamW {
    /// An optimizer with that learning rate and candle's other defaults.
    ///
    /// # Errors
    ///
    /// candle cannot make the moments.
    pub fn new_lr(vars: Vec<Var>, learning_rate: f64) -> CandleResult<Self> {
        Self::new(vars, ParamsAdamW { lr: learning_rate, ..ParamsAdamW::default() })
    }

    /// Learning rate, decay rates of the moments, and weight decay.
    pub fn params(&self) -> &ParamsAdamW {
        &self.params
    }

    /// Sets them for the steps that follow.
    pub fn set_params(&mut self, params: ParamsAdamW) {
        self.params = params;
    }

    /// The variables with their names, in order of name, and their places in `parameters`.
    fn named(&self, varmap: &VarMap) -> Result<Vec<(Variable, usize)>> {
        let ids: Vec<TensorId> = self.parameters.iter().map(|it| it.var.id()).collect();
        let place = |it: Variable| Some((ids.iter().position(|&id| id == it.var.id())?, it));
        let named: Vec<(Variable, usize)> = variables::sorted(varmap)
            .into_iter()
            .filter_map(place)
            .map(|(at, it)| (it, at))
            .collect();
        let is_unnamed = |at: &usize| named.iter().all(|(_, place)| place != at);
        match (0..ids.len()).find(is_unnamed) {
            Some(at) => Err(failure::unnamed_variable(self.parameters[at].var.dims())),
            None => Ok(named),
        }
    }
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    fn new(vars: Vec<Var>, params: ParamsAdamW) -> CandleResult<Self> {
        let floats = vars.into_iter().filter(|var| var.dtype().is_float());
        let parameters = floats.map(|var| {
            let (first_moment, second_moment) = (var.zeros_like()?, var.zeros_like()?);
            Ok(Parameter { var, first_moment, second_moment })
        });
        Ok(Self { parameters: parameters.collect::<CandleResult<_>>()?, steps: 0, params })
    }

    fn step(&mut self, gradients: &GradStore) -> CandleResult<()> {
        self.steps += 1;
        for parameter in &mut self.parameters {
            if let Some(gradient) = gradients.get(&parameter.var) {
                parameter.step(gradient, self.steps, &self.params)?;
            }
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.params.lr = learning_rate;
    }
}

impl Parameter {
    /// One step of decoupled weight decay (Loshchilov and Hutter, 2019). `step` counts from 1.
    ///
    /// Every operation is one that `candle_nn::AdamW` does, on the same operands.
    fn step(&mut self, gradient: &Tensor, step: usize, params: &ParamsAdamW) -> CandleResult<()> {
        let &ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = params;
        // No operation below becomes a part of the next backward.
        let gradient = gradient.detach();
        let mean = |old: &Tensor, new: &Tensor, decay: f64| (old * decay)? + (new * (1.0 - decay))?;
        let unbiased =
            |moment: &Tensor, decay: f64| moment * (1.0 / (1.0 - decay.powi(step as i32)));

        let first = mean(&self.first_moment, &gradient, beta1)?;
        let second = mean(&self.second_moment, &gradient.sqr()?, beta2)?;
        let deviation = (unbiased(&second, beta2)?.sqrt()? + eps)?;
        let direction = (unbiased(&first, beta1)? / deviation)?;
        let decayed = (self.var.detach() * (1.0 - lr * weight_decay))?;
        self.var.set(&(decayed - (direction * lr)?)?)?;
        self.first_moment = first;
        self.second_moment = second;
        Ok(())
    }
}

const FIRST_MOMENT: &str = "first_moment";
const SECOND_MOMENT: &str = "second_moment";
const STEPS: &str = "steps";
/// The settings, in this order.
const PARAMS: &str = "lr, beta1, beta2, eps, weight_decay";

impl Resumable for AdamW {
    fn save(&self, prefix: &str, varmap: &VarMap, checkpoint: &mut Checkpoint) -> Result<()> {
        for (variable, at) in self.named(varmap)? {
            let Parameter { first_moment, second_moment, .. } = &self.parameters[at];
            for (moment, name) in [(first_moment, FIRST_MOMENT), (second_moment, SECOND_MOMENT)] {
                let ParameterSpec { name, shape, dtype, .. } = moment_spec(&variable, name)?;
                let name = format!("{prefix}{name}");
                let bytes = host::to_bytes(moment).or_fail()?;
                checkpoint.insert(checkpoint::Tensor::new(name, dtype, shape, bytes)?);
            }
        }
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.params;
        let params = [lr, beta1, beta2, eps, weight_decay];
        let scalar = [self.steps as i64];
        checkpoint.insert(checkpoint::Tensor::from_values(
            format!("{prefix}{STEPS}"),
            [],
            &scalar,
        )?);
        checkpoint.insert(checkpoint::Tensor::from_values(
            format!("{prefix}{PARAMS}"),
            [5],
            &params,
        )?);
        Ok(())
    }

    fn load(&mut self, prefix: &str, varmap: &VarMap, checkpoint: &Checkpoint) -> Result<()> {
        let named = self.named(varmap)?;
        checkpoint.check(prefix, state_specs(named.iter().map(|(variable, _)| variable))?)?;

        let tensor = |name: &str| {
            let name = format!("{prefix}{name}");
            checkpoint.tensor(&name).ok_or_else(|| failure::checkpoint(format!("has no {name}")))
        };
        let steps = tensor(STEPS)?.values::<i64>()?;
        let [steps] = steps[..] else { return Err(unusable(STEPS)) };
        let steps = usize::try_from(steps).map_err(|_| unusable(STEPS))?;
        let params = tensor(PARAMS)?.values::<f64>()?;
        let [lr, beta1, beta2, eps, weight_decay] = params[..] else {
            return Err(unusable(PARAMS));
        };
        let mut moments = Vec::new();
        for (variable, at) in &named {
            let moment = |name: &str| {
                let bytes = tensor(&format!("{}.{name}", variable.name))?.bytes();
                host::from_bytes(bytes, &variable.var).or_fail()
            };
            moments.push((*at, moment(FIRST_MOMENT)?, moment(SECOND_MOMENT)?));
        }
        for (at, first, second) in moments {
            self.parameters[at].first_moment = first;
            self.parameters[at].second_moment = second;
        }
        self.steps = steps;
        self.params = ParamsAdamW { lr, beta1, beta2, eps, weight_decay };
        Ok(())
    }
}

/// The tensors of a state for these variables.
pub(crate) fn state_specs<'a>(
    variables: impl Iterator<Item = &'a Variable>,
) -> Result<Vec<ParameterSpec>> {
    let mut specs = vec![
        ParameterSpec::new(STEPS, [], drumline::DType::I64),
        ParameterSpec::new(PARAMS, [5], drumline::DType::F64),
    ];
    for variable in variables {
        specs.push(moment_spec(variable, FIRST_MOMENT)?);
        specs.push(moment_spec(variable, SECOND_MOMENT)?);
    }
    Ok(specs)
}

/// The variable to which a tensor of a state belongs, by their names. `None` for what all variables share.
pub(crate) fn variable_of(tensor: &str) -> Option<&str> {
    let (name, moment) = tensor.rsplit_once('.')?;
    [FIRST_MOMENT, SECOND_MOMENT].contains(&moment).then_some(name)
}

fn moment_spec(variable: &Variable, moment: &str) -> Result<ParameterSpec> {
    let ParameterSpec { name, shape, dtype, .. } = carried(variable)?;
    Ok(ParameterSpec::new(format!("{name}.{moment}"), shape, dtype))
}

fn unusable(name: &str) -> Error {
    failure::checkpoint(format!("has an unusable value of `{name}` for AdamW"))
}
