use super::*;

const LATE: EndedWorld =
    EndedWorld { ending: Ending::Code(1), lived: Duration::from_secs(60), stepped: true };

fn budget(max: u32) -> RestartBudget {
    RestartBudget::new(Restarts { max, ..Restarts::default() })
}

fn pauses(budget: &mut RestartBudget, world: EndedWorld) -> Vec<u64> {
    let mut pauses = Vec::new();
    while let Next::Restart(pause) = budget.after(world) {
        pauses.push(pause.as_secs());
    }
    pauses
}

#[test]
fn pauses_grow_until_the_budget_is_used_up() {
    assert!(pauses(&mut budget(0), LATE).is_empty());
    assert_eq!(pauses(&mut budget(9), LATE), [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    let mut without =
        RestartBudget::new(Restarts { max: 2, delay_min: Duration::ZERO, ..Restarts::default() });
    assert_eq!(pauses(&mut without, LATE), [0, 0]);
    assert_eq!(budget(0).after(LATE), Next::End(NoRestart::UsedUp(0)));
}

#[test]
fn the_number_of_restarts_is_a_cap_however_long_a_world_runs() {
    let mut budget = budget(2);
    let long = EndedWorld { lived: Duration::from_secs(30 * 24 * 3600), ..LATE };
    assert_eq!(pauses(&mut budget, long), [1, 2]);
    assert_eq!(budget.after(long), Next::End(NoRestart::UsedUp(2)));
    assert_eq!(budget.used(), 2);
}

#[test]
fn a_world_that_ran_long_enough_gives_all_restarts_back_if_asked() {
    let reset_after = Some(Duration::from_secs(600));
    let restarts = Restarts { max: 2, reset_after, ..Restarts::default() };
    let mut budget = RestartBudget::new(restarts);
    let shorter = EndedWorld { lived: Duration::from_millis(599_999), ..LATE };
    assert_eq!(pauses(&mut budget, shorter), [1, 2]);
    let calm = EndedWorld { lived: Duration::from_secs(600), ..LATE };
    assert_eq!(budget.after(calm), Next::Restart(Duration::from_secs(1)));
    assert_eq!(budget.used(), 1);
}

#[test]
fn what_another_start_would_not_change_ends_the_job() {
    for code in [2, 126, 127] {
        let futile = EndedWorld { ending: Ending::Code(code), ..LATE };
        assert_eq!(budget(5).after(futile), Next::End(NoRestart::Code(code)));
    }
    let killed = Ending::Signal { number: 9, core_dumped: false };
    let killed = EndedWorld { ending: killed, ..LATE };
    assert_eq!(budget(5).after(killed), Next::Restart(Duration::from_secs(1)));
}

#[test]
fn a_world_that_makes_a_step_or_runs_for_long_forgives_all_that_lost_a_host_before() {
    let short = Duration::from_secs(29);
    for (lived, stepped) in [(short, true), (Duration::from_secs(30), false)] {
        let mut budget = budget(0);
        for _ in 0..5 {
            assert!((0..9).all(|_| budget.after_loss(short, false).is_ok()));
            assert_eq!(budget.after_loss(lived, stepped), Ok(()));
        }
    }
    let mut budget = budget(3);
    assert!((0..9).all(|_| budget.after_loss(short, false).is_ok()));
    assert!(matches!(budget.after(LATE), Next::Restart(_)));
    assert_eq!(budget.after_loss(short, false), Ok(()), "a world that ran for long failed");
}

#[test]
fn three_worlds_in_a_row_without_a_step_end_the_job() {
    let early = EndedWorld { stepped: false, lived: Duration::from_secs(9), ..LATE };
    let mut job = budget(9);
    assert_eq!(pauses(&mut job, early), [1, 2]);
    let mut job = budget(9);
    let _ = (job.after(early), job.after(early));
    assert!(matches!(job.after(LATE), Next::Restart(_)));
    assert!(matches!(job.after(early), Next::Restart(_)));
    let never_ran = EndedWorld { stepped: false, lived: Duration::ZERO, ..LATE };
    assert_eq!(pauses(&mut budget(5), never_ran).len(), 5);
    let silent = EndedWorld { lived: Duration::from_secs(10), ..early };
    assert_eq!(pauses(&mut budget(4), silent).len(), 4);
}
