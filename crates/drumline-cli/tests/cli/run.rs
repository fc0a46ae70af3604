//! What `drumline run` gives the ranks and takes from them, with real processes.

use std::{
    ffi::{OsStr, OsString},
    fs,
    net::{Ipv4Addr, TcpListener},
    os::unix::ffi::OsStringExt,
    process::Command,
};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::launch::{Launch, eventually};

#[test]
fn every_rank_learns_who_it_is() {
    let script = r#"echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR" \
        "$OMP_NUM_THREADS ${DRUMLINE_TERMINAL_COLUMNS-none} $MASTER_PORT $TORCHELASTIC_RUN_ID""#;
    let ended = Launch::script(3, script).end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    let by_rank = ended.lines_by_rank();
    let last = |rank| by_rank[&rank][0].rsplitn(3, ' ').take(2).collect::<Vec<_>>();
    assert_eq!(last(0)[0].len(), 16, "the run's id");
    assert_ne!(last(0)[1].parse::<u16>().unwrap(), 0, "the port");
    for (rank, lines) in &by_rank {
        assert_eq!(last(*rank), last(0), "one run, one port");
        assert!(lines[0].starts_with(&format!("{rank} {rank} 3 3 127.0.0.1 1 none ")), "{lines:?}");
    }
}

/// Nothing that a launcher has set for a rank counts as a setting of the user in a job that the rank starts, at any depth.
/// Python's subprocess closes the descriptor of the secret, and a shell hands it on.
#[test]
fn a_rank_starts_jobs_of_its_own() {
    let close = "fd=${DRUMLINE_SECRET_FILE##*/}; eval \"exec $fd<&-\"";
    let tell = "echo inner $RANK $WORLD_SIZE $OMP_NUM_THREADS ${DRUMLINE_SECURITY-none} $MINE, \
                $(wc -c <$DRUMLINE_SECRET_FILE)";
    for before in [":", close] {
        let middle = format!(
            "echo middle ${{OMP_NUM_THREADS-none}} $WORLD_SIZE; {before}; \
             exec \"$DRUMLINE\" run --nproc-per-node 3 -- bash -c \"$TELL\""
        );
        let outer = format!(
            "[ $RANK = 1 ] && exit; {before}; exec \"$DRUMLINE\" run -- bash -c \"$MIDDLE\""
        );
        let options = ["--security", "tls", "--nproc-per-node", "2", "--", "bash", "-c", &outer];
        let launch = Launch::new(options)
            .variable("DRUMLINE", env!("CARGO_BIN_EXE_drumline"))
            .variable("MIDDLE", &middle)
            .variable("TELL", tell)
            .variable("MINE", "mine");
        let ended = launch.start().end();
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        let inner =
            [0, 1, 2].map(|rank| format!("[0] [0] [{rank}] inner {rank} 3 1 none mine, 64"));
        let mut expected: Vec<&str> = inner.iter().map(String::as_str).collect();
        expected.push("[0] [0] middle none 1");
        expected.sort_unstable();
        assert_eq!(ended.sorted_stdout(), expected);
    }
}

#[test]
fn restartable_sequences_are_disabled_only_on_request() {
    let script = ["sh", "-c", "echo ${GLIBC_TUNABLES-none}"];
    for (options, variable, told) in [
        (&["--nproc-per-node", "2"][..], None, "none"),
        (&["--nproc-per-node", "2"], Some("0"), "none"),
        (&["--nproc-per-node", "2"], Some(""), "none"),
        (&["--nproc-per-node", "2"], Some("1"), "glibc.pthread.rseq=0"),
        (&["--nproc-per-node", "2", "--disable-rseq"], None, "glibc.pthread.rseq=0"),
    ] {
        let mut launch = Launch::new(options.iter().chain(&script));
        if let Some(value) = variable {
            launch = launch.variable("DRUMLINE_DISABLE_RSEQ", value);
        }
        let ended = launch.start().end();
        let expected = [0, 1].map(|rank| format!("[{rank}] {told}"));
        assert_eq!(ended.sorted_stdout(), expected, "{options:?} {variable:?}: {}", ended.stderr);
    }
    let launch = Launch::new(["true"]).variable("DRUMLINE_DISABLE_RSEQ", "perhaps");
    let ended = launch.start().end();
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("DRUMLINE_DISABLE_RSEQ is 0 or 1"), "{}", ended.stderr);
}

#[test]
fn a_low_soft_limit_of_descriptors_is_raised_to_the_hard_one() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_drumline"), "run"]);
    // 40 ranks have 80 pipes.
    let args = ["--nproc-per-node", "40", "sh", "-c", "echo $(ulimit -Sn) $(ulimit -Hn)"];
    let ended = Launch::new(args).start_as(command).end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    for lines in ended.lines_by_rank().values() {
        let (soft, hard) = lines[0].trim().split_once(' ').unwrap();
        let hard: u64 = hard.parse().unwrap_or(u64::MAX);
        assert_eq!(soft.parse::<u64>().unwrap(), hard.min(512 * 1024), "{lines:?}");
    }
}

/// The secret and the ranks' shared memory lie in memory files. With this setting Linux 6.3 to 6.5 refuse a
/// file that does not ask for the seal, and later ones a file that asks to be executable.
#[test]
fn a_job_runs_where_memory_files_must_not_be_executable() {
    let inside = "echo 2 > /proc/sys/vm/memfd_noexec && exec \"$@\"";
    let drumline = env!("CARGO_BIN_EXE_drumline");
    let namespace = || {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "sh", "-c", inside, "sh"]);
        command
    };
    let can = namespace().arg("true").output().is_ok_and(|output| output.status.success());
    if !can {
        // Also where DRUMLINE_TEST_HOSTS is set: that asks for network namespaces.
        return eprintln!(
            "skipped: this takes root, unshare, and a kernel with vm.memfd_noexec (6.3)"
        );
    }
    let mut command = namespace();
    command.args([drumline, "run"]);
    let bench = [drumline, "bench", "all_reduce", "--sizes", "8", "--rounds", "1"];
    let args = ["--nproc-per-node", "2"].into_iter().chain(bench);
    let ended = Launch::new(args).start_as(command).end();
    // Without shared memory the ranks would say that they use sockets.
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
}

#[test]
fn a_file_of_the_system_that_is_missing_is_blamed_and_not_the_program() {
    let inside = "mount -t tmpfs none /dev && exec \"$@\"";
    let namespace = || {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", inside, "sh"]);
        command
    };
    if !namespace().arg("true").output().is_ok_and(|output| output.status.success()) {
        return eprintln!("skipped: this takes root and unshare");
    }
    let mut command = namespace();
    command.args([env!("CARGO_BIN_EXE_drumline"), "run"]);
    let ended = Launch::new(["--nproc-per-node", "2", "true"]).start_as(command).end();
    assert!(ended.stderr.contains("open /dev/null as the stdin of a worker"), "{}", ended.stderr);
    assert_eq!(ended.code, 2, "another attempt makes no sense");
}

#[test]
fn a_launcher_without_descriptors_blames_their_limit() {
    for limit in 8..40 {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit} && exec \"$@\""), "sh"]);
        command.args([env!("CARGO_BIN_EXE_drumline"), "run"]);
        let ended = Launch::new(["--nproc-per-node", "2", "true"]).start_as(command).end();
        let blames = ended.stderr.contains("(os error 24)");
        let misleads = ended.stderr.contains("not an address of this machine");
        assert!(ended.code == 0 || blames && !misleads, "{limit}: {}", ended.stderr);
    }
}

#[test]
fn the_users_number_of_threads_is_kept() {
    let launch = Launch::new(["--nproc-per-node", "2", "sh", "-c", "echo $OMP_NUM_THREADS"]);
    let ended = launch.variable("OMP_NUM_THREADS", "5").start().end();
    assert_eq!(ended.sorted_stdout(), ["[0] 5", "[1] 5"]);
}

#[test]
fn streams_are_kept_apart_and_every_line_names_its_rank() {
    let ended = Launch::script(2, "echo out; echo; echo err >&2; printf 'no end'").end();
    assert_eq!(ended.code, 0);
    let expected = ["[0] ", "[0] no end", "[0] out", "[1] ", "[1] no end", "[1] out"];
    assert_eq!(ended.sorted_stdout(), expected);
    let mut stderr: Vec<_> = ended.stderr.lines().collect();
    stderr.sort_unstable();
    assert_eq!(stderr, ["[0] err", "[1] err"]);
}

#[test]
fn arguments_arrive_as_they_are() {
    let odd = OsString::from_vec(vec![b'b', 0xff]);
    let mut args: Vec<OsString> =
        ["sh", "-c", "printf '<%s>' \"$0\" \"$@\"", "zero", "", "a  b"].map(Into::into).into();
    args.extend(["--".into(), "--nproc-per-node".into(), odd]);
    let ended = Launch::new(args).start().end();
    assert_eq!(ended.stdout, b"[0] <zero><><a  b><--><--nproc-per-node><b\xff>\n");
}

#[test]
fn stdin_is_empty() {
    let ended = Launch::script(2, "cat; echo done").end();
    assert_eq!(ended.sorted_stdout(), ["[0] done", "[1] done"]);
}

#[test]
fn one_rank_may_have_the_stdin_of_the_launcher() {
    for (options, wanted) in [
        (&["--nproc-per-node", "1"][..], &["[0] hello"][..]),
        (&["--nproc-per-node", "2"], &[]),
        (&["--nproc-per-node", "2", "--stdin", "1"], &["[1] hello"]),
        (&["--nproc-per-node", "1", "--stdin", "none"], &[]),
    ] {
        let mut command = Command::new("sh");
        let pipe = "echo hello | { \"$@\"; }";
        command.args(["-c", pipe, "sh", env!("CARGO_BIN_EXE_drumline"), "run"]);
        let ended = Launch::new(options.iter().chain(&["cat"])).start_as(command).end();
        assert_eq!(ended.code, 0, "{}", ended.stderr);
        assert_eq!(ended.sorted_stdout(), wanted, "{options:?}");
    }
}

/// Runs a command on a terminal, types an answer to the question, and Ctrl-C once all words of its first argument have come.
const TERMINAL: &str = "
import os, pty, signal, sys
questions = [([b'name? '], b'bob\\n'), ([it.encode() for it in sys.argv.pop(1).split()], b'\\x03')]
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who runs the tests may ignore it
    os.execvp(sys.argv[1], sys.argv[1:])
seen = b''
while True:
    try:
        seen += os.read(terminal, 4096)
    except OSError:
        break
    for question in [it for it in questions if all(word in seen for word in it[0])]:
        os.write(terminal, question[1])
        questions.remove(question)
sys.stdout.buffer.write(seen)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
";

/// The rank asks without a line break, reads what is typed, and hears Ctrl-C once. The other one hears it from the launcher.
#[test]
fn the_first_rank_gets_the_terminal() {
    let rank = "
import os, signal, sys, time
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
rank = os.environ['RANK']
name = input('name? ') if rank == '0' else sys.stdin.read()
print('hello', name, flush=True)
print('ready' if rank == '0' else 'waits', flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(1)
print('heard', len(heard), flush=True)
";
    // A rank that has not set its handler yet would end.
    for (ranks, words) in [("1", "ready"), ("2", "ready waits")] {
        let mut command = Command::new("python3");
        command.args(["-c", TERMINAL, words, env!("CARGO_BIN_EXE_drumline"), "run"]);
        command.env("TERM", "xterm");
        let args = ["--nproc-per-node", ranks, "--", "python3", "-c", rank];
        let ended = Launch::new(args).start_as(command).end();
        let seen = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert_eq!(ended.code, 130, "{seen}{}", ended.stderr);
        assert!(seen.contains("name? hello bob"), "{seen}");
        let heard = seen.matches("heard 1").count();
        assert_eq!(heard.to_string(), ranks, "{seen}");
    }
}

#[test]
fn large_and_binary_output_arrives_whole() {
    let data = TempDir::new().unwrap();
    let file = data.path().join("data");
    // Three lines of a megabyte, of all bytes that do not end lines. The last line has no end.
    let line: Vec<u8> = (0..=255u8).filter(|byte| !b"\r\n".contains(byte)).collect();
    let line = line.repeat(4_000);
    let text = [&line[..], &line[..], &line[..]].join(&b'\n');
    fs::write(&file, &text).unwrap();

    let script = format!("cat {0}; echo; cat {0} >&2", file.display());
    let ended = Launch::script(2, &script).end();
    assert_eq!(ended.code, 0);
    for printed in [&ended.stdout, &ended.stderr_bytes] {
        let mut ranks = [Vec::new(), Vec::new()];
        for line in printed.strip_suffix(b"\n").unwrap().split(|&byte| byte == b'\n') {
            let rank = usize::from(line[1] - b'0');
            assert!(line.starts_with(b"[") && line[2] == b']' && b" +".contains(&line[3]));
            if line[3] == b' ' && !ranks[rank].is_empty() {
                ranks[rank].push(b'\n');
            }
            ranks[rank].extend_from_slice(&line[4..]);
        }
        assert!(ranks.iter().all(|rank| *rank == text), "output is lost or mixed");
    }
}

#[test]
fn a_script_without_an_interpreter_runs_as_in_a_shell() {
    let directory = TempDir::new().unwrap();
    let script = directory.path().join("train");
    fs::write(&script, "echo $RANK $1\n").unwrap();
    assert!(Command::new("chmod").arg("+x").arg(&script).status().unwrap().success());
    let ended = Launch::new([script.as_os_str(), "x".as_ref()]).start().end();
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
    assert_eq!(ended.sorted_stdout(), ["[0] 0 x"]);
}

#[test]
fn a_reader_that_goes_away_does_not_stop_the_job() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_drumline"));
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    command.arg("run").args(["sh", "-c", "echo lost; echo lost; echo kept >&2"]).stdout(write);
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("Broken pipe") && stderr.contains("[0] kept"), "{stderr}");
}

#[test]
fn a_program_that_cannot_be_run_is_named_once_before_anything_starts() {
    let directory = TempDir::new().unwrap();
    let script = directory.path().join("train.py");
    fs::write(&script, "").unwrap();
    for (program, code, part) in [
        (OsStr::new("no-such-program"), 127, "no directory of PATH"),
        (OsStr::new("./no/such/program"), 127, "No such file"),
        (script.as_os_str(), 126, "python3"),
        (directory.path().as_os_str(), 126, "directory"),
    ] {
        let options = ["--no-python", "--nproc-per-node", "4"].map(OsStr::new);
        let ended = Launch::new(options.into_iter().chain([program])).start().end();
        assert_eq!(ended.code, code);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        assert!(ended.stderr.contains(part) && ended.stdout.is_empty(), "{}", ended.stderr);
    }
}

#[test]
fn a_missing_interpreter_is_told() {
    let directory = TempDir::new().unwrap();
    let script = directory.path().join("train");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    let chmod = Command::new("chmod").arg("+x").arg(&script).status().unwrap();
    assert!(chmod.success());
    let ended = Launch::new([script.as_os_str()]).start().end();
    assert_eq!(ended.code, 126);
    assert!(ended.stderr.contains("interpreter"), "{}", ended.stderr);
}

#[test]
fn bad_usage_exits_with_2() {
    for args in [vec![], vec!["--nproc-per-node", "0", "true"], vec!["--nnodes", "2", "true"]] {
        let ended = Launch::new(args).start().end();
        assert_eq!(ended.code, 2, "{}", ended.stderr);
    }
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = Launch::new(["--master-port", &port, "true"]).start().end();
    assert_eq!(ended.code, 1, "the port may be free again later");
    assert!(ended.stderr.contains(&format!("port {port} of 127.0.0.1 is in use")));
}

/// The port of another job, which ends a little later.
#[test]
fn a_job_whose_ranks_cannot_start_for_a_while_uses_its_restarts() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let directory = TempDir::new().unwrap();
    let told = directory.path().join("stderr");
    let mut job = Command::new(env!("CARGO_BIN_EXE_drumline"));
    job.args(["run", "--max-restarts", "100000", "--restart-delay", "10ms..10ms"]);
    job.args(["--master-port", &port, "--", "true"]).stderr(fs::File::create(&told).unwrap());
    let mut job = job.spawn().unwrap();
    let why = format!("the ranks cannot start or go on: store tcp://127.0.0.1:{port}: listen");
    eventually("the job tries to start its ranks", || {
        fs::read_to_string(&told).unwrap().contains(&why)
    });
    drop(taken);
    assert!(job.wait().unwrap().success(), "{}", fs::read_to_string(&told).unwrap());
}

/// What a parent leaves so by mistake hurts neither the launcher nor the ranks. `nohup` ignores SIGHUP on purpose.
#[test]
fn inherited_signals_do_no_harm() {
    let mut command = Command::new("env");
    command.args(["--ignore-signal=CHLD", "--ignore-signal=HUP", "--block-signal"]);
    command.args([env!("CARGO_BIN_EXE_drumline"), "run"]);
    let script = "grep -E 'SigBlk|SigIgn' /proc/self/status; exit 7";
    let ended = Launch::new(["--", "sh", "-c", script]).start_as(command).end();
    assert_eq!(ended.code, 7, "{}", ended.stderr);
    let told = String::from_utf8_lossy(&ended.stdout);
    let mask = |name| {
        let text = told.lines().find_map(|line| line.strip_prefix("[0] ")?.strip_prefix(name));
        u64::from_str_radix(text.unwrap().trim(), 16).unwrap()
    };
    let of = |signal: Signal| 1 << (signal.as_raw() - 1);
    assert_eq!(mask("SigBlk:"), 0, "{told}");
    assert_eq!(mask("SigIgn:") & (of(Signal::CHILD) | of(Signal::HUP)), of(Signal::HUP), "{told}");
}
