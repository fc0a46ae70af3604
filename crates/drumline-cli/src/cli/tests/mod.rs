//! From command lines and variables to jobs and errors.

mod refusals;
mod spellings;

use std::{fs, num::NonZeroUsize, path::Path, time::Duration};

use drumline::auth::Level;
use drumline_launch::{
    Etcd, Hosts, Joining, Meeting, NumaBinding, OnSignal, Streams, TorchStore,
    program::ProgramKind, supervisor::Signal,
};
use tempfile::TempDir;

use super::*;

type Variables<'a> = &'a [(&'a str, &'a str)];

/// What `drumline LINE` asks for, on a host with these variables, two cores, and the files below `root`. Errors are
/// the texts that a user sees.
fn asked_on(root: &Path, line: &str, variables: Variables<'_>) -> Result<Asked, String> {
    let words = ["drumline"].into_iter().chain(line.split_whitespace());
    let words: Vec<OsString> = words.map(OsString::from).collect();
    let environment = |name: &str| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
    };
    let host = Host { environment: &environment, root, cores: NonZeroUsize::new(2) };
    let shown = |error: clap::Error| {
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let (command, names) = parse(&words, &pairs(variables), &host).map_err(shown)?;
    let name = if let Command::Launch(_) = &command { "launch" } else { "run" };
    match command.clone().asked(&names, &host) {
        Some(asked) => asked.map_err(|refused| shown(refusal(name, &refused.text))),
        None => Err(format!("{command:?}")),
    }
}

fn pairs(variables: Variables<'_>) -> Vec<(OsString, OsString)> {
    variables.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// Why variables are left out.
fn left_out(line: &str, variables: Variables<'_>) -> Vec<String> {
    let words: Vec<OsString> =
        ["drumline"].into_iter().chain(line.split_whitespace()).map(OsString::from).collect();
    parse(&words, &pairs(variables), &Host::this()).unwrap().1.left_out
}

fn asked(line: &str, variables: Variables<'_>) -> Result<Asked, String> {
    asked_on(Path::new("/nowhere"), line, variables)
}

fn job(line: &str) -> drumline_launch::Job {
    asked(line, &[]).unwrap_or_else(|error| panic!("{line}: {error}")).job
}

fn parsed(line: &str) -> Result<Command, clap::Error> {
    let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    parse(&words, &[], &Host::this()).map(|(command, _)| command)
}

#[test]
fn a_line_becomes_a_job() {
    let line = "run --nproc-per-node 4 --role trainer --virtual-local-rank --max-restarts 3 \
                --restart-delay 2s..9s --reset-restarts-after 10m --log-dir logs -r 1 -t 0-1:3,3:2 --local-ranks-filter 0,2-3 \
                --duplicate-stdout-filters loss,a,,b --duplicate-stderr-filters error \
                --log-line-prefix-template $hostname: --numa-binding core-complex --security tls \
                --torch-store anyone --rdzv-id job7 --signals-to-handle SIGTERM,USR1=end \
                --kill-after 1 --shutdown-timeout 2m -- train --x";
    let Asked { job, kind, ignored } = asked(line, &[]).unwrap();
    assert_eq!(
        (job.program.as_os_str(), &job.arguments[..]),
        ("train".as_ref(), &["--x".into()][..])
    );
    assert_eq!((kind, ignored), (ProgramKind::Named, Vec::new()));
    assert_eq!((job.nproc_per_node.get(), &job.role[..]), (4, "trainer"));
    assert_eq!((job.hosts, job.meeting), (Hosts::default(), None));
    assert_eq!((job.run_id.as_deref(), job.virtual_local_rank), (Some("job7"), true));
    let seconds = Duration::from_secs;
    assert_eq!((job.restarts.max, job.restarts.delay_min), (3, seconds(2)));
    assert_eq!(
        (job.restarts.delay_max, job.restarts.reset_after),
        (seconds(9), Some(seconds(600)))
    );
    assert_eq!(job.logs.dir.as_deref(), Some(Path::new("logs")));
    let (out, err) =
        (Streams { stdout: true, stderr: false }, Streams { stdout: false, stderr: true });
    let both = Streams { stdout: true, stderr: true };
    assert_eq!(job.logs.redirects.default, out);
    assert_eq!(job.logs.tee.ranks, [(0, both), (1, both), (3, err)]);
    assert_eq!(job.logs.shown, [0, 2, 3]);
    assert_eq!(job.logs.stdout_filters, ["loss", "a,b"]);
    assert_eq!(job.logs.stderr_filters, ["error"]);
    assert_eq!(job.logs.prefix.as_deref(), Some("${hostname}:"));
    assert_eq!(job.numa_binding, Some(NumaBinding::CoreComplex));
    assert_eq!(
        (job.security, job.torch_store),
        (Some(Level::Tls), Some(TorchStore::Anyone { port: 0 }))
    );
    assert!(job.labels_stdout);
    assert_eq!((job.policy.kill_after, job.policy.shutdown_timeout), (seconds(1), seconds(120)));
    let on = |signal| job.signals.iter().find(|(it, _)| *it == signal).map(|(_, on)| *on);
    assert_eq!(on(Signal::TERM), Some(OnSignal::EndsJob));
    assert_eq!(on(Signal::INT), Some(OnSignal::EndsJob), "not named, so as ever");
    assert_eq!(on(Signal::USR1), Some(OnSignal::EndsJob));
    assert_eq!(on(Signal::USR2), Some(OnSignal::PassedOn));
    assert_eq!(job.signals.len(), 6);
}

#[test]
fn a_job_without_options_has_the_defaults() {
    let job = job("run train");
    let expected = drumline_launch::Job::new("train", NonZeroUsize::MIN);
    assert_eq!(format!("{job:?}"), format!("{expected:?}"));
}

#[test]
fn programs_have_kinds() {
    for (line, kind) in [
        ("run train.py", ProgramKind::Named),
        ("run -m train", ProgramKind::Module),
        ("run --no-python train.py", ProgramKind::Exact),
        ("run --run-path train", ProgramKind::Script),
    ] {
        assert_eq!(asked(line, &[]).unwrap().kind, kind, "{line}");
    }
}

#[test]
fn options_end_where_the_program_begins() {
    for line in [
        "run --nproc-per-node 2 --kill-after 2s prog --nproc-per-node 7 -- x",
        "run --standalone --nproc_per_node=2 --kill_after 2 -- prog --nproc-per-node 7 -- x",
        "run --nproc 2 --nproc 2 --kill 2 prog --nproc-per-node 7 -- x",
    ] {
        let job = job(line);
        assert_eq!((job.program.as_os_str(), job.nproc_per_node.get()), ("prog".as_ref(), 2));
        assert_eq!(job.arguments, ["--nproc-per-node", "7", "--", "x"]);
        assert_eq!(job.policy.kill_after, Duration::from_secs(2));
    }
}

#[test]
fn launch_passes_the_local_rank_in_front_of_a_scripts_own_arguments() {
    let arguments = |line| asked(line, &[]).map(|asked| asked.job.arguments);
    let rank = "--local-rank=${local_rank}";
    assert_eq!(arguments("launch train.py -x").unwrap(), [rank, "-x"]);
    assert_eq!(arguments("launch -m train -x").unwrap(), [rank, "-x"]);
    assert_eq!(arguments("launch --use-env train.py -x").unwrap(), ["-x"]);
    assert_eq!(arguments("launch --use_env ./train -x").unwrap(), ["-x"]);
    assert_eq!(arguments("run train.py -x").unwrap(), ["-x"]);
    for line in ["launch ./train", "launch --no-python train.py"] {
        let error = arguments(line).unwrap_err();
        assert!(error.contains("write --use-env, or drumline run"), "{line}: {error}");
    }
    assert!(asked("run --use-env x", &[]).is_err());
    let by_variable = asked("launch train.py", &[("PET_USE_ENV", "1")]).unwrap();
    assert!(by_variable.job.arguments.is_empty());
}

#[test]
fn ranks_are_counted() {
    let host = TempDir::new().unwrap();
    fs::create_dir(host.path().join("dev")).unwrap();
    for device in ["nvidia0", "nvidia1", "nvidia2"] {
        fs::write(host.path().join("dev").join(device), "").unwrap();
    }
    let counted = |word: &str, variables: Variables<'_>| {
        let line = format!("run --nproc-per-node {word} x");
        asked_on(host.path(), &line, variables).map(|asked| asked.job.nproc_per_node.get())
    };
    let hidden: Variables<'_> = &[("CUDA_VISIBLE_DEVICES", "")];
    assert_eq!(counted("cpu", &[]), Ok(2));
    assert_eq!([counted("gpu", &[]), counted("auto", &[])], [Ok(3), Ok(3)]);
    assert_eq!(counted("gpu", &[("CUDA_VISIBLE_DEVICES", "2")]), Ok(1));
    assert_eq!(counted("auto", hidden), Ok(2), "cores");
    assert!(counted("gpu", hidden).unwrap_err().contains("this host has no GPU"));
    assert!(counted("xpu", &[]).unwrap_err().contains("no discrete GPU of Intel; give a number"));
}

#[test]
fn hosts_meet_where_the_line_says() {
    let at_first =
        |node_rank, host: &str, port| Meeting::Static { node_rank, host: host.into(), port };
    let drumline = |host: &str, port| Meeting::Drumline { host: host.into(), port };
    let etcd = |servers: &[&str]| {
        let servers = servers.iter().map(|server| (*server).into()).collect();
        Meeting::Etcd(Etcd { servers, ..Etcd::default() })
    };
    for (line, expected) in [
        ("--nnodes 2 --node-rank 1 --master-addr h", at_first(1, "h", 29500)),
        ("--nnodes 2 --node-rank 0 --master-addr h --master-port 5", at_first(0, "h", 5)),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint [::1]:5", at_first(1, "::1", 5)),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint h --master-port 5", at_first(1, "h", 5)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h", drumline("h", 29400)),
        ("--nnodes 1:4 --rdzv-backend drumline --rdzv-endpoint h:5", drumline("h", 5)),
        (
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:5 --master-addr h --master-port 5",
            drumline("h", 5),
        ),
        (
            "--nnodes 2 --rdzv-backend file --rdzv-endpoint /nfs/job",
            Meeting::File("/nfs/job".into()),
        ),
        (
            "--nnodes 2 --rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint /nfs/job",
            Meeting::File("/nfs/job".into()),
        ),
        (
            "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint a,b:1",
            etcd(&["http://a:2379", "http://b:1"]),
        ),
    ] {
        let job = job(&format!("run {line} x"));
        assert_eq!(job.meeting, Some(expected), "{line}");
        assert_eq!((job.run_id.as_deref(), job.torch_store), (Some("none"), store(0)), "{line}");
    }
}

fn store(port: u16) -> Option<TorchStore> {
    Some(TorchStore::User { port })
}

#[test]
fn a_host_that_is_alone_waits_for_nobody() {
    for (line, port) in [
        ("", 0),
        ("--standalone", 0),
        ("--standalone --rdzv-backend c10d --rdzv-endpoint localhost:0", 0),
        ("--nnodes=1:1 --rdzv-backend c10d --rdzv-endpoint host0:29400", 29400),
        ("--nnodes=1 --node_rank=0 --master_addr 127.0.0.1 --master_port 29500", 29500),
        ("--rdzv-endpoint localhost:7", 7),
        ("--rdzv-backend etcd --rdzv-endpoint e", 0),
    ] {
        let job = job(&format!("run {line} x"));
        assert_eq!((job.meeting, job.run_id, job.torch_store), (None, None, store(port)), "{line}");
    }
    assert_eq!(job("run --no-torch-store --rdzv-endpoint localhost:7 x").torch_store, None);
}

#[test]
fn how_a_host_joins_is_said_by_options_or_known_by_schedulers() {
    let line = "run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h --node-rank 1 --local-addr h1 \
                --rdzv-conf join_timeout=60,last_call_timeout=5,is_host=0 x";
    let expected = Joining {
        node_rank: Some(1),
        local_addr: Some("h1".into()),
        is_first: Some(false),
        join_timeout: Duration::from_secs(60),
        last_call: Duration::from_secs(5),
    };
    assert_eq!(job(line).joining, expected);

    let index: Variables<'_> = &[("JOB_COMPLETION_INDEX", "1")];
    let fixed = asked("run --nnodes 2 --master-addr h x", index).unwrap().job;
    let expected = Meeting::Static { node_rank: 1, host: "h".into(), port: 29500 };
    assert_eq!(fixed.meeting, Some(expected));
    let line = "run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h x";
    assert_eq!(asked(line, index).unwrap().job.joining.node_rank, Some(1));
    let line = line.replace("run", "run --node-rank 0");
    assert_eq!(asked(&line, index).unwrap().job.joining.node_rank, Some(0));
    assert_eq!(job("run x").joining, Joining::default());
}

#[test]
fn what_has_no_effect_is_told_if_it_was_given() {
    let ignored = |line: &str, variables| asked(line, variables).unwrap().ignored;
    assert!(ignored("run x", &[]).is_empty());
    let line = "run --start-method spawn --event-log-handler null x";
    assert_eq!(
        ignored(line, &[("PET_MONITOR_INTERVAL", "5")]),
        ["PET_MONITOR_INTERVAL", "--start-method"]
    );
    let line = "run --rdzv-conf is_host=1,read_timeout=9 --local-addr h --master-addr h x";
    assert_eq!(
        ignored(line, &[]),
        ["is_host of --rdzv-conf", "read_timeout of --rdzv-conf", "--local-addr", "--master-addr"]
    );
    let line = "run --nnodes 2 --rdzv-backend etcd --rdzv-endpoint e --rdzv-conf is_host=1,protocol=http x";
    assert_eq!(ignored(line, &[]), ["is_host of --rdzv-conf"]);
}

#[test]
fn restartable_sequences_are_disabled_only_on_request() {
    assert!(!job("run prog --disable-rseq").disables_rseq);
    assert!(job("run --disable-rseq prog").disables_rseq);
    for (line, disables) in [("drumline bench", false), ("drumline bench --disable-rseq", true)] {
        let Command::Bench { rseq, .. } = parsed(line).unwrap() else { panic!("{line}") };
        assert_eq!(rseq.disable_rseq, disables, "{line}");
    }
}

#[test]
fn the_security_level_is_the_environments_unless_it_is_given() {
    assert_eq!(job("run prog --security tls").security, None);
    assert_eq!(job("run --security tls prog").security, Some(Level::Tls));
}

#[test]
fn traces_are_named_by_their_directory() {
    let out = |line: &str| match parsed(line).unwrap() {
        Command::Trace(TraceCommand::Merge { dir, out }) => (dir, out),
        other => panic!("{other:?}"),
    };
    assert_eq!(out("drumline trace merge dir"), ("dir".into(), None));
    assert_eq!(out("drumline trace merge dir -o x"), ("dir".into(), Some("x".into())));
    assert!(parsed("drumline trace merge").unwrap_err().to_string().contains("<DIR>"));
    assert!(parsed("drumline trace summary dir").is_ok());
}
