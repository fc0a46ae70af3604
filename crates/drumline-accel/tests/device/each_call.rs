//! Each call of the driver in the life of a device group fails once: who is told what, and what is left.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use drumline_accel::{DeviceGroup, Error, Result};
use drumline_group::{Rank, ReduceOp};

use crate::common::{Bench, Data, Member, bench, config, finish, small};

/// All of a group's life: a sum of several windows, a staged call, a stream that waits for both, the end.
fn life(member: &Member) -> Result<()> {
    let on = DeviceGroup::new(&member.group, Arc::new(member.device.clone()), &small())?;
    let stream = member.stream();
    let data =
        [Data::new(&member.device, &[1.0_f32; 2_500]), Data::new(&member.device, &[2.0; 30])];
    data.iter().for_each(|data| data.put(&*stream));
    let works = [
        on.all_reduce_on(&stream, data[0].slice(), ReduceOp::Sum),
        on.broadcast_on(&stream, data[1].slice(), 0),
    ];
    // A stream that has joined a call which fails goes on, and `wait` says why.
    let ended = works.map(|work| {
        let work = work?;
        let joined = work.join(&stream);
        work.wait().and(joined)
    });
    finish(&stream);
    ended.into_iter().collect::<Result<()>>()?;
    on.destroy()
}

/// The lives of two ranks, in which the `nth` call fails. A panic: a call of the test's own has failed.
fn lives(bench: &Bench, nth: Option<u32>) -> Vec<thread::Result<Result<()>>> {
    bench.controls.seed(u64::from(nth.unwrap_or(0)));
    bench.world(2, &config(), |member| {
        member.group.barrier().unwrap();
        if let (0, Some(nth)) = (member.rank(), nth) {
            bench.controls.fail_any(nth, OUT_OF_MEMORY);
        }
        member.group.barrier().unwrap();
        catch_unwind(AssertUnwindSafe(|| life(&member)))
    })
}

const OUT_OF_MEMORY: i32 = 2;

/// Functions that give something back. Nobody is told that they fail, and what they should have given back stays.
const GIVE_BACK: [&str; 6] = [
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuDevicePrimaryCtxRelease",
];

/// Functions that may fail unheard: the call is made again, is one of the above, or has another way. The events of a
/// gate's word are asked when words are freed, and nobody waits for the answer.
const UNHEARD: [&str; 4] =
    ["cuCtxPopCurrent", "cuCtxPushCurrent", "cuEventQuery", "cuMemHostRegister"];

/// One in so many calls is tried, so that the test takes seconds. `make soak` tries all of them.
fn step() -> usize {
    std::env::var("DRUMLINE_TEST_EACH_CALL_STEP").map_or(10, |it| it.parse().unwrap())
}

/// Each rank has its own device, so a device names its rank.
fn check_error(rank: Rank, error: &Error, failed: &str, nth: u32) {
    let text = error.to_string();
    let at = format!("call {nth}, {failed}, rank {rank}: {text}");
    assert!(text.contains(failed), "{at}");
    assert!(text.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{at}");
    let is_own = text.contains(&format!("cuda:{rank}"));
    assert!(is_own || text.contains(&format!("cuda:{}", 1 - rank)), "{at}");
    match error.detail::<drumline_device::Error>() {
        Some(_) => assert!(is_own, "{at}"),
        None => {
            let culprit = if is_own { rank } else { 1 - rank };
            assert_eq!(error.culprit(), Some(culprit), "{at}");
        }
    }
}

#[test]
fn whichever_call_fails_it_is_named_on_all_ranks_and_the_rest_is_given_back() {
    let clean = bench();
    let before = clean.controls.calls();
    for ended in lives(&clean, None) {
        ended.unwrap().unwrap();
    }
    let calls = u32::try_from(clean.controls.calls() - before).unwrap();
    clean.is_clean();
    drop(clean);
    assert!(calls > 500, "only {calls} calls");
    let mut told = 0;
    // A life with another seed has other calls, some more or less.
    for nth in (1..=calls).step_by(step()) {
        let bench = bench();
        let ended = lives(&bench, Some(nth));
        let failed = bench.controls.failed();
        let name = failed.split("_v").next().unwrap();
        // What the test itself asks for may be what fails.
        let is_of_test = ended.iter().any(thread::Result::is_err);
        let of_group = ended.into_iter().enumerate();
        let errors: Vec<(Rank, Error)> =
            of_group.filter_map(|(rank, it)| Some((rank, it.ok()?.err()?))).collect();
        if !is_of_test {
            for (rank, error) in &errors {
                check_error(*rank, error, name, nth);
            }
            let may_be_unheard =
                failed.is_empty() || GIVE_BACK.contains(&name) || UNHEARD.contains(&name);
            assert!(may_be_unheard || !errors.is_empty(), "call {nth}: nobody has heard of {name}");
            told += usize::from(!errors.is_empty());
        }
        match name {
            "cuDevicePrimaryCtxRelease" => bench.gives_back_all_but(0, 1),
            // The word of a gate, of which nobody can tell whether a stream has passed it, is kept with its context.
            // The first may also be the call before one that gives back.
            "cuCtxPushCurrent" | "cuEventCreate" | "cuEventRecord" => {
                bench.gives_back_all_but(1, 1);
            }
            _ => bench.gives_back_all_but(u64::from(GIVE_BACK.contains(&name)), 0),
        }
    }
    assert!(told * step() > 250, "only {told} failures were told");
}
