use super::cost::Cost;
use super::row::{Algorithm, Lengths};
use super::{
    binomial, bruck, cube_census, direct, dissemination, doubling, gather, halving, halving_blocks,
    hierarchical, hierarchical_blocks, hierarchical_exchange, hierarchical_gather,
    hierarchical_rooted, leaders, nodes, registered, ring, rooted, shared, shared_blocks,
    shared_rooted,
};
use crate::collective::Collective::{self, *};
use crate::lags::Lags;
use crate::schedule::MemoryUse;
use crate::step::{Rank, Step};
use crate::topology::Topology;

const BY_RANK: &str = "sums in the order of ranks";
const ONE_HOST: &str = "all ranks on one host";
const MEMORY_NODES: &str =
    "several memory nodes of one host that are nodes of the tree of sums, each with several ranks";
const FEW_HOSTS: &str = "hosts whose ranks are nodes of the tree of sums, or sums by placement; at most \
                         256 of them";
const SEVERAL_HOSTS: &str = "hosts whose ranks are nodes of the tree of sums, or sums by placement; \
                             several of them, the smallest with at most 1,000 ranks";
const FULL: &str = "several hosts, each with several ranks";
const HOSTS: &str = "several hosts, at most 256 of them, one with several ranks";
const ANY_HOSTS: &str = "several hosts, one with several ranks";
const ADDING_HOSTS: &str = "hosts whose ranks are nodes of the tree of sums, or sums by placement; several of \
                            them, at most 256, one with several ranks";
const ANY_ADDING_HOSTS: &str = "hosts whose ranks are nodes of the tree of sums, or sums by placement; several of \
                                them, one with several ranks";
const FULL_HOSTS: &str = "hosts whose ranks are nodes of the tree of sums, or sums by placement; several \
                          of them, each with several ranks";
const MANY_FULL_HOSTS: &str = "hosts whose ranks are nodes of the tree of sums, or sums by placement; at least three \
                               of them, each with several ranks";

/// Parts of a slot where data moves in one direction between hosts. A window is cut into slices, and every rank of a host
/// waits for others once in a window, so windows are longer than on one host.
const BETWEEN_HOSTS: usize = 2;

/// All algorithms. Where two rows are equally good, the first one is chosen.
pub static ALGORITHMS: &[Algorithm] = &[
    Algorithm::new(AllReduce, "direct", direct::all_reduce, direct::all_reduce_cost)
        .only_where(direct::serves, "at most 256 ranks, summed in their order")
        .with_pipeline(by_rounds),
    Algorithm::new(AllReduce, "halving", halving::all_reduce, halving::all_reduce_cost)
        .only_where(Topology::sums_by_rank, BY_RANK)
        .with_partial_sums(),
    Algorithm::new(AllReduce, "doubling", doubling::all_reduce, doubling::all_reduce_cost)
        .only_where(Topology::sums_by_rank, BY_RANK)
        .with_partial_sums(),
    Algorithm::new(AllReduce, "gather", gather::all_reduce, gather::all_reduce_cost)
        .only_where(Topology::sums_by_rank, BY_RANK),
    Algorithm::new(AllReduce, "binomial", binomial::all_reduce, binomial::all_reduce_cost)
        .only_where(Topology::sums_by_rank, BY_RANK)
        .with_partial_sums(),
    Algorithm::new(Reduce, "binomial", binomial::reduce, binomial::reduce_cost)
        .only_where(Topology::sums_by_rank, BY_RANK)
        .with_partial_sums(),
    Algorithm::new(Broadcast, "binomial", binomial::broadcast, binomial::broadcast_cost),
    Algorithm::new(AllGather, "bruck", bruck::all_gather, bruck::all_gather_cost),
    Algorithm::new(AllGather, "direct", direct::all_gather, direct::all_gather_cost)
        .with_uneven_blocks(),
    Algorithm::new(ReduceScatter, "direct", direct::reduce_scatter, direct::reduce_scatter_cost)
        .only_where(Topology::sums_by_rank, BY_RANK)
        .with_uneven_blocks()
        .with_pipeline(by_rounds),
    Algorithm::new(Gather, "direct", rooted::gather, rooted::gather_cost).with_uneven_blocks(),
    Algorithm::new(Scatter, "direct", rooted::scatter, rooted::scatter_cost).with_uneven_blocks(),
    Algorithm::new(Scatter, "binomial", binomial::scatter, binomial::scatter_cost),
    Algorithm::new(AllToAll, "direct", direct::all_to_all, direct::all_to_all_cost)
        .with_uneven_blocks(),
    Algorithm::new(Barrier, "dissemination", dissemination::barrier, dissemination::barrier_cost),
    Algorithm::new(Barrier, "direct", direct::barrier, direct::barrier_cost),
    Algorithm::new(MonitoredBarrier, "direct", direct::barrier, direct::barrier_cost),
    staged(AllReduce, "shm-oneshot", shared::oneshot, shared::oneshot_cost)
        .for_lengths(Lengths::Short),
    staged(AllReduce, "shm-twoshot", shared::twoshot, shared::twoshot_cost),
    in_place(AllReduce, "shm-push", registered::all_reduce, registered::all_reduce_cost),
    staged(AllReduce, "shm-nodes", nodes::staged, nodes::staged_cost)
        .only_where(nodes::serves, MEMORY_NODES)
        .with_partial_sums()
        .for_lengths(Lengths::Long),
    in_place(AllReduce, "shm-nodes-push", nodes::push, nodes::push_cost)
        .only_where(nodes::serves, MEMORY_NODES)
        .with_partial_sums()
        .for_lengths(Lengths::Long),
    staged(AllReduce, "hierarchical", hierarchical::staged, hierarchical::staged_cost)
        .only_where(hierarchical::serves_few, FEW_HOSTS)
        .with_sums_apart()
        .with_pipeline(hierarchical::lags),
    staged(
        AllReduce,
        "hierarchical-halving",
        hierarchical::staged_halving,
        hierarchical::staged_halving_cost,
    )
    .only_where(hierarchical::serves_several, SEVERAL_HOSTS)
    .with_sums_apart()
    .with_pipeline(hierarchical::halving_lags),
    staged(AllReduce, "hierarchical-doubling", leaders::all_reduce, leaders::all_reduce_cost)
        .only_where(leaders::serves, FULL_HOSTS)
        .with_partial_sums(),
    in_place(AllReduce, "hierarchical-push", hierarchical::push, hierarchical::push_cost)
        .only_where(hierarchical::serves_few, FEW_HOSTS)
        .with_sums_apart()
        .with_pipeline(hierarchical::lags),
    in_place(
        AllReduce,
        "hierarchical-halving-push",
        hierarchical::push_halving,
        hierarchical::push_halving_cost,
    )
    .only_where(hierarchical::serves_several, SEVERAL_HOSTS)
    .with_sums_apart()
    .with_pipeline(hierarchical::halving_lags),
    staged(Reduce, "shm", shared_rooted::reduce, shared_rooted::reduce_cost),
    staged(Broadcast, "shm", shared_rooted::broadcast, shared_rooted::broadcast_cost),
    staged(Broadcast, "hierarchical", hierarchical_rooted::tree, hierarchical_rooted::tree_cost)
        .only_where(leaders::serves_any, FULL)
        .with_slot_parts(BETWEEN_HOSTS),
    staged(
        Broadcast,
        "hierarchical-chain",
        hierarchical_rooted::chain,
        hierarchical_rooted::chain_cost,
    )
    .only_where(leaders::serves_any, FULL)
    .with_slot_parts(BETWEEN_HOSTS),
    staged(Reduce, "hierarchical", hierarchical_rooted::reduce, hierarchical_rooted::reduce_cost)
        .only_where(leaders::serves, FULL_HOSTS)
        .with_slot_parts(BETWEEN_HOSTS)
        .with_sums_apart(),
    staged(
        Reduce,
        "hierarchical-turns",
        hierarchical_rooted::reduce_in_turn,
        hierarchical_rooted::reduce_in_turn_cost,
    )
    .only_where(hierarchical_rooted::serves_turns, MANY_FULL_HOSTS)
    .with_sums_apart()
    .with_pipeline(hierarchical_rooted::turn_lags)
    .for_lengths(Lengths::Long),
    staged(Broadcast, "hierarchical-leaders", leaders::broadcast, leaders::broadcast_cost)
        .only_where(leaders::serves_any, FULL)
        .for_lengths(Lengths::Short),
    staged(Reduce, "hierarchical-leaders", leaders::reduce, leaders::reduce_cost)
        .only_where(leaders::serves, FULL_HOSTS)
        .with_sums_apart()
        .for_lengths(Lengths::Short),
    staged(Barrier, "hierarchical", leaders::barrier, leaders::barrier_cost)
        .only_where(leaders::serves_any, FULL),
    staged(Barrier, "shm", shared_rooted::barrier, shared_rooted::barrier_cost),
    staged(MonitoredBarrier, "shm", shared_rooted::barrier, shared_rooted::barrier_cost),
    staged(AllGather, "shm", shared_blocks::all_gather, shared_blocks::all_gather_cost)
        .with_uneven_blocks()
        .with_shelves(shared_blocks::one_shelf),
    staged(
        AllGather,
        "hierarchical",
        hierarchical_blocks::all_gather,
        hierarchical_blocks::all_gather_cost,
    )
    .only_where(hierarchical_blocks::serves, HOSTS)
    .with_uneven_blocks()
    .with_shelves(hierarchical_blocks::all_gather_shelves)
    .with_pipeline(sends_ahead),
    staged(AllGather, "hierarchical-ring", ring::all_gather, ring::all_gather_cost)
        .only_where(ring::serves, ANY_HOSTS)
        .with_uneven_blocks()
        .with_hops(ring::hops)
        .with_shelves(ring::all_gather_shelves),
    staged(ReduceScatter, "shm", shared_blocks::reduce_scatter, shared_blocks::reduce_scatter_cost)
        .with_uneven_blocks(),
    staged(
        ReduceScatter,
        "hierarchical",
        hierarchical_blocks::reduce_scatter,
        hierarchical_blocks::reduce_scatter_cost,
    )
    .only_where(hierarchical_blocks::serves_sums, ADDING_HOSTS)
    .with_sums_apart()
    .with_uneven_blocks()
    .with_shelves(hierarchical_blocks::reduce_scatter_shelves)
    .with_pipeline(receives_behind),
    staged(
        ReduceScatter,
        "hierarchical-halving",
        halving_blocks::reduce_scatter,
        halving_blocks::reduce_scatter_cost,
    )
    .only_where(halving_blocks::serves, ANY_ADDING_HOSTS)
    .with_partial_sums()
    .with_uneven_blocks()
    .with_hops(cube_census::hops)
    .with_shelves(halving_blocks::reduce_scatter_shelves),
    staged(Gather, "shm", shared_rooted::gather, shared_rooted::gather_cost).with_uneven_blocks(),
    staged(Scatter, "shm", shared_rooted::scatter, shared_rooted::scatter_cost)
        .with_uneven_blocks(),
    staged(Gather, "hierarchical", hierarchical_gather::gather, hierarchical_gather::gather_cost)
        .only_where(ring::serves, ANY_HOSTS)
        .for_lengths(Lengths::Short),
    staged(
        Scatter,
        "hierarchical",
        hierarchical_gather::scatter,
        hierarchical_gather::scatter_cost,
    )
    .only_where(ring::serves, ANY_HOSTS)
    .with_shelves(hierarchical_gather::scatter_shelves)
    .for_lengths(Lengths::Short),
    staged(AllToAll, "shm", shared_blocks::all_to_all, shared_blocks::all_to_all_cost),
    staged(
        AllGather,
        "hierarchical-agents",
        hierarchical_exchange::all_gather,
        hierarchical_exchange::all_gather_cost,
    )
    .only_where(ring::serves, ANY_HOSTS)
    .with_shelves(hierarchical_exchange::all_gather_shelves)
    .for_lengths(Lengths::Short),
    staged(
        AllToAll,
        "hierarchical",
        hierarchical_exchange::all_to_all,
        hierarchical_exchange::all_to_all_cost,
    )
    .only_where(ring::serves, ANY_HOSTS)
    .for_lengths(Lengths::Short),
    in_place(ReduceSlices, "shm-pull", registered::reduce_slices, registered::reduce_slices_cost),
    in_place(ReduceSlices, "hierarchical-pull", hierarchical::pull, hierarchical::pull_cost)
        .only_where(hierarchical::serves_few, FEW_HOSTS)
        .with_sums_apart(),
    in_place(
        ReduceSlices,
        "hierarchical-halving-pull",
        hierarchical::pull_halving,
        hierarchical::pull_halving_cost,
    )
    .only_where(hierarchical::serves_several, SEVERAL_HOSTS)
    .with_sums_apart(),
    in_place(Reduce, "shm-push", registered::reduce, registered::reduce_cost),
    in_place(Broadcast, "shm-push", registered::broadcast, registered::broadcast_cost),
    in_place(AllGather, "shm-push", registered::all_gather, registered::all_gather_cost)
        .with_uneven_blocks(),
    in_place(
        AllGather,
        "hierarchical-push",
        hierarchical_blocks::all_gather_push,
        hierarchical_blocks::all_gather_push_cost,
    )
    .only_where(hierarchical_blocks::serves, HOSTS)
    .with_uneven_blocks()
    .with_pipeline(sends_ahead),
    in_place(
        AllGather,
        "hierarchical-ring-push",
        ring::all_gather_push,
        ring::all_gather_push_cost,
    )
    .only_where(ring::serves, ANY_HOSTS)
    .with_uneven_blocks()
    .with_hops(ring::hops),
    in_place(
        ReduceScatter,
        "shm-pull",
        registered::reduce_scatter,
        registered::reduce_scatter_cost,
    )
    .with_uneven_blocks(),
    in_place(
        ReduceScatter,
        "hierarchical-pull",
        hierarchical_blocks::reduce_scatter_pull,
        hierarchical_blocks::reduce_scatter_pull_cost,
    )
    .only_where(hierarchical_blocks::serves_sums, ADDING_HOSTS)
    .with_sums_apart()
    .with_uneven_blocks()
    .with_pipeline(receives_behind),
    in_place(
        ReduceScatter,
        "hierarchical-halving-pull",
        halving_blocks::reduce_scatter_pull,
        halving_blocks::reduce_scatter_pull_cost,
    )
    .only_where(halving_blocks::serves, ANY_ADDING_HOSTS)
    .with_partial_sums()
    .with_uneven_blocks()
    .with_hops(cube_census::hops),
    // A rank without elements may have no registered memory, so blocks must be even.
    in_place(Gather, "shm-pull", registered::gather, registered::gather_cost),
    in_place(AllToAll, "shm-push", registered::all_to_all, registered::all_to_all_cost),
];

fn by_rounds(_topology: &Topology, _rank: Rank, steps: &[Step]) -> Lags {
    Lags::by_rounds(steps)
}

fn sends_ahead(_topology: &Topology, _rank: Rank, steps: &[Step]) -> Lags {
    Lags::sends_ahead(steps)
}

fn receives_behind(_topology: &Topology, _rank: Rank, steps: &[Step]) -> Lags {
    Lags::receives_behind(steps)
}

type Generate = fn(&Topology, Rank, Rank) -> Vec<Step>;
type CostOf = fn(&Topology, Rank, usize) -> Cost;

/// The ranks of one host copy through slots.
const fn staged(to: Collective, name: &'static str, steps: Generate, cost: CostOf) -> Algorithm {
    Algorithm::new(to, name, steps, cost)
        .in_memory(MemoryUse::Staged)
        .only_where(Topology::is_one_host, ONE_HOST)
}

/// The ranks of one host work in place, in registered buffers.
const fn in_place(to: Collective, name: &'static str, steps: Generate, cost: CostOf) -> Algorithm {
    staged(to, name, steps, cost).in_memory(MemoryUse::Registered)
}
