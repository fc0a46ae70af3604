//! Tells what has happened in a world that has ended.

use std::time::{Duration, SystemTime};

use drumline::trace::Trace;

use crate::{
    attempt::Ended, environment::ERROR_FILE, launch::Launch, output, prefix::host_name,
    report::Report, supervisor::Verdict,
};

/// Prints what went wrong in a world, and where its traces are. Tells it the launcher of this launcher, too, if there is
/// one.
pub(crate) fn tell(launch: &Launch<'_>, ended: &Ended) {
    let words = ended.last_words();
    let report = Report {
        verdict: ended.verdict(),
        started_at: ended.attempt.started_at,
        host: &host_name(),
        first_rank: ended.attempt.world.first_rank,
        ranks: &ended.fates,
        words: &words,
        is_victim: launch.job.meeting.is_some() && ended.attempt.supervisor.has_only_heard(),
        left: &ended.left,
        incomplete: &ended.attempt.console.problems(),
        logs: launch.files.news(launch.job, matches!(ended.verdict(), Verdict::Failed { .. })),
    };
    output::report(&report.render());
    if let Some(path) = std::env::var_os(ERROR_FILE) {
        ended.pass_on(&words, path.as_ref());
    }
    let trace = launch.config.trace.as_ref();
    if let Some(Trace { dir, .. }) = trace.filter(|it| has_written(it, ended.attempt.started_at)) {
        output::say(&format!("traces are in {0}: drumline trace page {0}", dir.display()));
    }
}

/// Whether rank 0 has written a trace since then: its program may not use this library at all.
fn has_written(trace: &Trace, since: SystemTime) -> bool {
    let file = trace.dir.join("rank-0.json");
    // File systems may round times down, to a second at most.
    let since = since - Duration::from_secs(1);
    file.metadata().and_then(|file| file.modified()).is_ok_and(|modified| modified >= since)
}
