//! The texts of errors.

use std::{sync::Arc, time::Duration};

use drumline_engine::membership::{GlobalRanks, Membership};
use drumline_group::{Cause, CollectiveError, Error, ErrorKind, ErrorOrigin, Reason};

/// Text and number of sections.
fn told(error: Error) -> (String, usize) {
    let text = error.to_string();
    let sections = text.matches("(drumline explain ").count();
    (text, sections)
}

#[test]
fn an_error_that_quotes_another_ends_with_the_section_of_that_one() {
    let setting = |name: &str| Error::setting(name, "is 0");
    let quoted = setting("DRUMLINE_STREAMS").to_string();
    let problem = format!("rank 1 reports ({quoted}), and ends");
    let (text, sections) = told(Error::store("hash", "join", problem));
    assert!(text.ends_with("is 0), and ends (drumline explain settings)"), "{text}");
    assert_eq!(sections, 1, "{text}");
    let (text, _) = told(setting("DRUMLINE_SECRET_FILE"));
    assert!(text.ends_with(" (drumline explain secrets)"), "{text}");
}

#[test]
fn no_time_is_not_told_in_nanoseconds() {
    let keys = vec!["never".to_owned()];
    let (text, sections) = told(Error::missing_keys("hash", keys, Duration::ZERO));
    assert!(text.starts_with("store hash: waited no time for never; "), "{text}");
    assert_eq!(sections, 1, "{text}");
}

#[test]
fn only_a_mistake_of_the_user_makes_another_attempt_senseless() {
    let member = Membership::new("world", (0, 2), GlobalRanks::default());
    let problem = || "x".to_owned();
    let (ours, theirs) = (problem(), problem());
    for (cause, origin) in [
        (Cause::Mismatch { peer: 1, theirs, ours }, ErrorOrigin::User),
        (Cause::System { problem: problem() }, ErrorOrigin::Surroundings),
        (Cause::Device { problem: problem() }, ErrorOrigin::Surroundings),
        (Cause::PeerExited { peer: 1 }, ErrorOrigin::Peer),
        (Cause::Timeout { waiting_for: vec![1] }, ErrorOrigin::Peer),
        (
            Cause::Reported { by: 1, culprit: Some(1), reason: Reason::Other, text: problem() },
            ErrorOrigin::Peer,
        ),
        (Cause::Protocol { peer: 1, problem: problem() }, ErrorOrigin::Bug),
    ] {
        let failure =
            CollectiveError::new(&member, 0, "barrier".into(), Duration::ZERO, cause.clone());
        let by = Arc::new(failure);
        for (error, kind) in
            [(by.error(), ErrorKind::Collective), (by.poisoned("barrier"), ErrorKind::Poisoned)]
        {
            assert_eq!((error.kind(), error.origin()), (kind, origin), "{cause}");
            assert_eq!(error.culprit(), by.culprit(), "{cause}");
            assert!(error.to_string().ends_with(&error.section().to_string()), "{error}");
        }
    }
}
