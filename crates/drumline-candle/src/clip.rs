//! Clips all gradients of a model together.

use candle_core::{Error, backprop::GradStore};
use drumline::{Objects, ddp::GradientNorm};

use crate::{
    Result,
    data_parallel::{DataParallel, fail_with},
    failure::OrFail,
    host,
    variables::Variable,
};

impl DataParallel {
    /// Scales averaged gradients down, so that their norm is at most `max_norm`. Returns the norm that they had. Call it
    /// between [`average`](Self::average) and the optimizer's step.
    ///
    /// This is torch's `clip_grad_norm_`: the norm is that of all gradients together, and each is multiplied with
    /// `max_norm / (norm + 1e-6)` if that is below 1. The norm is computed in double precision, in order of name. So
    /// all ranks clip alike, without a message. Gradients of variables that [`DdpOptions::ignore`] names are left out of
    /// the norm, and stay as they are.
    ///
    /// [`DdpOptions::ignore`]: crate::DdpOptions::ignore
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
    /// # use drumline::ProcessGroup;
    /// # use drumline_candle::DataParallel;
    /// # let varmap = VarMap::new();
    /// # let model = linear(2, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    /// # let mut optimizer = SGD::new(varmap.all_vars(), 0.1)?;
    /// let mut ddp = DataParallel::wrap(&varmap, &ProcessGroup::alone())?;
    /// let input = Tensor::ones((1, 2), DType::F32, &Device::Cpu)?;
    /// let loss = (model.forward(&input)?.sum_all()? * 3.0)?; // gradients of 3
    /// let mut gradients = ddp.backward(&loss)?;
    /// let norm = ddp.clip_grad_norm(&mut gradients, 1.0)?;
    /// optimizer.step(&gradients)?;
    /// assert_eq!(norm, 27_f64.sqrt()); // of two weights and a bias
    /// let weight = gradients.get(model.weight()).unwrap().to_vec2::<f32>()?;
    /// assert!((weight[0][0] - 1.0 / 3_f32.sqrt()).abs() < 1e-6);
    /// # Ok::<_, anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A gradient cannot be read from its device, or not be multiplied.
    #[doc(alias = "clip_grad_norm_")]
    pub fn clip_grad_norm(&self, gradients: &mut GradStore, max_norm: f64) -> Result<f64> {
        let mut norm = GradientNorm::euclidean();
        let own = || self.variables().iter().enumerate().filter(|(_, it)| self.keeps(&it.name));
        let part = |(place, it): (usize, &Variable)| {
            let gradient = gradients.get(&it.var)?;
            let part = host::with_values(gradient, |values| norm.part(values));
            let named = |error: Error| error.context(format!("the gradient of `{}`", it.name));
            Some(part.map(|part| (place, part)).map_err(named).or_fail())
        };
        let mut parts: Result<Vec<_>> = own().filter_map(part).collect();
        if self.owners().is_some() {
            parts = self.parts_of_all_ranks(parts);
        }
        parts?.into_iter().for_each(|(_, part)| norm.add_part(part));
        let coefficient = norm.clip_coefficient(max_norm);
        if coefficient != 1.0 {
            for (_, Variable { var, .. }) in own() {
                if let Some(gradient) = gradients.get(var) {
                    let clipped = (gradient * coefficient).or_fail()?;
                    gradients.insert(var, clipped);
                }
            }
        }
        Ok(norm.value())
    }

    /// What the gradients of all variables add to the norm, in order of place. `own` is what this rank knows. If a rank
    /// has failed, every rank gets its error.
    fn parts_of_all_ranks(&self, own: Result<Vec<(usize, f64)>>) -> Result<Vec<(usize, f64)>> {
        let own = own.map_err(|error| error.to_string());
        let (mut parts, mut problems) = (Vec::new(), Vec::new());
        for of_rank in self.group().all_gather_object(&own)? {
            problems.push(of_rank.map(|of_rank| parts.extend(of_rank)).err());
        }
        fail_with(problems)?;
        parts.sort_by_key(|&(place, _)| place);
        Ok(parts)
    }
}
