//! Whether what `drumline run` has told a process is for this process.

/// What the launcher has set for a rank and is no place: settings that a user might give as well, as `NAME=VALUE` with
/// spaces between them, and behind them the name of the job.
pub const GIVEN_VARIABLE: &str = "DRUMLINE_GIVEN";

/// The name of a job. Every launcher that speaks torchrun's variables sets it.
pub const RUN_VARIABLE: &str = "TORCHELASTIC_RUN_ID";

/// Whether a rank of `drumline run` has started another launcher, such as torchrun, and this process is a rank of that
/// one. It inherits variables of the outer job that its own launcher does not know.
pub fn is_of_inner_job(variable: impl Fn(&str) -> Option<String>) -> bool {
    let given = variable(GIVEN_VARIABLE);
    let outer = given.as_deref().and_then(|given| given.split_once(RUN_VARIABLE)).map(|(_, it)| it);
    let outer = outer.and_then(|it| it.strip_prefix('='));
    outer.zip(variable(RUN_VARIABLE).as_deref()).is_some_and(|(outer, own)| outer != own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_name_of_the_job_shows_another_launcher() {
        let is_inner = |given: Option<&str>, run: Option<&str>| {
            is_of_inner_job(|name| match name {
                GIVEN_VARIABLE => given.map(str::to_owned),
                RUN_VARIABLE => run.map(str::to_owned),
                _ => None,
            })
        };
        let given = Some("OMP_NUM_THREADS=1 TORCHELASTIC_RUN_ID=my job");
        assert!(is_inner(given, Some("other")) && !is_inner(given, Some("my job")));
        assert!(!is_inner(given, None) && !is_inner(None, Some("a")) && !is_inner(None, None));
    }
}
