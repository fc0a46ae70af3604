//! Calls whose blocks differ in length, on data in pieces.

use std::sync::Arc;

use drumline_accel::{DeviceGroup, DeviceSlice, DeviceWork, Result, Stream};
use drumline_group::{DType, ErrorKind, ProcessGroup, ReduceOp};

use crate::common::{Data, bench, config, finish, small};

type Pieces<'a> = &'a [DeviceSlice];
type On = fn(&DeviceGroup, &Arc<dyn Stream>, Pieces<'_>, Pieces<'_>, &Counts) -> Result<DeviceWork>;
type Host = fn(&ProcessGroup, &[f32], &mut [f32], &Counts) -> drumline_group::Result<()>;

/// A call, with what each rank has: a number of elements for each rank, by rank.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) on: On,
    pub(crate) host: Host,
    pub(crate) input: fn(&Counts) -> usize,
    pub(crate) output: fn(&Counts) -> usize,
}

pub(crate) struct Counts {
    rank: usize,
    root: usize,
    counts: Vec<usize>,
    send: Vec<usize>,
    recv: Vec<usize>,
}

impl Counts {
    pub(crate) fn new(rank: usize, ranks: usize, salt: usize) -> Counts {
        let pair = |from: usize, to: usize| (from * 5 + to * 3 + salt) % 7 * 100;
        Counts {
            rank,
            root: salt % ranks,
            counts: (0..ranks).map(|k| (k * 3 + salt) % 5 * 100).collect(),
            send: (0..ranks).map(|to| pair(rank, to)).collect(),
            recv: (0..ranks).map(|from| pair(from, rank)).collect(),
        }
    }

    fn all(&self) -> usize {
        self.counts.iter().sum()
    }

    fn at_root(&self) -> usize {
        if self.rank == self.root { self.all() } else { 0 }
    }

    fn own(&self) -> usize {
        self.counts[self.rank]
    }
}

pub(crate) const CASES: [Case; 5] = [
    Case {
        name: "all_gather_v",
        on: |on, stream, input, output, of| on.all_gather_v_on(stream, input, output, &of.counts),
        host: |group, input, output, of| group.in_blocks(&of.counts).all_gather(input, output),
        input: Counts::own,
        output: Counts::all,
    },
    Case {
        name: "reduce_scatter_v",
        on: |on, stream, input, output, of| {
            on.reduce_scatter_v_on(stream, input, &of.counts, output, ReduceOp::Avg)
        },
        host: |group, input, output, of| {
            group.in_blocks(&of.counts).reduce_scatter(input, output, ReduceOp::Avg)
        },
        input: Counts::all,
        output: Counts::own,
    },
    Case {
        name: "gather_v",
        on: |on, stream, input, output, of| {
            on.gather_v_on(stream, input, output, &of.counts, of.root)
        },
        host: |group, input, output, of| group.in_blocks(&of.counts).gather(input, output, of.root),
        input: Counts::own,
        output: Counts::at_root,
    },
    Case {
        name: "scatter_v",
        on: |on, stream, input, output, of| {
            on.scatter_v_on(stream, input, &of.counts, output, of.root)
        },
        host: |group, input, output, of| {
            group.in_blocks(&of.counts).scatter(input, output, of.root)
        },
        input: Counts::at_root,
        output: Counts::own,
    },
    Case {
        name: "all_to_all_v",
        on: |on, stream, input, output, of| {
            on.all_to_all_v_on(stream, input, &of.send, output, &of.recv)
        },
        host: |group, input, output, of| {
            group.in_blocks((&of.send, &of.recv)).all_to_all(input, output)
        },
        input: |of| of.send.iter().sum(),
        output: |of| of.recv.iter().sum(),
    },
];

/// Cuts elements into memories of their own, so that none lies behind the other by chance.
fn cut(values: &[f32], at: usize) -> [&[f32]; 3] {
    let first = at.min(values.len());
    let (head, rest) = values.split_at(first);
    [head, &rest[..0], rest]
}

#[test]
fn every_call_has_the_results_of_the_host() {
    let bench = bench();
    for ranks in 1..=4 {
        bench.world(ranks, &config(), |member| {
            let on = member.on(&small());
            let stream = member.stream();
            let values = |len: usize, salt: usize| -> Vec<f32> {
                (0..len)
                    .map(|at| ((at * 37 + member.rank() * 101 + salt * 7) % 1_009) as f32)
                    .collect()
            };
            for (case, salt) in CASES.iter().flat_map(|case| (0..4).map(move |salt| (case, salt))) {
                let of = Counts::new(member.rank(), ranks, salt);
                let brought = values((case.input)(&of), salt);
                let mut expected = values((case.output)(&of), salt + 50);
                let pieces = |values: &[f32], at: usize| {
                    cut(values, at).map(|piece| Data::new(&member.device, piece))
                };
                let input = pieces(&brought, 70 + member.rank());
                let output = pieces(&expected, 130);
                let slices = |pieces: &[Data<f32>; 3]| {
                    pieces.iter().map(Data::slice).collect::<Vec<DeviceSlice>>()
                };
                input.iter().chain(&output).for_each(|it| it.put(&*stream));
                let (from, to) = (slices(&input), slices(&output));
                let work = (case.on)(&on, &stream, &from, &to, &of).unwrap();
                work.join(&stream).unwrap();
                output.iter().for_each(|it| it.fetch(&*stream));
                (case.host)(&member.group, &brought, &mut expected, &of).unwrap();
                finish(&stream);
                work.wait().unwrap();
                let found = output.iter().flat_map(Data::found).collect::<Vec<f32>>();
                assert!(found == expected, "{}, {ranks} ranks, {salt}", case.name);
            }
            on.destroy().unwrap();
        });
        bench.is_clean();
    }
}

#[test]
fn counts_that_do_not_fit_are_refused_before_any_rank_hears() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let on = member.on(&small());
        let stream = member.stream();
        let data = Data::new(&member.device, &[member.rank() as f32; 4]);
        let (four, none) = (data.slice(), DeviceSlice::empty(DType::F32));
        let ints = DeviceSlice::new(four.place, DType::I32);
        // Only rank 0 makes the calls. If rank 1 heard of one, its own calls below would fail.
        if member.rank() == 0 {
            let refused = |result: Result<DeviceWork>, part: &str| {
                let error = result.expect_err(part);
                assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
                assert!(error.to_string().contains(part), "{error} has no {part:?}");
            };
            refused(
                on.all_gather_v_on(&stream, &[four], &[four], &[4]),
                "there are 1 counts for 2 ranks",
            );
            refused(
                on.all_gather_v_on(&stream, &[four], &[four], &[4, 4]),
                "an output has 4 elements, and 8 fit",
            );
            refused(
                on.gather_v_on(&stream, &[four], &[four], &[4, 0], 1),
                "an output has 4 elements, and 0 fit",
            );
            refused(on.scatter_v_on(&stream, &[], &[4, 0], &[four], 2), "there is no rank 2");
            refused(
                on.all_to_all_v_on(&stream, &[four], &[usize::MAX, 9], &[], &[0, 0]),
                "more than any memory holds",
            );
            refused(
                on.all_to_all_v_on(&stream, &[four], &[4, 0], &[ints], &[4, 0]),
                "they must be of one type",
            );
            refused(
                on.all_gather_v_on(&stream, &[], &[], &[0, 0]),
                "neither an input nor an output",
            );
        }
        data.put(&*stream);
        let work = on.all_reduce_on(&stream, four, ReduceOp::Sum).unwrap();
        work.wait().unwrap();
        on.all_gather_v_on(&stream, &[none], &[none], &[0, 0]).unwrap().wait().unwrap();
        on.destroy().unwrap();
    });
    bench.is_clean();
}
