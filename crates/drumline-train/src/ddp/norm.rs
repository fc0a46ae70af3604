use super::Values;

/// The norm of many gradients together, as if they were one vector, in double precision.
///
/// Gradients are added one after the other. Ranks that add equal gradients in the same order get the same bits, so they
/// clip alike without a message.
///
/// ```
/// use drumline::ddp::GradientNorm;
///
/// let mut norm = GradientNorm::euclidean();
/// norm.add([3.0_f32, 0.0][..].into()); // one parameter
/// norm.add([4.0_f64][..].into()); // another one
/// assert_eq!(norm.value(), 5.0);
/// assert!((norm.clip_coefficient(1.0) - 0.2).abs() < 1e-6);
/// assert_eq!(norm.clip_coefficient(100.0), 1.0); // nothing to clip
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradientNorm {
    /// The order of the norm. Infinity: the largest absolute value.
    order: f64,
    /// The sum of the powers, or the largest absolute value.
    total: f64,
}

impl GradientNorm {
    /// The Euclidean norm: the square root of the sum of squares.
    pub fn euclidean() -> Self {
        Self { order: 2.0, total: 0.0 }
    }

    /// The norm of another order. `f64::INFINITY` takes the largest absolute value. `None` if the order is not above
    /// zero.
    pub fn of_order(order: f64) -> Option<Self> {
        (order > 0.0).then_some(Self { order, total: 0.0 })
    }

    /// Adds the gradient of a parameter.
    pub fn add(&mut self, gradient: Values<'_>) {
        self.add_part(self.part(gradient));
    }

    /// What the gradient of a parameter adds. If parameters have [owners](super::Owners), they tell each other their
    /// parts. If each then adds all of them in the order in which the model defines them, the norm has the same bits
    /// as if it had all gradients.
    pub fn part(&self, gradient: Values<'_>) -> f64 {
        match gradient {
            Values::F32(values) => self.of_values(values),
            Values::F64(values) => self.of_values(values),
            Values::F16(values) => self.of_values(values),
            Values::Bf16(values) => self.of_values(values),
        }
    }

    /// Adds the [part](Self::part) of a parameter, or 0 for one without a gradient.
    pub fn add_part(&mut self, part: f64) {
        self.total = match self.order {
            f64::INFINITY => larger(self.total, part),
            _ => self.total + part,
        };
    }

    /// The norm of all gradients that were added.
    pub fn value(&self) -> f64 {
        match self.order {
            2.0 => self.total.sqrt(),
            f64::INFINITY | 1.0 => self.total,
            order => self.total.powf(order.recip()),
        }
    }

    /// What to multiply gradients with, so that their norm is at most `max_norm`: `max_norm / (norm + 1e-6)`, at most 1.
    /// This is the formula of torch's `clip_grad_norm_`. It is NaN if the norm is, and 0 if the norm is infinite.
    pub fn clip_coefficient(&self, max_norm: f64) -> f64 {
        let coefficient = max_norm / (self.value() + 1e-6);
        // `min` would take the 1 in place of a NaN.
        if coefficient > 1.0 { 1.0 } else { coefficient }
    }

    fn of_values<T: Copy + Into<f64>>(&self, values: &[T]) -> f64 {
        match self.order {
            2.0 => total(values, |value| value * value, |a, b| a + b),
            1.0 => total(values, f64::abs, |a, b| a + b),
            f64::INFINITY => total(values, f64::abs, larger),
            order => total(values, |value| value.abs().powf(order), |a, b| a + b),
        }
    }
}

/// The total of `part` over all values. It is kept in several places in turn, because each addition waits for the one
/// before it in the same place. The number of places is fixed, so the bits are.
fn total<T: Copy + Into<f64>>(
    values: &[T],
    part: impl Fn(f64) -> f64,
    add: impl Fn(f64, f64) -> f64,
) -> f64 {
    const PLACES: usize = 8;
    let mut places = [0.0; PLACES];
    for values in values.chunks(PLACES) {
        for (place, &value) in places.iter_mut().zip(values) {
            *place = add(*place, part(value.into()));
        }
    }
    places.into_iter().fold(0.0, add)
}

/// The larger one, or NaN if one of them is.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn norms_are_those_of_the_definition(
            gradients in prop::collection::vec(prop::collection::vec(-1e3_f32..1e3, 0..40), 0..5),
            order in prop_oneof![Just(1.0), Just(2.0), Just(3.0), Just(f64::INFINITY)],
        ) {
            let mut norm = GradientNorm::of_order(order).unwrap();
            gradients.iter().for_each(|gradient| norm.add(gradient.as_slice().into()));
            let all = gradients.iter().flatten().map(|&x| f64::from(x).abs());
            let wanted = match order {
                f64::INFINITY => all.fold(0.0, f64::max),
                order => all.map(|x| x.powf(order)).sum::<f64>().powf(1.0 / order),
            };
            prop_assert!((norm.value() - wanted).abs() <= 1e-12 * wanted);
            let coefficient = norm.clip_coefficient(10.0);
            prop_assert_eq!(coefficient, (10.0 / (norm.value() + 1e-6)).min(1.0));
        }
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        for order in [1.0, 2.0, 2.5, f64::INFINITY] {
            for (odd, place) in [(f32::NAN, 0), (f32::NAN, 8), (f32::INFINITY, 3)] {
                let mut values = [1.0_f32; 12];
                values[place] = odd;
                let mut norm = GradientNorm::of_order(order).unwrap();
                norm.add(values[..].into());
                norm.add([7.0_f32][..].into());
                assert_eq!(norm.value().is_nan(), odd.is_nan(), "{order} {odd}");
                assert!(!norm.value().is_finite());
                let coefficient = norm.clip_coefficient(1.0);
                assert!(if odd.is_nan() { coefficient.is_nan() } else { coefficient == 0.0 });
            }
        }
        for order in [0.0, -1.0, f64::NAN] {
            assert_eq!(GradientNorm::of_order(order), None);
        }
    }
}
