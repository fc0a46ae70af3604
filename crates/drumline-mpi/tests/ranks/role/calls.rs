//! Every call, with lengths of zero to some 100 KiB, verified by values.

use std::ops::Range;

use drumline_mpi::{Communicator, Error, Number, Op};

use super::{everybody, mpi, over, until, world};

const LENGTHS: [usize; 5] = [0, 1, 7, 1000, 100_003];

pub(super) fn all() {
    let all = everybody();
    assert!(std::ptr::eq(mpi(), world().mpi()), "one library per process");
    assert_eq!((all.rank(), all.size()), (world().rank(), world().size()));
    for len in LENGTHS {
        gathers_to_all(&all, len);
        goes_to_all_from_all(&all, len);
        for root in 0..all.size() {
            goes_through_a_root(&all, len, root);
        }
        messages(&all, len);
        over(all.barrier());
    }
    most_have_nothing(&all);
    many_at_a_time(&all);
    all_numbers(&all);
    refused(&all);
    over(all.barrier());
}

/// What `from` tells `to`.
fn bytes(from: usize, to: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + from * 97 + to * 57 + len) as u8).collect()
}

fn side_by_side(lens: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let block = |end: &mut usize, len| {
        let start = *end;
        *end += len;
        Some(start..*end)
    };
    lens.into_iter().scan(0, block).collect()
}

fn end(blocks: &[Range<usize>]) -> usize {
    blocks.last().map_or(0, |it| it.end)
}

/// Every third rank has nothing.
fn uneven(rank: usize, len: usize) -> usize {
    (rank % 3) * len / 2
}

fn gathers_to_all(all: &Communicator, len: usize) {
    let (rank, size) = (all.rank(), all.size());
    let lengths: [&dyn Fn(usize) -> usize; 2] = [&|_| len, &|rank| uneven(rank, len)];
    for length in lengths {
        let blocks = side_by_side((0..size).map(length));
        let mut data = vec![0; end(&blocks) + 3];
        data[blocks[rank].clone()].copy_from_slice(&bytes(rank, 0, length(rank)));
        let (_, data) = over(all.all_gather(data, &blocks));
        for (from, block) in blocks.iter().enumerate() {
            assert_eq!(data[block.clone()], bytes(from, 0, length(from)), "from {from}");
        }
        assert_eq!(data[end(&blocks)..], [0; 3], "what is no block stays as it was");
    }
}

fn goes_to_all_from_all(all: &Communicator, len: usize) {
    let (rank, size) = (all.rank(), all.size());
    let length = |from: usize, to: usize| uneven(from + 2 * to, len) / size;
    let send_blocks = side_by_side((0..size).map(|to| length(rank, to)));
    // Blocks of the receiver lie in another order, with gaps.
    let mut receive_blocks = vec![0..0; size];
    let mut place = 5;
    for from in (0..size).rev() {
        receive_blocks[from] = place..place + length(from, rank);
        place += length(from, rank) + 5;
    }
    let mut send = vec![0; end(&send_blocks)];
    for (to, block) in send_blocks.iter().enumerate() {
        send[block.clone()].copy_from_slice(&bytes(rank, to, block.len()));
    }
    let sent_before = send.clone();
    let (sent, received) =
        over(all.all_to_all(send, &send_blocks, vec![0; place], &receive_blocks));
    assert_eq!(sent, sent_before);
    let mut expected = vec![0; place];
    for (from, block) in receive_blocks.iter().enumerate() {
        expected[block.clone()].copy_from_slice(&bytes(from, rank, block.len()));
    }
    assert_eq!(received, expected);
}

/// The last rank sends to itself alone. The others have nothing, not even buffers.
fn most_have_nothing(all: &Communicator) {
    let (rank, last) = (all.rank(), all.size() - 1);
    let mut blocks = side_by_side((0..=last).map(|_| 0));
    let own = if rank == last { bytes(last, last, 4) } else { Vec::new() };
    blocks[last].end = own.len();
    let (sent, received) = over(all.all_to_all(own.clone(), &blocks, vec![0; own.len()], &blocks));
    assert_eq!((sent, received), (own.clone(), own));
}

fn goes_through_a_root(all: &Communicator, len: usize, root: usize) {
    let (rank, size) = (all.rank(), all.size());
    let is_root = rank == root;
    let told = if is_root { bytes(root, 1, len) } else { vec![0; len] };
    assert_eq!(over(all.broadcast(told, len, root)).1, bytes(root, 1, len));

    let blocks = side_by_side((0..size).map(|rank| uneven(rank, len)));
    let whole: Vec<u8> = (0..size).flat_map(|from| bytes(from, root, uneven(from, len))).collect();
    let own = bytes(rank, root, uneven(rank, len));
    let room = vec![0; if is_root { end(&blocks) } else { 0 }];
    let (sent, gathered) = over(all.gather(own.clone(), own.len(), room, &blocks, root));
    assert_eq!(sent, own);
    assert!(!is_root || gathered == whole);

    let send = if is_root { whole } else { Vec::new() };
    let (_, scattered) = over(all.scatter(send, &blocks, vec![0; own.len()], own.len(), root));
    assert_eq!(scattered, own);
}

/// Every rank sends to every rank, itself too, under three tags, and receives in another order.
fn messages(all: &Communicator, len: usize) {
    let (rank, size) = (all.rank(), all.size());
    const TAGS: [u32; 3] = [0, 77, drumline_mpi::TAG_MAX];
    let length = |tag: u32| len / (1 + tag as usize % 3);
    let mut sending = Vec::new();
    for to in 0..size {
        for tag in TAGS {
            let message = bytes(rank, to + tag as usize, length(tag));
            sending.push(all.send(message, length(tag), to, tag).unwrap());
        }
    }
    for tag in TAGS.into_iter().rev() {
        let mut from_any: Vec<usize> =
            (0..size / 2).map(|_| receive(all, None, tag, length(tag))).collect();
        // The others are named one by one, the last first.
        let others = (0..size).rev().filter(|rank| !from_any.contains(rank)).collect::<Vec<_>>();
        for from in others {
            from_any.push(receive(all, Some(from), tag, length(tag)));
        }
        from_any.sort_unstable();
        assert_eq!(from_any, (0..size).collect::<Vec<_>>(), "one message from each rank");
    }
    sending.into_iter().for_each(|request| drop(over(Ok(request))));
    assert!(all.probe(None, TAGS[1]).unwrap().is_none());
    over(all.barrier()); // the messages of the next round stay apart
}

fn receive(all: &Communicator, from: Option<usize>, tag: u32, len: usize) -> usize {
    let message = until(|| all.probe(from, tag));
    let (sender, its_len) = (message.from(), message.len());
    assert!(from.is_none_or(|from| from == sender));
    assert_eq!((its_len, message.is_empty()), (len, len == 0));
    let (_, received) = over(message.receive(vec![0; len + 2]));
    assert_eq!(received[..len], bytes(sender, all.rank() + tag as usize, len));
    assert_eq!(received[len..], [0, 0]);
    sender
}

/// Collectives that are under way at the same time; the last one is asked for first.
fn many_at_a_time(all: &Communicator) {
    let (rank, size) = (all.rank(), all.size());
    let blocks =
        |number: usize| side_by_side((0..size).map(move |rank| (number * 41 + rank) % 300));
    let begin = |number: usize| {
        let blocks = blocks(number);
        let mut data = vec![0; end(&blocks)];
        data[blocks[rank].clone()].copy_from_slice(&bytes(rank, number, blocks[rank].len()));
        all.all_gather(data, &blocks).unwrap()
    };
    let requests: Vec<_> = (0..100).map(begin).collect();
    for (number, request) in requests.into_iter().enumerate().rev() {
        let (_, data) = over(Ok(request));
        for (from, block) in blocks(number).into_iter().enumerate() {
            assert_eq!(data[block.clone()], bytes(from, number, block.len()));
        }
    }
}

fn all_numbers(all: &Communicator) {
    macro_rules! integers {
        ($($kind:ident $number:ident),*) => {$({
            type Fold = fn($kind, $kind) -> $kind;
            let ops: [(Op, Fold); 7] = [
                (Op::Sum, |a, b| a.wrapping_add(b)), (Op::Product, |a, b| a.wrapping_mul(b)),
                (Op::Min, |a, b| a.min(b)), (Op::Max, |a, b| a.max(b)),
                (Op::BitAnd, |a, b| a & b), (Op::BitOr, |a, b| a | b), (Op::BitXor, |a, b| a ^ b),
            ];
            for (op, fold) in ops {
                reduced(all, Number::$number, op, |from, at| ((from + at) % 3 + 1) as $kind, fold, $kind::to_ne_bytes);
            }
        })*};
    }
    integers!(i8 I8, u8 U8, i16 I16, u16 U16, i32 I32, u32 U32, i64 I64, u64 U64);
    macro_rules! floats {
        ($($kind:ident $number:ident $complex:ident),*) => {$({
            type Fold = fn($kind, $kind) -> $kind;
            let ops: [(Op, Fold); 4] =
                [(Op::Sum, |a, b| a + b), (Op::Product, |a, b| a * b), (Op::Min, $kind::min), (Op::Max, $kind::max)];
            let value = |from: usize, at: usize| (from + at) as $kind * 0.25 - 1.0; // sums are exact
            for (op, fold) in ops {
                reduced(all, Number::$number, op, value, fold, $kind::to_ne_bytes);
            }
            type Pair = ($kind, $kind);
            let ops: [(Op, fn(Pair, Pair) -> Pair); 2] = [
                (Op::Sum, |a, b| (a.0 + b.0, a.1 + b.1)),
                (Op::Product, |a, b| (a.0 * b.0 - a.1 * b.1, a.0 * b.1 + a.1 * b.0)),
            ];
            let value = |from: usize, at: usize| ((from + at % 3) as $kind - 1.0, (at % 2) as $kind);
            for (op, fold) in ops {
                let bytes = |pair: Pair| [pair.0.to_ne_bytes(), pair.1.to_ne_bytes()].concat();
                reduced(all, Number::$complex, op, value, fold, bytes);
            }
        })*};
    }
    floats!(f32 F32 Complex64, f64 F64 Complex128);
}

/// MPI's own sums: to all, to each root, and to each rank its part.
fn reduced<T: Copy, B: AsRef<[u8]>>(
    all: &Communicator,
    number: Number,
    op: Op,
    value: impl Fn(usize, usize) -> T,
    fold: impl Fn(T, T) -> T,
    encode: impl Fn(T) -> B,
) {
    assert!(op.serves(number));
    let (rank, size) = (all.rank(), all.size());
    let each = 5;
    let elements = each * size;
    let encode = |value| encode(value).as_ref().to_vec();
    let own: Vec<u8> = (0..elements).flat_map(|at| encode(value(rank, at))).collect();
    let total = |at| encode((1..size).fold(value(0, at), |sum, from| fold(sum, value(from, at))));
    let expected: Vec<u8> = (0..elements).flat_map(total).collect();
    assert_eq!(own.len(), elements * number.bytes());
    let clean = |mut bytes: Vec<u8>| {
        // A zero may have either sign.
        if matches!(number, Number::Complex64 | Number::F32) {
            bytes
                .chunks_exact_mut(4)
                .filter(|it| **it == (-0.0_f32).to_ne_bytes())
                .for_each(|it| it.fill(0));
        } else if matches!(number, Number::Complex128 | Number::F64) {
            bytes
                .chunks_exact_mut(8)
                .filter(|it| **it == (-0.0_f64).to_ne_bytes())
                .for_each(|it| it.fill(0));
        }
        bytes
    };
    let expected = clean(expected);

    let sums = clean(over(all.all_reduce(own.clone(), elements, number, op)).1);
    assert_eq!(sums, expected, "{op} of {number}");
    let root = elements % size;
    let sums = clean(over(all.reduce(own.clone(), elements, number, op, root)).1);
    assert!(rank != root || sums == expected, "{op} of {number} at a root");
    let sums = clean(over(all.reduce_scatter(own, each, number, op)).1);
    let part = each * number.bytes();
    assert_eq!(sums[..part], expected[rank * part..][..part], "{op} of {number}, a part");
}

/// Nothing of this comes to MPI, so the ranks stay in step.
fn refused(all: &Communicator) {
    let size = all.size();
    let error = |blocks: &[Range<usize>]| all.all_gather(vec![0; 8], blocks).unwrap_err();
    let mut beyond = vec![0..0; size];
    beyond[size - 1] = 0..9;
    assert!(matches!(error(&beyond), Error::OutOfRange { end: 9, bytes: 8, .. }));
    assert!(matches!(error(&vec![0..0; size + 1]), Error::Ranks { .. }));
    let mut apart = vec![1..1; size];
    apart[0] = 1..2;
    assert!(matches!(error(&apart), Error::Gap { .. }));
    assert!(matches!(all.broadcast(vec![], 1, 0).unwrap_err(), Error::OutOfRange { .. }));
    assert!(matches!(all.broadcast(vec![], 0, size).unwrap_err(), Error::Ranks { .. }));
    assert!(matches!(all.send(vec![], 0, 0, 1 << 15).unwrap_err(), Error::Tag { .. }));
    assert!(matches!(all.probe(Some(size), 0).unwrap_err(), Error::Ranks { .. }));
    let error = all.all_reduce(vec![0; 8], 1, Number::F32, Op::BitXor).unwrap_err();
    assert_eq!(
        error.to_string(),
        "MPI has no operator bitxor for f32; combine the numbers without MPI"
    );
    let blocks = side_by_side(vec![2; size]);
    let error = all.gather(vec![0; 1], 1, vec![0; 2 * size], &blocks, all.rank()).unwrap_err();
    assert!(error.to_string().contains("has 2 bytes, but its other end has 1"), "{error}");
    assert!(matches!(world().communicator(&[size], 3).unwrap_err(), Error::Ranks { .. }));
    assert!(matches!(world().communicator(&[0], 1 << 15).unwrap_err(), Error::Tag { .. }));
}
