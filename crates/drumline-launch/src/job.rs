//! What to run, and how.

use std::{ffi::OsString, num::NonZeroUsize, path::PathBuf};

use drumline::auth::Level;

use crate::{Logs, Restarts, supervisor::Policy};

/// What to run, on how many ranks, and how to end it.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use drumline_launch::Job;
///
/// let ranks = NonZeroUsize::new(2).unwrap();
/// let job = Job { arguments: vec!["--epochs".into(), "3".into()], ..Job::new("./train", ranks) };
/// assert_eq!(job.torch_store, Some(0)); // any free port
/// ```
#[derive(Clone, Debug)]
pub struct Job {
    /// The program, as one would write it in a shell.
    pub program: OsString,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// How many workers to start on this host.
    pub nproc_per_node: NonZeroUsize,
    /// How many hosts the job has.
    pub hosts: Hosts,
    /// Where the hosts meet. `None`: this host is alone.
    pub meeting: Option<Meeting>,
    /// The name of the job, `--rdzv-id`: all its hosts must give the same one. `None`: a fresh random one, for a
    /// job of one host.
    pub run_id: Option<String>,
    /// The name of what the workers do, `ROLE_NAME`.
    pub role: String,
    /// Whether each worker believes that it is the only one of its host: `LOCAL_RANK` is 0, and it sees one
    /// device.
    pub virtual_local_rank: bool,
    /// What is written to files, and what is shown.
    pub logs: Logs,
    /// What happens after a failure.
    pub restarts: Restarts,
    /// The port on 127.0.0.1 of the store for programs that use torch; 0 means a free one. `None`: there is
    /// no such store.
    pub torch_store: Option<u16>,
    /// Whether processes of other users on this host may use that store, too.
    pub torch_store_takes_anyone: bool,
    /// Whether lines of stdout start with their rank. Lines of stderr always do.
    pub labels_stdout: bool,
    /// Whether each worker may use the cores of one memory node only.
    pub binds_to_nodes: bool,
    /// Whether glibc registers no restartable sequences (rseq) in the workers. A `glibc.pthread.rseq` in the
    /// launcher's own `GLIBC_TUNABLES` takes precedence.
    pub disables_rseq: bool,
    /// How connections between ranks are protected: `DRUMLINE_SECURITY` of the workers. `None`: as in the
    /// launcher's own environment.
    pub security: Option<Level>,
    /// How long workers may take to end.
    pub policy: Policy,
    /// The command that runs this program again. With [`KEEP_SUBCOMMAND`](crate::KEEP_SUBCOMMAND) as
    /// its next argument it must call [`keep`](crate::keep()). Empty: the binary of this process.
    pub relaunch: Vec<OsString>,
}

impl Job {
    /// Runs `nproc_per_node` copies of `program`. Everything else has its default.
    pub fn new(program: impl Into<OsString>, nproc_per_node: NonZeroUsize) -> Job {
        Job {
            program: program.into(),
            arguments: Vec::new(),
            nproc_per_node,
            hosts: Hosts::default(),
            meeting: None,
            run_id: None,
            role: "default".into(),
            virtual_local_rank: false,
            logs: Logs::default(),
            restarts: Restarts::default(),
            torch_store: Some(0),
            torch_store_takes_anyone: false,
            labels_stdout: true,
            binds_to_nodes: false,
            disables_rseq: false,
            security: None,
            policy: Policy::default(),
            relaunch: Vec::new(),
        }
    }
}

/// How many hosts a job needs, and how many it may have: `--nnodes MIN:MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hosts {
    /// With fewer hosts the job waits.
    pub min: NonZeroUsize,
    /// Further hosts are spares: they wait until one is lost.
    pub max: NonZeroUsize,
}

impl Default for Hosts {
    fn default() -> Self {
        Hosts { min: NonZeroUsize::MIN, max: NonZeroUsize::MIN }
    }
}

/// Where the hosts of a job meet: `--rdzv-backend` and `--rdzv-endpoint`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// Every host knows its number and the address of the first one.
    Static {
        /// The number of this host.
        node_rank: usize,
        /// The first host: a name or an address.
        host: String,
        /// A port of the first host.
        port: u16,
    },
    /// At the first host: the one that can listen at this address.
    Drumline {
        /// The first host: a name or an address.
        host: String,
        /// A port of the first host.
        port: u16,
    },
    /// In a file that all hosts see.
    File(PathBuf),
    /// In etcd: addresses of its servers, `host:port` or a URL.
    Etcd(Vec<String>),
}
