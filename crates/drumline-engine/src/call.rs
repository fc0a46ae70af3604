//! Calls, and the choice of the algorithm for each.

use std::time::Duration;

use drumline_kernels::DType;
use drumline_schedule::{
    Algorithm, Chooser, Collective, Counts, MemoryUse, Situation, Topology, eligible,
    price::ElementKind, step::Rank,
};

use crate::{
    Error, Result, Settings,
    executor::Description,
    operator::{Operator, OperatorKind},
    typed_call::Request,
};

/// One call of a collective on a rank: its arguments, other than buffers.
#[derive(Clone, Debug)]
pub struct Call {
    /// What it does.
    pub collective: Collective,
    pub operator: Option<OperatorKind>,
    pub root: Option<Rank>,
    pub dtype: DType,
    /// The elements of each block.
    pub counts: Counts,
    /// The lengths of the caller's buffers, where several travel as one.
    pub parts: Vec<usize>,
    /// The time limit, if it differs from the group's.
    pub timeout: Option<Duration>,
}

impl Call {
    /// A call without a root and an operator.
    pub fn new(collective: Collective, dtype: DType, counts: Counts) -> Call {
        let (operator, root, parts, timeout) = (None, None, Vec::new(), None);
        Call { collective, operator, root, dtype, counts, parts, timeout }
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

    /// Whether the other call has the same plan: it differs at most in its time limit.
    pub fn is_like(&self, other: &Call) -> bool {
        let Call { collective, operator, root, dtype, counts, parts, timeout: _ } = self;
        // Most calls have no parts. A comparison of two empty lists, at dangling addresses, would take as
        // long as all other comparisons together: 50 ns on a processor with masked loads.
        let same_parts =
            parts.len() == other.parts.len() && (parts.is_empty() || *parts == other.parts);
        let lengths = same_parts && *counts == other.counts;
        let rest = (*collective, *operator, *root, *dtype);
        lengths && rest == (other.collective, other.operator, other.root, other.dtype)
    }

    /// The description of the call for peers.
    pub fn describe(&self, group: u64, sequence: u64, algorithm: &str) -> Description {
        let Call { collective, dtype, .. } = *self;
        let description = Description::new(group, sequence, collective, dtype, 0, algorithm)
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

    /// What the choice of its algorithm depends on. Where the ranks of a host share memory, `long_bytes` is
    /// the length from which data is [long](crate::host::Host::long_bytes) there.
    pub fn situation<'a>(
        &self,
        topology: &'a Topology,
        long_bytes: Option<usize>,
        registered: bool,
    ) -> Situation<'a> {
        Situation {
            collective: self.collective,
            topology,
            elements: self.counts.longest(),
            kind: ElementKind { bytes: self.dtype.size(), sum_bytes: self.accumulator().size() },
            uneven: !matches!(self.counts, Counts::Even(_)),
            registered,
            long_bytes,
        }
    }

    /// The type of partial results. A custom operator works on the caller's type.
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
    /// Whether narrow floats are widened for the whole call, because partial sums travel.
    pub wide: bool,
    /// Bytes of the elements that travel.
    pub element_bytes: usize,
}

/// Chooses how a call is carried out: by the algorithm that the settings name, or by the best one.
///
/// # Errors
///
/// [`Error::InvalidSetting`] when the settings name an algorithm that is not eligible;
/// [`Error::InvalidArgument`] for an operator that the elements do not have, and where no algorithm serves.
pub fn choose(
    call: &Call,
    situation: &Situation<'_>,
    chooser: &mut Chooser,
    settings: &Settings,
) -> Result<Choice> {
    let name = call.collective.name();
    if let Some(problem) = call.operator.and_then(|operator| operator.problem_with(call.dtype)) {
        return Err(Error::InvalidArgument { operation: name, problem });
    }
    let named = match named(situation, settings)? {
        None => chooser.choose(situation),
        named => named,
    };
    let algorithm = named.ok_or_else(|| Error::InvalidArgument {
        operation: name,
        problem: format!(
            "no algorithm of {name} over links sums by placement where hosts hold ranks that are no \
             node of the tree: take the order of ranks (DRUMLINE_SUM_ORDER=rank)"
        ),
    })?;
    Ok(Choice {
        algorithm,
        staged: algorithm.memory == MemoryUse::Staged,
        wide: situation.widens(algorithm),
        element_bytes: algorithm.travelling(situation.kind.bytes, situation.kind.sum_bytes),
    })
}

/// The algorithm that the settings name for all-reduces. A rank that is alone has nothing to do, so there
/// the setting may name any algorithm.
fn named(situation: &Situation<'_>, settings: &Settings) -> Result<Option<&'static Algorithm>> {
    let (Collective::AllReduce, Some(name)) = (situation.collective, &settings.all_reduce) else {
        return Ok(None);
    };
    let algorithm = find(situation.collective, name)?;
    match eligible(algorithm, situation) {
        Ok(()) => Ok(Some(algorithm)),
        Err(_) if situation.topology.world_size == 1 => Ok(None),
        Err(why) => Err(Error::InvalidSetting {
            setting: "the algorithm of all_reduce".to_owned(),
            problem: format!("{name:?} cannot be used here: {why}"),
        }),
    }
}

/// The algorithm `name` of `collective`.
///
/// # Errors
///
/// [`Error::InvalidSetting`] lists the known names.
pub fn find(collective: Collective, name: &str) -> Result<&'static Algorithm> {
    Algorithm::find(collective, name).map_err(|unknown| Error::InvalidSetting {
        setting: format!("the algorithm of {collective}"),
        problem: unknown.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_schedule::{ALGORITHMS, SumOrder, price::Prices};

    use crate::{ReduceOp, explain::explain};

    fn call(collective: Collective, dtype: DType, elements: usize) -> Call {
        let operator = Some(OperatorKind::Builtin(ReduceOp::Sum));
        Call { operator, ..Call::new(collective, dtype, Counts::Even(elements)) }
    }

    fn without_shared_memory(call: &Call, ranks: usize) -> Choice {
        let (topology, settings) = (Topology::flat(ranks), Settings::default());
        choose(call, &call.situation(&topology, None, false), &mut Chooser::default(), &settings)
            .unwrap()
    }

    #[test]
    fn links_take_few_rounds_for_short_data_and_few_bytes_for_long() {
        let name = |elements, ranks| {
            let call = call(Collective::AllReduce, DType::F32, elements);
            without_shared_memory(&call, ranks).algorithm.name
        };
        assert_eq!(name(1, 4), "doubling");
        assert_eq!(name(1 << 20, 4), "direct");
        assert_eq!(name(1 << 26, 1_000), "halving");
    }

    #[test]
    fn a_time_limit_changes_nothing_of_how_a_call_is_carried_out() {
        let short = call(Collective::AllReduce, DType::F32, 1);
        assert!(short.is_like(&short.clone().within(Duration::from_secs(1))));
        assert!(!short.is_like(&call(Collective::AllReduce, DType::F32, 2)));
        assert!(!short.is_like(&Call { operator: None, ..short.clone() }));
        assert!(!short.is_like(&short.clone().rooted(0)));
        assert!(!short.is_like(&short.clone().in_parts(vec![1])));
    }

    /// How ranks in shared memory sum `elements` of f32, 8 on each of so many hosts.
    fn on_hosts(hosts: usize, elements: usize) -> &'static str {
        let (topology, settings) = (Topology::hosts(&vec![8; hosts]), Settings::default());
        let call = call(Collective::AllReduce, DType::F32, elements);
        let situation = call.situation(&topology, Some(1 << 20), false);
        choose(&call, &situation, &mut Chooser::default(), &settings).unwrap().algorithm.name
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
            let call = call(Collective::AllReduce, dtype, elements);
            let situation = call.situation(&nodes, Some(1 << 20), registered);
            let choice = choose(&call, &situation, &mut Chooser::default(), &settings).unwrap();
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
            let choice = without_shared_memory(&call(Collective::AllReduce, dtype, elements), 64);
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
            ..call(Collective::AllReduce, DType::Bf16, 100)
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
            let call = call(Collective::AllReduce, dtype, 100);
            let topology = Topology::hosts(&[2, 2]);
            let situation = call.situation(&topology, Some(1 << 20), true);
            choose(&call, &situation, &mut Chooser::default(), &settings)
        };
        assert!(attempt(DType::F32).is_ok());
        let error = attempt(DType::F16).unwrap_err().to_string();
        assert!(error.contains("16 or 8 bits would be rounded"), "{error}");
    }

    #[test]
    fn a_rank_alone_may_name_any_algorithm() {
        let call = call(Collective::AllReduce, DType::F32, 100);
        for row in ALGORITHMS.iter().filter(|row| row.collective == Collective::AllReduce) {
            let settings = Settings { all_reduce: Some(row.name.into()), ..Settings::default() };
            let topology = Topology::flat(1);
            let situation = call.situation(&topology, None, false);
            let chosen =
                choose(&call, &situation, &mut Chooser::default(), &settings).unwrap().algorithm;
            assert!(chosen.schedule(&topology, 0, 0).unwrap().steps.is_empty(), "{}", row.name);
        }
    }

    /// What `explain` calls possible is what the settings may name, and holds what is chosen.
    #[test]
    fn an_explanation_lists_what_can_be_chosen() {
        let mut seen = 0;
        let worlds: [&[usize]; 6] = [&[2], &[8], &[1, 1, 1], &[2, 2], &[3, 3], &[4, 4, 2]];
        for (sizes, order) in worlds
            .into_iter()
            .flat_map(|sizes| [SumOrder::Rank, SumOrder::Placement].map(|order| (sizes, order)))
        {
            let topology = Topology::hosts(sizes).with_order(order);
            for (long_bytes, registered) in
                [(None, false), (Some(1 << 20), false), (Some(1 << 20), true)]
            {
                for (collective, dtype, elements) in
                    Collective::ALL.into_iter().flat_map(|collective| {
                        [DType::F32, DType::Bf16]
                            .into_iter()
                            .flat_map(move |dtype| [1, 1 << 22].map(|n| (collective, dtype, n)))
                    })
                {
                    let call = call(collective, dtype, elements);
                    let situation = call.situation(&topology, long_bytes, registered);
                    let take = |all_reduce: Option<String>| {
                        let settings = Settings { all_reduce, ..Settings::default() };
                        choose(&call, &situation, &mut Chooser::default(), &settings)
                    };
                    let Ok(chosen) = take(None) else { continue };
                    let explanation = explain(&situation, &Prices::TCP, chosen.algorithm, false);
                    let is_listed = |name: &str| {
                        let found = explanation.candidates.iter().find(|it| it.algorithm == name);
                        found.is_some_and(|candidate| candidate.problem.is_none())
                    };
                    assert!(is_listed(chosen.algorithm.name), "{situation:?}: {explanation}");
                    for candidate in &explanation.candidates {
                        assert!(candidate.price.is_none() || candidate.problem.is_none());
                        if collective == Collective::AllReduce {
                            let can_take = take(Some(candidate.algorithm.to_owned())).is_ok();
                            assert_eq!(
                                is_listed(candidate.algorithm),
                                can_take,
                                "{situation:?}: {explanation}"
                            );
                            seen += 1;
                        }
                    }
                }
            }
        }
        assert!(seen > 1_000, "{seen}");
    }
}
