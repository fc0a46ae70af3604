//! What the ranks of the tests do.

use std::{fs, io::Read, time::Duration};

use drumline::{
    Config, DType, ErrorKind, ProcessGroup, ReduceOp,
    algorithms::Rounding,
    bf16,
    ddp::{DdpOptions, GradientReducer, ParameterSpec},
    init_process_group,
};
use drumline_testing::tree_sum;

/// What a rank is told to do, in this variable.
pub(super) const TASK: &str = "DRUMLINE_TEST_TASK";
pub(super) const URL: &str = "DRUMLINE_TEST_URL";

/// A rank of the tests: this test's process, started again in a namespace.
#[test]
fn rank() {
    let Ok(task) = std::env::var(TASK) else { return };
    let config = Config::from_env().unwrap();
    let group = match init_process_group(&std::env::var(URL).unwrap(), &config) {
        Ok(group) => group,
        Err(error) => return println!("\nrefused: {error}"),
    };
    let mut sum = [group.rank() as f64 + 1.0];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    println!("\nsum: {}", sum[0]);
    if task == "fork, and work until something breaks" && group.rank() == 1 {
        let child = drumline_shm::fork_idle(120).unwrap();
        println!("child: {}", child.as_raw_nonzero());
        // Its connections are still its own.
        group.all_reduce(&mut [1.0_f32; 100_000], ReduceOp::Sum).unwrap();
        println!("goes on");
    }
    match &*task {
        "leave" => group.destroy().unwrap(),
        "work until something breaks"
        | "work until something breaks, and stay"
        | "fork, and work until something breaks" => loop {
            let error = match group.all_reduce(&mut [1.0_f32; 100_000], ReduceOp::Sum) {
                Ok(()) => continue,
                Err(error) => error,
            };
            assert_eq!(error.kind(), ErrorKind::Collective, "{error}");
            println!("culprit: {:?}: {error}", error.culprit());
            if task.ends_with("stay") {
                let _ = std::io::stdin().read(&mut [0]).unwrap();
            }
            return;
        },
        "be stopped" => {
            // The others call at once, this rank when it is let go on.
            if group.rank() == 0 {
                std::io::stdin().read_exact(&mut [0]).unwrap();
            }
            group.barrier().unwrap();
            println!("still there");
            group.destroy().unwrap();
        }
        "add in order" => {
            for len in [1, 1_000, 700_000] {
                let value = |rank: usize, index: usize| ((rank * 31 + index) as f32).sin() * 1e3;
                let mut data: Vec<f32> = (0..len).map(|index| value(group.rank(), index)).collect();
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                for (index, sum) in data.iter().enumerate() {
                    let column: Vec<f32> =
                        (0..group.world_size()).map(|rank| value(rank, index)).collect();
                    assert_eq!(
                        sum.to_bits(),
                        tree_sum(&column).to_bits(),
                        "element {index} of {len}"
                    );
                }
            }
            println!("same bits; shares memory: {}", drumline::algorithms::shares_memory(&group));
            group.destroy().unwrap();
        }
        "train" => {
            train(&group);
            group.destroy().unwrap();
        }
        "send what must be sent" => {
            send_what_must_be_sent(&group);
            send_in_few_messages(&group);
            group.destroy().unwrap();
        }
        "train, sharded and not" => {
            train_sharded_and_not(&group);
            group.destroy().unwrap();
        }
        other => panic!("{other}"),
    }
}

/// The elements of a block.
pub(super) const BLOCK: usize = 256 << 10;

/// Calls on a block for every rank, or on as much data, perhaps with a root on the other host. Says of each how many
/// bytes have left this host meanwhile.
fn send_what_must_be_sent(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let value = |rank: usize, index: usize| ((rank * 31 + index) as f32).sin() * 1e3;
    let measured = |name: &str, call: &mut dyn FnMut()| {
        // Between two barriers nobody sends anything else.
        let before = sent_from_here();
        group.barrier().unwrap();
        call();
        group.barrier().unwrap();
        println!("{name}: {}", sent_from_here() - before);
    };
    let own: Vec<f32> = (0..BLOCK).map(|index| value(rank, index)).collect();
    let mut all = vec![0.0; ranks * BLOCK];
    measured("all_gather", &mut || group.all_gather(&own, &mut all).unwrap());
    let of_all = (0..ranks).flat_map(|rank| (0..BLOCK).map(move |index| value(rank, index)));
    assert!(all.iter().copied().eq(of_all));

    let input: Vec<f32> = (0..ranks * BLOCK).map(|index| value(rank, index)).collect();
    let mut sum = vec![0.0; BLOCK];
    measured("reduce_scatter", &mut || {
        group.reduce_scatter(&input, &mut sum, ReduceOp::Sum).unwrap();
    });
    for (index, sum) in sum.iter().enumerate() {
        let column: Vec<f32> = (0..ranks).map(|it| value(it, rank * BLOCK + index)).collect();
        assert_eq!(sum.to_bits(), tree_sum(&column).to_bits(), "element {index}");
    }

    let mut data = input.clone();
    measured("broadcast", &mut || group.broadcast(&mut data, ranks - 1).unwrap());
    assert!(data.iter().enumerate().all(|(index, it)| *it == value(ranks - 1, index)));

    let mut data = input.clone();
    measured("reduce", &mut || group.reduce(&mut data, ReduceOp::Sum, ranks - 1).unwrap());
    for (index, sum) in data.iter().enumerate() {
        let column: Vec<f32> = (0..ranks).map(|rank| value(rank, index)).collect();
        let expected = if rank == ranks - 1 { tree_sum(&column) } else { column[rank] };
        assert_eq!(sum.to_bits(), expected.to_bits(), "element {index}");
    }

    let narrow = |rank: usize, index: usize| bf16::from_f32(value(rank, index));
    let mut data: Vec<bf16> = (0..ranks * BLOCK).map(|index| narrow(rank, index)).collect();
    measured("all_reduce of bf16", &mut || group.all_reduce(&mut data, ReduceOp::Sum).unwrap());
    for (index, sum) in data.iter().enumerate() {
        let column: Vec<f32> = (0..ranks).map(|rank| narrow(rank, index).to_f32()).collect();
        let hosts = column.chunks(ranks / 2).map(|host| bf16::from_f32(tree_sum(host)).to_f32());
        let expected = match group.config().rounding {
            Rounding::Once => tree_sum(&column),
            Rounding::Host => tree_sum(&hosts.collect::<Vec<f32>>()),
        };
        assert_eq!(*sum, bf16::from_f32(expected), "element {index}");
    }
}

/// How often short data is sent.
pub(super) const CALLS: u64 = 100;

/// The bytes before the data of a message.
pub(super) const HEADER: u64 = 64;

/// Calls on two elements of each rank, or for each rank. Says of each kind how many bytes have left this host
/// meanwhile, without the headers of packets.
fn send_in_few_messages(group: &ProcessGroup) {
    let (rank, ranks) = (group.rank(), group.world_size());
    let root = ranks - 1;
    let measured = |name: &str, call: &mut dyn FnMut()| {
        call(); // ranks connect when they first need to
        group.barrier().unwrap();
        let before = sent_in_packets();
        group.barrier().unwrap();
        for _ in 0..CALLS {
            call();
        }
        group.barrier().unwrap();
        println!("{name} of short data: {}", sent_in_packets() - before);
    };
    // Two elements from `from` for `to`.
    let block = |from: usize, to: usize| [(100 * from + to) as u32, 7];
    let for_all = |from: usize| (0..ranks).flat_map(move |to| block(from, to)).collect::<Vec<_>>();
    let of_all = |to: usize| (0..ranks).flat_map(move |from| block(from, to)).collect::<Vec<_>>();

    let mut gathered = vec![0; if rank == root { 2 * ranks } else { 0 }];
    measured("gather", &mut || group.gather(&block(rank, root), &mut gathered, root).unwrap());
    assert!(rank != root || gathered == of_all(root), "{gathered:?}");

    let mut own = [0; 2];
    let input = if rank == root { for_all(root) } else { vec![] };
    measured("scatter", &mut || group.scatter(&input, &mut own, root).unwrap());
    assert_eq!(own, block(root, rank));

    let (input, mut swapped) = (for_all(rank), vec![0; 2 * ranks]);
    measured("all_to_all", &mut || group.all_to_all(&input, &mut swapped).unwrap());
    assert_eq!(swapped, of_all(rank));
}

/// Steps of a model whose parameters differ in size. Says how many bytes have left this host in steps that give all
/// ranks all averages, and in steps that give owners theirs and bring their values to all ranks.
fn train_sharded_and_not(group: &ProcessGroup) {
    let elements = [200_000, 3_000, 180_000, 700, 64, 150_000, 90_000, 250];
    let specs: Vec<ParameterSpec> = elements
        .iter()
        .enumerate()
        .map(|(at, &elements)| ParameterSpec::new(format!("p{at}"), [elements], DType::F32))
        .collect();
    for (name, is_sharded) in [("plain", false), ("sharded", true)] {
        let options = DdpOptions::default().bucket_bytes(1 << 20).sharded(is_sharded);
        let reducer = GradientReducer::new(specs.clone(), &options, group).unwrap();
        let step = || {
            for (parameter, &elements) in elements.iter().enumerate().rev() {
                reducer.submit(parameter, vec![1.0_f32; elements].as_slice().into());
            }
            drop(reducer.finish().unwrap());
            if is_sharded {
                let read = |_, place: drumline::ddp::ValuesMut<'_>| {
                    let drumline::ddp::ValuesMut::F32(place) = place else { return false };
                    place.fill(1.0);
                    true
                };
                reducer.gather(read, |_, _| {}).unwrap();
            }
        };
        step(); // ranks connect, and the buckets are planned anew
        step();
        group.barrier().unwrap();
        let before = sent_in_packets();
        group.barrier().unwrap();
        (0..STEPS).for_each(|_| step());
        group.barrier().unwrap();
        println!("{name} steps: {}", sent_in_packets() - before);
    }
}

/// The bytes that have left this host over `eth0`.
fn sent_from_here() -> u64 {
    counters()[0]
}

/// The same without the headers of packets: 14 bytes of Ethernet, 20 of IP, 32 of TCP.
fn sent_in_packets() -> u64 {
    let [bytes, packets] = counters();
    bytes - 66 * packets
}

/// The bytes and the packets that have left this host over `eth0`.
fn counters() -> [u64; 2] {
    let table = fs::read_to_string("/proc/self/net/dev").unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    let columns: Vec<&str> = line.split_whitespace().collect();
    [8, 9].map(|column| columns[column].parse().unwrap())
}

const LAYERS: usize = 16;
const LAYER_ELEMENTS: usize = 256 * 1024;
const LAYER_MS: u64 = 25;
pub(super) const STEPS: usize = 5;

/// Backward passes whose layers take a while, and whose gradients go over a slow link. Of each, says how many
/// buckets came back before the last gradient.
fn train(group: &ProcessGroup) {
    let parameters = (0..LAYERS)
        .map(|layer| ParameterSpec::new(format!("layer{layer}"), [LAYER_ELEMENTS], DType::F32));
    let options = DdpOptions::default().bucket_bytes(2 << 20);
    let reducer = GradientReducer::new(parameters.collect(), &options, group).unwrap();
    let gradient = vec![1.0_f32; LAYER_ELEMENTS];
    for _ in 0..=STEPS {
        group.barrier().unwrap();
        reducer.begin_backward();
        for layer in (0..LAYERS).rev() {
            std::thread::sleep(Duration::from_millis(LAYER_MS));
            reducer.submit(layer, gradient.as_slice().into());
        }
        drop(reducer.finish().unwrap());
        let timeline = reducer.timeline();
        let hidden =
            timeline.buckets.iter().filter(|it| it.done_us <= timeline.backward_us).count();
        println!("{timeline}");
        println!("hidden: {hidden} {}", timeline.buckets.len());
    }
}
