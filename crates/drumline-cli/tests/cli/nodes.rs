//! Memory nodes, on a host that may have only one: for its own processes alone, the test mounts a list of
//! two nodes with one core each over the kernel's list.
//!
//! That takes root, `unshare`, `mount` and two cores. Without them the test says so and does nothing.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use rustix::thread::{CpuSet, sched_getaffinity};

const DRUMLINE: &str = env!("CARGO_BIN_EXE_drumline");

#[test]
fn ranks_are_bound_to_nodes_and_sum_by_them() {
    let allowed = sched_getaffinity(None).unwrap();
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let [first, second, ..] = cores[..] else { return println!("skipped: one core only") };
    let dir = tempfile::tempdir().unwrap();
    for (node, core) in [first, second].into_iter().enumerate() {
        let node = dir.path().join(format!("node{node}"));
        fs::create_dir(&node).unwrap();
        fs::write(node.join("cpulist"), format!("{core}\n")).unwrap();
    }
    if !with_nodes(dir.path(), &["true"]).is_ok_and(|output| output.status.success()) {
        return println!("skipped: nothing can be mounted here");
    }
    let run = |binding: &[&str], program: &[&str]| {
        let launcher = [&[DRUMLINE, "run"], binding, &["--nproc-per-node", "4", "--"]].concat();
        let output = with_nodes(dir.path(), &[&launcher, program].concat()).unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    };

    let bound = ["--numa-binding", "node"];
    // With one core on each node, there is nothing nearer than the node.
    for binding in ["node", "exclusive", "core-complex"] {
        let bound = ["--numa-binding", binding];
        let told = run(&bound, &["grep", "Cpus_allowed_list", "/proc/self/status"]);
        let mut told: Vec<&str> = told.lines().collect();
        told.sort_unstable();
        let by_rank = [first, first, second, second].into_iter().enumerate();
        let by_rank = by_rank.map(|(rank, core)| format!("[{rank}] Cpus_allowed_list:\t{core}"));
        assert_eq!(told, by_rank.collect::<Vec<_>>(), "{binding}");
    }

    // Every result is verified.
    let sizes = ["bench", "all_reduce", "--sizes", "8,1MiB", "--place", "in", "--buffers", "all"];
    let times = ["--rounds", "1", "--iters", "2", "-w", "1", "--explain"];
    let bench = [&[DRUMLINE], &sizes[..], &times].concat();
    for (binding, names) in [
        (&bound[..], ["shm-oneshot", "shm-nodes", "shm-nodes-push"]),
        // These ranks may run on both nodes.
        (&[], ["shm-oneshot", "shm-twoshot", "shm-push"]),
    ] {
        let told = run(binding, &bench);
        for name in names {
            assert!(told.contains(&format!("#   {name}: ")), "{name} is not taken: {told}");
        }
    }
}

/// Runs a command for which the host has the memory nodes in the directory `listed`.
fn with_nodes(listed: &Path, command: &[&str]) -> std::io::Result<Output> {
    let mounted = "mount --bind \"$0\" /sys/devices/system/node && exec \"$@\"";
    Command::new("unshare").args(["-m", "sh", "-c", mounted]).arg(listed).args(command).output()
}
