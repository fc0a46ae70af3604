//! Ranks as real processes, configured by the environment. One is killed, perhaps together with the hub:
//! the other ranks name it.
//!
//! The ranks are this test program again, with `HUB_VICTIM` in the environment.

use std::{
    env,
    process::{self, Command, Output, Stdio},
    thread,
};

use drumline::{
    Cause, ProcessGroup, ReduceOp, auth::Secret, rendezvous::Endpoint, store::tcp::TcpStoreServer,
};

const RANKS: usize = 3;

#[test]
fn rank_process() {
    let Ok(victim) = env::var("HUB_VICTIM") else { return };
    let victim: usize = victim.parse().unwrap();
    hub_backend::register().unwrap();
    let group = ProcessGroup::from_env().unwrap();
    assert_eq!(group.config().backend.as_deref(), Some("Hub"));
    let mut data = vec![group.rank() as f32; 100_000];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, vec![3.0; 100_000]);
    if group.rank() == victim {
        process::abort();
    }
    if victim < RANKS {
        let error = group.all_reduce(&mut data, ReduceOp::Sum).unwrap_err();
        assert_eq!(error.cause(), Some(&Cause::PeerExited { peer: victim }), "{error}");
        assert!(group.destroy().is_err());
    } else {
        group.destroy().unwrap();
    }
    println!("as expected");
}

/// The outputs of the ranks of a job in which rank `victim` dies.
fn job(victim: usize) -> Vec<Output> {
    let secret = "a secret that only this job's processes know";
    let name = format!("hub-test-{}-{victim}", process::id());
    let endpoint = Endpoint::Unix(name.clone());
    let _server = TcpStoreServer::bind_secured(&endpoint, &Secret::new(secret).unwrap()).unwrap();
    let start = |rank: usize| {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "processes::rank_process", "--nocapture", "--test-threads=1"])
            .env("HUB_VICTIM", victim.to_string())
            .env("DRUMLINE_BACKEND", "Hub")
            .env("DRUMLINE_STORE", format!("unix:@{name}"))
            .env("DRUMLINE_SECRET", secret)
            .env("DRUMLINE_TIMEOUT_S", "60")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<_> = (0..RANKS).map(start).collect();
    let waiting = ranks.into_iter().map(|rank| thread::spawn(|| rank.wait_with_output().unwrap()));
    waiting.collect::<Vec<_>>().into_iter().map(|output| output.join().unwrap()).collect()
}

#[test]
fn a_process_that_dies_is_named_by_the_others() {
    for victim in 0..=RANKS {
        for (rank, output) in job(victim).iter().enumerate() {
            let text = String::from_utf8_lossy(&output.stdout);
            let expected = rank != victim;
            assert_eq!(output.status.success(), expected, "{victim}, {rank}: {output:?}");
            assert_eq!(text.contains("as expected"), expected, "{victim}, {rank}: {output:?}");
        }
    }
}
