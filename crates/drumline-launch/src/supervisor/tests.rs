use proptest::prelude::*;

use super::*;

const OK: Ending = Ending::Code(0);
const SEGV: Ending = Ending::Signal { number: 11, core_dumped: false };
const KILLED: Ending = Ending::Signal { number: 9, core_dumped: false };
const ABRT: Ending = Ending::Signal { number: 6, core_dumped: false };

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn orders(workers: &[usize], signal: Signal) -> Vec<Order> {
    workers.iter().map(|&worker| Order { worker, signal }).collect()
}

#[test]
fn success_needs_all_workers() {
    let mut supervisor = Supervisor::new(2, Policy::default());
    assert_eq!(supervisor.handle(at(1), Event::Exited(&[(1, OK)])), []);
    assert_eq!((supervisor.verdict(), supervisor.deadline()), (None, None));
    assert_eq!(supervisor.handle(at(2), Event::Exited(&[(0, OK)])), []);
    assert_eq!(supervisor.verdict(), Some(Verdict::Success));
}

#[test]
fn a_worker_that_hangs_is_the_origin_whatever_the_others_do() {
    let mut supervisor = Supervisor::new(3, Policy::default());
    let hung = Event::Hung { worker: 1, signal: Signal::TERM };
    assert_eq!(supervisor.handle(at(1_000), hung), orders(&[1], Signal::TERM));
    assert_eq!(supervisor.handle(at(1_001), hung), [], "it is told once");
    supervisor.handle(at(1_050), Event::Exited(&[(0, SEGV)]));
    assert_eq!(supervisor.handle(at(1_100), Event::Tick), orders(&[1, 2], Signal::TERM));
    supervisor.handle(at(1_101), Event::Exited(&[(2, Ending::Code(1))]));
    assert_eq!(supervisor.handle(at(1_500), Event::Tick), orders(&[1], Signal::KILL));
    // It waits in the kernel, and does not end.
    supervisor.handle(at(11_500), Event::Tick);
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
}

#[test]
fn who_has_ended_or_is_being_ended_does_not_hang() {
    let hung = Event::Hung { worker: 0, signal: Signal::KILL };
    let mut supervisor = Supervisor::new(2, Policy::default());
    supervisor.handle(at(1), Event::Exited(&[(0, OK)]));
    assert_eq!(supervisor.handle(at(2), hung), []);
    assert_eq!(supervisor.handle(at(2), Event::Hung { worker: 7, signal: Signal::KILL }), []);
    supervisor.handle(at(3), Event::Exited(&[(1, OK)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Success));
    let mut supervisor = Supervisor::new(2, Policy::default());
    supervisor.handle(at(1), Event::End(Signal::TERM));
    assert_eq!(supervisor.handle(at(2), hung), []);
    supervisor.handle(at(3), Event::Exited(&[(0, OK), (1, OK)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Stopped(Signal::TERM)));
}

#[test]
fn a_failure_ends_then_kills_then_gives_up() {
    let mut supervisor = Supervisor::new(4, Policy::default());
    supervisor.handle(at(1), Event::Exited(&[(3, OK)]));
    supervisor.handle(at(1_000), Event::Exited(&[(1, Ending::Code(7))]));
    assert_eq!(supervisor.handle(at(1_099), Event::Tick), []);
    assert_eq!(supervisor.handle(at(1_100), Event::Tick), orders(&[0, 2], Signal::TERM));

    supervisor.handle(at(1_101), Event::Exited(&[(0, Ending::Code(1))]));
    assert_eq!(supervisor.handle(at(1_499), Event::Tick), []);
    assert_eq!(supervisor.handle(at(1_500), Event::Tick), orders(&[2], Signal::KILL));
    assert_eq!(supervisor.handle(at(1_501), Event::Tick), []);

    assert_eq!(supervisor.deadline(), Some(at(11_500)));
    assert_eq!(supervisor.verdict(), None);
    supervisor.handle(at(11_500), Event::Tick);
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
    let told: Vec<_> = supervisor.exits().map(|exit| exit.map(|exit| exit.told)).collect();
    assert_eq!(told, [Some(Some(Signal::TERM)), Some(None), None, Some(None)]);
}

#[test]
fn of_one_moment_the_first_counts_unless_a_later_one_is_the_likelier_origin() {
    let first_of = |ends: &[(usize, Ending)]| {
        let mut at_once = Supervisor::new(ends.len(), Policy::default());
        at_once.handle(at(0), Event::Exited(ends));
        let mut one_by_one = Supervisor::new(ends.len(), Policy::default());
        for end in ends {
            one_by_one.handle(at(0), Event::Exited(&[*end]));
        }
        assert_eq!(at_once.verdict(), one_by_one.verdict());
        at_once.verdict()
    };
    let failed = |worker| Some(Verdict::Failed { worker });
    assert_eq!(first_of(&[(2, Ending::Code(1)), (0, Ending::Code(2)), (1, OK)]), failed(2));
    assert_eq!(first_of(&[(2, Ending::Code(1)), (0, SEGV), (1, SEGV)]), failed(0));
    assert_eq!(first_of(&[(1, Ending::Code(1)), (0, ABRT)]), failed(1));
}

#[test]
fn what_workers_tell_decides_until_they_are_told_to_end() {
    let heard = Words::Heard { of: Some(1), at: None };
    let own = |ms| Words::Own { at: at(ms) };
    let failed = |worker| Some(Verdict::Failed { worker });

    // The culprit unwinds slowly.
    let mut slow = Supervisor::new(3, Policy::default());
    slow.handle(at(10), Event::Exited(&[(0, Ending::Code(1))]));
    assert!(!slow.asks_for_words(at(109), &Event::Tick));
    assert!(slow.asks_for_words(at(110), &Event::Tick));
    slow.handle(at(110), Event::Said(&[(0, heard), (1, own(9))]));
    assert_eq!(slow.handle(at(110), Event::Tick), orders(&[1, 2], Signal::TERM));
    assert_eq!((slow.failed(), slow.has_only_heard()), (Some(1), false));
    slow.handle(at(120), Event::Said(&[(2, own(1))]));
    let ends = [(1, Ending::Code(101)), (2, Ending::Code(1))];
    slow.handle(at(130), Event::Exited(&ends));
    slow.handle(at(140), Event::Said(&[(1, Words::None), (2, own(1))]));
    assert_eq!((slow.verdict(), slow.failure()), (failed(1), Some(Ending::Code(1))));

    // Its last words come after its end.
    let mut late = Supervisor::new(2, Policy::default());
    late.handle(at(1), Event::Exited(&[(0, Ending::Code(1)), (1, Ending::Code(1))]));
    assert_eq!(late.verdict(), failed(0));
    late.handle(at(1), Event::Said(&[(0, heard)]));
    assert_eq!(late.verdict(), failed(1));

    // It is a rank of another host.
    let mut victim = Supervisor::new(2, Policy::default());
    victim.handle(at(1), Event::Exited(&[(0, Ending::Code(1)), (1, Ending::Code(0))]));
    assert!(!victim.has_only_heard());
    victim.handle(at(1), Event::Said(&[(0, Words::Heard { of: None, at: None })]));
    assert_eq!((victim.failed(), victim.has_only_heard()), (Some(0), true));
}

#[test]
fn who_has_told_a_failure_when_another_host_ends_the_job_has_failed() {
    for (told, wanted) in [
        (Words::Own { at: at(99_000) }, Verdict::Failed { worker: 1 }),
        (Words::Own { at: at(80_000) }, Verdict::Abandoned),
        (Words::Heard { of: None, at: None }, Verdict::Abandoned),
    ] {
        let mut supervisor = Supervisor::new(2, Policy::default());
        let abandon = Event::Abandon { within: at(500) };
        assert!(supervisor.asks_for_words(at(100_000), &abandon));
        supervisor.handle(at(100_000), Event::Said(&[(1, told)]));
        supervisor.handle(at(100_000), abandon);
        supervisor.handle(at(100_001), Event::Exited(&[(0, OK), (1, Ending::Code(1))]));
        assert_eq!(supervisor.verdict(), Some(wanted));
    }
}

/// Worker 1 crashes, and the kernel writes its memory to a file when the others have long lost it.
fn with_a_crash_that_takes_long() -> Supervisor {
    let mut supervisor = Supervisor::new(3, Policy::default());
    supervisor.handle(at(1_000), Event::Exited(&[(0, Ending::Code(1))]));
    assert!(!supervisor.asks_who_goes_down(at(1_099), &Event::Tick));
    assert!(supervisor.asks_who_goes_down(at(1_100), &Event::Tick));
    supervisor.handle(at(1_100), Event::GoingDown(&[1]));
    assert_eq!(supervisor.handle(at(1_100), Event::Tick), orders(&[2], Signal::TERM));
    assert_eq!(supervisor.failed(), None, "the likelier origin has not ended");
    assert!(supervisor.asks_who_goes_down(at(1_500), &Event::Tick));
    assert_eq!(supervisor.handle(at(1_500), Event::Tick), orders(&[2], Signal::KILL));
    supervisor.handle(at(1_501), Event::Exited(&[(2, Ending::Code(1))]));
    supervisor
}

#[test]
fn a_worker_that_goes_down_is_left_to_end_and_blamed() {
    let mut supervisor = with_a_crash_that_takes_long();
    assert_eq!(supervisor.deadline(), Some(at(61_100)));
    supervisor.handle(at(9_000), Event::Exited(&[(1, SEGV)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
    assert_eq!((supervisor.failed(), supervisor.failure()), (Some(1), Some(SEGV)));
}

#[test]
fn a_worker_that_goes_down_for_too_long_is_killed_and_so_it_is_for_an_impatient_operator() {
    let mut supervisor = with_a_crash_that_takes_long();
    assert_eq!(supervisor.handle(at(61_100), Event::Tick), orders(&[1], Signal::KILL));
    supervisor.handle(at(71_100), Event::Tick);
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 0 }));

    let mut supervisor = with_a_crash_that_takes_long();
    let int = Event::End(Signal::INT);
    assert_eq!(supervisor.handle(at(2_000), int), orders(&[1], Signal::KILL));
    assert_eq!(supervisor.deadline(), Some(at(12_000)));
}

#[test]
fn whom_a_keeper_kills_when_the_lease_is_over_has_not_failed() {
    let killed = Ending::Signal { number: Signal::KILL.as_raw(), core_dumped: false };
    let mut supervisor = Supervisor::new(2, Policy::default());
    assert!(!supervisor.asks_who_goes_down(at(10), &Event::CutOff));
    supervisor.handle(at(10), Event::GoingDown(&[1]));
    assert_eq!(supervisor.handle(at(10), Event::CutOff), orders(&[0, 1], Signal::KILL));
    supervisor.handle(at(11), Event::Exited(&[(0, killed), (1, killed)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Abandoned));
}

#[test]
fn who_went_down_before_another_host_ended_the_job_has_failed() {
    for (ending, wanted) in [(SEGV, Verdict::Failed { worker: 1 }), (OK, Verdict::Abandoned)] {
        let mut supervisor = Supervisor::new(2, Policy::default());
        let abandon = Event::Abandon { within: at(500) };
        assert!(supervisor.asks_who_goes_down(at(10), &abandon));
        supervisor.handle(at(10), Event::GoingDown(&[1]));
        assert_eq!(supervisor.handle(at(10), abandon), orders(&[0], Signal::TERM));
        supervisor.handle(at(20), Event::Exited(&[(0, Ending::Code(1))]));
        assert_eq!(supervisor.failed(), None);
        supervisor.handle(at(5_000), Event::Exited(&[(1, ending)]));
        assert_eq!(supervisor.verdict(), Some(wanted));
    }
}

/// Four workers that go on without each other while two are left.
fn who_regroup() -> Supervisor {
    let mut supervisor = Supervisor::new(4, Policy::default());
    supervisor.handle(at(0), Event::Regroups(&[0, 1, 2, 3].map(|worker| (worker, 2))));
    supervisor
}

#[test]
fn the_others_go_on_without_a_worker_that_is_lost() {
    let mut supervisor = who_regroup();
    for (time, worker, ending) in [(1_000, 0, KILLED), (1_010, 2, Ending::Code(3))] {
        let exited = Event::Exited(&[(worker, ending)]);
        assert_eq!(supervisor.handle(at(time), exited), []);
        assert_eq!((supervisor.deadline(), supervisor.failed()), (None, None));
        assert!(supervisor.is_lost(worker));
    }
    supervisor.handle(at(9_000), Event::Said(&[(1, Words::Heard { of: Some(0), at: None })]));
    supervisor.handle(at(9_000), Event::Exited(&[(1, OK)]));
    assert_eq!(supervisor.verdict(), None);
    supervisor.handle(at(9_001), Event::Exited(&[(3, OK)]));
    assert_eq!((supervisor.verdict(), supervisor.failure()), (Some(Verdict::Success), None));
    let lost: Vec<bool> = supervisor.exits().flatten().map(|exit| exit.is_lost).collect();
    assert_eq!(lost, [true, false, true, false]);
}

#[test]
fn a_worker_that_is_left_behind_is_killed_and_the_others_go_on() {
    let mut supervisor = who_regroup();
    let kill = [Order { worker: 3, signal: Signal::KILL }];
    assert_eq!(supervisor.handle(at(10), Event::LeftBehind(3)), kill);
    assert_eq!(supervisor.handle(at(20), Event::LeftBehind(3)), []);
    assert_eq!(supervisor.handle(at(30), Event::Exited(&[(3, KILLED)])), []);
    assert!(supervisor.is_lost(3) && supervisor.deadline().is_none());
    supervisor.handle(at(40), Event::Exited(&[(0, OK), (1, OK), (2, OK)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Success));
    // Not while the job ends.
    let mut supervisor = who_regroup();
    supervisor.handle(at(10), Event::End(Signal::TERM));
    assert_eq!(supervisor.handle(at(20), Event::LeftBehind(3)), []);
}

/// Also the last one that runs: the others have made all steps.
#[test]
fn who_has_ended_well_is_left() {
    let mut supervisor = who_regroup();
    supervisor.handle(at(1), Event::Exited(&[(0, OK), (1, KILLED), (2, OK), (3, KILLED)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Success));
}

#[test]
fn with_too_few_left_the_job_fails_because_of_the_first_that_ended_just_before() {
    let failed = |worker| Some(Verdict::Failed { worker });
    let ends = [(1, KILLED), (0, KILLED), (3, Ending::Code(1))];
    for (times, first) in [([1, 1, 1], 1), ([1, 5_000, 9_000], 1), ([1, 15_000, 20_000], 0)] {
        let mut supervisor = who_regroup();
        for (time, end) in times.into_iter().zip(ends) {
            supervisor.handle(at(time), Event::Exited(&[end]));
        }
        let told_at = times[2] + 100;
        assert_eq!(supervisor.deadline(), Some(at(told_at)));
        assert_eq!(supervisor.handle(at(told_at), Event::Tick), orders(&[2], Signal::TERM));
        supervisor.handle(at(told_at), Event::Exited(&[(2, OK)]));
        assert_eq!((supervisor.verdict(), supervisor.failure()), (failed(first), Some(KILLED)));
        assert_eq!(supervisor.is_lost(1), first != 1);
    }
    // In one moment.
    let mut supervisor = who_regroup();
    supervisor.handle(at(1), Event::Exited(&ends));
    supervisor.handle(at(101), Event::Tick);
    supervisor.handle(at(102), Event::Exited(&[(2, OK)]));
    assert_eq!((supervisor.verdict(), supervisor.is_lost(1)), (failed(1), false));
}

#[test]
fn a_loss_that_was_survived_is_no_reason_for_a_later_failure() {
    let of_lost = Words::Heard { of: Some(2), at: None };
    for (words, first) in [
        // It printed long ago that it had lost worker 2, and then gave up because of its own.
        ([of_lost, of_lost], 1),
        ([Words::Heard { of: Some(1), at: None }, Words::None], 1),
        ([of_lost, Words::Heard { of: Some(0), at: None }], 0),
    ] {
        let mut supervisor = Supervisor::new(3, Policy::default());
        supervisor.handle(at(1), Event::Regroups(&[(0, 2), (1, 2), (2, 2)]));
        supervisor.handle(at(1), Event::Exited(&[(2, KILLED)]));
        supervisor.handle(at(60_000), Event::Exited(&[(1, Ending::Code(1))]));
        supervisor.handle(at(60_001), Event::Exited(&[(0, Ending::Code(1))]));
        supervisor.handle(at(60_001), Event::Said(&[(0, words[0]), (1, words[1])]));
        assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: first }));
        assert!(!supervisor.has_only_heard());
    }
}

#[test]
fn a_worker_that_has_not_told_that_the_others_go_on_ends_the_job() {
    let mut supervisor = Supervisor::new(4, Policy::default());
    supervisor.handle(at(0), Event::Regroups(&[(0, 1), (1, 1), (9, 1)]));
    supervisor.handle(at(1), Event::Exited(&[(2, KILLED)]));
    assert_eq!(supervisor.handle(at(101), Event::Tick), orders(&[0, 1, 3], Signal::TERM));
    // Whoever ends now was told to, whatever it has told before.
    supervisor.handle(at(102), Event::Exited(&[(0, KILLED), (1, KILLED), (3, KILLED)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 2 }));
    assert!((0..4).all(|worker| !supervisor.is_lost(worker)));
}

#[test]
fn after_a_loss_signals_hangs_and_other_hosts_end_the_job_as_before() {
    let ends = [(Signal::INT, Event::End(Signal::INT)), (Signal::TERM, Event::End(Signal::TERM))];
    let abandon = (Signal::TERM, Event::Abandon { within: at(500) });
    for (signal, event) in ends.into_iter().chain([abandon]) {
        let mut supervisor = who_regroup();
        supervisor.handle(at(1), Event::Exited(&[(1, KILLED)]));
        assert_eq!(supervisor.handle(at(2_000), event), orders(&[0, 2, 3], signal));
        supervisor.handle(at(2_001), Event::Exited(&[0, 2, 3].map(|worker| (worker, KILLED))));
        let wanted = match event {
            Event::End(signal) => Verdict::Stopped(signal),
            _ => Verdict::Abandoned,
        };
        assert_eq!(supervisor.verdict(), Some(wanted));
        assert!(supervisor.is_lost(1) && !supervisor.is_lost(0));
    }
    let mut supervisor = who_regroup();
    supervisor.handle(at(1), Event::Exited(&[(1, KILLED)]));
    let hung = Event::Hung { worker: 3, signal: Signal::KILL };
    assert_eq!(supervisor.handle(at(2), hung), orders(&[3], Signal::KILL));
    supervisor.handle(at(3), Event::Exited(&[(3, KILLED)]));
    assert_eq!(supervisor.handle(at(102), Event::Tick), orders(&[0, 2], Signal::TERM));
    supervisor.handle(at(103), Event::Exited(&[(0, OK), (2, OK)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 3 }));
    assert!(supervisor.is_lost(1));
}

#[test]
fn what_ends_after_it_was_told_to_is_no_origin() {
    let mut supervisor = Supervisor::new(2, Policy::default());
    supervisor.handle(at(0), Event::Exited(&[(0, Ending::Code(3))]));
    supervisor.handle(at(100), Event::Tick);
    supervisor.handle(at(101), Event::Exited(&[(1, SEGV)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 0 }));
}

#[test]
fn no_patience_is_no_problem() {
    let none = Policy { kill_after: Duration::ZERO, shutdown_timeout: Duration::ZERO };
    let mut supervisor = Supervisor::new(2, none);
    supervisor.handle(at(0), Event::Exited(&[(0, Ending::Code(3))]));
    assert_eq!(supervisor.handle(at(0), Event::Tick), orders(&[1], Signal::TERM));
    assert_eq!(supervisor.handle(at(0), Event::Tick), orders(&[1], Signal::KILL));
}

#[test]
fn signals_are_passed_on_and_an_impatient_operator_is_heard() {
    let mut supervisor = Supervisor::new(2, Policy::default());
    let term = Event::End(Signal::TERM);
    let int = Event::End(Signal::INT);
    assert_eq!(
        supervisor.handle(at(0), Event::PassOn(Signal::USR1)),
        orders(&[0, 1], Signal::USR1)
    );
    assert_eq!(supervisor.deadline(), None);

    assert_eq!(supervisor.handle(at(10), int), orders(&[0, 1], Signal::INT));
    assert_eq!(supervisor.deadline(), Some(at(30_010)));
    assert_eq!(supervisor.handle(at(11), int), [], "an echo");
    assert_eq!(supervisor.handle(at(500), term), orders(&[0, 1], Signal::TERM));
    assert_eq!(supervisor.deadline(), Some(at(30_010)), "asking twice gives no extra time");
    assert_eq!(supervisor.handle(at(1_000), int), orders(&[0, 1], Signal::KILL));
    assert_eq!(supervisor.handle(at(2_000), int), []);

    supervisor.handle(at(2_001), Event::Exited(&[(0, SEGV), (1, OK)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Stopped(Signal::INT)));
}

#[test]
fn ctrl_c_while_a_failed_job_ends_kills_but_the_failure_stays_the_verdict() {
    let mut supervisor = Supervisor::new(2, Policy::default());
    supervisor.handle(at(0), Event::Exited(&[(0, Ending::Code(3))]));
    let killed = supervisor.handle(at(1), Event::End(Signal::INT));
    assert_eq!(killed, orders(&[1], Signal::KILL));
    supervisor.handle(at(2), Event::Exited(&[(1, SEGV)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 0 }));
}

#[test]
fn workers_end_because_of_another_host_unless_they_have_a_reason_of_their_own() {
    let mut supervisor = Supervisor::new(2, Policy::default());
    let abandon = |ms| Event::Abandon { within: at(ms) };
    assert_eq!(supervisor.handle(at(10), abandon(500)), orders(&[0, 1], Signal::TERM));
    assert_eq!(supervisor.deadline(), Some(at(510)));
    assert_eq!(supervisor.handle(at(20), abandon(0)), []);
    assert_eq!(supervisor.handle(at(20), Event::Tick), orders(&[0, 1], Signal::KILL));
    supervisor.handle(at(21), Event::Exited(&[(0, SEGV), (1, OK)]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Abandoned));

    let mut supervisor = Supervisor::new(2, Policy::default());
    supervisor.handle(at(0), Event::Exited(&[(1, SEGV)]));
    assert_eq!(supervisor.failed(), None, "another one may be the origin");
    assert_eq!(supervisor.handle(at(1), abandon(9_000)), orders(&[0], Signal::TERM));
    assert_eq!(supervisor.deadline(), Some(at(500)));
    assert_eq!(supervisor.failed(), Some(1));
    supervisor.handle(at(2), Event::Exited(&[(0, Ending::Code(1))]));
    assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
}

#[test]
fn events_after_the_verdict_change_nothing() {
    let mut supervisor = Supervisor::new(1, Policy::default());
    supervisor.handle(at(0), Event::Exited(&[(0, OK)]));
    assert_eq!(supervisor.handle(at(1), Event::End(Signal::INT)), []);
    assert_eq!(supervisor.verdict(), Some(Verdict::Success));
}

/// The next event in a test. Exits of workers that are gone are skipped.
#[derive(Clone, Copy, Debug)]
enum Happening {
    Exit(usize, Ending),
    Signal(Signal),
    Wait(Duration),
    WaitForDeadline,
}

/// Applies `happenings` to `workers` workers, which then live until they are killed, and go on without each other while
/// `regroups` are left. Checks what must always hold.
fn check(workers: usize, regroups: Option<usize>, happenings: &[Happening]) {
    let policy = Policy { kill_after: at(500), shutdown_timeout: at(30_000) };
    let mut supervisor = Supervisor::new(workers, policy);
    let told: Vec<_> = (0..workers).filter_map(|worker| Some((worker, regroups?))).collect();
    supervisor.handle(Duration::ZERO, Event::Regroups(&told));
    let (mut living, mut ended_well) = (vec![true; workers], 0);
    let mut now = Duration::ZERO;
    let mut begun: Option<(Verdict, Duration)> = None;
    // The worker that failed first, and how, while a likelier origin may still show up.
    let mut suspect: Option<(Ending, Duration)> = None;
    let mut interrupts = 0;

    let tail = [Happening::WaitForDeadline; 3];
    for happening in happenings.iter().chain(&tail) {
        if supervisor.verdict().is_some() {
            break;
        }
        let orders = match *happening {
            Happening::Exit(worker, ending) => {
                if !std::mem::take(&mut living[worker]) {
                    continue;
                }
                let left = living.iter().filter(|lives| **lives).count() + ended_well;
                match (begun, suspect) {
                    _ if ending.is_success() => ended_well += 1,
                    (None, _) if regroups.is_some_and(|ranks| left >= ranks) => {}
                    (None, _) => {
                        begun = Some((Verdict::Failed { worker }, now + policy.kill_after));
                        suspect = Some((ending, now + SETTLE));
                    }
                    (Some((_, deadline)), Some((first, until)))
                        if now < until && first != SEGV && ending == SEGV =>
                    {
                        begun = Some((Verdict::Failed { worker }, deadline));
                        suspect = None;
                    }
                    _ => {}
                }
                supervisor.handle(now, Event::Exited(&[(worker, ending)]))
            }
            Happening::Signal(signal) => {
                begun.get_or_insert((Verdict::Stopped(signal), now + policy.shutdown_timeout));
                suspect = None;
                interrupts += usize::from(signal == Signal::INT);
                supervisor.handle(now, Event::End(signal))
            }
            Happening::Wait(time) => {
                now += time;
                supervisor.handle(now, Event::Tick)
            }
            Happening::WaitForDeadline => {
                now = supervisor.deadline().unwrap_or(now).max(now);
                supervisor.handle(now, Event::Tick)
            }
        };
        for order in orders {
            assert!(living[order.worker], "{order:?} to a worker that has exited");
            let (_, deadline) = begun.expect("an order for no reason");
            assert!(order.signal != Signal::KILL || now >= deadline || interrupts > 0);
        }
    }

    let gone: Vec<bool> = supervisor.exits().map(|exit| exit.is_some()).collect();
    assert!(gone.iter().zip(&living).all(|(gone, living)| gone != living));
    match begun {
        // Who was lost just before may have been the first.
        Some((Verdict::Failed { .. }, _)) if regroups.is_some() => {
            assert!(matches!(supervisor.verdict(), Some(Verdict::Failed { .. })));
        }
        Some((verdict, _)) => assert_eq!(supervisor.verdict(), Some(verdict)),
        None if living.contains(&true) => assert_eq!(supervisor.verdict(), None),
        None => assert_eq!(supervisor.verdict(), Some(Verdict::Success)),
    }
}

fn alphabet(workers: usize) -> Vec<Happening> {
    let exits = (0..workers)
        .flat_map(|worker| [OK, Ending::Code(1), SEGV].map(|e| Happening::Exit(worker, e)));
    let rest = [
        Happening::Signal(Signal::INT),
        Happening::Signal(Signal::TERM),
        Happening::Wait(at(1)),
        Happening::Wait(at(99)),
        Happening::Wait(at(399)),
        Happening::WaitForDeadline,
    ];
    exits.chain(rest).collect()
}

#[test]
fn all_short_histories_of_two_workers_end_well() {
    let alphabet = alphabet(2);
    for number in 0..alphabet.len().pow(5) {
        let history: [Happening; 5] = std::array::from_fn(|i| {
            alphabet[number / alphabet.len().pow(i as u32) % alphabet.len()]
        });
        check(2, None, &history);
        check(2, Some(1), &history);
    }
}

proptest! {
    #[test]
    fn random_histories_end_well(
        history in prop::collection::vec(prop::sample::select(alphabet(5)), 0..40),
        regroups in prop::option::of(1_usize..6),
    ) {
        check(5, regroups, &history);
    }
}
