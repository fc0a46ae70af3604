//! Which rank runs on which host, as servers of PMI write it: `(vector,(0,2,2))`.

use super::launchers::{Part, Place};

/// Fills in what the launcher's variables do not say. `None`: the mapping cannot be understood, or contradicts them.
pub(super) fn complete(place: Place, mapping: &str) -> Option<Place> {
    let host_of = hosts_of(mapping, place.size)?;
    let own = host_of[place.rank];
    let on_own_host = |ranks: &[usize]| ranks.iter().filter(|&&host| host == own).count();
    let local = Part { number: on_own_host(&host_of[..place.rank]), of: on_own_host(&host_of) };
    let hosts = host_of.iter().max()? + 1;
    match place.local.is_none_or(|known| known.of == local.of) {
        true => Some(Place {
            local: place.local.or(Some(local)),
            host: place.host.or(Some(Part { number: own, of: hosts })),
            ..place
        }),
        false => None,
    }
}

/// The host of every rank. A block `(first, hosts, ranks)` says that each of `hosts` hosts, from number `first` on, has the
/// next `ranks` ranks. After the last block it begins anew.
fn hosts_of(mapping: &str, size: usize) -> Option<Vec<usize>> {
    let blocks = mapping.strip_prefix("(vector,(")?.strip_suffix("))")?;
    let blocks = blocks.split("),(").map(|block| {
        let mut numbers = block.split(',').map(|number| number.parse().ok());
        let block = [numbers.next()??, numbers.next()??, numbers.next()??];
        (numbers.next().is_none() && block.iter().all(|&number: &usize| number <= size))
            .then_some(block)
    });
    let blocks = blocks.collect::<Option<Vec<_>>>()?;
    let once = blocks.iter().flat_map(|&[first, hosts, ranks]| {
        (first..first + hosts).flat_map(move |host| std::iter::repeat_n(host, ranks))
    });
    let hosts: Vec<usize> = once.cycle().take(size).collect();
    (hosts.len() == size && size > 0).then_some(hosts)
}

#[cfg(test)]
mod tests {
    use super::{super::launchers::Launcher, *};

    #[test]
    fn blocks_are_hosts_with_equally_many_ranks() {
        let of = |mapping| hosts_of(mapping, 6);
        assert_eq!(of("(vector,(0,3,2))"), Some(vec![0, 0, 1, 1, 2, 2]));
        assert_eq!(of("(vector,(0,1,4),(1,1,2))"), Some(vec![0, 0, 0, 0, 1, 1]));
        assert_eq!(of("(vector,(0,2,1))"), Some(vec![0, 1, 0, 1, 0, 1]));
        for bad in [
            "",
            "(vector,)",
            "(vector,())",
            "(vector,(0,1))",
            "(vector,(0,1,2,3))",
            "(vector,(0,0,1))",
            "(vector,(0,9999999,1))",
            "(vector,(0,1,-1))",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_variables_do_not_say_the_mapping_says() {
        let place =
            |rank, local| Place { launcher: Launcher::Hydra, rank, size: 4, local, host: None };
        let part = |number, of| Some(Part { number, of });
        let mapping = "(vector,(0,1,3),(1,1,1))";
        let told = complete(place(2, None), mapping).unwrap();
        assert_eq!((told.local, told.host), (part(2, 3), part(0, 2)));
        let told = complete(place(3, part(0, 1)), mapping).unwrap();
        assert_eq!((told.local, told.host), (part(0, 1), part(1, 2)));
        assert_eq!(complete(place(3, part(0, 2)), mapping), None);
    }
}
