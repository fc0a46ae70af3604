//! DDP and AsyncReduce, which are built from collectives, give the same bits on this backend.

use drumline::{
    Config, DType, ProcessGroup,
    async_reduce::{AsyncReduceOptions, TensorRegistry},
    ddp::{DdpOptions, GradientReducer, ParameterSpec},
    train::local_with,
};

const LENGTHS: [usize; 3] = [1_000, 7, 30];

/// The result of three ranks, which must be equal.
fn same_on_three_ranks(config: &Config, rank: fn(ProcessGroup) -> Vec<u32>) -> Vec<u32> {
    let mut found = local_with(3, config, |group| Ok(rank(group))).unwrap();
    assert!(found.iter().all(|of_rank| *of_rank == found[0]));
    found.remove(0)
}

/// The averages of three ranks over a few steps, as bits.
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
    same_on_three_ranks(config, rank)
}

#[test]
fn gradients_are_averaged_to_the_bits_of_the_built_in_backend() {
    hub_backend::register().unwrap();
    let hub = Config::default().backend("hub");
    let found = averages(&hub);
    assert_eq!(found, averages(&Config::default()));
    assert!(found.iter().any(|bits| *bits != 0));
}

/// The averages of three ranks that bring tensors in different orders, as bits.
fn averages_by_name(config: &Config) -> Vec<u32> {
    let rank = |group: ProcessGroup| {
        let mut tensors = TensorRegistry::new();
        for len in LENGTHS {
            tensors.register::<f32>(len.to_string(), len).unwrap();
        }
        let options = AsyncReduceOptions::default().bucket_bytes(1_000);
        let mut reduce = tensors.freeze(&group, &options).unwrap();
        let mut bits = Vec::new();
        for step in 0..3 {
            for turn in 0..LENGTHS.len() {
                let len = LENGTHS[(turn + group.rank()) % LENGTHS.len()];
                let value = |at| ((at + step) as f32 + 0.1 * group.rank() as f32).sin();
                let gradient: Vec<f32> = (0..len).map(value).collect();
                reduce.async_reduce_from(&len.to_string(), &gradient).unwrap();
            }
            reduce.synchronize().unwrap();
            for len in LENGTHS {
                let average = reduce.gradient::<f32>(&len.to_string()).unwrap();
                bits.extend(average.iter().map(|value| value.to_bits()));
            }
        }
        reduce.stop().unwrap();
        group.destroy().unwrap();
        bits
    };
    same_on_three_ranks(config, rank)
}

#[test]
fn tensors_by_name_have_the_bits_of_the_built_in_backend() {
    hub_backend::register().unwrap();
    let hub = Config::default().backend("hub");
    assert_eq!(averages_by_name(&hub), averages_by_name(&Config::default()));
}
