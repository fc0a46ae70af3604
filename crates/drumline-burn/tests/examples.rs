//! The programs of `examples/`, as a user starts them. What they print is compared with the training of one process, in
//! double precision and without burn.

#![allow(clippy::unwrap_used)]

use std::{env, process::Command};

/// What a program of `examples/` prints, line by line.
fn lines_of(example: &str) -> Vec<String> {
    let tests = env::current_exe().unwrap();
    let program = tests.parent().unwrap().with_file_name("examples").join(example);
    assert!(program.exists(), "build it first: cargo build -p drumline-burn --example {example}");
    let output = Command::new(&program).env_clear().output().unwrap();
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{out}{err}");
    let mut lines: Vec<String> = out.lines().map(str::to_owned).collect();
    lines.sort_unstable(); // ranks print when they come to it
    lines
}

/// The number behind each `before` in `line`.
fn numbers(line: &str, before: &str) -> Vec<f64> {
    let behind = line.split(before).skip(1);
    behind.map(|rest| rest.split([';', ',', ' ']).next().unwrap().parse().unwrap()).collect()
}

/// A straight line, flat at first, that learns to be y = 2x + 1.
#[derive(Default)]
struct Line {
    slope: f64,
    height: f64,
}

impl Line {
    /// The gradient of the mean of the squared errors at `xs`.
    fn gradient(&self, xs: &[f64]) -> [f64; 2] {
        let mut sum = [0.0; 2];
        for x in xs {
            let error = self.slope * x + self.height - (2.0 * x + 1.0);
            sum[0] += 2.0 * error * x;
            sum[1] += 2.0 * error;
        }
        sum.map(|sum| sum / xs.len() as f64)
    }

    fn step(&mut self, [slope, height]: [f64; 2]) {
        self.slope -= 0.1 * slope;
        self.height -= 0.1 * height;
    }
}

#[test]
fn uneven_inputs_are_joined_as_both_divisors_say() {
    let lines = lines_of("uneven_inputs");
    assert_eq!(lines.len(), 8, "{lines:#?}");
    let batches = [10, 7, 3, 0];
    for (lines, divisor) in lines.chunks(4).zip(["ActiveRanks", "InitialWorld"]) {
        let mut line = Line::default();
        for step in 0..10 {
            let active: Vec<usize> = (0..4).filter(|&rank| step < batches[rank]).collect();
            let mut sum = [0.0; 2];
            for &rank in &active {
                let first = (rank + 4 * step) as f64 / 20.0;
                let xs = [0.0, 0.1, 0.2, 0.3].map(|x| first + x);
                let gradient = line.gradient(&xs);
                sum = [sum[0] + gradient[0], sum[1] + gradient[1]];
            }
            let divided_by = if divisor == "ActiveRanks" { active.len() } else { 4 };
            line.step(sum.map(|sum| sum / divided_by as f64));
        }
        for (rank, found) in lines.iter().enumerate() {
            let (trained, shadowed) = (batches[rank], 10 - batches[rank]);
            let told =
                format!("{divisor}: rank {rank} trained {trained} steps and shadowed {shadowed}");
            assert!(found.starts_with(&told), "{found}");
            let weight = numbers(found, "weight ")[0];
            assert!(
                (weight - line.slope).abs() < 1e-5,
                "{found}, but one process has {}",
                line.slope
            );
            let digest = |line: &str| line.rsplit(' ').next().unwrap().to_owned();
            assert_eq!(digest(found), digest(&lines[0]));
        }
    }
}

#[test]
fn micro_batches_of_two_ranks_are_one_large_batch() {
    let lines = lines_of("accumulation");
    assert_eq!(lines.len(), 2, "{lines:#?}");
    let mut line = Line::default();
    for step in 0..20 {
        let xs: Vec<f64> =
            (0..24).map(|number| f64::from((step + number * 5) % 24) / 20.0).collect();
        line.step(line.gradient(&xs));
    }
    for (rank, found) in lines.iter().enumerate() {
        assert!(
            found.starts_with(&format!("rank {rank}: 2 ranks with 3 micro-batches")),
            "{found}"
        );
        let weights = numbers(found, "weight ");
        assert_eq!(weights.len(), 2, "{found}");
        for weight in weights {
            assert!((weight - line.slope).abs() < 1e-5, "{found}, but it should be {}", line.slope);
        }
    }
}
