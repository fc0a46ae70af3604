//! Values that hosts write for each other.

use proptest::prelude::*;

use super::*;
use crate::RestartBudget;

pub(super) fn report() -> Report {
    let outcome = Outcome { how: How::Failed, lived: ms(1_500), stepped: true };
    Report {
        beat: 7,
        plan: 3,
        world: 2,
        state: State::Ended(outcome),
        failure: Some(failure("out of patience")),
        regroups: Some(4),
        held: Some(Held { begun: None }),
        leaves: Some(15),
    }
}

fn failure(text: &str) -> Failure {
    Failure {
        rank: 9,
        local_rank: 1,
        pid: 4711,
        ending: SEGV,
        has_only_heard: false,
        time: 1_700_000_000_000,
        text: text.into(),
    }
}

fn plan() -> Plan {
    Plan {
        version: 5,
        leader: 2,
        world: 2,
        restart: 1,
        members: vec![Member { host: 2, first_rank: 0, ranks: 8 }],
        phase: Phase::Over(Verdict::Failed(NoRestart::Code(2))),
        budget: RestartBudget::new(host(1..=2, 1).terms.restarts),
        refused: vec![Refused { host: 3, name: "c".into(), why: "its version".into() }],
        failure: Some(Origin { host: 2, name: "b".into(), failure: failure("") }),
        lost: vec![Named { host: 4, name: "d".into(), address: "10.0.0.4".into() }],
    }
}

#[test]
fn values_are_read_as_they_were_written() {
    assert_eq!(Report::decode("", &report().encode()), Ok(report()));
    assert_eq!(Plan::decode("", &plan().encode()), Ok(plan()));
    let host = host(1..=2, 8);
    assert_eq!(Host::decode("", &host.encode()), Ok(host));
}

#[test]
fn a_value_beyond_a_limit_is_an_error_that_names_the_key() {
    let problem = |host: Host| Host::decode("host/3", &host.encode()).unwrap_err().to_string();
    let text = problem(Host { ranks: 4097, ..host(1..=1, 1) });
    assert!(text.contains("host/3") && text.contains("ranks: 4097, more than 4096"), "{text}");
    assert!(problem(host(1..=1, 0)).contains("it has no ranks"));
    assert!(problem(host(1..=4097, 1)).contains("hosts: 4097"));
    let mut reversed = host(2..=3, 1);
    std::mem::swap(&mut reversed.terms.hosts.min, &mut reversed.terms.hosts.max);
    assert!(problem(reversed).contains("more hosts than it may have"));
    assert!(problem(Host { name: "x".repeat(1025), ..host(1..=1, 1) }).contains("the name"));
    let long = Report { failure: Some(failure(&"x".repeat(8193))), ..report() };
    assert!(Report::decode("report/3", &long.encode()).is_err());
    let long = Report { failure: Some(failure(&"x".repeat(8192))), ..report() };
    assert!(Report::decode("report/3", &long.encode()).is_ok());
}

#[test]
fn what_nobody_has_written_is_an_error_that_names_the_key() {
    let good = plan().encode();
    let longer = [good.clone(), b" ".repeat(1 << 20)].concat();
    let other = [b"1 ", &good[2..]].concat();
    let more =
        String::from_utf8(good.clone()).unwrap().replacen("\"version\"", "\"a\":1,\"version\"", 1);
    for bytes in [b"".as_slice(), b"2 ", b"2 {}", b"2 null", &other, &longer, more.as_bytes()] {
        let error = Plan::decode("plan", bytes).unwrap_err();
        assert_eq!(error.key, "plan");
    }
}

proptest! {
    /// No bytes make it panic, and what is read can be written.
    #[test]
    fn damaged_values_are_errors_or_values(at in 0_usize..600, byte: u8, cut in 0_usize..600) {
        for mut bytes in [plan().encode(), report().encode(), host(1..=2, 1).encode()] {
            let at = at % bytes.len();
            bytes[at] = byte;
            bytes.truncate(bytes.len().max(cut));
            if let Ok(plan) = Plan::decode("", &bytes) {
                prop_assert_eq!(Plan::decode("", &plan.encode()), Ok(plan));
            }
            if let Ok(report) = Report::decode("", &bytes) {
                prop_assert_eq!(Report::decode("", &report.encode()), Ok(report));
            }
            let _ = Host::decode("", &bytes);
        }
    }
}
