//! Which rank of a job failed first: one rule for the launcher and for `spawn`.
//!
//! When a rank fails, the others fail with it, and they may end before it does: it unwinds, writes a core file or runs
//! functions at exit while they have nothing left to do. So the order in which processes end does not tell who was
//! first. What decides, the strongest first:
//!
//! 1. A rank whose words only tell the end of another one (the process of rank 1 has ended) is no culprit while there
//!    is any other.
//! 2. A signal that is never a reaction to the death of a peer, such as SIGSEGV.
//! 3. The time: that of the words of a rank, or else that of its end.
//!
//! A rank that has not ended by itself is the culprit if it has told a failure of its own, or if the others name it,
//! and if nobody else is.

use std::time::{Duration, SystemTime};

use drumline_error::Section;
use rustix::process::Signal;

use crate::error_file::Failure;

/// What is known of one rank of a job in which a rank has failed. Times count from any one moment, the same for all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// How it ended.
    pub end: End,
    /// What it has told of its failure, before anybody told it to end.
    pub words: Words,
}

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It runs, or it was told to end before it did.
    Open,
    /// It has ended well.
    Success,
    /// It has failed by itself.
    Failure {
        /// When its end was noticed.
        at: Duration,
        /// Whether the end of another rank cannot be the cause, whatever this one has told.
        is_never_a_reaction: bool,
    },
}

/// What a rank has told of its failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Words {
    /// Nothing that tells a failure.
    #[default]
    None,
    /// A failure of its own.
    Own {
        /// When it told it.
        at: Duration,
    },
    /// That another rank has ended, has left or is lost.
    Heard {
        /// That rank, where it is known.
        of: Option<usize>,
        /// When it told it, if that is known.
        at: Option<Duration>,
    },
}

/// Those of the errors that tell the end of another rank.
const SECTIONS: [Section; 8] = [
    Section::PeerExited,
    Section::PeerLeft,
    Section::NobodyLeft,
    Section::HostSilent,
    Section::Disconnected,
    Section::Unreachable,
    Section::StartUp,
    Section::Store,
];

/// What other libraries say when a peer has gone.
const FOREIGN: [&str; 2] = ["gloo/transport/", "ncclRemoteError"];

/// Whether the death of a peer cannot be the reason for which this signal has killed a process.
///
/// A rank that loses a peer exits with an error or aborts. It does not access a bad address, and the kernel does not
/// kill it.
pub fn is_never_a_reaction(signal: i32) -> bool {
    const SIGNALS: [Signal; 7] = [
        Signal::BUS,
        Signal::FPE,
        Signal::ILL,
        Signal::KILL,
        Signal::SEGV,
        Signal::SYS,
        Signal::XCPU,
    ];
    SIGNALS.iter().any(|it| it.as_raw() == signal)
}

/// The rank that failed first. `None` if none has failed or told a failure of its own.
pub fn culprit(ranks: &[Account]) -> Option<usize> {
    let all = || ranks.iter().enumerate();
    let failed = || {
        all().filter_map(|(rank, it)| match it.end {
            End::Failure { at, is_never_a_reaction } => {
                Some((rank, it.words, at, is_never_a_reaction))
            }
            End::Open | End::Success => None,
        })
    };
    // `min_by_key` returns the first of equal elements.
    let by_itself = failed()
        .filter(|(rank, words, ..)| !words.is_of_another(*rank))
        .min_by_key(|&(_, words, at, is_never_a_reaction)| {
            (!is_never_a_reaction, words.at().unwrap_or(at))
        })
        .map(|(rank, ..)| rank);
    let is_open = |rank: usize| ranks.get(rank).is_some_and(|it| it.end == End::Open);
    let told = || {
        let open = all().filter(|(rank, it)| it.end == End::Open && !it.words.is_of_another(*rank));
        let open = open.filter_map(|(rank, it)| Some((it.words.at()?, rank)));
        open.min().map(|(_, rank)| rank)
    };
    let mut witnesses: Vec<_> =
        failed().map(|(rank, words, at, _)| (words.at().unwrap_or(at), rank, words)).collect();
    witnesses.sort_by_key(|(at, rank, _)| (*at, *rank));
    let named = || {
        witnesses.iter().find_map(|(_, _, words)| match words {
            Words::Heard { of: Some(of), .. } if is_open(*of) => Some(*of),
            _ => None,
        })
    };
    by_itself.or_else(told).or_else(named).or_else(|| Some(witnesses.first()?.1))
}

impl Words {
    /// Whether rank `me` only tells the end of another one. One that has heard from the others that it is the one which
    /// they have lost does not.
    pub fn is_of_another(self, me: usize) -> bool {
        matches!(self, Words::Heard { of, .. } if of != Some(me))
    }

    fn at(self) -> Option<Duration> {
        match self {
            Words::None => None,
            Words::Own { at } => Some(at),
            Words::Heard { at, .. } => at,
        }
    }

    /// What the error of a rank tells. Its time counts from `since`; without one it is `noticed`.
    pub fn of_failure(failure: &Failure, since: SystemTime, noticed: Duration) -> Words {
        let at = failure.at.map(|at| at.duration_since(since).unwrap_or_default());
        let texts = [Some(&failure.message[..]), failure.callstack.as_deref()];
        Words::of_error(texts.into_iter().flatten(), at.unwrap_or(noticed))
    }

    /// What the texts of an error tell, which a rank has told at this time.
    pub fn of_error<'a>(texts: impl IntoIterator<Item = &'a str>, at: Duration) -> Words {
        match texts.into_iter().find_map(heard_of) {
            Some(of) => Words::Heard { of, at: Some(at) },
            None => Words::Own { at },
        }
    }

    /// What the last lines of the output of a rank tell. An exception that it has printed before, and survived, says nothing
    /// of why it failed.
    pub fn of_output(text: &str) -> Words {
        heard_of(last_error(text)).map_or(Words::None, |of| Words::Heard { of, at: None })
    }

    /// The same, where rank `first` has the number 0, and there are `count` ranks.
    #[must_use]
    pub fn of_ranks(self, first: usize, count: usize) -> Words {
        match self {
            Words::Heard { of, at } => {
                let of = of.and_then(|of| of.checked_sub(first)).filter(|of| *of < count);
                Words::Heard { of, at }
            }
            other => other,
        }
    }
}

/// The last exception of Python in `text`, and those that led to it. All of `text` if there is none.
fn last_error(text: &str) -> &str {
    const BEGINS: &str = "Traceback (most recent call last):";
    const LEADS: [&str; 2] = [
        "During handling of the above exception, another exception occurred:",
        "The above exception was the direct cause of the following exception:",
    ];
    // A group of exceptions has several.
    if text.contains("Exception Group Traceback") {
        return text;
    }
    let Some(mut start) = text.rfind(BEGINS) else { return text };
    // An empty line stands in between, and torch puts the rank in front of each line.
    let is_led_to = |start: usize| {
        let mut before = text[..start].lines().rev().take(3);
        before.any(|line| LEADS.iter().any(|lead| line.trim_end().ends_with(lead)))
    };
    while is_led_to(start) {
        start = text[..start].rfind(BEGINS).unwrap_or(0);
    }
    &text[start..]
}

/// Whether `text` tells the end of another rank, and of which, by its number in the whole job.
fn heard_of(text: &str) -> Option<Option<usize>> {
    let has_section = SECTIONS.iter().any(|section| text.contains(&section.to_string()));
    let reports = after(text, ": rank ", " reports: ");
    let is_heard =
        has_section || reports.is_some() || FOREIGN.iter().any(|said| text.contains(said));
    let named = || {
        // Both ends of a broken connection may live.
        if text.contains(&Section::Disconnected.to_string()) {
            return None;
        }
        let ended = after(text, "the process of rank ", " has ended");
        ended.or_else(|| after(text, "rank ", " has closed the group")).or(reports)
    };
    let global =
        |rank: usize| after(text, &format!("rank {rank} is global rank "), "").or(Some(rank));
    is_heard.then(|| named().and_then(global))
}

/// The last number in `text` that stands between these two. An end of which an earlier line tells was survived.
fn after(text: &str, before: &str, behind: &str) -> Option<usize> {
    text.rmatch_indices(before).find_map(|(at, _)| {
        let rest = &text[at + before.len()..];
        let digits = rest.find(|it: char| !it.is_ascii_digit()).unwrap_or(rest.len());
        let number = rest[..digits].parse().ok()?;
        rest[digits..].starts_with(behind).then_some(number)
    })
}

#[cfg(test)]
mod tests {
    use drumline_engine::membership::{GlobalRanks, Membership};
    use drumline_group::{Cause, CollectiveError, Reason};
    use proptest::prelude::*;

    use super::*;

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    const fn failed(ms: u64, words: Words) -> Account {
        Account { end: End::Failure { at: at(ms), is_never_a_reaction: false }, words }
    }

    const fn crashed(ms: u64, words: Words) -> Account {
        Account { end: End::Failure { at: at(ms), is_never_a_reaction: true }, words }
    }

    const fn open(words: Words) -> Account {
        Account { end: End::Open, words }
    }

    const WELL: Account = Account { end: End::Success, words: Words::None };

    const fn own(ms: u64) -> Words {
        Words::Own { at: at(ms) }
    }

    const fn heard(of: usize) -> Words {
        Words::Heard { of: Some(of), at: None }
    }

    const SILENT: Words = Words::None;
    const LOST: Words = Words::Heard { of: None, at: None };

    #[test]
    fn the_table_of_cases() {
        for (what, ranks, wanted) in [
            ("nobody", vec![WELL, open(SILENT), open(heard(1))], None),
            ("who is told to end", vec![WELL, open(own(1))], Some(1)),
            ("alone", vec![open(SILENT), failed(5, SILENT)], Some(1)),
            ("a victim that is alone", vec![WELL, failed(5, heard(0))], Some(1)),
            ("a victim ends first", vec![failed(5, heard(1)), failed(9, own(4))], Some(1)),
            ("a victim tells first", vec![failed(5, heard(1)), failed(9, own(8))], Some(1)),
            ("a victim of a silent one", vec![failed(5, heard(1)), failed(6, SILENT)], Some(1)),
            ("a victim without words", vec![failed(5, SILENT), failed(9, own(4))], Some(1)),
            ("a silent culprit", vec![failed(7, own(6)), failed(5, SILENT)], Some(1)),
            ("a crash", vec![failed(5, own(4)), crashed(9, SILENT)], Some(1)),
            (
                "a victim that crashes at its end",
                vec![crashed(5, heard(1)), failed(9, own(4))],
                Some(1),
            ),
            (
                "several alone",
                vec![failed(5, own(4)), failed(6, own(3)), failed(7, own(5))],
                Some(1),
            ),
            ("of one moment", vec![failed(5, SILENT), failed(5, SILENT)], Some(0)),
            ("a slow end, words", vec![failed(5, heard(1)), open(own(4))], Some(1)),
            (
                "a slow end, no words",
                vec![failed(5, heard(1)), open(SILENT), open(SILENT)],
                Some(1),
            ),
            ("words of two that run", vec![failed(5, LOST), open(own(4)), open(own(3))], Some(2)),
            ("the named one has ended well", vec![failed(5, heard(1)), WELL], Some(0)),
            ("a chain", vec![failed(5, heard(1)), failed(6, heard(2)), open(SILENT)], Some(2)),
            ("the others tell it", vec![failed(5, heard(1)), failed(9, heard(1))], Some(1)),
            ("elsewhere", vec![failed(9, LOST), failed(5, LOST)], Some(1)),
            ("a rank that does not exist", vec![failed(9, heard(7)), failed(5, LOST)], Some(1)),
        ] {
            assert_eq!(culprit(&ranks), wanted, "{what}");
        }
    }

    /// What a rank says whose group fails for this cause. Rank 1 of the group is rank 3 of the job if `is_part`.
    fn says(cause: Cause, is_part: bool) -> String {
        let global = if is_part { GlobalRanks::new(vec![2, 3]) } else { GlobalRanks::default() };
        let member = Membership::new("world", (0, 2), global);
        CollectiveError::new(&member, 7, "barrier".into(), at(3), cause).to_string()
    }

    #[test]
    fn errors_of_groups_tell_whose_end_they_heard_of() {
        let problem = || "reset".to_owned();
        let ends = |peer| [Cause::PeerExited { peer }, Cause::PeerLeft { peer }];
        for cause in ends(1) {
            assert_eq!(heard_of(&says(cause.clone(), false)), Some(Some(1)), "{cause}");
            assert_eq!(heard_of(&says(cause.clone(), true)), Some(Some(3)), "{cause}");
            let text = says(cause, true);
            let told = Cause::Reported { by: 0, culprit: Some(1), reason: Reason::Other, text };
            assert_eq!(heard_of(&says(told, true)), Some(Some(3)));
        }
        let text = says(Cause::Aborted, false);
        let aborted = Cause::Reported { by: 1, culprit: Some(1), reason: Reason::Other, text };
        assert_eq!(heard_of(&says(aborted, true)), Some(Some(3)));
        for cause in [
            Cause::NobodyLeft { left: vec![1], unreachable: vec![] },
            Cause::HostSilent { peer: 1 },
            Cause::Disconnected { peer: 1, problem: problem() },
            Cause::Unreachable { peer: 1, problem: problem() },
        ] {
            assert_eq!(heard_of(&says(cause.clone(), false)), Some(None), "{cause}");
        }
        for cause in [
            Cause::Aborted,
            Cause::Panicked { text: problem() },
            Cause::System { problem: problem() },
            Cause::Device { problem: problem() },
            Cause::Mismatch { peer: 1, theirs: "a".into(), ours: "b".into() },
            Cause::Timeout { waiting_for: vec![1] },
            Cause::Backend { problem: problem() },
            Cause::Protocol { peer: 1, problem: problem() },
        ] {
            assert_eq!(heard_of(&says(cause.clone(), false)), None, "{cause}");
        }
        for text in
            ["", "ValueError: rank 1 reports a loss", "rank 7", "rank 99999999999999999999 has"]
        {
            assert_eq!(heard_of(text), None, "{text}");
        }
        let survived = says(Cause::PeerExited { peer: 0 }, false);
        let later = says(Cause::PeerExited { peer: 1 }, false);
        assert_eq!(heard_of(&format!("{survived}\n{later}\n")), Some(Some(1)));
        let gloo = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer";
        assert_eq!(heard_of(gloo), Some(None));
    }

    #[test]
    fn words_are_those_of_the_message_or_of_the_traceback() {
        let since = SystemTime::UNIX_EPOCH;
        let told = says(Cause::PeerExited { peer: 5 }, false);
        for failure in [Failure::now(&told, ""), Failure::now("it failed", &told)] {
            let words = Words::of_failure(&failure, since, at(0));
            assert!(matches!(words, Words::Heard { of: Some(5), at: Some(_) }), "{words:?}");
            assert!(matches!(words.of_ranks(4, 2), Words::Heard { of: Some(1), .. }));
            assert!(matches!(words.of_ranks(6, 2), Words::Heard { of: None, .. }));
            assert!(matches!(words.of_ranks(0, 5), Words::Heard { of: None, .. }));
        }
        let mut failure = Failure::now("no data", "at main");
        failure.at = None;
        assert_eq!(Words::of_failure(&failure, since, at(9)), own(9));
        assert_eq!(Words::of_output("no data"), SILENT);
        assert_eq!(Words::of_output(&format!("Error: {told}\n")), heard(5));
    }

    #[test]
    fn of_several_exceptions_in_the_output_the_last_one_counts_with_those_that_led_to_it() {
        let lost = "Traceback (most recent call last):\n  train()\n\
             PeerError: the process of rank 5 has ended (drumline explain peer_exited)\n";
        let own = "Traceback (most recent call last):\n  load()\nValueError: no data\n";
        let handled = "\nDuring handling of the above exception, another exception occurred:\n\n";
        let caused = "\nThe above exception was the direct cause of the following exception:\n\n";
        let of_torch =
            |text: &str| text.lines().map(|line| format!("[rank0]: {line}\n")).collect::<String>();
        for (text, wanted) in [
            (lost.to_owned(), heard(5)),
            (format!("{lost}trying again\n{own}"), SILENT),
            (format!("{own}trying again\n{lost}"), heard(5)),
            (format!("{lost}{handled}{own}"), heard(5)),
            (format!("{lost}{caused}{own}{handled}{own}bye\n"), heard(5)),
            (of_torch(&format!("{lost}{caused}{own}")), heard(5)),
            (of_torch(&format!("{lost}again\n\n\n{own}")), SILENT),
            // The beginning is cut off.
            (
                format!(
                    "the process of rank 5 has ended (drumline explain peer_exited)\n{handled}{own}"
                ),
                heard(5),
            ),
            (format!("  + Exception Group {lost}  | {own}"), heard(5)),
        ] {
            assert_eq!(Words::of_output(&text), wanted, "{text}");
        }
    }

    fn any_account() -> impl Strategy<Value = Account> {
        let end = prop_oneof![
            Just(End::Open),
            Just(End::Success),
            (0..9_u64, any::<bool>()).prop_map(|(ms, is_never_a_reaction)| End::Failure {
                at: at(ms),
                is_never_a_reaction
            }),
        ];
        let words = prop_oneof![
            Just(Words::None),
            (0..9_u64).prop_map(own),
            (prop::option::of(0..9_usize), prop::option::of((0..9_u64).prop_map(at)))
                .prop_map(|(of, at)| Words::Heard { of, at }),
        ];
        (end, words).prop_map(|(end, words)| Account { end, words })
    }

    proptest! {
        /// One rank fails for a reason of its own and tells it. Whatever the others do that hear of it, and in which
        /// order all of them end, it is the culprit.
        #[test]
        fn who_only_heard_is_never_blamed_for_the_one_who_told(
            others in prop::collection::vec((0..9_u64, any::<bool>(), any::<bool>()), 0..6),
            place in 0..7_usize, ends in prop::option::of(0..9_u64),
        ) {
            let place = place.min(others.len());
            let mut ranks: Vec<Account> = others.iter().map(|&(ms, crashes, names)| {
                let words = if names { heard(place) } else { LOST };
                if crashes { crashed(ms, words) } else { failed(ms, words) }
            }).collect();
            ranks.insert(place, match ends {
                Some(ms) => failed(ms, own(5)),
                None => open(own(5)),
            });
            prop_assert_eq!(culprit(&ranks), Some(place));
        }

        #[test]
        fn a_job_with_a_failure_has_one_culprit_and_a_job_without_has_none(
            ranks in prop::collection::vec(any_account(), 0..7)
        ) {
            let has_failed = |it: &Account| matches!(it.end, End::Failure { .. });
            let heard = |rank: usize| ranks[rank].words.is_of_another(rank);
            let tells = |rank: usize| {
                ranks[rank].end == End::Open && ranks[rank].words.at().is_some() && !heard(rank)
            };
            let found = culprit(&ranks);
            let all = || 0..ranks.len();
            prop_assert_eq!(found.is_some(), all().any(|it| has_failed(&ranks[it]) || tells(it)));
            let Some(found) = found else { return Ok(()) };
            prop_assert_ne!(ranks[found].end, End::Success);
            if all().any(|it| has_failed(&ranks[it]) && !heard(it)) {
                prop_assert!(has_failed(&ranks[found]) && !heard(found));
            }
        }

        #[test]
        fn any_text_is_read(text in ".{0,80}") {
            let _ = heard_of(&text);
            let _ = heard_of(&format!("the process of rank {text} has ended (drumline explain peer_exited)"));
        }
    }
}
