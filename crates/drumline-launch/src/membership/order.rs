//! Which hosts may take part, and in which order.

use super::{
    sightings::Knowledge,
    values::{Named, Plan, Refused},
};

/// The most refused hosts that a plan names.
const REFUSED_MAX: usize = 256;

/// Which hosts may take part in the next world.
#[derive(Clone, Debug, Default)]
pub(super) struct Standing {
    /// Those that may, by their numbers.
    pub(super) ready: Vec<u64>,
    /// Whether there may be more, which a new leader has not seen for long enough.
    pub(super) is_unsure: bool,
    /// Those that may not.
    pub(super) refused: Vec<Refused>,
    /// A host of the last world, or the one with the store, that leaves, and its signal.
    pub(super) leaver: Option<(Named, i32)>,
}

/// Looks at every host.
pub(super) fn standing(it: &Knowledge<'_>, plan: &Plan) -> Standing {
    let mut standing = Standing { refused: plan.refused.clone(), ..Standing::default() };
    standing.refused.retain(|refused| !it.seen.is_silent(refused.host, it.timing));
    for number in it.seen.numbers() {
        if standing.refused.iter().any(|refused| refused.host == number) {
            continue;
        }
        let leaves = it.seen.report_of(number).and_then(|report| report.leaves);
        if let Some(signal) = leaves {
            let keeps_store = it.seen.host_of(number).is_some_and(|host| host.keeps_store);
            if plan.place(number).is_some() || keeps_store {
                standing.leaver.get_or_insert_with(|| (it.seen.named(number), signal));
            }
            continue;
        }
        let is_alive = it.seen.is_alive(number, it.timing);
        standing.is_unsure |= it.seen.is_unsure(number, it.timing);
        let is_unreadable =
            it.seen.problem_of(number).is_some() && !it.seen.is_silent(number, it.timing);
        match verdict(it, number, &standing.ready) {
            _ if !is_alive && !is_unreadable => {}
            Fits::Yes => standing.ready.push(number),
            Fits::NotYet => {}
            Fits::Never(why) if standing.refused.len() < REFUSED_MAX => {
                let name = it.seen.named(number).name;
                standing.refused.push(Refused { host: number, name, why });
            }
            Fits::Never(_) => {}
        }
    }
    standing
}

enum Fits {
    Yes,
    NotYet,
    Never(String),
}

/// Whether a host fits beside those that came before it.
fn verdict(it: &Knowledge<'_>, number: u64, before: &[u64]) -> Fits {
    if let Some(problem) = it.seen.problem_of(number) {
        return Fits::Never(problem.to_owned());
    }
    let Some(host) = it.seen.host_of(number) else { return Fits::NotYet };
    if let Some(difference) = host.terms.difference(&it.host.terms) {
        return Fits::Never(difference);
    }
    let Some(node_rank) = host.node_rank else { return Fits::Yes };
    let holder = before.iter().find(|other| {
        it.seen.host_of(**other).is_some_and(|other| other.node_rank == Some(node_rank))
    });
    let Some(holder) = holder.copied() else { return Fits::Yes };
    // If the other one has just ended, this one may be its next start. Late reports may still be under way.
    let came_at = it.seen.first_at(number).unwrap_or(it.now);
    match it.seen.goes_on_since(holder, came_at) {
        true => {
            let holder = it.seen.named(holder);
            Fits::Never(format!("host {holder} has node rank {node_rank}, too"))
        }
        false => Fits::NotYet,
    }
}

/// The hosts of the next world, in the order of their ranks. Those that stay keep their order; there may be fewer
/// places than hosts.
pub(super) fn of_ranks(it: &Knowledge<'_>, ready: &[u64], last: &Plan) -> Vec<u64> {
    let key = |number: &u64| {
        let node_rank = it.seen.host_of(*number).and_then(|host| host.node_rank);
        let place = last.place(*number);
        (node_rank.unwrap_or(usize::MAX), place.unwrap_or(usize::MAX), *number)
    };
    let mut hosts = ready.to_vec();
    hosts.sort_by_key(|number| (last.place(*number).is_none(), key(number)));
    hosts.truncate(it.host.terms.hosts.max.get());
    hosts.sort_by_key(key);
    hosts
}
