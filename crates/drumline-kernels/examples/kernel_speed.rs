//! Measures the kernels on this machine and compares them with the standard library's copy.
//!
//! ```text
//! cargo run --release -p drumline-kernels --example kernel_speed
//! ```
//!
//! Prints GB/s of memory traffic, which counts all bytes that are read or written: 2 -> 2 in place
//! moves twice as many bytes per element as a copy. The kernels take turns in several rounds, and
//! each row is the best of them, because other programs on the machine disturb some rounds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use drumline_kernels::{Element, ReduceOp, Source, Target, copy, f16, reduce_tree};

/// One arrangement of operands. `in_place`: the outputs are the first of the inputs.
struct Shape {
    name: &'static str,
    inputs: usize,
    outputs: usize,
    merges: &'static [usize],
    in_place: bool,
}

const SHAPES: [Shape; 8] = [
    Shape { name: "2->1", inputs: 2, outputs: 1, merges: &[0, 1], in_place: false },
    Shape { name: "2->1 in place", inputs: 2, outputs: 1, merges: &[0, 1], in_place: true },
    Shape { name: "2->2", inputs: 2, outputs: 2, merges: &[0, 1], in_place: false },
    Shape { name: "2->2 in place", inputs: 2, outputs: 2, merges: &[0, 1], in_place: true },
    Shape { name: "3->3 in place", inputs: 3, outputs: 3, merges: &[0, 1, 1], in_place: true },
    Shape { name: "4->1", inputs: 4, outputs: 1, merges: &[0, 1, 0, 2], in_place: false },
    Shape { name: "4->4 in place", inputs: 4, outputs: 4, merges: &[0, 1, 0, 2], in_place: true },
    Shape {
        name: "8->1",
        inputs: 8,
        outputs: 1,
        merges: &[0, 1, 0, 2, 0, 1, 0, 3],
        in_place: false,
    },
];

const ROUNDS: usize = 7;

fn main() {
    println!("{:<6}{:>12}  {:<16}{:>8}  {:>10}", "type", "bytes", "kernel", "GB/s", "/ memcpy");
    for bytes in [64 << 10, 1 << 20, 64 << 20] {
        measure::<f32>(bytes, 1.0);
        measure::<f16>(bytes, f16::ONE);
    }
    small::<f32>(1.0);
    small::<f16>(f16::ONE);
}

/// Measures all shapes with `bytes` per operand.
fn measure<T: Element>(bytes: usize, one: T) {
    let len = bytes / size_of::<T>();
    let mut memory: Vec<Vec<T>> = (0..10).map(|_| vec![one; len]).collect();
    let mut best = [Duration::MAX; SHAPES.len() + 2];
    // About 128 MiB per measurement.
    let calls = ((128 << 20) / bytes).max(2);
    for _ in 0..ROUNDS {
        let time = |f: &mut dyn FnMut()| {
            f();
            let start = Instant::now();
            (0..calls).for_each(|_| f());
            start.elapsed() / calls as u32
        };
        let (to, from) = memory.split_at_mut(1);
        best[0] = best[0].min(time(&mut || {
            to[0].copy_from_slice(black_box(&from[0]));
            black_box(&mut to[0]);
        }));
        best[1] = best[1].min(time(&mut || {
            copy(Target::from(&mut to[0][..]), Source::from(black_box(&from[0][..])));
        }));
        for (best, shape) in best[2..].iter_mut().zip(&SHAPES) {
            let (outputs, inputs) = memory.split_at_mut(2);
            let mut targets: Vec<Target<'_, T>> =
                inputs.iter_mut().map(|v| Target::from(&mut v[..])).collect();
            let sources: Vec<_> = targets[..shape.inputs].iter().map(|t| t.as_source()).collect();
            if !shape.in_place {
                targets = outputs.iter_mut().map(|v| Target::from(&mut v[..])).collect();
            }
            let dsts = &targets[..shape.outputs];
            *best = (*best).min(time(&mut || {
                // In place the sums grow to infinity, which is no slower.
                reduce_tree(ReduceOp::Sum, dsts, black_box(&sources), shape.merges, None);
            }));
        }
    }

    let speed =
        |operands: usize, time: Duration| (operands * bytes) as f64 / time.as_nanos() as f64;
    let memcpy = speed(2, best[0]);
    let print = |name: &str, speed: f64| {
        println!("{:<6}{bytes:>12}  {name:<16}{speed:>8.1}  {:>10.2}", T::DTYPE, speed / memcpy);
    };
    print("memcpy", memcpy);
    print("copy", speed(2, best[1]));
    for (shape, time) in SHAPES.iter().zip(&best[2..]) {
        print(shape.name, speed(shape.inputs + shape.outputs, *time));
    }
}

/// Measures the nanoseconds of a call with 8 bytes per operand.
fn small<T: Element>(one: T) {
    const CALLS: u32 = 1_000_000;
    for shape in &SHAPES {
        let mut memory: Vec<Vec<T>> = (0..10).map(|_| vec![one; 8 / size_of::<T>()]).collect();
        let targets: Vec<_> = memory.iter_mut().map(|v| Target::from(&mut v[..])).collect();
        let sources: Vec<_> = targets.iter().map(|t| t.as_source()).collect();
        let (dsts, srcs) = (&targets[..shape.outputs], &sources[..shape.inputs]);
        let round = || {
            let start = Instant::now();
            for _ in 0..CALLS {
                reduce_tree(ReduceOp::Sum, black_box(dsts), black_box(srcs), shape.merges, None);
            }
            start.elapsed().as_nanos() as f64 / f64::from(CALLS)
        };
        let best = (0..ROUNDS).map(|_| round()).fold(f64::MAX, f64::min);
        println!("{:<6}{:>12}  {:<16}{best:>8.1} ns a call", T::DTYPE, 8, shape.name);
    }
}
