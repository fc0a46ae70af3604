//! `drumline predict`, and its old name `drumline simulate`.

use std::{
    fs,
    process::{Command, Output},
};

fn drumline(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drumline"));
    command.args(line.split_whitespace()).output().unwrap()
}

fn stdout(options: &str) -> String {
    let output = drumline(&format!("predict {options}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_cluster_is_described_by_a_file_and_options() {
    let dir = tempfile::tempdir().unwrap();
    let (file, svg) = (dir.path().join("cluster.toml"), dir.path().join("step.svg"));
    fs::write(&file, "hosts = 9\nnproc_per_node = 4\nnic_byte_fs = 320_000\n").unwrap();
    let (cluster, picture) = (file.display(), svg.display());
    let text = stdout(&format!(
        "--cluster {cluster} --hosts 4 --operations all_reduce,all_gather --sizes 4K,16M --svg {picture} \
         --gradients-mb 50 --backward-ms 40 --bucket-mb 5,50"
    ));
    assert!(text.starts_with("4 hosts of 4 ranks: 16 ranks; lines of 25"), "{text}");
    for part in ["\nall_reduce, ", "\nall_gather, ", "16 MiB", "hierarchical", "5 MB", "training"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // All-reduces of 4 KiB and 16 MiB, all-gathers, and the steps on 1, 2 and 4 hosts.
    assert_eq!(text.lines().filter(|line| line.contains("16 MiB")).count(), 2);
    assert!(fs::read_to_string(svg).unwrap().contains("scaling efficiency"));
    let answer = stdout("--hosts 2 --sizes 1M");
    assert_eq!(answer, stdout("--hosts 2 --sizes 1M"), "the same question has the same answer");
    let old = drumline("simulate --hosts 2 --sizes 1M");
    assert_eq!(String::from_utf8(old.stdout).unwrap(), answer, "under the old name");
}

#[test]
fn what_cannot_be_understood_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cluster.toml");
    fs::write(&file, "hosts = 2\nlatency = 3\n").unwrap();
    let file = format!("--cluster {}", file.display());
    for (options, part) in [
        (&*file, "cluster.toml: line 2: \"latency\" is no price"),
        ("--cluster /nowhere", "/nowhere"),
        ("--hosts 0", "1 to 65536 ranks"),
        ("--hosts 1000000", "1 to 65536 ranks"),
        ("--sizes 64Q", "--sizes \"64Q\""),
        ("--operations all_sum", "one of all_reduce"),
        ("--dtype i3", "--dtype \"i3\""),
        ("--bandwidth-gbps 0", "--bandwidth-gbps"),
        ("--latency-us=-1", "--latency-us"),
        ("--gradients-mb 1", "--backward-ms"),
        ("--gradients-mb nan --backward-ms 1", "--gradients-mb"),
        ("--measure x --hosts 2", "cannot be used with"),
    ] {
        let output = drumline(&format!("predict {options}"));
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{options}: {error}");
        assert!(error.contains(part), "{options}: {error}");
    }
}

/// Prices that are measured here serve as a cluster file, and as prices by which ranks choose.
#[test]
fn measured_prices_are_a_file_of_prices() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prices.toml");
    let measured = stdout(&format!("--measure {} --measure-ms 10", file.display()));
    assert!(measured.starts_with("wrote "), "{measured}");
    let prices: drumline::algorithms::PriceList =
        fs::read_to_string(&file).unwrap().parse().unwrap();
    assert_ne!(prices.near, drumline::algorithms::PriceList::default().near);
    assert!(prices.call_ps > 0 && prices.memory_byte_fs > 0);
    let text = stdout(&format!("--cluster {} --hosts 2 --sizes 1M", file.display()));
    assert!(text.contains("1 MiB"), "{text}");
}
