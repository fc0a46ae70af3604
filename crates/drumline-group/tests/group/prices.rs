//! What algorithms over links are chosen by is the same on all ranks.

use std::{sync::Arc, thread};

use drumline_group::{
    Config, DType, ErrorKind, ProcessGroup, ReduceOp, Result,
    algorithms::{PriceList, PriceSource, explain},
    backend::Collective,
    store::{HashStore, Store},
};

/// Connects a rank for every source of prices, and lets each do something.
fn on_ranks<R: Send>(
    sources: &[PriceSource],
    over_links: bool,
    rank: impl Fn(Result<ProcessGroup>) -> R + Sync,
) -> Vec<R> {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    thread::scope(|threads| {
        let ranks: Vec<_> = (0..)
            .zip(sources)
            .map(|(number, source)| {
                let (store, rank) = (store.clone(), &rank);
                let config = Config::default()
                    .prices(source.clone())
                    .shared_memory(!over_links)
                    .unix_sockets(!over_links);
                threads.spawn(move || {
                    let world_size = sources.len();
                    rank(drumline_group::rendezvous::connect(
                        "prices", store, number, world_size, &config,
                    ))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn given(change: impl FnOnce(&mut PriceList)) -> PriceSource {
    let mut list = PriceList::default();
    change(&mut list);
    PriceSource::Given(Box::new(list))
}

fn all_reduce_of(group: &ProcessGroup, elements: usize) -> String {
    let answer = explain(group, Collective::AllReduce, elements, DType::F32, false).unwrap();
    answer.algorithm
}

#[test]
fn ranks_with_other_prices_are_named() {
    let sources = [PriceSource::Default, PriceSource::Default, given(|list| list.far.round_ps = 1)];
    let errors = on_ranks(&sources, true, |group| match group {
        Err(error) if error.kind() == ErrorKind::Connect => error.to_string(),
        other => panic!("{:?}", other.map(drop)),
    });
    for (rank, culprit) in [(0, "rank 2"), (1, "rank 2"), (2, "rank 0")] {
        let error = &errors[rank];
        assert!(error.contains(&format!("{culprit}: it chooses")), "{error}");
        assert!(error.contains("DRUMLINE_PRICES"), "{error}");
    }
}

#[test]
fn equal_prices_agree_wherever_they_come_from() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prices.toml");
    std::fs::write(&file, "# nothing but defaults\n").unwrap();
    let sources = [PriceSource::Default, PriceSource::File(file), given(|_| {})];
    for result in on_ranks(&sources, false, |group| group.map(drop)) {
        result.unwrap();
    }
}

/// Every rank has the same answer, takes it, and hands it on to groups that are made of this one.
#[test]
fn what_is_measured_is_the_same_on_all_ranks() {
    let sources = vec![PriceSource::Measure; 3];
    let seen = on_ranks(&sources, true, |group| {
        let group = group.unwrap();
        let PriceSource::Given(list) = group.config().prices.clone() else { panic!("unsettled") };
        let mut data = [group.rank() as f32; 1000];
        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        assert_eq!(data, [3.0; 1000]);
        let half = group.new_group(&[0, 1, 2], &Default::default()).unwrap();
        assert_eq!(half.config().prices, group.config().prices);
        let answers = [1, 1_000, 1_000_000].map(|elements| {
            explain(&group, Collective::AllReduce, elements, DType::F32, false).unwrap()
        });
        (list, answers)
    });
    assert!(seen.iter().all(|other| *other == seen[0]));
    let (list, _) = &seen[0];
    assert_ne!(list.far, PriceList::default().far);
    assert!(list.far.round_ps > 0 && list.combined_byte_fs > 0);
}

/// There is nothing to choose, so nothing is measured.
#[test]
fn shared_memory_measures_no_links() {
    for list in on_ranks(&[PriceSource::Measure, PriceSource::Measure], false, |group| {
        group.unwrap().config().prices.clone()
    }) {
        assert_eq!(list, given(|_| {}));
    }
}

#[test]
fn prices_decide_over_links() {
    let names = |source: PriceSource| {
        on_ranks(&vec![source; 4], true, |group| all_reduce_of(&group.unwrap(), 64))
    };
    // Rounds cost nothing, bytes everything: and the other way round.
    let bytes = given(|list| {
        (list.far.round_ps, list.far.message_ps, list.far.byte_fs) = (0, 0, 1_000_000_000);
    });
    let rounds = given(|list| (list.far.round_ps, list.far.byte_fs) = (1_000_000_000_000, 0));
    assert_eq!(names(bytes), ["direct"; 4]);
    assert!(names(rounds).iter().all(|name| ["doubling", "direct", "gather"].contains(&&**name)));
    assert_eq!(names(PriceSource::Default), ["doubling"; 4]);
}

#[test]
fn an_explanation_names_every_candidate() {
    let texts = on_ranks(&[PriceSource::Default, PriceSource::Default], false, |group| {
        let group = group.unwrap();
        let explained = |elements, dtype, registered| {
            explain(&group, Collective::AllReduce, elements, dtype, registered).unwrap()
        };
        let staged = explained(1 << 20, DType::F32, false);
        assert_eq!(staged.algorithm, "shm-oneshot"); // two ranks
        assert_eq!(explained(1 << 20, DType::Bf16, false).algorithm, "shm-twoshot");
        assert_eq!(explained(4 << 10, DType::Bf16, false).algorithm, "shm-oneshot");
        let push = staged.candidates.iter().find(|it| it.algorithm == "shm-push").unwrap();
        assert_eq!(push.problem.as_deref(), Some("the buffer is not registered"));
        let doubling = staged.candidates.iter().find(|it| it.algorithm == "doubling").unwrap();
        assert!(doubling.price.is_some() && doubling.problem.is_none());
        assert_eq!(explained(1 << 20, DType::Bf16, true).algorithm, "shm-push");
        assert!(explain(&group, Collective::Barrier, 0, DType::U8, false).is_ok());
        staged.to_string()
    });
    assert_eq!(texts[0], texts[1]);
    assert!(texts[0].starts_with("shm-oneshot: the ranks of a host share memory"), "{}", texts[0]);
    assert!(texts[0].contains("* shm-oneshot"), "{}", texts[0]);
}
