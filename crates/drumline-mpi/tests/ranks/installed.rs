//! The MPIs that tests find, and their launchers.

use std::env;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::role;

pub(crate) const VARIABLE: &str = "DRUMLINE_TEST_MPI";

/// So long no job takes, on a busy machine too.
const GIVE_UP: Duration = Duration::from_secs(120);

/// One library of an MPI that has a directory of its own.
#[derive(Clone, Debug)]
pub(crate) struct Installed {
    prefix: PathBuf,
    library: PathBuf,
}

/// How a job has ended, and what its ranks have printed.
#[derive(Debug)]
pub(crate) struct Ended {
    job: String,
    status: ExitStatus,
    pub(crate) text: String,
}

impl Installed {
    /// Each library that the prefixes have: those of the standard's ABI, of Open MPI's and of MPICH's.
    pub(crate) fn all() -> Vec<Installed> {
        let prefixes = env::var_os(VARIABLE).unwrap_or_default();
        let prefixes: Vec<PathBuf> =
            env::split_paths(&prefixes).filter(|it| !it.as_os_str().is_empty()).collect();
        let found = prefixes.into_iter().flat_map(|prefix| {
            let names = ["libmpi_abi.so.1", "libmpi.so.40", "libmpi.so.12", "libmpich.so.12"];
            let libraries = names.map(|name| prefix.join("lib").join(name));
            let libraries: Vec<_> = libraries.into_iter().filter(|it| it.exists()).collect();
            assert!(!libraries.is_empty(), "{VARIABLE}: {} holds no MPI", prefix.display());
            libraries.into_iter().map(move |library| Installed { prefix: prefix.clone(), library })
        });
        found.collect()
    }

    pub(crate) fn is_open_mpi(&self) -> bool {
        self.library.ends_with("libmpi.so.40")
    }

    /// Runs ranks that load this library.
    pub(crate) fn run(&self, ranks: usize, role: &str) -> Ended {
        self.run_library(ranks, role, self)
    }

    /// Runs ranks that load another MPI's library.
    pub(crate) fn run_library(&self, ranks: usize, role: &str, other: &Installed) -> Ended {
        self.finish(ranks, role, Some(&other.library))
    }

    /// Runs ranks that look for a library.
    pub(crate) fn run_without_path(&self, ranks: usize, role: &str) -> Ended {
        self.finish(ranks, role, None)
    }

    fn finish(&self, ranks: usize, role: &str, library: Option<&Path>) -> Ended {
        let output = tempfile::NamedTempFile::new().unwrap();
        let mut command = self.mpiexec(ranks, output.as_file());
        if library.is_some_and(|library| !library.starts_with(&self.prefix)) {
            command.env_remove("LD_LIBRARY_PATH"); // it has other versions of what that library needs
        }
        command.arg(env::current_exe().unwrap()).args(["--exact", "role::rank", "--nocapture"]);
        command.env(role::ROLE, role).env("RUST_BACKTRACE", "0");
        if let Some(library) = library {
            command.env(role::LIBRARY, library);
        }
        let job = format!("{role} on {ranks} ranks, {library:?} under {}", self.prefix.display());
        let status = wait(command.spawn().unwrap());
        let text = String::from_utf8_lossy(&std::fs::read(output.path()).unwrap()).into_owned();
        let status = status.unwrap_or_else(|| panic!("{job}: it does not end\n{text}"));
        Ended { job, status, text }
    }

    /// The launcher, with room for more ranks than there are cores.
    fn mpiexec(&self, ranks: usize, output: &File) -> Command {
        let mut command = Command::new(self.prefix.join("bin/mpiexec"));
        if self.is_open_mpi() {
            let is_4 = self.prefix.join("lib/libopen-rte.so.40").exists();
            let crowd: &[&str] =
                if is_4 { &["--oversubscribe"] } else { &["--map-by", ":OVERSUBSCRIBE"] };
            command.args(crowd).args(["--bind-to", "none"]);
            for name in ["OMPI", "PRTE"] {
                command.env(format!("{name}_ALLOW_RUN_AS_ROOT"), "1");
                command.env(format!("{name}_ALLOW_RUN_AS_ROOT_CONFIRM"), "1");
            }
        }
        if self.prefix.join("lib/libmpi_ilp64.so").exists() {
            let bin = [self.prefix.join("bin")].into_iter();
            let path = env::var_os("PATH").unwrap_or_default();
            command
                .env("PATH", env::join_paths(bin.chain(env::split_paths(&path))).unwrap())
                .env("LD_LIBRARY_PATH", self.prefix.join("lib"))
                .envs([("I_MPI_FABRICS", "shm"), ("I_MPI_PIN", "0")])
                .env("I_MPI_ROOT", &self.prefix);
        }
        command.arg("-n").arg(ranks.to_string()).stdin(Stdio::null());
        command.stdout(output.try_clone().unwrap()).stderr(output.try_clone().unwrap());
        command
    }
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
