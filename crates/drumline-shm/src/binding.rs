//! Which cores each rank of a host may use: `drumline run --numa-binding`.
//!
//! | binding | cores of a rank |
//! |---|---|
//! | node | all of one memory node |
//! | socket | all of one processor, with all its memory nodes |
//! | exclusive | a share of the physical cores of one memory node; no other rank has them |
//! | core-complex | those of one memory node that share a cache of the last level |
//!
//! Where the host has a GPU for every rank, the node of a rank is that of its GPU. Otherwise ranks are dealt out in
//! blocks, so that consecutive ranks share a node and can add among themselves first.

use std::{fmt, io, str::FromStr};

use crate::{Common, Cores, placement};

/// Which cores a rank may use: `node`, `socket`, `exclusive` or `core-complex`.
///
/// ```
/// # mod drumline { pub use drumline_shm as cores; }
/// use drumline::cores::NumaBinding;
///
/// assert_eq!("core-complex".parse(), Ok(NumaBinding::CoreComplex));
/// assert_eq!(NumaBinding::Exclusive.to_string(), "exclusive");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumaBinding {
    /// All cores of one memory node.
    Node,
    /// All cores of one processor, with all its memory nodes.
    Socket,
    /// A share of the physical cores of one memory node, which no other rank of the host has.
    Exclusive,
    /// The cores of one memory node that share a cache of the last level.
    CoreComplex,
}

impl NumaBinding {
    /// All bindings.
    pub const ALL: [NumaBinding; 4] =
        [NumaBinding::Node, NumaBinding::Socket, NumaBinding::Exclusive, NumaBinding::CoreComplex];

    /// Its name, as torchrun has it.
    pub const fn name(self) -> &'static str {
        match self {
            NumaBinding::Node => "node",
            NumaBinding::Socket => "socket",
            NumaBinding::Exclusive => "exclusive",
            NumaBinding::CoreComplex => "core-complex",
        }
    }
}

impl fmt::Display for NumaBinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for NumaBinding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = NumaBinding::ALL.into_iter().find(|binding| binding.name() == text);
        found.ok_or_else(|| format!("{text} is not node, socket, exclusive or core-complex"))
    }
}

/// Binds this thread, and the threads that it will start, to the cores that `binding` gives to this rank of the host.
/// Call it before the program uses memory, because a page comes from the node where it is first used.
/// `drumline run --numa-binding` does this for every rank.
///
/// If the process may use a GPU for every rank of the host, rank `i` has the `i`-th of them, and its node is that of this
/// GPU. The kernel tells the nodes; the number of a GPU is that of CUDA, on a host whose GPUs are alike.
///
/// Returns whether the thread is bound. Changes nothing and returns `false` if there is nothing to choose: the host has
/// one node, processor or cache, or fewer ranks than these. If there are fewer physical cores than ranks, `exclusive`
/// is the same as `node`.
///
/// ```
/// # mod drumline { pub use drumline_shm as cores; }
/// use drumline::cores::{NumaBinding, bind_to_cores};
///
/// // Of torchrun's environment:
/// let number = |name| std::env::var(name).ok()?.parse().ok();
/// let rank = number("LOCAL_RANK").unwrap_or(0);
/// let ranks = number("LOCAL_WORLD_SIZE").unwrap_or(1);
/// match bind_to_cores(NumaBinding::Node, rank, ranks)? {
///     true => println!("bound to a memory node"),
///     false => println!("nothing to choose from"),
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// The error of a system call.
pub fn bind_to_cores(
    binding: NumaBinding,
    local_rank: usize,
    local_world_size: usize,
) -> io::Result<bool> {
    let all = Cores::of_this_thread()?;
    let nodes = all.by_memory_node();
    let place = Place { rank: local_rank, ranks: local_world_size };
    let (node, on_node) = place.on_a_node(&nodes, &placement::nodes_of_gpus()).unzip();
    let (cores, on_node) = (node.unwrap_or(&all), on_node.unwrap_or(place));
    let nearer = match binding {
        NumaBinding::Node => None,
        NumaBinding::Socket => place.block(&all.by(Common::Socket)).map(|(cores, _)| cores.clone()),
        NumaBinding::Exclusive => on_node.share(&cores.by(Common::PhysicalCore)).map(merged),
        NumaBinding::CoreComplex => on_node.turn(&cores.by(Common::Cache)).cloned(),
    };
    let chosen = nearer.or_else(|| node.filter(|_| binding != NumaBinding::Socket).cloned());
    chosen.as_ref().map_or(Ok(()), Cores::stay)?;
    Ok(chosen.is_some())
}

fn merged(cores: &[Cores]) -> Cores {
    Cores::of(cores.iter().flat_map(Cores::numbers))
}

/// One of some ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    rank: usize,
    ranks: usize,
}

impl Place {
    /// The group of this rank, and its place among the ranks of that group: ranks are dealt out in blocks. `None` if
    /// there is no choice.
    fn block<T>(self, groups: &[T]) -> Option<(&T, Place)> {
        let Place { rank, ranks } = self;
        let count = groups.len();
        if count < 2 || ranks < count || rank >= ranks {
            return None;
        }
        let group = rank * count / ranks;
        let first = |group: usize| (group * ranks).div_ceil(count);
        let place = Place { rank: rank - first(group), ranks: first(group + 1) - first(group) };
        Some((&groups[group], place))
    }

    /// The cores of this rank's node, and its place among the ranks there: by the node of its GPU, or in blocks.
    /// `None` if there is no choice.
    fn on_a_node<'a>(
        self,
        nodes: &'a [(usize, Cores)],
        of_gpus: &[usize],
    ) -> Option<(&'a Cores, Place)> {
        let by_gpu = || {
            let of_ranks = of_gpus.get(..self.ranks).filter(|_| nodes.len() > 1)?;
            let own = *of_ranks.get(self.rank)?;
            let (_, cores) = nodes.iter().find(|(number, _)| *number == own)?;
            let here = |ranks: &[usize]| ranks.iter().filter(|node| **node == own).count();
            Some((cores, Place { rank: here(&of_ranks[..self.rank]), ranks: here(of_ranks) }))
        };
        let in_blocks = || self.block(nodes).map(|((_, cores), place)| (cores, place));
        by_gpu().or_else(in_blocks)
    }

    /// This rank's own of these things: as many for each rank, and the first ranks have one more.
    fn share<T>(self, things: &[T]) -> Option<&[T]> {
        let Place { rank, ranks } = self;
        if ranks < 2 || things.len() < ranks || rank >= ranks {
            return None;
        }
        let (each, more) = (things.len() / ranks, things.len() % ranks);
        let first = rank * each + rank.min(more);
        Some(&things[first..first + each + usize::from(rank < more)])
    }

    /// The thing of this rank, in turn. `None` if there is no choice.
    fn turn<T>(self, things: &[T]) -> Option<&T> {
        things.get(self.rank % things.len().max(1)).filter(|_| things.len() > 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(ranks: usize) -> impl Iterator<Item = Place> {
        (0..ranks).map(move |rank| Place { rank, ranks })
    }

    #[test]
    fn blocks_of_ranks_share_a_group() {
        let blocks = |ranks, groups: &[char]| {
            places(ranks)
                .map(|place| place.block(groups).map(|(group, it)| (*group, it.rank, it.ranks)))
                .collect::<Vec<_>>()
        };
        let of_four = [('a', 0, 2), ('a', 1, 2), ('b', 0, 2), ('b', 1, 2)].map(Some);
        assert_eq!(blocks(4, &['a', 'b']), of_four);
        let of_five = [('a', 0, 3), ('a', 1, 3), ('a', 2, 3), ('b', 0, 2), ('b', 1, 2)].map(Some);
        assert_eq!(blocks(5, &['a', 'b']), of_five);
        assert_eq!(blocks(2, &['a']), [None, None]);
        assert_eq!(blocks(1, &['a', 'b']), [None]);
        assert_eq!(Place { rank: 4, ranks: 4 }.block(&['a', 'b']), None);
    }

    #[test]
    fn a_rank_is_where_its_gpu_is() {
        let nodes = [(0, Cores::of([0, 1])), (1, Cores::of([2, 3]))];
        let found = |ranks, of_gpus: &[usize]| {
            let place = |place: Place| {
                let (cores, place) = place.on_a_node(&nodes, of_gpus)?;
                Some((cores.numbers().next()?, place.rank, place.ranks))
            };
            places(ranks).map(place).collect::<Vec<_>>()
        };
        // GPUs in the order in which some boards have them: the second node comes first.
        let by_gpu = [(2, 0, 2), (2, 1, 2), (0, 0, 2), (0, 1, 2)].map(Some);
        assert_eq!(found(4, &[1, 1, 0, 0]), by_gpu);
        assert_eq!(found(1, &[1, 0]), [Some((2, 0, 1))]);
        let in_blocks = [(0, 0, 2), (0, 1, 2), (2, 0, 2), (2, 1, 2)].map(Some);
        assert_eq!(found(4, &[1, 0]), in_blocks, "fewer GPUs than ranks");
        assert_eq!(found(4, &[1, 1, 7, 7])[2], Some((2, 0, 2)), "no cores at that node");
    }

    #[test]
    fn shares_do_not_overlap_and_leave_nothing() {
        let shares = |ranks, things: &[u32]| {
            places(ranks).map(|place| place.share(things).map(<[u32]>::to_vec)).collect::<Vec<_>>()
        };
        let of_five = [vec![0, 1], vec![2, 3], vec![4]].map(Some);
        assert_eq!(shares(3, &[0, 1, 2, 3, 4]), of_five);
        assert_eq!(shares(3, &[0, 1]), [None, None, None]);
        assert_eq!(shares(1, &[0, 1]), [None]);
    }

    #[test]
    fn things_go_round_in_turn() {
        let turns = |things: &[char]| {
            places(3).map(|place| place.turn(things).copied()).collect::<Vec<_>>()
        };
        assert_eq!(turns(&['a', 'b']), ['a', 'b', 'a'].map(Some));
        assert_eq!(turns(&['a']), [None; 3]);
        assert_eq!(turns(&[]), [None; 3]);
    }

    #[test]
    fn a_thread_is_bound_to_its_own_share() {
        let cores = Cores::of_this_thread().unwrap();
        let physical = cores.by(Common::PhysicalCore);
        std::thread::spawn(move || {
            let is_bound = bind_to_cores(NumaBinding::Exclusive, 1, 2).unwrap();
            assert_eq!(is_bound, physical.len() > 1 && cores.by_memory_node().len() < 2);
            let now = Cores::of_this_thread().unwrap();
            let wanted =
                if is_bound { merged(&physical[physical.len().div_ceil(2)..]) } else { cores };
            assert!(now.numbers().eq(wanted.numbers()));
        })
        .join()
        .unwrap();
    }
}
