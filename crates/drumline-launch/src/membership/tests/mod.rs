//! Each rule, on launchers that share a store which always answers at once.

mod town;
mod values;

use std::time::Duration;

use super::*;
use crate::{Ending, NoRestart};
use town::{Town, host, ms};

const SEGV: Ending = Ending::Signal { number: 11, core_dumped: false };

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// So many hosts of a job of `min` to `max` hosts that run, two ranks each.
fn running(min: usize, max: usize, hosts: u64) -> Town {
    let mut town = Town::new(&vec![host(min..=max, 2); hosts as usize]);
    let numbers: Vec<u64> = (1..=hosts).collect();
    town.run_until("all run", |town| town.running() == numbers);
    town.pass(secs(20));
    town
}

// Gathering

#[test]
fn two_hosts_meet_run_and_end_well() {
    let mut town = Town::new(&[host(2..=2, 8), host(2..=2, 4)]);
    town.run_until("both run", |town| town.running() == [1, 2]);
    let worlds = [1, 2].map(|host| town.world_of(host).clone());
    assert_eq!(worlds.clone().map(|it| (it.world, it.restart, it.size)), [(1, 0, 12); 2]);
    assert_eq!(worlds.map(|it| it.place), [0, 1]);
    town.workers_end(1, How::Success);
    town.pass(secs(60));
    assert_eq!((town.running(), town.ends()), (vec![2], vec![]));
    town.workers_end(2, How::Success);
    town.run_until("both end", |town| town.ends().len() == 2);
    assert_eq!(town.exit_codes(), [0, 0]);
}

#[test]
fn a_host_alone_starts_at_its_first_poll() {
    let mut town = Town::new(&[host(1..=1, 8)]);
    town.pass(ms(1));
    assert_eq!(town.running(), [1]);
}

#[test]
fn with_enough_hosts_the_last_call_runs_and_with_all_there_is_none() {
    let mut town = Town::new(&[host(2..=3, 1), host(2..=3, 1)]);
    town.pass(ms(29_900));
    assert!(town.running().is_empty());
    town.pass(ms(300));
    assert_eq!(town.running(), [1, 2]);

    let mut town = Town::new(&[host(2..=3, 1), host(2..=3, 1)]);
    town.pass(secs(10));
    town.join(host(2..=3, 1));
    town.pass(ms(300));
    assert_eq!(town.running(), [1, 2, 3]);
}

#[test]
fn without_enough_hosts_in_time_the_job_ends_and_says_who_came() {
    let mut town = Town::new(&[host(3..=3, 1), host(3..=3, 1)]);
    town.pass(ms(599_900));
    assert_eq!(town.ends(), []);
    town.run_until("both end", |town| town.ends().len() == 2);
    assert_eq!(town.exit_codes(), [1, 1]);
    let text = town.ends()[1].1.to_string();
    assert_eq!(text, "1 of 3 hosts are missing; those that came: a at 10.0.0.1, b at 10.0.0.2");
}

#[test]
fn the_node_rank_decides_first_then_who_came_first() {
    let ranked = |node_rank| Host { node_rank, ..host(4..=4, 1) };
    let mut town = Town::new(&[None, Some(2), None, Some(0)].map(ranked));
    town.run_until("all run", |town| town.running().len() == 4);
    assert_eq!(town.order(), [4, 2, 1, 3]);
}

#[test]
fn other_terms_are_refused_and_both_ends_say_why() {
    let mut other = host(2..=2, 1);
    other.terms.run_id = "other".into();
    let mut town = Town::new(&[host(2..=2, 1), other, host(2..=2, 1)]);
    town.run_until("the two run", |town| town.running() == [1, 3]);
    let why = "its run id is other, that of the job is job";
    assert_eq!(town.ends(), [(2, End::Refused(why.into()))]);
    assert_eq!(town.exit_codes(), [2]);
    let note = format!("host b is refused: {why}");
    assert!(town.has_note(1, &note) && town.has_note(3, &note));
    town.pass(secs(10));
    assert_eq!(town.plan().unwrap().refused, [], "it has gone");
}

#[test]
fn a_host_that_cannot_be_read_is_refused() {
    let mut town = Town::new(&[host(2..=2, 1), host(2..=2, 1), host(2..=2, 1)]);
    town.damage(2, b"2 something new");
    town.run_until("the two run", |town| town.running() == [1, 3]);
    assert!(matches!(&town.ends()[..], [(2, End::Refused(why))] if why.contains("host/2")));
}

#[test]
fn of_two_hosts_with_one_node_rank_the_later_is_refused_unless_the_other_has_gone() {
    let ranked = |node_rank| Host { node_rank: Some(node_rank), ..host(2..=2, 1) };
    let mut town = Town::new(&[ranked(0), ranked(1)]);
    town.run_until("both run", |town| town.running() == [1, 2]);
    town.join(ranked(1));
    town.run_until("it is refused", |town| town.exit_codes() == [2]);
    assert!(town.ends()[0].1.to_string().contains("host b at 10.0.0.2 has node rank 1, too"));

    // The launcher of the second host starts anew.
    town.crash(2);
    let again = town.join(ranked(1));
    town.run_until("both run", |town| town.running() == [1, again]);
    assert_eq!((town.order(), town.exit_codes()), (vec![1, again], vec![2]));
}

// Failures

#[test]
fn a_failure_ends_all_and_they_start_again_after_growing_pauses() {
    let mut town = running(3, 3, 3);
    for (restart, pause) in [(1, secs(1)), (2, secs(2))] {
        town.worker_fails(2, Ending::Code(3));
        let time = town.run_until("all end", |town| town.running().is_empty());
        assert!(time >= ms(100), "other failures are waited for");
        let time = town.run_until("all run", |town| town.running() == [1, 2, 3]);
        assert!(time >= pause && time < pause + ms(500), "{time:?}");
        assert_eq!(town.world_of(3).restart, restart);
        assert_eq!(town.plan().unwrap().budget.used(), restart);
        town.pass(secs(20));
    }
    town.worker_fails(2, Ending::Code(3));
    town.run_until("all end", |town| town.ends().len() == 3);
    assert_eq!(town.exit_codes(), [3, 3, 3]);
    let (_, End::Over(verdict, origin)) = &town.ends()[0] else { panic!() };
    assert_eq!(verdict, &Verdict::Failed(NoRestart::UsedUp(2)));
    assert_eq!(origin.as_ref().map(|it| (it.host, it.failure.rank)), Some((2, 2)));
}

#[test]
fn of_failures_of_one_moment_the_likeliest_origin_counts() {
    let mut town = running(3, 3, 3);
    let origin = |town: &mut Town, failures: &[(u64, Ending)]| {
        for (host, ending) in failures {
            town.worker_fails(*host, *ending);
            town.pass(ms(20));
        }
        town.run_until("the leader sees it", |town| town.plan().unwrap().failure.is_some());
        town.run_until("all end", |town| town.running().is_empty());
        town.plan().unwrap().failure.unwrap().host
    };
    assert_eq!(origin(&mut town, &[(3, Ending::Code(1)), (1, Ending::Code(1))]), 3);
    town.run_until("all run", |town| town.running() == [1, 2, 3]);
    town.pass(secs(20));
    assert_eq!(origin(&mut town, &[(2, Ending::Code(1)), (3, SEGV)]), 3);
}

#[test]
fn who_only_lost_a_rank_of_another_host_is_no_origin_if_that_one_is_late() {
    let mut town = running(3, 3, 3);
    for late in [ms(20), ms(400)] {
        town.worker_tells(2, SEGV, true);
        town.pass(late);
        town.worker_fails(3, Ending::Code(1));
        town.run_until("all end", |town| town.running().is_empty());
        town.run_until("the leader sees it", |town| {
            town.plan().unwrap().failure.is_some_and(|it| it.host == 3)
        });
        town.run_until("all run", |town| town.running() == [1, 2, 3]);
        town.pass(secs(20));
    }
}

#[test]
fn a_command_line_that_is_wrong_is_not_tried_again() {
    let mut town = running(2, 2, 2);
    town.worker_fails(2, Ending::Code(127));
    town.run_until("both end", |town| town.ends().len() == 2);
    assert_eq!(town.exit_codes(), [127, 127]);
}

// Losses

#[test]
fn a_lost_host_is_taken_out_and_the_others_go_on_at_once() {
    let mut town = running(2, 3, 3);
    town.crash(2);
    let time = town.run_until("the others start again", |town| {
        town.running() == [1, 3] && town.world_of(3).world == 2
    });
    assert!(time < ms(3_700), "{time:?}");
    let world = town.world_of(3);
    assert_eq!((world.restart, world.size, world.place), (0, 4, 1));
    assert_eq!(town.plan().unwrap().budget.used(), 0);
    assert!(town.has_note(1, "host b at 10.0.0.2 does not answer"));
}

#[test]
fn a_lost_leader_is_replaced() {
    let mut town = running(2, 3, 3);
    town.crash(1);
    let time = town.run_until("the others start again", |town| {
        town.running() == [2, 3] && town.world_of(3).world == 2
    });
    assert!(time < ms(4_000), "{time:?}");
    assert_eq!((town.order(), town.plan().unwrap().leader), (vec![2, 3], 2));
}

#[test]
fn an_exit_code_is_the_doing_of_a_host_that_is_lost_but_a_signal_is_not() {
    for (ending, used) in [(Ending::Code(1), 0), (SEGV, 1)] {
        let mut town = running(2, 3, 3);
        town.crash(2);
        town.worker_fails(3, ending);
        town.run_until("the others start again", |town| {
            town.running() == [1, 3] && town.world_of(3).world == 2
        });
        assert_eq!(town.plan().unwrap().budget.used(), used);
        assert_eq!(town.world_of(1).restart, used);
    }
}

/// Three hosts with two ranks each, of which so many must be left.
fn regrouping(ranks: usize) -> Town {
    regroups(running(2, 3, 3), ranks)
}

fn regroups(mut town: Town, ranks: usize) -> Town {
    town.run_until("three run", |town| town.running() == [1, 2, 3]);
    for host in 1..=3 {
        town.local(host, Local::Regroups(ranks));
    }
    town.pass(ms(300));
    town
}

fn end_well(town: &mut Town, hosts: &[u64]) {
    assert_eq!((town.running(), town.world_of(1).world), (hosts.to_vec(), 1));
    for host in hosts {
        town.workers_end(*host, How::Success);
    }
    town.run_until("all end", |town| town.ends().len() == town.launchers.len());
    assert!(town.exit_codes().iter().all(|code| *code == 0), "{:?}", town.ends());
}

#[test]
fn ranks_that_regroup_go_on_without_a_lost_host() {
    for ranks in [2, 4] {
        let mut town = regrouping(ranks);
        town.crash(2);
        town.run_until("it is told", |town| {
            town.has_note(
                3,
                "goes on without the ranks of host b at 10.0.0.2; hosts that are left: 2",
            )
        });
        town.pass(secs(30));
        end_well(&mut town, &[1, 3]);
    }
}

#[test]
fn ranks_that_regroup_go_on_without_the_host_of_the_leader_if_their_store_is_elsewhere() {
    let at = |node_rank| Host { node_rank: Some(node_rank), ..host(3..=3, 2) };
    let mut town = regroups(Town::new(&[at(2), at(0), at(1)]), 2);
    town.crash(1);
    town.run_until("it is told", |town| {
        town.has_note(3, "goes on without the ranks of host a at 10.0.0.1; hosts that are left: 2")
    });
    town.pass(secs(30));
    assert_eq!((town.running(), town.world_of(3).world), (vec![2, 3], 1));
}

#[test]
fn ranks_that_regroup_go_on_without_hosts_whose_ranks_have_died_and_without_their_leader() {
    let mut town = regrouping(2);
    town.worker_fails(2, Ending::Signal { number: 9, core_dumped: false });
    town.pass(secs(5));
    assert!(town.has_note(2, "goes on without the ranks of this host"));
    town.worker_fails(1, SEGV);
    town.pass(secs(5));
    town.crash(2);
    town.pass(secs(5));
    end_well(&mut town, &[3]);
}

#[test]
fn ranks_that_regroup_go_on_without_a_host_that_leaves() {
    let mut town = regrouping(2);
    town.local(2, Local::Leaving(15));
    town.pass(secs(1));
    town.workers_end(2, How::Abandoned);
    town.run_until("it ends", |town| town.exit_codes() == [143]);
    town.pass(secs(10));
    assert_eq!((town.running(), town.world_of(1).world), (vec![1, 3], 1));
}

#[test]
fn ranks_that_regroup_start_again_when_too_few_are_left_or_their_store_is_lost() {
    for (ranks, lost) in [(5, 2), (2, 1)] {
        let mut town = regrouping(ranks);
        town.crash(lost);
        let left = [1, 3, 2].into_iter().filter(|it| *it != lost).max().unwrap();
        town.run_until("they start again", |town| {
            town.running().len() == 2 && town.world_of(left).world == 2
        });
    }
}

#[test]
fn ranks_that_regroup_start_again_when_the_host_of_their_store_leaves() {
    let mut town = regrouping(2);
    town.local(1, Local::Leaving(15));
    town.workers_end(1, How::Abandoned);
    town.run_until("they start again", |town| {
        town.running() == [2, 3] && town.world_of(3).world == 2
    });

    // Also if its ranks have died before.
    let mut town = regrouping(1);
    town.worker_fails(1, SEGV);
    town.pass(secs(1));
    assert!(town.has_note(1, "goes on without the ranks of this host"));
    town.crash(1);
    town.pass(secs(10));
    town.worker_fails(2, SEGV);
    town.run_until("they start again", |town| {
        town.running() == [2, 3] && town.world_of(3).world == 2
    });
}

#[test]
fn if_all_ranks_that_regroup_fail_the_job_has_failed() {
    let mut town = regrouping(1);
    for host in 1..=3 {
        town.worker_fails(host, Ending::Code(2));
        town.pass(ms(50));
    }
    town.run_until("all end", |town| town.ends().len() == 3);
    assert_eq!(town.exit_codes(), [2, 2, 2]);
}

#[test]
fn if_ranks_that_regroup_all_fail_the_first_failure_counts_though_its_host_was_lost() {
    for (later, origin) in [(secs(2), 2), (secs(20), 3)] {
        let mut town = regrouping(1);
        town.worker_fails(2, Ending::Code(2));
        town.pass(later);
        assert!(town.has_note(1, "goes on without the ranks of host b"));
        town.worker_tells(3, Ending::Code(2), true);
        town.pass(ms(200));
        town.worker_tells(1, Ending::Code(2), true);
        town.run_until("all end", |town| town.ends().len() == 3);
        let (_, End::Over(_, failure)) = &town.ends()[0] else { panic!() };
        assert_eq!(failure.as_ref().map(|it| it.host), Some(origin));
    }
}

#[test]
fn a_spare_replaces_a_lost_host_behind_those_that_stay() {
    let mut town = Town::new(&vec![host(3..=3, 1); 4]);
    town.run_until("three run", |town| town.running() == [1, 2, 3]);
    assert!(town.has_note(4, "this one is a spare"));
    town.pass(secs(20));
    town.crash(2);
    town.run_until("the spare runs", |town| town.running() == [1, 3, 4]);
    assert_eq!(town.order(), [1, 3, 4]);
}

#[test]
fn with_too_few_left_the_others_gather_again() {
    let mut town = running(2, 2, 2);
    town.crash(2);
    town.pass(secs(60));
    assert!(town.running().is_empty());
    let third = town.join(host(2..=2, 2));
    town.run_until("they run", |town| town.running() == [1, third]);
    assert_eq!(town.world_of(1).restart, 0);

    town.crash(third);
    town.run_until("the other ends", |town| town.ends().len() == 1);
    assert!(matches!(&town.ends()[..], [(1, End::Over(Verdict::NoQuorum { .. }, None))]));
}

#[test]
fn hosts_that_lose_each_other_before_each_first_step_end_the_job_and_say_why() {
    let mut town = running(2, 2, 2);
    town.launchers.get_mut(&1).unwrap().steps = false;
    let mut last = 2;
    for _ in 1..10 {
        town.crash(last);
        last = town.join(host(2..=2, 2));
        town.run_until("they run again", |town| town.running() == [1, last]);
    }
    assert_eq!(town.plan().unwrap().budget.used(), 0);
    town.crash(last);
    town.run_until("the other ends", |town| town.ends().len() == 1);
    let ends = town.ends();
    let (1, end @ End::Over(Verdict::Failed(NoRestart::HostsLost(10)), None)) = &ends[0] else {
        panic!("{ends:?}");
    };
    assert!(end.to_string().contains("lost packets") && end.exit_code() == 1, "{end}");
}

#[test]
fn a_host_that_was_cut_off_joins_anew_once_its_workers_are_dead() {
    for (ranks, lease) in [(2, secs(2)), (1_500, secs(5))] {
        let mut town = Town::new(&vec![host(1..=2, ranks); 2]);
        town.run_until("all run", |town| town.running() == [1, 2]);
        town.launchers.get_mut(&2).unwrap().is_cut = true;
        let dead = town.run_until("its workers are dead", |town| town.running() == [1]);
        let lost = dead + town.run_until("the other goes on", |town| town.world_of(1).world == 2);
        assert!(dead > lease - ms(200) && lost > lease * 3 / 2, "{ranks}: {dead:?}, {lost:?}");
        town.launchers.get_mut(&2).unwrap().is_cut = false;
        town.pass(ms(200));
        assert_eq!(town.launchers.keys().copied().collect::<Vec<_>>(), [1, 3]);
        town.run_until("the leader asks for the step", |town| town.launchers[&1].held);
    }
}

#[test]
fn a_success_outlives_its_host() {
    let mut town = running(2, 2, 2);
    town.workers_end(2, How::Success);
    town.pass(secs(1));
    town.crash(2);
    town.pass(secs(30));
    assert_eq!(town.running(), [1]);
    town.workers_end(1, How::Success);
    town.run_until("it ends", |town| town.exit_codes() == [0]);
}

#[test]
fn a_late_report_that_hides_a_newer_beat_is_a_change() {
    let timing = Timing::of(&crate::Joining::default());
    let mut seen = sightings::Sightings::default();
    let mut is_silent = |at, beat| {
        let report = Report { beat, ..values::report() };
        seen.report(2, secs(at), secs(at), Some(report));
        seen.is_silent(2, &timing)
    };
    assert!(!is_silent(0, 7));
    assert!(!is_silent(2, 6), "beat 8 may have been there in between");
    assert!(!is_silent(4, 6));
    assert!(is_silent(5, 6));
}

// Joins

#[test]
fn newcomers_are_taken_in_at_a_step() {
    let mut town = running(2, 4, 2);
    town.join(host(2..=4, 2));
    town.pass(ms(200));
    town.join(host(2..=4, 2));
    town.run_until("all are held", |town| {
        town.launchers.values().filter(|it| it.held).count() == 2
    });
    town.local(1, Local::Held(Some(41)));
    town.pass(secs(1));
    assert_eq!(town.plan().unwrap().phase, Phase::Holding);
    town.local(2, Local::Held(Some(42)));
    town.run_until("all stop", |town| {
        [1, 2].iter().all(|host| town.launchers[host].stops_at == Some(43))
    });
    town.workers_end(2, How::StoppedAtStep);
    town.pass(secs(5));
    assert_eq!(town.running(), [1], "one still saves a checkpoint");
    town.workers_end(1, How::StoppedAtStep);
    town.run_until("all run", |town| town.running() == [1, 2, 3, 4]);
    assert_eq!(town.order(), [1, 2, 3, 4]);
    assert_eq!((town.world_of(4).restart, town.plan().unwrap().budget.used()), (0, 0));
}

#[test]
fn a_job_that_ends_while_hosts_come_is_finished() {
    let mut town = running(2, 3, 2);
    town.join(host(2..=3, 2));
    town.run_until("all are held", |town| {
        town.launchers.values().filter(|it| it.held).count() == 2
    });
    town.workers_end(1, How::Success);
    town.workers_end(2, How::Success);
    town.run_until("all end", |town| town.ends().len() == 3);
    assert_eq!(town.exit_codes(), [0, 0, 0]);
}

#[test]
fn ranks_that_have_not_begun_a_step_stop_before_the_first() {
    let mut town = running(1, 2, 1);
    town.join(host(1..=2, 2));
    town.run_until("it is held", |town| town.launchers[&1].held);
    town.local(1, Local::Held(None));
    town.run_until("it stops", |town| town.launchers[&1].stops_at == Some(0));
}

// Leaving

#[test]
fn when_a_launcher_is_told_to_end_the_others_go_on_or_end_with_its_signal() {
    let mut town = running(2, 3, 3);
    town.local(1, Local::Leaving(15));
    town.run_until("the others are told", |town| town.running() == [1]);
    town.workers_end(1, How::Abandoned);
    town.run_until("the others run again", |town| town.running() == [2, 3]);
    assert_eq!((town.order(), town.world_of(2).restart), (vec![2, 3], 0));
    town.pass(secs(5));
    assert_eq!(town.ends(), [(1, End::Left(15))]);

    town.local(3, Local::Leaving(2));
    town.workers_end(3, How::Abandoned);
    town.run_until("all end", |town| town.ends().len() == 3);
    assert_eq!(town.exit_codes(), [143, 130, 130]);
}

#[test]
fn when_the_host_with_the_store_leaves_all_end() {
    let keeper = Host { keeps_store: true, ..host(1..=3, 2) };
    let mut town = Town::new(&[keeper, host(1..=3, 2), host(1..=3, 2)]);
    town.run_until("all run", |town| town.running() == [1, 2, 3]);
    town.local(1, Local::Leaving(15));
    town.workers_end(1, How::Abandoned);
    town.run_until("the others end", |town| town.ends().len() == 2);
    town.run_until("it ends last", |town| town.ends().len() == 3);
    assert_eq!(town.exit_codes(), [143, 143, 143]);
}

#[test]
fn a_host_leaves_while_it_waits() {
    let mut town = Town::new(&[host(2..=2, 1)]);
    town.pass(secs(1));
    town.local(1, Local::Leaving(2));
    town.run_until("it ends", |town| town.exit_codes() == [130]);
    town.join(host(2..=2, 1));
    town.join(host(2..=2, 1));
    town.run_until("the others run", |town| town.running() == [2, 3]);
}

// The end

#[test]
fn the_host_with_the_store_stays_until_the_others_have_heard() {
    let keeper = Host { keeps_store: true, ..host(2..=2, 2) };
    let mut town = Town::new(&[keeper, host(2..=2, 2)]);
    town.run_until("both run", |town| town.running() == [1, 2]);
    town.workers_end(1, How::Success);
    town.workers_end(2, How::Success);
    town.pass(ms(20)); // its report is written
    town.launchers.get_mut(&2).unwrap().is_cut = true;
    town.pass(secs(2));
    assert_eq!(town.ends(), []);
    town.launchers.get_mut(&2).unwrap().is_cut = false;
    town.run_until("both end", |town| town.ends().len() == 2);
    assert_eq!(town.exit_codes(), [0, 0]);
}

#[test]
fn who_comes_when_the_job_is_over_hears_how_it_ended() {
    let mut town = running(1, 1, 1);
    town.worker_fails(1, Ending::Code(2));
    town.run_until("it ends", |town| town.exit_codes() == [2]);
    town.join(host(1..=1, 2));
    town.run_until("the newcomer ends", |town| town.exit_codes() == [2, 2]);
}
