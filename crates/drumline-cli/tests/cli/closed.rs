//! What a job of `drumline run` keeps closed: ports, the secret, and connections by the level of security.

use std::{fs, path::Path, thread, time::Duration};

use drumline::{ProcessGroup, ReduceOp, rendezvous::is_launched};
use rustix::process::Signal;

use crate::launch::Launch;

/// The program of the ranks of the tests below: it sums, then waits while the test looks at it. Outside
/// of a job, as a test, it does nothing.
#[test]
fn rank() {
    if !is_launched() {
        return;
    }
    let group = ProcessGroup::from_env().unwrap();
    let mut sum = [group.rank() as i64];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    println!("sum {} listeners {:?}", sum[0], tcp_listeners("self"));
    while !Path::new("go").exists() {
        thread::sleep(Duration::from_millis(5));
    }
    group.destroy().unwrap();
}

/// `drumline run`, with `options`, of three ranks of [`rank`].
fn job(options: &[&str]) -> Launch {
    let program = std::env::current_exe().unwrap();
    let program = [program.to_str().unwrap(), "--exact", "closed::rank", "--nocapture"];
    let common = ["--nproc-per-node", "3"];
    Launch::new(options.iter().copied().chain(common).chain(["--"]).chain(program))
}

#[test]
fn a_job_on_one_host_listens_on_no_tcp_port_but_torchs() {
    for (options, expected) in [(&[][..], 1), (&["--no-torch-store"], 0)] {
        let mut launch = job(options).start();
        launch.wait_for("sum 3 listeners []", 3);
        let listeners = tcp_listeners(&launch.child.id().to_string());
        assert_eq!(listeners.len(), expected, "{listeners:?}");
        // 127.0.0.1, as the kernel shows it.
        assert!(listeners.iter().all(|address| address.starts_with("0100007F:")), "{listeners:?}");
        fs::write(launch.directory.path().join("go"), "").unwrap();
        let code = launch.wait();
        fs::remove_file(launch.directory.path().join("go")).unwrap();
        assert_eq!((code, launch.end().code), (0, 0));
    }
}

#[test]
fn a_secret_of_the_users_is_handed_on() {
    let mut launch = job(&[]).variable("DRUMLINE_SECRET", "chosen-by-the-user-0001").start();
    launch.wait_for("sum 3", 3);
    launch.signal(Signal::TERM);
    assert_eq!(launch.end().code, 128 + 15);

    let ended = job(&[]).variable("DRUMLINE_SECRET", "short").start().end();
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("DRUMLINE_SECRET: a secret of 5 bytes"), "{}", ended.stderr);
}

#[test]
fn the_security_level_is_that_of_the_flag_else_that_of_the_environment() {
    let script = "echo ${DRUMLINE_SECURITY-none}";
    for (options, variable, told) in [
        (&[][..], None, "none"),
        (&[], Some("tls"), "tls"),
        (&["--security", "tls"], None, "tls"),
        (&["--security=auth"], Some("tls"), "auth"),
    ] {
        let mut launch = Launch::new(options.iter().chain(&["sh", "-c", script]));
        if let Some(value) = variable {
            launch = launch.variable("DRUMLINE_SECURITY", value);
        }
        let ended = launch.start().end();
        let expected = format!("[0] {told}");
        assert_eq!(ended.sorted_stdout(), [expected], "{options:?}: {}", ended.stderr);
    }
    let mut launch = job(&["--security", "tls"]).start();
    launch.wait_for("sum 3", 3);
    launch.signal(Signal::TERM);
    assert_eq!(launch.end().code, 128 + 15);
}

#[test]
fn the_secret_is_on_no_command_line_and_in_no_environment() {
    let script = "cat $DRUMLINE_SECRET_FILE; echo; exec sleep 1000";
    let mut launch = Launch::script(2, script);
    launch.wait_for("\n", 2);
    let printed = String::from_utf8(launch.printed.clone()).unwrap();
    let secrets: Vec<&str> = printed.lines().map(|line| &line["[0] ".len()..]).collect();
    assert!(secrets[0].len() == 64 && secrets[0] == secrets[1], "{secrets:?}");
    let secret = secrets[0].as_bytes();

    let marker = launch.marker.as_bytes();
    let contains = |text: &[u8], part: &[u8]| text.windows(part.len()).any(|w| w == part);
    // The launcher and its two workers. While a worker becomes `sleep`, its environment cannot be read.
    let mut looked_at = 0;
    while looked_at < 3 {
        looked_at = 0;
        for process in fs::read_dir("/proc").unwrap().flatten() {
            let read = |name| fs::read(process.path().join(name)).unwrap_or_default();
            let (environment, command_line) = (read("environ"), read("cmdline"));
            if contains(&environment, marker) {
                looked_at += 1;
                assert!(!contains(&environment, secret) && !contains(&command_line, secret));
            }
        }
        assert!(launch.child.try_wait().unwrap().is_none(), "the launcher has ended");
    }
    let other = Launch::script(1, "cat $DRUMLINE_SECRET_FILE").end();
    assert!(!contains(&other.stdout, secret), "every job has a secret of its own");
    launch.signal(Signal::TERM);
    let ended = launch.end();
    assert!(!contains(&ended.stderr_bytes, secret));
}

#[test]
fn a_wrapper_that_closes_descriptors_is_told_of() {
    let program = std::env::current_exe().unwrap();
    let script = format!(
        "n=${{DRUMLINE_SECRET_FILE##*/}}; exec bash -c \"exec $n>&-; exec {} --exact closed::rank\"",
        program.display()
    );
    let ended = Launch::script(1, &script).end();
    assert_ne!(ended.code, 0);
    let told = String::from_utf8_lossy(&ended.stdout).into_owned() + &ended.stderr;
    assert!(told.contains("close_fds=False"), "{told}");
}

/// The addresses on which a process listens for TCP connections, as the kernel writes them.
fn tcp_listeners(pid: &str) -> Vec<String> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let sockets: Vec<String> = descriptors
        .filter_map(|fd| fs::read_link(fd.path()).ok()?.to_str().map(str::to_owned))
        .collect();
    let tables =
        ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")));
    let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
    lines
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_ours = sockets.contains(&format!("socket:[{}]", fields[9]));
            (fields[3] == "0A" && is_ours).then(|| fields[1].to_owned())
        })
        .collect()
}
