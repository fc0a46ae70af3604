//! Who started this process: what the environment says.

use std::fmt;

/// A launcher of MPI programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// Hydra, which is `mpiexec` of MPICH, Intel MPI and MVAPICH.
    Hydra,
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `srun` of Slurm, which serves every MPI.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Hydra => "hydra (mpiexec of MPICH or Intel MPI)",
            Launcher::OpenMpi => "Open MPI's mpirun",
            Launcher::Slurm => "Slurm's srun",
        })
    }
}

impl Launcher {
    /// The only MPIs that it starts; `None` if it starts all.
    pub(crate) fn family(self) -> Option<Family> {
        match self {
            Launcher::Hydra => Some(Family::Mpich),
            Launcher::OpenMpi => Some(Family::OpenMpi),
            Launcher::Slurm => None,
        }
    }
}

/// MPIs that share a launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Mpich,
    OpenMpi,
}

impl Family {
    /// The family of a library, by what it calls itself.
    pub(crate) fn of(version: &str) -> Option<Family> {
        let version = version.to_lowercase();
        let is = |names: &[&str]| names.iter().any(|name| version.contains(name));
        match () {
            () if is(&["open mpi"]) => Some(Family::OpenMpi),
            () if is(&["mpich", "mvapich", "intel(r) mpi"]) => Some(Family::Mpich),
            () => None,
        }
    }
}

/// A launcher and how many processes it says that it started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) launcher: Launcher,
    pub(crate) size: Option<usize>,
}

/// The launcher that started this process, from its environment. No library is needed.
///
/// It is `None` without a launcher, and when the marks of two launchers are there: one of them ran inside the other,
/// and the environment does not say which one is nearer.
pub fn launcher() -> Option<Launcher> {
    started().map(|start| start.launcher)
}

pub(crate) fn started() -> Option<Start> {
    read(|name| std::env::var(name).ok())
}

/// Open MPI and hydra may themselves start their ranks by `srun`, so their marks count before Slurm's. Slurm's PMI sets
/// `PMI_SIZE` too, but never `MPI_LOCALNRANKS`.
fn read(variable: impl Fn(&str) -> Option<String>) -> Option<Start> {
    let has = |name: &str| variable(name).is_some();
    let size = |name: &str| variable(name)?.parse().ok();
    let slurm = has("SLURM_STEP_ID");
    let open_mpi = has("OMPI_COMM_WORLD_SIZE");
    let hydra = has("PMI_SIZE") && (has("MPI_LOCALNRANKS") || !slurm);
    match (open_mpi, hydra) {
        (true, true) => None,
        (true, false) => {
            Some(Start { launcher: Launcher::OpenMpi, size: size("OMPI_COMM_WORLD_SIZE") })
        }
        (false, true) => Some(Start { launcher: Launcher::Hydra, size: size("PMI_SIZE") }),
        (false, false) => {
            slurm.then(|| Start { launcher: Launcher::Slurm, size: size("SLURM_STEP_NUM_TASKS") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn under(variables: &[(&str, &str)]) -> Option<(Launcher, Option<usize>)> {
        let find = |name: &str| variables.iter().find(|it| it.0 == name).map(|it| it.1.to_owned());
        read(find).map(|start| (start.launcher, start.size))
    }

    #[test]
    fn each_launcher_is_known_by_what_it_sets() {
        let open_mpi =
            [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "3"), ("PMIX_NAMESPACE", "1")];
        let hydra =
            [("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("PMI_FD", "18"), ("MPI_LOCALNRANKS", "4")];
        let slurm = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("PMIX_NAMESPACE", "slurm.pmix.1.0"),
        ];
        assert_eq!(under(&open_mpi), Some((Launcher::OpenMpi, Some(4))));
        assert_eq!(under(&hydra), Some((Launcher::Hydra, Some(4))));
        assert_eq!(under(&slurm), Some((Launcher::Slurm, Some(2))));
        assert_eq!(under(&[("PMI_SIZE", "many")]), Some((Launcher::Hydra, None)));
        assert_eq!(under(&[("HOME", "/root"), ("SLURM_JOB_ID", "7")]), None);
    }

    #[test]
    fn in_slurm_the_nearer_launcher_counts() {
        let pmi2 = [("SLURM_STEP_ID", "0"), ("PMI_SIZE", "8"), ("PMI_RANK", "0"), ("PMI_FD", "9")];
        assert_eq!(under(&pmi2), Some((Launcher::Slurm, None)));
        let hydra = [("SLURM_STEP_ID", "0"), ("PMI_SIZE", "8"), ("MPI_LOCALNRANKS", "2")];
        assert_eq!(under(&hydra), Some((Launcher::Hydra, Some(8))));
        let open_mpi = [("SLURM_STEP_ID", "0"), ("OMPI_COMM_WORLD_SIZE", "8")];
        assert_eq!(under(&open_mpi), Some((Launcher::OpenMpi, Some(8))));
    }

    #[test]
    fn a_library_says_its_family() {
        assert_eq!(Family::of("Open MPI v5.0.11, package: Open MPI"), Some(Family::OpenMpi));
        assert_eq!(Family::of("MPICH Version: 4.3.2"), Some(Family::Mpich));
        assert_eq!(Family::of("Intel(R) MPI Library 2021.19 for Linux* OS"), Some(Family::Mpich));
        assert_eq!(Family::of("MPI VERSION    : CRAY MPICH version 8.1"), Some(Family::Mpich));
        assert_eq!(Family::of("Mukautuva"), None);
    }

    #[test]
    fn of_one_launcher_in_another_nothing_is_said() {
        assert_eq!(
            under(&[("OMPI_COMM_WORLD_SIZE", "1"), ("PMI_SIZE", "4"), ("MPI_LOCALNRANKS", "4")]),
            None
        );
    }
}
