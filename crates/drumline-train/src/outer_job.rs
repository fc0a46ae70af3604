//! What a launcher has told this process of its place in a job. It is nothing to another job that this process starts.

use std::{collections::BTreeMap, env};

pub use drumline_group::launched::{GIVEN_VARIABLE, RUN_VARIABLE};

use crate::{
    spawn::SPAWN_VARIABLE,
    steps::{LAUNCHER_VARIABLE, STEPS_VARIABLE},
};

/// If one of these is there, a launcher has started this process or one of those before it.
const OF_A_RANK: [&str; 4] = [RUN_VARIABLE, "DRUMLINE_STORE", LAUNCHER_VARIABLE, SPAWN_VARIABLE];

/// What launchers always set anew. (torch's other variables are settings of the user.)
const ALWAYS: [&str; 20] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "DRUMLINE_TERMINAL_COLUMNS",
    "DRUMLINE_NUMA_BINDING",
    STEPS_VARIABLE,
    SECRET_FILE,
    GIVEN_VARIABLE,
];

const SECRET_FILE: &str = "DRUMLINE_SECRET_FILE";

/// The variables of this process that a launcher has set, because the process is a rank of its job or was started by one.
/// Not among them is the file for the rank's error: who starts the rank's program may write there.
pub fn variables() -> Vec<String> {
    among(
        &env::vars_os()
            .filter_map(|(name, value)| name.into_string().ok().zip(value.into_string().ok()))
            .collect(),
    )
}

/// The same among these variables.
pub fn among(all: &BTreeMap<String, String>) -> Vec<String> {
    if !OF_A_RANK.iter().any(|name| all.contains_key(*name)) {
        return Vec::new();
    }
    let given = all.get(GIVEN_VARIABLE).map_or("", String::as_str);
    let is_of_launcher = |(name, value): &(&String, &String)| match name.as_str() {
        // Launchers hand the secret on in a descriptor, users name a file of theirs.
        SECRET_FILE => value.starts_with("/proc/") && value.contains("/fd/"),
        name if OF_A_RANK.contains(&name) || ALWAYS.contains(&name) => true,
        // What the program has changed since is the user's.
        name => given.split(' ').any(|it| it.split_once('=') == Some((name, value.as_str()))),
    };
    all.iter().filter(is_of_launcher).map(|(name, _)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Vec<String> {
        let pair = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        among(&variables.iter().map(pair).collect())
    }

    #[test]
    fn what_the_user_has_set_is_not_the_launchers() {
        let secret = (SECRET_FILE, "/proc/self/fd/100");
        let by_hand = [("RANK", "0"), ("MASTER_ADDR", "h"), ("OMP_NUM_THREADS", "1"), secret];
        assert_eq!(found(&by_hand), [""; 0], "nothing is known of a launcher");
        let job = ("TORCHELASTIC_RUN_ID", "a1");
        let all = ["DRUMLINE_SECRET_FILE", "MASTER_ADDR", "RANK", "TORCHELASTIC_RUN_ID"];
        assert_eq!(found(&[&by_hand[..], &[job]].concat()), all);
        let own = [
            job,
            (SECRET_FILE, "/home/me/secret"),
            ("DRUMLINE_TIMEOUT_S", "9"),
            ("DRUMLINE_SECRET", "mine"),
            ("TORCHELASTIC_ERROR_FILE", "x"),
            ("TORCHELASTIC_HEALTH_CHECK_PORT", "8"),
            ("PET_ROLE", "a"),
        ];
        assert_eq!(found(&own), [job.0]);
        let given = (GIVEN_VARIABLE, "OMP_NUM_THREADS=1 DRUMLINE_SECURITY=tls");
        let changed = [job, given, ("OMP_NUM_THREADS", "1"), ("DRUMLINE_SECURITY", "auth")];
        assert_eq!(found(&changed), [GIVEN_VARIABLE, "OMP_NUM_THREADS", job.0]);
        for (name, value) in
            [("DRUMLINE_STORE", "unix:@a"), (SPAWN_VARIABLE, "0 1 x"), (LAUNCHER_VARIABLE, "b")]
        {
            assert_eq!(found(&[(name, value), ("RANK", "1")]), [name, "RANK"]);
        }
    }
}
