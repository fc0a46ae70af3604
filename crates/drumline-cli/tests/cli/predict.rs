//! `drumline predict`, and its old name `drumline simulate`.

use std::{
    fs,
    process::{Command, Output},
};

fn predict(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drumline"));
    command.arg("predict").args(args).output().unwrap()
}

fn stdout(args: &[&str]) -> String {
    let output = predict(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_cluster_is_described_by_a_file_and_options() {
    let dir = tempfile::tempdir().unwrap();
    let (file, svg) = (dir.path().join("cluster.toml"), dir.path().join("step.svg"));
    fs::write(&file, "hosts = 9\nnproc_per_node = 4\nnic_byte_fs = 320_000\n").unwrap();
    let text = stdout(&[
        "--cluster",
        file.to_str().unwrap(),
        "--hosts",
        "4",
        "--operations",
        "all_reduce,all_gather",
        "--sizes",
        "4K,16M",
        "--gradients-mb",
        "50",
        "--backward-ms",
        "40",
        "--bucket-mb",
        "5,50",
        "--svg",
        svg.to_str().unwrap(),
    ]);
    assert!(text.starts_with("4 hosts of 4 ranks: 16 ranks; lines of 25"), "{text}");
    for part in ["\nall_reduce, ", "\nall_gather, ", "16 MiB", "hierarchical", "5 MB", "training"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // All-reduces of 4 KiB and 16 MiB, all-gathers, and the steps on 1, 2 and 4 hosts.
    assert_eq!(text.lines().filter(|line| line.contains("16 MiB")).count(), 2);
    assert!(fs::read_to_string(svg).unwrap().contains("scaling efficiency"));
    let question = ["--hosts", "2", "--sizes", "1M"];
    let answer = stdout(&question);
    assert_eq!(answer, stdout(&question), "the same question has the same answer");
    let mut old = Command::new(env!("CARGO_BIN_EXE_drumline"));
    let old = old.arg("simulate").args(question).output().unwrap();
    assert_eq!(String::from_utf8(old.stdout).unwrap(), answer, "under the old name");
}

#[test]
fn what_cannot_be_understood_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cluster.toml");
    fs::write(&file, "hosts = 2\nlatency = 3\n").unwrap();
    let file = file.to_str().unwrap();
    for (args, part) in [
        (&["--cluster", file][..], "cluster.toml: line 2: \"latency\" is no price"),
        (&["--cluster", "/nowhere"], "/nowhere"),
        (&["--hosts", "0"], "1 to 65536 ranks"),
        (&["--hosts", "1000000"], "1 to 65536 ranks"),
        (&["--sizes", "64Q"], "--sizes \"64Q\""),
        (&["--operations", "all_sum"], "one of all_reduce"),
        (&["--dtype", "i3"], "--dtype \"i3\""),
        (&["--bandwidth-gbps", "0"], "--bandwidth-gbps"),
        (&["--latency-us=-1"], "--latency-us"),
        (&["--gradients-mb", "1"], "--backward-ms"),
        (&["--gradients-mb", "nan", "--backward-ms", "1"], "--gradients-mb"),
        (&["--measure", "x", "--hosts", "2"], "cannot be used with"),
    ] {
        let output = predict(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.contains(part), "{args:?}: {error}");
    }
}

/// Prices that are measured here serve as a cluster file, and as prices by which ranks choose.
#[test]
fn measured_prices_are_a_file_of_prices() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prices.toml");
    let file = file.to_str().unwrap();
    assert!(stdout(&["--measure", file, "--measure-ms", "10"]).starts_with("wrote "));
    let prices: drumline::PriceList = fs::read_to_string(file).unwrap().parse().unwrap();
    assert_ne!(prices.near, drumline::PriceList::default().near);
    assert!(prices.call_ps > 0 && prices.memory_byte_fs > 0);
    assert!(stdout(&["--cluster", file, "--hosts", "2", "--sizes", "1M"]).contains("1 MiB"));
}
