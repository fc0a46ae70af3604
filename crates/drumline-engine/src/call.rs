//! What a collective is asked to do, and which algorithm does it.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use drumline_kernels::DType;
use drumline_schedule::{
    ALGORITHMS, Algorithm, Collective, Counts, MemoryUse, Topology,
    price::{Choices, ElementKind, Prices, price},
    step::Rank,
};

use crate::{
    Error, Result, Settings,
    executor::{Description, Operation},
    operation::Request,
    operator::{Operator, OperatorKind},
};

/// The arguments of a collective, other than its buffers.
#[derive(Clone, Debug)]
pub struct Call {
    pub operation: Operation,
    pub operator: Option<OperatorKind>,
    pub root: Option<Rank>,
    pub dtype: DType,
    /// The elements of each block: of what a rank contributes, or gets.
    pub counts: Counts,
    /// The lengths of the caller's buffers, where several travel as one.
    pub parts: Vec<usize>,
    /// The time limit, if it is not that of the group.
    pub timeout: Option<Duration>,
}

impl Call {
    /// A call without a root and an operator.
    pub fn new(operation: Operation, dtype: DType, counts: Counts) -> Call {
        let (operator, root, parts, timeout) = (None, None, Vec::new(), None);
        Call { operation, operator, root, dtype, counts, parts, timeout }
    }

    pub fn reducing<T>(self, operator: impl Into<Operator<T>>) -> Request<T> {
        let operator = operator.into();
        Request { call: Call { operator: Some(operator.kind()), ..self }, operator }
    }

    pub fn rooted(self, root: Rank) -> Call {
        Call { root: Some(root), ..self }
    }

    pub fn in_parts(self, parts: Vec<usize>) -> Call {
        Call { parts, ..self }
    }

    pub fn within(self, timeout: Duration) -> Call {
        Call { timeout: Some(timeout), ..self }
    }

    /// Whether the other call is carried out in the same way: it differs in its time limit at most.
    pub fn is_like(&self, other: &Call) -> bool {
        let Call { operation, operator, root, dtype, counts, parts, timeout: _ } = self;
        // Most calls have no parts. To compare nothing with nothing at an address that is none costs
        // as much as all else that is compared: 50 ns on a processor with masked loads.
        let same_parts =
            parts.len() == other.parts.len() && (parts.is_empty() || *parts == other.parts);
        let lengths = same_parts && *counts == other.counts;
        let rest = (*operation, *operator, *root, *dtype);
        lengths && rest == (other.operation, other.operator, other.root, other.dtype)
    }

    fn is_uneven(&self) -> bool {
        !matches!(self.counts, Counts::Even(_))
    }

    /// The call as it is told to peers.
    pub fn describe(&self, group: u64, sequence: u64, algorithm: &str) -> Description {
        let Call { operation, dtype, .. } = *self;
        let description = Description::new(group, sequence, operation, dtype, 0, algorithm)
            .with_counts(&self.counts);
        let description = match self.parts[..] {
            [] => description,
            _ => description.with_blocks(self.parts.iter().copied()),
        };
        let description = match self.operator {
            Some(operator) => description.with_operator(operator),
            None => description,
        };
        match self.root {
            Some(root) => description.with_root(root),
            None => description,
        }
    }

    /// What its elements weigh.
    pub fn element_kind(&self) -> ElementKind {
        ElementKind { bytes: self.dtype.size(), sum_bytes: self.accumulator().size() }
    }

    /// The type that partial results are kept in. A custom operator works on the caller's type.
    fn accumulator(&self) -> DType {
        match self.operator {
            Some(operator) if operator.is_custom() => self.dtype,
            _ => self.dtype.accumulator(),
        }
    }
}

/// How a call is carried out: the same on all ranks that make the same call.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    pub algorithm: &'static Algorithm,
    /// Whether the data goes through staging slots.
    pub staged: bool,
    /// Whether narrow floats are widened for the whole operation, because partial sums travel.
    pub wide: bool,
    /// Bytes of the elements that travel.
    pub element_bytes: usize,
}

/// Up to this many bytes one round through everybody's slot is faster than two rounds in which
/// each rank reads only its part. A constant and not a measurement, so that all ranks agree.
const ONE_SHOT_BYTES: usize = 32 * 1024;

/// The same for elements that are widened to be combined, which takes longer than to read them.
const ONE_SHOT_NARROW_BYTES: usize = 8 * 1024;

/// From how many bytes of a block on it is faster to work where buffers are registered than to copy to slots,
/// which takes a round of posts less. Constants again, as parts of `long`, which is 1 MiB.
fn registered_from(collective: Collective, ranks: usize, long: usize) -> usize {
    match collective {
        Collective::AllReduce => long / 512,
        Collective::Broadcast => long / 512 * ranks * ranks,
        // What others have read since is slow to be written to, unless it has left their caches.
        Collective::AllGather => long / 2 * ranks,
        Collective::AllToAll => long / 2,
        Collective::ReduceScatter => long / 2048 * ranks * ranks,
        // The root copies all by itself either way, and most of it out of its cache.
        Collective::Gather if ranks > 2 => long,
        _ => long / 512 * ranks,
    }
}

/// Chooses the algorithm of a call of which the [buffer](Collective::registered_buffer) is `registered`, or is
/// not. Where ranks of a host share memory, `long_bytes` is [what is long](crate::host::Host::long_bytes)
/// there.
///
/// # Errors
///
/// [`Error::InvalidSetting`] when the settings ask for what cannot be;
/// [`Error::InvalidArgument`] for an operator that the elements do not have.
pub fn choose(
    call: &Call,
    topology: &Topology,
    over_links: &mut OverLinks,
    long_bytes: Option<usize>,
    registered: bool,
    settings: &Settings,
) -> Result<Choice> {
    if let Some(problem) = call.operator.and_then(|operator| operator.problem_with(call.dtype)) {
        return Err(Error::InvalidArgument { operation: call.operation.name(), problem });
    }
    let collective = call.operation.collective();
    let narrow = call.accumulator() != call.dtype;
    let is_wide = |algorithm: &Algorithm| narrow && algorithm.partial_sums_travel;
    let finish = |algorithm: &'static Algorithm| {
        let wide = is_wide(algorithm);
        Choice {
            algorithm,
            staged: algorithm.memory == MemoryUse::Staged,
            wide,
            element_bytes: if wide { size_of::<f32>() } else { call.dtype.size() },
        }
    };
    if let (Operation::AllReduce, Some(name)) = (call.operation, &settings.all_reduce) {
        let algorithm = find(collective, name)?;
        let problem = match algorithm.memory {
            // Alone, there is nothing to do in any way.
            _ if topology.world_size == 1 => return Ok(finish(algorithm)),
            MemoryUse::Staged if long_bytes.is_none() => "these ranks share no memory",
            MemoryUse::Registered if !registered => "this buffer is not registered",
            MemoryUse::Registered if is_wide(algorithm) => {
                "sums of floats of 16 or 8 bits would be rounded on their way"
            }
            _ if !(algorithm.applies)(topology) => "it does not fit this group",
            _ => return Ok(finish(algorithm)),
        };
        return Err(Error::InvalidSetting {
            setting: "the algorithm of all_reduce".to_owned(),
            problem: format!("{name:?} cannot be used here: {problem}"),
        });
    }
    let all_share = long_bytes.is_some() && topology.is_one_host();
    if call.operation == Operation::MonitoredBarrier && !all_share {
        // Everybody hears from everybody, and so knows who is missing.
        return Ok(finish(find(collective, "direct")?));
    }
    let bytes = call.counts.longest().saturating_mul(call.dtype.size());
    let uneven = call.is_uneven();
    let shared = long_bytes.and_then(|long_bytes| {
        let fits = |row: &&Algorithm| {
            row.collective == collective
                && (row.uneven || !uneven)
                && match row.memory {
                    MemoryUse::Private => false,
                    // On one host nothing has to be widened, which takes longer.
                    MemoryUse::Staged => !(is_wide(row) && topology.is_one_host()),
                    MemoryUse::Registered => registered && !is_wide(row),
                }
                && (row.applies)(topology)
        };
        // With two ranks, reading one whole slot is as much as reading half and copying half.
        let one_shot = match narrow {
            true => bytes <= ONE_SHOT_NARROW_BYTES,
            false => bytes <= ONE_SHOT_BYTES || topology.world_size == 2,
        };
        let push = bytes > registered_from(collective, topology.world_size, long_bytes);
        // Prices leave shared memory out, and on one host there is nothing else.
        let price = |row| match topology.is_one_host() {
            true => 0,
            false => over_links.price(row, call, topology),
        };
        let fitting = ALGORITHMS.iter().filter(fits);
        let is_long = bytes >= long_bytes;
        fitting.min_by_key(|row| (price(row), preference(row, push, one_shot, is_long)))
    });
    let algorithm = match shared {
        Some(algorithm) => algorithm,
        None => over_links.algorithm(call, topology)?,
    };
    Ok(finish(algorithm))
}

/// The place of an algorithm among those that use shared memory: the lowest is taken.
fn preference(row: &Algorithm, push: bool, one_shot: bool, is_long: bool) -> u8 {
    let by_nodes = row.name.starts_with("shm-nodes");
    match (row.memory, row.name) {
        // Twice the rounds of others.
        _ if by_nodes && !is_long => u8::MAX,
        (MemoryUse::Registered, _) if push => u8::from(!by_nodes),
        (MemoryUse::Registered, _) => 6,
        _ if by_nodes => 2,
        (_, "shm-oneshot") if one_shot => 3,
        (_, "shm-oneshot") => 5,
        _ => 4,
    }
}

/// The algorithms that send messages only, for all lengths: of one group, each kind of call worked
/// out when it is first made. They follow from prices that all ranks have agreed on.
#[derive(Debug)]
pub struct OverLinks {
    prices: Prices,
    known: HashMap<(Collective, ElementKind), Choices>,
}

impl Default for OverLinks {
    fn default() -> OverLinks {
        OverLinks::by(Prices::TCP)
    }
}

impl OverLinks {
    /// Chooses by these prices.
    pub fn by(prices: Prices) -> OverLinks {
        OverLinks { prices, known: HashMap::new() }
    }

    pub fn prices(&self) -> &Prices {
        &self.prices
    }

    /// What `call` would cost by `row`. How long that takes in shared memory is left out.
    fn price(&self, row: &Algorithm, call: &Call, topology: &Topology) -> u128 {
        price(row, topology, call.counts.longest(), call.element_kind(), &self.prices)
    }

    /// The cheapest algorithm for `call`. The topology is always the same one.
    fn algorithm(&mut self, call: &Call, topology: &Topology) -> Result<&'static Algorithm> {
        let collective = call.operation.collective();
        if call.is_uneven() {
            let serves = |row: &&Algorithm| {
                row.collective == collective
                    && row.uneven
                    && row.memory == MemoryUse::Private
                    && (row.applies)(topology)
            };
            return ALGORITHMS.iter().find(serves).ok_or_else(|| none_serves(call));
        }
        let kind = call.element_kind();
        let choices = match self.known.entry((collective, kind)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let choices = Choices::new(collective, topology, kind, &self.prices);
                new.insert(choices.ok_or_else(|| none_serves(call))?)
            }
        };
        Ok(choices.algorithm(call.counts.longest()))
    }
}

fn none_serves(call: &Call) -> Error {
    Error::InvalidArgument {
        operation: call.operation.name(),
        problem: format!(
            "no algorithm of {} over links sums by placement where hosts hold ranks that are no \
             node of the tree: take the order of ranks (DRUMLINE_SUM_ORDER=rank)",
            call.operation.name()
        ),
    }
}

/// The algorithm `name` of `collective`.
///
/// # Errors
///
/// [`Error::InvalidSetting`] lists the names that there are.
pub fn find(collective: Collective, name: &str) -> Result<&'static Algorithm> {
    Algorithm::find(collective, name).map_err(|unknown| Error::InvalidSetting {
        setting: format!("the algorithm of {collective}"),
        problem: unknown.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    fn call(operation: Operation, dtype: DType, elements: usize) -> Call {
        let operator = Some(OperatorKind::Builtin(ReduceOp::Sum));
        Call { operator, ..Call::new(operation, dtype, Counts::Even(elements)) }
    }

    fn without_shared_memory(call: &Call, ranks: usize) -> Choice {
        let (topology, settings) = (Topology::flat(ranks), Settings::default());
        choose(call, &topology, &mut OverLinks::default(), None, false, &settings).unwrap()
    }

    #[test]
    fn links_take_few_rounds_for_short_data_and_few_bytes_for_long() {
        let name = |elements, ranks| {
            let call = call(Operation::AllReduce, DType::F32, elements);
            without_shared_memory(&call, ranks).algorithm.name
        };
        assert_eq!(name(1, 4), "doubling");
        assert_eq!(name(1 << 20, 4), "direct");
        assert_eq!(name(1 << 26, 1_000), "halving");
    }

    #[test]
    fn a_time_limit_changes_nothing_of_how_a_call_is_carried_out() {
        let short = call(Operation::AllReduce, DType::F32, 1);
        assert!(short.is_like(&short.clone().within(Duration::from_secs(1))));
        assert!(!short.is_like(&call(Operation::AllReduce, DType::F32, 2)));
        assert!(!short.is_like(&Call { operator: None, ..short.clone() }));
        assert!(!short.is_like(&short.clone().rooted(0)));
        assert!(!short.is_like(&short.clone().in_parts(vec![1])));
    }

    /// How ranks in shared memory sum `elements` of f32, 8 on each of so many hosts.
    fn on_hosts(hosts: usize, elements: usize) -> &'static str {
        let (topology, settings) = (Topology::hosts(&vec![8; hosts]), Settings::default());
        let call = call(Operation::AllReduce, DType::F32, elements);
        let over_links = &mut OverLinks::default();
        choose(&call, &topology, over_links, Some(1 << 20), false, &settings)
            .unwrap()
            .algorithm
            .name
    }

    #[test]
    fn leaders_exchange_short_data_between_hosts_and_seats_long_data() {
        assert_eq!(on_hosts(1, 1), "shm-oneshot");
        for hosts in [2, 3, 8] {
            let names = [1, 1 << 20].map(|elements| on_hosts(hosts, elements));
            assert_eq!(names, ["hierarchical-doubling", "hierarchical"], "{hosts} hosts");
        }
        for hosts in [64, 128, 300] {
            let names = [1, 1 << 20].map(|elements| on_hosts(hosts, elements));
            assert_eq!(names, ["hierarchical-doubling", "hierarchical-halving"], "{hosts} hosts");
        }
    }

    #[test]
    fn memory_nodes_sum_long_data_first() {
        let settings = Settings::default();
        let nodes = Topology::hosts(&[8]).with_nodes((0..8).map(|rank| Some(rank / 4)));
        let name = |dtype, elements, registered| {
            let call = call(Operation::AllReduce, dtype, elements);
            let links = &mut OverLinks::default();
            let choice =
                choose(&call, &nodes, links, Some(1 << 20), registered, &settings).unwrap();
            assert!(!choice.wide);
            choice.algorithm.name
        };
        assert_eq!(name(DType::F32, 1 << 18, false), "shm-nodes");
        assert_eq!(name(DType::F32, 1 << 18, true), "shm-nodes-push");
        assert_eq!(name(DType::F32, (1 << 18) - 1, false), "shm-twoshot");
        assert_eq!(name(DType::F32, (1 << 18) - 1, true), "shm-push");
        // Sums of nodes would have to be wider than what ranks bring.
        assert_eq!(name(DType::Bf16, 1 << 24, false), "shm-twoshot");
        assert_eq!(name(DType::Bf16, 1 << 24, true), "shm-push");
    }

    #[test]
    fn narrow_floats_travel_wide_in_partial_sums_only() {
        let travels = |dtype, elements| {
            let choice = without_shared_memory(&call(Operation::AllReduce, dtype, elements), 64);
            (choice.algorithm.name, choice.wide, choice.element_bytes)
        };
        assert_eq!(travels(DType::Bf16, 1 << 24), ("direct", false, 2));
        assert_eq!(travels(DType::Bf16, 100), ("doubling", true, 4));
        assert_eq!(travels(DType::F8E4M3, 100), ("doubling", true, 4));
        assert_eq!(travels(DType::F32, 100), ("doubling", false, 4));
    }

    #[test]
    fn custom_operators_get_narrow_floats_as_they_are() {
        let call = Call {
            operator: Some(OperatorKind::Custom("first")),
            ..call(Operation::AllReduce, DType::Bf16, 100)
        };
        let choice = without_shared_memory(&call, 64);
        assert_eq!((choice.wide, choice.element_bytes), (false, 2));
    }

    /// In place there is no room for wider elements.
    #[test]
    fn narrow_floats_are_not_summed_host_by_host_in_place() {
        let settings =
            Settings { all_reduce: Some("hierarchical-push".into()), ..Settings::default() };
        let attempt = |dtype| {
            let call = call(Operation::AllReduce, dtype, 100);
            let topology = Topology::hosts(&[2, 2]);
            choose(&call, &topology, &mut OverLinks::default(), None, true, &settings)
        };
        assert!(attempt(DType::F32).is_ok());
        let error = attempt(DType::F16).unwrap_err().to_string();
        assert!(error.contains("16 or 8 bits would be rounded"), "{error}");
    }
}
