//! Kernels are compiled twice: for every processor of the architecture, and for recent ones.

/// The instructions that a kernel may use. They affect the time that it takes, but never its results
/// (payloads of NaN apart).
#[derive(Clone, Copy, Debug)]
pub struct Isa {
    /// True only if this processor says that it has AVX2 and F16C.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "nothing depends on it"))]
    avx2: bool,
}

/// The instructions that a kernel is compiled for.
pub trait Features {
    /// Whether it may use AVX2, and F16C (conversions between `f16` and `f32`).
    const AVX2: bool;
}

pub(crate) struct Plain;

impl Features for Plain {
    const AVX2: bool = false;
}

#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Features for Avx2 {
    const AVX2: bool = true;
}

/// Code that is compiled for each set of features. `run`, and every function that it calls, must be
/// `inline(always)`: a function that is not inlined is compiled for every processor.
pub(crate) trait Kernel {
    fn run<F: Features>(self);
}

impl Isa {
    /// The instructions that every processor of this architecture has.
    #[cfg(test)]
    pub(crate) const PLAIN: Isa = Isa { avx2: false };

    /// The most capable set of instructions that this processor has.
    #[inline]
    pub(crate) fn best() -> Isa {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let avx2 = false;
        Isa { avx2 }
    }

    #[inline]
    pub(crate) fn run(self, kernel: impl Kernel) {
        #[cfg(target_arch = "x86_64")]
        if self.avx2 {
            // SAFETY: `avx2` is set only if this processor has AVX2 and F16C.
            return unsafe { run_avx2(kernel) };
        }
        kernel.run::<Plain>();
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn run_avx2(kernel: impl Kernel) {
    kernel.run::<Avx2>();
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::kernels::Reduction;
    use crate::{Bool, Complex, Element, F8E4M3, F8E5M2, ReduceOp, Source, Target};

    const LEN: usize = 77;

    fn random<T: Element>(rank: usize) -> Vec<T> {
        let bits = |i: usize| (i + 1 + LEN * rank).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i << 50;
        // Two words for each element, as many as the widest has.
        let words: Vec<usize> = (0..2 * LEN).map(bits).collect();
        bytemuck::cast_slice(&words)[..LEN].to_vec()
    }

    /// Compares texts: they differ for any two numbers, and for the two zeros, but are the same for
    /// every NaN.
    fn same<T: Element>(a: &[T], b: &[T]) -> bool {
        format!("{a:?}") == format!("{b:?}")
    }

    fn check<T: Element>() {
        let inputs: Vec<Vec<T>> = (0..9).map(random).collect();
        let programs: [&[usize]; 5] = [
            &[0, 1],
            &[0, 1, 1],
            &[0, 1, 0, 2],
            &[0, 1, 0, 2, 0, 1, 0, 3],
            &[0, 1, 0, 2, 0, 1, 0, 3, 1],
        ];
        let ops = ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE));
        for (op, merges) in ops.flat_map(|op| programs.map(|merges| (op, merges))) {
            let srcs: Vec<_> = inputs.iter().map(|input| Source::from(&input[..])).collect();
            let divisor = (op == ReduceOp::Avg).then_some(3);
            let reduction = Reduction { op, merges, divisor };
            let results = [Isa::PLAIN, Isa::best()].map(|isa| {
                let mut result = random::<T>(10);
                T::reduce_kernel(
                    isa,
                    &reduction,
                    &[Target::from(&mut result[..])],
                    &srcs[..merges.len()],
                );
                result
            });
            assert!(same(&results[0], &results[1]), "{op} of {}: {results:?}", T::DTYPE);
        }

        let scaled = [Isa::PLAIN, Isa::best()].map(|isa| {
            let mut data = inputs[0].clone();
            T::scale_kernel(isa, Target::from(&mut data[..]), inputs[1][0]);
            data
        });
        assert!(same(&scaled[0], &scaled[1]), "{} scaled", T::DTYPE);

        let wide = [Isa::PLAIN, Isa::best()].map(|isa| {
            let mut wide = random::<T::Accumulator>(10);
            T::widen_kernel(isa, Target::from(&mut wide[..]), Source::from(&inputs[0][..]));
            wide
        });
        assert!(same(&wide[0], &wide[1]), "{} widened", T::DTYPE);
        let values = random::<T::Accumulator>(11);
        let narrow = [Isa::PLAIN, Isa::best()].map(|isa| {
            let mut narrow = random::<T>(10);
            T::narrow_kernel(isa, Target::from(&mut narrow[..]), Source::from(&values[..]));
            narrow
        });
        assert!(same(&narrow[0], &narrow[1]), "{} narrowed", T::DTYPE);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has the plain code only")]
    fn results_do_not_depend_on_the_instructions() {
        check::<u8>();
        check::<i8>();
        check::<u16>();
        check::<i16>();
        check::<u32>();
        check::<i32>();
        check::<u64>();
        check::<i64>();
        check::<f16>();
        check::<bf16>();
        check::<f32>();
        check::<f64>();
        check::<Bool>();
        check::<Complex<f32>>();
        check::<Complex<f64>>();
        check::<F8E4M3>();
        check::<F8E5M2>();
    }
}
