//! Rounds of calls that a seed chooses: types, lengths, streams, and who waits for whom.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use drumline_accel::{DeviceGroup, DeviceSlice, DeviceWork, Result, Stream};
use drumline_group::{Element, ProcessGroup, ReduceOp, bf16, f16, types::F8E4M3};
use fastrand::Rng;

use crate::common::{Data, Member, finish};

type Round = fn(&Member, &DeviceGroup, u64) -> Result<Vec<String>>;

/// Makes the calls of a round on this rank, and tells which results are wrong.
pub(crate) fn round(member: &Member, on: &DeviceGroup, seed: u64) -> Result<Vec<String>> {
    let rounds: [Round; 6] = [
        round_of::<f32>,
        round_of::<f64>,
        round_of::<f16>,
        round_of::<bf16>,
        round_of::<F8E4M3>,
        round_of::<i32>,
    ];
    rounds[(seed % 6) as usize](member, on, seed)
}

trait Value: Element {
    fn of(random: u64) -> Self;
}

macro_rules! values {
    ($($type:ty: $of:expr),*) => {$(
        impl Value for $type {
            fn of(random: u64) -> $type {
                $of((random >> 40) as f32 / 4_096.0 - 2_048.0)
            }
        }
    )*};
}

values!(
    f32: |it| it,
    f64: f64::from,
    f16: f16::from_f32,
    bf16: bf16::from_f32,
    F8E4M3: |it: f32| F8E4M3::from_f32(it / 512.0),
    i32: |it| it as i32
);

#[derive(Clone, Copy, Debug)]
enum Kind {
    Sum,
    /// In pieces that each rank cuts for itself, in place or to other memory.
    SumInPieces,
    Broadcast,
    AllGather,
    Message,
}

/// One call of a round. All ranks draw the same ones.
struct Call<T> {
    kind: Kind,
    /// What it reads, and what it writes. The same for calls in place.
    input: Option<Data<T>>,
    data: Data<T>,
    brought: Vec<T>,
    before: Vec<T>,
    root: usize,
    works: Vec<DeviceWork>,
    /// Where its results are fetched.
    stream: usize,
}

fn round_of<T: Value>(member: &Member, on: &DeviceGroup, seed: u64) -> Result<Vec<String>> {
    let (rank, ranks) = (member.rank(), on.world_size());
    let mut common = Rng::with_seed(seed);
    // What need not be the same on all ranks: when a rank does something.
    let mut own = Rng::with_seed(seed * 64 + rank as u64);
    let streams = [member.stream(), member.stream()];
    let window = on.options().window_bytes / size_of::<T>();
    let mut calls: Vec<Call<T>> = Vec::new();
    for number in 0..common.usize(2..=4) {
        let kind = *common
            .choice([
                Kind::Sum,
                Kind::Sum,
                Kind::SumInPieces,
                Kind::Broadcast,
                Kind::AllGather,
                Kind::Message,
            ])
            .as_ref()
            .unwrap();
        let len = match common.u8(..4) {
            0 => common.usize(0..=3),
            1 => window * common.usize(1..=3),
            _ => common.usize(0..=5 * window),
        };
        let root = common.usize(..ranks);
        let values = |len: usize, salt: u64| -> Vec<T> {
            let mut random =
                Rng::with_seed((seed * 64 + rank as u64) * 64 + number as u64 * 2 + salt);
            (0..len).map(|_| T::of(random.u64(..))).collect()
        };
        let brought = values(len, 0);
        // Of sums in pieces. A rank may choose for itself.
        let is_in_place = own.bool();
        let (before, input) = match kind {
            Kind::AllGather => (values(len * ranks, 1), true),
            Kind::SumInPieces if is_in_place => (brought.clone(), false),
            Kind::Message | Kind::SumInPieces => (values(len, 1), true),
            Kind::Sum | Kind::Broadcast => (brought.clone(), false),
        };
        let input = input.then(|| Data::new(&member.device, &brought));
        let data = Data::new(&member.device, &before);
        let at = own.usize(..2);
        let stream = &streams[at];
        input.iter().chain([&data]).for_each(|data| data.put(&**stream));
        (0..own.u8(..4)).for_each(|_| thread::yield_now());
        let cuts = cuts(&mut own, len);
        let works = begin(on, stream, kind, input.as_ref(), &data, root, &cuts)?;
        // Waits the stream, the other one, or the host?
        let fetching = match own.u8(..3) {
            0 => 1 - at,
            _ => at,
        };
        match own.u8(..4) {
            0 => works.iter().try_for_each(DeviceWork::wait)?,
            _ => works.iter().try_for_each(|work| work.join(&streams[fetching]))?,
        }
        if fetching != at {
            // What the other stream overwrites then, this one must have put there.
            let put = stream.record().unwrap();
            streams[fetching].wait(&*put).unwrap();
        }
        data.fetch(&*streams[fetching]);
        calls.push(Call { kind, input, data, brought, before, root, works, stream: fetching });
    }
    streams.iter().for_each(finish);
    let mut wrong = Vec::new();
    for (number, call) in calls.iter().enumerate() {
        call.works.iter().try_for_each(DeviceWork::wait)?;
        let found = call.data.found();
        let expected = call.expected(&member.group);
        if bytemuck::cast_slice::<T, u8>(&found) != bytemuck::cast_slice::<T, u8>(&expected) {
            let at = found.iter().zip(&expected).position(|(one, other)| one != other);
            wrong.push(format!(
                "seed {seed}, rank {rank} of {ranks}: call {number}, {:?} of {} {}, fetched in stream {}: differs at {at:?}: {:?}, not {:?}",
                call.kind,
                call.brought.len(),
                T::DTYPE,
                call.stream,
                at.map(|at| found[at]),
                at.map(|at| expected[at]),
            ));
        }
        drop(call.input.as_ref().map(Data::found));
    }
    Ok(wrong)
}

/// Ranges that make up `len` elements, some of them empty.
fn cuts(random: &mut Rng, len: usize) -> Vec<Range<usize>> {
    let mut borders: Vec<usize> = (0..random.usize(..6)).map(|_| random.usize(0..=len)).collect();
    borders.extend([0, len]);
    borders.sort_unstable();
    borders.array_windows().map(|[start, end]| *start..*end).collect()
}

fn begin<T: Value>(
    on: &DeviceGroup,
    stream: &Arc<dyn Stream>,
    kind: Kind,
    input: Option<&Data<T>>,
    data: &Data<T>,
    root: usize,
    cuts: &[Range<usize>],
) -> Result<Vec<DeviceWork>> {
    let (rank, ranks) = (on.rank(), on.world_size());
    let of = |input: Option<&Data<T>>| input.unwrap().slice();
    let works = match kind {
        Kind::Sum => vec![on.all_reduce_on(stream, data.slice(), ReduceOp::Sum)],
        Kind::SumInPieces => {
            let piece = |of: DeviceSlice, range: &Range<usize>| {
                let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
                DeviceSlice::new(of.place.part(bytes).unwrap(), T::DTYPE)
            };
            let all = |of| cuts.iter().map(move |range| piece(of, range)).collect::<Vec<_>>();
            let (from, to) = (all(input.unwrap_or(data).slice()), all(data.slice()));
            vec![on.all_reduce_coalesced_on(stream, &from, &to, ReduceOp::Sum)]
        }
        Kind::Broadcast => vec![on.broadcast_on(stream, data.slice(), root)],
        Kind::AllGather => vec![on.all_gather_on(stream, of(input), data.slice())],
        Kind::Message => vec![
            on.send_on(stream, of(input), (rank + 1) % ranks, 3),
            on.recv_on(stream, data.slice(), (rank + ranks - 1) % ranks, 3),
        ],
    };
    works.into_iter().collect()
}

impl<T: Value> Call<T> {
    /// What the host makes of it.
    fn expected(&self, group: &ProcessGroup) -> Vec<T> {
        let mut data = self.before.clone();
        let brought = &self.brought[..];
        match self.kind {
            Kind::Sum => group.all_reduce(&mut data, ReduceOp::Sum).unwrap(),
            Kind::SumInPieces => {
                data.copy_from_slice(brought);
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            }
            Kind::Broadcast => group.broadcast(&mut data, self.root).unwrap(),
            Kind::AllGather => group.all_gather(brought, &mut data).unwrap(),
            Kind::Message => {
                let (rank, ranks) = (group.rank(), group.world_size());
                let sent = group.send_async(brought.to_vec(), (rank + 1) % ranks, 0).unwrap();
                group.recv(&mut data, (rank + ranks - 1) % ranks, 0).unwrap();
                sent.wait().unwrap();
            }
        }
        data
    }
}
