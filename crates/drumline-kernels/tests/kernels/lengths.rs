//! Every length from 0 to 4,096 elements, and every place of operands in a cache line. Kernels work on
//! blocks, and errors are likeliest at the elements that fill no block.

use drumline_kernels::{Element, ReduceOp, Source, Target};

use crate::{
    reference::{Reference, canonical, operators, random},
    table::reduce_tree,
};

const LONGEST: usize = if cfg!(miri) { 70 } else { 4_096 };
const LINE_BYTES: usize = 64;

/// Copies of some elements, one at each place in a cache line.
struct Placed<T> {
    /// For each place, the elements, and at least one more line on either side.
    buffers: Vec<Vec<T>>,
}

impl<T: Element> Placed<T> {
    fn new(elements: &[T], around: T) -> Placed<T> {
        let places = LINE_BYTES / size_of::<T>();
        let buffer = |place| {
            let mut buffer = vec![around; elements.len() + 4 * places];
            let at = Placed::start(&buffer, place);
            buffer[at..at + elements.len()].copy_from_slice(elements);
            buffer
        };
        Placed { buffers: (0..places).map(buffer).collect() }
    }

    /// Where the elements begin: `place` elements into a line, after at least one whole line.
    fn start(buffer: &[T], place: usize) -> usize {
        let places = LINE_BYTES / size_of::<T>();
        let addressed = buffer.as_ptr().addr() / size_of::<T>() % places;
        places + (places - addressed) % places + place
    }

    fn source(&self, place: usize, len: usize) -> Source<'_, T> {
        let buffer = &self.buffers[place % self.buffers.len()];
        let at = Placed::start(buffer, place % self.buffers.len());
        Source::from(&buffer[at..at + len])
    }
}

/// The inputs of some ranks, and their result by definition.
struct Inputs<T> {
    placed: Vec<Placed<T>>,
    expected: Vec<T>,
    merges: Vec<usize>,
}

impl<T: Reference> Inputs<T> {
    fn new(op: ReduceOp, ranks: usize) -> Inputs<T> {
        let value = |rank: usize, i: usize| T::random(random((rank << 20 | i) as u64), false);
        let of_rank = |rank| (0..LONGEST).map(|i| value(rank, i)).collect::<Vec<T>>();
        let values: Vec<Vec<T>> = (0..ranks).map(of_rank).collect();
        let column = |i: usize| values.iter().map(|values| values[i]).collect::<Vec<T>>();
        Inputs {
            expected: (0..LONGEST).map(|i| T::reduce(op, &column(i), Some(ranks))).collect(),
            placed: values.iter().map(|values| Placed::new(values, values[0])).collect(),
            merges: canonical(ranks),
        }
    }

    /// Reduces the first `len` elements, each operand at a place of its own.
    fn check(
        &self,
        op: ReduceOp,
        len: usize,
        places: impl Fn(usize) -> usize,
        into: &mut Placed<T>,
    ) {
        let ranks = self.placed.len();
        let srcs: Vec<Source<'_, T>> =
            self.placed.iter().enumerate().map(|(rank, it)| it.source(places(rank), len)).collect();
        let place = places(ranks) % into.buffers.len();
        let buffer = &mut into.buffers[place];
        let (at, untouched) = (Placed::start(buffer, place), buffer[0]);
        reduce_tree(
            op,
            &[Target::from(&mut buffer[at..at + len])],
            &srcs,
            &self.merges,
            Some(ranks),
        );
        let is_untouched = |element: &T| bytes(&[*element]) == bytes(&[untouched]);
        let what = || format!("{len} of {} at {place}, {op} of {ranks}", T::DTYPE);
        assert!(buffer[..at].iter().rev().take(LINE_BYTES).all(is_untouched), "{}", what());
        assert!(buffer[at + len..].iter().take(LINE_BYTES).all(is_untouched), "{}", what());
        let (found, expected) = (&buffer[at..at + len], &self.expected[..len]);
        let same = || found.iter().zip(expected).all(|(found, expected)| found.same(*expected));
        assert!(bytes(found) == bytes(expected) || same(), "{}", what());
        buffer[at..at + len].fill(untouched);
    }
}

fn bytes<T: Element>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

fn check<T: Reference>() {
    let places = LINE_BYTES / size_of::<T>();
    for op in operators::<T>() {
        let inputs = [2, 3, 8].map(|ranks| Inputs::<T>::new(op, ranks));
        let mut into = Placed::new(&[T::zeroed(); LONGEST], T::zeroed());
        for len in 0..=LONGEST {
            inputs[len % 3].check(op, len, |operand| len / 3 + 5 * operand, &mut into);
        }
        // Two inputs and the result, each at every place, in blocks and single elements.
        for place in 0..places * places {
            let (one, other) = (place / places, place % places);
            let len = (40 + place).min(LONGEST) % 200;
            inputs[0].check(op, len, |operand| [one, other, one + other][operand], &mut into);
            inputs[0].check(op, len, |operand| [one, 0, other][operand], &mut into);
        }
    }
}

#[test]
fn every_length_and_place_is_reduced_whole_and_not_an_element_more() {
    by_type!(T => check::<T>());
}
