//! `drumline env` under the launchers of MPI in DRUMLINE_TEST_MPI (prefixes with bin/mpiexec, with colons between them),
//! and without any.

use std::{
    collections::BTreeSet,
    process::{Command, Stdio},
};

use drumline_testing::installed::{Installed, VARIABLE};

const DRUMLINE: &str = env!("CARGO_BIN_EXE_drumline");

/// A rank tells what it got. The port must be free, the secret in no argument and no variable, and the process the same.
const RANK: &str = r#"
import hashlib, os, socket, sys, time
rank = int(os.environ["RANK"])
assert sys.argv[1] == str(os.getpid()), "exec keeps the process"
with open(os.environ["DRUMLINE_SECRET_FILE"], "rb") as file:
    secret = file.read()
for name in ("environ", "cmdline"):
    with open(f"/proc/self/{name}", "rb") as file:
        assert secret not in file.read(), name
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    server = socket.create_server(place)
    others = [server.accept() for _ in range(1, int(os.environ["WORLD_SIZE"]))]
else:
    while True:
        try:
            socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
words = [*(os.environ[name] for name in names), str(place[1]), hashlib.sha256(secret).hexdigest()]
os.write(1, (" ".join(words) + "\n").encode())
"#;

#[test]
fn ranks_of_every_launcher_agree_and_become_the_program() {
    let libraries = Installed::all();
    if libraries.is_empty() {
        eprintln!("skipped: {VARIABLE} names no MPI");
    }
    let mut launchers = BTreeSet::new();
    for library in libraries.iter().filter(|it| launchers.insert(&it.prefix)) {
        let prefix = &library.prefix;
        for ranks in 1..=4_usize {
            let script = format!("exec {DRUMLINE} env -- python3 -c '{RANK}' $$");
            let mut mpiexec = library.mpiexec(ranks, &[], "sh".as_ref());
            mpiexec.args(["-c", &script]);
            let output = mpiexec.output().unwrap();
            assert!(output.status.success(), "{}, {ranks} ranks: {output:?}", prefix.display());
            let text = String::from_utf8(output.stdout).unwrap();
            let mut lines: Vec<_> = text.lines().collect();
            lines.sort_unstable();
            assert_eq!(lines.len(), ranks, "{text}");
            let mut agreed = BTreeSet::new();
            for (rank, line) in lines.iter().enumerate() {
                let start = format!("{rank} {rank} {ranks} {ranks} 0 127.0.0.1 ");
                agreed.insert(line.strip_prefix(&start).unwrap_or_else(|| panic!("{line}")));
            }
            assert_eq!(agreed.len(), 1, "{text}");
        }
    }
}

#[test]
fn what_cannot_work_is_refused() {
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
    let pmi = [("PMI_RANK", "2"), ("PMI_SIZE", "2")];
    for (line, variables, code, part) in [
        ("env -- true", &[][..], 2, "no launcher has started this process"),
        ("env -- no-such-program", &[], 127, "no-such-program not found"),
        ("env", &[], 2, "PROGRAM"),
        ("env --print", &slurm[..], 2, "srun --mpi=pmi2"),
        ("env --print", &pmi[..], 2, "PMI_RANK=2 with PMI_SIZE=2"),
    ] {
        let mut command = Command::new(DRUMLINE);
        command.args(line.split_whitespace()).env_clear().envs(variables.iter().copied());
        let output = command.env("PATH", "/usr/bin:/bin").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{line}: {text}");
        assert!(text.contains(part), "{line}: {text}");
    }
}

#[test]
fn a_job_of_one_rank_agrees_with_itself_and_keeps_what_the_user_has_set() {
    let print = |variables: &[(&str, &str)]| {
        let mut command = Command::new(DRUMLINE);
        command.args(["env", "--print"]).env_clear().envs([("PMI_RANK", "0"), ("PMI_SIZE", "1")]);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let text = print(&[]);
    assert!(text.contains("MASTER_ADDR=127.0.0.1\n") && text.contains("WORLD_SIZE=1\n"), "{text}");
    let text = print(&[("MASTER_ADDR", "node7"), ("MASTER_PORT", "4711")]);
    assert!(text.contains("MASTER_ADDR=node7\nMASTER_PORT=4711\nRANK=0\n"), "{text}");
}

/// Two processes with the variables of Open MPI, of which the second may never come, or have a secret of its own.
#[test]
fn who_does_not_come_and_who_has_another_secret_are_named() {
    let rank = |job: &str, rank: &str, timeout: &str| {
        let mut command = Command::new(DRUMLINE);
        command.args(["env", "--print", "--timeout", timeout]).env_clear();
        command.env("PMIX_NAMESPACE", format!("{job}-{}", std::process::id()));
        command.env("OMPI_COMM_WORLD_RANK", rank).env("OMPI_COMM_WORLD_LOCAL_RANK", rank);
        command.env("OMPI_COMM_WORLD_SIZE", "2").env("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    for (number, part) in [("0", "these have not come: 1"), ("1", "rank 0 has not come")] {
        let output = rank("alone", number, "100ms").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && text.contains(part), "{text}");
    }
    let first = rank("secret", "0", "2m").spawn().unwrap();
    let secret = "a secret that one rank has alone";
    let second = rank("secret", "1", "2m").env("DRUMLINE_SECRET", secret).output().unwrap();
    let text = String::from_utf8(second.stderr).unwrap();
    assert!(text.contains("rank 1 has a DRUMLINE_SECRET") && !text.contains(secret), "{text}");
    assert!(first.wait_with_output().unwrap().status.success());
}
