//! The MPIs that tests find, and how their launchers start ranks.

use std::{
    env, fmt,
    path::{Path, PathBuf},
    process::Command,
};

/// Where tests look for MPIs: prefixes with `bin` and `lib`, and colons between them.
pub const VARIABLE: &str = "DRUMLINE_TEST_MPI";

/// An MPI that is installed in a directory of its own.
#[derive(Clone, Debug)]
pub struct Installed {
    /// The directory.
    pub prefix: PathBuf,
    /// A library of it, and the file names of the ABIs that it has.
    pub library: PathBuf,
}

/// The names of MPI libraries: the standard ABI, Open MPI's, MPICH's.
const LIBRARIES: [&str; 4] = ["libmpi_abi.so.1", "libmpi.so.40", "libmpi.so.12", "libmpich.so.12"];

impl Installed {
    /// The MPIs that [`VARIABLE`] names, once for each of their ABIs. None if it is not set.
    ///
    /// # Panics
    ///
    /// If a directory holds no MPI.
    pub fn all() -> Vec<Installed> {
        let prefixes = env::var(VARIABLE).unwrap_or_default();
        let prefixes = prefixes.split(':').filter(|prefix| !prefix.is_empty()).map(PathBuf::from);
        let found = prefixes.flat_map(|prefix| {
            let libraries = LIBRARIES.map(|name| prefix.join("lib").join(name));
            let found: Vec<PathBuf> = libraries.into_iter().filter(|it| it.exists()).collect();
            assert!(!found.is_empty(), "{VARIABLE}: {} holds no MPI", prefix.display());
            found.into_iter().map(move |library| Installed { prefix: prefix.clone(), library })
        });
        found.collect()
    }

    /// The command that starts `program` on some ranks, more than there are cores if need be.
    pub fn mpiexec(&self, ranks: usize, options: &[&str], program: &Path) -> Command {
        let mut command = Command::new(self.prefix.join("bin/mpiexec"));
        command.arg("-n").arg(ranks.to_string());
        let crowd: &[&str] = match self.launcher() {
            "Open MPI 5" => &["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"],
            "Open MPI 4" => &["--oversubscribe", "--bind-to", "none"],
            _ => &[],
        };
        command.args(crowd);
        command.args(options).arg(program);
        self.settle(&mut command);
        command
    }

    /// Sets what ranks and launchers need. What the caller's environment has for other jobs does not reach them.
    pub fn settle(&self, command: &mut Command) {
        command
            .env_clear()
            .envs(
                ["PATH", "TMPDIR", VARIABLE]
                    .iter()
                    .filter_map(|name| Some((name, env::var_os(name)?))),
            )
            .env("HOME", &self.prefix)
            .env("DRUMLINE_MPI_LIBRARY", &self.library)
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("PRTE_ALLOW_RUN_AS_ROOT", "1")
            .env("PRTE_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        if self.is_open_mpi() {
            command.env("OPAL_PREFIX", &self.prefix); // a rank without its launcher starts one
        }
        if self.prefix.join("lib/libmpi_ilp64.so").exists() {
            let path = env::var_os("PATH").unwrap_or_default();
            let bin = [self.prefix.join("bin")].into_iter();
            let path = env::join_paths(bin.chain(env::split_paths(&path)));
            command
                .env("PATH", path.unwrap_or_default())
                .env("I_MPI_ROOT", &self.prefix)
                .env("LD_LIBRARY_PATH", self.prefix.join("lib"))
                .env("I_MPI_FABRICS", "shm")
                .env("I_MPI_PIN", "0");
        }
    }

    /// Options with which the launcher lets the other ranks live when one has ended badly. MPICH's does in part.
    pub fn spares_the_others(&self) -> &'static [&'static str] {
        match self.launcher() {
            "Open MPI 5" => &["--with-ft", "ulfm"],
            "Open MPI 4" => &["--enable-recovery"],
            _ => &["-disable-auto-cleanup"],
        }
    }

    /// The launcher, as far as its options differ: "Open MPI 5", "Open MPI 4", "Hydra".
    pub fn launcher(&self) -> &'static str {
        match (self.is_open_mpi(), self.prefix.join("lib/libopen-rte.so.40").exists()) {
            (true, false) => "Open MPI 5",
            (true, true) => "Open MPI 4",
            (false, _) => "Hydra",
        }
    }

    /// Whether it is Open MPI, whose launcher has options of its own.
    pub fn is_open_mpi(&self) -> bool {
        self.library.ends_with("libmpi.so.40")
    }
}

impl fmt::Display for Installed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.library.display().fmt(f)
    }
}
