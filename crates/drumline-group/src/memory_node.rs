//! Memory nodes (NUMA), and how ranks are distributed over them.

use std::io;

use drumline_shm::Cores;

/// Binds this thread, and the threads that it will start, to the cores of one memory node of this host. Local
/// ranks are distributed in blocks, so that consecutive ranks share a node and can add among themselves
/// first. Call it before the program uses memory, because a page comes from the node where it is first used.
/// `drumline run --numa-binding node` does this for every rank.
///
/// Returns the number of the node. Returns `None` and changes nothing if fewer than two nodes have cores that
/// this process may use, or if there are more nodes than ranks.
///
/// ```
/// # use drumline_group as drumline;
/// // Of torchrun's environment:
/// let number = |name| std::env::var(name).ok()?.parse().ok();
/// let rank = number("LOCAL_RANK").unwrap_or(0);
/// let ranks = number("LOCAL_WORLD_SIZE").unwrap_or(1);
/// match drumline::bind_to_memory_node(rank, ranks)? {
///     Some(node) => println!("bound to memory node {node}"),
///     None => println!("nothing to choose from"),
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// The error of a system call.
pub fn bind_to_memory_node(
    local_rank: usize,
    local_world_size: usize,
) -> io::Result<Option<usize>> {
    let nodes = Cores::of_this_thread()?.by_memory_node();
    let Some(index) = share_of(local_rank, local_world_size, nodes.len()) else { return Ok(None) };
    let (node, cores) = &nodes[index];
    cores.stay()?;
    Ok(Some(*node))
}

/// The node of a rank, among `nodes` nodes.
fn share_of(local_rank: usize, local_world_size: usize, nodes: usize) -> Option<usize> {
    let is_choice = nodes > 1 && local_world_size >= nodes && local_rank < local_world_size;
    is_choice.then(|| local_rank * nodes / local_world_size)
}

/// The node to which this thread is bound.
pub(crate) fn of_this_thread() -> Option<usize> {
    Cores::of_this_thread().ok()?.memory_node()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_dealt_out_in_blocks() {
        let shares = |ranks, nodes| (0..ranks).map(|rank| share_of(rank, ranks, nodes)).collect();
        let of: [Vec<Option<usize>>; 4] = [shares(4, 2), shares(5, 2), shares(1, 2), shares(2, 1)];
        assert_eq!(of[0], [0, 0, 1, 1].map(Some));
        assert_eq!(of[1], [0, 0, 0, 1, 1].map(Some));
        assert_eq!([&of[2][..], &of[3]], [&[None][..], &[None, None]]);
        assert_eq!(share_of(4, 4, 2), None);
    }
}
