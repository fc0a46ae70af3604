use super::*;

const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 \
                        OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=3 OMPI_UNIVERSE_SIZE=2 PMIX_RANK=3";
const HYDRA: &str = "PMI_RANK=1 PMI_SIZE=4 PMI_FD=18 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
const SLURM: &str = "SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_STEP_NUM_NODES=2 \
                     SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1";
const RUN: &str = "TORCHELASTIC_RUN_ID=a RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 \
                   GROUP_WORLD_SIZE=1";

fn variables(texts: &[&str]) -> Variables {
    let words = texts.iter().flat_map(|text| text.split_whitespace());
    words.filter_map(|word| word.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()
}

/// What is said in a process with the variables `own`, below processes with those of `above`, nearest first.
fn said(own: &[&str], above: &[&[&str]]) -> Result<Place, String> {
    let above = || above.iter().map(|texts| variables(texts)).collect();
    place(&variables(own), above).map_err(|error| error.to_string())
}

fn place_of(
    launcher: Launcher,
    (rank, size): (usize, usize),
    local: (usize, usize),
    host: Option<(usize, usize)>,
) -> Result<Place, String> {
    let part = |(number, of)| Part { number, of };
    Ok(Place { launcher, rank, size, local: Some(part(local)), host: host.map(part) })
}

#[test]
fn every_launcher_says_the_place() {
    for (own, expected) in [
        (OPEN_MPI, place_of(Launcher::OpenMpi, (3, 4), (3, 4), None)),
        (HYDRA, place_of(Launcher::Hydra, (1, 4), (1, 2), None)),
        (SLURM, place_of(Launcher::Slurm, (2, 3), (0, 1), Some((1, 2)))),
        (RUN, place_of(Launcher::Torchrun, (0, 2), (0, 2), Some((0, 1)))),
    ] {
        assert_eq!(said(&[own], &[]), expected, "{own}");
    }
    // A server of PMI that says no more.
    let bare = said(&["PMI_RANK=0 PMI_SIZE=2 PMI_FD=3"], &[]).unwrap();
    assert_eq!((bare.local, bare.is_on_one_host()), (None, false));
    assert!(said(&[OPEN_MPI], &[]).unwrap().is_on_one_host());
}

#[test]
fn of_nested_launchers_the_innermost_counts() {
    let launcher = |own: &[&str], above: &[&[&str]]| said(own, above).map(|it| it.launcher);
    // mpiexec in an allocation starts its proxies by srun: SLURM_PROCID is that of the proxy.
    assert_eq!(launcher(&[SLURM, HYDRA], &[&[SLURM], &[]]), Ok(Launcher::Hydra));
    assert_eq!(
        launcher(&[SLURM, OPEN_MPI], &[&[SLURM, OPEN_MPI], &[SLURM]]),
        Ok(Launcher::OpenMpi)
    );
    // srun in a rank of Open MPI.
    assert_eq!(launcher(&[SLURM, OPEN_MPI], &[&[OPEN_MPI], &[]]), Ok(Launcher::Slurm));
    // `drumline run` in a rank of Open MPI, and the other way round.
    assert_eq!(
        launcher(&[RUN, OPEN_MPI], &[&[OPEN_MPI], &[OPEN_MPI], &[]]),
        Ok(Launcher::Torchrun)
    );
    assert_eq!(launcher(&[RUN, HYDRA], &[&[RUN]]), Ok(Launcher::Hydra));
    // The outer launcher has other values of the same variables.
    let outer = "PMI_RANK=0 PMI_SIZE=1";
    assert_eq!(launcher(&[OPEN_MPI, HYDRA], &[&[OPEN_MPI, outer]]), Ok(Launcher::Hydra));
    // srun --mpi=pmi2 says the same in two ways.
    let pmi2 = "PMI_RANK=2 PMI_SIZE=3 PMI_FD=11 PMI_JOBID=1.0";
    assert_eq!(launcher(&[SLURM, pmi2], &[]), Ok(Launcher::Slurm));
}

#[test]
fn bad_variables_are_named() {
    for (own, parts) in [
        ("PATH=/bin", &["PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "drumline run"][..]),
        ("SLURM_JOB_ID=1 SLURM_PROCID=0", &["no launcher", "srun"]),
        ("PMI_RANK=0", &["PMI_RANK is set", "PMI_SIZE is not"]),
        ("PMI_RANK=4 PMI_SIZE=4", &["PMI_RANK=4", "PMI_SIZE=4"]),
        ("PMI_RANK=x PMI_SIZE=4", &["PMI_RANK=x"]),
        ("PMI_RANK=0 PMI_SIZE=99999999", &["PMI_SIZE=99999999"]),
        ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=2", &["MPI_LOCALRANKID=2"]),
        ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=3", &["MPI_LOCALNRANKS=3"]),
    ] {
        let error = said(&[own], &[]).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{own}: {error}");
    }
    let error = said(&[OPEN_MPI, HYDRA], &[]).unwrap_err();
    for part in ["Open MPI (rank 3 of 4)", "Intel MPI (rank 1 of 4)", "PMI_RANK"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn slurm_lists_the_ranks_of_all_hosts() {
    let of = |list, hosts: usize| (0..hosts).map(|host| per_host(list, host)).collect::<Vec<_>>();
    assert_eq!(of("2(x2),3", 4), [Some(2), Some(2), Some(3), None]);
    assert_eq!(of("4", 2), [Some(4), None]);
    for bad in ["", "x", "2(x", "2(xy)", "-1"] {
        assert_eq!(per_host(bad, 0), None, "{bad}");
    }
}
