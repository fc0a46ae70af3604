//! What ranks write, in files and on the console, with real processes.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

use crate::launch::{Ended, FIND_LAUNCHER, Launch};

/// A job of so many shells that run `script`.
fn job(options: &[&str], ranks: usize, script: &str) -> Launch {
    let ranks = ranks.to_string();
    let shell = ["--nproc-per-node", &ranks, "--", "sh", "-c", script];
    Launch::new(options.iter().chain(&shell))
}

fn run(options: &[&str], ranks: usize, script: &str) -> Ended {
    job(options, ranks, script).start().end()
}

/// The files below `directory`, as paths in it, with what they hold.
fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(next) = directories.pop() {
        let entries = fs::read_dir(next).unwrap().map(|entry| entry.unwrap().path());
        let (below, here): (Vec<PathBuf>, Vec<PathBuf>) = entries.partition(|path| path.is_dir());
        directories.extend(below);
        for path in here {
            let name = path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned();
            found.push((name, fs::read(path).unwrap()));
        }
    }
    found.sort();
    found
}

/// The only entry of `directory`.
fn only(directory: &Path) -> PathBuf {
    let entries: Vec<_> = fs::read_dir(directory).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries[0].clone()
}

#[test]
fn files_lie_where_those_of_torchrun_do() {
    let logs = TempDir::new().unwrap();
    let dir = logs.path().join("not/there/yet");
    // Rank 0: both to files. Rank 1: stdout to a file, and shown. Rank 2: both shown.
    let options =
        ["--log-dir", dir.to_str().unwrap(), "-r", "0:3", "-t", "1:1", "--rdzv-id", "exp"];
    let restarts = ["--max-restarts", "1", "--restart-delay", "0"];
    let script = "echo out $RANK; echo err $RANK >&2
        [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
        [ $RANK = 0 ] && exit 5; exec sleep 100";
    let ended = run(&[&options[..], &restarts].concat(), 3, script);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let run = only(&dir);
    assert!(run.file_name().unwrap().to_str().unwrap().starts_with("exp_"), "{run:?}");
    let mut found = files(&run);
    // In the first world a rank may be ended before it has written anything.
    found.retain(|(name, _)| name != "attempt_0/1/stdout.log");
    let of = |name: &str, said: &str| (name.to_owned(), format!("{said}\n").into_bytes());
    let expected = [
        of("attempt_0/0/stderr.log", "err 0"),
        of("attempt_0/0/stdout.log", "out 0"),
        of("attempt_1/0/stderr.log", "err 0"),
        of("attempt_1/0/stdout.log", "out 0"),
        of("attempt_1/1/stdout.log", "out 1"),
    ];
    assert_eq!(found, expected);
    let shown = ended.lines_by_rank();
    assert!(!shown.contains_key(&0), "{shown:?}");
    assert_eq!(shown[&1].last(), Some(&"out 1"));
    assert_eq!(shown[&2].last(), Some(&"out 2"));
    let stderr: Vec<_> = ended.stderr.lines().filter(|line| line.contains("] err ")).collect();
    assert!(stderr.contains(&"[1] err 1") && !stderr.contains(&"[0] err 0"), "{stderr:?}");
    // What is not shown is in the report all the same, which also says where the files are.
    assert!(ended.stderr.contains("\n    err 0\n"), "{}", ended.stderr);
    let place = format!("drumline: logs are in {}", run.display());
    assert_eq!(ended.report().iter().filter(|line| **line == place).count(), 1, "{}", ended.stderr);
}

#[test]
fn a_job_that_writes_no_file_leaves_no_directory() {
    let logs = TempDir::new().unwrap();
    let ended =
        run(&["--log-dir", logs.path().to_str().unwrap()], 2, "echo $TORCHELASTIC_ERROR_FILE");
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    for (rank, lines) in ended.lines_by_rank() {
        assert!(lines[0].starts_with(logs.path().to_str().unwrap()), "{lines:?}");
        assert!(lines[0].ends_with(&format!("/attempt_0/{rank}/error.json")), "{lines:?}");
    }
    assert_eq!(fs::read_dir(logs.path()).unwrap().count(), 0);
}

#[test]
fn without_a_directory_files_go_to_a_new_one_that_is_told() {
    let mut launch = job(&["--tee", "3"], 1, "echo out; echo err >&2").start();
    assert_eq!(launch.wait(), 0);
    let run = only(launch.directory.path());
    assert!(run.file_name().unwrap().to_str().unwrap().starts_with("drumline_"), "{run:?}");
    let names = ["attempt_0/0/stderr.log", "attempt_0/0/stdout.log"].map(str::to_owned);
    assert_eq!(files(&run).into_iter().map(|(name, _)| name).collect::<Vec<_>>(), names);
    fs::remove_dir_all(&run).unwrap();
    let ended = launch.end();
    assert_eq!(ended.report(), [format!("drumline: logs are in {}", run.display())]);
}

#[test]
fn lines_with_some_texts_also_go_to_one_file_of_all_ranks() {
    let logs = TempDir::new().unwrap();
    let dir = logs.path().to_str().unwrap();
    let out = ["--duplicate-stdout-filters", "apple,a,,b"];
    let err = ["--duplicate-stderr-filters", "pear"];
    let prefix = ["--log-line-prefix-template", "[${role_name}${local_rank}]:", "--role", "t"];
    let options = [&["--log-dir", dir][..], &out, &err, &prefix].concat();
    let ended =
        run(&options, 2, "echo an apple; echo pear; echo 1a,b2; echo pear >&2; echo no >&2");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let found = files(&only(logs.path()));
    let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["attempt_0/filtered_stderr.log", "attempt_0/filtered_stdout.log"]);
    let lines = |i: usize| {
        let text = String::from_utf8(found[i].1.clone()).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(lines(0), ["[t0]:pear", "[t1]:pear"]);
    assert_eq!(lines(1), ["[t0]:1a,b2", "[t0]:an apple", "[t1]:1a,b2", "[t1]:an apple"]);
    // All lines are shown.
    assert_eq!(ended.sorted_stdout().len(), 6);
}

#[test]
fn lines_begin_as_the_template_says() {
    let variable = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
    let launch = job(&[], 2, "echo text").variable(variable, "${rank}@${hostname}|${time}|");
    let ended = launch.start().end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for (rank, line) in ended.sorted_stdout().into_iter().enumerate() {
        let parts: Vec<_> = line.split('|').collect();
        assert_eq!((parts[0], parts[2]), (&*format!("{rank}@{host}"), "text"), "{line}");
        assert!(parts[1].len() == 24 && parts[1].ends_with('Z'), "{line}");
    }
}

#[test]
fn only_chosen_ranks_are_shown_and_files_have_all() {
    let logs = TempDir::new().unwrap();
    let dir = ["--log-dir", logs.path().to_str().unwrap(), "--tee", "1"];
    let options = [&dir[..], &["--local-ranks-filter", "1-2"]].concat();
    let ended = run(&options, 4, "echo here; echo there >&2");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(ended.sorted_stdout(), ["[1] here", "[2] here"]);
    let mut stderr: Vec<_> = ended.stderr.lines().collect();
    stderr.sort_unstable();
    assert_eq!(stderr, ["[1] there", "[2] there"]);
    let found = files(&only(logs.path()));
    assert!(found.len() == 4 && found.iter().all(|(_, text)| text == b"here\n"), "{found:?}");
}

#[test]
fn a_file_has_the_bytes_that_its_rank_wrote() {
    let logs = TempDir::new().unwrap();
    let dir = ["--log-dir", logs.path().to_str().unwrap()];
    // Not UTF-8, a zero byte, a progress bar, no end.
    let script = r"printf 'a\377\000\n10%%\r20%%\rdone\r\nno end'; printf '\376' >&2";
    let ended = run(&[&dir[..], &["--tee", "3"]].concat(), 1, script);
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let found: Vec<_> = files(&only(logs.path())).into_iter().map(|(_, bytes)| bytes).collect();
    assert_eq!(found, [&b"\xfe"[..], b"a\xff\0\n10%\r20%\rdone\r\nno end"]);
    assert_eq!(ended.stdout, b"[0] a\xff\0\n[0] done\n[0] no end\n");
    assert_eq!(ended.stderr_bytes, b"[0] \xfe\n");
}

/// 64 MiB, or 1 GiB if `DRUMLINE_SLOW_TESTS` is set, half of it in one line.
#[test]
fn a_rank_that_fills_its_stderr_takes_no_memory_of_the_launcher() {
    let is_long = env::var_os("DRUMLINE_SLOW_TESTS").is_some_and(|it| it == "1");
    let half: u64 = if is_long { 512 << 20 } else { 32 << 20 };
    let shared = TempDir::new().unwrap();
    let done = shared.path().join("done");
    assert!(Command::new("mkfifo").arg(&done).status().unwrap().success());
    let script = format!(
        r#"if [ $RANK = 1 ]; then
            head -c {half} /dev/zero | tr '\0' x >&2
            echo >&2
            yes 'a line' | head -c {half} >&2
            echo > {0}
        else
            yes 'another line' | head -c 8388608 >&2
            cat {0}
            {FIND_LAUNCHER}
            sed -n 's/^VmHWM:[\t ]*\(.*\) kB/peak \1/p' /proc/$launcher/status
        fi"#,
        done.display()
    );
    let ended = run(&["--local-ranks-filter", "0"], 2, &script);
    assert_eq!(ended.code, 0, "{}", &ended.stderr[..ended.stderr.len().min(1000)]);
    assert!(ended.stderr.lines().all(|line| line.starts_with("[0] ")), "rank 1 is shown");
    let lines = ended.lines_by_rank();
    let peak: u64 = lines[&0].last().unwrap().strip_prefix("peak ").unwrap().parse().unwrap();
    println!("peak of the launcher: {peak} KiB");
    assert!(peak < 48 << 10, "the launcher took {peak} KiB");
}

/// A file system of 64 KiB, which only the processes of the test see.
#[test]
fn a_full_disk_is_told_and_the_job_goes_on() {
    let small = TempDir::new().unwrap();
    let inside =
        format!("mount -t tmpfs -o size=64k none {} && exec \"$@\"", small.path().display());
    let namespace = || {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &inside, "sh"]);
        command
    };
    if !namespace().arg("true").output().is_ok_and(|output| output.status.success()) {
        return println!("skipped: nothing can be mounted here");
    }
    let mut command = namespace();
    command.args([env!("CARGO_BIN_EXE_drumline"), "run"]);
    let dir = ["--log-dir", small.path().to_str().unwrap(), "--redirects", "1"];
    let script = "head -c 1000000 /dev/zero; echo done >&2";
    let ended = job(&dir, 2, script).start_as(command).end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(ended.stderr.matches("] done").count(), 2, "{}", ended.stderr);
    let told = ended.report().into_iter().filter(|line| line.starts_with("drumline: "));
    let told: Vec<_> = told.collect();
    assert_eq!(told.len(), 2, "{told:?}");
    for (rank, line) in told.into_iter().enumerate() {
        let end = format!(
            "/attempt_0/{rank}/stdout.log is not complete: No space left on device (os error 28)"
        );
        assert!(line.ends_with(&end), "{line}");
    }
}

#[test]
fn a_limit_of_the_size_of_files_is_told_and_the_job_goes_on() {
    let logs = TempDir::new().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 8; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_drumline"), "run"]);
    let dir = ["--log-dir", logs.path().to_str().unwrap(), "--redirects", "1"];
    let ended = job(&dir, 1, "head -c 1000000 /dev/zero; echo done >&2").start_as(command).end();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let told = "/attempt_0/0/stdout.log is not complete: File too large";
    assert!(ended.stderr.contains("[0] done") && ended.stderr.contains(told), "{}", ended.stderr);
    let found = files(&only(logs.path()));
    assert!(!found[0].1.is_empty() && found[0].1.len() < 100_000, "{}", found[0].1.len());
}

#[test]
fn logs_are_refused_where_no_directory_can_be() {
    let ended = run(&["--log-dir", "/dev/null/logs", "-r", "3"], 1, "echo started");
    assert_eq!((ended.code, ended.stdout.len()), (2, 0), "{}", ended.stderr);
    assert!(ended.stderr.contains("/dev/null/logs (--log-dir)"), "{}", ended.stderr);
}

#[test]
fn five_hundred_ranks_of_one_host_write_and_one_of_them_fails() {
    let script = "echo here; [ $RANK = 300 ] && { echo boom >&2; exit 7; }; exit 0";
    let ended = run(&["--kill-after", "60s"], 512, script);
    assert_eq!(ended.code, 7, "{}", ended.stderr);
    let report = ended.report();
    assert!(report[0].starts_with("drumline: rank 300 (pid "), "{report:?}");
    assert_eq!(report[1..3], ["drumline: last lines of its stderr:", "    boom"]);
}
