//! One call of each operation, and whether its result is right.

use std::time::Duration;

#[cfg(feature = "objects")]
use drumline::Objects;
use drumline::{ProcessGroup, ReduceOp, Result};

/// Calls an operation, and returns whether its result is right.
type Attempt = fn(&ProcessGroup) -> Result<bool>;

pub(super) const OPERATIONS: &[(&str, Attempt)] = &[
    ("send, recv", send_recv),
    ("broadcast", |group| {
        let mut data = own(group);
        group.broadcast(&mut data, 1)?;
        Ok(data == [1.0])
    }),
    ("all_reduce", |group| {
        let mut data = own(group);
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        Ok(data == [sum(group)])
    }),
    ("reduce", |group| {
        let mut data = own(group);
        group.reduce(&mut data, ReduceOp::Sum, 0)?;
        Ok(data == [if group.rank() == 0 { sum(group) } else { group.rank() as f32 }])
    }),
    ("all_gather", |group| {
        let mut all = vec![0.0; group.world_size()];
        group.all_gather(&own(group), &mut all)?;
        Ok(all == ranks(group))
    }),
    ("gather", |group| {
        let expected = if group.rank() == 0 { ranks(group) } else { vec![] };
        let mut all = vec![0.0; expected.len()];
        group.gather(&own(group), &mut all, 0)?;
        Ok(all == expected)
    }),
    ("scatter", |group| {
        let input = if group.rank() == 0 { ranks(group) } else { vec![] };
        let mut data = [9.0];
        group.scatter(&input, &mut data, 0)?;
        Ok(data[..] == own(group)[..])
    }),
    ("reduce_scatter", |group| {
        let mut data = [0.0];
        group.reduce_scatter(&ranks(group), &mut data, ReduceOp::Sum)?;
        Ok(data == [(group.rank() * group.world_size()) as f32])
    }),
    ("all_to_all", |group| {
        let mut data = vec![9.0; group.world_size()];
        group.all_to_all(&ranks(group), &mut data)?;
        Ok(data.iter().all(|value| *value == group.rank() as f32))
    }),
    ("barrier", |group| group.barrier().map(|()| true)),
    ("monitored_barrier", |group| group.monitored_barrier(Duration::from_secs(10)).map(|()| true)),
    #[cfg(feature = "objects")]
    ("broadcast_object", |group| {
        let sent = ("any".to_owned(), 7_u32);
        let mut object = if group.rank() == 0 { sent.clone() } else { Default::default() };
        group.broadcast_object(&mut object, 0)?;
        Ok(object == sent)
    }),
];

fn send_recv(group: &ProcessGroup) -> Result<bool> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let before = (rank + world_size - 1) % world_size;
    let sent = group.send_async(own(group), (rank + 1) % world_size, 3)?;
    let mut data = [9.0_f32];
    group.recv(&mut data, before, 3)?;
    sent.wait()?;
    Ok(data == [before as f32])
}

/// The input of a rank: its number.
fn own(group: &ProcessGroup) -> Vec<f32> {
    vec![group.rank() as f32]
}

/// The inputs of all ranks.
fn ranks(group: &ProcessGroup) -> Vec<f32> {
    (0..group.world_size()).map(|rank| rank as f32).collect()
}

fn sum(group: &ProcessGroup) -> f32 {
    ranks(group).iter().sum()
}
