//! The command line.

use std::{ffi::OsString, num::NonZeroUsize, path::PathBuf, thread, time::Duration};

use clap::{Args, Parser, Subcommand};
use drumline::auth::Level;
use drumline_bench::{BenchOptions, PredictOptions};
use drumline_launch::{Job, KEEP_SUBCOMMAND, supervisor::Policy};

/// Synchronous data-parallel training: run it, measure it, find out what went wrong.
#[derive(Debug, Parser)]
#[command(name = "drumline", version, after_help = FIRST)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to begin with.
pub(crate) const FIRST: &str = "\
To begin with:
  drumline check                                        # does everything work on this host?
  drumline run --nproc-per-node 2 -- python train.py    # your program, on two processes
  drumline bench                                        # how fast are collectives here?";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program once per rank on this host
    Run(RunArgs),

    /// Show what every rank did, and when
    #[command(subcommand, after_help = TRACE_HELP)]
    Trace(TraceCommand),

    /// Try every collective over every transport, and describe this host
    #[command(after_help = CHECK_HELP)]
    Check {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },

    /// Time collectives, and verify every result
    Bench {
        #[command(flatten)]
        rseq: Rseq,

        #[command(flatten)]
        options: Box<BenchOptions>,
    },

    /// Predict how long collectives and training take on a cluster that need not be there
    #[command(alias = "simulate")]
    Predict(Box<PredictOptions>),

    #[command(name = KEEP_SUBCOMMAND, hide = true)]
    KeepRanks,
}

const CHECK_HELP: &str = "\
The exit code is 1 if something does not work. The settings in DRUMLINE_* apply as in a program.

Examples:
  drumline check
  DRUMLINE_SHARED_MEMORY=0 drumline check --json        # as JSON, without shared memory";

const TRACE_HELP: &str = "\
A job that is started with DRUMLINE_TRACE=DIR writes DIR/rank-N.json for every rank.

Example:
  DRUMLINE_TRACE=trace drumline run --nproc-per-node 2 -- ./train
  drumline trace summary trace
  drumline trace page trace      # and open trace/trace.html in a browser
  drumline trace merge trace     # and open trace/trace.json at https://ui.perfetto.dev";

const MERGE_HELP: &str = "\
Example:
  drumline trace merge trace -o job.json     # and open job.json at https://ui.perfetto.dev";

const PAGE_HELP: &str = "\
Example:
  drumline trace page trace      # and open trace/trace.html in a browser";

const SUMMARY_HELP: &str = "\
Example:
  drumline trace summary trace";

#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Make one file that shows all ranks below each other
    #[command(after_help = MERGE_HELP)]
    Merge {
        /// The directory with the files of the ranks
        dir: PathBuf,

        /// The file to write [default: trace.json in DIR]
        #[arg(short = 'o', long = "out", value_name = "FILE")]
        out: Option<PathBuf>,
    },

    /// Make one page of HTML that shows all ranks in a browser, without a network
    #[command(after_help = PAGE_HELP)]
    Page {
        /// The directory with the files of the ranks
        dir: PathBuf,

        /// The file to write [default: trace.html in DIR]
        #[arg(short = 'o', long = "out", value_name = "FILE")]
        out: Option<PathBuf>,
    },

    /// Print how long everything took, and which rank the others waited for
    #[command(after_help = SUMMARY_HELP)]
    Summary {
        /// The directory with the files of the ranks
        dir: PathBuf,
    },
}

const RUN_HELP: &str = "\
Each rank gets the environment of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT \
and so on. Several ranks also get OMP_NUM_THREADS=1 if the variable is not set. If a rank fails, the \
others are ended, and its exit code is returned (128 + n after signal n).

--disable-rseq sets glibc.pthread.rseq=0 in the GLIBC_TUNABLES of every rank, unless you have set \
glibc.pthread.rseq there. glibc then registers no restartable sequences, and the kernel switches \
faster between ranks that share cores: short calls take about six per cent less time. With a core for \
each rank it gains nothing. Do not use it if a library of yours, such as an allocator, needs them.

Example:
  drumline run --nproc-per-node 2 -- ./train --epochs 3";

#[derive(Debug, Args)]
#[command(after_help = RUN_HELP)]
pub(crate) struct RunArgs {
    /// How many ranks to start; `auto` or `cpu`: one per usable core
    #[arg(long, alias = "nproc_per_node", value_name = "N", default_value = "1", value_parser = ranks)]
    nproc_per_node: NonZeroUsize,

    /// Port of the store for programs that run torch, on 127.0.0.1; 0: any free port
    #[arg(long, alias = "master_port", value_name = "PORT", default_value_t = 0)]
    master_port: u16,

    /// Host no store for programs that run torch: the job then listens on no TCP port
    #[arg(long, alias = "no_torch_store", conflicts_with = "master_port")]
    no_torch_store: bool,

    /// Who may use that store, over loopback
    #[arg(
        long,
        alias = "torch_store",
        value_name = "WHO",
        default_value = "user",
        conflicts_with = "no_torch_store"
    )]
    torch_store: TorchStore,

    /// How TCP connections between ranks are protected: `auth`, `integrity` or `tls`; unless given, as
    /// DRUMLINE_SECURITY says
    #[arg(long, value_name = "LEVEL")]
    security: Option<Level>,

    /// Time from the failure of a rank until the others are killed
    #[arg(long, alias = "kill_after", value_name = "TIME", default_value = "500ms", value_parser = time)]
    kill_after: Duration,

    /// Time from Ctrl-C or SIGTERM until the ranks are killed
    #[arg(long, alias = "shutdown_timeout", value_name = "TIME", default_value = "30s", value_parser = time)]
    shutdown_timeout: Duration,

    /// Bind every rank to the cores of a memory node, local ranks in blocks, as torchrun does
    #[arg(long, alias = "numa_binding", value_name = "POLICY")]
    numa_binding: Option<NumaBinding>,

    #[command(flatten)]
    rseq: Rseq,

    /// Number of hosts, as for torchrun; only 1 so far
    #[arg(long, value_name = "N", default_value = "1", value_parser = one_node)]
    nnodes: usize,

    /// Accepted as by torchrun; has no effect
    #[arg(long)]
    standalone: bool,

    /// The program of every rank, found as a shell would find it, and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Rseq {
    /// Start the ranks without restartable sequences: see `drumline run --help`
    #[arg(long, alias = "disable_rseq", env = "DRUMLINE_DISABLE_RSEQ", value_parser = switch)]
    pub(crate) disable_rseq: bool,
}

/// `true` and `false` mean that an option is given or not. 0 and 1 are the values of its variable.
fn switch(text: &str) -> Result<bool, String> {
    match text {
        "" | "0" | "false" => Ok(false),
        "1" | "true" => Ok(true),
        _ => Err("DRUMLINE_DISABLE_RSEQ is 0 or 1".into()),
    }
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum TorchStore {
    /// Processes of this user, and of root
    User,
    /// Every process of this host
    Anyone,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum NumaBinding {
    /// Each rank to one node
    Node,
}

impl From<RunArgs> for Job {
    fn from(args: RunArgs) -> Job {
        let RunArgs { kill_after, shutdown_timeout, .. } = args;
        let mut command = args.command.into_iter();
        let program = command.next().unwrap_or_default();
        Job {
            arguments: command.collect(),
            torch_store: (!args.no_torch_store).then_some(args.master_port),
            torch_store_takes_anyone: matches!(args.torch_store, TorchStore::Anyone),
            binds_to_nodes: args.numa_binding.is_some(),
            disables_rseq: args.rseq.disable_rseq,
            security: args.security,
            policy: Policy { kill_after, shutdown_timeout },
            ..Job::new(program, args.nproc_per_node)
        }
    }
}

/// More ranks than this on one host are probably a typing error.
const RANKS_MAX: usize = 4096;

fn ranks(text: &str) -> Result<NonZeroUsize, String> {
    match text {
        "auto" | "cpu" => thread::available_parallelism().map_err(|error| error.to_string()),
        "gpu" | "xpu" => Err("not yet supported; give a number".into()),
        number => match number.parse() {
            Ok(ranks) if ranks <= RANKS_MAX => NonZeroUsize::new(ranks),
            _ => None,
        }
        .ok_or_else(|| format!("give a number from 1 to {RANKS_MAX}, `auto` or `cpu`")),
    }
}

fn one_node(text: &str) -> Result<usize, String> {
    match text {
        "1" | "1:1" => Ok(1),
        _ => Err("training across hosts is not yet supported".into()),
    }
}

/// `500ms`, `1.5s`, `2m`, or seconds without a unit, up to a day.
fn time(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => Some(1e-3),
        "" | "s" => Some(1.0),
        "m" => Some(60.0),
        _ => None,
    };
    let seconds = unit.zip(digits.parse::<f64>().ok()).map(|(unit, number)| unit * number);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|&time| time <= Duration::from_secs(24 * 3600))
        .ok_or_else(|| "give a time like 500ms, 30s or 2m, at most 24 hours".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn job(line: &str) -> Result<Job, String> {
        match Cli::try_parse_from(line.split_whitespace()) {
            Ok(Cli { command: Command::Run(args) }) => Ok(args.into()),
            Ok(other) => Err(format!("{other:?}")),
            Err(error) => {
                assert_eq!(error.exit_code(), 2);
                Err(error.to_string())
            }
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
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

    #[test]
    fn options_end_where_the_program_begins() {
        for line in [
            "drumline run --nproc-per-node 2 --kill-after 2s prog --nproc-per-node 7 -- x",
            "drumline run --standalone --nproc_per_node=2 --kill_after 2 -- prog --nproc-per-node 7 -- x",
        ] {
            let job = job(line).unwrap();
            assert_eq!((job.program.as_os_str(), job.nproc_per_node.get()), ("prog".as_ref(), 2));
            assert_eq!(job.arguments, ["--nproc-per-node", "7", "--", "x"]);
            assert_eq!(job.policy.kill_after, Duration::from_secs(2));
        }
    }

    #[test]
    fn restartable_sequences_are_disabled_only_on_request() {
        assert!(!job("drumline run prog --disable-rseq").unwrap().disables_rseq);
        assert!(job("drumline run --disable-rseq prog").unwrap().disables_rseq);
        for (line, disables) in [("drumline bench", false), ("drumline bench --disable-rseq", true)]
        {
            let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
            let Command::Bench { rseq, .. } = cli.command else { panic!("{line}: {cli:?}") };
            assert_eq!(rseq.disable_rseq, disables, "{line}");
        }
    }

    #[test]
    fn the_security_level_is_the_environments_unless_it_is_given() {
        assert_eq!(job("drumline run prog --security tls").unwrap().security, None);
        let given = job("drumline run --security tls prog").unwrap().security;
        assert_eq!(given, Some(Level::Tls));
    }

    #[test]
    fn simulate_is_the_old_name_of_predict() {
        for line in ["drumline predict --hosts 4", "drumline simulate --hosts 4"] {
            let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
            let Command::Predict(options) = cli.command else { panic!("{line}: {cli:?}") };
            assert_eq!(options.hosts, Some(4), "{line}");
        }
        assert!(!Cli::command().render_help().to_string().contains("simulate"));
    }

    #[test]
    fn bad_usage_is_explained() {
        for (line, part) in [
            ("drumline run", "PROGRAM"),
            ("drumline run --nproc-per-node 0 prog", "from 1 to 4096"),
            ("drumline run --nproc-per-node 1000000 prog", "from 1 to 4096"),
            ("drumline run --nproc-per-node gpu prog", "not yet"),
            ("drumline run --nnodes 2 prog", "not yet"),
            ("drumline run --master-port 65536 prog", "65535"),
            ("drumline run --no-torch-store --master-port 5 prog", "cannot be used with"),
            ("drumline run --kill-after=-1s prog", "30s"),
            ("drumline run --kill-after 2days prog", "30s"),
            ("drumline run --kill-after 1e9 prog", "24 hours"),
            ("drumline run --security none prog", "auth, integrity or tls"),
            ("drumline run --no-such-flag prog", "--no-such-flag"),
            ("drumline run --nproc-per-nod 2 prog --x", "--nproc-per-node"),
        ] {
            let error = job(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn traces_are_named_by_their_directory() {
        let parse = |line: &str| Cli::try_parse_from(line.split_whitespace());
        let out = |line: &str| match parse(line).unwrap().command {
            Command::Trace(TraceCommand::Merge { dir, out }) => (dir, out),
            other => panic!("{other:?}"),
        };
        assert_eq!(out("drumline trace merge dir"), ("dir".into(), None));
        assert_eq!(out("drumline trace merge dir -o x"), ("dir".into(), Some("x".into())));
        assert!(parse("drumline trace merge").unwrap_err().to_string().contains("<DIR>"));
        assert!(parse("drumline trace summary dir").is_ok());
    }

    #[test]
    fn times_have_units() {
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(time("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "ms", "s", "nan", "inf", "-1", "5 s", "5h"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }
}
