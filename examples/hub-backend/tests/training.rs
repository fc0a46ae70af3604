//! What is built from collectives works on a backend as it is, to the same bits.

#![allow(clippy::unwrap_used)]

use std::thread;

use drumline::{
    Config, DType, ProcessGroup,
    ddp::{DdpOptions, GradientReducer, ParameterSpec},
};

const LENGTHS: [usize; 3] = [1_000, 7, 30];

/// What three ranks average, over a few steps, as bits.
fn averages(config: &Config) -> Vec<u32> {
    let rank = |group: ProcessGroup| {
        let specs = LENGTHS.map(|len| ParameterSpec::new("any", [len], DType::F32));
        let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(100);
        let reducer = GradientReducer::new(specs.into(), &options, &group).unwrap();
        let mut bits = Vec::new();
        for step in 0..3 {
            for (parameter, len) in LENGTHS.into_iter().enumerate().rev() {
                let value = |at| ((at + step) as f32 + 0.1 * group.rank() as f32).sin();
                let gradient: Vec<f32> = (0..len).map(value).collect();
                reducer.submit(parameter, gradient.as_slice().into());
            }
            let averaged = reducer.finish().unwrap();
            for parameter in 0..LENGTHS.len() {
                let gradient: &[f32] = averaged.get(parameter).unwrap();
                bits.extend(gradient.iter().map(|value| value.to_bits()));
            }
        }
        group.destroy().unwrap();
        bits
    };
    let groups = ProcessGroup::local_world_with(3, config).unwrap();
    let ranks: Vec<_> =
        groups.into_iter().map(|group| thread::spawn(move || rank(group))).collect();
    let mut bits: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    assert!(bits.iter().all(|of_rank| *of_rank == bits[0]));
    bits.remove(0)
}

#[test]
fn gradients_are_averaged_to_the_bits_of_the_built_in_backend() {
    hub_backend::register().unwrap();
    let hub = Config { backend: Some("hub".into()), ..Config::default() };
    let found = averages(&hub);
    assert_eq!(found, averages(&Config::default()));
    assert!(found.iter().any(|bits| *bits != 0));
}
