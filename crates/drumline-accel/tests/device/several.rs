//! Several devices of one rank.

use std::sync::Arc;

use drumline_accel::{Device, DeviceGroups, DeviceWork, Result, Stream};
use drumline_group::ErrorKind;
use drumline_group::ReduceOp;
use drumline_testing::tree_sum;

use crate::common::{Data, Member, bench, config, finish, small};

const LEN: usize = 3_000;

fn value(number: usize, index: usize) -> f32 {
    ((number * 31 + index) as f32).sin() * 1e3
}

fn sum(numbers: usize, index: usize) -> f32 {
    tree_sum(&(0..numbers).map(|number| value(number, index)).collect::<Vec<_>>())
}

struct Devices {
    on: DeviceGroups,
    streams: Vec<Arc<dyn Stream>>,
    own: Vec<drumline_cuda::CudaDevice>,
}

impl Devices {
    fn new(member: &Member, own: Vec<drumline_cuda::CudaDevice>) -> Devices {
        let devices = own.iter().map(|it| Arc::new(it.clone()) as Arc<dyn Device>).collect();
        let on = DeviceGroups::new(&member.group, devices, &small()).unwrap();
        let streams = own.iter().map(|device| device.stream().unwrap()).collect();
        Devices { on, streams, own }
    }

    /// Data of each device, by its number.
    fn data(&self, rank: usize, of: impl Fn(usize) -> Vec<f32>) -> Vec<Data<f32>> {
        let number = |at: usize| rank * self.own.len() + at;
        let data = self.own.iter().enumerate().map(|(at, it)| Data::new(it, &of(number(at))));
        let data: Vec<Data<f32>> = data.collect();
        data.iter().zip(&self.streams).for_each(|(data, stream)| data.put(&**stream));
        data
    }

    /// What the calls leave.
    fn results(&self, works: Result<Vec<DeviceWork>>, data: &[Data<f32>]) -> Vec<Vec<f32>> {
        for ((work, stream), data) in works.unwrap().iter().zip(&self.streams).zip(data) {
            work.join(stream).unwrap();
            data.fetch(&**stream);
        }
        self.streams.iter().for_each(finish);
        data.iter().map(Data::found).collect()
    }
}

fn slices(data: &[Data<f32>]) -> Vec<drumline_accel::DeviceSlice> {
    data.iter().map(Data::slice).collect()
}

#[test]
fn every_device_counts_as_a_rank() {
    for (ranks, devices) in [(1, 3), (2, 2), (3, 1), (2, 4)] {
        let bench = bench();
        bench.world(ranks, &config(), |member| {
            let own = (0..devices).map(|at| bench.device(at % 2)).collect();
            let (it, rank, all) = (Devices::new(&member, own), member.rank(), ranks * devices);
            let brought = |number: usize| (0..LEN).map(|index| value(number, index)).collect();

            let data = it.data(rank, brought);
            let works = it.on.all_reduce_multi_on(&it.streams, &slices(&data), ReduceOp::Sum);
            for found in it.results(works, &data) {
                assert!((0..LEN).all(|at| found[at].to_bits() == sum(all, at).to_bits()));
            }

            let (root, root_device) = (ranks - 1, devices - 1);
            let data = it.data(rank, brought);
            let works = it.on.broadcast_multi_on(&it.streams, &slices(&data), root, root_device);
            for found in it.results(works, &data) {
                assert!((0..LEN).all(|at| found[at] == value(all - 1, at)));
            }

            let data = it.data(rank, brought);
            let op = ReduceOp::Sum;
            let works = it.on.reduce_multi_on(&it.streams, &slices(&data), op, root, root_device);
            for (at, found) in it.results(works, &data).into_iter().enumerate() {
                let number = rank * devices + at;
                let is_root = number == all - 1;
                let expected = |at| if is_root { sum(all, at) } else { value(number, at) };
                assert!((0..LEN).all(|at| found[at].to_bits() == expected(at).to_bits()));
            }

            let (input, output) = (it.data(rank, brought), it.data(rank, |_| vec![0.0; all * LEN]));
            let (from, to) = (slices(&input), slices(&output));
            let works = it.on.all_gather_multi_on(&it.streams, &from, &to);
            for found in it.results(works, &output) {
                assert!((0..all * LEN).all(|at| found[at] == value(at / LEN, at % LEN)));
            }

            let long = |number: usize| (0..all * LEN).map(|index| value(number, index)).collect();
            let (input, output) = (it.data(rank, long), it.data(rank, |_| vec![0.0; LEN]));
            let (from, to) = (slices(&input), slices(&output));
            let works = it.on.reduce_scatter_multi_on(&it.streams, &from, &to, ReduceOp::Sum);
            for (at, found) in it.results(works, &output).into_iter().enumerate() {
                let start = (rank * devices + at) * LEN;
                assert!((0..LEN).all(|at| found[at].to_bits() == sum(all, start + at).to_bits()));
            }
            it.on.destroy().unwrap();
        });
        bench.is_clean();
    }
}

#[test]
fn ranks_with_other_numbers_of_devices_and_wrong_lists_are_refused() {
    let bench = bench();
    bench.world(2, &config(), |member| {
        let one = || Arc::new(bench.device(member.rank())) as Arc<dyn Device>;
        let mine = if member.rank() == 0 { vec![one()] } else { vec![one(), one()] };
        let error = DeviceGroups::new(&member.group, mine, &small()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        let none = DeviceGroups::new(&member.group, Vec::new(), &small()).unwrap_err();
        assert!(none.to_string().contains("there is no device"), "{none}");

        let it = Devices::new(&member, vec![bench.device(0), bench.device(1)]);
        let data = it.data(member.rank(), |_| vec![1.0; 8]);
        let both = slices(&data);
        let refused = |works: Result<Vec<DeviceWork>>, part: &str| {
            let text = works.unwrap_err().to_string();
            assert!(text.contains(part), "{text}");
        };
        let (on, streams, op) = (&it.on, &it.streams, ReduceOp::Sum);
        refused(on.all_reduce_multi_on(&streams[..1], &both, op), "1 streams or pieces for 2");
        refused(on.all_reduce_multi_on(streams, &both[1..], op), "1 streams or pieces for 2");
        let swapped = [both[1], both[0]];
        refused(on.all_reduce_multi_on(streams, &swapped, op), "it is memory of cuda:1");
        refused(on.broadcast_multi_on(streams, &both, 2, 0), "no device 0 of rank 2");
        refused(on.broadcast_multi_on(streams, &both, 0, 2), "no device 2 of rank 0");
        // Nobody has heard of these.
        let works = on.all_reduce_multi_on(streams, &both, op);
        assert!(it.results(works, &data).iter().flatten().all(|it| *it == 4.0));
        it.on.destroy().unwrap();
    });
    bench.is_clean();
}
