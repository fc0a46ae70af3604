use super::ParameterSpec;

/// Which rank owns which parameter, if each rank keeps the optimizer's state of its own parameters only
/// ([`DdpOptions::sharded`](super::DdpOptions::sharded)).
///
/// Parameters are not cut, because some optimizers need whole matrices. The largest one is dealt first, each to the rank
/// that has least so far. So no rank has more than an even share and the largest parameter. The plan follows from the
/// parameters alone, so all ranks have the same one.
///
/// ```
/// use drumline::{DType, ddp::{Owners, ParameterSpec}};
///
/// let model = [("embedding", 900), ("weight", 500), ("head", 300), ("bias", 10)]
///     .map(|(name, elements)| ParameterSpec::new(name, [elements], DType::F32));
/// let owners = Owners::plan(&model, 2);
/// assert_eq!([0, 1, 2, 3].map(|parameter| owners.of(parameter)), [Some(0), Some(1), Some(1), Some(1)]);
/// assert_eq!([owners.bytes(0), owners.bytes(1)], [3600, 3240]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owners {
    /// By parameter.
    owners: Vec<usize>,
    /// By rank.
    bytes: Vec<usize>,
}

impl Owners {
    /// Deals `parameters` to `world_size` ranks.
    pub fn plan(parameters: &[ParameterSpec], world_size: usize) -> Self {
        let mut owners = vec![0; parameters.len()];
        let mut bytes = vec![0; world_size.max(1)];
        let mut largest_first: Vec<usize> = (0..parameters.len()).collect();
        largest_first.sort_by_key(|&it| std::cmp::Reverse(parameters[it].bytes())); // is stable
        for parameter in largest_first {
            let least = bytes.iter().enumerate().min_by_key(|(_, bytes)| **bytes);
            let rank = least.map_or(0, |(rank, _)| rank); // the lowest of several
            owners[parameter] = rank;
            bytes[rank] += parameters[parameter].bytes();
        }
        Self { owners, bytes }
    }

    /// The owners of some of these parameters, in the order of `chosen`: for a reducer of those that turn out to be
    /// trained. Numbers of no parameter are passed over.
    #[must_use]
    pub fn only(&self, parameters: &[ParameterSpec], chosen: &[usize]) -> Self {
        let mut only = Self { owners: Vec::new(), bytes: vec![0; self.bytes.len()] };
        for (spec, owner) in
            chosen.iter().filter_map(|&it| Some((parameters.get(it)?, self.of(it)?)))
        {
            only.owners.push(owner);
            only.bytes[owner] += spec.bytes();
        }
        only
    }

    /// The number of parameters.
    pub fn len(&self) -> usize {
        self.owners.len()
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// The rank that owns a parameter; `None` if there is no such parameter.
    pub fn of(&self, parameter: usize) -> Option<usize> {
        self.owners.get(parameter).copied()
    }

    /// The parameters of a rank, in rising order.
    pub fn parameters(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.owners.len()).filter(move |&parameter| self.owners[parameter] == rank)
    }

    /// The bytes of a rank's parameters.
    pub fn bytes(&self, rank: usize) -> usize {
        self.bytes.get(rank).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use drumline_group::DType;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_parameter_has_one_owner_and_no_rank_has_much_more_than_its_share(
            elements in prop::collection::vec(0_usize..5000, 0..60), world_size in 1_usize..=9,
        ) {
            let dtype = |at: usize| if at.is_multiple_of(3) { DType::F64 } else { DType::F32 };
            let specs: Vec<ParameterSpec> = elements
                .iter()
                .enumerate()
                .map(|(at, &elements)| ParameterSpec::new(format!("p{at}"), [elements], dtype(at)))
                .collect();
            let owners = Owners::plan(&specs, world_size);
            let mut all: Vec<usize> =
                (0..world_size).flat_map(|rank| owners.parameters(rank)).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..specs.len()).collect::<Vec<_>>());
            let total: usize = specs.iter().map(ParameterSpec::bytes).sum();
            let largest = specs.iter().map(ParameterSpec::bytes).max().unwrap_or(0);
            for rank in 0..world_size {
                let bytes: usize = owners.parameters(rank).map(|it| specs[it].bytes()).sum();
                prop_assert_eq!(owners.bytes(rank), bytes);
                prop_assert!(bytes <= total / world_size + largest);
                prop_assert!(owners.parameters(rank).all(|it| owners.of(it) == Some(rank)));
            }
        }
    }

    #[test]
    fn equal_parameters_are_dealt_in_order_of_rank() {
        let specs = vec![ParameterSpec::new("p", [7], DType::F32); 5];
        let owners = Owners::plan(&specs, 3);
        assert_eq!(owners.owners, [0, 1, 2, 0, 1]);
        assert_eq!((owners.of(5), owners.bytes(3)), (None, 0));
    }
}
