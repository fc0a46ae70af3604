//! All-reduces: the bits of the host, whatever the way.

use drumline_accel::Way;
use drumline_group::{DType, Element, ReduceOp, bf16, f16, types::F8E4M3};

use crate::common::{Bench, Data, bench, config, finish, small};

fn mixed(rank: usize, index: usize) -> f64 {
    let x = (rank as u64 * 0x9e37_79b9 + index as u64 + 1).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x >> 40) as f64 / 4096.0 - 2048.0) * 2.0_f64.powi((x & 7) as i32 - 4)
}

fn check<T: Element>(
    bench: &Bench,
    ranks: usize,
    lens: &[usize],
    op: ReduceOp,
    value: fn(f64) -> T,
) {
    bench.world(ranks, &config(), |member| {
        let on = member.on(&small());
        let stream = member.stream();
        for &len in lens {
            let mut expected: Vec<T> =
                (0..len).map(|index| value(mixed(member.rank(), index))).collect();
            let data = Data::new(&member.device, &expected);
            data.put(&*stream);
            let work = on.all_reduce_on(&stream, data.slice(), op).unwrap();
            work.join(&stream).unwrap();
            data.fetch(&*stream);
            member.group.all_reduce(&mut expected, op).unwrap();
            finish(&stream);
            work.wait().unwrap();
            assert!(
                bytemuck::cast_slice::<T, u8>(&data.found())
                    == bytemuck::cast_slice::<T, u8>(&expected),
                "{ranks} ranks, {len} of {}, {op}",
                T::DTYPE
            );
        }
        on.destroy().unwrap();
    });
    bench.is_clean();
}

#[test]
fn a_sum_has_the_bits_of_the_host() {
    let bench = bench();
    for ranks in 1..=8 {
        let lens = [0, 1, 7, 1_024, 1_025, 5_000, 40_000];
        check::<f32>(&bench, ranks, &lens, ReduceOp::Sum, |it| it as f32);
        let lens = [3, 9_001];
        check::<f32>(&bench, ranks, &lens, ReduceOp::Avg, |it| it as f32);
        check::<f64>(&bench, ranks, &lens, ReduceOp::Sum, |it| it);
        check::<f16>(&bench, ranks, &lens, ReduceOp::Sum, f16::from_f64);
        check::<bf16>(&bench, ranks, &lens, ReduceOp::Avg, bf16::from_f64);
        check::<F8E4M3>(&bench, ranks, &lens, ReduceOp::Sum, |it| {
            F8E4M3::from_f32(it as f32 / 4096.0)
        });
        check::<i32>(&bench, ranks, &lens, ReduceOp::Max, |it| it as i32);
    }
}

#[test]
fn ranks_of_a_host_sum_in_slices() {
    let bench = bench();
    bench.world(3, &config(), |member| {
        let on = member.on(&small());
        assert_eq!(on.explain(DType::F32), Way::Slices { holders: vec![0, 1, 2] });
        on.destroy().unwrap();
    });
    bench.is_clean();
}
