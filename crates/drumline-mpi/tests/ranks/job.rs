//! Jobs of ranks, and how they end.

use std::env;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::role;
use drumline_testing::installed::Installed;

/// So long no job takes, on a busy machine too.
const GIVE_UP: Duration = Duration::from_secs(120);

/// How a job has ended, and what its ranks have printed.
#[derive(Debug)]
pub(crate) struct Ended {
    job: String,
    status: ExitStatus,
    pub(crate) text: String,
}

/// Runs ranks under the launcher of `of`. They load `library`, or look for one.
pub(crate) fn run(of: &Installed, ranks: usize, role: &str, library: Option<&Path>) -> Ended {
    let output = tempfile::NamedTempFile::new().unwrap();
    let mut command = of.mpiexec(ranks, &[], &env::current_exe().unwrap());
    command.args(["--exact", "role::rank", "--nocapture"]).stdin(Stdio::null());
    if library.is_some_and(|library| !library.starts_with(&of.prefix)) {
        // They have other versions of what that library needs.
        command.env_remove("LD_LIBRARY_PATH").env_remove("OPAL_PREFIX");
    }
    command.env(role::ROLE, role).env("RUST_BACKTRACE", "0").env_remove("DRUMLINE_MPI_LIBRARY");
    if let Some(library) = library {
        command.env(role::LIBRARY, library);
    }
    command.stdout(output.as_file().try_clone().unwrap());
    command.stderr(output.as_file().try_clone().unwrap());
    let job = format!("{role} on {ranks} ranks, {library:?} under {}", of.prefix.display());
    let status = wait(command.spawn().unwrap());
    let text = String::from_utf8_lossy(&std::fs::read(output.path()).unwrap()).into_owned();
    let status = status.unwrap_or_else(|| panic!("{job}: it does not end\n{text}"));
    Ended { job, status, text }
}

impl Ended {
    /// All ranks have done their work, and the launcher says so, too.
    pub(crate) fn ends_well(self, ranks: usize) -> Ended {
        assert!(self.status.success(), "{}: {}\n{}", self.job, self.status, self.text);
        self.says_well(ranks)
    }

    /// All ranks have done their work.
    pub(crate) fn says_well(self, ranks: usize) -> Ended {
        let well = self.text.matches(role::WELL).count();
        assert_eq!(well, ranks, "{}: {}\n{}", self.job, self.status, self.text);
        self
    }
}

/// `None` if the job had to be killed.
fn wait(mut job: Child) -> Option<ExitStatus> {
    let since = Instant::now();
    while since.elapsed() < GIVE_UP {
        if let Some(status) = job.try_wait().unwrap() {
            return Some(status);
        }
        sleep(Duration::from_millis(5));
    }
    job.kill().unwrap();
    job.wait().unwrap();
    None
}
