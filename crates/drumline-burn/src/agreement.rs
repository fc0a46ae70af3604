//! Ranks that tell each other their problems and their settings, so that all go on or all stop.

use drumline::ProcessGroup;

use crate::Result;

/// The bytes in which a problem travels; a longer one is cut.
const PROBLEM_LENGTH: usize = 512;
/// The number of ranks that one text names, at most.
const NAMED_MAX: usize = 4;

/// Tells the other ranks whether this one has a problem. If any has, every rank gets the same text, which
/// names the ranks.
pub(crate) fn agree<T>(group: &ProcessGroup, mine: Result<T, String>) -> Result<Result<T, String>> {
    let mut line = [0_u8; PROBLEM_LENGTH];
    if let Err(problem) = &mine {
        // A problem without a text is still a problem.
        let text = if problem.is_empty() { "unknown" } else { problem };
        let text = &text.as_bytes()[..text.len().min(PROBLEM_LENGTH)];
        line[..text.len()].copy_from_slice(text);
    }
    let mut all = vec![0; PROBLEM_LENGTH * group.world_size()];
    group.all_gather(&line, &mut all)?;
    let problems: Vec<String> = all
        .chunks_exact(PROBLEM_LENGTH)
        .map(|line| String::from_utf8_lossy(line).trim_end_matches('\0').to_owned())
        .collect();
    Ok(match (join(&problems), mine) {
        (None, mine) => mine,
        // This rank's own text is whole if all have the same.
        (Some(_), Err(own)) if problems.iter().all(|problem| *problem == problems[0]) => Err(own),
        (Some(text), _) => Err(text),
    })
}

/// Checks that all ranks have rank 0's values of `settings`, which have the same names everywhere. If a rank
/// differs, every rank gets a text that names rank and setting.
pub(crate) fn same_settings(
    group: &ProcessGroup,
    settings: &[(&str, String)],
) -> Result<Result<(), String>> {
    // ASCII has characters between fields and between records.
    const FIELD: char = '\x1f';
    const RECORD: char = '\x1e';
    let text: Vec<String> =
        settings.iter().map(|(name, value)| format!("{name}{FIELD}{value}")).collect();
    let own = text.join(&RECORD.to_string());
    let mut length = [own.len() as i64];
    group.broadcast(&mut length, 0)?;
    let mut bytes = own.into_bytes();
    bytes.resize(length[0] as usize, 0);
    group.broadcast(&mut bytes, 0)?;
    let first = String::from_utf8_lossy(&bytes);
    let first: Vec<(&str, &str)> =
        first.split(RECORD).filter_map(|record| record.split_once(FIELD)).collect();
    let value_of = |name: &str| first.iter().find(|(of, _)| *of == name).map(|(_, value)| *value);
    let differs = settings.iter().find_map(|(name, own)| match value_of(name) {
        Some(theirs) if theirs == own => None,
        Some(theirs) => Some(format!("{name} is {own}, but rank 0 has {theirs}")),
        None => Some(format!("{name} is {own}, but rank 0 has none")),
    });
    let lacks = || {
        let has = |name: &str| settings.iter().any(|(of, _)| *of == name);
        let lacking = first.iter().find(|(name, _)| !has(name));
        lacking.map(|(name, theirs)| format!("{name} is not set, but rank 0 has {theirs}"))
    };
    agree(group, differs.or_else(lacks).map_or(Ok(()), Err))
}

/// Checks that no rank has a problem, and then that all ranks have rank 0's values of `settings`.
#[cfg(feature = "train")]
pub(crate) fn begin_alike(
    group: &ProcessGroup,
    problem: Option<String>,
    settings: &[(&str, String)],
) -> Result<Result<(), String>> {
    match agree(group, problem.map_or(Ok(()), Err))? {
        Ok(()) => same_settings(group, settings),
        refused => Ok(refused),
    }
}

/// One text for the problems of all ranks, in order of rank; an empty one is none.
fn join(problems: &[String]) -> Option<String> {
    let of_ranks: Vec<(usize, &String)> =
        problems.iter().enumerate().filter(|(_, problem)| !problem.is_empty()).collect();
    let (_, first) = of_ranks.first()?;
    if of_ranks.len() == problems.len() && problems.iter().all(|problem| problem == *first) {
        return Some((*first).clone());
    }
    let mut named: Vec<String> = of_ranks
        .iter()
        .take(NAMED_MAX)
        .map(|(rank, problem)| format!("on rank {rank}: {problem}"))
        .collect();
    if let Some(more) = of_ranks.len().checked_sub(NAMED_MAX).filter(|more| *more > 0) {
        named.push(format!("and {more} more ranks"));
    }
    Some(named.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_ranks<T: Send>(ranks: usize, work: impl Fn(&ProcessGroup) -> T + Send + Sync) -> Vec<T> {
        let groups = drumline::rendezvous::local_world(ranks).unwrap();
        std::thread::scope(|threads| {
            let ranks: Vec<_> = groups.iter().map(|group| threads.spawn(|| work(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn a_problem_of_one_rank_is_everyones() {
        let texts = on_ranks(3, |group| {
            let mine = if group.rank() == 1 { Err("no space".to_owned()) } else { Ok(7) };
            agree(group, mine).unwrap()
        });
        assert!(
            texts.iter().all(|text| *text == Err("on rank 1: no space".to_owned())),
            "{texts:?}"
        );
        let long = "x".repeat(2 * PROBLEM_LENGTH);
        let texts = on_ranks(2, |group| agree(group, Err::<(), _>(long.clone())).unwrap());
        assert!(texts.iter().all(|text| *text == Err(long.clone())), "own text is whole");
        assert_eq!(on_ranks(2, |group| agree(group, Ok(group.rank())).unwrap()), [Ok(0), Ok(1)]);
    }

    #[test]
    fn settings_that_differ_are_named() {
        let of = |value: usize| [("batch size", value.to_string()), ("seed", "7".into())];
        let texts = on_ranks(2, |group| {
            same_settings(group, &of(32 * (group.rank() + 1))).unwrap().unwrap_err()
        });
        assert!(
            texts.iter().all(|t| t == "on rank 1: batch size is 64, but rank 0 has 32"),
            "{texts:?}"
        );
        let texts = on_ranks(2, |group| {
            let settings = of(1);
            same_settings(group, &settings[..2 - group.rank()]).unwrap().unwrap_err()
        });
        assert!(texts[0].contains("seed is not set, but rank 0 has 7"), "{texts:?}");
        assert_eq!(on_ranks(2, |group| same_settings(group, &of(3)).unwrap()), [Ok(()), Ok(())]);
        let blank = [("note", String::new()), ("seed", "7".into())];
        assert_eq!(on_ranks(2, |group| same_settings(group, &blank).unwrap()), [Ok(()), Ok(())]);
        assert_eq!(on_ranks(2, |group| same_settings(group, &[]).unwrap()), [Ok(()), Ok(())]);
    }
}
