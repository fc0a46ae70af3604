//! The choice of the algorithm for a call.

use drumline_schedule::{Algorithm, Chooser, Collective, MemoryUse, Situation, eligible};

use crate::{Error, Result, Settings, call::Call};

/// How a call is carried out. All ranks that make the same call choose the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choice {
    pub(crate) algorithm: &'static Algorithm,
    /// Whether the data goes through staging slots.
    pub(crate) staged: bool,
    /// Whether narrow floats are widened for the whole call, because partial sums travel.
    pub(crate) wide: bool,
    /// Bytes of an element in all places but those for sums, and in those.
    pub(crate) element_bytes: usize,
    pub(crate) sum_bytes: usize,
    /// Whether elements are narrower than their sums, which then lie in places of their own if the algorithm can
    /// keep them apart.
    pub(crate) narrow: bool,
}

/// Chooses the algorithm that the settings name, or the cheapest one.
///
/// # Errors
///
/// [`Setting`](drumline_error::ErrorKind::Setting) when the settings name an algorithm that is not eligible;
/// [`Argument`](drumline_error::ErrorKind::Argument) for an operator that the elements do not have, and where no
/// algorithm serves.
pub(crate) fn choose(
    call: &Call,
    situation: &Situation<'_>,
    chooser: &mut Chooser,
    settings: &Settings,
) -> Result<Choice> {
    let name = call.collective.name();
    if let Some(problem) = call.problem() {
        return Err(Error::argument(name, problem));
    }
    let named = match named(situation, settings)? {
        None => chooser.choose(situation),
        named => named,
    };
    let algorithm = named.ok_or_else(|| Error::argument(name, format!(
            "no algorithm of {name} over links sums by placement where hosts hold ranks that are no \
             node of the tree: take the order of ranks (DRUMLINE_SUM_ORDER=rank)"
        )))?;
    let (kind, wide) = (situation.kind, situation.widens(algorithm));
    Ok(Choice {
        algorithm,
        staged: algorithm.memory == MemoryUse::Staged,
        wide,
        element_bytes: if wide { kind.sum_bytes } else { kind.bytes },
        sum_bytes: kind.sum_bytes,
        narrow: situation.is_narrow(),
    })
}

/// The algorithm that the settings name for all-reduces. In a world of one rank there is nothing to do, so
/// the setting may name any algorithm there.
fn named(situation: &Situation<'_>, settings: &Settings) -> Result<Option<&'static Algorithm>> {
    let (Collective::AllReduce, Some(name)) = (situation.collective, &settings.all_reduce) else {
        return Ok(None);
    };
    let algorithm = find(situation.collective, name)?;
    match eligible(algorithm, situation) {
        Ok(()) => Ok(Some(algorithm)),
        Err(_) if situation.topology.world_size == 1 => Ok(None),
        Err(why) => Err(Error::setting(
            "the algorithm of all_reduce",
            format!("{name:?} cannot be used here: {why}"),
        )),
    }
}

/// The algorithm `name` of `collective`.
///
/// # Errors
///
/// [`Setting`](drumline_error::ErrorKind::Setting) lists the known names.
pub fn find(collective: Collective, name: &str) -> Result<&'static Algorithm> {
    Algorithm::find(collective, name)
        .map_err(|unknown| Error::setting(&format!("the algorithm of {collective}"), unknown))
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{ALGORITHMS, Counts, Rounding, SumOrder, Topology, price::Prices};

    use super::*;
    use crate::{DType, ReduceOp, explain::explain, operator::OperatorKind};

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

    /// The algorithm that sums `elements` of f32 where each host has 8 ranks in shared memory.
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
        // In bf16, host-by-host sums would have to travel in a wider type than the ranks bring.
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
    fn between_hosts_only_sums_of_narrow_floats_are_wide() {
        let (topology, settings) = (Topology::hosts(&[8, 8]), Settings::default());
        let widths = |dtype, elements| {
            let call = call(Collective::AllReduce, dtype, elements);
            let situation = call.situation(&topology, Some(1 << 20), false);
            let choice = choose(&call, &situation, &mut Chooser::default(), &settings).unwrap();
            (choice.algorithm.name, choice.wide, choice.element_bytes, choice.sum_bytes)
        };
        assert_eq!(widths(DType::Bf16, 1 << 20), ("hierarchical", false, 2, 4));
        assert_eq!(widths(DType::F8E5M2, 1 << 20), ("hierarchical", false, 1, 4));
        assert_eq!(widths(DType::F32, 1 << 20), ("hierarchical", false, 4, 4));
        assert_eq!(widths(DType::Bf16, 1), ("hierarchical-doubling", true, 4, 4));
    }

    #[test]
    fn an_explanation_says_that_hosts_round_their_sums() {
        let rounded = Topology::hosts(&[8, 8]).with_rounding(Rounding::Host);
        let explained = |topology: &Topology, dtype| {
            let call = call(Collective::AllReduce, dtype, 1);
            let situation = call.situation(topology, Some(1 << 20), false);
            let settings = Settings::default();
            let choice = choose(&call, &situation, &mut Chooser::default(), &settings).unwrap();
            explain(&situation, &Prices::TCP, choice.algorithm, false)
        };
        let of_bf16 = explained(&rounded, DType::Bf16);
        assert_eq!(of_bf16.algorithm, "hierarchical");
        assert!(of_bf16.why.contains("DRUMLINE_ROUNDING=host"), "{of_bf16}");
        assert!(of_bf16.to_string().contains("no: each host rounds its sum"), "{of_bf16}");
        // Sums of f32 are as wide as f32.
        let once = [(&rounded, DType::F32), (&Topology::hosts(&[8, 8]), DType::Bf16)];
        for explained in once.map(|(topology, dtype)| explained(topology, dtype)) {
            assert_eq!(explained.algorithm, "hierarchical-doubling");
            assert!(!explained.to_string().contains("round"), "{explained}");
        }
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

    /// Sums of memory nodes in place would have no room for wider elements.
    #[test]
    fn narrow_floats_are_not_summed_node_by_node_in_place() {
        let settings =
            Settings { all_reduce: Some("shm-nodes-push".into()), ..Settings::default() };
        let attempt = |dtype| {
            let call = call(Collective::AllReduce, dtype, 100);
            let nodes = (0..4).map(|rank| Some(rank / 2));
            let topology = Topology::hosts(&[4]).with_nodes(nodes);
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

    /// The settings may name exactly the algorithms that `explain` calls possible, and the chosen one is
    /// among them.
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
