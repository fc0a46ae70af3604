//! The errors of every rank when something goes wrong.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Cause, Config, Error, GroupOptions, Objects, Operator, ProcessGroup, ReduceOp, Result,
};

fn config() -> Config {
    hub_backend::register().unwrap();
    Config::default().backend("hub").timeout(Duration::from_secs(30))
}

/// Runs `rank` on the ranks of a world. Returns their results in order.
fn world<R: Send>(
    ranks: usize,
    config: &Config,
    rank: impl Fn(ProcessGroup) -> Result<R> + Sync,
) -> Vec<thread::Result<Result<R>>> {
    let groups = drumline::rendezvous::local_world_with(ranks, config).unwrap();
    thread::scope(|threads| {
        let running: Vec<_> =
            groups.into_iter().map(|group| threads.spawn(|| rank(group))).collect();
        running.into_iter().map(thread::ScopedJoinHandle::join).collect()
    })
}

fn failure<R: std::fmt::Debug>(result: &thread::Result<Result<R>>) -> &drumline::CollectiveError {
    result.as_ref().unwrap().as_ref().unwrap_err().detail().unwrap()
}

#[test]
fn ranks_that_call_different_things_are_told_both_calls() {
    let results = world(3, &config(), |group| {
        let mut data = [0.0_f32; 4];
        match group.rank() {
            1 => group.all_reduce(&mut data[..3], ReduceOp::Sum),
            _ => group.all_reduce(&mut data, ReduceOp::Sum),
        }
    });
    for (rank, result) in results.iter().enumerate() {
        let failure = failure(result);
        assert!(matches!(failure.cause, Cause::Mismatch { .. }), "{failure}");
        let text = failure.to_string();
        assert!(text.contains("of 3 f32 [hub]") && text.contains("of 4 f32 [hub]"), "{text}");
        assert_eq!((failure.rank, failure.sequence), (rank, 0));
    }
}

#[test]
fn lengths_of_an_uneven_exchange_are_compared() {
    let results = world(2, &config(), |group| {
        let expected = if group.rank() == 1 { [1, 1] } else { [1, 2] };
        let mut data = vec![0_u8; expected.iter().sum()];
        group.in_blocks((&[1, 1], &expected)).all_to_all(&[1_u8; 2], &mut data)
    });
    let failure = failure(&results[0]);
    assert!(matches!(failure.cause, Cause::Mismatch { peer: 1, .. }), "{failure}");
}

#[test]
fn a_rank_that_dies_is_named_by_the_others() {
    let mut results = world(3, &config(), |group| {
        group.barrier()?;
        if group.rank() == 1 {
            panic!("on purpose");
        }
        group.barrier()
    });
    assert!(results.remove(1).is_err());
    for result in &results {
        let failure = failure(result);
        assert_eq!(failure.cause, Cause::PeerExited { peer: 1 }, "{failure}");
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_those_that_need_it() {
    let mut results = world(3, &config(), |group| {
        let meet = group.barrier();
        if group.rank() == 2 {
            return meet;
        }
        group.barrier()
    });
    assert!(results.remove(2).unwrap().is_ok());
    for result in &results {
        let failure = failure(result);
        assert_eq!(failure.cause, Cause::PeerLeft { peer: 2 }, "{failure}");
    }
}

#[test]
fn missing_ranks_are_named_and_told() {
    let waited = Barrier::new(4);
    let results = world(4, &config(), |group| {
        waited.wait();
        if group.rank() % 2 == 0 {
            let met = group.monitored_barrier(Duration::from_millis(500));
            waited.wait();
            return met;
        }
        waited.wait();
        group.barrier()
    });
    for (rank, result) in results.iter().enumerate() {
        let failure = failure(result);
        match rank % 2 {
            0 => assert_eq!(failure.cause, Cause::Timeout { waiting_for: vec![1, 3] }, "{failure}"),
            _ => assert!(failure.to_string().contains("[1, 3] have not made"), "{failure}"),
        }
    }
}

#[test]
fn an_abort_ends_the_calls_of_all() {
    let aborted = Barrier::new(2);
    let results = world(3, &config(), |group| match group.rank() {
        0 => {
            let waiting = group.barrier_async().unwrap();
            group.abort();
            let ended = waiting.wait().map(drop).map_err(Error::from);
            aborted.wait();
            ended
        }
        1 => {
            aborted.wait();
            // The abort may come just too late for the call that rank 0 has begun.
            group.barrier().and_then(|()| group.barrier())
        }
        _ => group.barrier().and_then(|()| group.barrier()),
    });
    for result in &results {
        let text = result.as_ref().unwrap().as_ref().unwrap_err().to_string();
        assert!(text.contains("aborted"), "{text}");
    }
}

#[test]
fn an_operator_that_panics_fails_the_call_of_all() {
    let results = world(2, &config(), |group| {
        let is_first = group.rank() == 0;
        let operator = Operator::custom("touchy", move |left: i32, right: i32| {
            assert!(!is_first, "on purpose");
            left + right
        });
        group.reduce(&mut [1], operator, 0)?;
        group.barrier()
    });
    let first = failure(&results[0]);
    assert!(matches!(&first.cause, Cause::Panicked { text } if text.contains("on purpose")));
    let text = failure(&results[1]).to_string();
    assert!(text.contains("on purpose"), "{text}");
}

#[test]
fn messages_overtake_each_other_by_tag_only() {
    let results = world(3, &config(), |group| {
        let (rank, ranks) = (group.rank(), group.world_size());
        // Receives first, in the order in which nobody sends; to oneself, too.
        let receives: Vec<_> = (0..ranks)
            .flat_map(|from| [1, 0].map(|tag| (from, tag)))
            .map(|(from, tag)| group.recv_async(vec![0_u64; 2], from, tag))
            .collect::<Result<_, _>>()?;
        for to in 0..ranks {
            for tag in [0, 1] {
                group.send(&[rank as u64, tag], to, tag)?;
            }
        }
        for (at, receive) in receives.into_iter().enumerate() {
            assert_eq!(receive.wait()?, [(at / 2) as u64, 1 - at as u64 % 2]);
        }
        group.barrier()?;
        let object: Option<String> = match rank {
            0 => Some(group.recv_object_any::<String>(9)?.0),
            1 => group.send_object("hello", 0, 9).map(|()| None)?,
            _ => None,
        };
        assert_eq!(object.as_deref(), (rank == 0).then_some("hello"));
        group.destroy()
    });
    results.into_iter().for_each(|result| result.unwrap().unwrap());
}

#[test]
fn sides_of_a_message_that_differ_are_told_so() {
    let results = world(2, &config(), |group| match group.rank() {
        0 => group.send(&[1_u8, 2], 1, 0).and_then(|()| group.barrier()),
        _ => group.recv(&mut [0_u8; 3], 0, 0),
    });
    let failure = failure(&results[1]);
    assert!(matches!(failure.cause, Cause::Mismatch { peer: 0, .. }), "{failure}");
    assert!(results[0].as_ref().unwrap().is_err());
}

#[test]
fn there_is_a_limit_to_messages_that_wait() {
    let results = world(1, &config(), |group| {
        let receive = |tag| group.recv_async(vec![0_u8], 0, tag);
        let waiting: Vec<_> = (0..1_024).map(receive).collect::<Result<_, _>>()?;
        let refused = receive(1_024)?.wait().unwrap_err();
        assert!(refused.to_string().contains("1024"), "{refused}");
        group.abort();
        assert!(waiting.into_iter().all(|receive| receive.wait().is_err()));
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap().unwrap());
}

#[test]
fn groups_of_a_group_have_hubs_of_their_own() {
    let results = world(4, &config(), |group| {
        let first = group.rank() / 2 * 2;
        let pair = group.new_group(&[first, first + 1], &GroupOptions::default())?;
        assert_eq!(pair.config().backend.as_deref(), Some("hub"));
        let mut sum = [group.rank() as u32];
        pair.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum, [[1], [5]][group.rank() / 2]);
        let built_in = GroupOptions::default().name("own").config(Config::default());
        group.new_group(&[0, 1, 2, 3], &built_in)?.barrier()?;
        pair.destroy()?;
        group.destroy()
    });
    results.into_iter().for_each(|result| result.unwrap().unwrap());
}

#[test]
fn a_world_that_is_not_complete_does_not_start() {
    hub_backend::register().unwrap();
    let config = config().timeout(Duration::from_millis(200));
    let store = std::sync::Arc::new(drumline::store::HashStore::new());
    let started = Instant::now();
    let error =
        drumline::rendezvous::init_with_store(store, 0, 2, &config).unwrap_err().to_string();
    assert!(error.contains("rank 1"), "{error} after {:?}", started.elapsed());
}
