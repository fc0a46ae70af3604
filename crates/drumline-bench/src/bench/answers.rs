//! Inputs whose results are known, and the count of elements that are wrong.
//!
//! An element depends on the rank, its place in the rank's buffer, and a salt that changes from
//! operation to operation. So neither a block in a wrong place nor the result of the previous operation
//! looks right. The values are small whole numbers: combined in any order they give the same exact
//! result in the type that sums are kept in. The result is rounded once, as the library promises.

use std::{collections::HashMap, ops::Range};

use bytemuck::{Pod, cast_slice};
use drumline::{
    Element, ReduceOp, bf16, f16,
    types::{Bool, Complex, F8E4M3, F8E5M2},
};

use super::operation::{Part, Source};

/// Values repeat after this many elements. It is a prime, so that no length of a block or piece is a
/// multiple of it.
const PERIOD: usize = 1009;

/// How many sets of inputs take turns.
pub(super) const SALTS: usize = 3;

/// A type that whole numbers can be put into.
pub(super) trait Sample: Element + Pod {
    /// The largest input value.
    const LARGEST: u64 = 3;

    /// `number / divisor`, rounded towards zero for integers. `number` first wraps to the type.
    fn quotient(number: i64, divisor: i64) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Sample for $type {
            fn quotient(number: i64, divisor: i64) -> $type {
                (i128::from(number as $type) / i128::from(divisor)) as $type
            }
        }
    )*};
}
integers!(u8, u16, u32, u64, i8, i16, i32, i64);

macro_rules! floats {
    ($($type:ty => $from:expr),*) => {$(
        impl Sample for $type {
            fn quotient(number: i64, divisor: i64) -> $type {
                $from(number, divisor)
            }
        }
    )*};
}
fn single(number: i64, divisor: i64) -> f32 {
    number as f32 / divisor as f32
}
fn double(number: i64, divisor: i64) -> f64 {
    number as f64 / divisor as f64
}
floats!(
    f32 => single,
    f64 => double,
    f16 => |number, divisor| f16::from_f32(single(number, divisor)),
    bf16 => |number, divisor| bf16::from_f32(single(number, divisor)),
    F8E4M3 => |number, divisor| F8E4M3::from_f32(single(number, divisor)),
    F8E5M2 => |number, divisor| F8E5M2::from_f32(single(number, divisor)),
    Complex<f32> => |number, divisor| Complex::new(single(number, divisor), 0.0),
    Complex<f64> => |number, divisor| Complex::new(double(number, divisor), 0.0)
);

impl Sample for Bool {
    const LARGEST: u64 = 1;

    fn quotient(number: i64, _: i64) -> Bool {
        Bool::from(number != 0)
    }
}

/// Element `index` of the input of `rank`.
fn value<T: Sample>(op: ReduceOp, ranks: usize, salt: usize, rank: usize, index: usize) -> i64 {
    let noise = |key: usize| {
        // SplitMix64.
        let mut bits =
            (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(salt as u64 + 1);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    };
    if op == ReduceOp::Product && T::LARGEST > 1 {
        // At most one rank has 2, all others have 1: the product is small for any number of ranks.
        return 1 + i64::from(noise(index) % (ranks as u64 + 1) == rank as u64);
    }
    (noise(rank * PERIOD + index) % (T::LARGEST + 1)) as i64
}

fn combined<T: Sample>(op: ReduceOp, values: impl Iterator<Item = i64>, count: usize) -> T {
    let whole = |number: Option<i64>| T::quotient(number.unwrap_or(0), 1);
    match op {
        ReduceOp::Product => whole(Some(values.product())),
        ReduceOp::Min => whole(values.min()),
        ReduceOp::Max => whole(values.max()),
        ReduceOp::Band => whole(values.reduce(|a, b| a & b)),
        ReduceOp::Bor => whole(values.reduce(|a, b| a | b)),
        ReduceOp::Bxor => whole(values.reduce(|a, b| a ^ b)),
        ReduceOp::Avg => T::quotient(values.sum(), count as i64),
        _ => whole(Some(values.sum())),
    }
}

/// The elements of one [`Source`], for one salt: twice a period, so that a period can start
/// anywhere.
#[derive(Debug)]
struct Pattern<T>(Vec<T>);

impl<T: Sample> Pattern<T> {
    fn new(source: &Source, op: ReduceOp, ranks: usize, salt: usize) -> Pattern<T> {
        let of = |rank, index| value::<T>(op, ranks, salt, rank, index);
        let element = |index| match source {
            Source::Rank(rank) => T::quotient(of(*rank, index), 1),
            Source::Combined(Range { start, end }) => {
                combined(op, (*start..*end).map(|rank| of(rank, index)), end - start)
            }
        };
        let period: Vec<T> = (0..PERIOD).map(element).collect();
        Pattern([&period[..], &period[..]].concat())
    }

    /// The period that begins with element `start`.
    fn from(&self, start: usize) -> &[T] {
        &self.0[start % PERIOD..][..PERIOD]
    }

    fn fill(&self, data: &mut [T]) {
        for chunk in data.chunks_mut(PERIOD) {
            chunk.copy_from_slice(&self.0[..chunk.len()]);
        }
    }

    /// How many elements of `data` differ in any bit from the pattern that begins at `start`.
    fn wrong(&self, data: &[T], start: usize) -> u64 {
        let period = self.from(start);
        let differ = |chunk: &[T]| {
            let expected = &period[..chunk.len()];
            if cast_slice::<T, u8>(chunk) == cast_slice::<T, u8>(expected) {
                return 0;
            }
            let bytes = |it: &T| bytemuck::bytes_of(it).to_vec();
            chunk.iter().zip(expected).filter(|(got, want)| bytes(got) != bytes(want)).count()
        };
        data.chunks(PERIOD).map(|chunk| differ(chunk) as u64).sum()
    }
}

/// The inputs of one rank, and the results that it must get.
#[derive(Debug)]
pub(super) struct Answers<T> {
    inputs: Vec<Pattern<T>>,
    parts: Vec<Part>,
    results: HashMap<(Source, usize), Pattern<T>>,
}

impl<T: Sample> Answers<T> {
    /// The answers for `rank`, one of `ranks`, whose output must consist of `parts`.
    pub(super) fn new(op: ReduceOp, ranks: usize, rank: usize, parts: Vec<Part>) -> Answers<T> {
        let pattern = |source: &Source, salt| Pattern::new(source, op, ranks, salt);
        let mut results = HashMap::new();
        for part in &parts {
            for salt in 0..SALTS {
                let key = (part.source.clone(), salt);
                results.entry(key).or_insert_with(|| pattern(&part.source, salt));
            }
        }
        let inputs = (0..SALTS).map(|salt| pattern(&Source::Rank(rank), salt)).collect();
        Answers { inputs, parts, results }
    }

    pub(super) fn fill(&self, salt: usize, data: &mut [T]) {
        self.inputs[salt % SALTS].fill(data);
    }

    /// How many elements of the output are wrong, or missing.
    pub(super) fn wrong(&self, salt: usize, output: &[T]) -> u64 {
        let mut rest = output;
        let mut wrong = 0;
        for part in &self.parts {
            let (mine, others) = rest.split_at(part.len.min(rest.len()));
            rest = others;
            wrong += (part.len - mine.len()) as u64;
            if let Some(pattern) = self.results.get(&(part.source.clone(), salt % SALTS)) {
                wrong += pattern.wrong(mine, part.start);
            }
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Range<usize> = 0..3;

    fn answers<T: Sample>(op: ReduceOp, len: usize) -> Answers<T> {
        let part = Part { source: Source::Combined(ALL), start: 0, len };
        Answers::new(op, ALL.len(), 1, vec![part])
    }

    /// The inputs of all ranks, combined by the library.
    fn reduced<T: Sample>(op: ReduceOp, salt: usize, len: usize) -> Vec<T> {
        let inputs: Vec<Vec<T>> = ALL
            .map(|rank| {
                let mut data = vec![T::quotient(0, 1); len];
                Pattern::new(&Source::Rank(rank), op, ALL.len(), salt).fill(&mut data);
                data
            })
            .collect();
        let outputs = std::thread::scope(|threads| {
            let groups = drumline::rendezvous::local_world(ALL.len()).unwrap();
            let ranks: Vec<_> = groups
                .into_iter()
                .zip(inputs)
                .map(|(group, mut data)| {
                    threads.spawn(move || {
                        group.all_reduce(&mut data, op).unwrap();
                        data
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        outputs.into_iter().next().unwrap()
    }

    fn right_results_are_right<T: Sample>() {
        for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(T::DTYPE)) {
            let answers = answers::<T>(op, 2500);
            let result = reduced::<T>(op, 1, 2500);
            assert_eq!(answers.wrong(1, &result), 0, "{op} of {}", T::DTYPE);
            assert_ne!(answers.wrong(2, &result), 0, "{op} of {}: of another operation", T::DTYPE);
        }
    }

    #[test]
    fn right_results_of_every_type_are_right() {
        right_results_are_right::<f32>();
        right_results_are_right::<f64>();
        right_results_are_right::<f16>();
        right_results_are_right::<bf16>();
        right_results_are_right::<F8E4M3>();
        right_results_are_right::<F8E5M2>();
        right_results_are_right::<u8>();
        right_results_are_right::<i8>();
        right_results_are_right::<i64>();
        right_results_are_right::<Bool>();
        right_results_are_right::<Complex<f32>>();
    }

    #[test]
    fn every_wrong_element_counts() {
        let answers = answers::<f32>(ReduceOp::Sum, 5000);
        let right = reduced::<f32>(ReduceOp::Sum, 0, 5000);
        let mut one = right.clone();
        one[4999] = f32::from_bits(one[4999].to_bits() ^ 1);
        assert_eq!(answers.wrong(0, &one), 1);
        one[17] += 1.0;
        assert_eq!(answers.wrong(0, &one), 2);
        assert_eq!(answers.wrong(0, &right[..4000]), 1000, "missing elements are wrong");

        let mut moved = right.clone();
        moved.copy_within(1024..2048, 0);
        assert!(answers.wrong(0, &moved) > 500, "a piece in the place of another");
        let nothing = vec![0.0; 5000];
        assert!(answers.wrong(0, &nothing) > 4000);
    }
}
