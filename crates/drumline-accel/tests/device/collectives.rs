//! Every other call: the results of the host.

use drumline_accel::{DeviceGroup, DeviceSlice, DeviceWork, Result, Stream};
use drumline_group::{DType, Operator, ProcessGroup, ReduceOp};
use std::sync::Arc;

use crate::common::{Data, Member, bench, config, finish, small};

type On = fn(&DeviceGroup, &Arc<dyn Stream>, DeviceSlice, DeviceSlice, usize) -> Result<DeviceWork>;
type Host = fn(&ProcessGroup, &[f32], &mut [f32], usize) -> drumline_group::Result<()>;

/// A call: how long its input and its output are in blocks, here and at the root, and both forms of it. Calls without
/// an input change their output.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) input: Length,
    pub(crate) output: Length,
    pub(crate) on: On,
    pub(crate) host: Host,
}

pub(crate) enum Length {
    Empty,
    Block,
    Blocks,
    /// All blocks at the root.
    AtRoot,
}

impl Length {
    pub(crate) fn of(&self, block: usize, ranks: usize, is_root: bool) -> usize {
        match self {
            Length::Empty => 0,
            Length::Block => block,
            Length::Blocks => block * ranks,
            Length::AtRoot if is_root => block * ranks,
            Length::AtRoot => 0,
        }
    }
}

use Length::{AtRoot, Block, Blocks, Empty};

pub(crate) const CASES: [Case; 9] = [
    Case {
        name: "reduce",
        input: Empty,
        output: Block,
        on: |on, stream, _, data, root| on.reduce_on(stream, data, ReduceOp::Sum, root),
        host: |group, _, data, root| group.reduce(data, ReduceOp::Sum, root),
    },
    Case {
        name: "broadcast",
        input: Empty,
        output: Block,
        on: |on, stream, _, data, root| on.broadcast_on(stream, data, root),
        host: |group, _, data, root| group.broadcast(data, root),
    },
    Case {
        name: "all_gather",
        input: Block,
        output: Blocks,
        on: |on, stream, input, output, _| on.all_gather_on(stream, input, output),
        host: |group, input, output, _| group.all_gather(input, output),
    },
    Case {
        name: "reduce_scatter",
        input: Blocks,
        output: Block,
        on: |on, stream, input, output, _| {
            on.reduce_scatter_on(stream, input, output, ReduceOp::Avg)
        },
        host: |group, input, output, _| group.reduce_scatter(input, output, ReduceOp::Avg),
    },
    Case {
        name: "gather",
        input: Block,
        output: AtRoot,
        on: |on, stream, input, output, root| on.gather_on(stream, input, output, root),
        host: |group, input, output, root| group.gather(input, output, root),
    },
    Case {
        name: "scatter",
        input: AtRoot,
        output: Block,
        on: |on, stream, input, output, root| on.scatter_on(stream, input, output, root),
        host: |group, input, output, root| group.scatter(input, output, root),
    },
    Case {
        name: "all_to_all",
        input: Blocks,
        output: Blocks,
        on: |on, stream, input, output, _| on.all_to_all_on(stream, input, output),
        host: |group, input, output, _| group.all_to_all(input, output),
    },
    Case {
        name: "all_reduce, times a factor",
        input: Empty,
        output: Block,
        on: |on, stream, _, data, _| on.all_reduce_on(stream, data, Operator::premul_sum(0.3_f32)),
        host: |group, _, data, _| group.all_reduce(data, Operator::premul_sum(0.3_f32)),
    },
    Case {
        name: "all_reduce by a function",
        input: Empty,
        output: Block,
        on: |on, stream, _, data, _| {
            on.all_reduce_on(stream, data, Operator::custom("larger", f32::max))
        },
        host: |group, _, data, _| group.all_reduce(data, Operator::custom("larger", f32::max)),
    },
];

pub(crate) fn values(member: &Member, len: usize, salt: usize) -> Vec<f32> {
    let rank = member.rank();
    (0..len)
        .map(|index| ((index * 37 + rank * 101 + salt * 7) % 1_009) as f32 * 0.37 - 150.0)
        .collect()
}

#[test]
fn every_call_has_the_results_of_the_host() {
    let bench = bench();
    for ranks in 1..=5 {
        bench.world(ranks, &config(), |member| {
            let on = member.on(&small());
            let stream = member.stream();
            for (salt, case) in CASES.iter().enumerate() {
                for block in [0, 1, 1_000, 3_001] {
                    let root = (salt + block) % ranks;
                    let is_root = member.rank() == root;
                    let brought = values(&member, case.input.of(block, ranks, is_root), salt);
                    let mut expected =
                        values(&member, case.output.of(block, ranks, is_root), salt + 50);
                    let input = Data::new(&member.device, &brought);
                    let output = Data::new(&member.device, &expected);
                    [&input, &output].iter().for_each(|it| it.put(&*stream));
                    let work =
                        (case.on)(&on, &stream, input.slice(), output.slice(), root).unwrap();
                    work.join(&stream).unwrap();
                    [&input, &output].iter().for_each(|it| it.fetch(&*stream));
                    (case.host)(&member.group, &brought, &mut expected, root).unwrap();
                    finish(&stream);
                    work.wait().unwrap();
                    let what = format!("{}, {ranks} ranks, blocks of {block}", case.name);
                    assert!(output.found() == expected, "{what}");
                    assert!(input.found() == brought, "the input of {what}");
                }
            }
            on.destroy().unwrap();
        });
        bench.is_clean();
    }
}

#[test]
fn a_barrier_holds_streams_until_all_have_come() {
    let bench = bench();
    bench.world(4, &config(), |member| {
        let on = member.on(&small());
        let stream = member.stream();
        // The stream of rank 0 comes late: it waits for the sum that the others do without it.
        if member.rank() == 0 {
            member.group.barrier().unwrap();
        }
        let work = on.barrier_on(&stream).unwrap();
        if member.rank() > 0 {
            assert!(!work.is_done());
            member.group.barrier().unwrap();
        }
        work.join(&stream).unwrap();
        finish(&stream);
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn messages_run_beside_collectives_and_keep_their_order() {
    let bench = bench();
    bench.world(3, &config(), |member| {
        let (rank, on) = (member.rank(), member.on(&small()));
        let [stream, other] = [member.stream(), member.stream()];
        let to = (rank + 1) % 3;
        let from = (rank + 2) % 3;
        let received: Vec<Data<f32>> =
            (0..3).map(|_| Data::new(&member.device, &vec![0.0; 2_000])).collect();
        let sent: Vec<Data<f32>> =
            (0..3).map(|salt| Data::new(&member.device, &values(&member, 2_000, salt))).collect();
        // A sum that waits in its stream for a message which every rank sends behind it.
        received[0].put(&*stream);
        let first = on.recv_on(&stream, received[0].slice(), from, 7).unwrap();
        first.join(&stream).unwrap();
        let sum = on.all_reduce_on(&stream, received[0].slice(), ReduceOp::Sum).unwrap();
        sum.join(&stream).unwrap();
        received[0].fetch(&*stream);
        for data in &sent {
            data.put(&*other);
            on.send_on(&other, data.slice(), to, 7).unwrap().join(&other).unwrap();
            data.fetch(&*other);
        }
        for data in &received[1..] {
            data.put(&*other);
            let work = on.recv_on(&other, data.slice(), from, 7).unwrap();
            work.join(&other).unwrap();
            data.fetch(&*other);
        }
        [&stream, &other].into_iter().for_each(finish);
        let of = |rank: usize, salt: usize| {
            (0..2_000).map(move |index| {
                ((index * 37 + rank * 101 + salt * 7) % 1_009) as f32 * 0.37 - 150.0
            })
        };
        for (salt, data) in received.iter().enumerate().skip(1) {
            assert!(data.found().into_iter().eq(of(from, salt)), "message {salt}");
        }
        let mut expected: Vec<f32> = of(from, 0).collect();
        member.group.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
        assert!(received[0].found() == expected);
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn calls_of_one_kind_overtake_no_others() {
    let bench = bench();
    bench.world(4, &config(), |member| {
        let on = member.on(&small());
        // Each call has a stream of its own, so nothing but the group orders them.
        let calls: Vec<_> = (0..12)
            .map(|salt| {
                let stream = member.stream();
                let len = [5_000, 10, 2_048][salt % 3];
                let data = Data::new(&member.device, &values(&member, len, salt));
                data.put(&*stream);
                let work = match salt % 4 {
                    0 | 1 => on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum),
                    2 => on.broadcast_on(&stream, data.slice(), salt % 3),
                    _ => on.reduce_on(&stream, data.slice(), ReduceOp::Sum, salt % 3),
                };
                work.unwrap().join(&stream).unwrap();
                data.fetch(&*stream);
                (salt, len, stream, data)
            })
            .collect();
        for (salt, len, stream, data) in calls {
            let mut expected = values(&member, len, salt);
            match salt % 4 {
                0 | 1 => member.group.all_reduce(&mut expected, ReduceOp::Sum),
                2 => member.group.broadcast(&mut expected, salt % 3),
                _ => member.group.reduce(&mut expected, ReduceOp::Sum, salt % 3),
            }
            .unwrap();
            finish(&stream);
            assert!(data.found() == expected, "call {salt}");
        }
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn a_call_may_wait_in_its_stream_for_an_earlier_one() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let on = member.on(&small());
        let [stream, other] = [member.stream(), member.stream()];
        let data = Data::new(&member.device, &values(&member, 20_000, 1));
        let short = Data::new(&member.device, &values(&member, 100, 2));
        data.put(&*stream);
        let first = on.all_reduce_on(&stream, data.slice(), ReduceOp::Sum).unwrap();
        first.join(&other).unwrap();
        short.put(&*other);
        let second = on.reduce_on(&other, short.slice(), ReduceOp::Sum, 0).unwrap();
        second.join(&stream).unwrap();
        data.fetch(&*stream);
        short.fetch(&*stream);
        finish(&stream);
        let mut expected = values(&member, 20_000, 1);
        member.group.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
        assert!(data.found() == expected);
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn a_type_without_elements_is_no_problem() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let on = member.on(&small());
        let stream = member.stream();
        let work =
            on.all_reduce_on(&stream, DeviceSlice::empty(DType::F64), ReduceOp::Sum).unwrap();
        work.wait().unwrap();
        on.destroy().unwrap();
    });
    bench.is_clean();
}
