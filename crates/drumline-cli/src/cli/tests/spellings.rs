//! Spellings, variables, and what is made of the definition.

use std::time::Duration;

use clap::CommandFactory;

use super::*;

/// All options of torchrun 2.15, each with a value that differs from its default.
const OF_TORCHRUN: [(&str, Option<&str>); 41] = [
    ("nnodes", Some("2:4")),
    ("nproc-per-node", Some("3")),
    ("rdzv-backend", Some("c10d")),
    ("rdzv-endpoint", Some("host0:1234")),
    ("rdzv-id", Some("job7")),
    ("rdzv-conf", Some("join_timeout=9")),
    ("standalone", None),
    ("max-restarts", Some("3")),
    ("monitor-interval", Some("0.5")),
    ("start-method", Some("fork")),
    ("event-log-handler", Some("console")),
    ("role", Some("trainer")),
    ("module", None),
    ("no-python", None),
    ("run-path", None),
    ("log-dir", Some("logs")),
    ("redirects", Some("3")),
    ("tee", Some("0:3")),
    ("log-line-prefix-template", Some("${rank}:")),
    ("local-ranks-filter", Some("0")),
    ("duplicate-stdout-filters", Some("a,b")),
    ("duplicate-stderr-filters", Some("a,b")),
    ("node-rank", Some("0")),
    ("master-addr", Some("host0")),
    ("master-port", Some("1234")),
    ("local-addr", Some("host1")),
    ("logs-specs", Some("default")),
    ("numa-binding", Some("socket")),
    ("signals-to-handle", Some("SIGUSR1=end")),
    ("shutdown-timeout", Some("5")),
    ("virtual-local-rank", None),
    // Ours.
    ("min-ranks", Some("1")),
    ("restart-delay", Some("2s..3s")),
    ("reset-restarts-after", Some("10m")),
    ("kill-after", Some("5")),
    ("step-timeout", Some("5m")),
    ("health-port", Some("8080")),
    ("report", Some("outcome.json")),
    ("stdin", Some("0")),
    ("torch-store", Some("anyone")),
    ("security", Some("tls")),
];

/// Whatever the spelling is, the same comes out, and something else than without the option.
#[test]
fn every_option_has_two_spellings_and_a_variable() {
    let shown = |line: &str, variables: Variables<'_>| {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let parsed = parse(&words, &pairs(variables), &Host::this());
        format!("{:?}", parsed.unwrap_or_else(|error| panic!("{line}: {error}")).0)
    };
    let without = shown("drumline run x", &[]);
    for (option, value) in OF_TORCHRUN {
        let other = option.replace('-', "_");
        let variable = format!("PET_{}", other.to_uppercase());
        let line = |option: &str| match value {
            Some(value) => format!("drumline run --{option} {value} x"),
            None => format!("drumline run --{option} x"),
        };
        let expected = shown(&line(option), &[]);
        assert_ne!(expected, without, "{option}");
        assert_eq!(shown(&line(&other), &[]), expected, "{option}");
        let value = value.unwrap_or("1");
        assert_eq!(shown("drumline run x", &[(&variable, value)]), expected, "{variable}");
        assert_eq!(shown("drumline run x", &[(&variable, "")]), without, "{variable} is empty");
        // The option beats the variable, which is not even looked at.
        assert_eq!(shown(&line(option), &[(&variable, "?")]), expected, "{variable}");
    }
    for (short, long) in [("-r 3", "--redirects 3"), ("-t 1", "--tee 1"), ("-m", "--module")] {
        let line = |option| format!("drumline run {option} x");
        assert_eq!(shown(&line(short), &[]), shown(&line(long), &[]), "{short}");
    }
    for switch in OF_TORCHRUN.iter().filter(|(_, value)| value.is_none()) {
        let variable = format!("PET_{}", switch.0.replace('-', "_").to_uppercase());
        assert_eq!(shown("drumline run x", &[(&variable, "0")]), without, "{variable}");
        let error = asked("run x", &[(&variable, "yes")]).unwrap_err();
        assert!(error.contains(&format!("{variable} is 0 or 1")), "{error}");
    }
}

/// Operators set variables in all containers. Only what they say alone may be impossible, such as several hosts without a
/// place to meet.
#[test]
fn no_variable_stops_what_is_typed() {
    let all = [
        ("no-torch-store", None),
        ("torch-store", Some("user")),
        ("nnodes", Some("1")),
        ("nnodes", Some("2")),
        ("node-rank", Some("3")),
        ("standalone", None),
        ("rdzv-backend", Some("file")),
        ("rdzv-backend", Some("etcd")),
        ("rdzv-endpoint", Some("localhost:5")),
        ("rdzv-endpoint", Some("h")),
        ("rdzv-conf", Some("is_host=1")),
        ("master-addr", Some("h")),
        ("master-port", Some("1")),
        ("tee", Some("7:3")),
        ("module", None),
        ("no-python", None),
        ("run-path", None),
    ];
    let line = |(option, value): &(&str, Option<&str>)| match value {
        Some(value) => format!("run --{option}={value} x"),
        None => format!("run --{option} x"),
    };
    let typed: Vec<String> = all.iter().map(line).filter(|it| asked(it, &[]).is_ok()).collect();
    assert_eq!(typed.len(), all.len() - 3, "{typed:?}");
    for (option, value) in all {
        let variable = format!("PET_{}", option.replace('-', "_").to_uppercase());
        let variables = [(&*variable, value.unwrap_or("1"))];
        // Alone, it is several hosts without a place to meet.
        for typed in typed.iter().filter(|_| (option, value) != ("nnodes", Some("2"))) {
            if let Err(error) = asked(typed, &variables) {
                panic!("{typed}, {variables:?}: {error}");
            }
        }
    }
}

#[test]
fn what_variables_say_in_vain_is_told_and_what_is_typed_counts() {
    let elastic = "run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:5 x";
    let fixed = "run --nnodes 2 --node-rank 0 --master-addr h --master-port 5 x";
    for (line, variables, parts) in [
        ("run --standalone x", &[("PET_NODE_RANK", "1")][..], &["PET_NODE_RANK is left out"][..]),
        ("run --nnodes 1 x", &[("PET_NODE_RANK", "1"), ("PET_NNODES", "2")], &["PET_NODE_RANK"]),
        (
            "run --standalone x",
            &[("PET_NNODES", "2"), ("PET_RDZV_ENDPOINT", "h:5"), ("PET_RDZV_BACKEND", "etcd")],
            &[
                "PET_RDZV_BACKEND is",
                "PET_RDZV_ENDPOINT is",
                "PET_NNODES is left out: --standalone",
            ],
        ),
        (elastic, &[("PET_STANDALONE", "1")], &["PET_STANDALONE is left out"]),
        (elastic, &[("PET_MASTER_PORT", "6")], &["PET_MASTER_PORT differs from --rdzv-endpoint"]),
        (elastic, &[("PET_MASTER_ADDR", "g"), ("PET_MASTER_PORT", "6")], &["_ADDR", "_PORT"]),
        (fixed, &[("PET_RDZV_ENDPOINT", "g:6")], &["PET_RDZV_ENDPOINT is left out"]),
        (
            "run --rdzv-endpoint h:5 x",
            &[("PET_MASTER_PORT", "6")],
            &["PET_MASTER_PORT is left out"],
        ),
        ("run --no-torch-store x", &[("PET_MASTER_PORT", "6")], &["--no-torch-store leaves out"]),
        ("run --master-port 6 x", &[("PET_NO_TORCH_STORE", "1")], &["PET_NO_TORCH_STORE is left"]),
        ("run -m x", &[("PET_NO_PYTHON", "1")], &["PET_NO_PYTHON is left out: --module and"]),
        ("run --nproc-per-node 2 x", &[("PET_TEE", "0:3,4:1")], &["PET_TEE is left out"]),
        ("run --nproc-per-node 2 x", &[("PET_MIN_RANKS", "3")], &["PET_MIN_RANKS is left out"]),
        (
            "run --nnodes 2 --rdzv-backend file --rdzv-endpoint /nfs/job x",
            &[("PET_MASTER_ADDR", "h"), ("PET_MASTER_PORT", "6"), ("PET_NODE_RANK", "1")],
            &["PET_MASTER_ADDR is left out", "PET_MASTER_PORT is left out"],
        ),
        ("run x", &[("PET_N_PROC_PER_NODE", "3")], &["no option; is it PET_NPROC_PER_NODE?"]),
        ("run x", &[("PET_ZZZ", "2"), ("PET_HELP", "1")], &["PET_HELP is", "PET_ZZZ is the"]),
        ("run x", &[("PET_STANDALONE", "1"), ("PET_NNODES", "2")], &["PET_NNODES is left out"]),
    ] {
        let (job, told) = (asked(line, variables).unwrap().job, left_out(line, variables));
        assert_eq!(told.len(), parts.len(), "{line}: {told:?}");
        assert!(told.iter().zip(parts).all(|(it, part)| it.contains(part)), "{line}: {told:?}");
        let typed = asked(line, &[]).unwrap().job;
        assert_eq!((job.hosts, &job.meeting), (typed.hosts, &typed.meeting), "{line}");
        assert_eq!(job.torch_store, typed.torch_store, "{line}");
    }
}

/// Nothing here may be missing above.
#[test]
fn every_option_is_in_the_table_and_on_the_page() {
    let command = definition();
    let run = command.find_subcommand("run").unwrap();
    let page = fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/reference/launcher.md"
    ))
    .unwrap();
    for option in run.get_arguments().filter_map(clap::Arg::get_long) {
        let is_known = OF_TORCHRUN.iter().any(|(known, _)| *known == option);
        let is_alone = ["print-completion", "no-torch-store", "disable-rseq"].contains(&option);
        assert!(is_known || is_alone, "--{option} is not in the table");
        assert!(page.contains(&format!("`--{option}`")), "--{option} is not in launcher.md");
    }
    assert!(page.contains("`--use-env`"));
}

#[test]
fn variables_of_torch_are_heard_where_nothing_else_is_given() {
    let timeout = |line, variables| asked(line, variables).map(|it| it.job.policy.shutdown_timeout);
    let torchs: Variables<'_> = &[("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")];
    let seconds = Duration::from_secs;
    assert_eq!(timeout("run x", &[]), Ok(seconds(30)));
    assert_eq!(timeout("run x", torchs), Ok(seconds(7)));
    assert_eq!(timeout("run --shutdown-timeout 9 x", torchs), Ok(seconds(9)));
    let both: Variables<'_> = &[torchs[0], ("PET_SHUTDOWN_TIMEOUT", "8")];
    assert_eq!(timeout("run x", both), Ok(seconds(8)));
    let error = timeout("run x", &[("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")]).unwrap_err();
    assert!(error.contains("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon: give a time"), "{error}");

    let torchs: Variables<'_> = &[("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "$rank ")];
    let prefix = |line| asked(line, torchs).unwrap().job.logs.prefix;
    assert_eq!(prefix("run x").as_deref(), Some("${rank} "));
    assert_eq!(prefix("run --log-line-prefix-template ${time} x").as_deref(), Some("${time}"));
    let error = asked("run x", &[("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${rnak}")]);
    let error = error.unwrap_err();
    assert!(error.contains("TEMPLATE=${rnak}: there is no ${rnak}; is it ${rank}?"), "{error}");
}

#[test]
fn completion_and_pages_are_made_of_the_definition() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let script = completion(shell);
        assert!(script.contains("rdzv-endpoint") && script.contains("drumline"), "{shell}");
    }
    let page = manual(Some("run")).unwrap().unwrap();
    assert!(page.starts_with(".ie") && page.contains("rdzv\\-endpoint"), "{page}");
    assert!(manual(None).unwrap().unwrap().contains("drumline"));
    assert_eq!(manual(Some("rum")).unwrap(), None);
    for line in ["drumline run --print-completion bash", "drumline launch --print_completion zsh"] {
        let shell = match parsed(line).unwrap() {
            Command::Run(args) => args.completion(),
            Command::Launch(args) => args.completion(),
            other => panic!("{other:?}"),
        };
        assert!(shell.is_some(), "{line}");
    }
}

#[test]
fn the_definition_is_consistent() {
    definition().debug_assert();
}

#[test]
fn every_command_has_an_example() {
    fn check(name: &str, command: &mut clap::Command) {
        let help = command.render_long_help().to_string();
        let is_example = |line: &str| line.starts_with("  ") && line.contains(name);
        assert!(help.lines().any(is_example), "{name}:\n{help}");
        // `help` is clap's own.
        let shown = |it: &&mut clap::Command| !it.is_hide_set() && it.get_name() != "help";
        for below in command.get_subcommands_mut().filter(shown) {
            check(&format!("{name} {}", below.get_name()), below);
        }
    }
    check("drumline", &mut Cli::command());
}
