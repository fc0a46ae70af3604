//! The local work of a rank that has several members in a collective, as bytes.

use drumline_engine::bytes::Bytes;
use drumline_kernels::{Addend, Target};
use drumline_schedule::tree::{Node, merges};

use crate::{DType, ReduceOp};

/// The canonical sum of members of one length, in the [accumulator](DType::accumulator) of `dtype`: neither divided nor
/// rounded. There must be a member.
pub fn sum_of_members(dtype: DType, op: ReduceOp, members: &[&[u8]]) -> Bytes {
    let leaves: Vec<Node> = (0..members.len()).map(Node::leaf).collect();
    let merges = merges(Node::root(members.len()), &leaves).unwrap_or_default();
    let elements = members.first().map_or(0, |member| member.len() / dtype.size());
    let mut sum = Bytes::zeroed(elements * dtype.accumulator().size());
    let members: Vec<Addend<'_, u8>> =
        members.iter().map(|&member| Addend::Element(member.into())).collect();
    (dtype.kernels().reduce_to_sums)(op, &[Target::from(&mut sum[..])], &members, &merges);
    sum
}

/// Divides a [sum](sum_of_members) by the number of all `members`, if `op` is the average, and rounds it to elements of
/// `dtype`.
pub fn round_sum(dtype: DType, op: ReduceOp, sum: &mut [u8], members: usize) -> Bytes {
    let wide = dtype.accumulator();
    let mut rounded = Bytes::zeroed(sum.len() / wide.size() * dtype.size());
    let all = Target::from(sum);
    if op == ReduceOp::Avg && !all.is_empty() {
        (wide.kernels().reduce_tree)(op, &[all], &[all.as_source()], &[0], Some(members));
    }
    (dtype.kernels().narrow)(Target::from(&mut rounded[..]), all.as_source());
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bf16;

    /// Rounded after each addition, the sum would be 256.
    #[test]
    fn sums_of_members_are_rounded_once() {
        let members = [256.0_f32, 1.0, 1.0].map(bf16::from_f32);
        let members = members.each_ref().map(bytemuck::bytes_of);
        let mut sum = sum_of_members(DType::Bf16, ReduceOp::Avg, &members);
        assert_eq!(*sum, 258_f32.to_ne_bytes());
        let mean = round_sum(DType::Bf16, ReduceOp::Avg, &mut sum, 3);
        assert_eq!(*mean, bf16::from_f32(86.0).to_bits().to_ne_bytes());
    }
}
