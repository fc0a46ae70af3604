//! What the library does for a backend, whatever that does.

use std::{
    future::{Future, IntoFuture},
    pin::pin,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

use drumline_group::{
    Begun, Cause, CollectiveError, Config, DType, Error, ErrorKind, Operator, ProcessGroup,
    ReduceOp,
    backend::{
        Arrived, Backend, BackendOptions, Collective, Outgoing, Request, Wanted, register_backend,
    },
    store::HashStore,
};

use crate::common::failure;

/// Serves one rank, and tells what it was asked for.
#[derive(Debug, Default)]
struct Solo {
    seen: Mutex<Vec<String>>,
}

impl Backend for Solo {
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
        let call = request.call;
        assert!(call.collective() != Collective::AllToAll, "exchanges are too much");
        self.seen.lock().unwrap().push(call.signature().to_string());
        match call.collective() {
            Collective::AllReduce => {
                let own = request.data.to_vec();
                call.reduce(&[&own], request.data)
            }
            Collective::Barrier => {
                // The next call must not overtake this one.
                thread::sleep(Duration::from_millis(20));
                Ok(())
            }
            Collective::Gather => Err(Cause::Backend { problem: "no fabric".to_owned() }),
            _ => Ok(()),
        }
    }

    fn supports(&self, collective: Collective, dtype: DType, operator: Option<&str>) -> bool {
        collective != Collective::AllReduce || (dtype != DType::F64 && operator != Some("max"))
    }

    fn abort(&self, failure: &CollectiveError) {
        self.seen.lock().unwrap().push(format!("abort: {}", failure.cause));
        assert!(failure.operation.contains("gather") || failure.operation.contains("all_to_all"));
    }

    fn shutdown(&self, deadline: Instant) -> Result<(), Cause> {
        assert!(deadline > Instant::now());
        self.seen.lock().unwrap().push("shutdown".to_owned());
        Ok(())
    }
}

/// A world of one on a [`Solo`] under this name.
fn solo(name: &str) -> (Arc<Solo>, ProcessGroup) {
    let solo = Arc::new(Solo::default());
    let made = solo.clone();
    register_backend(name, move |_: &BackendOptions| Ok(made.clone())).unwrap();
    let config = Config::default().backend(name);
    (solo, drumline_group::rendezvous::local_world_with(1, &config).unwrap().remove(0))
}

#[test]
fn calls_come_one_after_another_in_their_order() {
    let (backend, group) = solo("order");
    let first = group.barrier_async().unwrap();
    let second = group.all_reduce_async(vec![3_u8], Operator::premul_sum(2)).unwrap();
    let mut data = [f32::MAX, 1.0];
    group.all_reduce(&mut data, ReduceOp::Avg).unwrap();
    let third = group.barrier_async().unwrap();
    assert_eq!((second.wait().unwrap(), data), (vec![6], [f32::MAX, 1.0]));
    drop((first, third));
    group.destroy().unwrap();
    let seen = backend.seen.lock().unwrap();
    let expected = [
        "#0 barrier [order]",
        "#1 all_reduce(premul_sum) of 1 u8 [order]",
        "#2 all_reduce(avg) of 2 f32 [order]",
        "#3 barrier [order]",
        "shutdown",
    ];
    assert_eq!(*seen, expected);
}

#[test]
fn what_is_not_supported_is_refused_and_the_group_goes_on() {
    let (backend, group) = solo("limited");
    for refused in [
        group.all_reduce(&mut [1.0_f64], ReduceOp::Sum),
        group.all_reduce(&mut [1.0_f32], ReduceOp::Max),
        group.all_reduce(&mut [1.0_f32], ReduceOp::Band),
        group.send(&[1_u8], 0, 0),
        group.recv(&mut [1_u8], 0, 0),
    ] {
        assert!(
            matches!(refused, Err(ref error) if error.kind() == ErrorKind::Argument),
            "{refused:?}"
        );
    }
    assert!(
        group.alloc_registered::<u8>(3).is_ok()
            && !drumline_group::algorithms::shares_memory(&group)
    );
    group.barrier().unwrap();
    group.destroy().unwrap();
    assert_eq!(*backend.seen.lock().unwrap(), ["#0 barrier [limited]", "shutdown"]);
}

#[test]
fn a_failure_poisons_the_group() {
    let (backend, group) = solo("failing");
    let failure = failure(group.gather(&[1_u8], &mut [0_u8], 0).unwrap_err());
    assert_eq!(failure.to_string().matches("the backend says: no fabric").count(), 1);
    assert_eq!((failure.sequence, &*failure.group), (0, "local"));
    let error = group.barrier_async().unwrap().wait().unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
    assert!(error.to_string().ends_with(&failure.to_string()), "{error}");
    assert!(group.clone().destroy().is_err());
    let seen = backend.seen.lock().unwrap();
    assert_eq!(
        *seen,
        ["#0 gather(root 0) of 1 u8 [failing]", "abort: the backend says: no fabric"]
    );
}

#[test]
fn a_panic_of_a_backend_is_an_error_of_the_call() {
    for in_background in [false, true] {
        let (_, group) = solo("panicking");
        let result = match in_background {
            true => group
                .all_to_all_async(vec![1_u8], vec![0_u8])
                .unwrap()
                .wait()
                .map(drop)
                .map_err(Error::from),
            false => group.all_to_all(&[1_u8], &mut [0]),
        };
        let failure = failure(result.unwrap_err());
        assert!(matches!(&failure.cause, Cause::Panicked { text } if text.contains("too much")));
        assert!(matches!(group.barrier(), Err(error) if error.kind() == ErrorKind::Poisoned));
    }
}

#[test]
fn a_panic_of_a_factory_is_an_error_of_the_start() {
    register_backend("stillborn", |_: &BackendOptions| panic!("no such fabric")).unwrap();
    let config = Config::default().backend("stillborn");
    let error = drumline_group::rendezvous::local_world_with(2, &config).unwrap_err().to_string();
    assert!(error.contains("no such fabric"), "{error}");
}

#[test]
fn ranks_on_different_backends_are_told_so() {
    for name in ["one-of-two", "the-other"] {
        register_backend(name, |_: &BackendOptions| Ok(Arc::new(Solo::default()))).unwrap();
    }
    for others in [Some("the-other"), None] {
        let store = Arc::new(HashStore::new());
        let start = |rank, backend: Option<&str>| {
            let mut config = Config::default();
            config.backend = backend.map(str::to_owned);
            drumline_group::rendezvous::connect("mixed", store.clone(), rank, 2, &config)
        };
        let (mine, theirs) = thread::scope(|threads| {
            let theirs = threads.spawn(|| start(1, others));
            (start(0, Some("one-of-two")), theirs.join().unwrap())
        });
        let mine = mine.unwrap_err().to_string();
        assert!(mine.contains("rank 1") && mine.contains("one-of-two"), "{mine}");
        let theirs = theirs.unwrap_err().to_string();
        assert!(theirs.contains("rank 0"), "{theirs}");
    }
}

/// Nothing ends in it before it is let go or aborted.
#[derive(Debug, Default)]
struct Slow {
    goes_on: Mutex<bool>,
    changed: Condvar,
    has_begun: AtomicBool,
}

impl Slow {
    fn let_go(&self) {
        *self.goes_on.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn wait(&self) -> Result<(), Cause> {
        self.has_begun.store(true, SeqCst);
        drop(self.changed.wait_while(self.goes_on.lock().unwrap(), |goes_on| !*goes_on).unwrap());
        Ok(())
    }
}

impl Backend for Slow {
    fn collective(&self, _: &mut Request<'_>) -> Result<(), Cause> {
        self.wait()
    }

    fn has_messages(&self) -> bool {
        true
    }

    fn send(&self, _: &Outgoing<'_>) -> Result<(), Cause> {
        self.wait()
    }

    fn recv(&self, _: &Wanted) -> Result<Arrived, Cause> {
        self.wait()?;
        Err(Cause::Backend { problem: "nothing has arrived".to_owned() })
    }

    fn abort(&self, _: &CollectiveError) {
        self.let_go();
    }

    fn shutdown(&self, _: Instant) -> Result<(), Cause> {
        Ok(())
    }
}

/// Rank 0 of a world of two on a [`Slow`] under this name.
fn slow(name: &str) -> (Arc<Slow>, ProcessGroup) {
    let slow = Arc::new(Slow::default());
    let made = slow.clone();
    register_backend(name, move |_: &BackendOptions| Ok(made.clone())).unwrap();
    let config = Config::default().backend(name);
    (slow, drumline_group::rendezvous::local_world_with(2, &config).unwrap().remove(0))
}

/// The time limit of the group is ten minutes, and nobody lets the calls go on.
#[test]
fn a_rank_that_leaves_breaks_off_what_does_not_end_in_time() {
    type Begin = fn(&ProcessGroup) -> Begun<Vec<u8>>;
    let calls: [Begin; 3] = [
        |group| group.barrier_async(),
        |group| group.send_async(vec![1], 1, 0),
        |group| group.recv_async(vec![1], 1, 0),
    ];
    for (number, call) in calls.into_iter().enumerate() {
        let (backend, group) = slow(&format!("slow-{number}"));
        let work = call(&group).unwrap();
        while !backend.has_begun.load(SeqCst) {
            thread::yield_now();
        }
        group.clone().leave(Duration::from_millis(50)).unwrap();
        assert!(*backend.goes_on.lock().unwrap(), "it was not aborted");
        // What is under way when a group is aborted may succeed nevertheless.
        drop(work.wait());
        assert!(matches!(group.barrier(), Err(error) if error.kind() == ErrorKind::Poisoned));
    }
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("in a waker");
    }
}

#[test]
fn a_waker_that_panics_takes_no_thread_of_a_backend_with_it() {
    let (backend, group) = slow("panicking-waker");
    let mut first = pin!(group.send_async(vec![1_u8], 1, 0).unwrap().into_future());
    let waker = Waker::from(Arc::new(Panics));
    assert!(first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let second = group.send_async(vec![2_u8], 1, 0).unwrap();
    backend.let_go();
    assert_eq!(second.wait().unwrap(), [2]);
    // It waits for all that is under way.
    group.destroy().unwrap();
}

/// [`Duration::MAX`] means no limit: for the start, a call, a message, and the end.
#[test]
fn a_backend_may_have_no_time_limit() {
    let (_, group) = solo("endless");
    let endless = group.within(Duration::MAX);
    endless.all_reduce(&mut [2.0_f32], ReduceOp::Sum).unwrap();
    group.leave(Duration::MAX).unwrap();

    let config = Config::default().backend("endless").timeout(Duration::MAX);
    let group = drumline_group::rendezvous::local_world_with(1, &config).unwrap().remove(0);
    group.barrier().unwrap();
    group.destroy().unwrap();
}
