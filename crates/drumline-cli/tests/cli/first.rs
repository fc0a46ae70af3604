//! What somebody sees who calls the program for the first time, or wrongly.

use std::{
    path::Path,
    process::{Command, Output},
};

use tempfile::TempDir;

const DRUMLINE: &str = env!("CARGO_BIN_EXE_drumline");

fn drumline(directory: &Path, line: &str) -> Output {
    let mut command = Command::new(DRUMLINE);
    for name in ["RANK", "WORLD_SIZE", "RUST_LOG", "DRUMLINE_TRACE"] {
        command.env_remove(name);
    }
    command.args(line.split_whitespace()).current_dir(directory).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn without_arguments_it_shows_three_commands_to_begin_with() {
    let output = drumline(Path::new("/"), "");
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    let commands: Vec<_> = text.lines().filter(|line| line.starts_with("  drumline ")).collect();
    assert_eq!(commands.len(), 3, "{text}");
    for (line, name) in commands.iter().zip(["check", "run", "bench"]) {
        assert!(line.starts_with(&format!("  drumline {name}")), "{text}");
    }
}

#[test]
fn who_forgets_the_subcommand_gets_a_tip() {
    for line in ["train.py", "--nproc-per-node 2 train.py"] {
        let text = stderr(&drumline(Path::new("/"), line));
        assert!(text.ends_with("drumline run --nproc-per-node 2 -- PROGRAM\n"), "{text}");
    }
    let text = stderr(&drumline(Path::new("/"), "run --epochs 3 train.py"));
    assert!(text.contains("--epochs") && text.contains("stand behind it"), "{text}");
    assert!(!stderr(&drumline(Path::new("/"), "check --foo")).contains("PROGRAM"));
}

#[test]
fn explain_prints_the_section_of_that_name_and_knows_all_names() {
    let output = drumline(Path::new("/"), "explain not-a-member");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.starts_with("## not a member\n\n"), "{text}");
    assert!(text.lines().count() > 2 && !text.contains("\n## "), "{text}");

    let output = drumline(Path::new("/"), "explain peer_exitd");
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    assert!(text.contains("foreign-launchers") && text.contains("tip"), "{text}");
}

/// The errors of every command name the next step, and end with the command that explains them.
#[test]
fn errors_end_with_the_command_that_explains_them() {
    let directory = TempDir::new().unwrap();
    let path = directory.path();
    std::fs::write(path.join("train.py"), "").unwrap();
    std::fs::create_dir(path.join("empty")).unwrap();
    for (line, part, section) in [
        ("run trian", "no directory of PATH has it", "program"),
        ("run --no-python train.py", "drumline run -- python3 train.py", "program"),
        ("run --no-python ./train.py", "run `python3` on it", "program"),
        ("run none.py", "seen from /", "program"),
        ("run ./none", "seen from /", "program"),
        ("run --master-port 1 --nproc-per-node 2 -- false", "exited with code 1", "the-launcher"),
        ("trace summary none", "DRUMLINE_TRACE", "traces"),
        ("trace summary empty", "DRUMLINE_TRACE", "traces"),
        ("trace merge none", "DRUMLINE_TRACE", "traces"),
        ("bench --json none/x.json", "cannot write none/x.json", "measuring"),
        ("bench --svg none/x.svg", "cannot write none/x.svg", "measuring"),
    ] {
        let output = drumline(path, line);
        let text = stderr(&output);
        assert!(text.contains(part), "{line}: {text}");
        let lines: Vec<_> =
            text.lines().filter(|line| line.contains("(drumline explain ")).collect();
        assert_eq!(lines.len(), 1, "{line}: {text}");
        assert!(lines[0].ends_with(&format!(" (drumline explain {section})")), "{line}: {text}");
        assert!(output.stdout.is_empty(), "it says so before it works: {line}");
        for nonsense in ["0.0ns", "after 0.0 s"] {
            assert!(!text.contains(nonsense), "{line}: {text}");
        }
    }
}

#[test]
fn wrong_settings_are_named_by_every_command_that_reads_them() {
    for line in ["run true", "check", "bench -e 8"] {
        let mut command = Command::new(DRUMLINE);
        command.args(line.split_whitespace()).env("DRUMLINE_TIMEOUT_S", "soon");
        let text = stderr(&command.output().unwrap());
        assert!(text.starts_with("drumline: DRUMLINE_TIMEOUT_S: \"soon\" should be"), "{text}");
        assert!(text.ends_with(" (drumline explain settings)\n"), "{text}");
    }
}

/// From a directory in which nobody can write, with files elsewhere.
#[test]
fn every_command_works_from_any_directory_and_says_where_it_wrote() {
    let directory = TempDir::new().unwrap();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let root = Path::new("/proc");
    let (json, svg) = (file("speed.json"), file("speed.svg"));
    let trace = file("trace");
    let bench = format!("bench -e 8 --iters 1 --rounds 1 --json {json} --svg {svg}");
    let mut traced = Command::new(DRUMLINE);
    let once = ["bench", "-e", "8", "--iters", "1", "--rounds", "1"];
    let traced =
        traced.args(once).env("DRUMLINE_TRACE", &trace).current_dir(root).output().unwrap();
    assert!(traced.status.success(), "{}", stderr(&traced));
    assert!(stderr(&traced).contains(&format!("traces are in {trace}:")), "{}", stderr(&traced));
    let merged = format!("{trace}/trace.json");
    for (line, written) in [
        ("check".to_owned(), vec![]),
        ("run true".to_owned(), vec![]),
        (bench, vec![&json, &svg]),
        (format!("trace summary {trace}"), vec![]),
        (format!("trace merge {trace}"), vec![&merged]),
    ] {
        let output = drumline(root, &line);
        assert!(output.status.success(), "{line}: {}", stderr(&output));
        let said = String::from_utf8(output.stdout).unwrap();
        for path in written {
            assert!(said.contains(&path[..]) && Path::new(path).exists(), "{line}: {said}");
        }
    }
}

/// On a terminal there is a line that is drawn over, in a pipe there is none.
#[test]
fn bench_shows_its_progress_on_a_terminal_only() {
    let bench = "bench -b 8 -e 64 --rounds 2 --time 60ms";
    let directory = TempDir::new().unwrap();
    let typescript = directory.path().join("typescript");
    let mut terminal = Command::new("script");
    terminal.args(["-qec", &format!("stty cols 100; {DRUMLINE} {bench}")]).arg(&typescript);
    for name in ["RANK", "WORLD_SIZE", "RUST_LOG"] {
        terminal.env_remove(name);
    }
    let output = terminal.env("TERM", "xterm").env("NO_COLOR", "1").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let seen = std::fs::read_to_string(&typescript).unwrap();
    assert!(seen.contains("measuring  1/8 ") && seen.contains("s left"), "{seen}");
    // Of colours there is nothing, by NO_COLOR.
    assert!(!seen.contains("\x1b[3"), "{seen}");
    let piped = drumline(directory.path(), bench);
    assert!(piped.status.success() && piped.stderr.is_empty(), "{}", stderr(&piped));
    assert!(!String::from_utf8(piped.stdout).unwrap().contains("measuring"));
}
