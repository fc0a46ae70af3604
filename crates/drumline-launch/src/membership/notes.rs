//! What a host tells people when the plan changes.

use crate::ending::signal_name;

use super::values::{Named, Phase, Plan, Why};

/// What is new in a plan, for people.
pub(super) fn between(old: Option<&Plan>, new: &Plan, me: u64) -> Vec<String> {
    let mut notes = Vec::new();
    let is_known = |host: u64| old.is_some_and(|it| it.refused.iter().any(|it| it.host == host));
    for refused in new.refused.iter().filter(|it| it.host != me && !is_known(it.host)) {
        notes.push(format!("host {} is refused: {}", refused.name, refused.why));
    }
    let was_lost =
        |host: &Named| old.is_some_and(|it| it.world == new.world && it.lost.contains(host));
    for lost in new.lost.iter().filter(|it| !was_lost(it)) {
        let left = new.present().count();
        let whose = match lost.host == me {
            true => "this host".into(),
            false => format!("host {lost}"),
        };
        notes.push(format!(
            "the job goes on without the ranks of {whose}; hosts that are left: {left}"
        ));
    }
    if old.is_some_and(|old| old.phase == new.phase && old.world == new.world) {
        return notes;
    }
    let remain = new.members.len();
    match &new.phase {
        Phase::Running => {
            let size: usize = new.members.iter().map(|it| it.ranks).sum();
            let own = new.place(me).and_then(|place| new.members.get(place));
            let own = own.map_or("this one is a spare".into(), |own| {
                format!("those of this one begin at {}", own.first_rank)
            });
            notes.push(format!("world {}: {remain} hosts, {size} ranks; {own}", new.world));
        }
        Phase::Holding => notes.push("a host has come: all ranks stop at the next step".into()),
        Phase::StoppingAt(step) => notes.push(format!("all ranks stop before step {step}")),
        Phase::Ending(Why::Lost(host)) => notes.push(format!(
            "host {host} does not answer: its ranks are taken out, {remain} hosts remain"
        )),
        Phase::Ending(Why::Left(host, signal)) if host.host != me => {
            notes.push(format!("host {host} leaves: its launcher got {}", signal_name(*signal)))
        }
        Phase::Pausing(pause) => {
            notes.push(format!("restart {} in {pause:?}", new.restart));
        }
        _ => {}
    }
    notes
}
