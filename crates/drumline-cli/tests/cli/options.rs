//! Options and variables of torchrun, and Python programs, with real processes.

use std::{fs, os::unix::fs::PermissionsExt, process::Command};

use crate::launch::Launch;

const DRUMLINE: &str = env!("CARGO_BIN_EXE_drumline");

#[test]
fn scripts_and_modules_run_under_python_whose_output_is_not_buffered() {
    let program = "import os, sys, time\n\
                   print('got', sys.argv[1])\n\
                   while not os.path.exists('go'): time.sleep(0.005)\n";
    for options in [&["train.py"][..], &["-m", "train"], &["--run-path", "train.py"]] {
        let launch = Launch::new(["--nproc-per-node", "2"].iter().chain(options).chain(&["-x"]));
        let file = |name: &str| launch.directory.path().join(name);
        let (script, go) = (file("train.py"), file("go"));
        fs::write(&script, program).unwrap();
        let mut started = launch.variable("PYTHONDONTWRITEBYTECODE", "1").start();
        started.wait_for("got -x", 2);
        fs::write(&go, "").unwrap();
        assert_eq!(started.wait(), 0, "{options:?}");
        fs::remove_file(script).unwrap();
        fs::remove_file(go).unwrap();
        assert_eq!(started.end().code, 0);
    }
}

#[test]
fn the_chosen_interpreter_gets_the_script() {
    let launch = Launch::new(["train.py", "-x"]);
    let file = |name: &str| launch.directory.path().join(name);
    let (script, python) = (file("train.py"), file("python"));
    fs::write(&script, "").unwrap();
    fs::write(&python, "#!/bin/sh\nrm train.py python\necho \"$@\"\n").unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let python = python.to_str().unwrap().to_owned();
    let ended = launch.variable("PYTHON_EXEC", &python).start().end();
    assert_eq!(
        (ended.code, ended.sorted_stdout()),
        (0, vec!["[0] -u train.py -x"]),
        "{}",
        ended.stderr
    );
}

#[test]
fn variables_give_options_and_the_log_tells_which() {
    let script = ["sh", "-c", "echo $WORLD_SIZE"];
    let launch = Launch::new(script).variable("PET_NPROC_PER_NODE", "3");
    let ended = launch.variable("RUST_LOG", "drumline=info").start().end();
    assert_eq!(ended.sorted_stdout(), ["[0] 3", "[1] 3", "[2] 3"]);
    let told = "options from the environment: PET_NPROC_PER_NODE=3";
    assert!(ended.stderr.contains(told), "{}", ended.stderr);

    let option = ["--nproc-per-node", "2"];
    let launch = Launch::new(option.iter().chain(&script));
    let ended = launch.variable("PET_NPROC_PER_NODE", "3").start().end();
    assert_eq!((ended.sorted_stdout(), &ended.stderr[..]), (vec!["[0] 2", "[1] 2"], ""));

    let launch = Launch::new(["--standalone", "true"]).variable("PET_N_PROC_PER_NODE", "3");
    let ended = launch.variable("PET_NODE_RANK", "1").start().end();
    assert_eq!((ended.code, ended.stderr.lines().count()), (0, 2), "{}", ended.stderr);
    for told in ["is it PET_NPROC_PER_NODE?", "PET_NODE_RANK is left out"] {
        assert!(ended.stderr.contains(told), "{}", ended.stderr);
    }
}

#[test]
fn options_without_a_meaning_are_told_in_one_line() {
    let options =
        ["--monitor-interval", "5", "--start-method=fork", "--rdzv-conf", "read_timeout=5"];
    let ended = Launch::new(options.iter().chain(&["true"])).start().end();
    assert_eq!((ended.code, ended.stderr.lines().count()), (0, 1), "{}", ended.stderr);
    let told =
        "this has no effect here: --monitor-interval, --start-method, read_timeout of --rdzv-conf";
    assert!(ended.stderr.trim_end().ends_with(told), "{}", ended.stderr);
}

/// In a shell that completes by the script.
#[test]
fn a_shell_completes_options() {
    let complete = "source <(\"$0\" run --print-completion bash)\n\
                    COMP_WORDS=(drumline run --rdzv-e) COMP_CWORD=2\n\
                    _drumline drumline --rdzv-e run\n\
                    echo \"${COMPREPLY[@]}\"";
    let output = Command::new("bash").args(["-c", complete, DRUMLINE]).output().unwrap();
    let (said, error) = (String::from_utf8_lossy(&output.stdout), output.stderr);
    assert_eq!(said, "--rdzv-endpoint\n", "{}", String::from_utf8_lossy(&error));
}

#[test]
fn every_command_has_a_page_of_the_manual() {
    for (words, part) in [
        (&["man"][..], "drumline\\-run(1)"),
        (&["man", "run"], "\\-\\-rdzv\\-endpoint"),
        (&["man", "launch"], "\\-\\-use\\-env"),
    ] {
        let output = Command::new(DRUMLINE).args(words).output().unwrap();
        let page = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && page.contains(part), "{words:?}: {page}");
    }
    let output = Command::new(DRUMLINE).args(["man", "rum"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
