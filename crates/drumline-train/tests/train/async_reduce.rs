//! `AsyncReduce` over shared memory, Unix sockets and TCP: tensors in random orders, the same bits
//! as one all-reduce, and what happens when a rank is late, wrong or dead.

use std::{
    env,
    process::Stdio,
    sync::{Arc, Barrier, mpsc},
    time::Duration,
};

use crate::common::{everywhere, everywhere_with, world_with};
use drumline_group::{
    Config, DType, ErrorKind, ProcessGroup, ReduceOp,
    auth::Secret,
    bf16,
    rendezvous::Endpoint,
    store::{
        Store,
        tcp::{TcpStore, TcpStoreServer},
    },
};
use drumline_testing::itself;
use drumline_train::async_reduce::{
    AsyncReduce, AsyncReduceOptions, MissingTensors, TensorRegistry,
};

/// Names and lengths of f32 tensors.
const TENSORS: [(&str, usize); 7] =
    [("a", 5), ("b", 70_000), ("c", 1), ("d", 33_333), ("e", 0), ("f", 64), ("g", 100_003)];

fn registry(tensors: &[(&str, usize)]) -> TensorRegistry {
    let mut registry = TensorRegistry::new();
    tensors.iter().for_each(|(name, len)| registry.register::<f32>(*name, *len).unwrap());
    registry
}

fn small_buckets() -> AsyncReduceOptions {
    AsyncReduceOptions::default().bucket_bytes(1 << 17)
}

fn engine(group: &ProcessGroup) -> AsyncReduce {
    registry(&TENSORS).freeze(group, &small_buckets()).unwrap()
}

/// Numbers that look random and depend on all arguments.
fn random(seed: [usize; 3]) -> u64 {
    let mixed = seed.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |hash, &part| {
        let hash = (hash ^ part as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash ^ hash >> 29
    });
    mixed.wrapping_mul(0x94d0_49bb_1331_11eb) >> 20
}

fn shuffled<T>(mut items: Vec<T>, seed: [usize; 2]) -> Vec<T> {
    for last in (1..items.len()).rev() {
        let other = random([seed[0], seed[1], last]) as usize % (last + 1);
        items.swap(last, other);
    }
    items
}

/// Values whose sums depend on the order of additions.
fn values(rank: usize, step: usize, tensor: usize, len: usize) -> Vec<f32> {
    let value = |index| {
        let bits = random([rank * 1000 + step, tensor, index]);
        (bits % 20_011) as f32 * 1.000_1_f32.powi((bits % 4_001) as i32 - 2_000)
    };
    (0..len).map(value).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn tensors_in_any_order_have_the_bits_of_a_plain_all_reduce() {
    everywhere(|config| {
        for world_size in [1, 2, 3, 5] {
            for op in [ReduceOp::Avg, ReduceOp::Sum] {
                world_with(world_size, config, |group| {
                    let rank = group.rank();
                    // Registered in another order on each rank, too.
                    let mut reduce = registry(&shuffled(TENSORS.to_vec(), [rank, 99]))
                        .freeze(&group, &small_buckets().op(op))
                        .unwrap();
                    for step in 0..4 {
                        let order = shuffled((0..TENSORS.len()).collect(), [rank, step]);
                        for (turn, tensor) in order.into_iter().enumerate() {
                            let (name, len) = TENSORS[tensor];
                            let own = values(rank, step, tensor, len);
                            if turn % 2 == 0 {
                                reduce.gradient_mut(name).unwrap().copy_from_slice(&own);
                                reduce.async_reduce(name).unwrap();
                            } else {
                                reduce.async_reduce_from(name, &own).unwrap();
                            }
                            assert!(reduce.gradient::<f32>(name).is_err(), "it is under way");
                        }
                        reduce.synchronize().unwrap();
                        for (tensor, (name, len)) in TENSORS.into_iter().enumerate() {
                            let mut plain = values(rank, step, tensor, len);
                            group.all_reduce(&mut plain, op).unwrap();
                            let ours = reduce.gradient::<f32>(name).unwrap();
                            assert_eq!(bits(ours), bits(&plain), "{name} in step {step}");
                        }
                    }
                    assert_eq!(reduce.counts().steps, 4);
                    reduce.stop().unwrap();
                    group.destroy().unwrap();
                });
            }
        }
    });
}

#[test]
fn tensors_of_several_types_travel_together() {
    everywhere(|config| {
        world_with(3, config, |group| {
            let rank = group.rank();
            let mut tensors = TensorRegistry::new();
            tensors.register::<f64>("f64", 3).unwrap();
            tensors.register::<bf16>("bf16", 1001).unwrap();
            tensors.register::<i32>("i32", 7).unwrap();
            tensors.register::<f64>("more f64", 20_000).unwrap();
            let options = AsyncReduceOptions::default().op(ReduceOp::Sum);
            let mut reduce = tensors.freeze(&group, &options).unwrap();
            for step in 1..=3 {
                for name in shuffled(vec!["f64", "bf16", "i32", "more f64"], [rank, step]) {
                    match name {
                        "bf16" => reduce.gradient_mut::<bf16>(name).unwrap().fill(bf16::ONE),
                        "i32" => reduce.gradient_mut::<i32>(name).unwrap().fill(rank as i32 - 5),
                        _ => reduce.gradient_mut::<f64>(name).unwrap().fill(step as f64),
                    }
                    reduce.async_reduce(name).unwrap();
                }
                reduce.synchronize().unwrap();
                assert_eq!(reduce.gradient::<f64>("f64").unwrap(), [3.0 * step as f64; 3]);
                assert_eq!(reduce.gradient::<bf16>("bf16").unwrap(), [bf16::from_f32(3.0); 1001]);
                assert_eq!(reduce.gradient::<i32>("i32").unwrap(), [-12; 7]);
                let long = reduce.gradient::<f64>("more f64").unwrap();
                assert!(long.iter().all(|value| *value == 3.0 * step as f64));
            }
            let error = reduce.fused::<f64>().unwrap_err().to_string();
            assert_eq!(
                error,
                "fused: tensor `bf16` bf16[1001] is not of f64 (drumline explain argument)"
            );
            reduce.stop().unwrap();
        });
    });
}

#[test]
fn all_tensors_lie_in_one_buffer_that_stays_where_it_is() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let mut reduce = engine(&group);
            let start = reduce.as_mut_ptr();
            for step in 1..=3 {
                for (tensor, (name, _)) in TENSORS.iter().enumerate() {
                    reduce.gradient_mut::<f32>(name).unwrap().fill((tensor * step) as f32);
                }
                reduce.async_reduce("b").unwrap();
                assert!(reduce.fused::<f32>().is_err(), "a part is under way");
                reduce.sync_grad().unwrap();
                let sum: f32 = (0..7).map(|it| (it * step * TENSORS[it].1) as f32).sum();
                let fused = reduce.fused::<f32>().unwrap();
                assert_eq!(fused.iter().sum::<f32>(), sum, "nothing but the tensors is there");
                assert_eq!(fused.as_mut_ptr().cast(), start);
                for (name, len) in TENSORS {
                    let place = reduce.place(name).unwrap();
                    assert_eq!((place.len, place.dtype), (len, DType::F32));
                    let address = reduce.gradient::<f32>(name).unwrap().as_ptr();
                    assert_eq!(address.cast(), start.wrapping_add(place.bytes.start).cast_const());
                    assert!(place.bytes.start.is_multiple_of(64));
                }
            }
            reduce.stop().unwrap();
        });
    });
}

#[test]
fn neighbours_that_are_ready_together_travel_as_one() {
    world_with(2, &Config::default(), |group| {
        // All have come before the first one can be agreed on: rank 1 begins when rank 0 has ended.
        let tensors: Vec<_> = (0..20).map(|number| format!("t{number}")).collect();
        let mut registry = TensorRegistry::new();
        tensors.iter().for_each(|name| registry.register::<f32>(name, 40_000).unwrap());
        let mut reduce = registry.freeze(&group, &small_buckets()).unwrap();
        for step in 0..5 {
            if group.rank() == 1 {
                group.barrier().unwrap();
            }
            for name in shuffled(tensors.iter().collect(), [group.rank(), step]) {
                reduce.async_reduce(name).unwrap();
            }
            if group.rank() == 0 {
                group.barrier().unwrap();
            }
            reduce.synchronize().unwrap();
        }
        let counts = reduce.counts();
        assert!(counts.all_reduces < 5 * 20 && counts.rounds < 5 * 20, "{counts:?}");
        reduce.stop().unwrap();
    });
}

#[test]
fn gradients_of_several_backward_passes_are_added_by_the_caller() {
    world_with(2, &Config::default(), |group| {
        let mut reduce = registry(&[("w", 2)]).freeze(&group, &small_buckets()).unwrap();
        for _ in 0..3 {
            reduce.gradient_mut::<f32>("w").unwrap().fill(0.0);
            for micro_batch in [1.0, 2.0, 4.0] {
                let place = reduce.gradient_mut::<f32>("w").unwrap();
                place.iter_mut().for_each(|value| *value += micro_batch * group.rank() as f32);
            }
            let rounds = reduce.counts().rounds;
            assert_eq!(rounds, reduce.counts().rounds, "nothing travels");
            reduce.sync_grad().unwrap();
            assert_eq!(reduce.gradient::<f32>("w").unwrap(), [3.5; 2]);
        }
        reduce.stop().unwrap();
    });
}

#[test]
fn a_tensor_that_is_not_brought_is_named_on_every_rank_and_the_next_step_goes_on() {
    everywhere(|config| {
        world_with(3, config, |group| {
            let rank = group.rank();
            let mut reduce = engine(&group);
            for step in 1..=6 {
                let is_bad = step % 2 == 0;
                for (name, _) in shuffled(TENSORS.to_vec(), [rank, step]) {
                    reduce.gradient_mut::<f32>(name).unwrap().fill(rank as f32);
                    let leaves_out = rank == 2 && (name == "d" || name == "a") && is_bad;
                    if !leaves_out {
                        reduce.async_reduce(name).unwrap();
                    }
                }
                let result = reduce.synchronize();
                if !is_bad {
                    result.unwrap();
                    assert_eq!(reduce.gradient::<f32>("f").unwrap(), [1.0; 64]);
                    continue;
                }
                let error = result.unwrap_err();
                assert!(error.cause().is_none(), "{error}");
                let missing = error.detail::<Vec<MissingTensors>>().unwrap();
                assert_eq!((missing.len(), missing[0].rank), (1, 2));
                let mut names = missing[0].tensors.clone();
                names.sort_unstable();
                assert_eq!(names, ["a", "d"]);
                assert_eq!(
                    error.to_string(),
                    format!(
                        "step {step}: rank 2 has not brought `a`, `d`; every rank brings every \
                         tensor once in each step (drumline explain missing-gradients)"
                    )
                );
            }
            assert_eq!(reduce.counts().steps, 3);
            reduce.stop().unwrap();
        });
    });
}

#[test]
fn several_ranks_with_missing_tensors_are_all_named() {
    world_with(3, &Config::default(), |group| {
        let mut reduce = engine(&group);
        if group.rank() == 1 {
            TENSORS[1..].iter().for_each(|(name, _)| reduce.async_reduce(name).unwrap());
        }
        let error = reduce.synchronize().unwrap_err().to_string();
        let all = "`a`, `b`, `c`, `d`, `e`, `f`, `g`";
        assert_eq!(
            error,
            format!(
                "step 1: rank 0 has not brought {all}; rank 1 has not brought `a`; rank 2 has not \
                 brought {all}; every rank brings every tensor once in each step \
                 (drumline explain missing-gradients)"
            )
        );
        reduce.sync_grad().unwrap();
        reduce.stop().unwrap();
    });
}

#[test]
fn a_rank_that_does_not_go_on_is_named_together_with_its_tensors() {
    let impatient =
        Config::default().timeout(Duration::from_secs(2)).warn_after(Duration::from_millis(500));
    everywhere_with(&impatient, |config| {
        let others_have_failed = Barrier::new(3);
        let patient = config.clone().timeout(Duration::from_secs(60));
        world_with(3, &patient, |world| {
            let options = drumline_group::GroupOptions::default().config(config.clone());
            let group = world.new_group(&[0, 1, 2], &options).unwrap();
            let rank = group.rank();
            let mut reduce = engine(&group);
            world.barrier().unwrap();
            // All but "d", and that by all but rank 2, in a first round; "g" comes last everywhere.
            for name in ["a", "b", "c", "e", "f"] {
                reduce.async_reduce(name).unwrap();
            }
            if rank == 2 {
                reduce.async_reduce("g").unwrap();
                others_have_failed.wait();
                // It hears of it where it next needs the others.
                let result = reduce.async_reduce("d").and_then(|()| reduce.synchronize());
                let error = result.unwrap_err().to_string();
                assert!(error.contains("reports: "), "{error}");
                assert!(error.contains("without an answer from rank 2"), "{error}");
                return;
            }
            reduce.async_reduce("d").unwrap();
            reduce.async_reduce("g").unwrap();
            let error = reduce.synchronize().unwrap_err();
            others_have_failed.wait();
            let text = error.to_string();
            assert!(text.starts_with("step 1: rank 2 has not brought `d`; "), "{text}");
            assert_eq!((error.kind(), error.culprit()), (ErrorKind::NotBrought, Some(2)), "{text}");
            assert!(error.cause().is_some(), "{text}");
            // It has failed for good.
            let again = reduce.gradient::<f32>("a").unwrap_err().to_string();
            assert_eq!(again, text);
            assert_eq!(reduce.synchronize().unwrap_err().to_string(), text);
            assert_eq!(reduce.stop().unwrap_err().to_string(), text);
        });
    });
}

#[test]
fn ranks_that_register_other_tensors_are_told_so() {
    type Register = fn(&mut TensorRegistry) -> drumline_group::Result<()>;
    let cases: [(Register, &str); 4] = [
        (|it| it.register::<f32>("w", 5), "rank 1: parameter `w` is f32[5], rank 0 has f32[4]"),
        (|it| it.register::<f64>("w", 4), "rank 1: parameter `w` is f64[4], rank 0 has f32[4]"),
        (
            |it| it.register::<f32>("x", 4),
            "rank 1 has parameter `x` f32[4] where rank 0 has parameter `w` f32[4]",
        ),
        (
            |it| it.register::<f32>("w", 4).and_then(|()| it.register::<f32>("z", 1)),
            "rank 1 has parameter `z` f32[1]",
        ),
    ];
    for (other, wanted) in cases {
        let answers = world_with(2, &Config::default(), |group| {
            let mut tensors = registry(&[("b", 1)]);
            match group.rank() {
                0 => tensors.register::<f32>("w", 4).unwrap(),
                _ => other(&mut tensors).unwrap(),
            }
            let error = tensors.freeze(&group, &small_buckets()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ModelsDiffer, "{error}");
            // The group itself is none the worse for it.
            group.barrier().unwrap();
            error.to_string()
        });
        assert_eq!(answers[0], answers[1]);
        assert!(answers[0].contains(wanted), "{}", answers[0]);
    }
    let answers = world_with(2, &Config::default(), |group| {
        let options = AsyncReduceOptions::default().bucket_bytes(1000 + group.rank());
        registry(&TENSORS).freeze(&group, &options).unwrap_err().to_string()
    });
    assert!(answers[0].contains("option `bucket limits`"), "{}", answers[0]);
}

#[test]
fn ranks_with_different_operators_are_told_both() {
    world_with(2, &Config::default(), |group| {
        let op = [ReduceOp::Sum, ReduceOp::Avg][group.rank()];
        let mut reduce = registry(&TENSORS).freeze(&group, &small_buckets().op(op)).unwrap();
        let error = reduce.sync_grad().unwrap_err().to_string();
        assert!(error.contains("all_reduce(sum)") && error.contains("all_reduce(avg)"), "{error}");
    });
}

#[test]
fn an_engine_moves_between_threads() {
    fn is_shared_between_threads<T: Send + Sync>() {}
    is_shared_between_threads::<AsyncReduce>();
    let mut reduce = engine(&ProcessGroup::alone());
    let reduce = std::thread::spawn(move || {
        reduce.sync_grad().unwrap();
        reduce
    });
    reduce.join().unwrap().stop().unwrap();
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let group = ProcessGroup::alone();
    let options = AsyncReduceOptions::default();
    let error = TensorRegistry::new().freeze(&group, &options).unwrap_err();
    assert_eq!(error.to_string(), "freeze: no tensor is registered (drumline explain argument)");
    let error = registry(&TENSORS).freeze(&group, &options.clone().op(ReduceOp::Band)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "freeze: tensor `a` f32[5] cannot be reduced by band (drumline explain argument)"
    );
    let mut tensors = TensorRegistry::new();
    let error = tensors.register::<f64>("long", usize::MAX / 8 + 1).unwrap_err();
    assert!(error.to_string().contains("is too long"), "{error}");

    let mut reduce = engine(&group);
    let text = |error: drumline_group::Result<()>| error.unwrap_err().to_string();
    assert_eq!(
        text(reduce.async_reduce("x")),
        "async_reduce: no tensor `x` is registered; there are `a`, `b`, `c`, `d`, `e`, `f`, `g` \
         (drumline explain argument)"
    );
    assert_eq!(
        text(reduce.gradient_mut::<f64>("a").map(drop)),
        "gradient_mut: tensor `a` f32[5] is not of f64 (drumline explain argument)"
    );
    assert_eq!(
        text(reduce.async_reduce_from("a", &[1.0_f32])),
        "async_reduce_from: tensor `a` f32[5] cannot take 1 elements (drumline explain argument)"
    );
    reduce.async_reduce("a").unwrap();
    assert_eq!(
        text(reduce.async_reduce("a")),
        "async_reduce: tensor `a` was brought in this step before: each once, then `synchronize` \
         (drumline explain argument)"
    );
    assert!(text(reduce.async_reduce_from("a", &[1.0_f32; 5])).contains("is being reduced"));
    reduce.gradient_mut::<f32>("c").unwrap().fill(2.0); // its neighbour is not under way
    assert_eq!(
        text(reduce.stop()),
        "stop: tensor `a` was brought and not synchronized: the other ranks wait for the end of \
         the step (drumline explain argument)"
    );
}

#[test]
fn an_engine_that_is_dropped_in_mid_step_is_named_by_the_others() {
    everywhere(|config| {
        let all_have_ended = Barrier::new(3);
        world_with(3, config, |group| {
            let mut reduce = engine(&group);
            reduce.sync_grad().unwrap();
            all_have_ended.wait(); // who aborts breaks off what others have not ended
            reduce.async_reduce("b").unwrap();
            if group.rank() == 1 {
                drop(reduce);
                return;
            }
            let error = reduce.sync_grad().unwrap_err().to_string();
            assert!(error.contains("rank 1"), "{error}");
            assert!(error.contains("has aborted the group"), "{error}");
        });
    });
}

#[test]
fn tensors_stay_where_they_are_when_an_engine_is_left() {
    world_with(2, &Config::default(), |group| {
        let mut reduce = engine(&group);
        reduce.gradient_mut::<f32>("a").unwrap().fill(group.rank() as f32);
        reduce.sync_grad().unwrap();
        let address = reduce.as_mut_ptr();
        reduce.leave(Duration::from_secs(60)).unwrap();
        assert_eq!(reduce.gradient::<f32>("a").unwrap(), [0.5; 5]);
        assert_eq!(reduce.as_mut_ptr(), address);
        assert!(reduce.sync_grad().is_err());
    });
}

#[test]
fn an_engine_that_is_left_in_mid_step_is_named_by_the_others() {
    world_with(2, &Config::default(), |group| {
        let mut reduce = engine(&group);
        reduce.async_reduce("b").unwrap();
        if group.rank() == 1 {
            assert!(reduce.leave(Duration::from_secs(60)).is_err());
            return;
        }
        let error = reduce.sync_grad().unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("has aborted the group"), "{error}");
    });
}

#[test]
fn an_engine_that_is_dropped_between_steps_is_named_by_those_that_go_on() {
    world_with(2, &Config::default(), |group| {
        let mut reduce = engine(&group);
        reduce.sync_grad().unwrap();
        if group.rank() == 1 {
            return;
        }
        let error = reduce.sync_grad().unwrap_err().to_string();
        assert!(error.contains("rank 1 has closed the group"), "{error}");
    });
}

#[test]
fn engines_work_side_by_side_and_beside_their_group() {
    everywhere(|config| {
        world_with(2, config, |group| {
            let mut engines = [engine(&group), engine(&group)];
            for step in 0..20 {
                // Which engine comes first differs; so do calls of the group between.
                let order = shuffled(vec![0, 1], [group.rank(), step]);
                for &number in &order {
                    let reduce = &mut engines[number];
                    for (name, _) in shuffled(TENSORS.to_vec(), [group.rank(), step]) {
                        reduce.gradient_mut::<f32>(name).unwrap().fill((number + step) as f32);
                        reduce.async_reduce(name).unwrap();
                    }
                }
                let mut sum = [1_u32];
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [2]);
                for &number in &order {
                    engines[number].synchronize().unwrap();
                    let value = engines[number].gradient::<f32>("g").unwrap()[100_002];
                    assert_eq!(value, (number + step) as f32);
                }
            }
            for reduce in engines {
                reduce.stop().unwrap();
            }
        });
    });
}

/// KiB of memory, descriptors and threads of this process. Without shared memory, whose pages are
/// counted once for each mapping through which they were touched.
fn resources() -> (usize, usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    let memory_kib = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    (memory_kib, count("/proc/self/fd"), count("/proc/self/task"))
}

/// A thousand steps: a process of its own, where nobody else opens descriptors.
#[test]
fn a_thousand_steps_leave_nothing_behind() {
    const CHILD: &str = "ASYNC_REDUCE_STEPS";
    if env::var(CHILD).is_err() {
        let status = itself("async_reduce::a_thousand_steps_leave_nothing_behind")
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    everywhere(|config| {
        let (sender, receiver) = mpsc::channel();
        let sender = Arc::new(std::sync::Mutex::new(sender));
        world_with(2, config, |group| {
            let mut reduce = engine(&group);
            for step in 0..1_100 {
                for (name, _) in shuffled(TENSORS.to_vec(), [group.rank(), step]) {
                    reduce.async_reduce(name).unwrap();
                }
                reduce.synchronize().unwrap();
                if step == 99 || step == 1_099 {
                    group.barrier().unwrap();
                    if group.rank() == 0 {
                        sender.lock().unwrap().send(resources()).unwrap();
                    }
                    group.barrier().unwrap();
                }
            }
            assert_eq!(reduce.counts().steps, 1_100);
            reduce.stop().unwrap();
        });
        let (before, after) = (receiver.recv().unwrap(), receiver.recv().unwrap());
        // Connections that were opened from both ends at once are given up some time later.
        let grows = after.1 > before.1 || after.2 > before.2;
        assert!(!grows, "descriptors and threads: {before:?} became {after:?}");
        assert!(after.0 < before.0 + 1024, "{} KiB became {}", before.0, after.0);
    });
}

/// How ranks of processes talk, by number.
fn over(number: usize) -> Config {
    Config::default().shared_memory(number == 0).unix_sockets(number < 2)
}

/// What a rank of three processes does: some steps, then rank 1 dies in the middle of one.
#[test]
fn rank_process() {
    const LAST_STEP: usize = 5;
    let Ok(rank) = env::var("ASYNC_REDUCE_RANK") else { return };
    let rank: usize = rank.parse().unwrap();
    let secret = Secret::new(SECRET).unwrap();
    let endpoint = Endpoint::Unix(env::var("ASYNC_REDUCE_STORE").unwrap());
    let minute = Duration::from_secs(60);
    let store = Arc::new(TcpStore::connect_secured(&endpoint, &secret, minute).unwrap());
    let number: usize = env::var("ASYNC_REDUCE_OVER").unwrap().parse().unwrap();
    let config = over(number).secret(secret);
    let group =
        drumline_group::rendezvous::connect("world", store.clone(), rank, 3, &config).unwrap();
    let mut reduce = engine(&group);
    assert_eq!(drumline_group::algorithms::shares_memory(&group), number == 0);
    for step in 1..=LAST_STEP {
        if step == LAST_STEP {
            // Who dies breaks off what others have not ended.
            store.set(&format!("{rank} has come so far"), b"yes").unwrap();
        }
        let order = shuffled((0..TENSORS.len()).collect(), [rank, step]);
        let mut expected = Vec::new();
        for (turn, tensor) in order.into_iter().enumerate() {
            let (name, len) = TENSORS[tensor];
            if rank == 1 && step == LAST_STEP && turn == 3 {
                let others = ["0 has come so far", "2 has come so far"];
                store.wait(&others, minute).unwrap();
                std::process::exit(9); // nothing is dropped, nobody is told
            }
            let brought = reduce.async_reduce_from(name, &values(rank, step, tensor, len));
            if step < LAST_STEP {
                brought.unwrap();
                expected.push((tensor, name, len));
            }
        }
        let result = reduce.synchronize();
        if step < LAST_STEP {
            result.unwrap();
            expected.sort_unstable();
            for (tensor, name, len) in expected {
                let mut plain = values(rank, step, tensor, len);
                group.all_reduce(&mut plain, ReduceOp::Avg).unwrap();
                assert_eq!(bits(reduce.gradient(name).unwrap()), bits(&plain));
            }
            continue;
        }
        let error = result.unwrap_err();
        if let Some(missing) = error.detail::<Vec<MissingTensors>>() {
            assert_eq!((missing.len(), missing[0].rank), (1, 1), "{error}");
        }
        assert!(error.cause().is_some(), "{error}");
        assert_eq!(error.culprit(), Some(1), "{error}");
        assert!(error.to_string().contains("the process of rank 1 has ended"), "{error}");
    }
}

const SECRET: &str = "a secret of this test only";

#[test]
fn survivors_name_the_process_that_died_in_mid_step() {
    for number in 0..3 {
        let name = format!("async-reduce-{}-{number}", std::process::id());
        let secret = Secret::new(SECRET).unwrap();
        let _server = TcpStoreServer::bind_secured(&Endpoint::Unix(name.clone()), &secret).unwrap();
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                itself("async_reduce::rank_process")
                    .env("ASYNC_REDUCE_RANK", rank.to_string())
                    .env("ASYNC_REDUCE_STORE", &name)
                    .env("ASYNC_REDUCE_OVER", number.to_string())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let outputs: Vec<_> = ranks.into_iter().map(|it| it.wait_with_output().unwrap()).collect();
        for output in outputs.iter().filter(|output| output.status.code() == Some(101)) {
            println!("{}", String::from_utf8_lossy(&output.stdout));
            println!("{}", String::from_utf8_lossy(&output.stderr));
        }
        let codes: Vec<_> = outputs.iter().map(|output| output.status.code()).collect();
        assert_eq!(codes, [Some(0), Some(9), Some(0)], "see the output of the ranks above");
    }
}
